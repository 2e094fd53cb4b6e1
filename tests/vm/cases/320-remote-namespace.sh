# limit: 900
# Nacre re-exports a namespace of the kernel's target: attached over TCP and over RDMA, under a
# host's verified load. With keys, each end proves itself to the other over both transports.
nacre_only "its own host"
rdma_up
modprobe -a nvmet nvmet-tcp nvmet-rdma
FAR=nqn.2026-01.org.example:far
FAR_PORT=4430
# The cleanup of the guest knows only the first port.
far_clean() { rm -f "$NVMET"/ports/1[12]/subsystems/*; rmdir "$NVMET"/ports/1[12]; } 2>/dev/null
trap far_clean EXIT
mkdir -p "$NVMET/subsystems/$FAR"
echo 1 >"$NVMET/subsystems/$FAR/attr_allow_any_host"
nvmet_ns_add "$FAR" 1 64
for at in "11 tcp" "12 rdma"; do
    read -r port kind <<<"$at"
    mkdir "$NVMET/ports/$port"
    echo "$kind" >"$NVMET/ports/$port/addr_trtype"
    echo ipv4 >"$NVMET/ports/$port/addr_adrfam"
    echo "$ADDR" >"$NVMET/ports/$port/addr_traddr"
    echo "$FAR_PORT" >"$NVMET/ports/$port/addr_trsvcid"
    ln -s "$NVMET/subsystems/$FAR" "$NVMET/ports/$port/subsystems/$FAR"
done

# The machine may be emulated, so waits are long.
export NACRE_REPLICATION_KEEP_ALIVE_MS=120000 NACRE_REPLICATION_FAST_FAIL_MS=0 NACRE_REPLICATION_RDMA_REPROBE_S=2
TRTYPE=tcp
target_start
rpc bdev_nvme_set_options '{"tcp_connect_timeout_ms":60000}'
far() { rpc bdev_nvme_get_controllers '{"name":"far"}' | jq -r "$1"; }
far_is() { [ "$(far '.[0].ctrlrs[0].trid.trtype + " " + .[0].ctrlrs[0].state')" = "$1 enabled" ]; }

for at in "nvmf+tcp TCP" "nvmf+rdma+tcp RDMA"; do
    read -r scheme kind <<<"$at"
    step "$scheme"
    expect "the devices" "$("$NACRE" bdev attach "$scheme://$ADDR:$FAR_PORT/$FAR" --name far -r "$SOCK")" farn1
    # Retry if RDMA took too long at first.
    wait_until 180 far_is "$kind"
    rpc bdev_get_bdevs '{"name":"farn1"}' | jq -c '.[0] | {num_blocks, uuid, supported_io_types, driver_specific}'
    expect "the size" "$(rpc bdev_get_bdevs '{"name":"farn1"}' | jq '.[0].num_blocks * .[0].block_size')" $((64 << 20))
    losses=$(far '.[0].ctrlrs[0].losses')
    subsystem_create "$NQN" any
    rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"nsid\":1,\"bdev_name\":\"farn1\"}}"
    connect_and_find "$NQN"
    fio_verify "$DEV" "over-$scheme" --rw=randrw --bsrange=4k-64k --iodepth=16 --size=16M --trim_percentage=0
    disconnect "$NQN"
    subsystem_delete "$NQN"
    expect "losses under load" "$(far '.[0].ctrlrs[0].losses')" "$losses"
    far_is "$kind" || die "it is not connected by $kind any more"
    "$NACRE" bdev detach far -r "$SOCK"
done

step "the kernel's target requires a key"
for name in own other wrong; do key_make $name; done
echo 0 >"$NVMET/subsystems/$FAR/attr_allow_any_host"
nvmet_host_allow "$FAR" "$HOST_A"
far_host=$NVMET/hosts/$HOST_A
perf_far() { # perf_far TRANSPORT OPTIONS…
    local scheme=$1
    shift
    "$NACRE" perf "$scheme://$ADDR:$FAR_PORT/$FAR" -q "$HOST_A" -I "$HOST_A_ID" --connect-timeout 60s --cm-timeout 30s \
        --keep-alive 120s --rw randrw --verify --range 1m --queues 2 --ios 200 --json "$@"
}
verified() {
    jq -e '.errors == {} and .unfinished == 0 and .verification.blocks_wrong == 0 and .verification.blocks_checked > 0' "$WORK/perf.json"
}
secret own >"$far_host/dhchap_key"
for scheme in tcp rdma; do
    perf_far $scheme --dhchap-key "$WORK/keys/own" >"$WORK/perf.json"
    verified
    expect_failure perf_far $scheme --dhchap-key "$WORK/keys/wrong"
    # The kernel's target closes an RDMA connection before the host has fetched the reason.
    [[ $FAILURE == *"authentication failed"* || $FAILURE == *"during authentication"* ]] || die "it does not name the cause"
    expect_failure perf_far $scheme
    # The target has no key to prove itself with.
    expect_failure perf_far $scheme --dhchap-key "$WORK/keys/own" --dhchap-ctrlr-key "$WORK/keys/other"
done

step "both ends authenticate themselves, with a Diffie-Hellman group"
secret other >"$far_host/dhchap_ctrl_key"
echo ffdhe2048 >"$far_host/dhchap_dhgroup"
echo "hmac(sha512)" >"$far_host/dhchap_hash"
for scheme in tcp rdma; do
    perf_far $scheme --dhchap-key "$WORK/keys/own" --dhchap-ctrlr-key "$WORK/keys/other" >"$WORK/perf.json"
    verified
    expect_failure perf_far $scheme --dhchap-key "$WORK/keys/own" --dhchap-ctrlr-key "$WORK/keys/wrong"
done

step "the daemon attaches with its keys"
attach() { # attach CTRLR-KEY
    rpc bdev_nvme_attach_controller "{\"name\":\"far\",\"trtype\":\"tcp\",\"adrfam\":\"ipv4\",\"traddr\":\"$ADDR\",\"trsvcid\":\"$FAR_PORT\",
        \"subnqn\":\"$FAR\",\"hostnqn\":\"$HOST_A\",\"dhchap_key\":\"own\",\"dhchap_ctrlr_key\":\"$1\"}"
}
expect_failure attach wrong
expect "the devices" "$(attach other | jq -r '.[0]')" farn1
"$NACRE" bdev detach far -r "$SOCK"
nacre_stop
