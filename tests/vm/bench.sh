#!/usr/bin/env bash
# Runs inside the virtual machine: fio through the kernel's initiator, on Nacre and on the kernel's
# target over a RAM disk, taking turns, with one I/O queue each. Over RDMA, on one soft-RoCE device,
# Nacre over TCP takes turns too.
#
#   bench.sh OUT ROUNDS SECONDS tcp|rdma        NACRE=/path/to/nacre
#
# With LIMIT_TARGET=/path/to/limit-target, a target that only counts bytes takes turns too, polling
# and sleeping.
#
# Writes to OUT/results:  figure SIDE RW BYTES DEPTH ROUND IOPS MEAN_MICROSECONDS
#   with SIDE             nacre|nvmet|polls|sleeps|tcp|rdma
# and at the end:         done
set -uo pipefail

OUT=$1 ROUNDS=$2 RUNTIME=$3 OVER=$4
HERE=$(cd "$(dirname "$0")" && pwd)
export OUT TARGET=nacre WORK=/run/nacre-bench DAEMON_LOG="$OUT/daemon.log"
mkdir -p "$WORK"
# shellcheck source=lib.sh
. "$HERE/lib.sh"

NVMET_NQN=$NQN-nvmet
TCP_NQN=$NQN-tcp
SIZE_MIB=256

modprobe -a nvme-fabrics nvme-tcp configfs nvmet "nvmet-$OVER"
modprobe brd rd_nr=1 rd_size=$((SIZE_MIB * 1024))
mount -t configfs none /sys/kernel/config
ulimit -n 65536
[ "$OVER" = tcp ] || rdma_up

ram_disk() { # ram_disk NAME NQN: a RAM disk of Nacre's, connected
    nacre_subsystem_create "$2" any
    rpc bdev_malloc_create "{\"name\":\"$1\",\"block_size\":512,\"num_blocks\":$((SIZE_MIB * 2048))}"
    rpc nvmf_subsystem_add_ns "{\"nqn\":\"$2\",\"namespace\":{\"bdev_name\":\"$1\"}}"
    connect "$2" --nr-io-queues=1
    written "$2"
}

# written NQN: its disk is there, and has data. Blocks that were never written are read faster than
# any disk with data.
written() {
    wait_until 30 ns_dev "$1" 1
    fio --name=fill --filename="$(ns_dev "$1" 1)" --ioengine=io_uring --direct=1 --rw=write --bs=1M --iodepth=4 \
        --size=${SIZE_MIB}M --output="$WORK/fill" || die "$(cat "$WORK/fill")"
}

nacre_start
ram_disk ram "$NQN"
if [ "$OVER" = rdma ]; then
    # On the address of its own interface, like RDMA.
    TRTYPE=tcp ram_disk ram-tcp "$TCP_NQN"
fi

PORT=4421
nvmet_start
nvmet_subsystem_create "$NVMET_NQN" any
nvmet_ns_add "$NVMET_NQN" 1 $SIZE_MIB /dev/ram0
connect "$NVMET_NQN" --nr-io-queues=1
written "$NVMET_NQN"

# A limit target has no disk. Its admin queue is that of a subsystem of Nacre.
LIMIT_NQN=$NQN-limit
# More than a cache holds.
LIMIT_MIB=64
limit_target() { # limit_target PORT [--sleep]
    local port=$1
    shift
    "$LIMIT_TARGET" --listen "$ADDR:$port" --behind "$ADDR:4420" --blocks $((LIMIT_MIB * 2048)) "$@" &
    LIMIT_PIDS+=($!)
}
LIMIT_PIDS=()
if [ -n "${LIMIT_TARGET:-}" ]; then
    PORT=4420 nacre_subsystem_create "$LIMIT_NQN" any
    rpc bdev_malloc_create "{\"name\":\"limit\",\"block_size\":512,\"num_blocks\":$((LIMIT_MIB * 2048))}"
    rpc nvmf_subsystem_add_ns "{\"nqn\":\"$LIMIT_NQN\",\"namespace\":{\"bdev_name\":\"limit\"}}"
    limit_target 4422
    limit_target 4423 --sleep
fi

# Connected only while it is measured, because a target that polls takes a core.
measure_limit() { # measure_limit SIDE PORT RW BYTES DEPTH ROUND
    PORT=$2 connect "$LIMIT_NQN" --nr-io-queues=1
    wait_until 30 ns_dev "$LIMIT_NQN" 1
    measure "$1" "$LIMIT_NQN" "${@:3}"
    disconnect "$LIMIT_NQN"
}

measure() { # measure SIDE NQN RW BYTES DEPTH ROUND
    local report figures
    report=$(fio --name=bench --filename="$(ns_dev "$2" 1)" --ioengine=io_uring --direct=1 --rw="$3" --bs="$4" \
        --iodepth="$5" --size=100% --norandommap --randrepeat=0 --time_based --ramp_time=1 \
        --runtime="$RUNTIME" --output-format=json)
    figures=$(echo "$report" | jq -r '.jobs[0] | if .error != 0 then error("fio failed") else
        "\(.read.iops + .write.iops) \(([.read, .write] | map(select(.iops > 0) | .lat_ns.mean) | add) / 1000)" end')
    echo "figure $1 $3 $4 $5 $6 $figures" >>"$OUT/results"
}

for round in $(seq "$ROUNDS"); do
    for rw in randread randwrite; do
        places="4k-1 4k-32 4k-128"
        [ "$OVER" = tcp ] || places="$places 128k-16"
        for place in $places; do
            measure nacre "$NQN" $rw "${place%-*}" "${place#*-}" "$round"
            measure nvmet "$NVMET_NQN" $rw "${place%-*}" "${place#*-}" "$round"
            [ -n "${LIMIT_TARGET:-}" ] || continue
            measure_limit polls 4422 $rw "${place%-*}" "${place#*-}" "$round"
            measure_limit sleeps 4423 $rw "${place%-*}" "${place#*-}" "$round"
        done
    done
    [ "$OVER" = tcp ] || for rw in read randwrite; do
        for depth in 128 1; do
            measure tcp "$TCP_NQN" $rw 4k $depth "$round"
            measure rdma "$NQN" $rw 4k $depth "$round"
        done
    done
done
echo "done" >>"$OUT/results"
nvme disconnect-all
nacre_stop
