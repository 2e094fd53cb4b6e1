# limit: 600
# also: rdma
# A hundred connects and disconnects leave nothing behind: no descriptor, memory, buffer or
# controller. Unless at length, fewer; over RDMA each takes longer.
rounds=40
if at_length; then rounds=100; fi
[ "$TRTYPE" != rdma ] || rounds=$((rounds / 2))
serve 32
round() {
    connect "$NQN" --nr-io-queues=2 >/dev/null
    wait_until 20 ns_dev "$NQN" 1
    # An explicit read, in addition to the partition scan.
    head -c 65536 "$(ns_dev "$NQN" 1)" >/dev/null
    disconnect "$NQN" >/dev/null
}
fds() { ls "/proc/$(daemon_pid)/fd" | wc -l; }
rss_kib() { awk '/^VmRSS:/ {print $2}' "/proc/$(daemon_pid)/status"; }
controllers() { rpc nvmf_subsystem_get_controllers "{\"nqn\":\"$NQN\"}" | jq length; }
no_controllers() { [ "$(controllers)" = 0 ]; }
# The number of free buffers, by reactor and size.
free_slots() { rpc iobuf_get_stats | jq -c '[.[] | .small_pool.free, .large_pool.free]'; }
fds_back() { [ "$(fds)" -le "$fds_before" ]; }

for _ in $(seq 5); do round; done
if [ "$TARGET" = nacre ]; then
    wait_until 20 no_controllers
    sleep 1
    fds_before=$(fds) rss_before=$(rss_kib) slots_before=$(free_slots)
    echo "before: $fds_before descriptors, $rss_before KiB, buffers $slots_before"
fi
for i in $(seq "$rounds"); do
    round
    [ $((i % 10)) -ne 0 ] || echo "$i rounds after $SECONDS s"
done
if [ "$TARGET" = nacre ]; then
    wait_until 20 no_controllers
    wait_until 20 fds_back
    echo "after: $(fds) descriptors, $(rss_kib) KiB, buffers $(free_slots)"
    # Allocators keep a little memory; a leak of a connection with two queues would be much more.
    expect_at_most "memory in KiB" "$(rss_kib)" $((rss_before + 2048 + 32 * rounds))
    expect "the free buffers" "$(free_slots)" "$slots_before"
fi
