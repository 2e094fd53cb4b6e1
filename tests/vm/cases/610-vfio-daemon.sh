# Drives driven by the daemon are served to a host: several namespaces, both block sizes, data
# verified, the daemon killed and restarted. Then the kernel gets them back, with the host's data,
# byte for byte. The first drive is taken as an appliance takes it, which binds it again at a start.
# hardware: drives
# limit: 900
nacre_only "it drives NVMe drives"

drives_up
head -c 3000000 /dev/urandom >"$WORK/old"
dd if="$WORK/old" of="$(drive_disk "$FIRST_SERIAL" 1)" bs=1M conv=fsync status=none

step "a drive is taken, and bound again by its serial number at a start"
mkdir -p "$WORK/state"
printf 'IMAGE_ID=nacre\nIMAGE_VERSION=0.1.0\n' >"$WORK/os-release"
# shellcheck disable=SC2016 # the inner shell has these variables
appliance_drive() {
    unshare --mount bash -c 'mount --bind "$WORK/os-release" /usr/lib/os-release &&
        mount --bind "$WORK/state" /var/lib && exec "$NACRE" appliance drive "$@"' appliance "$@"
}
expect_failure appliance_drive bind "$FIRST" --serial "$SECOND_SERIAL"
has_driver "$FIRST" nvme
appliance_drive bind "$FIRST" --serial "$FIRST_SERIAL"
has_driver "$FIRST" vfio-pci
# A start of the machine finds the kernel's driver.
"$NACRE" nvme unbind "$FIRST"
wait_until 60 drive_is_live "$FIRST_SERIAL"
appliance_drive restore
has_driver "$FIRST" vfio-pci
"$NACRE" nvme bind "$SECOND"

step "the drives are attached, and served"
attach() { rpc bdev_nvme_attach_controller "{\"name\":\"$1\",\"trtype\":\"PCIe\",\"traddr\":\"$2\"}"; }
nacre_start
attach first "$FIRST"
attach second "$SECOND"
subsystem_create "$NQN" any
nsid=0
for bdev in firstn1 secondn1 secondn2; do
    nsid=$((nsid + 1))
    rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"nsid\":$nsid,\"bdev_name\":\"$bdev\"}}"
done
connect_and_find "$NQN"
disk_of() { wait_until 60 ns_dev "$NQN" "$1" && ns_dev "$NQN" "$1"; }
first=$(disk_of 1) small=$(disk_of 2) large=$(disk_of 3)
expect "blocks" "$(for dev in "$first" "$small" "$large"; do blockdev --getss "$dev"; done | xargs)" "512 512 4096"
cmp -n 3000000 "$WORK/old" "$first"

step "written and verified"
fio_verify "$small" small --rw=randwrite --bs=512-64k --size=8M --iodepth=16
fio_verify "$large" large --rw=randwrite --bs=4k-128k --size=8M --iodepth=16
head -c 5000000 /dev/urandom >"$WORK/new"
dd if="$WORK/new" of="$first" bs=1M conv=fsync status=none
dd if="$WORK/new" of="$large" bs=1M conv=fsync status=none

rpc bdev_nvme_get_transport_statistics | jq -e '[.poll_groups[].transports[] | select(.trname == "PCIE")] |
    length > 0 and all(.completions > 0 and .submitted_requests >= .completions and .sq_mmio_doorbell_updates > 0)'

step "the daemon is killed, and attaches its drives again"
nacre_kill
nacre_start
wait_until 120 is_live "$CTRL"
echo 3 >/proc/sys/vm/drop_caches
cmp -n 5000000 "$WORK/new" "$first"
cmp -n 5000000 "$WORK/new" "$large"
expect_failure "$NACRE" nvme unbind "$FIRST"
[[ $FAILURE == *"is driven by nacre"* ]] || die "the refusal does not name the daemon"
expect_failure appliance_drive unbind "$FIRST"
[[ $FAILURE == *"is driven by"* ]] || die "the refusal of the appliance does not name the daemon"
appliance_drive list --json | jq -e '.[0].state == "bound"'

step "given back to the kernel"
disconnect "$NQN"
nacre_stop
appliance_drive unbind --serial "$FIRST_SERIAL"
"$NACRE" nvme unbind "$SECOND"
appliance_drive list --json | jq -e '. == []'
wait_until 60 drive_is_live "$FIRST_SERIAL"
wait_until 60 drive_is_live "$SECOND_SERIAL"
cmp -n 5000000 "$WORK/new" "$(drive_disk "$FIRST_SERIAL" 1)"
cmp -n 5000000 "$WORK/new" "$(drive_disk "$SECOND_SERIAL" 2)"
