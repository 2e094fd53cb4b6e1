# shellcheck shell=bash
# Common parts of every test of the virtual machine: the target, the host, and assertions.
#
# A test is a list of commands under `set -e`: the first failing command fails the test. Both
# targets have the same functions, so that the kernel's nvmet can validate the tests before they
# judge Nacre.
#
# A program whose reader leaves early fails (SIGPIPE), and so does its pipeline: read to the end,
# with `sed -n 1p` and `grep … >/dev/null` in place of `head -1` and `grep -q`.
set -Eeuo pipefail
shopt -s nullglob

NQN=nqn.2026-01.io.nacre:test
DISCOVERY_NQN=nqn.2014-08.org.nvmexpress.discovery
# The transport and address of target and host: `rdma_up` switches to RDMA for the rest of a test.
TRTYPE=tcp
ADDR=127.0.0.1
PORT=4420
HOST_A=nqn.2014-08.org.nvmexpress:uuid:11111111-1111-4111-8111-111111111111
HOST_A_ID=11111111-1111-4111-8111-111111111111
HOST_B=nqn.2014-08.org.nvmexpress:uuid:22222222-2222-4222-8222-222222222222
HOST_B_ID=22222222-2222-4222-8222-222222222222

# ---- messages
# ------------------------------------------------------------------------------------------------

step() { echo "== $*"; }
die() { echo "FAILED: $*"; exit 1; }
skip() { echo "SKIPPED: $*"; exit 77; }

trap 'echo "FAILED at line $LINENO: $BASH_COMMAND (exit $?)"' ERR

expect() { # expect WHAT ACTUAL WANTED
    [ "$2" = "$3" ] || die "$1 is '$2', expected '$3'"
}

expect_at_most() { # expect_at_most WHAT ACTUAL LIMIT
    [ "$2" -le "$3" ] || die "$1 is $2, expected at most $3"
}

expect_failure() { # expect_failure COMMAND…: it must fail, and what it says is in $FAILURE
    if FAILURE=$("$@" 2>&1); then die "'$*' succeeded and should not have"; fi
    echo "refused as it should be: $FAILURE"
}

# ---- commands that fail --------------------------------------------------------------------------

# Daemons log each command of a host that ends with an error. A case must declare such commands:
#
#   expect_errors PATTERN…   extended regular expressions; each has to match a failed command
#   allow_errors PATTERN…    may match one, such as commands under way when a connection is lost
export NACRE_LOG_FLAGS=nvmf_failed
EXPECTED_ERRORS=() ALLOWED_ERRORS=()
expect_errors() { EXPECTED_ERRORS+=("$@"); }
allow_errors() { ALLOWED_ERRORS+=("$@"); }

# `Read of namespace 1: LBA Out of Range (sct 0x0, sc 0x80, do not retry)`, one per failed command.
failed_commands() { sed -n 's/.*DEBUG command failed: \(.*) \)subsystem=.*/\1/p' "$DAEMON_LOG"; }

no_unexpected_errors() {
    [ -f "$DAEMON_LOG" ] || return 0
    local failed=$WORK/failed pattern
    failed_commands >"$failed"
    for pattern in "${EXPECTED_ERRORS[@]}"; do
        grep -qE -- "$pattern" "$failed" || die "no command failed with '$pattern', as the case expects"
    done
    for pattern in "${EXPECTED_ERRORS[@]}" "${ALLOWED_ERRORS[@]}"; do
        grep -vE -- "$pattern" "$failed" >"$failed.rest" || true
        mv "$failed.rest" "$failed"
    done
    [ ! -s "$failed" ] || { sort "$failed" | uniq -c; die "these commands failed and should not have"; }
}

PAUSE=$WORK/pause
[ -p "$PAUSE" ] || mkfifo "$PAUSE"

at_length() { [ -n "${NACRE_TEST_AT_LENGTH:-}" ]; } # a run without a limit of its time

wait_until() { # wait_until SECONDS COMMAND…: polls until it succeeds
    local limit=$1 end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || die "'$*' did not come true within $limit s"
        # A pause without a process: a read with a timeout from a silent input.
        read -r -t 0.1 <>"$PAUSE" || true
    done
}

