# A drive that does not answer in time: each rung of the ladder is climbed and told, and once the drive answers again no
# I/O has failed, and every block is what was written.
# hardware: drives
# limit: 1500
nacre_only "it drives NVMe drives"

drives_up
# Not the first: QEMU does not let go any more of a drive that was throttled, which could be pulled and not be put back.
"$NACRE" nvme bind "$SECOND"
drive_status() { rpc bdev_nvme_get_controllers '{"name":"Nvme0"}' | jq ".[0].ctrlrs[0].drive.status.$1"; }
at_least() { [ "$(drive_status "$1")" -ge "$2" ]; }
# How many bytes and I/Os a second QEMU lets through to the drive's image; 0: all.
throttle() { # throttle BYTES IOS
    monitor block_set_io_throttle \
        "{\"id\":\"drive1n1\",\"bps\":$1,\"bps_rd\":0,\"bps_wr\":0,\"iops\":$2,\"iops_rd\":0,\"iops_wr\":0}"
}
# Whatever happens: other tests have the drive next.
trap 'throttle 0 0' EXIT

# The host asks again for what a drive did not do in time.
allow_errors '^(Read|Write|Flush) of namespace 1: (Internal Path Error|Namespace Not Ready|Command Interrupted)'
serve_drive() { # serve_drive ACTION-ON-TIMEOUT
    # Long against what the script needs to see what happened: an I/O is sent again only so often.
    rpc bdev_nvme_set_options "{\"action_on_timeout\":\"$1\",\"timeout_us\":3000000}"
    rpc bdev_nvme_attach_controller "{\"name\":\"Nvme0\",\"trtype\":\"PCIe\",\"traddr\":\"$SECOND\"}"
    subsystem_create "$NQN" any
    rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"nsid\":1,\"bdev_name\":\"Nvme0n1\"}}"
    connect_and_find "$NQN" --ctrl-loss-tmo=600
    load_start "$DEV" 16m --bsrange=4k-16k --iodepth=8
    trap 'throttle 0 0; load_kill' EXIT
}

no_io_failed() {
    load_goes_on
    load_end
    fio_verify "$DEV" after --rw=randwrite --bs=4k-16k --size=1M --iodepth=4
    rpc bdev_nvme_get_controllers '{"name":"Nvme0"}' | jq -c '.[0].ctrlrs[0].drive.status'
    disconnect "$NQN"
    subsystem_delete "$NQN"
    rpc bdev_nvme_detach_controller '{"name":"Nvme0"}'
}

step "a drive that answers nothing is reset"
nacre_start
serve_drive reset
throttle 1 0
wait_until 120 at_least resets 1
throttle 0 0
at_least timeouts 1 || die "no timeout was counted"
"$NACRE" events --socket "$SOCK" >"$WORK/events"
grep -q "was not answered within .* the controller is reset" "$WORK/events" || die "the reset was not told"
rpc metrics_get '{"format":"text"}' >"$WORK/metrics"
grep -q 'nacre_nvme_timeouts_total{[^}]*io[^}]*} [1-9]' "$WORK/metrics" || die "the timeouts are no metric"
no_io_failed

step "commands of a drive that answers too late are aborted, then their queue is made anew"
serve_drive abort
# One a second, of eight that are under way.
throttle 0 1
wait_until 120 at_least aborts 1
wait_until 120 at_least queue_resets 1
throttle 0 0
"$NACRE" events --socket "$SOCK" >"$WORK/events"
grep -q "was not answered within .* it is aborted" "$WORK/events" || die "the abort was not told"
grep -q "was not answered within .* its queue is made anew" "$WORK/events" || die "the new queue was not told"
no_io_failed
nacre_stop
