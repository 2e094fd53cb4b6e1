# limit: 600
# Sixteen queue pairs at once, each with its own data, from memory in many small regions; then they
# close and all their resources are released.
nacre_only "it is asked for its queue pairs"
rdma_up
export NACRE_RDMA_MAX_MR_SIZE=$((16 << 20))
target_start
for i in $(seq 8); do
    nacre_subsystem_create "$NQN-$i" any
    ns_add "$NQN-$i" 1 8
    connect "$NQN-$i" --nr-io-queues=1
done
established() { rpc rdma_get_qpairs | jq '[.[] | select(.state == "established")] | length'; }
are_established() { [ "$(established)" = "$1" ]; }
wait_until 90 are_established 16
expect "registrations of each device" "$(rpc rdma_get_mrs | jq -c '[.[] | .registrations_total == .regions]')" "[true]"
expect "the longest region" "$(rpc rdma_get_mrs | jq '[.[].mrs[].bytes] | max')" $((16 << 20))
rpc rdma_get_mrs | jq -e 'all(.[]; .bytes > 3 * .max_mr_size and .regions > (.arenas | length))'
registered=$(rpc rdma_get_mrs | jq '.[0].registrations_total')

pids=()
for i in $(seq 8); do
    wait_until 90 ns_dev "$NQN-$i" 1
    fio_verify "$(ns_dev "$NQN-$i" 1)" "of-$i" --rw=randrw --bsrange=4k-64k --iodepth=8 --size=2M &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
expect "registrations under load" "$(rpc rdma_get_mrs | jq '.[0].registrations_total')" "$registered"
expect "completion errors" "$(rpc rdma_get_stats | jq .rdma_completion_errors)" 0
expect_no_copies
nvme disconnect-all
wait_until 60 are_established 0
expect "queue pairs" "$(rpc rdma_get_qpairs | jq length)" 0
