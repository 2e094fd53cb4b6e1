#!/bin/sh
# Runs a command on a machine that looks like the appliance 0.1.0, in a mount namespace of its own:
#
#     unshare --mount sh stand-in-appliance.sh KEY.pem COMMAND...
#
# Nothing outside the namespace changes. `systemd-sysupdate` and `systemctl` are stand-ins: the
# first writes the boot entry and the labels of the slot, the second notes its words in
# /boot/systemctl.
set -eu
KEY=$1
shift
UPPER=$(mktemp -d)
mount -t tmpfs stand-in "$UPPER"
mkdir -p "$UPPER/up/nacre/keys" "$UPPER/up/systemd" "$UPPER/work" "$UPPER/bin"
openssl pkey -in "$KEY" -pubout -out "$UPPER/up/nacre/keys/maker.pem"
printf 'IMAGE_ID=nacre\nIMAGE_VERSION=0.1.0\n' >"$UPPER/up/os-release"
cat >"$UPPER/up/systemd/systemd-sysupdate" <<'END'
#!/bin/sh
set -eu
[ "$1 $2" = "--verify=no update" ]
sleep 1
mv /var/lib/nacre/updates/nacre_$3.efi "/boot/EFI/Linux/nacre_$3+3-0.efi"
: >"/dev/disk/by-partlabel/nacre_$3"
: >"/dev/disk/by-partlabel/nacre_$3_verity"
END
cat >"$UPPER/bin/systemctl" <<'END'
#!/bin/sh
echo "$*" >>/boot/systemctl
END
chmod +x "$UPPER/up/systemd/systemd-sysupdate" "$UPPER/bin/systemctl"
mount -t overlay stand-in -o "lowerdir=/usr/lib,upperdir=$UPPER/up,workdir=$UPPER/work" /usr/lib
mount --bind "$UPPER/bin/systemctl" "$(command -v systemctl)"
mount -t tmpfs stand-in /boot
mount -t tmpfs stand-in /var/lib
[ -d /dev/disk ] || mkdir /dev/disk
mount -t tmpfs stand-in /dev/disk
mkdir -p /boot/EFI/Linux /dev/disk/by-partlabel /var/lib/nacre
echo kernel >/boot/EFI/Linux/nacre_0.1.0.efi
: >/dev/disk/by-partlabel/nacre_0.1.0
: >/dev/disk/by-partlabel/nacre_0.1.0_verity
exec "$@"
