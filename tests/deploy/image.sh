#!/usr/bin/env bash
# Goal: the appliance's image holds no identity and no secret, and starts only the listed services.
# It serves a volume that the configuration on its boot partition describes. The state
# survives updates, power cuts and a rollback, until a factory reset. A version whose daemon does
# not get ready gives way to the former one, without a person.
# Method: the list of its files, and QEMU with OVMF, without a network beyond this machine. NEWER
# runs commands of the test; the daemon of BAD does not get ready.
#
#     unshare --net --pid --fork --kill-child --mount --mount-proc \
#         image.sh IMAGE.raw FILES NACRE SCRATCH [NEWER.tar BAD.tar]
#
# Without the bundles it boots once, and looks at the daemon under systemd. That image runs commands
# of the test.
set -u
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"

IMAGE=$1
FILES=$2
NACRE=$3
SCRATCH=$4
NEWER=${5:-}
BAD=${6:-}
HERE=$(cd "$(dirname "$0")" && pwd)
VOLUME="tcp://127.0.0.1:4420/$NQN:disk?nsid=1"
# shellcheck source=machine.sh
. "$HERE/machine.sh"

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
has_rules_and_dashboard() {
    same_lists <(printf '/usr/share/nacre/%s\n' alerts.yml grafana-nacre.json) <(paths | grep '^/usr/share/nacre/' | sort)
}
elevated() { awk '$1 ~ /s/ && $1 ~ /^-/ { print $5 }' "$FILES" | sort; }

check "no host key, no random seed, no private key" none_matches '^/etc/ssh/ssh_host_|/random-seed$|/credential\.secret$|_(rsa|ed25519)$|\.key$|^/root/\.|^/etc/ssl/private/'
check "no logs, no caches" none_matches '^/var/(log|cache|tmp)/.|^/var/lib/apt/lists/.'
check "the machine has no identity yet" machine_id_is_unset
enabled >"$SCRATCH/enabled"
check "exactly the listed units are enabled" same_lists "$HERE/image-enabled.txt" "$SCRATCH/enabled"
elevated >"$SCRATCH/elevated"
check "it has the alerting rules and the dashboard" has_rules_and_dashboard
check "one key of update bundles, for tests" same_lists <(echo /usr/lib/nacre/keys/test-only.pem) <(paths | grep '^/usr/lib/nacre/keys/')
check "exactly the listed programs run with other rights" same_lists "$HERE/image-elevated.txt" "$SCRATCH/elevated"

# Each start of a version that did not start well is decided by this script. COUNT is a path of the
# firmware.
decides() { # decides CAUSE ENTRY RESTARTS WORD
    local said
    said=$("$HERE/../../deploy/image/root/usr/lib/nacre/restart" decide "$1" "$2" "$3")
    [[ $said == "$4: "* ]] || { echo "$1 $2 $3: $said"; false; }
}
all_decisions() {
    local cause restarts
    for cause in not-ready not-started; do
        for restarts in 0 5; do
            decides $cause '\EFI\Linux\nacre_0.2.0+2-1.efi' $restarts restart || return
            decides $cause '\EFI\Linux\nacre_0.2.0+1-2.efi' $restarts restart || return
            # The last try: the boot menu has the other version first now.
            decides $cause '\EFI\Linux\nacre_0.2.0+0-3.efi' $restarts restart || return
            # Started without tries: neither version has any, or a person chose this one.
            decides $cause '\EFI\Linux\nacre_0.2.0+0-4.efi' $restarts stay || return
            decides $cause '\EFI\Linux\nacre_0.2.0+0-12.efi' $restarts stay || return
        done
        # The boot menu did not count these starts, whatever their names say.
        decides $cause '\EFI\Linux\nacre_0.2.0+2-1.efi' 6 stay || return
    done
    for entry in '' '\EFI\Linux\nacre_0.2.0.efi' '\EFI\Linux\nacre_0.2.0+x-1.efi' '\EFI\Linux\nacre_0.2.0+1.efi'; do
        decides not-ready "$entry" 0 stay || return
        decides not-started "$entry" 2 restart || return
        decides not-started "$entry" 3 stay || return
    done
}
check "restarts of a version that does not start well end" all_decisions
check "restarts of a daemon that is never ready end" unshare --mount "$HERE/restart.sh"