nacre_only() { [ "$TARGET" = nacre ] || skip "only for Nacre: $*"; }

# ---- RDMA ----------------------------------------------------------------------------------------

RDMA_LINK=nacrerdma
RDMA_DEV=rxe0

# Creates a separate interface, with soft-RoCE on it.
rdma_up() {
    # ib_uverbs first: the kernel announces a removed device in the reverse order of loading, and
    # ib_uverbs waits for programs that have it open. These programs must have been notified by
    # then.
    modprobe ib_uverbs
    modprobe -a dummy rdma_rxe rdma_ucm nvme-rdma
    [ "$TARGET" != nvmet ] || modprobe nvmet-rdma
    ip link add "$RDMA_LINK" type dummy
    ip link set "$RDMA_LINK" mtu 4200 up
    ip address add 10.9.8.1/24 dev "$RDMA_LINK"
    ip address add fd00:9:8::1/64 dev "$RDMA_LINK" nodad
    rxe_add
    TRTYPE=rdma ADDR=10.9.8.1
}

rxe_add() {
    rdma link add "$RDMA_DEV" type rxe netdev "$RDMA_LINK"
    wait_until 20 holds "/sys/class/infiniband/$RDMA_DEV/ports/1/state" "4: ACTIVE"
    # The kernel adds GIDs for addresses in the background.
    wait_until 20 grep -rqs "0a09:0801" "/sys/class/infiniband/$RDMA_DEV/ports/1/gids"
}

# Runs the script of a case. `# also: rdma` in it makes the case NAME-over-rdma of the same script.
run_script() { # run_script CASE
    local script=${1%-over-rdma}
    [ "$script" = "$1" ] || rdma_up
    # shellcheck disable=SC1090
    . "$HERE/cases/$script.sh"
    [ "$script" = "$1" ] || expect_no_copies
}

# The aligned path does not copy between the wire and a buffer.
expect_no_copies() {
    [ "$TARGET" = nacre ] || return 0
    # A test may end with its daemon stopped.
    kill -0 "$(daemon_pid)" 2>/dev/null || return 0
    expect "bytes copied" "$(rpc rdma_get_stats | jq .copied_bytes)" 0
}

rdma_down() {
    rdma link delete "$RDMA_DEV" 2>/dev/null || true
    ip link delete "$RDMA_LINK" 2>/dev/null || true
}

# ---- the target ----------------------------------------------------------------------------------

target_start() { "${TARGET}_start" "$@"; }
subsystem_create() { "${TARGET}_subsystem_create" "$@"; }   # NQN any|listed
subsystem_delete() { "${TARGET}_subsystem_delete" "$@"; }   # NQN
host_allow() { "${TARGET}_host_allow" "$@"; }               # NQN HOSTNQN
ns_add() { "${TARGET}_ns_add" "$@"; }                       # NQN NSID MIB
ns_remove() { "${TARGET}_ns_remove" "$@"; }                 # NQN NSID
ns_resize() { "${TARGET}_ns_resize" "$@"; }                 # NQN NSID MIB

# The name of the discovery service, and the name by which the kernel knows its controllers.
discovery_nqn() { "${TARGET}_discovery_nqn"; }

# The usual start: one subsystem with one namespace that admits any host.
serve() { # serve [MIB]
    target_start
    subsystem_create "$NQN" any
    ns_add "$NQN" 1 "${1:-256}"
}

# The data of a namespace: a sparse file in memory.
backing() { echo "$WORK/${1//[^a-z0-9]/_}-$2.img"; }

# ---- Nacre ---------------------------------------------------------------------------------------

SOCK=$WORK/nacre.sock
PIDFILE=$WORK/nacre.pid

rpc() { "$NACRE" rpc --socket "$SOCK" "$@"; }

daemon_pid() { cat "$PIDFILE"; }

nacre_start() {
    [ -x "$NACRE" ] || die "there is no nacre at '$NACRE'"
    NACRE_SECURITY_SANDBOX=enforce "$NACRE" serve --data-dir "$WORK/data" -r "$SOCK" "$@" >>"$DAEMON_LOG" 2>&1 </dev/null &
    echo $! >"$PIDFILE"
    # A process costs tenths of a second in an emulated machine, so the first attempt should
    # succeed. The socket answers before the stored state is restored. Transports are created with
    # their first listener.
    wait_until 60 test -S "$SOCK"
    wait_until 60 rpc framework_wait_init
}

