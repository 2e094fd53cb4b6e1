# limit: 600
# The target over RDMA: soft-RoCE is added while the daemon runs, the stock host connects, every
# kind of data is verified, and the device is removed and added again.
nacre_only "its listeners follow devices"
rdma_up
rdma link delete "$RDMA_DEV"

config_serving malloc 64MiB <<END
[[nvmf.listener]]
name = "data"
iface = ["name:$RDMA_LINK"]
rdma = "prefer"
END
standing() { rpc nvmf_get_listeners | jq -r --arg ip "$1" --arg kind "$2" '.listeners[] | select(.address.traddr == $ip and .address.trtype == $kind) | "\(.actual) \(.reason // "")"'; }
stands() { [ "$(standing "$1" "$2")" = "$3" ]; }

step "an interface without RDMA has a TCP listener, and the reason"
target_start --config "$WORK/nacre.toml"
rpc nvmf_get_listeners
wait_until 20 stands "$ADDR" TCP "listening "
expect "RDMA on $ADDR" "$(standing "$ADDR" RDMA)" "absent no_rdma_dev"

step "soft-RoCE is added: the RDMA listener starts without a command"
rxe_add
for ip in "$ADDR" fd00:9:8::1; do
    wait_until 30 stands "$ip" RDMA "listening "
done
rpc nvmf_get_transports '{"trtype":"RDMA"}'
warned() { grep -q "rdma.software: rxe: functional, not fast" "$DAEMON_LOG"; }
wait_until 30 warned

step "the discovery log has both"
nvme discover -t rdma -a "$ADDR" -s "$PORT" --hostnqn="$HOST_A" --hostid="$HOST_A_ID" -o json | tee "$WORK/log.json"
jq -e --arg nqn "$NQN" --arg ip "$ADDR" '[.records[] | select(.subnqn == $nqn and .traddr == $ip) | .trtype] | sort == ["rdma", "tcp"]' "$WORK/log.json"

step "the stock host, small and large and mixed blocks"
connect_and_find "$NQN"
expect "transport" "$(cat /sys/class/nvme/"$CTRL"/transport)" rdma
dd if=/dev/urandom of="$WORK/sent" bs=1M count=4 status=none
dd if="$WORK/sent" of="$DEV" bs=1M oflag=direct status=none
dd if="$DEV" of="$WORK/came" bs=1M count=4 iflag=direct status=none
cmp "$WORK/sent" "$WORK/came"
# In-capsule data and larger, of one segment and of many.
fio_verify "$DEV" in-capsule --rw=randwrite --bsrange=512-4k --size=1m --iodepth=16
fio_verify "$DEV" large --rw=randwrite --bs=128k --size=8m --iodepth=8
fio_verify "$DEV" mixed --rw=randrw --bsrange=4k-256k --size=6m --iodepth=16
disconnect "$NQN"

step "over IPv6 too"
ADDR=fd00:9:8::1 connect_and_find "$NQN"
fio_verify "$DEV" six --rw=randrw --bs=4k --size=1m --iodepth=4
disconnect "$NQN"

step "the device is deleted under a connection: the daemon releases it, and TCP stays"
connect_and_find "$NQN" --ctrl-loss-tmo=1 --reconnect-delay=1
timeout 60 rdma link delete "$RDMA_DEV"
[ ! -e "/sys/class/infiniband/$RDMA_DEV" ] || die "$RDMA_DEV is still there"
wait_until 20 stands "$ADDR" RDMA "absent no_rdma_dev"
expect "TCP on $ADDR" "$(standing "$ADDR" TCP)" "listening "
lost() {
    rpc events_get '{"categories":["transport"]}' |
        jq -e --arg device "$RDMA_DEV" 'any(.events[]; .type == "rdma_device_lost" and .facts.device == $device)'
}
wait_until 30 lost
wait_until 60 gone "$NQN"
TRTYPE=tcp connect_and_find "$NQN"
fio_verify "$DEV" tcp --rw=randwrite --bs=4k --size=2m --iodepth=8
disconnect "$NQN"

step "the device returns, and hosts connect again"
rxe_add
wait_until 30 stands "$ADDR" RDMA "listening "
connect_and_find "$NQN"
fio_verify "$DEV" again --rw=randwrite --bs=4k --size=2m --iodepth=8
disconnect "$NQN"
nacre_stop
