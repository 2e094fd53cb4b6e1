# A drive is pulled and put back under load, without another replica behind its namespace: the
# host's I/O waits, none fails, and every block has the written data. Before, the locate light of
# its slot is switched, by the daemon and by the command.
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

step "the locate light of the slot"
SLOT=$(grep -lx "${FIRST%.*}" /sys/bus/pci/slots/*/address | xargs dirname)
light() { cat "$SLOT/attention"; }
expect "the light" "$(light)" 0
expect "the slot" "$(rpc disk_get_bay '{"name":"Nvme0n1"}' | jq -c '.bay | [.kind, .bay, .lit]')" "[\"slot\",\"${SLOT##*/}\",false]"
rpc disk_locate '{"name":"Nvme0","on":true}'
expect "the light" "$(light)" 1
"$NACRE" nvme locate "$FIRST" | grep -q "is on"
"$NACRE" nvme locate "$FIRST" off
expect "the light" "$(light)" 0

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