cp --sparse=always "$IMAGE" "$SCRATCH/disk.raw"
truncate -s 6G "$SCRATCH/disk.raw"
new_firmware
write_configuration
version_of() { basename "$1" .tar | cut -d_ -f2; }
# The version as words of a regular expression.
pattern() { echo "${1//./\\.}"; }
VERSION=$(basename "$IMAGE" .raw | cut -d_ -f2)
ip link set lo up
configure() { mcopy -i "$SCRATCH/disk.raw$BOOT" -s "$SCRATCH/nacre" "$@" ::/; }
put_bundle() { mcopy -i "$SCRATCH/disk.raw$BOOT" "$1" ::/nacre/; }
if [ -n "$NEWER" ]; then
    # A bundle that ends far behind its signature, under a name that comes first. Two whole ones and
    # a second boot entry have no room in the boot partition.
    head -c 3000000 "$NEWER" >"$SCRATCH/nacre/nacre_0.0.tar"
fi
check "the boot partition takes a configuration" configure
[ -z "$NEWER" ] || check "and a bundle" put_bundle "$NEWER"

START=$SECONDS
power_on "$SCRATCH/console.1"
check "the first boot serves" serves
echo "power-on to serving: $((SECONDS - START)) s"
check "verified I/O" load randwrite --verify --seconds 3
check "the console shows name and version" runs_version "$(pattern "$VERSION")"

# The daemon as a service of systemd, and its store key as an encrypted credential.
# CAP_CHOWN and CAP_NET_BIND_SERVICE; CAP_IPC_LOCK is given up after the start.
has_two_capabilities() { guest_says '^CapEff:[[:space:]]*0+401.?$' "grep Cap /proc/\$(systemctl show --value --property=MainPID nacre)/status"; }
make_credential() {
    guest "od -An -tx1 -N32 /dev/urandom | tr -d ' \n' | systemd-creds encrypt --name=nacre-store-key - /etc/nacre/store-key.cred"
}
use_credential() {
    local unit=/etc/systemd/system/nacre.service.d line='LoadCredentialEncrypted=nacre-store-key:/etc/nacre/store-key.cred'
    guest "mkdir -p $unit && printf '[Service]\n$line\n' >$unit/store-key.conf && systemctl daemon-reload && systemctl restart nacre"
}
rates_below_3() {
    guest "systemd-analyze security --no-pager --threshold=30 nacre.service >/run/rate; R=\$?; tail -n 1 /run/rate; test \$R = 0"
}
# The account of the page outlives restarts and versions.
PASSWORD='a password of the test'
claim() {
    local code
    code=$(guest "nacre web status" | sed -nE 's/^set-up code +([^ ]+).*/\1/p' | tr -d '\r')
    page_json setup "{\"code\":\"$code\",\"name\":\"ann\",\"password\":\"$PASSWORD\"}"
}
if [ -z "$NEWER" ]; then
    check "the daemon keeps two capabilities" has_two_capabilities
    check "systemd-analyze rates its unit below 3" rates_below_3
    check "a sealed key without a credential" guest "nacre key generate one --sealed --out /run/one.key"
    check "its store key is a file" guest "test -e /var/lib/nacre/store.key"
    check "a credential is encrypted" make_credential
    check "the daemon gets it" use_credential
    check "the store key moves to the credential" guest "nacre key rotate-store && ! test -e /var/lib/nacre/store.key"
    check "a sealed key of the credential" guest "nacre key generate two --sealed --out /run/two.key"
    check "the daemon restarts" guest "systemctl restart nacre"
    check "both keys open" guest_says 'one.*sealed.*two.*sealed' "nacre key list | tr '\n' ' '"
    check "doctor has no warning about keys" guest "! nacre doctor | grep keys.store"

    # Requests of the daemon, which systemd has executed.
    INTERFACE=$(guest "ls /sys/class/net | grep -v lo" | tr -d '\r')
    asks_for_mtu() { guest "nacre rpc appliance_set_network '{\"interface\":\"$INTERFACE\",\"dhcp\":true,\"mtu\":$1}'"; }
    has_mtu() { guest_says "\"mtu\": *$1" "nacre rpc network_get_interfaces"; }
    waits_for_confirmation() { guest_says "\"pending_network\": *\"$INTERFACE\"" "nacre rpc appliance_get"; }
    is_kept() { guest_says 'network +done .*stay' "nacre appliance history"; }
    check "the daemon asks for another MTU" asks_for_mtu 1400
    check "the interface has it" until_true 60 has_mtu 1400
    check "it waits for its confirmation" until_true 10 waits_for_confirmation
    check "the daemon asks for the former MTU" guest "nacre rpc appliance_revert_network"
    # The timer's line says "not kept within 60 s".
    is_undone() { guest_says 'network +done [^:]*are back' "nacre appliance history"; }
    check "the history has it" until_true 45 is_undone
    check "the interface has the former one" until_true 10 has_mtu 1500
    check "the daemon asks for an MTU again" asks_for_mtu 1300
    check "the interface has that" until_true 60 has_mtu 1300
    check "the daemon asks to keep it" guest "nacre rpc appliance_keep_network"
    check "the history says so" until_true 30 is_kept
    check "the namespace answers after it" until_true 30 answers
    check "the set-up code makes the first account of the page" claim
    fingerprint() { guest "nacre web status" | sed -nE 's/^certificate +//p'; }
    FINGERPRINT=$(fingerprint)
    check "the page asks for a name" page_call appliance_set_name '{"name":"Storage-7"}'
    check "the kernel has it" until_true 60 guest_says '^storage-7' "cat /proc/sys/kernel/hostname"
    check "so has the next start" guest_says '^storage-7' "cat /etc/hostname"
    check "the page's session has it" until_true 30 eval 'curl --silent --insecure https://127.0.0.1:8443/api/session | grep -q "\"host\":\"storage-7\""'
    check "the page has another certificate" until_true 30 eval '[ "$(fingerprint)" != "$FINGERPRINT" ]'
    names_of_certificate() { openssl s_client -connect 127.0.0.1:8443 </dev/null 2>/dev/null | openssl x509 -noout -ext subjectAltName | grep "DNS:$1"; }
    check "its certificate has the name" names_of_certificate storage-7
    check "the history has the name" guest_says 'name +done .*storage-7, and was nacre' "nacre appliance history"
    check "the screen shows it" says 60 "Nacre $(pattern "$VERSION") on storage-7"
    check "the daemon asks to power off" guest "nacre rpc appliance_power_off"
    check "the machine is off" until_true 120 is_off
    rm -f "$SCRATCH/disk.raw"
    finish
