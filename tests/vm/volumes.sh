# shellcheck shell=bash
# Load in the background, and replicated volumes: part of lib.sh.

# ---- verifying load
# ------------------------------------------------------------------------------------------

# It runs on $DEV, or on a file of a file system there, until `load_end`, and fails at the first
# error.
LOAD=
# A load that leaves time of an emulated processor to the daemons: for tests that wait for changes
# of paths or nodes. fio's limits of reads and writes, each second.
PACED=(--rate_iops=50,50)

load_start() { # load_start FILE SIZE [FIO OPTIONS…]
    fio --name=load --filename="$1" --size="$2" --rw=randrw --bsrange=4k-32k --iodepth=4 --ioengine=libaio --direct=1 \
        "${FIO_VERIFIED[@]}" --verify_backlog=64 --verify_state_save=0 --time_based --runtime=3600 \
        "${@:3}" --output="$WORK/fio.log" &
    LOAD=$!
    # On any failure from here on, no writing process may be left behind.
    trap load_kill EXIT
    # `load_end` stops it with a signal, which it ignores until it has begun.
    load_goes_on
}

load_goes_on() { # it writes now
    LOAD_BEFORE=$(load_sectors)
    wait_until 120 load_has_written
}
load_sectors() { awk '{ print $7 }' "/sys/class/block/${DEV#/dev/}/stat"; }
load_has_written() { kill -0 "$LOAD" && [ "$(load_sectors)" -ge $((LOAD_BEFORE + 64)) ]; }

load_kill() { [ -z "$LOAD" ] || kill -9 "$LOAD" 2>/dev/null || true; }

load_end() { # and no I/O failed, nor was anything read that had not been written
    kill -INT "$LOAD"
    # Its exit status shows that the signal stopped it.
    wait "$LOAD" || true
    LOAD=
    if ! grep -q 'err= 0' "$WORK/fio.log" || grep -E 'err= *[1-9]|verify: bad' "$WORK/fio.log"; then
        cat "$WORK/fio.log"
        die "fio met an error"
    fi
}

# ---- Nacre's replicated volumes; a test has one, "vol"
# --------------------------------------------------------

volume() { rpc volume_get '{"name":"vol"}'; }
volume_is() { [ "$(volume | jq -r .state)" = "$1" ]; }
volume_is_equal() { # all replicas have the same everywhere
    rpc volume_verify '{"name":"vol"}'
    wait_until 120 volume_is_verified
    volume | jq -c .verify
    expect "different blocks" "$(volume | jq .verify.different_blocks)" 0
}
volume_is_verified() { volume | jq -e '.verify.running == false'; }

# More daemons, each exporting one disk: `keeper N SIZE`, and its listeners at port 442N:
# `keeper_listens N TRANSPORT ADDRESS`.
KEEPERS=()
keeper_nqn() { echo "nqn.2026-01.io.nacre:keeper$1"; }
keeper_rpc() { "$NACRE" rpc --socket "$WORK/keeper$1.sock" "${@:2}"; }
keeper_start() {
    NACRE_SECURITY_SANDBOX=enforce "$NACRE" serve --data-dir "$WORK/keeper$1" -r "$WORK/keeper$1.sock" >>"$DAEMON_LOG" 2>&1 </dev/null &
    KEEPERS[$1]=$!
    wait_until 60 test -S "$WORK/keeper$1.sock"
    wait_until 60 keeper_rpc "$1" framework_wait_init
}
keeper_kill() {
    kill -9 "${KEEPERS[$1]}"
    wait "${KEEPERS[$1]}" 2>/dev/null || true
}
keepers_kill() { [ ${#KEEPERS[@]} = 0 ] || kill -9 "${KEEPERS[@]}" 2>/dev/null || true; }
keeper() {
    local nqn
    nqn=$(keeper_nqn "$1")
    keeper_start "$1"
    truncate -s "$2" "$WORK/kept$1.img"
    keeper_rpc "$1" bdev_uring_create "{\"name\":\"kept\",\"filename\":\"$WORK/kept$1.img\",\"block_size\":512}"
    keeper_rpc "$1" nvmf_create_subsystem "{\"nqn\":\"$nqn\",\"allow_any_host\":true}"
    keeper_rpc "$1" nvmf_subsystem_add_ns "{\"nqn\":\"$nqn\",\"namespace\":{\"nsid\":1,\"bdev_name\":\"kept\"}}"
}
keeper_listens() {
    keeper_rpc "$1" nvmf_subsystem_add_listener \
        "{\"nqn\":\"$(keeper_nqn "$1")\",\"listen_address\":{\"trtype\":\"$2\",\"adrfam\":\"ipv4\",\"traddr\":\"$3\",\"trsvcid\":\"442$1\"}}"
}
