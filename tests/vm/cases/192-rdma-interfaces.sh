# limit: 600
# Two interfaces, one with RDMA: each listener has the transports that its interface supports. TCP
# excluded in favour of RDMA is neither announced to hosts nor usable.
nacre_only "its listeners choose by interface"
rdma_up
ip link add nacretcp type dummy
ip link set nacretcp up
ip address add 10.9.7.1/24 dev nacretcp
trap 'ip link delete nacretcp 2>/dev/null || true' EXIT
config_serving malloc 16MiB <<END
[[nvmf.listener]]
name = "both"
iface = ["ip:$ADDR", "name:nacretcp"]
rdma = "prefer"

[[nvmf.listener]]
name = "only"
iface = ["rdma:$RDMA_DEV"]
port = 4430
rdma = "prefer"
tcp_fallback = false
END
target_start --config "$WORK/nacre.toml"
stands() { # stands IP PORT KIND ACTUAL
    [ "$(rpc nvmf_get_listeners | jq -r --arg ip "$1" --arg port "$2" --arg kind "$3" '.listeners[] |
        select(.address.traddr == $ip and .address.trsvcid == $port and .address.trtype == $kind) | .actual')" = "$4" ]
}
wait_until 60 stands "$ADDR" 4420 RDMA listening
wait_until 20 stands "$ADDR" 4420 TCP listening
wait_until 20 stands 10.9.7.1 4420 RDMA absent
wait_until 20 stands 10.9.7.1 4420 TCP listening
wait_until 20 stands "$ADDR" 4430 RDMA listening

step "the discovery log's entry of each"
nvme discover -t tcp -a 10.9.7.1 -s 4420 -o json >"$WORK/log.json"
transports() { jq -r --arg nqn "$NQN" --arg ip "$1" --arg port "$2" '[.records[] | select(.subnqn == $nqn and .traddr == $ip and .trsvcid == $port) | .trtype] | sort | join(",")' "$WORK/log.json"; }
expect "of $ADDR" "$(transports "$ADDR" 4420)" rdma,tcp
expect "of 10.9.7.1" "$(transports 10.9.7.1 4420)" tcp
expect "of port 4430" "$(transports "$ADDR" 4430)" rdma

step "each reported path works, and the withheld one does not"
connect_and_find "$NQN" --nr-io-queues=1
dd if=/dev/urandom of="$DEV" bs=64k count=4 oflag=direct status=none
disconnect "$NQN"
TRTYPE=tcp ADDR=10.9.7.1 connect_and_find "$NQN" --nr-io-queues=1
dd if="$DEV" of=/dev/null bs=64k count=4 iflag=direct status=none
disconnect "$NQN"
PORT=4430 connect_and_find "$NQN" --nr-io-queues=1
disconnect "$NQN"
export TRTYPE=tcp PORT=4430
expect_failure connect "$NQN" --nr-io-queues=1
grep -q "tcp_fallback" "$DAEMON_LOG" || die "the daemon does not say why"
nacre_stop
