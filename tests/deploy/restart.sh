#!/usr/bin/env bash
# Goal: a daemon that is never ready ends the restarts of its machine, even if the boot menu counts
# no try. Method: the image's script `restart` on variables of the firmware in a folder, and
# programs of systemd that only print. Needs a mount namespace of its own: unshare --mount
# restart.sh
set -eu

RESTART=$(cd "$(dirname "$0")" && pwd)/../../deploy/image/root/usr/lib/nacre/restart
mount -t tmpfs run /run
mount -t tmpfs state /var/lib
mkdir /run/programs /run/variables
export PATH=/run/programs:$PATH NACRE_VARIABLES=/run/variables
printf '#!/bin/sh\ncase "$*" in *is-active*) exit 3 ;; *reboot*) echo REBOOT ;; esac\n' >/run/programs/systemctl
printf '#!/bin/sh\necho a word of the daemon\n' >/run/programs/journalctl
printf '#!/bin/sh\n' >/run/programs/sleep
# Like `tail` on variables of the firmware, which cannot seek.
printf '#!/bin/sh\n[ "$#" -lt 3 ] || { echo "tail: Illegal seek" >&2; exit 1; }\nexec /usr/bin/tail "$@"\n' >/run/programs/tail
chmod +x /run/programs/*

# The last line of a start whose daemon is not ready, with this boot entry.
not_ready() {
    {
        printf '\006\000\000\000'
        printf '%s\0' "\\EFI\\Linux\\nacre_0.2.0$1.efi" | sed 's/./&\x0/g'
    } >/run/variables/LoaderBootCountPath-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f
    "$RESTART" not-ready | tail -n 1
}
expect() { # expect ENTRY TEXT
    local said
    said=$(not_ready "$1")
    [[ $said == *"$2"* ]] || { echo "$1: $said"; exit 1; }
}

expect +2-1 REBOOT
expect +1-2 REBOOT
expect +0-3 REBOOT
expect +0-4 'no version on this disk has tries left; no restart'
expect '' 'good before; no restart'
# The boot menu does not count.
for _ in 4 5 6; do expect +2-1 REBOOT; done
for _ in 7 8; do expect +2-1 '6 restarts did not help; no restart'; done
grep -q 'a word of the daemon' /run/nacre-trouble
# One write of attributes and contents, as the firmware wants them.
[ "$(od -An -tx1 /run/variables/NacreRestart1-*)" = ' 07 00 00 00 01' ]
# A daemon that was ready in this start is no failed try.
rm /run/variables/NacreRestart*
touch /run/nacre-good
expect +2-1 'good before; no restart'
