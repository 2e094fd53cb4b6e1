# limit: 300
# `nacre connect`: over RDMA or TCP depending on the route to the target, with the commands it runs
# and the causes of failures.
nacre_only "its own command"
serve 64
cleanup_rdma() { ip link del nacrerdma >/dev/null 2>&1 || true; }
trap cleanup_rdma EXIT

step "no RDMA on the path: TCP, and the reason"
said=$("$NACRE" connect "$ADDR" -n "$NQN" --cm-timeout 60s)
echo "$said"
[[ $said == *"no RDMA from here to the target: no_rdma_dev"* ]] || die "it does not say why"
[[ $said == *"nvme connect -t tcp -a $ADDR -s $PORT -n $NQN"* ]] || die "it does not print what it runs"
[[ $said == *"connected over tcp"* ]] || die "it does not say how"
wait_until 20 ns_dev "$NQN" 1

step "an existing connection is no failure"
"$NACRE" connect "$ADDR" -n "$NQN" --transport tcp --cm-timeout 60s | grep -x "already connected over tcp"
disconnect "$NQN"

step "soft-RoCE on the path, and a target that has only TCP: the log lists TCP alone"
modprobe -a dummy rdma_rxe
ip link add nacrerdma type dummy
ip link set nacrerdma address 02:00:00:00:07:02 up
ip address add 10.78.0.1/24 dev nacrerdma
"$NACRE" rdma rxe add rxe7 --netdev nacrerdma
"$NACRE" rdma devices -v --json | jq -e '.[0].limits | .max_qp > 0 and .max_cqe > 0 and .max_mr_size > 0'
expect max_qp "$("$NACRE" rdma devices -v --json | jq '.[0].limits.max_qp')" \
    "$(ibv_devinfo -v -d rxe7 | sed -n 's/.*max_qp:[^0-9]*\([0-9]*\).*/\1/p')"
"$NACRE" rdma size --hosts 2 --queues 2 --device rxe7 | grep -E '^queue pairs +6 +[0-9]+ +yes$'
rpc nvmf_subsystem_add_listener \
    "{\"nqn\":\"$NQN\",\"listen_address\":{\"trtype\":\"tcp\",\"adrfam\":\"ipv4\",\"traddr\":\"10.78.0.1\",\"trsvcid\":\"$PORT\"}}"
said=$("$NACRE" connect 10.78.0.1 -n "$NQN" --retries 1 --cm-timeout 60s)
echo "$said"
[[ $said == *"nvme discover -t rdma"*"nvme discover -t tcp"*"connected over tcp"* ]] || die "it did not use TCP"
[[ $said != *"nvme connect -t rdma"* ]] || die "it tried a path that the log does not have"
wait_until 20 ns_dev "$NQN" 1
disconnect "$NQN"

step "a missing subsystem: one attempt, and a hint where to look"
expect_failure "$NACRE" connect 10.78.0.1 -n "$NQN.nosuch" --cm-timeout 60s
[[ $FAILURE == *"remedy: \`nacre discover 10.78.0.1:$PORT\`"* ]] || die "it does not say where to look"
expect "attempts" "$(grep -c "^nvme connect" <<<"$FAILURE")" 1

step "the check finds that this kernel can connect"
"$NACRE" initiator check "$ADDR:$PORT" | grep -E "init.fabrics_device: .*is there"

step "without a fallback the connection fails, with the remedy"
expect_failure "$NACRE" connect 10.78.0.1 -n "$NQN" --fallback none --retries 1 --cm-timeout 60s
[[ $FAILURE == *"keep the fallback (\`--fallback tcp\`), or move the users of the volume to a host with RDMA"* ]] ||
    die "it does not say what to do"
expect "controllers" "$(ctrl_of "$NQN" | wc -l)" 0
"$NACRE" rdma rxe del rxe7
