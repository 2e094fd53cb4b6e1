# limit: 600
# The CSI driver gives this kernel volumes of a pool: connected, formatted once, mounted,
# expanded in use, cut off and given again, as a file system and as a block device.
nacre_only "the CSI driver"
command -v blkid >/dev/null && command -v mkfs.ext4 >/dev/null || skip "no blkid or mkfs.ext4"
# Commands in flight when the daemon is killed, or the host is cut off.
allow_errors 'Internal Path Error' 'Aborted'
SOCKET=$WORK/nacre.sock CSI=$WORK/csi.sock CSI_PORT=4424
STAGING=$WORK/staging TARGET_DIR=$WORK/target BLOCK=$WORK/block
DAEMON_PID='' DRIVER_PID='' USER_PID=''
csi_clean() {
    local dir pid
    for dir in "$TARGET_DIR" "$BLOCK" "$STAGING"; do umount "$dir" || true; done
    for pid in $USER_PID $DRIVER_PID $DAEMON_PID; do kill -9 "$pid" || true; done
} 2>/dev/null
trap csi_clean EXIT
daemon_up() {
    NACRE_NVMF_LISTEN="tcp://$ADDR:$CSI_PORT" NACRE_NVMF_DISCOVERY_PORT=0 NACRE_REACTOR_CORES=auto:1 \
        "$NACRE" serve --data-dir "$WORK/data" -r "$SOCKET" >>"$DAEMON_LOG" 2>&1 </dev/null &
    DAEMON_PID=$!
    wait_until 60 test -S "$SOCKET"
    wait_until 60 "$NACRE" rpc framework_wait_init --socket "$SOCKET"
}
on() { "$NACRE" "$@" --socket "$SOCKET"; }
csi() { /usr/bin/python3 -IS "$HERE/csi.py" "$CSI" "$@"; }
make() { # make NAME BYTES: prints the id
    csi Controller/CreateVolume "{\"1\":\"$1\",\"2\":{\"1\":$2},\"3\":$CAPABILITY,\"4\":[{\"1\":\"pool\",\"2\":\"pool0\"},{\"1\":\"thin\",\"2\":\"true\"}]}" |
        jq -r '.["1"][0]["2"][0]'
}
give() { # give: the host may use the volume; $CONTEXT is for the node
    CONTEXT=$(csi Controller/ControllerPublishVolume "{\"1\":\"$ID\",\"2\":\"$HOST_A\",\"3\":$CAPABILITY}" |
        jq -c '[.["1"][] | {"1": .["1"][0], "2": .["2"][0]}]')
}
take() { csi Controller/ControllerUnpublishVolume "{\"1\":\"$ID\",\"2\":\"$HOST_A\"}"; }
stage() { csi Node/NodeStageVolume "{\"1\":\"$ID\",\"2\":$CONTEXT,\"3\":\"$STAGING\",\"4\":$CAPABILITY}"; }
unstage() { csi Node/NodeUnstageVolume "{\"1\":\"$ID\",\"2\":\"$STAGING\"}"; }
show() { # show PATH
    csi Node/NodePublishVolume "{\"1\":\"$ID\",\"2\":$CONTEXT,\"3\":\"$STAGING\",\"4\":\"$1\",\"5\":$CAPABILITY}"
}
hide() { csi Node/NodeUnpublishVolume "{\"1\":\"$ID\",\"2\":\"$1\"}"; } # hide PATH
nothing_connected() { # of the volume that was given last
    local nqn
    nqn=$(echo "$CONTEXT" | jq -r '.[] | select(.["1"] == "nqn") | .["2"]')
    [ -n "$nqn" ] && ! grep -qxs "$nqn" /sys/class/nvme/nvme*/subsysnqn
}
MOUNT='{"2":{"1":"ext4"},"3":{"1":1}}' RAW='{"1":{},"3":{"1":1}}'
CAPABILITY=$MOUNT
mkdir -p "$STAGING" "$WORK/csi-state"

step "a daemon with a pool, and a driver"
daemon_up
truncate -s 256M "$WORK/disk.img"
on rpc bdev_uring_create "{\"name\":\"disk\",\"filename\":\"$WORK/disk.img\",\"block_size\":4096}"
on rpc pool_create '{"name":"pool0","disk":"disk"}'
"$NACRE" csi --endpoint "unix://$CSI" --socket "$SOCKET" --node-id "$HOST_A" --host-id "$HOST_A_ID" \
    --state-dir "$WORK/csi-state" --log-level debug >"$WORK/csi.log" 2>&1 </dev/null &
