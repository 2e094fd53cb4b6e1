# limit: 3000
# The nvme group of blktests, with the stock kernel as the host, by blktests' hook for a target of
# its own. Runs if NACRE_TEST_BLKTESTS names a checkout of blktests.
nacre_only "a target behind blktests' hook"
[ -n "$BLKTESTS" ] || skip "NACRE_TEST_BLKTESTS names no checkout of blktests"
for program in gawk bc; do command -v $program >/dev/null || skip "blktests needs $program"; done
TREE=$WORK/blktests
cp -r "$BLKTESTS" "$TREE"
# blktests looks for namespaces, keys and parameters of authentication in the kernel's target, and
# for its options. It cannot read versions of Debian's kernels, such as 6.12.117+deb12.
cat >>"$TREE/tests/nvme/rc" <<'END'
_have_kernel_options() { :; }
_have_kver() { :; }
_nvme_ns_ready() { local dev; dev=$(_find_nvme_dev "$1"); [ -n "$dev" ] && [ -b "/dev/${dev}n1" ] && [ -e "/sys/block/${dev}n1/uuid" ]; }
_set_nvmet_hostkey() { "$NVME_TARGET_CONTROL" keys hostkey "$2"; }
_set_nvmet_ctrlkey() { "$NVME_TARGET_CONTROL" keys ctrlkey "$2"; }
_set_nvmet_hash() { local hash=${2#hmac(}; "$NVME_TARGET_CONTROL" offer dhchap_digests "${hash%)}"; }
_set_nvmet_dhgroup() { "$NVME_TARGET_CONTROL" offer dhchap_dhgroups "$2"; }
END
# The guest has no udev.
mkdir -p "$WORK/bin"
ln -sf /bin/true "$WORK/bin/udevadm"
export PATH="$WORK/bin:$PATH"
AUTHENTICATION=(041 042 043 044 045)
# Without those that need the kernel's target, several ports, or a large image.
BASIC=(003 004 005 006 008 010 014 018 019 021 022 023 025 026 027 028 029 040 047 061)
# Failures that the tests provoke.
allow_errors '.*'
# Else the first test finds no loop device.
modprobe loop

run() { # run TRTYPE TEST…
    local test passed
    export BLKTESTS_TRTYPE=$1 BLKTESTS_ADDR=$ADDR USE_RXE=1 NVME_TARGET_CONTROL="$HERE/blktests.sh" NVME_IMG_SIZE=64M
    shift
    (cd "$TREE" && ./check "${@/#/nvme/}") >"$WORK/check" 2>&1 || true
    cat "$WORK/check"
    for test in "$@"; do
        # `nvme/041 (tr=tcp) (Create authenticated connections) [passed]`, on a terminal or not.
        passed=$(grep -cE "^nvme/$test .*\[passed\]" "$WORK/check" || true)
        if [ "$passed" = 0 ]; then
            cat "$TREE"/results/*/nvme/"$test"*.bad "$TREE"/results/*/nvme/"$test"*.dmesg 2>/dev/null || true
            tail -n 20 "$WORK/blktests-target.log"
            FAILED+=("$test over $BLKTESTS_TRTYPE")
        fi
    done
}

FAILED=()
target_start
step "over TCP"
run tcp "${BASIC[@]}" "${AUTHENTICATION[@]}"
# blktests.sh may have started the daemon again.
kill -TERM "$(daemon_pid)"
wait_until 60 test ! -e "/proc/$(daemon_pid)"
step "over RDMA"
rdma_up
target_start
run rdma "${BASIC[@]}" "${AUTHENTICATION[@]}"
[ ${#FAILED[@]} = 0 ] || die "blktests fails: ${FAILED[*]}"
