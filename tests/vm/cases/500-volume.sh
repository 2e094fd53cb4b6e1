# limit: 1500
# A volume of three replicas, one here, one over TCP and one over RDMA, under ext4 and verified load of a stock host: a
# replica's target is killed, the replica is replaced and rebuilt; the volume's own daemon is killed and started again.
# No I/O fails, and in the end all replicas are equal.
nacre_only "replicated volumes"
rdma_up
TRTYPE=tcp ADDR=127.0.0.1

# More daemons, each with one disk for others.
side() { "$NACRE" rpc --socket "$WORK/side$1.sock" "${@:2}"; }
side_start() {
    "$NACRE" serve --data-dir "$WORK/side$1" -r "$WORK/side$1.sock" >>"$DAEMON_LOG" 2>&1 </dev/null &
    SIDES[$1]=$!
    wait_until 60 test -S "$WORK/side$1.sock"
    wait_until 60 side "$1" framework_wait_init
}
side_kill() {
    kill -9 "${SIDES[$1]}"
    wait "${SIDES[$1]}" 2>/dev/null || true
}
SIDES=()
trap 'kill -9 "${SIDES[@]}" 2>/dev/null || true' EXIT
keeper() { # keeper N TRANSPORT ADDRESS
    local nqn="nqn.2026-01.io.nacre:keeper$1"
    side_start "$1"
    truncate -s 97M "$WORK/kept$1.img"
    side "$1" bdev_uring_create "{\"name\":\"kept\",\"filename\":\"$WORK/kept$1.img\",\"block_size\":512}"
    side "$1" nvmf_create_subsystem "{\"nqn\":\"$nqn\",\"allow_any_host\":true}"
    side "$1" nvmf_subsystem_add_ns "{\"nqn\":\"$nqn\",\"namespace\":{\"nsid\":1,\"bdev_name\":\"kept\"}}"
    side "$1" nvmf_subsystem_add_listener \
        "{\"nqn\":\"$nqn\",\"listen_address\":{\"trtype\":\"$2\",\"adrfam\":\"ipv4\",\"traddr\":\"$3\",\"trsvcid\":\"442$1\"}}"
}
attach() { # attach N TRANSPORT ADDRESS: the bdev is called rNn1
    rpc bdev_nvme_attach_controller "{\"name\":\"r$1\",\"trtype\":\"$2\",\"adrfam\":\"ipv4\",\"traddr\":\"$3\",\"trsvcid\":\"442$1\",\"subnqn\":\"nqn.2026-01.io.nacre:keeper$1\",\"ctrlr_loss_timeout_sec\":-1,\"reconnect_delay_sec\":1}"
}
volume() { rpc volume_get '{"name":"vol"}'; }
is_state() { [ "$(volume | jq -r .state)" = "$1" ]; }
in_sync() { [ "$(volume | jq '[.replicas[] | select(.state == "in_sync")] | length')" = "$1" ]; }

step "three replicas: a file, one over TCP, one over RDMA"
keeper 1 tcp 127.0.0.1
keeper 2 rdma 10.9.8.1
target_start
truncate -s 97M "$WORK/here.img"
rpc bdev_uring_create "{\"name\":\"here\",\"filename\":\"$WORK/here.img\",\"block_size\":512}"
attach 1 tcp 127.0.0.1
attach 2 rdma 10.9.8.1
rpc volume_create '{"name":"vol","devices":["here","r1n1","r2n1"],"settings":{"settle_ms":200}}'
wait_until 300 is_state healthy
volume | jq -c .replicas
subsystem_create "$NQN" any
rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"nsid\":1,\"bdev_name\":\"vol\"}}"
connect_and_find "$NQN" --reconnect-delay=1 --ctrl-loss-tmo=600
expect "the size" "$(size_mib "$DEV")" 96

step "ext4, and load that verifies itself"
mkfs.ext4 -q "$DEV"
mkdir -p "$WORK/mnt"
mount "$DEV" "$WORK/mnt"
fio --name=load --filename="$WORK/mnt/load" --rw=randrw --bsrange=4k-32k --iodepth=4 --ioengine=libaio --direct=1 --size=24m \
    --verify=crc32c --verify_fatal=1 --verify_backlog=64 --verify_state_save=0 --time_based --runtime=3600 --output="$WORK/fio.log" &
load=$!

step "a replica's target dies; the volume goes on without it, and takes it back"
side_kill 1
wait_until 120 in_sync 2
side_start 1
wait_until 300 is_state healthy
side_kill 2
wait_until 120 in_sync 2

step "the one over RDMA is replaced by a new disk, rebuilt under load"
truncate -s 97M "$WORK/new.img"
rpc bdev_uring_create "{\"name\":\"new\",\"filename\":\"$WORK/new.img\",\"block_size\":512}"
rpc volume_replace_replica '{"name":"vol","member":"r2n1","device":"new"}'
wait_until 300 is_state healthy
volume | jq -c .replicas
expect "replicas" "$(volume | jq -r '[.replicas[].device] | sort | join(" ")')" "here new r1n1"

step "the volume's daemon dies under load, and comes back"
nacre_kill
sleep 1
nacre_start
wait_until 300 is_state healthy

step "and no I/O failed"
kill -INT $load
# Its exit status says that it was told to end.
wait $load || true
grep -q 'err= 0' "$WORK/fio.log" || { cat "$WORK/fio.log"; die "fio met an error"; }
if grep -E 'err= *[1-9]|verify: bad' "$WORK/fio.log"; then die "fio met an error"; fi
umount "$WORK/mnt"
fsck.ext4 -fn "$DEV"
disconnect "$NQN"

step "all replicas are equal"
rpc volume_verify '{"name":"vol"}'
verified() { volume | jq -e '.verify.running == false'; }
wait_until 120 verified
volume | jq -c .verify
expect "different blocks" "$(volume | jq .verify.different_blocks)" 0
nacre_stop
