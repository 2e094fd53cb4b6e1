# limit: 600
# iWARP, with the kernel's soft-iWARP: the stock host and Nacre's own verify every byte. RDMA and
# TCP cannot share a port there, which the listener says.
nacre_only "the reasons of its listeners"
[ -n "$SIW" ] || skip "the kernel module siw could not be built: the start of the run says why"
modprobe -a dummy ib_uverbs rdma_ucm iw_cm nvme-rdma libcrc32c
insmod "$SIW"
ip link add "$RDMA_LINK" type dummy
ip link set "$RDMA_LINK" up
ip address add 10.9.8.1/24 dev "$RDMA_LINK"
RDMA_DEV=siw0 TRTYPE=rdma ADDR=10.9.8.1
rdma link add "$RDMA_DEV" type siw netdev "$RDMA_LINK"
wait_until 20 holds "/sys/class/infiniband/$RDMA_DEV/ports/1/state" "4: ACTIVE"

config_serving malloc 32MiB <<END
[[nvmf.listener]]
name = "shared"
iface = ["ip:$ADDR"]
port = 4421
rdma = "prefer"

[[nvmf.listener]]
name = "data"
iface = ["ip:$ADDR"]
rdma = "require"
transports = ["rdma"]
END
standing() { rpc nvmf_get_listeners | jq -r --arg port "$1" --arg kind "$2" '.listeners[] | select(.address.trsvcid == $port and .address.trtype == $kind) | "\(.actual) \(.reason // "")"'; }

step "one transport per port"
target_start --config "$WORK/nacre.toml"
expect "RDMA on the shared port" "$(standing 4421 RDMA)" "absent iwarp_port"
expect "TCP on the shared port" "$(standing 4421 TCP)" "listening "
expect "RDMA alone" "$(standing 4420 RDMA)" "listening "
"$NACRE" doctor --config "$WORK/nacre.toml" >"$WORK/doctor" || true
grep "soft-iWARP; iWARP: PFC not required" "$WORK/doctor"

step "the stock host"
nvme discover -t rdma -a "$ADDR" -s "$PORT" | tee "$WORK/discover"
grep -q "subnqn: *$NQN" "$WORK/discover"
connect "$NQN" --nr-io-queues=2
wait_until 60 ns_dev "$NQN" 1
DEV=$(ns_dev "$NQN" 1)
for size in 4k 64k 128k; do
    fio --name="verify-$size" --filename="$DEV" --rw=randwrite --bs="$size" --iodepth=8 --ioengine=libaio --direct=1 \
        --size=8m "${FIO_VERIFIED[@]}" --verify_backlog=16 --output="$WORK/fio.log" || { cat "$WORK/fio.log"; die "fio met an error"; }
done
nvme disconnect -n "$NQN"
wait_until 60 gone "$NQN"

step "Nacre's own host"
for size in "4k --depth 8 --ios 400" "64k --depth 4 --ios 200" "128k --depth 8 --ios 64"; do
    # shellcheck disable=SC2086
    "$NACRE" perf -n "$NQN" -t rdma -a "$ADDR" -s "$PORT" --connect-timeout 60s --cm-timeout 30s --keep-alive 120s \
        --io-timeout 120s --range 8m --queues 2 --rw randrw --verify --json --size $size >"$WORK/perf.json"
    jq -c '{size, iops, paths, errors, verification}' "$WORK/perf.json"
    jq -e '.paths.transport == "rdma" and .errors == {} and .unfinished == 0 and .connections_lost == 0' "$WORK/perf.json"
    jq -e '.verification.blocks_wrong == 0 and .verification.blocks_checked > 0' "$WORK/perf.json"
done

nacre_stop
rdma link delete "$RDMA_DEV"
wait_until 20 rmmod siw
