# limit: 600
# XFS on a thin volume of a pool: a clone of a snapshot is mounted while the volume is written, and
# trims return the space of deleted files. Another volume fills the pool to the brim: its writes
# wait, and then fail. The file system goes on, and after a trim so do writes to new space.
nacre_only "pools"
allow_errors '^Write of namespace 2: (Capacity Exceeded|Namespace Not Ready|Command Interrupted)'
used() { rpc lvol_get '{"lvol":"pool0/v1"}' | jq .used_bytes; }
uses_less() { [ "$(used)" -lt "$1" ]; }
has_free() { [ "$(rpc pool_get '{"pool":"pool0"}' | jq .free_bytes)" -ge "$1" ]; }
add() { rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"nsid\":$2,\"bdev_name\":\"pool0/$1\"}}"; }
MNT=$WORK/mnt
COPY=$WORK/copy
mkdir -p "$MNT" "$COPY"
leave() {
    load_kill
    umount "$COPY" || true
    umount "$MNT" || true
} 2>/dev/null
trap leave EXIT

step "a pool on a file, and XFS on a thin volume"
target_start
truncate -s 256M "$WORK/disk.img"
rpc bdev_uring_create "{\"name\":\"disk\",\"filename\":\"$WORK/disk.img\",\"block_size\":4096}"
rpc pool_create '{"name":"pool0","disk":"disk"}'
rpc lvol_create '{"pool":"pool0","name":"v1","size":"1GiB"}'
subsystem_create "$NQN" any
add v1 1
connect_and_find "$NQN"
mkfs.xfs -q -f -m reflink=0 "$DEV"
mount "$DEV" "$MNT"
make_tree "$MNT/tree"
sync -f "$MNT"
SUM=$(tree_sum "$MNT/tree")

step "a clone of a snapshot is mounted while the volume is written"
load_start "$MNT/load" 16m
rpc lvol_snapshot '{"snapshots":[{"lvol":"pool0/v1","name":"v1@s"}]}'
# XFS replays its log, for which a snapshot takes no writes.
rpc lvol_clone '{"snapshot":"pool0/v1@s","name":"c"}'
add c 3
wait_until 60 ns_dev "$NQN" 3
mount -o nouuid "$(ns_dev "$NQN" 3)" "$COPY"
expect "the files of the clone" "$(tree_sum "$COPY/tree")" "$SUM"
load_goes_on
expect "the files of the clone, later" "$(tree_sum "$COPY/tree")" "$SUM"
umount "$COPY"
load_end
rpc nvmf_subsystem_remove_ns "{\"nqn\":\"$NQN\",\"nsid\":3}"
wait_until 60 no_ns_dev "$NQN" 3
rpc lvol_delete '{"lvol":"pool0/c"}'
wait_until 60 rpc lvol_delete '{"lvol":"pool0/v1@s"}'

step "fstrim returns the space of deleted files"
dd if=/dev/urandom of="$MNT/large" bs=1M count=48 conv=fsync status=none
BEFORE=$(used)
rm "$MNT/large"
sync -f "$MNT"
fstrim "$MNT"
wait_until 60 uses_less $((BEFORE - (47 << 20)))

step "another volume fills the pool to the brim"
rpc lvol_create '{"pool":"pool0","name":"v2","size":"1GiB"}'
add v2 2
wait_until 60 ns_dev "$NQN" 2
BRIM=$(ns_dev "$NQN" 2)
expect_failure dd if=/dev/urandom of="$BRIM" bs=1M oflag=direct status=none
[[ $FAILURE == *"No space left on device"* ]] || die "not Capacity Exceeded: $FAILURE"
"$NACRE" events --socket "$SOCK" >"$WORK/events"
grep -q "is full: writes wait for space" "$WORK/events" || die "the full pool has no event"

step "data that is there is written and read"
dd if=/dev/urandom of="$MNT/load" bs=1M count=8 conv=notrunc,fsync status=none
expect "the files" "$(tree_sum "$MNT/tree")" "$SUM"

step "a trim makes room, and writes go on"
blkdiscard --length $((64 << 20)) "$BRIM"
wait_until 60 has_free $((48 << 20))
fio_verify "$BRIM" after --rw=write --bs=64k --size=32M
make_tree "$MNT/more"
umount "$MNT"
xfs_repair -n "$DEV"
expect "faults" "$(rpc pool_check '{"pool":"pool0"}' | jq '.findings | length')" 0
disconnect "$NQN"
nacre_stop
