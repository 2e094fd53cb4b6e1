# limit: 240
# also: rdma
# Admin commands are answered while the data path is flooded far beyond the target's buffers.
serve 256
connect_and_find "$NQN" --nr-io-queues=2
fio_verify "$DEV" flood --rw=randrw --bs=256k --iodepth=128 --numjobs=2 --size=96M --offset_increment=128M --time_based --runtime=15 --verify_backlog=64 &
load=$!
sleep 3
for _ in $(seq 10); do
    timeout 10 nvme id-ctrl "/dev/$CTRL" >/dev/null
    timeout 10 nvme smart-log "/dev/$CTRL" >/dev/null
done
wait $load
