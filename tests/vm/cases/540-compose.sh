# limit: 900
# The compose files of deploy/, step by step without containers: three nodes with a replica of a
# volume each, and an initiator that verifies every byte. Over TCP each node has a network
# namespace, and the volume outlives the loss of a node, which comes back. Over RDMA the nodes share
# the machine's network.
nacre_only "compose files"
compose() { # compose start|stop FILE SERVICE…
    local action=$1 file=$2
    shift 2
    /usr/bin/python3 "$HERE/compose.py" "$HERE/../../deploy/$file" "$NACRE" "$WORK/${file%.yml}" "$action" "$@"
}
node() { # node FILE NUMBER ARGUMENTS…: asks that node's daemon
    local folder="$WORK/${1%.yml}" number=$2
    shift 2
    "$NACRE" "$@" --socket "$folder/volumes/run$number/nacre.sock"
}
volume_is() { # volume_is FILE STATE
    node "$1" 1 volume list --json | jq -e --arg state "$2" '.[0].state == $state'
}
compose_clean() {
    local pid
    for pid in "$WORK"/compose*/*.pid; do kill -9 "$(cat "$pid")" || true; done
    ip -all netns delete || true
    ip link delete br-storage || true
} 2>/dev/null
trap compose_clean EXIT

proves() { # proves FILE TRANSPORT
    local file=$1 folder="$WORK/${1%.yml}"
    step "$file: the nodes start, and the initiator verifies a volume"
    compose start "$file"
    wait_until 60 volume_is "$file" healthy
    grep -q "randwrite" "$folder/initiator.log" || die "the initiator wrote nothing"
    expect "transport of the volume" "$(node "$file" 1 rpc nvmf_get_subsystems |
        jq -r '.[] | select(.nqn | endswith(":shared")) | .listen_addresses[0].trtype')" "$2"

    # The daemons are the same over RDMA.
    if [ "$2" = RDMA ]; then
        compose stop "$file" node1 node2 node3
        return
    fi
    step "$file: the volume outlives a node"
    kill -9 "$(cat "$folder/node2.pid")"
    wait_until 120 volume_is "$file" degraded
    ip netns delete compose-node2
    compose start "$file" node2 &
    wait_until 180 volume_is "$file" healthy

    step "$file: the initiator finds the volume, and verifies it again"
    ip netns delete compose-initiator
    compose start "$file" initiator
    compose stop "$file" node1 node2 node3
}
proves compose.yml TCP
rdma_up
export NACRE_RDMA_ADDRESS=$ADDR
proves compose.rdma.yml RDMA
