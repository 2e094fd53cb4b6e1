# also: rdma
# Several I/O queues: one per CPU, separate write queues, polled queues.
serve 128
queues() { cat "/sys/class/nvme/$CTRL/queue_count"; }

connect_and_find "$NQN" --nr-io-queues=1
expect "queues, admin included" "$(queues)" 2
disconnect "$NQN"

connect_and_find "$NQN" --nr-io-queues=2
expect "queues, admin included" "$(queues)" 3
fio_verify "$DEV" two --rw=randrw --bs=4k --iodepth=32 --numjobs=2 --size=8M --offset_increment=16M
disconnect "$NQN"

step "separate write and polled queues"
connect_and_find "$NQN" --nr-io-queues=2 --nr-write-queues=2 --nr-poll-queues=1
expect "queues, admin included" "$(queues)" 6
fio_verify "$DEV" split --rw=randrw --bs=4k --iodepth=32 --numjobs=2 --size=8M --offset_increment=16M
disconnect "$NQN"

step "a small queue"
connect_and_find "$NQN" --queue-size=16
fio_verify "$DEV" small --rw=randrw --bs=4k --iodepth=64 --size=8M
disconnect "$NQN"