fi

# Three power cuts during one update: while the slot is written, before the boot entry is written,
# and before the bundle is removed. A machine with much other work may be late for the second: then
# the update is done.
# From the third on, the machine has an IOMMU and a second drive.
truncate -s 1G "$SCRATCH/taken.raw"
TAKEN=(-device "intel-iommu,intremap=on,aw-bits=48"
    -drive "file=$SCRATCH/taken.raw,format=raw,if=none,id=taken,cache=unsafe,file.locking=off"
    -device "nvme,serial=TAKEN,drive=taken")
NEWER_VERSION=$(version_of "$NEWER")
BAD_VERSION=$(version_of "$BAD")
check "the damaged bundle is refused" says "$LIMIT" "it is damaged, or no update bundle"
slot_is_written() {
    local offset
    read -r offset _ <<<"$(sfdisk --dump "$SCRATCH/disk.raw" | sed -nE 's/.*start= *([0-9]+), size= *2097152,.*/\1/p' | sed -n 2p)"
    ! cmp -s -n 65536 -i "$((offset * 512)):0" "$SCRATCH/disk.raw" /dev/zero
}
check "the other slot is being written" until_true "$LIMIT" slot_is_written
check "power fails while it is written" power_fails

START=$SECONDS
power_on "$SCRATCH/console.2"
check "the version before serves after a power cut" serves
echo "power-on to serving: $((SECONDS - START)) s"
check "its namespace answers" answers
check "the slot is whole" until_true "$LIMIT" has_partition "nacre_${NEWER_VERSION}_verity"
check "power fails before the boot entry" power_fails

power_on "$SCRATCH/console.3"
check "a version serves after a power cut before the boot entry" serves
check "the update is done" says "$LIMIT" "version $(pattern "$NEWER_VERSION") (is installed|runs already)"
check "power fails before the bundle is removed" power_fails

