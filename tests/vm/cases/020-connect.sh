# also: rdma
# Connect, identify, log pages and features, as nvme-cli sees them.
serve 128
connect_and_find "$NQN"
expect "the size" "$(size_mib "$DEV")" 128
expect state "$(cat "/sys/class/nvme/$CTRL/state")" live

step "identify controller"
id=$(nvme id-ctrl "/dev/$CTRL" -o json)
expect subnqn "$(echo "$id" | jq -r .subnqn)" "$NQN"
[ "$(echo "$id" | jq .nn)" -ge 1 ] || die "NN is $(echo "$id" | jq .nn)"
[ "$(echo "$id" | jq .cntlid)" -ge 1 ] || die "a controller id of 0"
echo "$id" | jq '{vid, sn, mn, fr, mdts, oacs, oncs, vwc, sgls, kas, oaes, fuses, cmic, maxcmd, ioccsz, iorcsz}'

step "identify namespace"
ns=$(nvme id-ns "$DEV" -o json)
lbads=$(echo "$ns" | jq '.lbafs[.flbas % 16].ds')
expect "NSZE" "$(echo "$ns" | jq .nsze)" $((128 * 1048576 >> lbads))
nvme ns-descs "$DEV" -o json | jq -e '.. | .uuid? // .nguid? // empty' | sed -n 1p
expect "the namespace list" "$(nvme list-ns "/dev/$CTRL" | sed 's/.*://')" 0x1
nvme list | grep "$DEV"

step "log pages"
nvme smart-log "/dev/$CTRL" -o json | jq -e 'has("critical_warning")'
nvme error-log "/dev/$CTRL" -e 4 >"$WORK/error-log"
nvme get-log "/dev/$CTRL" --log-id=5 --log-len=4096 --raw-binary >"$WORK/effects"
effect() { od -An -tu4 -j "$(($1 * 4))" -N 4 "$WORK/effects"; }
expect "Identify supported (CSUPP)" $(($(effect 6) & 1)) 1
for opcode in 0 1 2; do expect "I/O command $opcode supported" $(($(effect $((256 + opcode))) & 1)) 1; done
nvme changed-ns-list-log "/dev/$CTRL"
if [ "$TARGET" = nacre ]; then
    nvme supported-log-pages "/dev/$CTRL"
    nvme telemetry-log "/dev/$CTRL" --output-file="$WORK/telemetry"
    tail -c +513 "$WORK/telemetry" | tr -d '\0' | tee "$WORK/report"
    grep -qx "subsystem: $NQN" "$WORK/report" || die "the telemetry log does not name the subsystem"
fi

step "features"
nvme get-feature "/dev/$CTRL" -f 0x07
nvme get-feature "/dev/$CTRL" -f 0x0b
nvme get-feature "/dev/$CTRL" -f 0x0f

step "data"
head -c 1048576 /dev/urandom >"$WORK/data.bin"
dd if="$WORK/data.bin" of="$DEV" bs=64k oflag=direct status=none
nvme flush "$DEV"
cmp -n 1048576 "$WORK/data.bin" <(dd if="$DEV" bs=64k count=16 iflag=direct status=none)

step "a read past the end is refused with a status, and the connection lives on"
expect_errors '^Read of namespace 1: LBA Out of Range'
expect_failure nvme read "$DEV" --start-block=$((128 * 1048576 >> lbads)) --block-count=0 --data-size=4096 --data=/dev/null
is_live "$CTRL"
disconnect "$NQN"
