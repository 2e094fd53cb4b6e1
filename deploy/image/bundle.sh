#!/usr/bin/env bash
# Makes a signed update bundle of the appliance:
#
#     bundle.sh VERSION ARCHITECTURE KEY.pem OUT.tar ROOT ROOT-UUID VERITY VERITY-UUID KERNEL.efi
#
# KEY.pem is an Ed25519 private key (openssl genpkey -algorithm ed25519). ROOT and VERITY are the
# partitions' contents, the identifiers are those of their partitions: the kernel image finds its
# root file system by them. Two calls with the same files make the same bytes.
set -euo pipefail

[ $# = 9 ] || { sed -n '4p' "$0" >&2; exit 2; }
VERSION=$1 ARCHITECTURE=$2 KEY=$3 OUT=$4
[[ $VERSION =~ ^[0-9]+(\.[0-9]+){1,3}$ ]] || { echo "version $VERSION: two to four numbers with dots" >&2; exit 2; }
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

ROOT=nacre_${VERSION}_$6.root.raw.gz
VERITY=nacre_${VERSION}_$8.verity.raw.gz
KERNEL=nacre_$VERSION.efi
# systemd-import unpacks gzip. The file systems are compressed already: only the space behind them
# becomes small.
gzip -1 -n <"$5" >"$WORK/$ROOT"
gzip -1 -n <"$7" >"$WORK/$VERITY"
cp "$9" "$WORK/$KERNEL"
printf 'IMAGE_ID=nacre\nIMAGE_VERSION=%s\nARCHITECTURE=%s\n' "$VERSION" "$ARCHITECTURE" >"$WORK/RELEASE"
(cd "$WORK" && sha256sum --text RELEASE "$ROOT" "$VERITY" "$KERNEL" >SHA256SUMS)
openssl pkeyutl -sign -rawin -inkey "$KEY" -in "$WORK/SHA256SUMS" -out "$WORK/SHA256SUMS.sig"
tar --create --format=ustar --owner=root:0 --group=root:0 --mode=0644 --mtime="@${SOURCE_DATE_EPOCH:-0}" --file "$OUT" \
    --directory "$WORK" SHA256SUMS SHA256SUMS.sig RELEASE "$ROOT" "$VERITY" "$KERNEL"
