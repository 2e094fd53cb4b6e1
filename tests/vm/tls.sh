# shellcheck shell=bash
# TLS of the guest's kernel: its handshakes, its keys, and connections over TLS. Part of lib.sh.

TLS_LOG=$WORK/tls.log
TLS_PIDFILE=$WORK/tls.pid

KERNEL_TLS=(/usr/bin/python3 -IS "$HERE/tls.py")
kernel_tls() { "${KERNEL_TLS[@]}" "$@"; } # see tls.py

# Does the kernel's handshakes from here on. The kernel has no keys yet.
tls_up() {
    modprobe -a nvme-tcp tls
    "${KERNEL_TLS[@]}" agent "$TLS_LOG" &
    echo $! >"$TLS_PIDFILE"
    wait_until 60 grep -qsx ready "$TLS_LOG"
}

tls_down() {
    [ ! -f "$TLS_PIDFILE" ] || kill "$(cat "$TLS_PIDFILE")" 2>/dev/null || true
}

# Gives the kernel a key of the daemon, and prints the serial number of the kernel's key.
kernel_key() { # kernel_key NAME HOSTNQN NQN v0|v1|legacy
    kernel_tls key "$WORK/keys/$1" "${@:2}"
}

# How the latest handshake ended, and its identity: `client ok NVMe0R01 …`, `client alert 51 …`.
expect_handshake() { # expect_handshake PATTERN
    local last
    last=$(tail -n 1 "$TLS_LOG")
    [[ $last == $1 ]] || die "the latest handshake is '$last', expected '$1'"
}

# Connects over TLS: the device of the kernel, because nvme-cli 2.3 has no `--tls`. Options are
# those of the kernel, each with its comma: `,tls_key=SERIAL`.
tls_connect() { # tls_connect HOSTNQN NQN PORT [OPTIONS]
    echo "transport=tcp,traddr=$ADDR,trsvcid=$3,nqn=$2,hostnqn=$1,hostid=${1##*:},nr_io_queues=2,tls${4:-}" >/dev/nvme-fabrics
}

# Connects with secure channel concatenation: authentication in clear makes the key of TLS.
concat_connect() { # concat_connect KEY HOSTNQN PORT [OPTIONS]
    echo "transport=tcp,traddr=$ADDR,trsvcid=$3,nqn=$NQN,hostnqn=$2,hostid=${2##*:},nr_io_queues=2,dhchap_secret=$(secret "$1"),concat${4:-}" >/dev/nvme-fabrics
}

tls_connect_and_find() { # tls_connect_and_find HOSTNQN NQN PORT [OPTIONS]: sets CTRL and DEV
    tls_connect "$@"
    CTRL=$(ctrl_of "$2")
    wait_until 60 ns_dev "$2" 1
    DEV=$(ns_dev "$2" 1)
}

tls_of() { # tls_of QID FIELD: identity, cipher or derivation, as the daemon sees it
    rpc nvmf_subsystem_get_qpairs "{\"nqn\":\"$NQN\"}" |
        jq -r --argjson qid "$1" --arg field "$2" '.[] | select(.qid == $qid) | .tls[$field]'
}

# A subsystem of the kernel's target for Nacre as the host, behind a TLS port of its own, which
# far_up opens. The cleanup of the guest knows only the first port.
FAR=nqn.2026-01.org.example:far
FAR_PORT=4430
far_clean() { rm -f "$NVMET"/ports/11/subsystems/*; rmdir "$NVMET"/ports/11; } 2>/dev/null
far_make() { # far_make ["ATTRIBUTE VALUE"…]
    local at name value
    modprobe -a nvmet nvmet-tcp
    trap far_clean EXIT
    mkdir -p "$NVMET/subsystems/$FAR"
    nvmet_host_allow "$FAR" "$HOST_A"
    nvmet_ns_add "$FAR" 1 64
    mkdir "$NVMET/ports/11"
    for at in "trtype tcp" "adrfam ipv4" "traddr $ADDR" "trsvcid $FAR_PORT" "tsas tls1.3" "$@"; do
        read -r name value <<<"$at"
        echo "$value" >"$NVMET/ports/11/addr_$name"
    done
}
far_up() { ln -s "$NVMET/subsystems/$FAR" "$NVMET/ports/11/subsystems/$FAR"; }
