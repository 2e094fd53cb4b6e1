# limit: 300
# A device without listeners can be deleted while the daemon runs: the daemon does not keep it open.
# The daemon also reports the GID table entry of a connection.
nacre_only "it lets go of devices"
rdma_up
serve 16

step "a connection, and the entry of the GID table that it goes by"
connect_and_find "$NQN" --nr-io-queues=1
goes_by() {
    rpc rdma_get_qpairs | jq -e 'length == 2 and all(.[]; .gid_index != null)'
}
wait_until 30 goes_by
index=$(rpc rdma_get_qpairs | jq '.[0].gid_index')
expect "the GID" "$(cat "/sys/class/infiniband/$RDMA_DEV/ports/1/gids/$index")" 0000:0000:0000:0000:0000:ffff:0a09:0801

step "ended queue pairs are released at once"
disconnect "$NQN"
none() { [ "$(rpc rdma_get_qpairs | jq length)" = 0 ]; }
wait_until 20 none
expect "given up" "$(rpc rdma_get_stats | jq '[.reactors[].counters.drains_given_up] | add')" 0
expect "waiting receives" "$(rpc rdma_get_stats | jq '[.reactors[].counters.receives_waiting] | add')" 0

step "the listener is removed, and then the device"
rpc nvmf_subsystem_remove_listener \
    "{\"nqn\":\"$NQN\",\"listen_address\":{\"trtype\":\"rdma\",\"adrfam\":\"ipv4\",\"traddr\":\"$ADDR\",\"trsvcid\":\"$PORT\"}}"
timeout 60 rdma link delete "$RDMA_DEV"
[ ! -e "/sys/class/infiniband/$RDMA_DEV" ] || die "$RDMA_DEV is still there"

step "the device returns, and so does its listener"
rxe_add
rpc nvmf_subsystem_add_listener \
    "{\"nqn\":\"$NQN\",\"listen_address\":{\"trtype\":\"rdma\",\"adrfam\":\"ipv4\",\"traddr\":\"$ADDR\",\"trsvcid\":\"$PORT\"}}"
connect_and_find "$NQN" --nr-io-queues=1
dd if=/dev/urandom of="$DEV" bs=64k count=4 oflag=direct status=none
disconnect "$NQN"
nacre_stop
