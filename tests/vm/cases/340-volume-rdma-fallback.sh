# limit: 1200
# A replica on another target, over RDMA where available: its device is removed under a host's
# verified load, and added again, twice. The replica continues over TCP, returns to RDMA, and
# receives everything that it missed. No I/O fails.
nacre_only "replicated volumes"
rdma_up

# The machine may be emulated, so waits are long.
export NACRE_REPLICATION_KEEP_ALIVE_MS=120000 NACRE_REPLICATION_RDMA_REPROBE_S=2
far() { rpc bdev_nvme_get_controllers '{"name":"far"}' | jq -r "$1"; }
far_is() { [ "$(far '.[0].ctrlrs[0].trid.trtype + " " + .[0].ctrlrs[0].state')" = "$1 enabled" ]; }
replica() { volume | jq -r ".replicas[] | select(.device == \"farn1\") | $1"; }
replica_is() { [ "$(replica '.transport')" = "$1" ] && [ "$(replica '.state')" = in_sync ]; }

step "a file here, and a disk of another daemon, which listens on both transports"
trap keepers_kill EXIT
keeper 1 65M
keeper_listens 1 tcp "$ADDR"
keeper_listens 1 rdma "$ADDR"
# The volume's host uses TCP, so failures of RDMA affect only the replica.
TRTYPE=tcp FAR=$ADDR ADDR=127.0.0.1
target_start
truncate -s 65M "$WORK/here.img"
rpc bdev_uring_create "{\"name\":\"here\",\"filename\":\"$WORK/here.img\",\"block_size\":512}"
rpc bdev_nvme_set_options '{"tcp_connect_timeout_ms":60000}'
"$NACRE" bdev attach "nvmf+rdma+tcp://$FAR:4421/$(keeper_nqn 1)" --name far -r "$SOCK"
# Retry if RDMA took too long at first.
wait_until 180 far_is RDMA
rpc volume_create '{"name":"vol","devices":["here","farn1"],"settings":{"settle_ms":200}}'
wait_until 300 volume_is healthy
wait_until 60 replica_is RDMA
volume | jq -c .replicas
subsystem_create "$NQN" any
rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"nsid\":1,\"bdev_name\":\"vol\"}}"
connect_and_find "$NQN"
load_start "$DEV" 16m "${PACED[@]}"
trap 'load_kill; keepers_kill' EXIT

for round in 1 2; do
    step "$round: the RDMA device goes away; the replica continues over TCP"
    timeout 60 rdma link delete "$RDMA_DEV"
    wait_until 180 far_is TCP
    wait_until 300 volume_is healthy
    wait_until 60 replica_is TCP
    load_goes_on
    far '.[0].ctrlrs[0] | {state, losses, connects, paths}'

    step "$round: the RDMA device returns, and the replica uses it again"
    rxe_add
    wait_until 180 far_is RDMA
    wait_until 300 volume_is healthy
    wait_until 60 replica_is RDMA
    load_goes_on
done
[ "$(far '.[0].ctrlrs[0].losses')" -ge 2 ] || die "it never lost a connection"

step "no I/O failed, and both replicas are equal"
load_end
disconnect "$NQN"
volume_is_equal
nacre_stop
