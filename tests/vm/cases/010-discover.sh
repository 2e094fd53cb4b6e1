# also: rdma
# The discovery log lists the subsystem with its address, on the data port.
serve 64
log=$(nvme discover -t "$TRTYPE" -a "$ADDR" -s "$PORT" --hostnqn="$HOST_A" --hostid="$HOST_A_ID" -o json)
echo "$log"
entry=$(echo "$log" | jq -e --arg nqn "$NQN" '[.records[] | select(.subnqn == $nqn)] | if length == 1 then .[0] else error("not one record") end')
expect trtype "$(echo "$entry" | jq -r .trtype)" "$TRTYPE"
expect traddr "$(echo "$entry" | jq -r .traddr)" "$ADDR"
expect trsvcid "$(echo "$entry" | jq -r .trsvcid)" "$PORT"
expect adrfam "$(echo "$entry" | jq -r .adrfam)" ipv4

step "the generation counter changes with the log, and only then"
generation() { nvme discover -t "$TRTYPE" -a "$ADDR" -s "$PORT" -o json | jq .genctr; }
first=$(generation)
expect "generation" "$(generation)" "$first"
subsystem_create "$NQN-second" any
[ "$(generation)" -gt "$first" ] || die "the generation did not move"
