# Shared by tests of the appliance's image: an emulated machine with the disk $SCRATCH/disk.raw.
# shellcheck shell=bash

# Of the boot partition: the first one, behind the partition table.
BOOT=@@1048576
# An emulated machine with other work beside it; with KVM it takes seconds.
LIMIT=420

# Firmware that has started nothing.
new_firmware() { cp /usr/share/OVMF/OVMF_VARS_4M.fd "$SCRATCH/firmware"; }

# A configuration that serves $NQN:disk, for the folder of the boot partition.
write_configuration() {
    mkdir -p "$SCRATCH/nacre"
    cat >"$SCRATCH/nacre/nacre.toml" <<CONF
[[bdev]]
name = "disk"
type = "file"
path = "/var/lib/nacre/disk.img"
size = "64MiB"

[web]
listen = ["https://0.0.0.0:8443"]

[[nvmf.listener]]
name = "default"
address = "0.0.0.0"

[[nvmf.subsystem]]
nqn = "$NQN:disk"
allow_any_host = true
[[nvmf.subsystem.namespace]]
bdev = "disk"
CONF
}

# power_on CONSOLE [QEMU-OPTION...]: the first serial port is the appliance's screen, the second one
# the test's shell.
power_on() {
    CONSOLE=$1
    SEEN=0
    shift
    local acceleration=tcg,thread=multi cpu=max,-erms,-smap,-la57
    if [ -w /dev/kvm ] && grep -qE '\b(vmx|svm)\b' /proc/cpuinfo; then
        acceleration=kvm cpu=host
    fi
    : >"$CONSOLE"
    qemu-system-x86_64 -machine q35 -accel "$acceleration" -cpu "$cpu" -smp 2 -m 2G -nodefaults -display none \
        -drive if=pflash,format=raw,readonly=on,file=/usr/share/OVMF/OVMF_CODE_4M.fd \
        -drive if=pflash,format=raw,file="$SCRATCH/firmware" \
        -drive file="$SCRATCH/disk.raw",format=raw,if=none,id=disk,cache=unsafe,file.locking=off \
        -device nvme,serial=SYSTEM,drive=disk \
        -netdev user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:4420-:4420,hostfwd=tcp:127.0.0.1:8443-:8443 \
        -device virtio-net-pci,netdev=net,romfile= -device virtio-rng-pci \
        -chardev "socket,id=screen,path=$SCRATCH/screen,server=on,wait=off,logfile=$CONSOLE" -serial chardev:screen \
        -chardev "socket,id=shell,path=$SCRATCH/shell,server=on,wait=off" -serial chardev:shell \
        -monitor "unix:$SCRATCH/monitor,server,nowait" "$@" >"$SCRATCH/qemu" 2>&1 &
    MACHINE=$!
}

# After this call, `says` reads only later output of the console, such as that of the next boot.
look_from_here() { SEEN=$(stat -c %s "$CONSOLE"); }
# The screen moves its cursor over blanks instead of writing them.
said() { tail -c "+$((SEEN + 1))" "$CONSOLE" | tr -d '\r' | sed -E 's/\x1b\[[0-9;?]*[a-zA-Z]/ /g' | tr -s ' '; }
said_once() { said | grep -aqE "$1"; }
says() { until_true "$1" said_once "$2"; } # says SECONDS PATTERN
# The console shows the listener once the daemon serves.
serves() { says "${1:-$LIMIT}" 'tcp://0\.0\.0\.0:4420'; }
runs_version() { says 90 "Nacre $1 on ${HOST:-nacre}"; }

powers_off() {
    python3 "$HERE/guest.py" type "$SCRATCH/monitor" 'system_powerdown\n'
    until_true 120 is_off
}
is_off() { ! kill -0 "$MACHINE"; }
# The guest's memory is lost, and with it each write that it had not sent to the disk.
power_fails() {
    kill -9 "$MACHINE"
    wait "$MACHINE"
    true
}

keys() { python3 "$HERE/guest.py" type "$SCRATCH/screen" "$1"; }
# Runs a command line in the guest; the exit code is its own.
guest() { python3 "$HERE/guest.py" run "$SCRATCH/shell" "$@"; }
guest_says() { # guest_says PATTERN COMMAND…
    guest "${@:2}" >"$SCRATCH/said" 2>&1
    cat "$SCRATCH/said"
    grep -qE "$1" "$SCRATCH/said"
}

# page PATH [CURL-OPTION...]: a POST as the page sends it, with the session of the last sign-in.
# Prints the answer; fails without HTTP status 200.
page() {
    curl --silent --show-error --fail-with-body --insecure --max-time "$LIMIT" --cookie "$SCRATCH/cookies" \
        --cookie-jar "$SCRATCH/cookies" --header 'X-Nacre: 1' --header "Origin: https://127.0.0.1:8443" \
        --request POST "https://127.0.0.1:8443/api/$1" "${@:2}"
}
# page_json PATH BODY
page_json() { page "$1" --header 'Content-Type: application/json' --data "$2"; }
# page_call METHOD [PARAMS]
page_call() { page_json rpc "{\"method\":\"$1\",\"params\":${2:-{\}}}"; }
# upload FILE: a file of the machine's administrator, as the screen "Appliance" sends it.
upload() { page upload --header 'Content-Type: application/octet-stream' --header 'Expect:' --upload-file "$1"; }

load() { "$NACRE" perf "$VOLUME" --rw "$1" "${@:2}"; }
answers() { load randread --seconds 1; }
answers_not() { ! answers; }

on_boot_partition() { mdir -b -i "$SCRATCH/disk.raw$BOOT" "::/$1"; }
# partition LABEL: the offset and size of a partition in bytes.
partition() {
    sfdisk --dump "$SCRATCH/disk.raw" 2>/dev/null |
        sed -nE "s/.*start= *([0-9]+), size= *([0-9]+),.*name=\"$1\".*/\1 \2/p" |
        while read -r start size; do echo "$((start * 512)) $((size * 512))"; done | head -n 1
}
has_partition() { [ -n "$(partition "$1")" ]; }
# In the partition for state, of a machine that is off.
in_state() {
    local offset
    read -r offset _ <<<"$(partition nacre-state)"
    debugfs -w -R "$1" "$SCRATCH/disk.raw?offset=$offset" 2>&1
}
state_has() { in_state "stat $1" | grep -q '^Inode:'; }
