# also: rdma
# A host that is not on the list is refused, a listed one is admitted, and the list can change.
target_start
subsystem_create "$NQN" listed
ns_add "$NQN" 1 32
host_allow "$NQN" "$HOST_B"

step "host A is not allowed"
expect_failure connect "$NQN" --hostnqn="$HOST_A" --hostid="$HOST_A_ID"
expect "controllers" "$(ctrl_of "$NQN" | wc -l)" 0

step "the refused host does not see the subsystem in its discovery log"
nvme discover -t "$TRTYPE" -a "$ADDR" -s "$PORT" --hostnqn="$HOST_A" --hostid="$HOST_A_ID" -o json |
    jq -e --arg nqn "$NQN" 'all((.records // [])[]; .subnqn != $nqn)'

step "host B is allowed"
connect "$NQN" --hostnqn="$HOST_B" --hostid="$HOST_B_ID"
wait_until 20 ns_dev "$NQN" 1
disconnect "$NQN"

step "host A is allowed"
host_allow "$NQN" "$HOST_A"
connect_and_find "$NQN"
