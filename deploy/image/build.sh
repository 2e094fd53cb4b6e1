#!/usr/bin/env bash
# Builds the appliance's disk image. `cargo xtask image` calls this as root, in a mount namespace of
# its own:
#
#     CACHE=DIR OUT=DIR VERSION=0.1.0 SOURCE_DATE_EPOCH=SECONDS [KEY=PRIVATE.pem] [ADD=FOLDER] \
#         unshare --mount deploy/image/build.sh nacre.deb [PUBLIC.pem …]
#
# KEY signs the update bundle. The image accepts bundles of KEY and of the further public keys.
# Without KEY, a test key of the cache signs. Its public key has the name test-only, which
# `nacre appliance update` prints. ADD holds files that are copied over the root file system.
#
# CACHE keeps two trees of Debian 13: the tools, which Debian 12 lacks, and the base of the root
# file system. Steps that need the tools run in the first by chroot. OUT receives:
#
#     nacre_VERSION.raw        the disk: boot partition, root file system, its verity data;
#                              its second boot entry
#                              installs the system to another disk
#     nacre_VERSION.tar        the update bundle, which takes a running appliance to this version
#     nacre_VERSION.efi        kernel, initrd and command line with the root's hash, as in the boot
#                              partition
#     nacre_VERSION.files      every file of the root: mode, owner, size, SHA-256, path
#     nacre_VERSION.packages   Debian's packages in it, with versions
set -euo pipefail
shopt -s inherit_errexit

