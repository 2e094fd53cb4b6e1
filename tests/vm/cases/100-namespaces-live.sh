# also: rdma
# Namespaces are added, resized and removed while a host is connected, and it sees each change by
# itself.
serve 64
connect_and_find "$NQN"
expect "the size" "$(size_mib "$DEV")" 64

step "add"
ns_add "$NQN" 2 32
wait_until 20 ns_dev "$NQN" 2
expect "the size of 2" "$(size_mib "$(ns_dev "$NQN" 2)")" 32
fio_verify "$(ns_dev "$NQN" 2)" added --rw=randwrite --bs=4k --iodepth=8 --size=4M

step "grow"
ns_resize "$NQN" 1 96
wait_until 20 is_mib "$DEV" 96
fio_verify "$DEV" grown --rw=write --bs=64k --iodepth=4 --offset=64M --size=16M

step "shrink"
if [ "$TARGET" = nacre ]; then
    # The host still knows the old size: blocks that exist are served, and the rest fail.
    if ns_resize "$NQN" 1 48; then die "it shrank under a connected host"; fi
    expect "the size" "$(size_mib "$DEV")" 96
    dd if="$DEV" of=/dev/null bs=64k skip=$((40 * 16)) count=16 iflag=direct
    expect_errors '^Read of namespace 1: LBA Out of Range'
    if dd if="$DEV" of=/dev/null bs=64k skip=$((70 * 16)) count=1 iflag=direct; then die "read behind the end"; fi
    rpc bdev_aio_rescan "{\"name\":\"$(bdev_name "$NQN" 1)\",\"force\":true}"
else
    ns_resize "$NQN" 1 48
fi
wait_until 20 is_mib "$DEV" 48

step "remove"
ns_remove "$NQN" 2
wait_until 20 no_ns_dev "$NQN" 2
ns_dev "$NQN" 1

step "a gap in the namespace ids"
ns_add "$NQN" 7 16
wait_until 20 ns_dev "$NQN" 7
is_live "$CTRL"
