# A volume of two replicas, one on a drive driven by the daemon and one in a file, served to a stock
# host over TCP and RDMA: ext4 under verifying load while the drive's controller is reset, and the
# drive is pulled and put back. No I/O fails, the drive receives what it missed, and both replicas
# are equal.
# hardware: drives
# limit: 1500
nacre_only "it drives NVMe drives"

rdma_up
TRTYPE=tcp ADDR=127.0.0.1
drives_up
"$NACRE" nvme bind "$FIRST"
in_sync() { [ "$(volume | jq '[.replicas[] | select(.state == "in_sync" and .attached)] | length')" = "$1" ]; }
drive_state() { rpc bdev_nvme_get_controllers '{"name":"Nvme0"}' | jq -r '.[0].ctrlrs[0].drive.status.state'; }
drive_is() { [ "$(drive_state)" = "$1" ]; }

step "a replica on the drive, and one in a file"
target_start
truncate -s 97M "$WORK/here.img"
rpc bdev_uring_create "{\"name\":\"here\",\"filename\":\"$WORK/here.img\",\"block_size\":512}"
# Other tests may have left data on the drive.
rpc volume_create "{\"name\":\"vol\",\"devices\":[\"pcie://$FIRST\",\"here\"],\"size_mb\":96,\"force\":true,\"settings\":{\"settle_ms\":200}}"
wait_until 300 volume_is healthy
volume | jq -c .replicas
"$NACRE" nvme show --socket "$SOCK" Nvme0
subsystem_create "$NQN" any
rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"nsid\":1,\"bdev_name\":\"vol\"}}"
rpc nvmf_subsystem_add_listener \
    "{\"nqn\":\"$NQN\",\"listen_address\":{\"trtype\":\"RDMA\",\"adrfam\":\"ipv4\",\"traddr\":\"10.9.8.1\",\"trsvcid\":\"4420\"}}"
connect_and_find "$NQN" --reconnect-delay=1 --ctrl-loss-tmo=600
expect "the size" "$(size_mib "$DEV")" 96

step "ext4, and load that verifies itself"
mkfs.ext4 -q "$DEV"
mkdir -p "$WORK/mnt"
mount "$DEV" "$WORK/mnt"
load_start "$WORK/mnt/load" 24m

step "the drive's controller is reset"
rpc bdev_nvme_reset_controller '{"name":"Nvme0"}'
expect "resets" "$(rpc bdev_nvme_get_controllers | jq '.[0].ctrlrs[0].drive.status.resets')" 1

step "the drive is pulled; the volume goes on without it"
drive_pull
wait_until 120 drive_is removed
wait_until 120 test ! -e "/sys/bus/pci/devices/$FIRST"
load_goes_on
wait_until 120 in_sync 1

step "the volume takes the replica back when its target returns"
drive_put
wait_until 120 drive_is_live "$FIRST_SERIAL"
"$NACRE" nvme bind "$(drive_address "$FIRST_SERIAL")"
wait_until 120 drive_is live
rpc volume_resync '{"name":"vol"}' || true
wait_until 300 volume_is healthy
volume | jq -c .replicas

step "no I/O failed"
load_goes_on
load_end
head -c 4000000 /dev/urandom >"$WORK/mnt/file"
sync "$WORK/mnt/file"
sum=$(sha256sum <"$WORK/mnt/file")
umount "$WORK/mnt"
disconnect "$NQN"

step "the same over RDMA"
TRTYPE=rdma ADDR=10.9.8.1 connect_and_find "$NQN"
fsck.ext4 -fn "$DEV"
mount "$DEV" "$WORK/mnt"
expect "the file" "$(sha256sum <"$WORK/mnt/file")" "$sum"
umount "$WORK/mnt"
fio_verify "$DEV" device --rw=randwrite --bs=4k-64k --size=8M --iodepth=8
disconnect "$NQN"

step "both replicas are equal"
volume_is_equal
nacre_stop