# Writes $WORK/nacre.toml, which creates and serves one disk: config_serving TYPE SIZE. The rest of
# the file, mainly its listeners, is read from stdin.
config_serving() {
    cat >"$WORK/nacre.toml"
    cat >>"$WORK/nacre.toml" <<END

[[bdev]]
name = "disk"
type = "$1"
size = "$2"

[[nvmf.subsystem]]
nqn = "$NQN"
allow_any_host = true
[[nvmf.subsystem.namespace]]
bdev = "disk"
END
}

# The state after a power failure, as far as a process can simulate it.
nacre_kill() {
    kill -9 "$(daemon_pid)"
    wait "$(daemon_pid)" 2>/dev/null || true
}

nacre_stop() {
    kill -TERM "$(daemon_pid)"
    local status=0
    wait "$(daemon_pid)" || status=$?
    expect "the daemon's exit status" $status 0
}

nacre_subsystem_create() {
    local any=true
    [ "$2" = any ] || any=false
    rpc nvmf_create_subsystem "{\"nqn\":\"$1\",\"allow_any_host\":$any,\"serial_number\":\"NACRETEST\"}"
    rpc nvmf_subsystem_add_listener \
        "{\"nqn\":\"$1\",\"listen_address\":{\"trtype\":\"$TRTYPE\",\"adrfam\":\"ipv4\",\"traddr\":\"$ADDR\",\"trsvcid\":\"$PORT\"}}"
}

nacre_discovery_nqn() {
    rpc nvmf_get_subsystems "{\"nqn\":\"$DISCOVERY_NQN\"}" | jq -r '.[0] | .unique_nqn // .nqn'
}

nacre_subsystem_delete() { rpc nvmf_delete_subsystem "{\"nqn\":\"$1\"}"; }

nacre_host_allow() { rpc nvmf_subsystem_add_host "{\"nqn\":\"$1\",\"host\":\"$2\"}"; }

bdev_name() { echo "${1//[^a-z0-9]/_}-$2"; }

nacre_ns_add() {
    truncate -s "$3M" "$(backing "$1" "$2")"
    rpc bdev_aio_create "{\"name\":\"$(bdev_name "$1" "$2")\",\"filename\":\"$(backing "$1" "$2")\",\"block_size\":512}"
    rpc nvmf_subsystem_add_ns "{\"nqn\":\"$1\",\"namespace\":{\"nsid\":$2,\"bdev_name\":\"$(bdev_name "$1" "$2")\"}}"
}

nacre_ns_remove() {
    rpc nvmf_subsystem_remove_ns "{\"nqn\":\"$1\",\"nsid\":$2}"
    rpc bdev_aio_delete "{\"name\":\"$(bdev_name "$1" "$2")\"}"
}

nacre_ns_resize() {
    truncate -s "$3M" "$(backing "$1" "$2")"
    rpc bdev_aio_rescan "{\"name\":\"$(bdev_name "$1" "$2")\"}"
}

# Keys of the daemon: a file each, below $WORK/keys.
# key_make NAME [--tls]
key_make() { "$NACRE" key generate "$1" --folder "$WORK/keys" --socket "$SOCK" "${@:2}"; }
secret() { cat "$WORK/keys/$1"; }                                                 # secret NAME

