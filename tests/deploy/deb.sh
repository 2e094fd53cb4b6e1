#!/usr/bin/env bash
# Goal: the package installs, serves, upgrades under load, is removed and purged, and never touches
# data.
# Method: dpkg in a copy-on-write view of this machine's root, in namespaces of its own; the daemon
# is started with the command of the packaged unit.
#
#     unshare --mount --net --pid --fork --kill-child deb.sh OLD.deb NEW.deb FOLDER
set -u
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"

OLD=$1
NEW=$2
ROOT=$3/root
VOLUME="tcp://127.0.0.1:4420/$NQN:shared"

in_root() { chroot "$ROOT" "$@"; }
# Slim machines leave out documents.
dpkg_() { in_root env LC_ALL=C DEBIAN_FRONTEND=noninteractive dpkg --path-include='*' "$@"; }
status_is() { [ "$(dpkg_ -s nacre | sed -n 's/^Status: //p')" = "$1" ]; }

copy_of_root "$3" || {
    skip deb "no copy-on-write view of the root file system here"
    finish
}
if [ ! -s "$ROOT/var/lib/dpkg/status" ]; then
    skip deb "dpkg's database is not on the root file system"
    finish
fi
# An installation of this machine is hidden, not used.
dpkg_ --purge nacre >/dev/null 2>&1
mkdir -p "$ROOT/var/lib/nacre"
mount -t tmpfs state "$ROOT/var/lib/nacre"
ip link set lo up
cp "$OLD" "$ROOT/tmp/old.deb"
cp "$NEW" "$ROOT/tmp/new.deb"

start() {
    local line
    line=$(sed -n 's/^ExecStart=//p' "$ROOT/lib/systemd/system/nacre.service")
    # shellcheck disable=SC2086
    # Not through a function: the signal is for the daemon itself.
    chroot "$ROOT" env NACRE_SECURITY_SANDBOX=enforce $line >>"$ROOT/tmp/log" 2>&1 &
    DAEMON=$!
    until_true 20 in_root nacre rpc framework_wait_init
}

stop() {
    kill -TERM "$DAEMON"
    wait "$DAEMON"
}

nothing_differs() {
    local differences
    differences=$(dpkg_ --verify nacre) && [ -z "$differences" ]
}
configuration_differs() { [ "$(dpkg_ --verify nacre | sed 's/^[^ ]* *//')" = "c /etc/nacre/nacre.toml" ]; }
is_enabled() { [ "$(in_root systemctl --root=/ is-enabled nacre 2>/dev/null)" = "$1" ]; }
# It also reports units of others, so its status means nothing.
reported() { in_root systemd-analyze verify "$@" 2>&1 | grep -i nacre; }
units_are_sound() {
    # It must be able to find a fault.
    printf '[Service]\nExecStart=/bin/true\nUnknown=1\n' >"$ROOT/tmp/nacre-wrong.service"
    reported /tmp/nacre-wrong.service | grep -q Unknown && ! reported nacre.service nacre-hugepages.service
}
publishes() {
    in_root nacre bdev create file left /var/lib/nacre/left.img --size 64MiB &&
        in_root nacre bdev create file right /var/lib/nacre/right.img --size 64MiB &&
        in_root nacre volume create shared left right &&
        in_root nacre volume publish shared --nqn "$NQN:shared" --allow-any-host --listen tcp://127.0.0.1:4420
}
load() { in_root nacre perf "$VOLUME" --rw randwrite --verify --seconds "$1"; }
replicas_agree() { in_root nacre volume verify shared --wait; }
is_there() { [ -e "$ROOT/$1" ]; }
is_gone() { [ ! -e "$ROOT/$1" ] && [ ! -L "$ROOT/$1" ]; }

check "the package installs" dpkg_ --install /tmp/old.deb
check "installed files are those of the package" nothing_differs
check "the alerting rules are there" is_there usr/share/nacre/alerts.yml
check "the dashboard is there" is_there usr/share/nacre/grafana-nacre.json
check "the daemon was not started" is_gone run/nacre/nacre.sock
if in_root sh -c 'command -v systemctl && command -v systemd-analyze' >/dev/null; then
    HAS_SYSTEMD=yes
    check "the service is not enabled" is_enabled disabled
    check "systemd knows every line of the units" units_are_sound
    check "the group for roles exists" in_root getent group nacre
    in_root systemctl --root=/ enable nacre 2>/dev/null
else
    HAS_SYSTEMD=no
    skip deb-units "this machine has no systemd"
fi
check "the configuration is valid" in_root nacre config check /etc/nacre/nacre.toml
if in_root sh -c 'command -v man' >/dev/null; then
    check "the manual has a page for a command" in_root env LC_ALL=C.UTF-8 MANWIDTH=80 man --warnings=w nacre-volume
    check "the manual has a page for the configuration" in_root man -w 5 nacre.toml
fi
check "the daemon starts" start
check "it serves a volume" publishes
check "verified I/O" load 1

printf '\n[log]\nlevel = "info"\n' >>"$ROOT/etc/nacre/nacre.toml"
load 4 >"$ROOT/tmp/load" 2>&1 &
LOAD=$!
sleep 0.5
check "an upgrade while a host writes" dpkg_ --install /tmp/new.deb
check "the host saw no error" wait "$LOAD"
check "the edited configuration is kept" configuration_differs
[ "$HAS_SYSTEMD" = no ] || check "the service is still enabled" is_enabled enabled
check "the old daemon stops cleanly" stop
check "the new daemon starts" start
check "the volume is there" load 1
check "its replicas agree" replicas_agree
check "the new daemon stops cleanly" stop

check "the package is removed" dpkg_ --remove nacre
check "the program is gone" is_gone usr/bin/nacre
check "the configuration is kept" is_there etc/nacre/nacre.toml
check "the package is installed again" dpkg_ --install /tmp/new.deb
[ "$HAS_SYSTEMD" = no ] || check "and still enabled" is_enabled enabled
check "the package is purged" dpkg_ --purge nacre
check "the configuration is gone" is_gone etc/nacre
check "the link that enabled the service is gone" is_gone etc/systemd/system/multi-user.target.wants/nacre.service
check "the unit's mask is gone" is_gone etc/systemd/system/nacre.service
check "the units are gone" is_gone lib/systemd/system/nacre-hugepages.service
check "the data is kept" is_there var/lib/nacre/left.img
finish
