# shellcheck shell=bash
# Drives of the machine: part of lib.sh.

# ---- drives of the machine, for tests with `# hardware: drives` (xtask/src/vm/drives.rs) ---------

FIRST_SERIAL=NACRE0     # one namespace, blocks of 512; can be pulled
SECOND_SERIAL=NACRE1    # two namespaces, blocks of 512 and of 4096

# Waits until the kernel has both drives; sets FIRST and SECOND, their addresses.
drives_up() {
    modprobe nvme
    wait_until 60 drive_is_live "$FIRST_SERIAL"
    wait_until 60 drive_is_live "$SECOND_SERIAL"
    FIRST=$(drive_address "$FIRST_SERIAL") SECOND=$(drive_address "$SECOND_SERIAL")
}

# drive_ctrl SERIAL: the kernel's controller of the drive; fails while there is none
drive_ctrl() {
    local dir serial
    for dir in /sys/class/nvme/nvme*; do
        { read -r serial <"$dir/serial"; } 2>/dev/null || continue
        if [ "$serial" = "$1" ] && holds "$dir/transport" pcie; then echo "${dir##*/}" && return 0; fi
    done
    return 1
}

# drive_is_live SERIAL: with a disk for every namespace, which the kernel finds in its own time and
# order
drive_is_live() {
    local ctrl nsid last=1
    [ "$1" != "$SECOND_SERIAL" ] || last=2
    ctrl=$(drive_ctrl "$1") && is_live "$ctrl" || return 1
    for nsid in $(seq "$last"); do drive_disk "$1" "$nsid" || return 1; done
}

drive_address() { basename "$(readlink "/sys/class/nvme/$(drive_ctrl "$1")/device")"; }

drive_disk() { # drive_disk SERIAL NSID: its block device; fails while there is none
    local ctrl nqn
    ctrl=$(drive_ctrl "$1")
    nqn=$(cat "/sys/class/nvme/$ctrl/subsysnqn")
    ns_dev "$nqn" "$2"
}

pci_driver() { # the driver of the function at this address; empty without one
    local link
    link=$(readlink "/sys/bus/pci/devices/$1/driver" || true)
    echo "${link##*/}"
}

has_driver() { [ "$(pci_driver "$1")" = "$2" ]; }

# QEMU's monitor: monitor COMMAND [ARGUMENTS]. Prints the answer; an error fails the test.
monitor() {
    local port name line fd
    for name in /sys/class/virtio-ports/*/name; do
        if holds "$name" nacre.monitor; then port=${name%/name}; fi
    done
    [ -n "${port:-}" ] || die "this machine has no monitor"
    exec {fd}<>"/dev/${port##*/}"
    # QMP expects one greeting. A second one returns an error, which is harmless.
    echo '{"execute":"qmp_capabilities","id":"hello"}' >&"$fd"
    echo "{\"execute\":\"$1\",\"id\":\"question\",\"arguments\":${2:-{\}}}" >&"$fd"
    while read -r -t 60 line <&"$fd"; do
        case $line in
            *'"id": "question"'*)
                exec {fd}>&-
                case $line in *'"error"'*) die "the monitor refused $*: $line" ;; esac
                echo "$line"
                return 0
                ;;
        esac
    done
    die "the monitor did not answer $*"
}

# The first drive is a new QEMU device each time it is put in, over the same data. QEMU 7.2
# sometimes keeps parts of a device that was pulled during I/O forever, among them its name and its
# claim of the data.
DRIVE_ROUND=/run/nacre-drive-round
drive_id() { echo "drive0$(cat "$DRIVE_ROUND" 2>/dev/null || true)"; }
drive_pull() { monitor device_del "{\"id\":\"$(drive_id)\"}"; }
drive_put() {
    local end=$((SECONDS + 120))
    echo "-$(date +%s.%N)" >"$DRIVE_ROUND"
    # The slot becomes free some time after the guest has released the device.
    until drive_add; do
        [ $SECONDS -lt $end ] || die "the drive could not be put back"
        read -r -t 1 <>"$PAUSE" || true
    done
}
drive_add() (
    trap - ERR
    monitor device_add "{\"driver\":\"nvme\",\"id\":\"$(drive_id)\",\"bus\":\"rp0\",\"serial\":\"NACRE0\",\"drive\":\"drive0\",\"share-rw\":true}"
)

# Gives drives that a test took back to the kernel.
drives_back() {
    local device
    for device in /sys/bus/pci/drivers/vfio-pci/0000:*; do
        device=${device##*/}
        echo >"/sys/bus/pci/devices/$device/driver_override"
        timeout 30 bash -c "echo $device >/sys/bus/pci/drivers/vfio-pci/unbind; echo $device >/sys/bus/pci/drivers_probe"
    done
}
