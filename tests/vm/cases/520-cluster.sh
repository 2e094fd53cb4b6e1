# limit: 900
# Three daemons are the nodes of a cluster, and the kernel is a host with a path to each. Under
# verified load the node that serves the volume is drained, killed and stopped: each time another
# one serves it, no I/O fails, and the host's reservation is there.
nacre_only "clusters"
[ -n "$ETCD" ] || skip "there is no etcd"
[ "$(cat /sys/module/nvme_core/parameters/multipath 2>/dev/null)" = Y ] || skip "this kernel has no native multipath"
# Commands in flight when the state of a path changed.
allow_errors 'Asymmetric Access (Inaccessible|Transition)' 'Internal Path Error'
# Nodes that learn that another one holds the reservation of a replica.
allow_errors 'Reservation Conflict'
# The machine may be emulated: leases and keep-alive timeouts are long.
LEASE=15s
export NACRE_REPLICATION_KEEP_ALIVE_MS=120000
ENDPOINT=http://127.0.0.1:2379
declare -A PORTS=([a]=4421 [b]=4422 [c]=4423) PIDS=()
ETCD_PID=

cluster_clean() {
    local pid
    load_kill
    for pid in "${PIDS[@]}" $ETCD_PID; do kill -9 "$pid"; done
} 2>/dev/null
trap cluster_clean EXIT
on() { # on NODE COMMAND…: of nacre
    "$NACRE" "${@:2}" --socket "$WORK/$1.sock"
}
node_start() { # node_start NODE
    NACRE_CLUSTER_NAME=lab NACRE_CLUSTER_NODE=$1 NACRE_STORE_ENDPOINTS=$ENDPOINT NACRE_NVMF_DISCOVERY_PORT=0 \
        NACRE_NVMF_LISTEN="tcp://$ADDR:${PORTS[$1]}" NACRE_SECURITY_SANDBOX=enforce NACRE_REACTOR_CORES=auto:1 \
        "$NACRE" serve --data-dir "$WORK/$1" -r "$WORK/$1.sock" >>"$DAEMON_LOG" 2>&1 </dev/null &
    PIDS[$1]=$!
    wait_until 60 test -S "$WORK/$1.sock"
    wait_until 60 on "$1" rpc framework_wait_init
}
status() { on "$1" cluster status --json; } # status NODE: as this node sees it
has_nodes() { [ "$(status "$1" | jq '[.nodes[] | select(.name)] | length')" = 3 ]; }
# holder ASKED
holder() { status "$1" | jq -r '[.nodes[] | select(.held > 0) | .name][0] // empty'; }
# A busy etcd may not answer one question in time.
held_by_other() { # held_by_other ASKED FORMER: sets NEW
    NEW=$(holder "$1") && [ -n "$NEW" ] && [ "$NEW" != "$2" ]
}
is_healthy() { [ "$(status "$1" | jq .volumes.healthy)" = 1 ]; }
other() { # other NODE: a node beside it
    [ "$1" = a ] && echo b || echo a
}
state_of() { # state_of NODE: of the host's path to it
    local dir
    for dir in /sys/class/nvme/nvme*; do
        case $(cat "$dir/address") in
            *trsvcid="${PORTS[$1]}"*) cat "$dir/nvme"*c"${dir##*nvme}"n1/ana_state && return 0 ;;
        esac
    done
    return 1
}
is_state() { [ "$(state_of "$1")" = "$2" ]; }

step "three commands make a cluster of three"
# It shares one emulated processor with three daemons and the load, and its answers have deadlines.
nice -n -10 "$ETCD/usr/bin/etcd" --data-dir "$WORK/etcd" --heartbeat-interval=500 --election-timeout=5000 \
    --listen-client-urls "$ENDPOINT" --advertise-client-urls "$ENDPOINT" --listen-peer-urls http://127.0.0.1:2380 \
    >"$WORK/etcd.log" 2>&1 </dev/null &
