# limit: 900
# A file system on a volume of a pool, over TCP: snapshots under load, a daemon that is
# killed, a disk that joins and leaves, space returned by trims, and a snapshot and a clone that are
# mounted.
nacre_only "pools"
lvol() { rpc lvol_get "{\"lvol\":\"pool0/$1\"}"; }
used() { lvol "$1" | jq .used_bytes; }
add() { rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"nsid\":$2,\"bdev_name\":\"pool0/$1\"}}"; }
uses_less() { [ "$(used v1)" -lt "$1" ]; }
on_more() { rpc pool_get '{"pool":"pool0"}' | jq '.disks[1].total_bytes - .disks[1].free_bytes'; }
# A field of Identify Namespace; NUSE in blocks of 4 KiB.
field() { nvme id-ns "$DEV" -o json | jq ".$1"; }
# The number of ranges with data (Get LBA Status, action 02h).
ranges() {
    nvme admin-passthru "/dev/$CTRL" --opcode=0x86 --namespace-id=1 --cdw12=1023 --cdw13=0x2000000 \
        --data-len=4096 --read --raw-binary | od -An -tu4 -N4 | tr -d ' '
}
nuse_is_below() { [ "$(field nuse)" -lt "$1" ]; }
has_data_on_more() { [ "$(on_more)" -ge $((8 << 20)) ]; }
has_one_disk() { [ "$(rpc pool_get '{"pool":"pool0"}' | jq '.disks | length')" = 1 ]; }
MNT=$WORK/mnt
mkdir -p "$MNT"
leave() { load_kill; umount "$MNT" 2>/dev/null || true; }
trap leave EXIT

step "a pool on a file, and a thin volume larger than the pool"
target_start
truncate -s 256M "$WORK/disk.img"
rpc bdev_uring_create "{\"name\":\"disk\",\"filename\":\"$WORK/disk.img\",\"block_size\":4096}"
rpc pool_create '{"name":"pool0","disk":"disk"}'
rpc lvol_create '{"pool":"pool0","name":"v1","size":"1GiB"}'
subsystem_create "$NQN" any
add v1 1
connect_and_find "$NQN" --reconnect-delay=1 --ctrl-loss-tmo=300 --keep-alive-tmo=5
expect "the size" "$(size_mib "$DEV")" 1024
expect "NSZE, NCAP and NUSE" "$(field nsze) $(field ncap) $(field nuse)" "262144 262144 0"
expect "THINP" "$(($(field nsfeat) & 1))" 1
expect "NPDG and NOWS" "$(field npdg) $(field nows)" "15 15"

expect "ranges with data" "$(ranges)" 0

step "ext4, and files"
mkfs.ext4 -q -F "$DEV"
mount "$DEV" "$MNT"
make_tree "$MNT/tree"
sync -f "$MNT"
SUM=$(tree_sum "$MNT/tree")
[ "$(ranges)" -gt 0 ] || die "no range has data"

step "snapshots under load; the daemon is killed, and comes back"
load_start "$MNT/load" 16m
rpc lvol_snapshot '{"snapshots":[{"lvol":"pool0/v1","name":"v1@first"}]}'
load_goes_on
for round in 1 2; do
    nacre_kill
    target_start
    wait_until 120 is_live "$CTRL"
    load_goes_on
    rpc lvol_snapshot "{\"snapshots\":[{\"lvol\":\"pool0/v1\",\"name\":\"v1@$round\"}]}"
    load_goes_on
done
load_end
expect "lvols" "$(rpc lvol_list '{}' | jq length)" 4

step "a disk joins, and leaves under load with its data; the daemon is killed meanwhile"
truncate -s 1G "$WORK/more.img"
rpc bdev_uring_create "{\"name\":\"more\",\"filename\":\"$WORK/more.img\",\"block_size\":4096}"
rpc pool_add_disk '{"pool":"pool0","disk":"more"}'
# The home of a new volume is the disk with the most room.
rpc lvol_create '{"pool":"pool0","name":"v3","size":"64MiB"}'
add v3 4
wait_until 60 ns_dev "$NQN" 4
FILES=$DEV DEV=$(ns_dev "$NQN" 4)
load_start "$DEV" 32m
trap leave EXIT
wait_until 120 has_data_on_more
rpc pool_remove_disk '{"pool":"pool0","disk":"more"}'
nacre_kill
target_start
wait_until 120 is_live "$CTRL"
load_goes_on
wait_until 120 has_one_disk
load_goes_on
load_end
# The pool no longer claims the disk.
rpc bdev_uring_delete '{"name":"more"}'
DEV=$FILES
rpc nvmf_subsystem_remove_ns "{\"nqn\":\"$NQN\",\"nsid\":4}"
wait_until 60 no_ns_dev "$NQN" 4
rpc lvol_delete '{"lvol":"pool0/v3"}'

step "a clone of the first snapshot has the files, and takes writes; the snapshot does not"
rpc lvol_clone '{"snapshot":"pool0/v1@first","name":"v2"}'
umount "$MNT"
add v2 2
add v1@first 3
wait_until 60 ns_dev "$NQN" 2
wait_until 60 ns_dev "$NQN" 3
mount "$(ns_dev "$NQN" 2)" "$MNT"
expect "the files of the clone" "$(tree_sum "$MNT/tree")" "$SUM"
make_tree "$MNT/more"
umount "$MNT"
mount -o ro,noload "$(ns_dev "$NQN" 3)" "$MNT"
[ ! -e "$MNT/more" ] || die "the snapshot has a file of its clone"
umount "$MNT"
e2fsck -fn "$(ns_dev "$NQN" 2)"

step "without snapshots, fstrim returns the space of deleted files"
mount "$DEV" "$MNT"
expect "the files of the volume" "$(tree_sum "$MNT/tree")" "$SUM"
rpc nvmf_subsystem_remove_ns "{\"nqn\":\"$NQN\",\"nsid\":3}"
wait_until 60 no_ns_dev "$NQN" 3
for snapshot in first 1 2; do
    wait_until 60 rpc lvol_delete "{\"lvol\":\"pool0/v1@$snapshot\"}"
done
SMALL=$(field nuse)
dd if=/dev/urandom of="$MNT/large" bs=1M count=48 conv=fsync status=none
BEFORE=$(used v1)
LARGE=$(field nuse)
[ "$LARGE" -ge $((SMALL + 6144)) ] || die "NUSE grew from $SMALL to $LARGE with 48 MiB"
rm "$MNT/large"
sync -f "$MNT"
fstrim "$MNT"
wait_until 60 uses_less $((BEFORE - (40 << 20)))
wait_until 60 nuse_is_below $((LARGE - 8192))
expect "the files after the trim" "$(tree_sum "$MNT/tree")" "$SUM"
umount "$MNT"
e2fsck -fn "$DEV"
expect "faults" "$(rpc pool_check '{"pool":"pool0"}' | jq '.findings | length')" 0
disconnect "$NQN"
nacre_stop
