#!/usr/bin/env bash
# Runs inside the virtual machine: fio through the kernel's initiator, on Nacre and on the kernel's own nvmet-tcp
# over a RAM disk, taking turns. One I/O queue each.
#
#   bench.sh OUT ROUNDS SECONDS        NACRE=/path/to/nacre
#
# Writes to OUT/results:  figure nacre|nvmet RW DEPTH ROUND IOPS        and at the end:  done
set -uo pipefail

OUT=$1 ROUNDS=$2 RUNTIME=$3
HERE=$(cd "$(dirname "$0")" && pwd)
export OUT TARGET=nacre WORK=/run/nacre-bench DAEMON_LOG="$OUT/daemon.log"
mkdir -p "$WORK"
# shellcheck source=lib.sh
. "$HERE/lib.sh"

NVMET_NQN=$NQN-nvmet
SIZE_MIB=256

modprobe -a nvme-fabrics nvme-tcp configfs nvmet nvmet-tcp
modprobe brd rd_nr=1 rd_size=$((SIZE_MIB * 1024))
mount -t configfs none /sys/kernel/config
ulimit -n 65536

nacre_start
nacre_subsystem_create "$NQN" any
rpc bdev_malloc_create "{\"name\":\"ram\",\"block_size\":512,\"num_blocks\":$((SIZE_MIB * 2048))}"
rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"bdev_name\":\"ram\"}}"
connect "$NQN" --nr-io-queues=1

PORT=4421
nvmet_start
nvmet_subsystem_create "$NVMET_NQN" any
nvmet_ns_add "$NVMET_NQN" 1 $SIZE_MIB /dev/ram0
connect "$NVMET_NQN" --nr-io-queues=1

wait_until 30 ns_dev "$NQN" 1
wait_until 30 ns_dev "$NVMET_NQN" 1

measure() { # measure SIDE DEV RW DEPTH ROUND
    local report iops
    report=$(fio --name=bench --filename="$2" --ioengine=io_uring --direct=1 --rw="$3" --bs=4k --iodepth="$4" \
        --size=${SIZE_MIB}M --norandommap --randrepeat=0 --time_based --ramp_time=1 --runtime="$RUNTIME" \
        --output-format=json)
    iops=$(echo "$report" | jq '.jobs[0] | if .error == 0 then .read.iops + .write.iops else error("fio failed") end')
    echo "figure $1 $3 $4 $5 $iops" >>"$OUT/results"
}

for round in $(seq "$ROUNDS"); do
    for rw in randread randwrite; do
        for depth in 1 32 128; do
            measure nacre "$(ns_dev "$NQN" 1)" $rw $depth "$round"
            measure nvmet "$(ns_dev "$NVMET_NQN" 1)" $rw $depth "$round"
        done
    done
done
echo "done" >>"$OUT/results"
disconnect "$NQN"
disconnect "$NVMET_NQN"
nacre_stop