# The text of each key in $WORK/keys is in no log, no file of the state (the audit log is one) and
# no answer of the daemon.
expect_no_leak() {
    local file name mark method places
    [ -s "$WORK/data/audit.log" ] || die "there is no audit log to search"
    places=$WORK/answers
    mkdir -p "$places"
    for method in nvmf_get_subsystems keyring_get_keys key_list host_auth_status state_get events_get audit_get; do
        rpc $method >"$places/$method"
    done
    rpc nvmf_subsystem_get_qpairs "{\"nqn\":\"$NQN\"}" >"$places/qpairs"
    for file in "$WORK"/keys/*; do
        name=${file##*/}
        mark=$(secret "$name" | cut -d: -f3 | cut -c5-24)
        [ ${#mark} = 20 ] || die "$name is no key"
        if grep -rlaF -- "$mark" "$DAEMON_LOG" "$WORK/data" "$places"; then die "these files have the secret of $name"; fi
    done
    rm -r "$places"
}

# ---- nvmet, through configfs ---------------------------------------------------------------------

NVMET=/sys/kernel/config/nvmet

nvmet_start() {
    mkdir -p "$NVMET/ports/1"
    echo "$TRTYPE" >"$NVMET/ports/1/addr_trtype"
    echo ipv4 >"$NVMET/ports/1/addr_adrfam"
    echo "$ADDR" >"$NVMET/ports/1/addr_traddr"
    echo "$PORT" >"$NVMET/ports/1/addr_trsvcid"
}

nvmet_stop() { nvmet_clean; }

nvmet_discovery_nqn() { cat "$NVMET/discovery_nqn" 2>/dev/null || echo $DISCOVERY_NQN; }

nvmet_subsystem_create() {
    mkdir "$NVMET/subsystems/$1"
    [ "$2" != any ] || echo 1 >"$NVMET/subsystems/$1/attr_allow_any_host"
    ln -s "$NVMET/subsystems/$1" "$NVMET/ports/1/subsystems/$1"
}

nvmet_subsystem_delete() {
    rm -f "$NVMET/ports/1/subsystems/$1" "$NVMET/subsystems/$1/allowed_hosts/"*
    local ns
    for ns in "$NVMET/subsystems/$1/namespaces/"*; do
        echo 0 >"$ns/enable"
        rmdir "$ns"
    done
    rmdir "$NVMET/subsystems/$1"
}

nvmet_host_allow() {
    mkdir -p "$NVMET/hosts/$2"
    ln -s "$NVMET/hosts/$2" "$NVMET/subsystems/$1/allowed_hosts/$2"
}

nvmet_ns_add() { # a fourth argument names a device to use in place of a file
    local ns="$NVMET/subsystems/$1/namespaces/$2" path=${4:-$(backing "$1" "$2")}
    [ -n "${4:-}" ] || truncate -s "$3M" "$path"
    mkdir "$ns"
    echo -n "$path" >"$ns/device_path"
    echo 1 >"$ns/enable"
}

nvmet_ns_remove() {
    local ns="$NVMET/subsystems/$1/namespaces/$2"
    echo 0 >"$ns/enable"
    rmdir "$ns"
}

nvmet_ns_resize() {
    truncate -s "$3M" "$(backing "$1" "$2")"
    echo 1 >"$NVMET/subsystems/$1/namespaces/$2/revalidate_size"
}

nvmet_clean() {
    local subsystem host
    for subsystem in "$NVMET/subsystems/"*; do nvmet_subsystem_delete "$(basename "$subsystem")"; done
    for host in "$NVMET/hosts/"*; do rmdir "$host"; done
    [ ! -d "$NVMET/ports/1" ] || rmdir "$NVMET/ports/1"
}

# ---- the Linux host ------------------------------------------------------------------------------

connect() { # connect NQN [OPTIONS…]: as host A unless OPTIONS name another
    local nqn=$1 identity=(--hostnqn="$HOST_A" --hostid="$HOST_A_ID")
    shift
    case " $* " in *--hostnqn*) identity=() ;; esac
    nvme connect -t "$TRTYPE" -a "$ADDR" -s "$PORT" -n "$nqn" "${identity[@]}" "$@"
}

# connect_and_find NQN [OPTIONS…]: sets CTRL (nvme0) and DEV (/dev/nvme0n1, namespace 1)
connect_and_find() {
    connect "$@"
    CTRL=$(ctrl_of "$1")
    wait_until 60 ns_dev "$1" 1
    DEV=$(ns_dev "$1" 1)
}

# The loops below start no process: in an emulated machine each costs tens of milliseconds.
holds() { # holds FILE TEXT: whether the first line of FILE is TEXT
    local text
    { read -r text <"$1"; } 2>/dev/null && [ "$text" = "$2" ]
}

