# limit: 240
# Verbs and connection manager over soft-RoCE: every byte of SEND, WRITE and READ, errors, rejects,
# port and device events, and the error text of each missing part.
[ -x "$PINGPONG" ] || skip "no pingpong was built for this run"

quit() {
    rdma link delete rxe9 2>/dev/null || true
    ip link delete rdma9 2>/dev/null || true
}
trap quit EXIT
pingpong() { timeout 60 "$PINGPONG" "$@"; }
says() { # says TEXT COMMAND…: whatever its status
    local text=$1 out
    shift
    out=$("$@" 2>&1) || true
    grep -qF -- "$text" <<<"$out" || die "'$*' does not say '$text' but: $out"
}

# The kernel announces a removal to its clients in the reverse order of their loading. ib_uverbs
# waits there for programs that have the device open if the driver cannot revoke it (rxe cannot).
# Loaded after rdma_cm, it would wait before the connection manager has announced the removal.
modprobe ib_uverbs
modprobe -a rdma_rxe rdma_ucm

step "without a device"
says "No RDMA devices found: " pingpong

ip link add rdma9 type dummy
ip addr add 10.9.9.1/24 dev rdma9
ip addr add fd00:9:9::1/64 dev rdma9 nodad
ip link set rdma9 up
rdma link add rxe9 type rxe netdev rdma9

step "IPv4 and IPv6"
pingpong 10.9.9.1
pingpong fd00:9:9::1

step "the port goes down and up"
pingpong 10.9.9.1 --port rdma9

step "locked memory is limited"
limited() { (ulimit -l 64 && setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock "$PINGPONG" 10.9.9.1); }
# The pools decide the size of the allocation.
says "ibv_reg_mr failed: Cannot allocate memory: " limited
says " bytes asked, RLIMIT_MEMLOCK is 65536 bytes" limited

step "device nodes are missing, as in a container"
# In a separate mount namespace, so that the device nodes of this machine do not change.
without() { # without PATTERN COMMAND…: with those nodes of /dev/infiniband that do not match
    unshare --mount bash -c 'cp -a /dev/infiniband "$WORK/nodes" && rm "$WORK"/nodes/$0 &&
        mount --bind "$WORK/nodes" /dev/infiniband && "$@"; status=$?
        umount /dev/infiniband; rm -r "$WORK/nodes"; exit $status' "$@"
}
says "there is no /dev/infiniband/rdma_cm" without rdma_cm "$PINGPONG" 10.9.9.1
says "No RDMA devices found: /dev/infiniband/uverbs" without 'uverbs*' "$PINGPONG"

step "the device goes away under a connection, and returns"
pingpong 10.9.9.1 --remove rxe9
[ ! -e /sys/class/infiniband/rxe9 ] || die "rxe9 is still there"
rdma link add rxe9 type rxe netdev rdma9
pingpong 10.9.9.1
