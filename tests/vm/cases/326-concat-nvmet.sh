# limit: 200
# kernel: newer
# Secure channel concatenation with the kernel's target. Nacre is the host: with the right key, with
# a wrong one, and connected again after the target was away.
nacre_only "its own host"
tls_up
far_make "treq not required"
export NACRE_REPLICATION_KEEP_ALIVE_MS=120000 NACRE_REPLICATION_FAST_FAIL_MS=0
target_start
rpc bdev_nvme_set_options '{"tcp_connect_timeout_ms":60000}'
for name in own other; do key_make $name; done
secret own >"$NVMET/hosts/$HOST_A/dhchap_key"
# A group other than null, which is its default.
echo ffdhe3072 >"$NVMET/hosts/$HOST_A/dhchap_dhgroup"
far_up

attach() { # attach KEY
    rpc bdev_nvme_attach_controller "{\"name\":\"far\",\"trtype\":\"tcp\",\"adrfam\":\"ipv4\",\"traddr\":\"$ADDR\",\"trsvcid\":\"$FAR_PORT\",
        \"subnqn\":\"$FAR\",\"hostnqn\":\"$HOST_A\",\"dhchap_key\":\"$1\",\"concat\":true}"
}
step "a wrong key, the right one, and load"
expect_failure attach other
expect "the devices" "$(attach own | jq -r '.[0]')" farn1
expect_handshake "server ok NVMe1G01 $HOST_A $FAR *"
subsystem_create "$NQN" any
rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"nsid\":1,\"bdev_name\":\"farn1\"}}"
connect_and_find "$NQN"
fio_verify "$DEV" through --rw=randrw --bsrange=4k-32k --iodepth=8 --size=2M

step "the target goes away and comes back: another key"
before=$(tail -n 1 "$TLS_LOG")
rm "$NVMET/ports/11/subsystems/$FAR"
far() { rpc bdev_nvme_get_controllers '{"name":"far"}' | jq -r "$1"; }
lost() { [ "$(far '.[0].ctrlrs[0].state')" != enabled ]; }
wait_until 30 lost
far_up
back() { [ "$(far '.[0].ctrlrs[0].state')" = enabled ]; }
wait_until 60 back
expect_handshake "server ok NVMe1G01 $HOST_A $FAR *"
[ "$(tail -n 1 "$TLS_LOG")" != "$before" ] || die "the key is the former one"
fio_verify "$DEV" again --rw=randrw --bsrange=4k-32k --iodepth=8 --size=2M
disconnect "$NQN"
nacre_stop