# The native multipath paths of one subsystem, each over its own transport.
paths_of() { PATHS_OF=$1; } # paths_of NQN
# The kernel names paths nvmeXcYn1.
ctrl_over() { # ctrl_over TRANSPORT: fails while there is none
    local dir
    for dir in /sys/class/nvme/nvme*; do
        holds "$dir/subsysnqn" "$PATHS_OF" && holds "$dir/transport" "$1" && echo "${dir##*/}" && return 0
    done
    return 1
}
path_over() { local c; c=$(ctrl_over "$1") && echo /sys/class/nvme/"$c"/nvme*c"${c#nvme}"n1; }
has_state() { holds "$(path_over "$1")/ana_state" "$2"; }
ios() { awk '{ print $1 + $5 }' "$(path_over "$1")/stat"; }
none_over() { ! ctrl_over "$1"; }
grows() { [ "$(ios "$1")" -gt "$2" ]; }

# Two hosts of one kernel, each with its own device: a and b are their controllers. Native multipath
# would merge the two devices, so a test with them starts with `without_multipath`.
without_multipath() {
    trap 'nvme disconnect -n "$NQN"; clean_guest; mkdir -p "$WORK"; load_nvme Y' EXIT
    load_nvme N
}

load_nvme() { # load_nvme MULTIPATH
    local targets=() module
    [ "$TARGET" != nvmet ] || targets=("nvmet-$TRTYPE" nvmet)
    # For both transports: an earlier test may have loaded the other one, which uses nvme-fabrics
    # too, and the kernel's target, which uses nvme-core.
    for module in nvmet-tcp nvmet-rdma nvmet; do modprobe -r $module; done
    modprobe -r "${targets[@]}" nvme-tcp nvme-rdma nvme-fabrics
    modprobe -r nvme nvme-core 2>/dev/null || true
    modprobe nvme-core multipath="$1"
    modprobe -a nvme-fabrics "nvme-$TRTYPE" "${targets[@]}"
    [ "$(cat /sys/module/nvme_core/parameters/multipath)" = "$1" ] || die "nvme-core did not reload"
}

connect_two_hosts() {
    connect "$NQN" --hostnqn="$HOST_A" --hostid="$HOST_A_ID"
    # nvme-cli 2.3 takes a second host for a second connection of the first and refuses it; the
    # kernel does not.
    echo "transport=$TRTYPE,traddr=$ADDR,trsvcid=$PORT,nqn=$NQN,hostnqn=$HOST_B,hostid=$HOST_B_ID" >/dev/nvme-fabrics
    a=$(ctrl_of "$NQN" "$HOST_A") b=$(ctrl_of "$NQN" "$HOST_B")
    wait_until 60 test -b "/dev/${a}n1"
    wait_until 60 test -b "/dev/${b}n1"
}

ctrl_of() { # the controllers of NQN, one per line, optionally of one host
    local dir
    for dir in /sys/class/nvme/nvme*; do
        holds "$dir/subsysnqn" "$1" || continue
        [ -z "${2:-}" ] || holds "$dir/hostnqn" "$2" || continue
        echo "${dir##*/}"
    done
}

ns_dev() { # the block device of namespace NSID of NQN; fails while there is none
    local owner block name
    # With native multipath a namespace belongs to the subsystem, without it to its controller.
    for owner in /sys/class/nvme-subsystem/* /sys/class/nvme/nvme*; do
        holds "$owner/subsysnqn" "$1" || continue
        for block in "$owner"/nvme*n*; do
            name=${block##*/}
            # nvme0c0n1 is a path, not a device.
            [[ $name != *c*n* ]] || continue
            holds "$block/nsid" "$2" || continue
            [ -b "/dev/$name" ] || continue
            echo "/dev/$name"
            return 0
        done
    done
    return 1
}

no_ns_dev() { ! ns_dev "$@" >/dev/null; }

size_mib() { echo $(($(blockdev --getsize64 "$1") / 1048576)); }

is_mib() { [ "$(size_mib "$1")" = "$2" ]; }

is_live() { holds "/sys/class/nvme/$1/state" live; }
not_live() { ! is_live "$1"; }