power_on "$SCRATCH/console.4" "${TAKEN[@]}"
check "the new version serves" serves
check "the console shows the new version" runs_version "$(pattern "$NEWER_VERSION")"
check "its namespace answers as before" answers
entry_is_good() { guest_says "nacre_$1\.efi" "ls /boot/EFI/Linux"; }
check "the new version counts as good" until_true 60 entry_is_good "$(pattern "$NEWER_VERSION")"
bundle_is_gone() { ! guest_says 'tar$' "ls /boot/nacre"; }
check "its bundle is removed" until_true 120 bundle_is_gone
guest "nacre appliance status; cat /sys/firmware/efi/efivars/LoaderBootCountPath-* | tr -d '\\000'; echo"

# New settings with an address that the test does not reach, then with the one that DHCP gave.
check "the state is exported" guest "nacre appliance export /var/lib/test.export"
INTERFACE=$(guest "ls /sys/class/net | grep -v lo" | tr -d '\r')
set_network() { guest "nacre appliance network set $INTERFACE --address $1/24 --gateway 10.0.2.2"; }
check "new network settings are in force" set_network 10.0.2.77
check "the machine is cut off" until_true 30 answers_not
check "the settings return by themselves" until_true 90 answers
check "settings with the former address" set_network 10.0.2.15
check "are confirmed" guest "nacre appliance network confirm"
sleep 65
check "and stay" guest_says '10\.0\.2\.15/24' "nacre appliance network show; cat /etc/systemd/network/*.network"
check "the machine answers with them" answers

# The restore brings back the export's files, and leaves the disk image.
check "a file of the state is lost, another one appears" guest \
    "cp /var/lib/nacre/nacre.toml /run/before; echo '# lost' >/var/lib/nacre/nacre.toml; echo x >/var/lib/nacre/extra"
check "the export is restored" guest "nacre appliance restore /var/lib/test.export"
check "its file is back" guest "cmp /var/lib/nacre/nacre.toml /run/before"
check "the other one is gone" guest "! test -e /var/lib/nacre/extra"
check "the machine answers after the restore" until_true 90 answers

# The daemon drives a drive from here on; the next starts bind it before the daemon begins.
ADDRESS=$(guest "for drive in /sys/class/nvme/nvme*; do if grep -q TAKEN \$drive/serial; then cat \$drive/address; fi; done" | tr -d '\r')
check "a drive is taken" guest "nacre appliance drive bind $ADDRESS --serial TAKEN"
check "the daemon attaches it" guest "nacre rpc bdev_nvme_attach_controller '{\"name\":\"taken\",\"trtype\":\"PCIe\",\"traddr\":\"$ADDRESS\"}'"
check "and serves it" guest "nacre rpc nvmf_subsystem_add_ns '{\"nqn\":\"$NQN:disk\",\"namespace\":{\"nsid\":2,\"bdev_name\":\"takenn1\"}}'"
load_on_taken() { "$NACRE" perf "${VOLUME%=*}=2" --rw "$1" "${@:2}"; }
check "verified I/O on it" load_on_taken randwrite --verify --seconds 3

check "the set-up code makes the first account of the page" claim
check "the machine gets a name" guest_says "storage-7, and was nacre" "nacre appliance name storage-7"
HOST=storage-7

