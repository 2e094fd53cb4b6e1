#!/usr/bin/env bash
# Runs inside the virtual machine: 4 KiB random reads of one emulated drive by one job on one core,
# through the kernel's driver (fio with io_uring) and through Nacre's. They take turns: each round
# hands the drive over and back.
#
#   bench-nvme.sh OUT ROUNDS SECONDS        NACRE=/path/to/nacre
#
# Writes to OUT/results:  figure kernel|nacre DEPTH ROUND IOPS MEAN_MICROSECONDS
# and at the end:         done
set -uo pipefail

OUT=$1 ROUNDS=$2 RUNTIME=$3
HERE=$(cd "$(dirname "$0")" && pwd)
export OUT TARGET=nacre WORK=/run/nacre-bench DAEMON_LOG="$OUT/daemon.log"
mkdir -p "$WORK"
# shellcheck source=lib.sh
. "$HERE/lib.sh"

DEPTHS="1 32"
NSID=2
# The core of both sides. The kernel's first core runs the rest of the system and stays free.
CORE=1

figure() { echo "figure $*" >>"$OUT/results"; }

kernel() { # kernel DEPTH ROUND
    local report figures
    report=$(fio --name=bench --filename="$(drive_disk "$SECOND_SERIAL" $NSID)" --ioengine=io_uring --direct=1 \
        --rw=randread --bs=4k --iodepth="$1" --numjobs=1 --cpus_allowed=$CORE --norandommap --randrepeat=0 \
        --time_based --ramp_time=1 --runtime="$RUNTIME" --output-format=json)
    figures=$(jq -r '.jobs[0] | if .error != 0 then error("fio failed") else
        "\(.read.iops) \(.read.lat_ns.mean / 1000)" end' <<<"$report")
    figure kernel "$1" "$2" "$figures"
}

nacre() { # nacre DEPTH ROUND
    local figures
    "$NACRE" perf "pcie://$SECOND?nsid=$NSID" --rw randread --size 4k --depth "$1" --queues 1 \
        --cores $(printf '0x%x' $((1 << CORE))) --warmup 1 --seconds "$RUNTIME" --json --quiet >"$WORK/perf"
    figures=$(jq -r '"\(.iops) \(.read.latency_ns.mean / 1000)"' "$WORK/perf")
    cp "$WORK/perf" "$OUT/perf.$2.$1"
    figure nacre "$1" "$2" "$figures"
}

ulimit -l unlimited
modprobe vfio-pci
drives_up
for round in $(seq "$ROUNDS"); do
    for depth in $DEPTHS; do kernel "$depth" "$round"; done
    "$NACRE" nvme bind "$SECOND"
    for depth in $DEPTHS; do nacre "$depth" "$round"; done
    "$NACRE" nvme unbind "$SECOND"
    wait_until 60 drive_is_live "$SECOND_SERIAL"
done
echo "done" >>"$OUT/results"
