# limit: 240
# Two hosts use the same namespace at once, each with its own controller, and see each other's writes.
# Native multipath would make one device of the two, so this test runs without it.
reload_without_multipath() {
    local targets=()
    [ "$TARGET" != nvmet ] || targets=("nvmet-$TRTYPE" nvmet)
    # Of both transports: a test before this one may have loaded the other, which holds nvme-fabrics too.
    modprobe -r "${targets[@]}" nvme-tcp nvme-rdma nvme-fabrics
    modprobe -r nvme nvme-core 2>/dev/null || true
    modprobe nvme-core multipath="$1"
    modprobe -a nvme-fabrics "nvme-$TRTYPE" "${targets[@]}"
    [ "$(cat /sys/module/nvme_core/parameters/multipath)" = "$1" ] || die "nvme-core did not reload"
}
trap 'nvme disconnect -n "$NQN"; clean_guest; mkdir -p "$WORK"; reload_without_multipath Y' EXIT
reload_without_multipath N
serve 128

connect "$NQN" --hostnqn="$HOST_A" --hostid="$HOST_A_ID"
# nvme-cli 2.3 takes a second host for a second connection of the first and refuses it; the kernel does not.
echo "transport=$TRTYPE,traddr=$ADDR,trsvcid=$PORT,nqn=$NQN,hostnqn=$HOST_B,hostid=$HOST_B_ID" >/dev/nvme-fabrics
a=$(ctrl_of "$NQN" "$HOST_A") b=$(ctrl_of "$NQN" "$HOST_B")
wait_until 20 test -b "/dev/${a}n1"
wait_until 20 test -b "/dev/${b}n1"
[ "$(cat "/sys/class/nvme/$a/cntlid")" != "$(cat "/sys/class/nvme/$b/cntlid")" ] || die "both have the same controller id"

step "each sees what the other wrote"
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

step "one leaves, the other stays"
nvme disconnect -d "$a"
is_live "$b"
dd if="/dev/${b}n1" of=/dev/null bs=4k count=16 iflag=direct status=none