# By hand back to the version before, which takes the bad one from its page.
check "the former version is chosen by hand" guest_says "version $(pattern "$VERSION") starts" "nacre appliance rollback"
guest "ls /boot/EFI/Linux"
check "it stops after the rollback" powers_off
START=$SECONDS
power_on "$SCRATCH/console.5" "${TAKEN[@]}"
check "the former version serves" serves
check "the console shows the former version" runs_version "$(pattern "$VERSION")"
sign_in() { page_json login "{\"name\":\"ann\",\"password\":\"$PASSWORD\"}"; }
last_act_is() { # last_act_is ACT STATE TEXT
    page_call appliance_get >"$SCRATCH/machine" && cat "$SCRATCH/machine" &&
        python3 -c '
import json, sys
last = json.load(open(sys.argv[1]))["result"]["acts"][0]
assert [last["act"], last["state"]] == sys.argv[2:4] and sys.argv[4] in last["text"], last
' "$SCRATCH/machine" "$@"
}
uploads_bad() { upload "$BAD" | grep -q "\"bytes\": *$(stat -c %s "$BAD")"; }
has_no_upload() { page_call appliance_get | grep -q '"upload": *null'; }
check "the account signs in" sign_in
drive_is_bound() { page_call appliance_get | tee /dev/stderr | grep -q '"state": *"bound"'; }
check "the taken drive is bound after a start" drive_is_bound
check "and serves" until_true 60 load_on_taken randread --seconds 1
check "the page refuses an update without a bundle" eval '! page_call appliance_update'
head -c 3000000 "$BAD" >"$SCRATCH/damaged.tar"
check "the page takes a damaged bundle" upload "$SCRATCH/damaged.tar"
check "the page asks for its installation" page_call appliance_update
check "it is refused" until_true "$LIMIT" last_act_is update failed "damaged, or no update bundle"
check "the page takes the bad bundle" uploads_bad
check "the page asks for its installation again" page_call appliance_update
check "the bad version is installed" until_true "$LIMIT" last_act_is update done "version $BAD_VERSION is installed"
check "the upload is gone" until_true 30 has_no_upload
check "the namespace answers after the update by the page" answers
check "the screen offers its restart" says 90 "version $(pattern "$BAD_VERSION") starts at the next restart"

# After the key, the machine returns to the former version by itself.
look_from_here
START=$SECONDS
check "the screen restarts the machine" keys 'ry'
check "the daemon of the bad version is not ready" says "$LIMIT" "the daemon of version $(pattern "$BAD_VERSION") is not ready"
# The screen before the restart had the listener, too.
look_from_here
check "the former version serves again, without a person" serves $((LIMIT * 4))
echo "restart to serving of the former version: $((SECONDS - START)) s"
said | grep -a 'restart\[.*nacre: ' | sed 's/^/  | /'
check "the console shows the former version again" runs_version "$(pattern "$VERSION")"
check "its namespace answers after the bad version" answers
check "it stops after the bad version" powers_off
on_boot_partition EFI/Linux
check "the bad version used its tries" eval 'on_boot_partition EFI/Linux | grep -q "nacre_$BAD_VERSION+0-3.efi"'

# The former version's daemon does not get ready either: a restart would not help.
printf '[Service]\nExecStart=\nExecStart=/bin/false\n' >"$SCRATCH/bad.conf"
spoil() {
    in_state "mkdir /lib/overlay/etc/systemd/system"
    in_state "mkdir /lib/overlay/etc/systemd/system/nacre.service.d"
    in_state "write $SCRATCH/bad.conf /lib/overlay/etc/systemd/system/nacre.service.d/20-bad.conf"
    state_has /lib/overlay/etc/systemd/system/nacre.service.d/20-bad.conf
}
check "the former version gets a bad daemon" spoil
power_on "$SCRATCH/console.6" "${TAKEN[@]}"
check "a version that was good before does not restart" says "$LIMIT" "stay: this version was good before"
starts() { said | grep -ac 'BdsDxe: starting'; }
check "the screen names the cause" says 60 "the daemon of version $(pattern "$VERSION") is not ready"
sleep 45
check "the machine is still up" eval '[ "$(starts)" = 1 ]'
said | grep -a 'restart\[.*nacre: ' | sed 's/^/  | /'

# The screen works without the daemon.
look_from_here
check "the screen takes a factory reset" keys "f$HOST\r"
check "the machine serves after it" serves $((LIMIT * 2))
HOST=nacre
check "with its first name" runs_version "$(pattern "$VERSION")"
check "with an empty namespace" answers
check "it stops after the factory reset" powers_off
is_new() { ! state_has /lib/test.export && ! state_has /lib/nacre-appliance/drives.json && ! state_has /lib/overlay/etc/systemd/system/nacre.service.d; }
check "the state is new" is_new

# Without its boot partition the system does not start: it must not wait for a person.
label() { sfdisk --quiet --no-reread --part-label "$SCRATCH/disk.raw" 1 "$1"; }
check "the boot partition loses its label" label other
power_on "$SCRATCH/console.7"
check "a system that does not start says so" says $((LIMIT + 300)) "the system did not start"
check "the boot partition has its label again" label nacre-esp
look_from_here
check "it serves again by itself" serves $((LIMIT + 120))
check "it stops for good" powers_off
rm -f "$SCRATCH/disk.raw"
finish
