# limit: 240
# also: rdma
# The daemon is killed and started again under verified load: the host waits, and no I/O fails.
nacre_only "the kernel's target has no process to kill"
serve 256
connect_and_find "$NQN" --reconnect-delay=1 --ctrl-loss-tmo=120 --keep-alive-tmo=5
fio_verify "$DEV" killed --rw=randrw --bsrange=4k-64k --iodepth=32 --size=192M --time_based --runtime=28 --verify_backlog=256 &
load=$!
for round in 1 2 3; do
    sleep 4
    step "kill -9, round $round"
    nacre_kill
    sleep 2
    nacre_start
    wait_until 30 is_live "$CTRL"
done
wait $load
expect "the size" "$(size_mib "$DEV")" 256
ns_uuid=$(cat "/sys/block/$(basename "$DEV")/uuid")

step "namespace identity after a last restart"
nacre_kill
nacre_start
wait_until 30 is_live "$CTRL"
expect "the UUID" "$(cat "/sys/block/$(basename "$DEV")/uuid")" "$ns_uuid"
expect "namespaces" "$(rpc nvmf_get_subsystems | jq --arg nqn "$NQN" '[.[] | select(.nqn == $nqn) | .namespaces[]] | length')" 1
nacre_stop
