#!/usr/bin/env bash
# Goal: the appliance's image holds no identity and no secret, starts what it should and nothing else, and serves a
# volume that the configuration on its boot partition describes; the state survives a restart and an update. Method: the
# list of its files, and QEMU with OVMF, without a network beyond this machine.
#
#     unshare --net --pid --fork --kill-child --mount --mount-proc image.sh IMAGE.raw FILES NACRE SCRATCH BUNDLE
set -u
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"

IMAGE=$1
FILES=$2
NACRE=$3
SCRATCH=$4
BUNDLE=$5
HERE=$(cd "$(dirname "$0")" && pwd)
# Of the boot partition: the first one, behind the partition table.
BOOT=@@1048576
VOLUME="tcp://127.0.0.1:4420/$NQN:disk"
# An emulated machine with other work beside it; with KVM it takes seconds.
LIMIT=420

paths() { sed -E 's/^[^ ]+ [^ ]+ [^ ]+ [^ ]+ //; s/ -> .*//' "$FILES"; }
none_matches() {
    local found
    found=$(paths | grep -E "$1")
    [ -z "$found" ] || { echo "$found"; false; }
}
machine_id_is_unset() {
    # The digest of "uninitialized" and a newline.
    grep -q "$(echo uninitialized | sha256sum | cut -d' ' -f1) /etc/machine-id$" "$FILES"
}
same_lists() { # same_lists WANTED ACTUAL
    diff -u "$1" "$2"
}
enabled() {
    grep -E ' /etc/systemd/system/[^ ]*\.(wants|requires)/' "$FILES" |
        sed -E 's|.* /etc/systemd/system/([^ ]*) -> .*|\1|' | sort
}
elevated() { awk '$1 ~ /s/ && $1 ~ /^-/ { print $5 }' "$FILES" | sort; }

configure() {
    mcopy -i "$SCRATCH/disk.raw$BOOT" -s "$SCRATCH/nacre" ::/
}

power_on() { # power_on CONSOLE [QEMU-OPTION...]
    local console=$1
    shift
    local acceleration=tcg,thread=multi cpu=max,-erms,-smap,-la57
    if [ -w /dev/kvm ] && grep -qE '\b(vmx|svm)\b' /proc/cpuinfo; then
        acceleration=kvm cpu=host
    fi
    qemu-system-x86_64 -machine q35 -accel "$acceleration" -cpu "$cpu" -smp 2 -m 2G -nodefaults -display none \
        -drive if=pflash,format=raw,readonly=on,file=/usr/share/OVMF/OVMF_CODE_4M.fd \
        -drive if=pflash,format=raw,file="$SCRATCH/firmware" \
        -drive file="$SCRATCH/disk.raw",format=raw,if=none,id=disk,cache=unsafe -device nvme,serial=SYSTEM,drive=disk \
        -netdev user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:4420-:4420 \
        -device virtio-net-pci,netdev=net,romfile= -device virtio-rng-pci \
        -serial "file:$console" -monitor "unix:$SCRATCH/monitor,server,nowait" "$@" >"$SCRATCH/qemu" 2>&1 &
    MACHINE=$!
}
# The console shows the listener once the daemon serves.
serves() { until_true "$LIMIT" grep -q "tcp://0.0.0.0:4420" "$1"; }
powers_off() {
    python3 - "$SCRATCH/monitor" <<'PYTHON'
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
s.sendall(b"system_powerdown\n")
s.recv(4096)
PYTHON
    until_true 120 eval '! kill -0 $MACHINE'
}
load() { "$NACRE" perf "$VOLUME" --rw "$1" "${@:2}"; }
# The screen is drawn anew every 15 s, and before that in pieces.
console_says() { until_true 60 grep -aqE "$2" "$1"; }

check "no host key, no random seed, no private key" none_matches '^/etc/ssh/ssh_host_|/random-seed$|/credential\.secret$|_(rsa|ed25519)$|\.key$|^/root/\.|^/etc/ssl/private/'
check "no logs, no caches" none_matches '^/var/(log|cache|tmp)/.|^/var/lib/apt/lists/.'
check "the machine has no identity yet" machine_id_is_unset
enabled >"$SCRATCH/enabled"
check "exactly the listed units are enabled" same_lists "$HERE/image-enabled.txt" "$SCRATCH/enabled"
elevated >"$SCRATCH/elevated"
check "one key of update bundles, for tests" same_lists <(echo /usr/lib/nacre/keys/test-only.pem) <(paths | grep '^/usr/lib/nacre/keys/')
check "exactly the listed programs run with other rights" same_lists "$HERE/image-elevated.txt" "$SCRATCH/elevated"

