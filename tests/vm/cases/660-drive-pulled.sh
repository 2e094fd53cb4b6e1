# A drive is pulled and put back under load, without another replica behind its namespace: the
# host's I/O waits, none fails, and every block has the written data.
# hardware: drives
# limit: 1500
nacre_only "it drives NVMe drives"

drives_up
"$NACRE" nvme bind "$FIRST"
drive_is() { rpc bdev_nvme_get_controllers '{"name":"Nvme0"}' | jq -e ".[0].ctrlrs[0].drive.status.state == \"$1\""; }

# While the drive is gone the host resends. QEMU ends I/O in flight with Internal Error when it
# removes the drive.
allow_errors '^(Read|Write|Flush) of namespace 1: (Internal Path Error|Internal Error|Namespace Not Ready|Command Interrupted)'
step "the namespace, and load that verifies itself"
nacre_start
rpc bdev_nvme_attach_controller "{\"name\":\"Nvme0\",\"trtype\":\"PCIe\",\"traddr\":\"$FIRST\"}"
subsystem_create "$NQN" any
rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"nsid\":1,\"bdev_name\":\"Nvme0n1\"}}"
connect_and_find "$NQN" --ctrl-loss-tmo=600
head -c 3000000 /dev/urandom >"$WORK/content"
dd if="$WORK/content" of="$DEV" bs=1M seek=32 conv=fsync oflag=direct iflag=fullblock status=none
load_start "$DEV" 24m

for round in 1 2; do
    load_goes_on
    step "the drive is pulled ($round)"
    drive_pull
    wait_until 120 drive_is removed
    wait_until 120 test ! -e "/sys/bus/pci/devices/$FIRST"
    kill -0 "$LOAD" || die "the load ended"

    step "the drive is put back ($round)"
    drive_put
    wait_until 120 drive_is_live "$FIRST_SERIAL"
    "$NACRE" nvme bind "$(drive_address "$FIRST_SERIAL")"
    wait_until 120 drive_is live
done
expect "losses" "$(rpc bdev_nvme_get_controllers | jq '.[0].ctrlrs[0].drive.status.losses')" 2

step "no I/O failed"
load_goes_on
load_end
dd if="$DEV" of="$WORK/read" bs=1M skip=32 count=3 iflag=direct status=none
cmp -n 3000000 "$WORK/content" "$WORK/read"
fio_verify "$DEV" after --rw=randwrite --bs=4k-64k --size=2M --iodepth=8
disconnect "$NQN"
nacre_stop
