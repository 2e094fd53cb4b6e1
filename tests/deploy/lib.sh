# Shared by the scripts of this folder: results, and this machine's root as a disposable copy.
# shellcheck shell=bash

PASSED=0
FAILED=0
NQN=nqn.2026-01.io.nacre

SAID=$(mktemp)
trap 'rm -f "$SAID"' EXIT

# check NAME COMMAND…: runs the command in this shell and counts the result.
check() {
    local name=$1
    shift
    if "$@" >"$SAID" 2>&1; then
        echo "ok: $name"
        PASSED=$((PASSED + 1))
    else
        echo "FAILED: $name"
        tail -n 30 "$SAID" | sed 's/^/  | /'
        FAILED=$((FAILED + 1))
    fi
}

skip() { # skip NAME WHY
    echo "SKIPPED: $1: $2"
}

# Prints the totals, which the caller reads, and ends.
finish() {
    echo "$PASSED passed, $FAILED failed"
    [ "$FAILED" = 0 ]
    exit
}

# until_true SECONDS COMMAND…: waits for the command to succeed.
until_true() {
    local tries=$(($1 * 10))
    shift
    while ! "$@" >/dev/null 2>&1; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || return 1
        sleep 0.1
    done
}

# Mounts what programs expect in the root folder $1. Needs a mount and a process namespace of its
# own.
furnish() {
    mount -t proc proc "$1/proc"
    mount --rbind --make-rslave /dev "$1/dev"
    mount --rbind --make-rslave /sys "$1/sys"
    mount -t tmpfs run "$1/run"
    mount -t tmpfs tmp "$1/tmp"
}

# Makes $1 a copy-on-write view of this machine's root. Writes go to memory.
copy_of_root() {
    mkdir -p "$1"
    mount -t tmpfs copy "$1"
    mkdir "$1/upper" "$1/work" "$1/root"
    mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
    furnish "$1/root"
}
