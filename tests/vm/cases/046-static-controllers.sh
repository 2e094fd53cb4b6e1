# A subsystem with static controllers refuses a stock host at once. Nacre's own host gets the
# controller that it requests, also after a restart. The dynamic subsystem beside it is not
# affected.
nacre_only "nvmet has dynamic controllers only"
serve 64
static=$NQN-static
uri=tcp://$ADDR:$PORT/$static
rpc bdev_malloc_create '{"name":"fixed","num_blocks":8192,"block_size":512}'
"$NACRE" subsystem create "$static" --socket "$SOCK" --allow-any-host --namespace fixed --listen "tcp://$ADDR:$PORT" \
    --controller-model static --cntlids 3-5

step "the kernel requests a dynamic controller, is refused, and does not retry"
dmesg -C
expect_failure connect "$static"
dmesg | grep "Connect Invalid Data Parameter, cntlid: 65535"
expect "controllers" "$(ctrl_of "$static")" ""

step "the discovery log shows it, and connect-all connects the reachable subsystems"
"$NACRE" discover "tcp://$ADDR:$PORT" --json |
    jq -e --arg static "$static" 'all(.records[]; .cntlid == (if .subnqn == $static then 65534 else 65535 end))'
nvme connect-all -t "$TRTYPE" -a "$ADDR" -s "$PORT" --hostnqn="$HOST_A" --hostid="$HOST_A_ID" || true
wait_until 20 ns_dev "$NQN" 1
expect "controllers" "$(ctrl_of "$static")" ""

step "a host that asks for a static controller"
cntlid() { "$NACRE" identify controller "$uri" --json "$@" | jq .cntlid; }
expect "the controller" "$(cntlid --cntlid 4)" 4
any=$(cntlid --cntlid any)
expect "any, again" "$(cntlid --cntlid any)" "$any"
expect_failure "$NACRE" identify controller "$uri"
[[ $FAILURE == *"--cntlid any"* ]] || die "it does not say what to do"
expect_failure "$NACRE" identify controller "$uri" --cntlid 6
"$NACRE" perf "$uri" --cntlid 5 --rw randwrite --verify --ios 200 --quiet

step "the same after a restart"
nacre_kill
nacre_start
expect "any, again" "$(cntlid --cntlid any)" "$any"
expect "the model" "$(rpc nvmf_get_subsystems "{\"nqn\":\"$static\"}" | jq -r '.[0].controller_model')" static
wait_until 60 is_live "$(ctrl_of "$NQN")"
