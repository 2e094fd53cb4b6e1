# limit: 1200
# Nacre as a host over RDMA: every byte verified over soft-RoCE. It falls back to TCP when the
# device is removed under I/O, and returns to RDMA with the device; no I/O fails. Without a fallback
# it fails with the text of the missing part.
nacre_only "its own host"
rdma_up
target_start
subsystem_create "$NQN" any
rpc nvmf_subsystem_add_listener \
    "{\"nqn\":\"$NQN\",\"listen_address\":{\"trtype\":\"tcp\",\"adrfam\":\"ipv4\",\"traddr\":\"$ADDR\",\"trsvcid\":\"$PORT\"}}"
rpc bdev_malloc_create '{"name":"disk","num_blocks":65536,"block_size":512}'
rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"nsid\":1,\"bdev_name\":\"disk\"}}"

# The machine may be emulated, so waits are long.
patient=(--connect-timeout 60s --cm-timeout 30s --keep-alive 120s)
# As an array, so that a background process is the command itself and gets its signals.
perf=("$NACRE" perf -n "$NQN" "${patient[@]}" --io-timeout 120s --loss-timeout 300s --range 1m --queues 2 --json)
# The transport of each queue, including the admin queue.
queues_by() {
    local there
    there=$(rpc nvmf_subsystem_get_qpairs "{\"nqn\":\"$NQN\"}" | jq -r '[.[].listen_address.trtype] | sort | join(" ")')
    [ "$there" = "$1 $1 $1" ]
}

step "discovery over RDMA"
"$NACRE" discover -t rdma -a "$ADDR" -s "$PORT" "${patient[@]}" --json | tee "$WORK/log.json"
jq -e --arg nqn "$NQN" '[.records[] | select(.subnqn == $nqn) | .trtype] | sort == ["rdma", "tcp"]' "$WORK/log.json"
"$NACRE" identify list "rdma://$ADDR:$PORT/$NQN" "${patient[@]}" --json | jq -e '.[0].blocks == 65536'

step "every byte, over RDMA only"
for size in "--size 512 --depth 8" "--size 4k --depth 8" "--size 64k --depth 4" "--io-size-range 512-32k --depth 8"; do
    # shellcheck disable=SC2086
    "${perf[@]}" -t rdma -a "$ADDR" -s "$PORT" --rw randrw --verify --ios 200 $size >"$WORK/perf.json"
    jq -c '{size, iops, paths, errors, verification}' "$WORK/perf.json"
    jq -e '.paths.transport == "rdma" and .paths.fallbacks == 0 and .connections_lost == 0' "$WORK/perf.json"
    jq -e '.errors == {} and .unfinished == 0 and .verification.blocks_wrong == 0 and .verification.blocks_checked > 0' "$WORK/perf.json"
done

step "RDMA is chosen where the path has it; the device goes away during I/O"
"${perf[@]}" "auto://$ADDR:$PORT" --rw randrw --verify --size 4k --depth 8 --seconds 3600 --reprobe 2s --reprobe-max 4s \
    >"$WORK/moved.json" 2>"$WORK/moved.log" </dev/null &
perf_pid=$!
trap 'cat "$WORK/moved.log"' EXIT
wait_until 60 queues_by RDMA
# The kernel deletes the link once host and daemon have released it.
timeout 60 rdma link delete "$RDMA_DEV"
[ ! -e "/sys/class/infiniband/$RDMA_DEV" ] || die "$RDMA_DEV is still there"
wait_until 120 queues_by TCP

step "the device returns, and the host uses RDMA again"
rxe_add
wait_until 120 queues_by RDMA

step "once more, and the end of the test"
timeout 60 rdma link delete "$RDMA_DEV"
wait_until 120 queues_by TCP
rxe_add
wait_until 120 queues_by RDMA
kill -INT "$perf_pid"
status=0
wait "$perf_pid" || status=$?
jq -c '{read: .read.ios, write: .write.ios, paths, connections_lost, resent, errors, unfinished, verification}' "$WORK/moved.json"
expect "the exit status of perf" $status 0
jq -e '.errors == {} and .unfinished == 0 and .verification.blocks_wrong == 0 and .verification.blocks_checked > 0' "$WORK/moved.json"
jq -e '.paths.transport == "rdma" and .paths.fallbacks >= 2 and .paths.returns >= 2' "$WORK/moved.json"
jq -e '.paths.fallback_cause != null' "$WORK/moved.json"

step "every reader finds the data that the host wrote"
"${perf[@]}" "tcp://$ADDR:$PORT" --verify-only --size 4k >"$WORK/left.json"
jq -e '.errors == {} and .verification.blocks_wrong == 0 and .verification.blocks_checked == 2048' "$WORK/left.json"

step "no device: the text says so"
timeout 60 rdma link delete "$RDMA_DEV"
expect_failure "${perf[@]}" -t rdma -a "$ADDR" -s "$PORT" --retries 1 --ios 10
[[ $FAILURE == *"No RDMA devices found: "*"--fallback tcp allows TCP"* ]] || die "not the text"
"${perf[@]}" "auto://$ADDR:$PORT" --ios 10 | jq -e '.paths.transport == "tcp" and (.paths.fallback_cause | contains("no_rdma_dev"))'

rxe_add
step "no listener over RDMA: without a fallback a failure with the remedy, with one TCP"
rpc nvmf_subsystem_remove_listener \
    "{\"nqn\":\"$NQN\",\"listen_address\":{\"trtype\":\"rdma\",\"adrfam\":\"ipv4\",\"traddr\":\"$ADDR\",\"trsvcid\":\"$PORT\"}}"
expect_failure "${perf[@]}" -t rdma -a "$ADDR" -s "$PORT" --retries 2 --ios 10
[[ $FAILURE == *"2 attempts failed"* || $FAILURE == *"1 attempt failed"* ]] || die "it does not say how often it tried"
"${perf[@]}" -t rdma --fallback tcp -a "$ADDR" -s "$PORT" --ios 10 | jq -e '.paths.transport == "tcp" and .paths.fallbacks == 1'
nacre_stop