cp --sparse=always "$IMAGE" "$SCRATCH/disk.raw"
truncate -s 6G "$SCRATCH/disk.raw"
cp /usr/share/OVMF/OVMF_VARS_4M.fd "$SCRATCH/firmware"
mkdir -p "$SCRATCH/nacre"
cat >"$SCRATCH/nacre/nacre.toml" <<CONF
[[bdev]]
name = "disk"
type = "file"
path = "/var/lib/nacre/disk.img"
size = "64MiB"

[[nvmf.listener]]
name = "default"
address = "0.0.0.0"

[[nvmf.subsystem]]
nqn = "$NQN:disk"
allow_any_host = true
[[nvmf.subsystem.namespace]]
bdev = "disk"
CONF
ip link set lo up
check "the boot partition takes a configuration" configure

START=$SECONDS
power_on "$SCRATCH/console.1"
check "the first boot serves" serves "$SCRATCH/console.1"
echo "power-on to serving: $((SECONDS - START)) s"
check "verified I/O" load randwrite --verify --seconds 3
check "the console shows name and version" console_says "$SCRATCH/console.1" 'Nacre [0-9.]+ on nacre'
check "it stops by its power button" powers_off

START=$SECONDS
power_on "$SCRATCH/console.2"
check "the second boot serves" serves "$SCRATCH/console.2"
echo "power-on to serving: $((SECONDS - START)) s"
check "its namespace answers" load randread --seconds 1
check "it stops again" powers_off

# A bundle that ends far behind its signature, under a name that comes first. Two whole ones and a second boot entry have
# no room in the boot partition.
next_version=$(basename "$BUNDLE" .tar | cut -d_ -f2)
head -c 3000000 "$BUNDLE" >"$SCRATCH/nacre_0.0.tar"
on_boot_partition() { mdir -b -i "$SCRATCH/disk.raw$BOOT" "::/$1"; }
check "the boot partition takes two bundles" mcopy -i "$SCRATCH/disk.raw$BOOT" "$BUNDLE" "$SCRATCH/nacre_0.0.tar" ::/nacre/
rm "$SCRATCH/nacre_0.0.tar"
power_on "$SCRATCH/console.3"
check "the third boot serves" serves "$SCRATCH/console.3"
check "the bundle is installed" until_true "$LIMIT" grep -aq "version $next_version is installed" "$SCRATCH/console.3"
check "the damaged bundle is refused" until_true "$LIMIT" grep -aq "it is damaged, or no update bundle" "$SCRATCH/console.3"
check "it stops after the update" powers_off
check "only the refused bundle is left" same_lists <(echo ::/nacre/nacre_0.0.tar.refused) <(on_boot_partition nacre | grep tar)
power_on "$SCRATCH/console.4"
check "the new version serves" serves "$SCRATCH/console.4"
check "the console shows the new version" until_true "$LIMIT" grep -aq "Nacre $next_version on nacre" "$SCRATCH/console.4"
check "its namespace answers as before" load randread --seconds 1
check "it stops for good" powers_off
on_boot_partition EFI/Linux >"$SCRATCH/entries"
check "the new version counts as good" grep -q "nacre_$next_version.efi" "$SCRATCH/entries"
cat "$SCRATCH/entries"

# Without its boot partition the system does not start: it must not wait for a person.
label() { sfdisk --quiet --part-label "$SCRATCH/disk.raw" 1 "$1"; }
check "the boot partition loses its label" label other
power_on "$SCRATCH/console.5" -action reboot=shutdown
check "a system that does not start says so" until_true $((LIMIT + 300)) grep -aq "the system did not start" "$SCRATCH/console.5"
check "it starts again by itself" until_true 180 eval '! kill -0 $MACHINE'
check "the boot partition has its label again" label nacre-esp
power_on "$SCRATCH/console.6"
check "it serves again" serves "$SCRATCH/console.6"
check "it stops after that" powers_off
rm -f "$SCRATCH/disk.raw"
finish