HERE=$(cd "$(dirname "$0")" && pwd)
DEB=$(realpath "$1")
shift
[[ $VERSION =~ ^[0-9]+(\.[0-9]+){1,3}$ ]] || { echo "version $VERSION: two to four numbers with dots" >&2; exit 2; }
SUITE=trixie
MIRROR=${NACRE_IMAGE_MIRROR:-http://deb.debian.org/debian}
export SOURCE_DATE_EPOCH LC_ALL=C TZ=UTC
umask 022

step() { echo "== $*"; }

# tree NAME VARIANT: prints the folder of a tree of Debian with the packages of NAME.txt; makes it
# if the cache has none.
tree() {
    local name=$1 variant=$2 list=$HERE/$1.txt dir
    dir=$CACHE/$name-$SUITE-$(sha256sum <"$list" | cut -c1-12)
    if [ ! -d "$dir" ]; then
        step "Debian 13: $name" >&2
        rm -rf "$CACHE/$name-$SUITE"-*
        mmdebstrap --quiet --variant="$variant" --include="$(paste -sd, "$list")" \
            --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
            --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
            "$SUITE" "$dir.partial" "$MIRROR" >&2
        mv "$dir.partial" "$dir"
    fi
    echo "$dir"
}

if [ -n "${KEY:-}" ]; then
    KEY_NAME=$(basename "$KEY" .pem)
else
    KEY=$CACHE/test-only-private.pem
    KEY_NAME=test-only
    [ -e "$KEY" ] || (umask 077 && openssl genpkey -algorithm ed25519 -out "$KEY")
fi

TOOLS=$(tree tools apt)
BASE=$(tree packages minbase)
WORK=$OUT/work
rm -rf "$WORK"
mkdir -p "$WORK"/{upper,overlay,root,esp/EFI/{BOOT,Linux,nacre-install,systemd},esp/loader/entries,definitions,out}

in_tools() { chroot "$TOOLS" "$@"; }
in_root() { chroot "$WORK/root" env DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin "$@"; }

step "the root file system"
mount -t overlay overlay -o "lowerdir=$BASE,upperdir=$WORK/upper,workdir=$WORK/overlay" "$WORK/root"
mount -t proc proc "$WORK/root/proc"
mount --bind /dev "$WORK/root/dev"
cp "$DEB" "$WORK/root/nacre.deb"
in_root dpkg --install /nacre.deb
rm "$WORK/root/nacre.deb"
cp -rT "$HERE/root" "$WORK/root"
[ -z "${ADD:-}" ] || cp -rT "$ADD" "$WORK/root"
mkdir -p "$WORK/root/usr/lib/nacre/keys"
openssl pkey -in "$KEY" -pubout -out "$WORK/root/usr/lib/nacre/keys/$KEY_NAME.pem"
for public in "$@"; do
    openssl pkey -pubin -in "$public" -pubout -out "$WORK/root/usr/lib/nacre/keys/$(basename "$public")"
done
chmod 0644 "$WORK/root/usr/lib/nacre/keys"/*
sed -i '/^IMAGE_/d' "$WORK/root/usr/lib/os-release"
printf 'IMAGE_ID=nacre\nIMAGE_VERSION=%s\n' "$VERSION" >>"$WORK/root/usr/lib/os-release"
echo nacre >"$WORK/root/etc/hostname"
ln -sf ../run/systemd/resolve/stub-resolv.conf "$WORK/root/etc/resolv.conf"
# The same presets as at the first boot.
rm -rf "$WORK/root"/etc/systemd/system/*.wants
in_root systemctl --root=/ preset-all 2>/dev/null
for unit in getty@.service serial-getty@.service apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer; do
    ln -sf /dev/null "$WORK/root/etc/systemd/system/$unit"
done

step "the initrd"
KERNEL=$(basename "$WORK/root"/lib/modules/*)
cp -rT "$HERE/initrd" "$WORK/root/initrd-files"
for file in usr/lib/nacre/restart usr/lib/udev/rules.d/61-nacre-boot-disk.rules; do
    install -D "$HERE/root/$file" "$WORK/root/initrd-files/$file"
done
in_root dracut --quiet --force --no-hostonly --reproducible --zstd --kver "$KERNEL" \
    --add "systemd systemd-initrd systemd-veritysetup systemd-repart dm" \
    --omit "network network-manager nfs iscsi lvm mdraid dmraid multipath crypt plymouth i18n" \
    --install "mkfs.ext4 mke2fs fsck.ext4 /etc/mke2fs.conf sed head cat tail tr sleep" --include /initrd-files / \
    --filesystems "erofs ext4 overlay vfat" --add-drivers "dm_verity erofs overlay efivarfs nvme virtio_blk virtio_scsi ahci sd_mod usb_storage uas" \
    /new-initrd
rm -rf "$WORK/root/initrd-files"
mv "$WORK/root/new-initrd" "$WORK/initrd"
cp "$WORK/root/boot/vmlinuz-$KERNEL" "$WORK/kernel"

step "without identity, logs, caches and what only a writable root needs"
umount "$WORK/root/dev" "$WORK/root/proc"
cd "$WORK/root"
rm -rf boot/* initrd.img* vmlinuz* etc/ssh/ssh_host_* var/lib/dbus/machine-id var/lib/systemd/random-seed \
    var/log/* var/cache/* var/lib/apt/lists/* var/lib/dpkg/*-old var/lib/systemd/* var/tmp/* tmp/* root/.??* run/* \
    etc/{passwd,group,shadow,gshadow,subuid,subgid}- etc/.pwd.lock usr/share/doc/*/changelog* \
    etc/machine-id var/lib/dracut
echo uninitialized >etc/machine-id
chmod 0444 etc/machine-id
find . -xdev -name __pycache__ -prune -exec rm -rf {} +
find . -xdev -newermt "@$SOURCE_DATE_EPOCH" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
"$HERE/list.py" . >"$OUT/nacre_$VERSION.files"
cd /
chroot "$WORK/root" dpkg-query -W >"$OUT/nacre_$VERSION.packages"

step "the disk"
mkdir -p "$TOOLS/build"
mount --rbind "$WORK" "$TOOLS/build"
mount -t proc proc "$TOOLS/proc"
mount --bind /dev "$TOOLS/dev"
for definition in "$HERE"/repart/*.conf; do
    sed "s/@VERSION@/$VERSION/" "$definition" >"$WORK/definitions/$(basename "$definition")"
done
# Identifiers of partitions follow from the version: two builds of one version have the same.
HEX=$(printf 'nacre %s' "$VERSION" | sha256sum)
SEED=${HEX:0:8}-${HEX:8:4}-4${HEX:13:3}-8${HEX:17:3}-${HEX:20:12}
repart() {
    in_tools env SOURCE_DATE_EPOCH="$SOURCE_DATE_EPOCH" systemd-repart --dry-run=no --offline=yes --sector-size=512 \
        --seed="$SEED" --definitions=/build/definitions "$@" /build/out/disk.raw
}
repart --empty=create --size=auto --copy-source=/build/root --defer-partitions=esp --json=short >"$WORK/partitions"
HASH=$(grep -o '"roothash" *: *"[0-9a-f]*"' "$WORK/partitions" | head -n 1 | grep -o '[0-9a-f]\{64\}')

# Without a shell in the initrd: a version that cannot boot restarts, and after three tries the
# other one is started.
COMMAND_LINE="roothash=$HASH rd.shell=0 rd.emergency=reboot panic=30 systemd.firstboot=off systemd.getty_auto=no \
console=tty0 console=ttyS0"
in_tools ukify build --linux=/build/kernel --initrd=/build/initrd --uname="$KERNEL" \
    --os-release=@/build/root/usr/lib/os-release --cmdline="$COMMAND_LINE" \
    --output="/build/esp/EFI/Linux/nacre_$VERSION+3-0.efi"
cp "$TOOLS/usr/lib/systemd/boot/efi/systemd-bootx64.efi" "$WORK/esp/EFI/BOOT/BOOTX64.EFI"
cp "$TOOLS/usr/lib/systemd/boot/efi/systemd-bootx64.efi" "$WORK/esp/EFI/systemd/systemd-bootx64.efi"
# The installer never starts by itself, whatever tries the versions have left.
printf 'timeout 3\neditor no\ndefault nacre_*\n' >"$WORK/esp/loader/loader.conf"
# The entry of the installer: the same system, with no partition of any disk mounted but its own
# root. It has no counter of tries. `nacre appliance install` copies neither this entry nor its
# files.
cp "$WORK/kernel" "$WORK/esp/EFI/nacre-install/linux"
cp "$WORK/initrd" "$WORK/esp/EFI/nacre-install/initrd"
cat >"$WORK/esp/loader/entries/nacre-install.conf" <<ENTRY
title Install Nacre $VERSION to a disk
sort-key nacre-install
version $VERSION
linux /EFI/nacre-install/linux
initrd /EFI/nacre-install/initrd
options $COMMAND_LINE nacre.install=ask fstab=no systemd.volatile=state systemd.gpt_auto=no
ENTRY
find "$WORK/esp" -exec touch --date="@$SOURCE_DATE_EPOCH" {} +
repart --empty=allow --copy-source=/build/esp >"$WORK/partitions.esp"

step "the update bundle"
# partition LABEL FILE: copies a partition's contents, and prints its identifier.
partition() {
    local offset size identifier
    read -r offset size identifier < <(python3 -c '
import json, sys
for partition in json.load(open(sys.argv[1])):
    if partition["label"] == sys.argv[2]:
        print(partition["offset"], partition["raw_size"], partition["uuid"])' "$WORK/partitions" "$1")
    dd if="$WORK/out/disk.raw" of="$2" bs=1M iflag=skip_bytes,count_bytes conv=sparse status=none \
        skip="$offset" count="$size"
    echo "$identifier"
}
ROOT_ID=$(partition "nacre_$VERSION" "$WORK/root.raw")
VERITY_ID=$(partition "nacre_${VERSION}_verity" "$WORK/verity.raw")
case $(uname -m) in
x86_64) ARCHITECTURE=x86-64 ;;
aarch64) ARCHITECTURE=arm64 ;;
*) ARCHITECTURE=$(uname -m) ;;
esac
"$HERE/bundle.sh" "$VERSION" "$ARCHITECTURE" "$KEY" "$OUT/nacre_$VERSION.tar" "$WORK/root.raw" "$ROOT_ID" \
    "$WORK/verity.raw" "$VERITY_ID" "$WORK/esp/EFI/Linux/nacre_$VERSION+3-0.efi"

mv "$WORK/out/disk.raw" "$OUT/nacre_$VERSION.raw"
cp "$WORK/esp/EFI/Linux/nacre_$VERSION+3-0.efi" "$OUT/nacre_$VERSION.efi"
umount -R "$TOOLS/build" "$TOOLS/proc" "$TOOLS/dev" "$WORK/root"
rm -rf "$WORK"
