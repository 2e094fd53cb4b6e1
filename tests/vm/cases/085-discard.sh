# limit: 900
# also: rdma
# Discard from the block layer to the medium: `blkdiscard` succeeds and is counted on each kind of
# device. The range reads as Identify reports, its neighbours stay, and a sparse file releases its
# blocks, also after `fstrim` of a file system with deleted files. No command fails.
nacre_only "several kinds of devices"
MNT=$WORK/mnt
kib_used() { du -k "$1" | cut -f1; }
unmaps() { rpc bdev_get_iostat "{\"names\":[\"$1\"]}" | jq '.bdevs[0].num_unmap_ops'; }
fstrim_discards() { fstrim -v "$MNT" && [ "$(unmaps "$1")" -gt "$2" ]; }
fewer_kib_used() { [ "$(kib_used "$1")" -le "$2" ]; }

# A volume of two local files, and a file of another daemon, over the transport of this test.
trap keepers_kill EXIT
target_start
rpc bdev_malloc_create '{"name":"memory","num_blocks":131072,"block_size":512}'
for file in aio uring left right; do truncate -s 512M "$WORK/$file.img"; done
rpc bdev_aio_create "{\"name\":\"aio\",\"filename\":\"$WORK/aio.img\",\"block_size\":512}"
rpc bdev_uring_create "{\"name\":\"uring\",\"filename\":\"$WORK/uring.img\",\"block_size\":4096}"
for side in left right; do
    rpc bdev_uring_create "{\"name\":\"$side\",\"filename\":\"$WORK/$side.img\",\"block_size\":512}"
done
rpc volume_create '{"name":"volume","devices":["left","right"]}'
keeper 1 512M
keeper_listens 1 "$TRTYPE" "$ADDR"
rpc bdev_nvme_attach_controller "{\"name\":\"far\",\"trtype\":\"$TRTYPE\",\"adrfam\":\"ipv4\",\"traddr\":\"$ADDR\",\"trsvcid\":\"4421\",\"subnqn\":\"$(keeper_nqn 1)\"}"
subsystem_create "$NQN" any
nsid=0
DEVICES=(memory aio uring volume farn1)
for device in "${DEVICES[@]}"; do
    nsid=$((nsid + 1))
    rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"nsid\":$nsid,\"bdev_name\":\"$device\"}}"
done
# The sparse file behind a device.
declare -A FILE=([aio]=aio.img [uring]=uring.img [volume]=left.img [farn1]=kept1.img)
connect_and_find "$NQN"

head -c 16M /dev/urandom >"$WORK/random"
for nsid in $(seq 1 ${#DEVICES[@]}); do
    device=${DEVICES[$((nsid - 1))]} file=${FILE[${DEVICES[$((nsid - 1))]}]:-}
    wait_until 60 ns_dev "$NQN" "$nsid"
    disk=$(ns_dev "$NQN" "$nsid")
    step "$device: $disk"
    [ "$(cat "/sys/block/${disk#/dev/}/queue/discard_max_bytes")" -gt 0 ] || die "$disk takes no discards"
    dlfeat=$(($(nvme id-ns "$disk" --output-format=json | jq .dlfeat) & 7))
    echo "DLFEAT $dlfeat"
    dd if="$WORK/random" of="$disk" bs=1M oflag=direct conv=notrunc status=none
    before=$(unmaps "$device")
    [ -z "$file" ] || used=$(kib_used "$WORK/$file")
    # Eight MiB and one file system block, both in the middle of the written data.
    blkdiscard -f -o 4M -l 8M "$disk"
    blkdiscard -f -o $((14 << 20)) -l 4096 "$disk"
    [ "$(unmaps "$device")" -ge $((before + 2)) ] || die "$device has not counted the discards"
    for part in "0 4" "12 2" "15 1"; do
        read -r from count <<<"$part"
        cmp <(dd if="$disk" bs=1M skip="$from" count="$count" iflag=direct status=none) \
            <(dd if="$WORK/random" bs=1M skip="$from" count="$count" status=none)
    done
    if [ "$dlfeat" = 1 ]; then
        cmp -n $((8 << 20)) /dev/zero <(dd if="$disk" bs=1M skip=4 count=8 iflag=direct status=none)
        cmp -n 4096 /dev/zero <(dd if="$disk" bs=4096 skip=3584 count=1 iflag=direct status=none)
    fi
    [ -z "$file" ] || wait_until 30 fewer_kib_used "$WORK/$file" $((used - 8000))
    # The whole device, as mkfs does it.
    blkdiscard -f "$disk"
    [ -z "$file" ] || wait_until 30 fewer_kib_used "$WORK/$file" 2100
done
# These two guarantee zeroes; hosts rely on it.
for nsid in 1 2; do
    expect "DLFEAT of namespace $nsid" $(($(nvme id-ns "$(ns_dev "$NQN" $nsid)" --output-format=json | jq .dlfeat) & 7)) 1
done

mkdir -p "$MNT"
for nsid in 2 4; do
    device=${DEVICES[$((nsid - 1))]} disk=$(ns_dev "$NQN" "$nsid")
    file=${FILE[$device]}
    for kind in ext4 xfs; do
        step "$kind on $device: mkfs discards, fstrim frees what deleted files had"
        before=$(unmaps "$device")
        case $kind in
            ext4) mkfs.ext4 -q -F "$disk" ;;
            xfs) mkfs.xfs -q -f -m reflink=0 "$disk" ;;
        esac
        [ "$(unmaps "$device")" -gt "$before" ] || die "mkfs.$kind has discarded nothing"
        mount "$disk" "$MNT"
        for i in 1 2 3 4; do cp "$WORK/random" "$MNT/file$i"; done
        sync -f "$MNT"
        used=$(kib_used "$WORK/$file")
        rm "$MNT"/file[123]
        sync -f "$MNT"
        before=$(unmaps "$device")
        # XFS frees what deleted files had in the background: the first fstrim may come too early.
        wait_until 30 fstrim_discards "$device" "$before"
        # 48 MiB were deleted.
        wait_until 30 fewer_kib_used "$WORK/$file" $((used - 45000))
        umount "$MNT"
        mount "$disk" "$MNT"
        cmp "$MNT/file4" "$WORK/random"
        umount "$MNT"
    done
done
wait_until 60 rpc volume_verify '{"name":"volume"}'

step "no command has failed"
expect "errors in the log" "$(nvme error-log "/dev/$CTRL" --output-format=json | jq '[.errors[] | select(.error_count > 0)] | length')" 0
disconnect "$NQN"
