# limit: 900
# A volume of a file and a namespace of the kernel's own target, under a host's verified load: the far target drops the
# connection and takes it back; the volume goes on without it, brings it up to date, and both are equal in the end.
nacre_only "replicated volumes"
modprobe -a nvmet nvmet-tcp
FAR=nqn.2026-01.org.example:far
PORT11="$NVMET/ports/11"
# What cleans the guest knows only the first port.
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

# The machine may be an emulated one: what is waited for is waited for long.
export NACRE_REPLICATION_KEEP_ALIVE_MS=120000
volume() { rpc volume_get '{"name":"vol"}'; }
is_state() { [ "$(volume | jq -r .state)" = "$1" ]; }

step "a file here, and a namespace of the kernel's target"
target_start
truncate -s 65M "$WORK/here.img"
rpc bdev_uring_create "{\"name\":\"here\",\"filename\":\"$WORK/here.img\",\"block_size\":4096}"
rpc bdev_nvme_attach_controller "{\"name\":\"far\",\"trtype\":\"tcp\",\"adrfam\":\"ipv4\",\"traddr\":\"127.0.0.1\",\"trsvcid\":\"4430\",\"subnqn\":\"$FAR\",\"ctrlr_loss_timeout_sec\":-1,\"reconnect_delay_sec\":1}"
rpc volume_create '{"name":"vol","devices":["here","farn1"],"settings":{"settle_ms":200}}'
wait_until 300 is_state healthy
volume | jq -c .replicas
subsystem_create "$NQN" any
rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"nsid\":1,\"bdev_name\":\"vol\"}}"
connect_and_find "$NQN"
expect "the size" "$(size_mib "$DEV")" 64
fio --name=load --filename="$DEV" --rw=randrw --bsrange=4k-32k --iodepth=4 --ioengine=libaio --direct=1 --size=16m \
    --verify=crc32c --verify_fatal=1 --verify_backlog=64 --verify_state_save=0 --time_based --runtime=3600 --output="$WORK/fio.log" &
load=$!
# Whatever fails below, nothing is left behind that writes.
trap 'kill -9 $load 2>/dev/null || true; far_clean' EXIT

# So many more sectors were written than when it was asked last: fio is at work.
sectors() { awk '{ print $7 }' "/sys/class/block/${DEV#/dev/}/stat"; }
has_written() { [ "$(sectors)" -ge $((before + 64)) ]; }
more_is_written() {
    before=$(sectors)
    wait_until 120 has_written
}
more_is_written

for round in 1 2; do
    step "$round: the far target is gone under load, and back"
    far_drop
    wait_until 120 is_state degraded
    more_is_written
    volume | jq -c .replicas
    far_serve
    wait_until 300 is_state healthy
    more_is_written
done

step "no I/O failed, and both replicas are equal"
kill -INT $load
# Its exit status says that it was told to end.
wait $load || true
grep -q 'err= 0' "$WORK/fio.log" || { cat "$WORK/fio.log"; die "fio met an error"; }
if grep -E 'err= *[1-9]|verify: bad' "$WORK/fio.log"; then die "fio met an error"; fi
disconnect "$NQN"
rpc volume_verify '{"name":"vol"}'
verified() { volume | jq -e '.verify.running == false'; }
wait_until 120 verified
volume | jq -c .verify
expect "different blocks" "$(volume | jq .verify.different_blocks)" 0
nacre_stop