DRIVER_PID=$!
wait_until 60 csi Identity/Probe
expect "the node's id" "$(csi Node/NodeGetInfo | jq -r '.["1"][0]')" "$HOST_A"

step "a volume is created, staged and mounted"
ID=$(make data 67108864)
expect "the same request again" "$(make data 67108864)" "$ID"
give
stage
stage
show "$TARGET_DIR"
show "$TARGET_DIR"
expect "the file system" "$(findmnt -no FSTYPE "$TARGET_DIR")" ext4
make_tree "$TARGET_DIR/tree"
sync -f "$TARGET_DIR"
SUM=$(tree_sum "$TARGET_DIR/tree")
total() { # total PATH: bytes of its file system
    csi Node/NodeGetVolumeStats "{\"1\":\"$ID\",\"2\":\"$1\",\"3\":\"$STAGING\"}" |
        jq '.["1"][] | select(.["4"][0] == 1) | .["2"][0]'
}
BEFORE=$(total "$TARGET_DIR")

step "the volume grows in use"
csi Controller/ControllerExpandVolume "{\"1\":\"$ID\",\"2\":{\"1\":134217728},\"4\":$CAPABILITY}"
csi Node/NodeExpandVolume "{\"1\":\"$ID\",\"2\":\"$TARGET_DIR\",\"3\":{\"1\":134217728},\"4\":\"$STAGING\",\"5\":$CAPABILITY}"
AFTER=$(total "$TARGET_DIR")
[ "$AFTER" -gt $((BEFORE + 50000000)) ] || die "the file system has $AFTER bytes, after $BEFORE"

step "the daemon is killed, and starts again under the mount"
kill -9 "$DAEMON_PID"
daemon_up
echo later >"$TARGET_DIR/later"
sync -f "$TARGET_DIR"

step "the volume is unstaged in order, and staged again"
hide "$TARGET_DIR"
hide "$TARGET_DIR"
unstage
unstage
wait_until 30 nothing_connected
take
take
! mountpoint -q "$TARGET_DIR" || die "it is still mounted"
give
stage
show "$TARGET_DIR"
expect "the files" "$(tree_sum "$TARGET_DIR/tree")" "$SUM"
expect "the last file" "$(cat "$TARGET_DIR/later")" later
hide "$TARGET_DIR"
unstage
take

step "a volume with data is not formatted for another file system"
CAPABILITY='{"2":{"1":"xfs"},"3":{"1":1}}'
give
expect_failure stage
unstage
wait_until 30 nothing_connected
take
CAPABILITY=$MOUNT
csi Controller/DeleteVolume "{\"1\":\"$ID\"}"
csi Controller/DeleteVolume "{\"1\":\"$ID\"}"

step "a block device"
CAPABILITY=$RAW
ID=$(make raw 33554432)
give
stage
show "$BLOCK"
[ -b "$BLOCK" ] || die "$BLOCK is no block device"
expect "its size" "$(blockdev --getsize64 "$BLOCK")" 33554432
dd if=/dev/urandom of="$WORK/random" bs=1M count=4 status=none
dd if="$WORK/random" of="$BLOCK" bs=1M oflag=direct status=none
dd if="$BLOCK" of="$WORK/read" bs=1M count=4 iflag=direct status=none
cmp "$WORK/random" "$WORK/read"
hide "$BLOCK"

step "a program that has the device alone keeps it connected"
DEVICE=$(basename "$(dirname "$(grep -lx "$ID" /sys/class/block/nvme*n*/uuid)")")
/usr/bin/python3 -IS -c 'import os, sys, time
os.open(sys.argv[1], os.O_RDONLY | os.O_EXCL)
print("open", flush=True)
time.sleep(600)' "/dev/$DEVICE" >"$WORK/user" &
USER_PID=$!
wait_until 30 grep -qx open "$WORK/user"
expect_failure unstage
! nothing_connected || die "the device is gone"
kill "$USER_PID"
wait "$USER_PID" || true
USER_PID=''
unstage
wait_until 30 nothing_connected
take
csi Controller/DeleteVolume "{\"1\":\"$ID\"}"
expect "lvols" "$(on rpc lvol_list '{}' | jq length)" 0
kill -TERM "$DRIVER_PID"
status=0
wait "$DRIVER_PID" || status=$?
expect "the driver's exit status" $status 0