disconnect() { # disconnect NQN: waits until it is gone
    nvme disconnect -n "$1"
    wait_until 30 gone "$1"
}

gone() { [ -z "$(ctrl_of "$1")" ]; }

# Options of every verifying fio. A time-based job restarts its blocks while the last ones are still
# in flight. Two concurrent I/Os to one block can leave, or read, a mix of both, on any disk.
FIO_VERIFIED=(--verify=crc32c --verify_fatal=1 --serialize_overlap=1)

# fio with its data verified: fio_verify DEV NAME OPTIONS…
fio_verify() {
    local dev=$1 name=$2
    shift 2
    step "fio $name: $*"
    fio --name="$name" --filename="$dev" --ioengine=libaio --direct=1 --randrepeat=0 --group_reporting \
        "${FIO_VERIFIED[@]}" --do_verify=1 --output="$WORK/fio-$name.log" "$@" ||
        { cat "$WORK/fio-$name.log"; die "fio $name"; }
    if grep -E 'err=[^ ]*[1-9]|verify: bad' "$WORK/fio-$name.log"; then die "fio $name met an error"; fi
}

# A tree of files with names, sizes and contents of all kinds, and its checksums.
make_tree() { # make_tree DIR
    local i
    mkdir -p "$1"/{a,b/c/d,empty}
    for i in $(seq 1 60); do head -c $((i * i * 37)) /dev/urandom >"$1/a/file$i"; done
    head -c 20000000 /dev/urandom >"$1/b/big"
    ln -s ../../big "$1/b/c/d/link"
    ln "$1/b/big" "$1/b/c/hard"
    truncate -s 10M "$1/b/c/sparse"
    tree_sum "$1"
}

tree_sum() { (cd "$1" && find . -type f -print0 | sort -z | xargs -0 sha256sum && find . | sort) | sha256sum; }

# The whole life of a file system on a namespace: filesystem_round MKFS-COMMAND…
filesystem_round() {
    local mnt=$WORK/mnt sum
    serve 512
    connect_and_find "$NQN"
    "$@" "$DEV"
    mkdir -p "$mnt"
    mount "$DEV" "$mnt"
    sum=$(make_tree "$mnt/tree")
    umount "$mnt"
    disconnect "$NQN"

    step "checking the tree after a reconnect"
    connect_and_find "$NQN"
    mount "$DEV" "$mnt"
    expect "the tree" "$(tree_sum "$mnt/tree")" "$sum"
    step "discarding and overwriting while mounted"
    rm -r "$mnt/tree/a" && fstrim -v "$mnt"
    sum=$(make_tree "$mnt/second")
    umount "$mnt"
    mount "$DEV" "$mnt"
    expect "the second tree" "$(tree_sum "$mnt/second")" "$sum"
    umount "$mnt"
}

# ---- further parts, one topic each
# ---------------------------------------------------------------------------

# shellcheck disable=SC1091
. "$HERE/volumes.sh"
# shellcheck disable=SC1091
. "$HERE/drives.sh"
# shellcheck disable=SC1091
. "$HERE/network.sh"
# shellcheck disable=SC1091
. "$HERE/tls.sh"

# ---- cleanup
# -------------------------------------------------------------------------------------------------

clean_guest() {
    local pid dir
    trap - ERR
    umount "$WORK/mnt" 2>/dev/null || true
    # With a lost target, queued I/O would block the disconnect.
    for dir in /sys/class/nvme/nvme*; do
        # PCIe drives have no such file.
        [ ! -e "$dir/delete_controller" ] || echo 1 >"$dir/delete_controller" || true
    done
    if [ -f "$PIDFILE" ]; then
        pid=$(daemon_pid)
        kill -9 "$pid" 2>/dev/null || true
    fi
    [ ! -d $NVMET ] || nvmet_clean
    for dir in /sys/class/nvme/nvme*; do
        # The kernel deletes a controller in the background.
        holds "$dir/transport" pcie || wait_until 30 test ! -e "$dir"
    done
    tls_down
    drives_back
    rdma_down
    dcb_down
    if ! mountpoint -q "$WORK/mnt"; then rm -rf "$WORK"; fi
}
