#!/usr/bin/env bash
# The initiator of compose.yml and compose.rdma.yml: makes a volume of three replicas, one on each
# node, unless it is there; writes to it and reads it back over NVMe-oF, comparing every byte;
# compares the replicas. Exits with 0 only if all of that was right.
#
#   TRANSPORT  tcp or rdma, for hosts and replicas
#   NODES      ADDRESS:PORT of each node
#   SIZE       of the volume
set -euo pipefail

TRANSPORT=${TRANSPORT:-tcp}
SIZE=${SIZE:-64MiB}
read -ra NODES <<<"${NODES:-10.89.42.11:4420 10.89.42.12:4420 10.89.42.13:4420}"
NQN=nqn.2026-01.io.nacre
VOLUME_NQN=$NQN:shared

node() { # node NUMBER ARGUMENTS…: asks that node's daemon
    local number=$1
    shift
    nacre "$@" --socket "/nodes/$number/nacre.sock"
}
address() { echo "$TRANSPORT://${NODES[$1 - 1]}"; } # address NUMBER

for number in 1 2 3; do
    # The socket is there a moment after the container.
    for _ in $(seq 300); do
        [ ! -S "/nodes/$number/nacre.sock" ] || break
        sleep 0.1
    done
    node "$number" rpc framework_wait_init >/dev/null
done

if [ "$(node 1 volume list --json)" = "[]" ]; then
    for number in 2 3; do
        node "$number" bdev create file replica /var/lib/nacre/replica.img --size "$SIZE"
        node "$number" subsystem create "$NQN:replica$number" --allow-any-host \
            --namespace replica --listen "$(address "$number")"
        node 1 bdev attach "$(address "$number")/$NQN:replica$number" --name "node$number"
    done
    node 1 bdev create file local /var/lib/nacre/replica.img --size "$SIZE"
    node 1 volume create shared local node2n1 node3n1 --min-in-sync 2
    node 1 volume publish shared --nqn "$VOLUME_NQN" --allow-any-host --listen "$(address 1)"
fi

nacre perf "$(address 1)/$VOLUME_NQN" --rw randwrite --verify --seconds 5
node 1 volume verify shared --wait
node 1 volume list
