# limit: 900
# A volume published by `nacre volume publish` over RDMA and TCP: the host uses RDMA first, moves to
# TCP when RDMA is taken out of use or its device is removed, and returns, under verified load,
# without an I/O error. `nacre test failover` and `nacre test copy` see the same.
nacre_only "published volumes"
[ "$(cat /sys/module/nvme_core/parameters/multipath 2>/dev/null)" = Y ] || skip "this kernel has no native multipath"
# Commands in flight over a transport when its state changed.
allow_errors '^(Read|Write|Flush) of namespace 1: Asymmetric Access (Inaccessible|Transition)'
rdma_up
target_start
VOLUME_NQN=nqn.2025-01.io.nacre:vol
"$NACRE" bdev create malloc ram --size 32MiB --socket "$SOCK"
"$NACRE" volume create vol ram --socket "$SOCK"

step "the connect lines are printed, TCP first, and the host connects by them in that order"
"$NACRE" volume publish vol --allow-any-host --listen "tcp://$ADDR:$PORT" --listen "rdma://$ADDR:$PORT" \
    --socket "$SOCK" | tee "$WORK/lines"
expect "the lines" "$(sed 1d "$WORK/lines")" "nvme connect -t tcp -a $ADDR -s $PORT -n $VOLUME_NQN
nvme connect -t rdma -a $ADDR -s $PORT -n $VOLUME_NQN"
"$NACRE" listener list --socket "$SOCK"
sed 1d "$WORK/lines" | while read -r line; do
    # shellcheck disable=SC2086
    $line --hostnqn="$HOST_A" --hostid="$HOST_A_ID" --nr-io-queues=1 --reconnect-delay=1 --ctrl-loss-tmo=120
done
paths_of "$VOLUME_NQN"
wait_until 90 has_state rdma optimized
wait_until 90 has_state tcp non-optimized
wait_until 90 ns_dev "$VOLUME_NQN" 1
DEV=$(ns_dev "$VOLUME_NQN" 1)

fio --name=verify --filename="$DEV" --rw=randwrite --bs=4k --iodepth=8 --ioengine=libaio --direct=1 --size=4m \
    "${FIO_VERIFIED[@]}" --rate_iops=,100 --verify_backlog=128 --time_based --runtime=240 --output="$WORK/fio.log" &
load=$!
carries() { # carries TRANSPORT OTHER: I/O goes over the one, and none over the other
    local before=$(($(ios "$1") + 100)) other
    wait_until 90 grows "$1" "$before"
    other=$(ios "$2")
    wait_until 90 grows "$1" $((before + 100))
    expect "I/O over $2" "$(ios "$2")" "$other"
}
step "RDMA carries the load, although TCP was connected first"
carries rdma tcp

step "set-ana takes RDMA out of use, and puts it back"
"$NACRE" listener set-ana "$VOLUME_NQN" "rdma://$ADDR:$PORT" inaccessible --socket "$SOCK"
wait_until 90 has_state rdma inaccessible
carries tcp rdma
"$NACRE" listener set-ana "$VOLUME_NQN" "rdma://$ADDR:$PORT" optimized --socket "$SOCK"
wait_until 90 has_state rdma optimized
carries rdma tcp

step "a failover test: the host moves and returns, and so does the test's own I/O"
# Its own part of the volume: the host's load uses the first 4 MiB.
"$NACRE" test failover vol --listener "rdma://$ADDR:$PORT" --to tcp --for 15s --around 5s --settle 5s \
    --max-pause 15s --rate 100 --overwrite --offset 16MiB --range 512KiB --connect-timeout 60s --json \
    --socket "$SOCK" >"$WORK/failover.json" || { cat "$WORK/failover.json"; die "the failover test failed"; }
jq -c '.phases[], .hosts[], .contents, .warnings' "$WORK/failover.json"
jq -e --arg host "$HOST_A" '.failures == [] and .writes and .contents.units_wrong == 0 and .contents.units_written > 128
    and .phases[1].paths[.withdrawn_path].ios < 200 and (.phases[1].paths | map(.ios) | add) > 300
    and .phases[2].paths[.withdrawn_path].ios > 100
    and any(.hosts[]; .hostnqn == $host and .behaviour == "moved" and .returned)' "$WORK/failover.json"
wait_until 90 has_state rdma optimized
carries rdma tcp

step "a failover test that is killed: the command for it restores the state"
"$NACRE" test failover vol --listener "rdma://$ADDR:$PORT" --for 10m --around 1s --range 64KiB --connect-timeout 60s \
    --quiet --socket "$SOCK" &
tester=$!
wait_until 90 has_state rdma inaccessible
kill -9 "$tester"
wait "$tester" || true
"$NACRE" test failover vol --listener "rdma://$ADDR:$PORT" --restore --socket "$SOCK"
wait_until 90 has_state rdma optimized
carries rdma tcp

step "a copy test: every path writes, and every path reads it back"
"$NACRE" test copy vol --overwrite --offset 16MiB --range 1MiB --depth 4 --connect-timeout 60s --json \
    --socket "$SOCK" >"$WORK/copy.json" || { cat "$WORK/copy.json"; die "the copy test failed"; }
jq -c '.paths[]' "$WORK/copy.json"
jq -e '.failures == [] and ([.paths[].transport] | sort) == ["rdma", "tcp"] and .report.contents.units_wrong == 0
    and all(.paths[]; .served_ios > 0)' "$WORK/copy.json"

step "the device goes away: the host continues over TCP"
tcp=$(ios tcp)
rdma link delete "$RDMA_DEV"
wait_until 90 none_over rdma
wait_until 90 grows tcp $((tcp + 100))

step "the device returns: the host connects again over RDMA"
rdma_listens() { rpc nvmf_get_listeners | jq -e '.listeners[] | select(.address.trtype == "RDMA" and .actual == "listening")'; }
rxe_add
wait_until 90 rdma_listens
said=$("$NACRE" connect "$ADDR" -n "$VOLUME_NQN" --hostnqn "$HOST_A" --hostid "$HOST_A_ID" --nr-io-queues 1 \
    --cm-timeout 60s)
echo "$said"
[[ $said == *"nvme discover -t rdma"*"nvme connect -t rdma"*"nvme connect -t tcp"* ]] || die "it does not connect every path"
[[ $said == *"connected over rdma"*"already connected over tcp"* ]] || die "it does not report both paths"
wait_until 90 has_state rdma optimized
carries rdma tcp

kill -INT "$load"
wait "$load" || true
if ! grep -q 'err= 0' "$WORK/fio.log"; then
    cat "$WORK/fio.log"
    die "fio met an error"
fi
disconnect "$VOLUME_NQN"
nacre_stop
