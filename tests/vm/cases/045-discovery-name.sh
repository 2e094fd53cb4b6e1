# limit: 500
# The discovery service has a unique name beside the well-known one, and a stock host uses it: to
# discover, to connect to all, to stay connected, to receive change events through udev's rule, and
# to reconnect after a restart of the target.
nacre_only "nvmet has one only where it is set"
serve 64
unique=$(discovery_nqn)
[ "$unique" != $DISCOVERY_NQN ] || die "there is no unique name"
to=(-t "$TRTYPE" -a "$ADDR" -s "$PORT" --hostnqn="$HOST_A" --hostid="$HOST_A_ID")
no_discovery_controllers() { [ -z "$(ctrl_of "$unique")$(ctrl_of $DISCOVERY_NQN)" ]; }

step "both names lead to one log, whose entries of its own have the unique one"
for name in $DISCOVERY_NQN "$unique"; do
    log=$(nvme discover "${to[@]}" -n "$name" -o json)
    echo "$log" | jq -e --arg own "$unique" --arg nqn "$NQN" '
        ([.records[] | select(.subtype == "current discovery subsystem").subnqn] | length > 0 and all(. == $own)) and
        any(.records[]; .subnqn == $nqn and .subtype == "nvme subsystem")'
    wait_until 30 no_discovery_controllers
done

step "connect-all connects every subsystem, and not the discovery service"
nvme connect-all "${to[@]}"
wait_until 30 ns_dev "$NQN" 1
wait_until 30 no_discovery_controllers
disconnect "$NQN"

step "persistent discovery is by the unique name"
trace=/sys/kernel/tracing
echo 0 >$trace/tracing_on && echo >$trace/trace
echo 1 >$trace/events/nvme/nvme_async_event/enable
echo 1 >$trace/tracing_on
nvme discover --persistent --keep-alive-tmo=5 --reconnect-delay=1 "${to[@]}"
ctrl=$(ctrl_of "$unique")
[ -n "$ctrl" ] || die "no discovery controller stayed"
wait_until 10 is_live "$ctrl"
holds "/sys/class/nvme/$ctrl/cntrltype" discovery || die "the kernel takes it for another controller"
expect "controllers by the well-known name" "$(ctrl_of $DISCOVERY_NQN)" ""

step "a change is announced, and the command of udev's rule connects the new subsystem"
subsystem_create "$NQN-new" any
ns_add "$NQN-new" 1 16
wait_until 15 grep -qE "$ctrl: NVME_AEN=0x70f002" $trace/trace
on_change() {
    nvme connect-all --quiet --device="$ctrl" --transport="$TRTYPE" --traddr="$ADDR" --trsvcid="$PORT" \
        --host-traddr=none --host-iface=none --hostnqn="$HOST_A" --hostid="$HOST_A_ID"
}
on_change
wait_until 30 ns_dev "$NQN" 1
wait_until 30 ns_dev "$NQN-new" 1
expect "controllers of the discovery service" "$(ctrl_of "$unique")" "$ctrl"
on_change
expect "controllers of what was connected already" "$(ctrl_of "$NQN-new" | wc -l)" 1

step "the name outlives the daemon, and the host reconnects by it"
nacre_kill
wait_until 60 not_live "$ctrl"
nacre_start
expect "the name" "$(discovery_nqn)" "$unique"
wait_until 60 is_live "$ctrl"
echo >$trace/trace
subsystem_delete "$NQN-new"
wait_until 15 grep -qE "$ctrl: NVME_AEN=0x70f002" $trace/trace
echo 0 >$trace/events/nvme/nvme_async_event/enable
nvme disconnect -n "$unique"
wait_until 30 no_discovery_controllers

step "without a unique name the well-known one is used again, everywhere"
rpc nvmf_discovery_set_nqn "{\"nqn\":\"$DISCOVERY_NQN\"}"
nvme discover --persistent --keep-alive-tmo=5 "${to[@]}"
ctrl=$(ctrl_of $DISCOVERY_NQN)
[ -n "$ctrl" ] || die "no discovery controller stayed"
expect_failure nvme discover "${to[@]}" --force -n "$unique"
