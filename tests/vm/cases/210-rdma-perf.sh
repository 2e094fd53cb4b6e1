# limit: 600
# `nacre rdma perf` over soft-RoCE: every operation and mode with every byte compared, by address,
# interface and device, over IPv4 and IPv6; a short `nacre rdma soak`.
nacre_only "its own commands"
LOG=$WORK/perf-server.json
SERVER=
SOAK=()
cleanup_rdma() {
    [ -z "$SERVER" ] || kill -9 "$SERVER" 2>/dev/null || true
    [ ${#SOAK[@]} = 0 ] || kill -9 "${SOAK[@]}" 2>/dev/null || true
    "$NACRE" rdma rxe del rxe8 >/dev/null 2>&1 || true
    ip link del nacreperf >/dev/null 2>&1 || true
}
trap cleanup_rdma EXIT
perf() { timeout 120 "$NACRE" rdma perf "$@"; }
client() { perf client "$@" --cm-timeout 60s --wait 60s; }
# A busy emulated machine answers late; tests of silence itself use a shorter limit.
patient() { client "$@" --peer-timeout 60s; }
server_start() { # server_start OPTIONS…: in the background, with its events in $LOG
    : >"$LOG"
    "$NACRE" rdma perf server --json "$@" >"$LOG" 2>"$LOG.err" </dev/null &
    SERVER=$!
    wait_until 60 grep -q '"event":"listening"' "$LOG"
}
server_ends() { # server_ends STATUS: it ended without a signal, or after one
    local status=0
    wait_until 60 gone_process "$SERVER"
    wait "$SERVER" || status=$?
    SERVER=
    expect "the server's exit status" $status "$1"
}
gone_process() { # no more than a zombie is left
    local state
    { read -r state <"/proc/$1/status"; } 2>/dev/null || return 0
    grep -q '^State:.Z' "/proc/$1/status"
}
events() { grep -c "\"event\":\"$1\"" "$LOG" || true; }
has_events() { [ "$(events "$1")" -ge "$2" ]; } # has_events WHAT COUNT
failures() { grep '"event":"ended"' "$LOG" | grep -c '"error":' || true; }

# See 200-rdma-verbs.sh: loaded after rdma_cm, ib_uverbs would delay the removal of a device.
modprobe ib_uverbs
modprobe -a dummy rdma_rxe rdma_ucm

step "without a device"
expect_failure perf server
[[ $FAILURE == *"No RDMA devices found: "* ]] || die "not the reason"
expect_failure client 10.79.0.1
[[ $FAILURE == *"No RDMA devices found: "* ]] || die "not the reason"

ip link add nacreperf type dummy
ip link set nacreperf address 02:00:00:00:08:01 mtu 4200 up
ip address add 10.79.0.1/24 dev nacreperf
ip address add fd79::1/64 dev nacreperf nodad
"$NACRE" rdma rxe add rxe8 --netdev nacreperf
for ip in 10.79.0.1 fd79::1; do
    wait_until 30 bash -c "'$NACRE' rdma gids rxe8 --json | jq -e 'any(.[]; .ip == \"$ip\" and .used)'"
done

step "every operation and measure, every byte compared"
server_start
for op in send write read; do
    for measure in --bw --lat; do
        report=$(patient 10.79.0.1 --op $op $measure --size 1,65,16384 -n 24 --depth 8 --queue-pairs 2 --verify --json)
        echo "$report" | jq -c '[.op, .measure, .depth, (.results[] | [.size, .gigabytes_per_second, .latency_ns.median])]'
        echo "$report" | jq -e --arg op $op '.op == $op and .verify and .device == "rxe8" and .local == "10.79.0.1"
            and .software and .gid_type == "RoCE v2" and ([.results[].size] == [1, 65, 16384])
            and all(.results[]; .messages == 24 and .gigabytes_per_second > 0 and .messages_per_second > 0
                and .latency_ns.median > 0 and .latency_ns.median <= .latency_ns.p99
                and .latency_ns.p99 <= .latency_ns.p999 and .latency_ns.p999 <= .latency_ns.max)'
    done
done
wait_until 30 has_events ended 6
expect "sessions that failed" "$(failures)" 0
grep '"event":"ended"' "$LOG" | jq -e -s 'all(.[]; .messages == 3 * 40)'

step "the table, by interface and device, over IPv6, by time"
patient 10.79.0.1 --source name:nacreperf -n 50 --sweep 512-2k | tee "$WORK/table"
grep -E '^2048 +50 +[0-9.]+ +[0-9]+ ' "$WORK/table" || die "not a table"
patient fd79::1 --source rdma:rxe8/1 --op read -n 50 | grep -F 'fd79::1 by rxe8/1, GID'
patient 10.79.0.1 --op write --duration 2 --json | jq -e '.results[0].seconds >= 2'

kill -INT $SERVER
server_ends 0

step "a soak test: two peers, incast, both directions, bursts"
for port in 18600 18610; do
    "$NACRE" rdma soak server --json --listen "10.79.0.1,$port" >"$WORK/soak-$port" 2>&1 </dev/null &
    SOAK+=($!)
    wait_until 60 bash -c "[ \$(grep -c '\"event\":\"listening\"' '$WORK/soak-$port') = 2 ]"
done
timeout 240 "$NACRE" rdma soak client --peers 10.79.0.1:18600,10.79.0.1:18610 --for 9s --size 4k --depth 4 \
    --cm-timeout 60s --peer-timeout 60s --silence 60s --report "$WORK/soak.txt" --json >"$WORK/soak.json" ||
    { cat "$WORK/soak.json" "$WORK"/soak-*; die "the soak test failed"; }
cat "$WORK/soak.txt"
jq -e '.failures == [] and .software and .verify and .ports == ["rxe8/1"]
    and ([.flows[].phase] | unique) == ["alone", "both", "bursts", "incast"]
    and (.flows | length) == 12 and all(.flows[]; .bytes > 0 and .p99_ns > 0 and .error == null)
    and (.seconds | length) >= 5 and any(.seconds[]; .bytes_in > 0 and .bytes_out > 0)' "$WORK/soak.json"
tail -1 "$WORK/soak.txt" | grep -E '^passed'
kill -INT "${SOAK[@]}"
for pid in "${SOAK[@]}"; do wait "$pid" || die "a peer of the soak test failed"; done

step "nacre bench: TCP beside soft-RoCE, with a daemon of its own"
timeout 300 "$NACRE" bench --size 32MiB --rounds 1 --seconds 1 --connect-timeout 60s --line "random read, depth 1" \
    --line "128 KiB random write" --json "$WORK/bench.json" --html "$WORK/bench.html" | tee "$WORK/table"
jq -c '[.sides[] | [.name, .setting, .description]]' "$WORK/bench.json"
jq -e '[.sides[].name] == ["device", "tcp", "rdma"] and .sides[2].setting == "software_rdma" and (.lines | length) == 2
    and all(.lines[].results[].median; .iops > 0 and .host_cpu_seconds_per_gib > 0)
    and all(.lines[].ratios[] | select(.side == "rdma"); .to == "tcp" and .throughput > 0 and .emulated)' "$WORK/bench.json"
grep -F "no RDMA hardware with a network: says nothing about it" "$WORK/table"