ETCD_PID=$!
etcd_answers() { "$NACRE" cluster init lab --lease "$LEASE" --etcd "$ENDPOINT"; }
wait_until 120 etcd_answers
for node in a b c; do
    node_start $node
    truncate -s 32M "$WORK/$node.img"
    on $node bdev create file disk "$WORK/$node.img" --block-size 512
done
for node in a b c; do wait_until 120 has_nodes $node; done

step "the host has a path to each node, and one of them serves"
on a volume create vol a:disk b:disk c:disk
on b volume publish vol --allow-any-host | tee "$WORK/lines"
VOLUME_NQN=$(head -1 "$WORK/lines")
expect "the connect lines" "$(grep -c '^nvme connect ' "$WORK/lines")" 3
wait_until 120 is_healthy a
on a cluster status
shown() { [ -n "$(on "$1" rpc nvmf_get_subsystems | jq -r --arg nqn "$VOLUME_NQN" '.[] | select(.nqn == $nqn) | .listen_addresses[]?.trsvcid')" ]; }
for node in a b c; do wait_until 60 shown $node; done
# One node is enough: its discovery service lists all of them.
nvme discover -t tcp -a "$ADDR" -s "${PORTS[c]}" --hostnqn="$HOST_A" --hostid="$HOST_A_ID" --output-format=json |
    jq -r --arg nqn "$VOLUME_NQN" '.records[] | select(.subnqn == $nqn) | .trsvcid' | sort >"$WORK/listed"
expect "the ports that node c lists" "$(xargs <"$WORK/listed")" "4421 4422 4423"
nvme connect-all -t tcp -a "$ADDR" -s "${PORTS[c]}" --hostnqn="$HOST_A" --hostid="$HOST_A_ID" --nr-io-queues=1 \
    --keep-alive-tmo=30 --reconnect-delay=1 --ctrl-loss-tmo=-1
expect "paths" "$(cat /sys/class/nvme/nvme*/subsysnqn | grep -cx "$VOLUME_NQN")" 3
expect "different controller ids" "$(for dir in /sys/class/nvme/nvme*; do
    [ "$(cat "$dir/subsysnqn")" != "$VOLUME_NQN" ] || cat "$dir/cntlid"
done | sort -u | wc -l)" 3
NODE=$(holder a)
for node in a b c; do
    state=inaccessible
    [ $node != "$NODE" ] || state=optimized
    wait_until 90 is_state $node $state
done
wait_until 90 ns_dev "$VOLUME_NQN" 1
DEV=$(ns_dev "$VOLUME_NQN" 1)
nvme resv-register "$DEV" --nrkey=0xa --rrega=0
nvme resv-acquire "$DEV" --crkey=0xa --rtype=1 --racqa=0
reserved() { # the host's reservation is where the volume is
    expect "type and registrants" "$(nvme resv-report "$DEV" --eds --output-format=json | jq -c '[.rtype, .regctl]')" '[1,1]'
}
load_start "$DEV" 16m "${PACED[@]}"
trap cluster_clean EXIT

step "a drain moves the volume"
ASKED=$(other "$NODE")
on "$ASKED" cluster drain "$NODE" --wait=2m
wait_until 60 held_by_other "$ASKED" "$NODE"
wait_until 90 is_state "$NEW" optimized
wait_until 90 is_state "$NODE" inaccessible
load_goes_on
reserved
on "$ASKED" cluster undrain "$NODE"

step "the node is killed, and returns"
wait_until 300 is_healthy "$NEW"
NODE=$NEW
ASKED=$(other "$NODE")
kill -9 "${PIDS[$NODE]}"
wait_until 120 held_by_other "$ASKED" "$NODE"
load_goes_on
reserved
node_start "$NODE"
wait_until 300 is_healthy "$ASKED"
load_goes_on

step "the daemon stops in good order"
NODE=$NEW
ASKED=$(other "$NODE")
kill -TERM "${PIDS[$NODE]}"
status=0
wait "${PIDS[$NODE]}" || status=$?
expect "its exit status" $status 0
wait_until 60 held_by_other "$ASKED" "$NODE"
load_goes_on
reserved
load_end
nvme list-subsys
disconnect "$VOLUME_NQN"
