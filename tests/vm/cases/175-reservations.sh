# limit: 420
# also: rdma
# Two hosts of the stock kernel coordinate a namespace by reservations: nvme-cli's commands, the
# refusals that the block layer sees, a host that is preempted under load, its notification, and a
# restart of the daemon.
nacre_only "reservations"
without_multipath
serve 64
connect_two_hosts
A=/dev/${a}n1 B=/dev/${b}n1

put() { dd if=/dev/urandom of="$1" bs=4k count=4 oflag=direct conv=notrunc status=none; }
get() { dd if="$1" of=/dev/null bs=4k count=4 iflag=direct status=none; }
report() { nvme resv-report "$1" --eds --output-format=json | jq ".$2"; }
state() { rpc nvmf_ns_get_reservation "{\"nqn\":\"$NQN\",\"nsid\":1}" | jq -r "$1"; }
holder() { state '[.registrants[] | select(.holder) | .hostid] | join(" ")'; }

# Refusals are the subject of this case. The preemption may hit a write in flight.
allow_errors '^(Read|Write) of namespace 1: Command Aborted due to Preempt and Abort'
expect_errors '^(Read|Write) of namespace 1: Reservation Conflict' '^Reservation (Register|Acquire) of namespace 1: Reservation Conflict'

step "the answers to the kernel"
expect "ONCS, bit 5" $(($(nvme id-ctrl "$A" --output-format=json | jq .oncs) >> 5 & 1)) 1
expect "RESCAP" "$(nvme id-ns "$A" --output-format=json | jq .rescap)" 255

step "registered, and nothing reserved"
nvme resv-register "$A" --nrkey=0xa --rrega=0
nvme resv-register "$B" --nrkey=0xb --rrega=0
expect_failure nvme resv-register "$B" --nrkey=0xc --rrega=0
expect "registrants" "$(report "$A" regctl)" 2
expect "the type" "$(report "$B" rtype)" 0
put "$A"
put "$B"

step "write exclusive: B may read"
nvme resv-acquire "$A" --crkey=0xa --rtype=1 --racqa=0
expect "the type" "$(report "$B" rtype)" 1
expect "the holder" "$(holder)" "$HOST_A_ID"
put "$A"
get "$B"
expect_failure put "$B"
expect_failure nvme resv-acquire "$B" --crkey=0xb --rtype=1 --racqa=0
nvme resv-release "$A" --crkey=0xa --rtype=1 --rrela=0
put "$B"

step "exclusive access: B may neither read nor write"
nvme resv-acquire "$B" --crkey=0xb --rtype=2 --racqa=0
expect_failure get "$A"
expect_failure put "$A"
put "$B"
nvme resv-release "$B" --crkey=0xb --rtype=2 --rrela=0

step "B writes without end until A preempts it"
nvme resv-acquire "$B" --crkey=0xb --rtype=1 --racqa=0
(trap - ERR; while dd if=/dev/zero of="$B" bs=64k count=64 oflag=direct conv=notrunc status=none; do :; done) &
writer=$!
wait_until 60 kill -0 $writer
nvme resv-acquire "$A" --crkey=0xa --prkey=0xb --rtype=1 --racqa=2
head -c 65536 /dev/urandom >"$WORK/own"
dd if="$WORK/own" of="$A" bs=64k oflag=direct conv=notrunc status=none
wait $writer || true
cmp "$WORK/own" <(dd if="$A" bs=64k count=1 iflag=direct status=none)
expect "registrants" "$(report "$A" regctl)" 1
expect "the holder" "$(holder)" "$HOST_A_ID"
expect "B's notification" "$(nvme get-log "/dev/$b" --log-id=0x80 --log-len=64 --raw-binary | od -An -tu1 -j8 -N1 | tr -d ' ')" 1
expect_failure put "$B"
nvme resv-release "$A" --crkey=0xa --rrela=1
expect "registrants after Clear" "$(report "$A" regctl)" 0

step "persistent reservations are restored after kill -9, and apply"
nvme resv-register "$A" --nrkey=0xa1 --rrega=0 --cptpl=3
nvme resv-acquire "$A" --crkey=0xa1 --rtype=1 --racqa=0
nacre_kill
nacre_start
expect "the holder" "$(holder)" "$HOST_A_ID"
# Reads wait until the hosts have reconnected; nvme-cli's commands would fail.
get "$A"
get "$B"
wait_until 120 is_live "$a"
wait_until 120 is_live "$b"
expect_failure put "$B"
put "$A"
expect "persistence" "$(report "$B" ptpls)" 1
nvme resv-register "$A" --crkey=0xa1 --rrega=1
put "$B"

step "an administrator clears the reservation of a host that does not come back"
nvme resv-register "$A" --nrkey=0xa2 --rrega=0
nvme resv-acquire "$A" --crkey=0xa2 --rtype=1 --racqa=0
expect_failure put "$B"
clear() { "$NACRE" subsystem clear-reservation "$NQN" 1 --socket "$SOCK" "$@"; }
expect "refusals" "$( (clear 2>&1 || true) | grep -c "holds the reservation and is connected")" 1
clear --force
expect "registrants" "$(report "$B" regctl)" 0
put "$B"
put "$A"

step "the block layer's own calls (linux/pr.h), as cluster file systems make them"
pr() { # pr DEVICE REQUEST FORMAT NUMBERS…
    perl -e 'my ($path, $request, $format, @numbers) = @ARGV;
        open(my $device, "+<", $path) or die "$path: $!";
        my $status = ioctl($device, hex($request), pack($format, @numbers));
        defined $status or die "$!\n";
        $status == 0 or die "status $status\n";' "$@"
}
pr "$A" 401870c8 QQLL 0 $((0xd)) 0 0 # IOC_PR_REGISTER
pr "$A" 401070c9 QLL $((0xd)) 1 0    # IOC_PR_RESERVE, write exclusive
expect "the holder" "$(holder)" "$HOST_A_ID"
expect_failure put "$B"
pr "$A" 401070ca QLL $((0xd)) 1 0    # IOC_PR_RELEASE
expect "the type" "$(report "$B" rtype)" 0
put "$B"
pr "$A" 401070cd QLL $((0xd)) 0 0    # IOC_PR_CLEAR
expect "registrants" "$(report "$B" regctl)" 0
