# shellcheck shell=bash
# A network with DCB: the kernel module of tests/vm/dcbsim, captured packets, and a switch that is
# played by lldpd.

# Names of the module's devices, which are the two ends of one cable.
DCB=(dcb0 dcb1)
DCB_DEBUG=/sys/kernel/debug/dcbsim

dcb_up() {
    [ -n "$DCBSIM" ] || skip "the kernel module dcbsim could not be built: the start of the run says why"
    insmod "$DCBSIM"
    local dev
    for dev in "${DCB[@]}"; do ip link set "$dev" mtu 4200 up; done
}

# Addresses for both ends. This machine has both, so rules make packets leave by one end and arrive
# at the other, and not take the way inside the kernel.
dcb_addresses() {
    local at dev
    ip rule add pref 200 lookup local
    ip rule delete pref 0
    sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2
    for at in 0 1; do
        dev=${DCB[$at]}
        sysctl -qw "net.ipv4.conf.$dev.rp_filter=0" "net.ipv4.conf.$dev.accept_local=1"
        ip address add "10.50.0.$((at + 1))/24" dev "$dev"
        ip rule add pref $((10 + at)) iif lo to "10.50.0.$((2 - at))" lookup $((100 + at))
    done
    for at in 0 1; do
        ip route add "10.50.0.$((2 - at))" dev "${DCB[$at]}" src "10.50.0.$((at + 1))" table $((100 + at))
    done
}

dcb_down() {
    [ -d /sys/module/dcbsim ] || return 0
    local at
    for at in 0 1; do
        rdma link delete "rxe-dcb$at" 2>/dev/null || true
        ip rule delete pref $((10 + at)) 2>/dev/null || true
        ip route flush table $((100 + at)) 2>/dev/null || true
    done
    if ip rule show | grep "^200:" >/dev/null; then
        ip rule add pref 0 lookup local
        ip rule delete pref 200
    fi
    rmmod dcbsim
}

dcb_rdma() { # soft-RoCE on both ends: rxe-dcb0, rxe-dcb1
    modprobe ib_uverbs
    modprobe -a rdma_rxe rdma_ucm nvme-rdma
    local at
    for at in 0 1; do
        rdma link add "rxe-dcb$at" type rxe netdev "${DCB[$at]}"
        wait_until 20 holds "/sys/class/infiniband/rxe-dcb$at/ports/1/state" "4: ACTIVE"
        wait_until 20 grep -rqs "0a32:000$((at + 1))" "/sys/class/infiniband/rxe-dcb$at/ports/1/gids"
    done
}

# dcb (iproute2) numbers its requests by the time in seconds, and reads the acknowledgement of its
# first one as the answer to the second. If a second begins between the two, dcb fails after the
# change. This function makes the change again, and replaces an entry that is there by then.
dcb() {
    local try error="$WORK/dcb.error"
    for try in 1 2 3; do
        if command dcb "$@" 2>"$error"; then cat "$error" >&2; return 0; fi
        grep -F "Protocol error" "$error" >/dev/null || break
        set -- "${@/#add/replace}"
    done
    cat "$error" >&2
    return 1
}

dcb_set() { echo "$2" >"$DCB_DEBUG/$1/${3:-set}"; } # dcb_set DEVICE VALUE [FILE]

# The IP packets that arrive at an end of the cable: see capture.py.
capture_start() { # capture_start: at both ends
    local dev
    CAPTURES=()
    for dev in "${DCB[@]}"; do
        rm -f "$WORK/capture.$dev"
        python3 "$HERE/capture.py" "$dev" "$WORK/capture.$dev" &
        CAPTURES+=($!)
    done
    for dev in "${DCB[@]}"; do wait_until 20 test -e "$WORK/capture.$dev"; done
}

capture_stop() {
    kill -TERM "${CAPTURES[@]}"
    wait "${CAPTURES[@]}" || true
    tail -n +1 "$WORK"/capture.*
}

# The DSCPs of packets that arrived: `dscps DEVICE KIND PATTERN`, each once.
dscps() { awk -v kind="$2" -v pattern="$3" '$1 == kind && ($2 " " $3) ~ pattern {print $4}' "$WORK/capture.$1" | sort -nu | xargs; }

# ---- the switch -------------------------------------------------------------------------------

# Announces itself at one end of a cable, see switch.py. lldpd is the foreign opinion on what
# arrives at the other.
switch_up() { # switch_up INTERFACE NAME
    echo "name $2" >"$WORK/switch"
    SWITCH_NAME=$2
    python3 "$HERE/switch.py" "$1" "$WORK/switch" &
    SWITCH=$!
    wait_until 40 test -e "$WORK/switch.sent"
}

# The DCBX TLVs of IEEE 802.1Qaz unless another OUI is given, as bytes: switch_says SUBTYPE BYTES
# [OUI]
switch_says() { echo "${3:-00,80,c2} $1 $2" >>"$WORK/switch"; }

switch_forgets() { # the TLVs
    echo "name $SWITCH_NAME" >"$WORK/switch.new"
    mv "$WORK/switch.new" "$WORK/switch"
}

lldpd_prepare() { # what lldpd and lldpcli need
    [ -n "$LLDPD" ] || skip "lldpd could not be had: the start of the run says why"
    export LD_LIBRARY_PATH=$LLDPD/usr/lib/x86_64-linux-gnu
    mkdir -p /run/lldpd /var/run/lldpd
    getent passwd _lldpd >/dev/null || echo "_lldpd:x:65532:65532::/run/lldpd:/bin/false" >>/etc/passwd
    getent group _lldpd >/dev/null || echo "_lldpd:x:65532:" >>/etc/group
}

switch_down() {
    kill "$SWITCH" 2>/dev/null || true
    wait "$SWITCH" 2>/dev/null || true
}
