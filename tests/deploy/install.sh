#!/usr/bin/env bash
# Goal: the image on a USB disk installs the appliance to a disk that is named by its serial number.
# That disk alone boots and serves. A power cut in the middle leaves an empty disk. Data of another
# owner needs a word.
# Method: QEMU with OVMF, as in image.sh. The first installation is a command that a power cut ends,
# the second one is by keys on the screen. IMAGE runs commands of the test.
#
#     unshare --net --pid --fork --kill-child --mount --mount-proc \
#         install.sh IMAGE.raw NACRE SCRATCH
set -u
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"

IMAGE=$1
NACRE=$2
SCRATCH=$3
HERE=$(cd "$(dirname "$0")" && pwd)
VOLUME="tcp://127.0.0.1:4420/$NQN:disk"
# shellcheck source=machine.sh
. "$HERE/machine.sh"

VERSION=$(basename "$IMAGE" .raw | cut -d_ -f2)
STICK=$SCRATCH/stick.raw
ip link set lo up
cp --sparse=always "$IMAGE" "$STICK"
# The target of machine.sh has the serial number SYSTEM.
truncate -s 6G "$SCRATCH/disk.raw"
truncate -s 1G "$SCRATCH/small.raw"
new_firmware
# A person has more time for the boot menu.
printf 'timeout 60\neditor no\ndefault nacre_*\n' >"$SCRATCH/loader.conf"
write_configuration
prepare_stick() {
    mcopy -o -i "$STICK$BOOT" "$SCRATCH/loader.conf" ::/loader/loader.conf &&
        mcopy -i "$STICK$BOOT" -s "$SCRATCH/nacre" ::/
}
check "the USB disk takes a configuration" prepare_stick
table() { sfdisk --dump "$1" | grep -v '^device:'; }
table "$STICK" >"$SCRATCH/stick.before"
same_table() { table "$STICK" | diff "$SCRATCH/stick.before" -; }

with_stick() { # with_stick CONSOLE
    power_on "$1" -device qemu-xhci \
        -drive file="$STICK",format=raw,if=none,id=stick,cache=unsafe,file.locking=off \
        -device usb-storage,drive=stick,serial=STICK,bootindex=0 \
        -drive file="$SCRATCH/small.raw",format=raw,if=none,id=small,cache=unsafe,file.locking=off \
        -device virtio-blk-pci,drive=small,serial=SMALL
}
# Chooses the second entry of the boot menu.
choose_installer() {
    says "$LIMIT" "Install Nacre $(pattern "$VERSION")" && keys 'j\r'
}
pattern() { echo "${1//./\\.}"; }
listed() { says "$LIMIT" "Install the system of this USB disk"; }

START=$SECONDS
with_stick "$SCRATCH/install.1"
check "the boot menu offers the installer" choose_installer
check "the screen lists disks" listed
echo "power-on to the list of disks: $((SECONDS - START)) s"
check "with the target" says 60 'SYSTEM +nvme0n1'
check "and not the USB disk" says 60 'this machine was started from it'
guest "cat /proc/cmdline; for place in / /var; do findmnt -no SOURCE,FSTYPE \$place; done; nacre appliance install; systemctl --failed --no-legend"
refused() { # refused PATTERN ARGUMENT…
    local pattern=$1
    shift
    guest "nacre appliance install $* 2>&1; [ \$? = 1 ]" >"$SCRATCH/said" || return
    cat "$SCRATCH/said"
    grep -qE "$pattern" "$SCRATCH/said"
}
check "the USB disk is refused" refused 'started from it' --disk STICK --yes --force
check "a small disk is refused" refused 'use a larger disk' --disk SMALL --yes --force
check "an unknown serial number is refused" refused 'the disks are SYSTEM' --disk OTHER --yes --force
check "no daemon runs" guest_says '^inactive' "systemctl is-active nacre.service"
guest "nacre appliance install --disk SYSTEM --yes >/run/installing 2>&1 &"
is_copying() { guest_says 'copying: [1-9]' "cat /run/installing"; }
check "the installation copies" until_true "$LIMIT" is_copying
check "power fails in the middle" power_fails
has_no_table() { ! table "$SCRATCH/disk.raw"; }
check "the disk has no partition table" has_no_table
# The first MiB decides whether a disk counts as empty.
is_blank() { cmp --bytes 1048576 "$SCRATCH/disk.raw" /dev/zero; }
check "the disk is empty after the cut" is_blank
put_data() { printf 'data of another owner' | dd of="$SCRATCH/disk.raw" bs=4096 seek=1 conv=notrunc status=none; }
check "another owner writes on the disk" eval 'put_data && ! is_blank'

