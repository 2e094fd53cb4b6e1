# also: rdma
# A persistent discovery controller stays connected and gets an event after a change.
serve 64
trace=/sys/kernel/tracing
echo 0 >$trace/tracing_on && echo >$trace/trace
echo 1 >$trace/events/nvme/nvme_async_event/enable
echo 1 >$trace/tracing_on
nvme discover --persistent --keep-alive-tmo=5 -t "$TRTYPE" -a "$ADDR" -s "$PORT" --hostnqn="$HOST_A" --hostid="$HOST_A_ID"
ctrl=$(ctrl_of "$(discovery_nqn)")
[ -n "$ctrl" ] || die "no discovery controller stayed"
wait_until 10 is_live "$ctrl"

step "a new subsystem is announced (discovery log page change, F0h)"
subsystem_create "$NQN-new" any
wait_until 15 grep -qE "$ctrl: NVME_AEN=0x70f002" $trace/trace
nvme discover -d "$ctrl" -t "$TRTYPE" -a "$ADDR" -s "$PORT" --hostnqn="$HOST_A" --hostid="$HOST_A_ID" -o json |
    jq -e --arg nqn "$NQN-new" 'any(.records[]; .subnqn == $nqn)'

step "after the log page is read, the next change is announced again"
echo >$trace/trace
subsystem_delete "$NQN-new"
wait_until 15 grep -qE "$ctrl: NVME_AEN=0x70f002" $trace/trace

step "the connection outlives its keep-alive time"
sleep 8
is_live "$ctrl"
echo 0 >$trace/events/nvme/nvme_async_event/enable
