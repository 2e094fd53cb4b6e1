#!/usr/bin/env bash
# Runs inside the virtual machine: the tests of OUT/cases that no other guest has taken, one after
# the other, each under its time limit. The guest that creates the folder TAKEN/test has taken that
# test.
#
#   guest.sh OUT        TARGET=nacre|nvmet  TAKEN=/path/of/folders  NACRE=/path/to/nacre
#                       PINGPONG=/path/to/pingpong  PROBE=/path/to/probe
#                       CONFORMANCE=/path/to/conformance  DCBSIM=/path/to/dcbsim.ko
#                       LLDPD=/folder/of/lldpd  SIW=/path/to/siw.ko
#                       ETCD=/folder/of/etcd  BLKTESTS=/folder/of/blktests
#                       NACRE_TEST_AT_LENGTH=1, or empty
#
# Events go to OUT/results (see xtask/src/vm/suite.rs), the output of each test to OUT/logs. After a
# test the guest is cleaned. If that fails, the guest reports it and stops, and the host boots a new
# one for the rest.
set -uo pipefail

OUT=$1
KEPT=/run/kept
HERE=$KEPT$(cd "$(dirname "$0")" && pwd)
NACRE=$KEPT$NACRE PINGPONG=$KEPT$PINGPONG PROBE=$KEPT$PROBE CONFORMANCE=$KEPT$CONFORMANCE
# An empty path: this part could not be had.
DCBSIM=${DCBSIM:+$KEPT$DCBSIM} LLDPD=${LLDPD:+$KEPT$LLDPD} SIW=${SIW:+$KEPT$SIW} ETCD=${ETCD:+$KEPT$ETCD}
BLKTESTS=${BLKTESTS:+$KEPT$BLKTESTS}
export OUT HERE TARGET NACRE PINGPONG PROBE CONFORMANCE DCBSIM LLDPD SIW ETCD BLKTESTS

event() { echo "$*" >>"$OUT/results"; }

prepare_guest() {
    mkdir -p "$OUT/logs"
    keep_root || return 1
    modprobe -a nvme-fabrics nvme-tcp configfs || return 1
    mount -t configfs none /sys/kernel/config || return 1
    [ "$TARGET" != nvmet ] || modprobe -a nvmet nvmet-tcp || return 1
    dmesg --follow >"$OUT/dmesg" 2>/dev/null &
    # A kernel that killed one of its tasks must not run further tests: the host boots another one,
    # and checks the last messages for a failure of the emulator.
    echo 1 >/proc/sys/kernel/panic_on_oops || return 1
    # Stack traces of a stuck task help more than a silent hang. But an emulated machine that its
    # host does not schedule for half a minute is not stuck.
    echo 120 >/proc/sys/kernel/hung_task_timeout_secs 2>/dev/null
    echo 60 >/proc/sys/kernel/watchdog_thresh 2>/dev/null
    echo 120 >/sys/module/workqueue/parameters/watchdog_thresh 2>/dev/null
    ulimit -n 65536
}

# The guest's root is 9p without caching, which forgets a file with its last reader and a path after
# every walk. So every program start reads the program page by page, which takes tenths of a second
# in an emulated machine. Therefore programs and their libraries come from a second mount with
# caching: no process changes these files while guests run.
keep_root() {
    local dir modules
    mkdir -p "$KEPT" /run/over
    mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro keep "$KEPT" || return 1
    # The guest's kernel is not this machine's: virtme put a link to its modules in the usual place.
    modules=$(readlink "/lib/modules/$(uname -r)") || return 1
    mount -t tmpfs over /run/over || return 1
    for dir in usr etc; do
        mkdir -p /run/over/$dir/upper /run/over/$dir/work
        mount -t overlay -o "lowerdir=$KEPT/$dir,upperdir=/run/over/$dir/upper,workdir=/run/over/$dir/work" \
            "$dir" "/$dir" || return 1
    done
    # jq 1.6 compiles its library whenever it starts, which takes half a second in an emulated
    # machine.
    ln -sf "$KEPT/usr/bin/gojq" /usr/bin/jq || return 1
    mkdir -p /usr/lib/modules
    ln -sfn "$KEPT$modules" "/usr/lib/modules/$(uname -r)"
}

# The limit that a case sets with a line `# limit: SECONDS`; twice that over RDMA, since soft-RoCE
# is much slower than TCP in an emulated machine.
limit_of() { # limit_of CASE
    local limit
    limit=$(sed -n 's/^# limit: \([0-9]*\)$/\1/p' "$HERE/cases/${1%-over-rdma}.sh" | head -1)
    limit=${limit:-300}
    case $1 in *-over-rdma) limit=$((limit * 2)) ;; esac
    echo "$limit"
}

run_case() {
    local name=$1 log="$OUT/logs/$1.log" limit start status verdict
    limit=$(limit_of "$name")
    export CASE=$name WORK=/run/nacre-test DAEMON_LOG="$OUT/logs/$name.daemon.log"
    rm -rf "$WORK" && mkdir -p "$WORK"
    dmesg --clear
    event begin "$name" "$limit"
    start=$(date +%s.%N)
    # Exit status of a finished child: 0 passed, 77 skipped (as in automake), 124 over its limit.
    timeout --kill-after=10 "$limit" bash -c '. "$HERE/lib.sh"; run_script "$CASE"; no_unexpected_errors; echo "the test ended well"' "$name" \
        >"$log" 2>&1 </dev/null
    status=$?
    case $status in
        0) verdict=pass ;;
        77) verdict=skip ;;
        124 | 137) verdict=fail; echo "killed after $limit s" >>"$log" ;;
        *) verdict=fail ;;
    esac
    dmesg >"$OUT/logs/$name.dmesg"
    if grep -qE 'BUG:|Oops|general protection|WARNING: CPU|INFO: task .* blocked' "$OUT/logs/$name.dmesg"; then
        echo "the kernel complained, see $name.dmesg" >>"$log"
        verdict=fail
    fi
    # The daemons of the cases enforce their sandbox.
    if grep -q 'type=1326.*exe="[^"]*nacre"' "$OUT/logs/$name.dmesg"; then
        echo "the sandbox refused a system call, see type=1326 in $name.dmesg" >>"$log"
        verdict=fail
    fi
    local cleaned=0
    timeout --kill-after=10 60 bash -c '. "$HERE/lib.sh"; clean_guest' clean >>"$log" 2>&1 || cleaned=1
    event end "$name" "$verdict" "$(echo "$start $(date +%s.%N)" | awk '{printf "%.1f", $2 - $1}')"
    if [ $cleaned -ne 0 ]; then
        event dirty "$name"
        exit 1
    fi
}

prepare_guest || { echo "the guest lacks a module or a mount" >>"$OUT/results.error"; exit 1; }
while read -r name; do
    mkdir "$TAKEN/$name" 2>/dev/null || continue
    run_case "$name"
done <"$OUT/cases"
event done
sync
