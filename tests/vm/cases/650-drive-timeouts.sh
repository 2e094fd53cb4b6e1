# A drive that does not answer in time: each escalation step is taken and reported. Once the drive
# answers again, no I/O has failed and every block has the written data.
# hardware: drives
# limit: 1500
nacre_only "it drives NVMe drives"

drives_up
# Not the first drive: QEMU never releases a throttled drive, so it could be pulled but not put
# back.
"$NACRE" nvme bind "$SECOND"
drive_status() { rpc bdev_nvme_get_controllers '{"name":"Nvme0"}' | jq ".[0].ctrlrs[0].drive.status.$1"; }
at_least() { [ "$(drive_status "$1")" -ge "$2" ]; }
# Bytes and I/Os per second that QEMU allows on the drive's image; 0: unlimited.
throttle() { # throttle BYTES IOS
    monitor block_set_io_throttle \
        "{\"id\":\"drive1n1\",\"bps\":$1,\"bps_rd\":0,\"bps_wr\":0,\"iops\":$2,\"iops_rd\":0,\"iops_wr\":0}"
}
# In any case: other tests use the drive next.
trap 'throttle 0 0' EXIT

# The host resends commands that the drive did not complete in time.
allow_errors '^(Read|Write|Flush) of namespace 1: (Internal Path Error|Namespace Not Ready|Command Interrupted)'
serve_drive() { # serve_drive ACTION-ON-TIMEOUT
    # Long compared with the script's polling: an I/O is resent a limited number of times.
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

step "a drive that does not answer is reset"
nacre_start
serve_drive reset
throttle 1 0
wait_until 120 at_least resets 1
throttle 0 0
at_least timeouts 1 || die "no timeout was counted"
"$NACRE" events --socket "$SOCK" >"$WORK/events"
grep -q "was not answered within .* the controller is reset" "$WORK/events" || die "the reset has no event"
rpc metrics_get '{"format":"text"}' >"$WORK/metrics"
grep -q 'nacre_nvme_timeouts_total{[^}]*io[^}]*} [1-9]' "$WORK/metrics" || die "the timeouts are no metric"
no_io_failed

step "commands of a drive that answers too late are aborted, then their queue is recreated"
serve_drive abort
# One per second, of eight in flight.
throttle 0 1
wait_until 120 at_least aborts 1
wait_until 120 at_least queue_resets 1
throttle 0 0
"$NACRE" events --socket "$SOCK" >"$WORK/events"
grep -q "was not answered within .* it is aborted" "$WORK/events" || die "the abort has no event"
grep -q "was not answered within .* its queue is recreated" "$WORK/events" || die "the new queue has no event"
no_io_failed
nacre_stop
