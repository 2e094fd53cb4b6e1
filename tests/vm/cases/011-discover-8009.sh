# also: rdma
# The discovery service answers on its own well-known port as well.
nacre_only "nvmet has no listener of its own on 8009"
serve 64
nvme discover -t "$TRTYPE" -a "$ADDR" -s 8009 -o json | jq -e --arg nqn "$NQN" 'any(.records[]; .subnqn == $nqn)'

step "a restarted daemon begins beyond the generations of the former one"
generation() { nvme discover -t "$TRTYPE" -a "$ADDR" -s 8009 -o json | jq .genctr; }
before=$(generation)
nacre_kill
nacre_start
[ "$(generation)" -gt "$before" ] || die "the generation is not beyond $before"
