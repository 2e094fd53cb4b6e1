# limit: 600
# A host with multipath uses RDMA, falls back to TCP when the device is removed, and returns to RDMA
# with it: under verified load, without an I/O error.
nacre_only "ANA states by transport"
[ "$(cat /sys/module/nvme_core/parameters/multipath 2>/dev/null)" = Y ] || skip "this kernel has no native multipath"
rdma_up
config_serving malloc 32MiB <<END
[[nvmf.listener]]
name = "data"
iface = ["ip:$ADDR"]
rdma = "prefer"
END
target_start --config "$WORK/nacre.toml"
standing() { rpc nvmf_get_listeners | jq -r --arg kind "$1" '.listeners[] | select(.address.trtype == $kind) | .actual'; }
stands() { [ "$(standing "$1")" = "$2" ]; }
wait_until 60 stands RDMA listening
expect TCP "$(standing TCP)" listening

paths_of "$NQN"
for kind in rdma tcp; do TRTYPE=$kind connect "$NQN" --nr-io-queues=1 --reconnect-delay=1 --ctrl-loss-tmo=120; done
wait_until 90 has_state rdma optimized
wait_until 90 has_state tcp non-optimized
wait_until 90 ns_dev "$NQN" 1
DEV=$(ns_dev "$NQN" 1)

load_start "$DEV" 4m --rw=randwrite --bsrange=4k-4k --iodepth=8 --verify_backlog=128
step "RDMA carries the load"
before=$(ios rdma) tcp=$(ios tcp)
wait_until 90 grows rdma $((before + 100))
expect "I/O over TCP" "$(ios tcp)" "$tcp"

step "the device goes away: the host continues over TCP"
rdma link delete "$RDMA_DEV"
wait_until 90 none_over rdma
wait_until 90 grows tcp $((tcp + 100))
wait_until 90 stands RDMA absent

step "the device returns: the host connects again over RDMA"
rxe_add
wait_until 90 stands RDMA listening
connect "$NQN" --nr-io-queues=1
wait_until 90 has_state rdma optimized
before=$(ios rdma)
wait_until 90 grows rdma $((before + 100))
tcp=$(ios tcp)
wait_until 90 grows rdma $((before + 300))
expect_at_most "I/O over TCP meanwhile" $(($(ios tcp) - tcp)) 8

step "no I/O failed"
load_goes_on
load_end
nvme disconnect -n "$NQN"
wait_until 90 gone "$NQN"
nacre_stop
