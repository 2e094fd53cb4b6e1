# limit: 200
# TLS with the kernel's target: Nacre as the host, with the right key, a wrong one and none, and
# connected again after the target was away.
nacre_only "its own host"
tls_up
far_make
expect "the target's policy" "$(cat "$NVMET/ports/11/addr_treq")" required
far_up

export NACRE_REPLICATION_KEEP_ALIVE_MS=120000 NACRE_REPLICATION_FAST_FAIL_MS=0
target_start
rpc bdev_nvme_set_options '{"tcp_connect_timeout_ms":60000}'
for name in own other; do key_make $name --tls; done
kernel_key own "$HOST_A" "$FAR" v0

step "a tool"
perf_far() { # perf_far OPTIONS…
    "$NACRE" perf "tcp://$ADDR:$FAR_PORT/$FAR" -q "$HOST_A" -I "$HOST_A_ID" --connect-timeout 60s \
        --keep-alive 120s --rw randrw --verify --range 1m --queues 2 --ios 200 --json "$@"
}
perf_far --psk "$WORK/keys/own" >"$WORK/perf.json"
jq -e '.errors == {} and .unfinished == 0 and .verification.blocks_wrong == 0 and .verification.blocks_checked > 0' "$WORK/perf.json"
expect_handshake "server ok NVMe0R01 $HOST_A $FAR"
expect_failure perf_far --psk "$WORK/keys/other"
expect_handshake "server *[!k] NVMe0R01 $HOST_A $FAR"
expect_failure perf_far

step "the daemon, and its host over TLS"
attach() { # attach KEY
    rpc bdev_nvme_attach_controller "{\"name\":\"far\",\"trtype\":\"tcp\",\"adrfam\":\"ipv4\",\"traddr\":\"$ADDR\",\"trsvcid\":\"$FAR_PORT\",
        \"subnqn\":\"$FAR\",\"hostnqn\":\"$HOST_A\",\"psk\":\"$1\"}"
}
expect_failure attach other
expect "the devices" "$(attach own | jq -r '.[0]')" farn1
rpc nvmf_create_subsystem "{\"nqn\":\"$NQN\",\"allow_any_host\":false}"
rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"nsid\":1,\"bdev_name\":\"farn1\"}}"
rpc nvmf_subsystem_add_listener "{\"nqn\":\"$NQN\",\"secure_channel\":true,
    \"listen_address\":{\"trtype\":\"tcp\",\"adrfam\":\"ipv4\",\"traddr\":\"$ADDR\",\"trsvcid\":\"$PORT\"}}"
rpc nvmf_subsystem_add_host "{\"nqn\":\"$NQN\",\"host\":\"$HOST_A\",\"psk\":\"other\"}"
kernel_key other "$HOST_A" "$NQN" v1
tls_connect_and_find "$HOST_A" "$NQN" "$PORT"
fio_verify "$DEV" through --rw=randrw --bsrange=4k-32k --iodepth=8 --size=2M

step "the target goes away and comes back"
rm "$NVMET/ports/11/subsystems/$FAR"
far() { rpc bdev_nvme_get_controllers '{"name":"far"}' | jq -r "$1"; }
lost() { [ "$(far '.[0].ctrlrs[0].state')" != enabled ]; }
wait_until 30 lost
far_up
back() { [ "$(far '.[0].ctrlrs[0].state')" = enabled ]; }
wait_until 60 back
fio_verify "$DEV" again --rw=randrw --bsrange=4k-32k --iodepth=8 --size=2M
disconnect "$NQN"
nacre_stop
