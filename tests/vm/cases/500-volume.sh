# limit: 1500
# A volume of three replicas (local, over TCP, over RDMA) under ext4 and verified load of a stock
# host. A replica's target is killed, the replica is replaced and resynced; the volume's own daemon
# is killed and restarted. No I/O fails, and in the end all replicas are equal.
nacre_only "replicated volumes"
rdma_up
TRTYPE=tcp ADDR=127.0.0.1

trap keepers_kill EXIT
attach() { # attach N TRANSPORT ADDRESS: the bdev is called rNn1
    rpc bdev_nvme_attach_controller "{\"name\":\"r$1\",\"trtype\":\"$2\",\"adrfam\":\"ipv4\",\"traddr\":\"$3\",\"trsvcid\":\"442$1\",\"subnqn\":\"$(keeper_nqn "$1")\",\"ctrlr_loss_timeout_sec\":-1,\"reconnect_delay_sec\":1}"
}
in_sync() { [ "$(volume | jq '[.replicas[] | select(.state == "in_sync")] | length')" = "$1" ]; }

step "three replicas: a file, one over TCP, one over RDMA"
keeper 1 97M
keeper_listens 1 tcp 127.0.0.1
keeper 2 97M
keeper_listens 2 rdma 10.9.8.1
target_start
truncate -s 97M "$WORK/here.img"
rpc bdev_uring_create "{\"name\":\"here\",\"filename\":\"$WORK/here.img\",\"block_size\":512}"
attach 1 tcp 127.0.0.1
attach 2 rdma 10.9.8.1
rpc volume_create '{"name":"vol","devices":["here","r1n1","r2n1"],"settings":{"settle_ms":200}}'
wait_until 300 volume_is healthy
volume | jq -c .replicas
subsystem_create "$NQN" any
rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"nsid\":1,\"bdev_name\":\"vol\"}}"
connect_and_find "$NQN" --reconnect-delay=1 --ctrl-loss-tmo=600
expect "the size" "$(size_mib "$DEV")" 96

step "ext4, and load that verifies itself"
mkfs.ext4 -q "$DEV"
mkdir -p "$WORK/mnt"
mount "$DEV" "$WORK/mnt"
load_start "$WORK/mnt/load" 24m
trap 'load_kill; keepers_kill' EXIT

step "a replica's target dies; the volume goes on without it, and takes it back"
keeper_kill 1
wait_until 120 in_sync 2
keeper_start 1
wait_until 300 volume_is healthy
keeper_kill 2
wait_until 120 in_sync 2

step "the one over RDMA is replaced by a new disk, rebuilt under load"
truncate -s 97M "$WORK/new.img"
rpc bdev_uring_create "{\"name\":\"new\",\"filename\":\"$WORK/new.img\",\"block_size\":512}"
rpc volume_replace_replica '{"name":"vol","replica":"r2n1","device":"new"}'
wait_until 300 volume_is healthy
volume | jq -c .replicas
expect "replicas" "$(volume | jq -r '[.replicas[].device] | sort | join(" ")')" "here new r1n1"

step "the volume's daemon dies under load, and comes back"
nacre_kill
sleep 1
nacre_start
wait_until 300 volume_is healthy

step "no I/O failed"
load_goes_on
load_end
umount "$WORK/mnt"
fsck.ext4 -fn "$DEV"
disconnect "$NQN"

step "all replicas are equal"
volume_is_equal
nacre_stop
