# limit: 240
# also: rdma
# Two hosts use the same namespace at once, each with its own controller, and see each other's
# writes.
without_multipath
serve 128
connect_two_hosts
[ "$(cat "/sys/class/nvme/$a/cntlid")" != "$(cat "/sys/class/nvme/$b/cntlid")" ] || die "both have the same controller id"

step "each host sees the writes of the other"
head -c 65536 /dev/urandom >"$WORK/from-a"
head -c 65536 /dev/urandom >"$WORK/from-b"
dd if="$WORK/from-a" of="/dev/${a}n1" bs=64k oflag=direct status=none
dd if="$WORK/from-b" of="/dev/${b}n1" bs=64k seek=1 oflag=direct status=none
cmp "$WORK/from-a" <(dd if="/dev/${b}n1" bs=64k count=1 iflag=direct status=none)
cmp "$WORK/from-b" <(dd if="/dev/${a}n1" bs=64k skip=1 count=1 iflag=direct status=none)

step "both under load, in halves of their own"
fio_verify "/dev/${a}n1" a --rw=randrw --bs=4k --iodepth=32 --size=16M --offset=0 &
one=$!
fio_verify "/dev/${b}n1" b --rw=randrw --bs=4k --iodepth=32 --size=16M --offset=64M &
two=$!
wait $one
wait $two

step "one host leaves, the other stays"
nvme disconnect -d "$a"
is_live "$b"
dd if="/dev/${b}n1" of=/dev/null bs=4k count=16 iflag=direct status=none
