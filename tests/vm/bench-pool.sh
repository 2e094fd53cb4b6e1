#!/usr/bin/env bash
# Runs inside the virtual machine: volumes of a pool under the kernel's initiator over TCP, taking
# turns with dm-thin on a RAM disk behind the kernel's target (first passes of 4 KiB random writes),
# and with the bare file that is as large as the pool's (4 KiB writes, each with a FLUSH).
#
#   bench-pool.sh OUT ROUNDS SECONDS        NACRE=/path/to/nacre
#
# Writes to OUT/results:  figure flush|overwrite|fresh nacre|other ROUND IOPS
# and at the end:         done
set -uo pipefail

OUT=$1 ROUNDS=$2 RUNTIME=$3
HERE=$(cd "$(dirname "$0")" && pwd)
export OUT TARGET=nacre WORK=/run/nacre-bench DAEMON_LOG="$OUT/daemon.log"
mkdir -p "$WORK"
# shellcheck source=lib.sh
. "$HERE/lib.sh"

# The volume; the disk of the pool, and of the thin pool.
SIZE_MIB=128 DISK_MIB=512
# First writes: half as many as the volume has units of 64 KiB.
FIRST=$((SIZE_MIB * 16 / 2))
THIN_NQN=$NQN-thin FLUSH_NQN=$NQN-flush

figure() { echo "figure $*" >>"$OUT/results"; }

# load NAME DEVICE OPTIONS…: prints the writes per second
load() {
    local name=$1 device=$2
    shift 2
    fio --name="$name" --filename="$device" --ioengine=io_uring --direct=1 --bs=4k --rw=randwrite --randrepeat=1 \
        --output-format=json "$@" | jq -r '.jobs[0] | if .error != 0 then error("fio failed") else .write.iops end'
}

fill() { # fill DEVICE
    fio --name=fill --filename="$1" --ioengine=io_uring --direct=1 --rw=write --bs=128k --iodepth=4 \
        --size=${SIZE_MIB}M --output="$WORK/fill" || die "$(cat "$WORK/fill")"
}

pool() { # pool NAME DISK: a pool with the volume v
    rpc pool_create "{\"name\":\"$1\",\"disk\":\"$2\",\"force\":true}"
    rpc lvol_create "{\"pool\":\"$1\",\"name\":\"v\",\"size\":\"${SIZE_MIB}MiB\"}"
}

free() { rpc pool_get '{"pool":"ram"}' | jq .free_bytes; }
has_free() { [ "$(free)" -ge "$1" ]; }

modprobe -a nvme-fabrics nvme-tcp configfs nvmet nvmet-tcp dm-mod dm-thin-pool
# The guest has no udev: dmsetup makes the nodes itself.
export DM_DISABLE_UDEV=1
modprobe brd rd_nr=2 rd_size=$((DISK_MIB * 1024))
mount -t configfs none /sys/kernel/config
ulimit -n 65536

step "Nacre: a pool on a RAM disk, a pool on a file, and a bare file"
nacre_start
rpc bdev_malloc_create "{\"name\":\"below\",\"block_size\":4096,\"num_blocks\":$((DISK_MIB * 256))}"
pool ram below
nacre_subsystem_create "$NQN" any
rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"nsid\":1,\"bdev_name\":\"ram/v\"}}"
for name in file bare; do
    head -c ${DISK_MIB}M /dev/zero >"$WORK/$name.img"
    rpc bdev_uring_create "{\"name\":\"$name-disk\",\"filename\":\"$WORK/$name.img\",\"block_size\":4096}"
done
pool file file-disk
nacre_subsystem_create "$FLUSH_NQN" any
rpc nvmf_subsystem_add_ns "{\"nqn\":\"$FLUSH_NQN\",\"namespace\":{\"nsid\":1,\"bdev_name\":\"file/v\"}}"
rpc nvmf_subsystem_add_ns "{\"nqn\":\"$FLUSH_NQN\",\"namespace\":{\"nsid\":2,\"bdev_name\":\"bare-disk\"}}"
connect "$NQN" --nr-io-queues=1
connect "$FLUSH_NQN" --nr-io-queues=1

step "dm-thin: blocks of 64 KiB on a RAM disk, behind the kernel's target"
SECTORS=$((SIZE_MIB * 2048))
dmsetup create thins --table "0 $((DISK_MIB * 2048)) thin-pool /dev/ram0 /dev/ram1 128 0"
dmsetup message thins 0 "create_thin 0"
dmsetup create thin --table "0 $SECTORS thin /dev/mapper/thins 0"
THIN=/dev/mapper/thin
PORT=4421
nvmet_start
nvmet_subsystem_create "$THIN_NQN" any
nvmet_ns_add "$THIN_NQN" 1 $SIZE_MIB $THIN
connect "$THIN_NQN" --nr-io-queues=1

for disk in "$NQN 1" "$THIN_NQN 1" "$FLUSH_NQN 1" "$FLUSH_NQN 2"; do
    # shellcheck disable=SC2086
    wait_until 60 ns_dev $disk
done
OURS=$(ns_dev "$NQN" 1) OTHER=$(ns_dev "$THIN_NQN" 1)
LVOL=$(ns_dev "$FLUSH_NQN" 1) BARE=$(ns_dev "$FLUSH_NQN" 2)
for device in "$LVOL" "$BARE"; do
    grep -q "write back" "/sys/block/${device#/dev/}/queue/write_cache" || die "$device takes no FLUSH"
    fill "$device"
done

# first ROW ROUND: the first pass of both sides
first() {
    local options=(--iodepth=32 --size=${SIZE_MIB}M --number_ios=$FIRST)
    figure "$1" nacre "$2" "$(load "$1" "$OURS" "${options[@]}")"
    figure "$1" other "$2" "$(load "$1" "$OTHER" "${options[@]}")"
}

for round in $(seq "$ROUNDS"); do
    step "round $round"
    for side in "nacre $LVOL" "other $BARE"; do
        figure flush "${side% *}" "$round" "$(load flush "${side#* }" --iodepth=1 --fsync=1 --size=${SIZE_MIB}M \
            --norandommap --time_based --ramp_time=1 --runtime="$RUNTIME")"
    done

    fill "$OURS"
    fill "$OTHER"
    BEFORE=$(free)
    rpc lvol_snapshot '{"snapshots":[{"lvol":"ram/v","name":"v@1"}]}' >/dev/null
    dmsetup suspend thin
    dmsetup message thins 0 "create_snap 1 0"
    dmsetup resume thin
    first overwrite "$round"
    rpc lvol_delete '{"lvol":"ram/v@1"}' >/dev/null
    dmsetup message thins 0 "delete 1"

    # A discard makes both volumes fresh again.
    blkdiscard "$OURS"
    blkdiscard $THIN
    # The space of the volume and of the snapshot is back, except for that of metadata.
    wait_until 60 has_free $((BEFORE - (48 << 20)))
    first fresh "$round"
done
echo "done" >>"$OUT/results"
nvme disconnect-all
nacre_stop
