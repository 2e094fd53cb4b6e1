# limit: 900
# A volume of a file and a namespace of the kernel's target, under a host's verified load: the
# remote target drops the connection and accepts it again. The volume continues without it, resyncs
# it, and both replicas are equal in the end.
nacre_only "replicated volumes"
modprobe -a nvmet nvmet-tcp
FAR=nqn.2026-01.org.example:far
PORT11="$NVMET/ports/11"
# The cleanup of the guest knows only the first port.
far_clean() { rm -f "$PORT11"/subsystems/*; rmdir "$PORT11"; } 2>/dev/null
trap far_clean EXIT
far_serve() { ln -s "$NVMET/subsystems/$FAR" "$PORT11/subsystems/$FAR"; }
far_drop() { rm "$PORT11/subsystems/$FAR"; }
mkdir -p "$NVMET/subsystems/$FAR"
echo 1 >"$NVMET/subsystems/$FAR/attr_allow_any_host"
nvmet_ns_add "$FAR" 1 65
mkdir "$PORT11"
echo tcp >"$PORT11/addr_trtype"
echo ipv4 >"$PORT11/addr_adrfam"
echo 127.0.0.1 >"$PORT11/addr_traddr"
echo 4430 >"$PORT11/addr_trsvcid"
far_serve

# The machine may be emulated, so waits are long.
export NACRE_REPLICATION_KEEP_ALIVE_MS=120000

step "a file here, and a namespace of the kernel's target"
target_start
truncate -s 65M "$WORK/here.img"
rpc bdev_uring_create "{\"name\":\"here\",\"filename\":\"$WORK/here.img\",\"block_size\":4096}"
rpc bdev_nvme_attach_controller "{\"name\":\"far\",\"trtype\":\"tcp\",\"adrfam\":\"ipv4\",\"traddr\":\"127.0.0.1\",\"trsvcid\":\"4430\",\"subnqn\":\"$FAR\",\"ctrlr_loss_timeout_sec\":-1,\"reconnect_delay_sec\":1}"
rpc volume_create '{"name":"vol","devices":["here","farn1"],"settings":{"settle_ms":200}}'
wait_until 300 volume_is healthy
volume | jq -c .replicas
subsystem_create "$NQN" any
rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"nsid\":1,\"bdev_name\":\"vol\"}}"
connect_and_find "$NQN"
expect "the size" "$(size_mib "$DEV")" 64
load_start "$DEV" 16m
trap 'load_kill; far_clean' EXIT

for round in 1 2; do
    step "$round: the remote target stops under load, and returns"
    far_drop
    wait_until 120 volume_is degraded
    load_goes_on
    volume | jq -c .replicas
    far_serve
    wait_until 300 volume_is healthy
    load_goes_on
done

step "no I/O failed, and both replicas are equal"
load_end
disconnect "$NQN"
volume_is_equal
nacre_stop
