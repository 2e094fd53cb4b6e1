# also: rdma
# connect-all finds and connects every subsystem that the discovery service lists.
target_start
for i in 1 2 3; do
    subsystem_create "$NQN-$i" any
    ns_add "$NQN-$i" 1 $((16 * i))
done
nvme connect-all -t "$TRTYPE" -a "$ADDR" -s "$PORT" --hostnqn="$HOST_A" --hostid="$HOST_A_ID"
for i in 1 2 3; do
    wait_until 20 ns_dev "$NQN-$i" 1
    expect "the size of $i" "$(size_mib "$(ns_dev "$NQN-$i" 1)")" $((16 * i))
done
nvme disconnect-all
for i in 1 2 3; do wait_until 20 gone "$NQN-$i"; done