with_stick "$SCRATCH/install.2"
check "the boot menu offers the installer again" choose_installer
check "the screen lists disks again" listed
check "the screen names the data" says 60 'holds data of an unknown kind'
START=$SECONDS
check "the screen takes the serial number" keys 'iSYSTEM\r'
check "data on the disk needs a word" says 60 "Type erase to go on"
check "the screen takes the word" keys 'erase\r'
check "the system is on the disk" says "$((LIMIT * 2))" "version $(pattern "$VERSION") is on disk SYSTEM"
echo "installation: $((SECONDS - START)) s"
check "the USB disk is as before" same_table
check "the machine stops by a key" eval 'keys "py" && until_true 120 is_off'
sfdisk --list "$SCRATCH/disk.raw"
has_no_installer() {
    on_boot_partition "" && ! on_boot_partition EFI/nacre-install &&
        ! on_boot_partition loader/entries/nacre-install.conf
}
check "the disk has no installer" has_no_installer
check "and the version with all its tries" eval 'on_boot_partition EFI/Linux | grep -q "nacre_$VERSION+3-0.efi"'

# The disk alone, in a machine whose firmware knows nothing of it.
new_firmware
START=$SECONDS
power_on "$SCRATCH/install.3"
check "the installed disk serves" serves $((LIMIT * 2))
echo "power-on to serving: $((SECONDS - START)) s"
check "the console shows name and version" runs_version "$(pattern "$VERSION")"
check "verified I/O" load randwrite --verify --seconds 3
guest "nacre appliance status; for place in / /var /boot; do findmnt -no SOURCE \$place; done"
# Firmware renames an entry of the boot partition that the installer made.
is_good() { guest_says "nacre_$(pattern "$VERSION")\.efi" "ls /boot/EFI/Linux"; }
check "the version counts as good" until_true 60 is_good
# `nacre appliance install` is a part of the installer only.
not_here() {
    guest "nacre appliance install --disk SYSTEM --yes 2>&1; [ \$? = 2 ]"
}
check "the appliance installs nothing" not_here
check "it stops" powers_off

# The installer again beside the installed disk: the same identifiers of the root file system on
# both.
with_stick "$SCRATCH/install.4"
check "the installer starts beside an installed disk" choose_installer
check "the screen lists the installed disk" listed
check "with its partitions" says 60 'holds gpt partition table, nacre-esp'
check "and the USB disk is the one of this start" guest_says '^/dev/sd' \
    "lsblk -nrso PATH,TYPE /dev/mapper/root | grep disk"
check "data is not overwritten by accident" refused 'force overwrites' --disk SYSTEM --yes
start_install() { guest "nacre appliance install --disk SYSTEM --yes $* >/run/installing 2>&1 &"; }
is_installed() { guest_says "version $(pattern "$VERSION") is on disk SYSTEM" "cat /run/installing"; }
start_install --force
check "it is overwritten on demand" until_true "$((LIMIT * 2))" is_installed
check "it stops after that" powers_off
rm -f "$SCRATCH/disk.raw" "$STICK" "$SCRATCH/small.raw"
finish
