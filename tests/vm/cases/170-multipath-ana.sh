# limit: 300
# Native multipath over two listeners: I/O uses the path with the best state, moves when the state
# changes, and waits while no path is accessible. No I/O fails.
nacre_only "ANA states by listener"
[ "$(cat /sys/module/nvme_core/parameters/multipath 2>/dev/null)" = Y ] || skip "this kernel has no native multipath"
SECOND=4421
ana() { rpc nvmf_subsystem_listener_set_ana_state \
    "{\"nqn\":\"$NQN\",\"listen_address\":{\"trtype\":\"tcp\",\"adrfam\":\"ipv4\",\"traddr\":\"$ADDR\",\"trsvcid\":\"$1\"},\"ana_state\":\"$2\"}"; }

# Commands in flight to a port when its state changed.
allow_errors '^(Read|Write|Flush) of namespace 1: Asymmetric Access (Inaccessible|Transition)'
target_start
rpc nvmf_create_subsystem "{\"nqn\":\"$NQN\",\"allow_any_host\":true,\"ana_reporting\":true,\"serial_number\":\"NACRETEST\"}"
for port in "$PORT" "$SECOND"; do
    rpc nvmf_subsystem_add_listener \
        "{\"nqn\":\"$NQN\",\"listen_address\":{\"trtype\":\"tcp\",\"adrfam\":\"ipv4\",\"traddr\":\"$ADDR\",\"trsvcid\":\"$port\"}}"
done
ana "$SECOND" non_optimized
ns_add "$NQN" 1 64
for port in "$PORT" "$SECOND"; do
    nvme connect -t tcp -a "$ADDR" -s "$port" -n "$NQN" --hostnqn="$HOST_A" --hostid="$HOST_A_ID" -i 1
done

# The kernel names paths nvmeXcYn1; the port of a path is in its controller's address.
ctrl_of() { grep -l "trsvcid=$1" /sys/class/nvme/nvme*/address | sed 's|.*/\(nvme[0-9]*\)/address|\1|'; }
path_of() { local c; c=$(ctrl_of "$1"); echo /sys/class/nvme/"$c"/nvme*c"${c#nvme}"n1; }
state_of() { cat "$(path_of "$1")/ana_state"; }
has_state() { [ "$(state_of "$1")" = "$2" ]; }
ios_of() { awk '{ print $1 + $5 }' "$(path_of "$1")/stat"; }
wait_until 20 has_state "$PORT" optimized
wait_until 20 has_state "$SECOND" non-optimized
wait_until 20 ls /dev/nvme*n1
DISK=$(ls /dev/nvme*n1 | sed -n 1p)

traffic() { dd if=/dev/urandom of="$DISK" bs=4k count="$1" oflag=direct status=none; }
moved() { # moved PORT OTHER: all of the traffic goes over PORT
    local before other
    before=$(ios_of "$1") other=$(ios_of "$2")
    traffic 64
    [ $(($(ios_of "$1") - before)) -ge 64 ] || die "port $1 carried $(($(ios_of "$1") - before)) of 64"
    expect_at_most "I/O over port $2" $(($(ios_of "$2") - other)) 0
}
step "the optimized path carries all I/O"
moved "$PORT" "$SECOND"

step "ANA states that change move I/O, and no I/O fails"
fio --name=verify --filename="$DISK" --rw=randwrite --bs=4k --iodepth=8 --ioengine=libaio --direct=1 --size=8m \
    "${FIO_VERIFIED[@]}" --time_based --runtime=12 --output="$WORK/fio.log" &
FIO=$!
sleep 2
ana "$PORT" inaccessible
wait_until 20 has_state "$PORT" inaccessible
sleep 1
ana "$SECOND" optimized
ana "$PORT" non_optimized
wait_until 20 has_state "$SECOND" optimized
wait_until 20 has_state "$PORT" non-optimized
wait "$FIO" || { cat "$WORK/fio.log"; die "fio failed while paths changed"; }
moved "$SECOND" "$PORT"

step "without an accessible path I/O waits, and continues when one returns"
ana "$PORT" inaccessible
ana "$SECOND" inaccessible
wait_until 20 has_state "$SECOND" inaccessible
traffic 4 &
WRITER=$!
sleep 3
kill -0 "$WRITER" || die "I/O did not wait"
ana "$PORT" optimized
wait "$WRITER" || die "I/O that waited failed"

step "the states are restored after kill -9"
nacre_kill
target_start
wait_until 60 has_state "$SECOND" inaccessible
wait_until 60 has_state "$PORT" optimized
traffic 16
nvme disconnect -n "$NQN"
