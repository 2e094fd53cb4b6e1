# NVMe drives are listed, taken from the kernel, initialised through VFIO up to Identify, pulled,
# put back, and returned to the kernel with their data. A drive in use is not taken.
# hardware: drives
# limit: 900
nacre_only "it takes drives"

drives_up
nvme_list() { "$NACRE" nvme list --json; }
of_drive() { nvme_list | jq -r ".[] | select(.address == \"$1\") | $2"; }

step "the contents of the drives"
fill() { head -c 2000000 /dev/urandom >"$WORK/$1" && dd if="$WORK/$1" of="$2" bs=1M conv=fsync status=none; }
fill data1 "$(drive_disk "$FIRST_SERIAL" 1)"
fill data2 "$(drive_disk "$SECOND_SERIAL" 2)"

step "the drives are listed"
"$NACRE" nvme list
expect "drives" "$(nvme_list | jq length)" 2
expect "serial" "$(of_drive "$SECOND" .controller.serial)" "$SECOND_SERIAL"
expect "blocks" "$(of_drive "$SECOND" '[.disks[].block_size] | join(" ")')" "512 4096"
expect "uses" "$(of_drive "$FIRST" '.uses | length')" 0
expect "the IOMMU by the doctor" \
    "$("$NACRE" doctor --json | jq -r '.findings[] | select(.id == "nvme.iommu") | .status')" PASS

step "drives in use are refused"
disk=$(drive_disk "$SECOND_SERIAL" 1)
mkfs.ext4 -q "$disk" 65536
mkdir -p "$WORK/mnt"
mount "$disk" "$WORK/mnt"
expect_failure "$NACRE" nvme bind "$SECOND"
[[ $FAILURE == *"is mounted at $WORK/mnt (ext4)"* ]] || die "the refusal does not name the mount"
umount "$WORK/mnt"
mkswap "$disk" >/dev/null
swapon "$disk"
expect_failure "$NACRE" nvme bind --serial "$SECOND_SERIAL"
[[ $FAILURE == *"is swap space"* ]] || die "the refusal does not name the swap"
swapoff "$disk"
expect_failure "$NACRE" nvme bind "$SECOND"
[[ $FAILURE == *"inactive swap space"* ]] || die "the refusal does not name the mark"
wipefs -qa "$disk"
exec {held}<"$disk"
expect_failure "$NACRE" nvme bind "$SECOND"
[[ $FAILURE == *"is open in"* ]] || die "the refusal does not name the process"
expect_failure "$NACRE" nvme bind "$SECOND" --force "$FIRST_SERIAL"
exec {held}<&-

step "the drives are bound to VFIO, and initialized"
"$NACRE" nvme bind --serial "$FIRST_SERIAL"
"$NACRE" nvme bind "$SECOND" "$FIRST"
expect "driver" "$(of_drive "$FIRST" .driver)" vfio_pci
"$PROBE" "$FIRST" "$SECOND" >"$WORK/probe"
cat "$WORK/probe"
# Twice each: before and after a reset.
expect "serial numbers" "$(grep -c "serial $FIRST_SERIAL \|serial $SECOND_SERIAL " "$WORK/probe")" 4

step "a drive in use is not given back, and not attached twice"
"$PROBE" --hold "$FIRST" "$SECOND" >"$WORK/holder" 2>&1 &
holder=$!
wait_until 60 grep -q holding "$WORK/holder"
expect_failure "$NACRE" nvme unbind "$FIRST"
[[ $FAILURE == *"is driven by probe (process $holder)"* ]] || die "the refusal does not name the process"
expect_failure "$PROBE" "$SECOND"
[[ $FAILURE == *"GroupBusy"* ]] || die "the refusal does not name the reason"

step "a pulled drive is released"
drive_pull
wait_until 60 test ! -e "/proc/$holder/exe"
status=0
wait "$holder" || status=$?
cat "$WORK/holder"
expect "the holder's exit" $status 0
grep -q "wanted back" "$WORK/holder" || die "the holder was not asked"
wait_until 60 test ! -e "/sys/bus/pci/devices/$FIRST"

step "the drive returns to the kernel"
drive_put
wait_until 60 drive_is_live "$FIRST_SERIAL"

step "drives are given back"
"$NACRE" nvme unbind "$SECOND" "$FIRST"
expect "driver" "$(of_drive "$SECOND" .driver)" nvme
wait_until 60 drive_is_live "$SECOND_SERIAL"
cmp -n 2000000 "$WORK/data1" "$(drive_disk "$FIRST_SERIAL" 1)"
cmp -n 2000000 "$WORK/data2" "$(drive_disk "$SECOND_SERIAL" 2)"
