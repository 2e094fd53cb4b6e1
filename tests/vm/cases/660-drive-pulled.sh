# A drive is pulled and put back under load, with nothing behind its namespace that could take its place: the host's I/O
# waits, none fails, and every block is what was written.
# hardware: drives
# limit: 1500
nacre_only "it drives NVMe drives"

drives_up
"$NACRE" nvme bind "$FIRST"
drive_is() { rpc bdev_nvme_get_controllers '{"name":"Nvme0"}' | jq -e ".[0].ctrlrs[0].drive.status.state == \"$1\""; }
# What the drive's device has done, by the daemon's count.
ios() { rpc bdev_get_iostat '{"names":["Nvme0n1"]}' | jq '.bdevs[0] | .num_read_ops + .num_write_ops'; }
moved() { [ "$(ios)" -gt "$before" ]; }

step "the namespace, and load that verifies itself"
nacre_start
rpc bdev_nvme_attach_controller "{\"name\":\"Nvme0\",\"trtype\":\"PCIe\",\"traddr\":\"$FIRST\"}"
subsystem_create "$NQN" any
rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"nsid\":1,\"bdev_name\":\"Nvme0n1\"}}"
connect_and_find "$NQN" --ctrl-loss-tmo=600
head -c 3000000 /dev/urandom >"$WORK/content"
dd if="$WORK/content" of="$DEV" bs=1M seek=32 conv=fsync oflag=direct iflag=fullblock status=none
fio --name=load --filename="$DEV" --rw=randrw --bsrange=4k-32k --iodepth=4 --ioengine=libaio --direct=1 --size=24m \
    --verify=crc32c --verify_fatal=1 --verify_backlog=64 --verify_state_save=0 --time_based --runtime=3600 \
    --output="$WORK/fio.log" &
load=$!
# Whatever happens: other tests have the drive next.
trap '[ -z "$load" ] || kill -9 $load' EXIT

for round in 1 2; do
    before=$(ios)
    wait_until 120 moved
    step "it is pulled ($round)"
    drive_pull
    wait_until 120 drive_is removed
    wait_until 120 test ! -e "/sys/bus/pci/devices/$FIRST"
    kill -0 $load || die "the load ended"

    step "and put back ($round)"
    drive_put
    wait_until 120 drive_is_live "$FIRST_SERIAL"
    "$NACRE" nvme bind "$(drive_address "$FIRST_SERIAL")"
    wait_until 120 drive_is live
done
expect "losses" "$(rpc bdev_nvme_get_controllers | jq '.[0].ctrlrs[0].drive.status.losses')" 2

step "no I/O failed"
before=$(ios)
wait_until 120 moved
kill -INT $load
# Its exit status says that it was told to end.
wait $load || true
load=
if ! grep -q 'err= 0' "$WORK/fio.log" || grep -E 'err= *[1-9]|verify: bad' "$WORK/fio.log"; then
    cat "$WORK/fio.log"
    die "fio met an error"
fi
dd if="$DEV" of="$WORK/read" bs=1M skip=32 count=3 iflag=direct status=none
cmp -n 3000000 "$WORK/content" "$WORK/read"
fio_verify "$DEV" after --rw=randwrite --bs=4k-64k --size=2M --iodepth=8
disconnect "$NQN"
nacre_stop
