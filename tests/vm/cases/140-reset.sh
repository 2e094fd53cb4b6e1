# limit: 240
# also: rdma
# Controller resets, idle and under verified load: the host reconnects by itself and no I/O fails.
serve 128
connect_and_find "$NQN" --reconnect-delay=1
for _ in 1 2 3; do
    nvme reset "/dev/$CTRL"
    wait_until 20 is_live "$CTRL"
done
dd if="$DEV" of=/dev/null bs=4k count=16 iflag=direct status=none

step "under load"
# A command may reach a controller that the reset has disabled; the host resends it.
allow_errors '^(Read|Write|Flush) of namespace 1: Command Sequence Error'
fio_verify "$DEV" reset --rw=randrw --bsrange=4k-64k --iodepth=32 --size=96M --time_based --runtime=15 --verify_backlog=256 &
load=$!
for _ in 1 2 3; do
    sleep 3
    nvme reset "/dev/$CTRL"
    wait_until 20 is_live "$CTRL"
done
wait $load
