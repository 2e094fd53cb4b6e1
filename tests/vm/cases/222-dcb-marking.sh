# limit: 400
# DSCPs of packets on the wire: of RDMA connections at both ends, of TCP listeners and accepted
# connections, of connections to replicas, and the priority in VLAN tags.
nacre_only "its own marking"
dcb_up
dcb_addresses
dcb_rdma
modprobe 8021q
DSCP=26
cat >"$WORK/listener.toml" <<END
[qos]
storage     = { dscp = $DSCP, prio = 3 }
replication = { dscp = 28, prio = 4 }
[[nvmf.listener]]
iface = ["name:dcb1"]
rdma = "prefer"
[[nvmf.listener]]
name = "other"
iface = ["name:dcb1"]
port = 4430
tos = 40
END
config_serving malloc 16MiB <"$WORK/listener.toml"
for dev in "${DCB[@]}"; do
    "$NACRE" rdma qos apply --iface "$dev" -c "$WORK/nacre.toml" --state "$WORK/qos" --yes >/dev/null
done
target_start --config "$WORK/nacre.toml"
rpc nvmf_get_listeners | jq -e '[.listeners[] | select(.actual == "listening")] | length >= 2' >/dev/null
ADDR=10.50.0.2
listens() { rpc nvmf_get_listeners | jq -e 'any(.listeners[]; .address.trtype == "RDMA" and .address.traddr == "10.50.0.2" and .actual == "listening")'; }
wait_until 30 listens
once() { # once OPTIONS…: a connection of the kernel's host, with some I/O
    capture_start
    connect_and_find "$NQN" --host-traddr=10.50.0.1 "$@"
    dd if="$DEV" of=/dev/null bs=64k count=8 iflag=direct status=none
    dd if=/dev/zero of="$DEV" bs=64k count=4 oflag=direct status=none
    disconnect "$NQN"
    capture_stop
}

step "TCP: every packet of the target, the first one too"
TRTYPE=tcp once
expect "DSCPs to the host" "$(dscps dcb0 tcp 10.50.0.2:4420)" $DSCP
expect "DSCPs of a host that marks nothing" "$(dscps dcb1 tcp 10.50.0.2:4420)" 0

step "TCP: a listener with its own mark"
TRTYPE=tcp PORT=4430 once
expect "DSCPs to the host" "$(dscps dcb0 tcp 10.50.0.2:4430)" 10

step "RDMA: the target marks its packets, whatever the host does"
TRTYPE=rdma once
expect "DSCPs to the host" "$(dscps dcb0 roce .)" $DSCP
expect "DSCPs of a host that marks nothing" "$(dscps dcb1 roce .)" 0
TRTYPE=rdma once --tos=40
expect "DSCPs to the host" "$(dscps dcb0 roce .)" $DSCP
expect "DSCPs of the host" "$(dscps dcb1 roce .)" 10

step "bytes are counted in our priority, at both ends"
bytes() { ethtool -S "$1" | awk -v name="$2:" '$1 == name {print $2}'; }
# Three connections with that mark read 512 KiB each.
[ "$(bytes dcb0 rx_prio3_bytes)" -gt 1000000 ] || die "not in priority 3"
[ "$(bytes dcb0 rx_prio3_bytes)" = "$(bytes dcb1 tx_prio3_bytes)" ] || die "the ends do not agree"

step "the daemon's metrics have the counters, at most five seconds old"
metric() { rpc metrics_get '{"format":"text"}' | jq -r . | awk -v name="nacre_nic_$1{iface=\"dcb1\",$2}" '$1 == name {printf "%d\n", $2}'; }
expect "bytes sent" "$(metric prio_bytes_total 'prio="3",dir="tx"')" "$(bytes dcb1 tx_prio3_bytes)"
dcb_set dcb1 "rx_prio3_pause 77"
dcb_set dcb1 "rx_discards_phy 5"
paused() { [ "$(metric pause_frames_total 'prio="3",dir="rx"')" = 77 ]; }
wait_until 20 paused
expect "losses" "$(metric loss_total 'counter="rx_discards_phy"')" 5

step "settings of an interface in use are not changed by mistake"
connect_and_find "$NQN" --host-traddr=10.50.0.1
dcb pfc set dev dcb1 prio-pfc all:off 5:on
change() { "$NACRE" rdma qos apply --iface "$1" -c "$WORK/nacre.toml" --state "$WORK/qos" --yes -r "$SOCK" "${@:2}"; }
expect_failure change dcb1
[[ $FAILURE == *"dcb1 is in use by $HOST_A"* ]] || die "not the reason"
change dcb1 --while-in-use
dcb pfc set dev dcb1 prio-pfc all:off 5:on
disconnect "$NQN"
change dcb1

step "nacre rdma perf: each end by its own option"
capture_start
"$NACRE" rdma perf server --listen 10.50.0.2 --once --tos 48 >"$WORK/server" 2>&1 &
server=$!
wait_until 20 grep -q listening "$WORK/server"
"$NACRE" rdma perf client 10.50.0.2 --source 10.50.0.1 --op read -n 20 -s 4k --tos 56
wait $server
capture_stop
expect "DSCPs of the server" "$(dscps dcb0 roce .)" 12
expect "DSCPs of the client" "$(dscps dcb1 roce .)" 14

step "tools of the host side set the requested mark"
capture_start
"$NACRE" identify controller "rdma://10.50.0.2:4420/$NQN" --tos 72 --cm-timeout 60s --connect-timeout 60s >"$WORK/said"
capture_stop
expect "DSCPs of the tool" "$(dscps dcb1 roce .)" 18
nacre_stop

step "a connection to a replica has the mark of its class, or its own"
modprobe -a nvmet nvmet-tcp nvmet-rdma
FAR=nqn.2026-01.org.example:far
far_clean() { rm -f "$NVMET"/ports/1[12]/subsystems/*; rmdir "$NVMET"/ports/1[12]; } 2>/dev/null
trap far_clean EXIT
mkdir -p "$NVMET/subsystems/$FAR"
echo 1 >"$NVMET/subsystems/$FAR/attr_allow_any_host"
nvmet_ns_add "$FAR" 1 16
for at in "11 tcp" "12 rdma"; do
    read -r port kind <<<"$at"
    mkdir "$NVMET/ports/$port"
    echo "$kind" >"$NVMET/ports/$port/addr_trtype"
    echo ipv4 >"$NVMET/ports/$port/addr_adrfam"
    echo 10.50.0.2 >"$NVMET/ports/$port/addr_traddr"
    echo 4440 >"$NVMET/ports/$port/addr_trsvcid"
    ln -s "$NVMET/subsystems/$FAR" "$NVMET/ports/$port/subsystems/$FAR"
done
printf '[qos]\nstorage = { dscp = 26, prio = 3 }\nreplication = { dscp = 28, prio = 4 }\n[replication]\niface = ["name:dcb0"]\nkeep_alive_ms = 120000\n' >"$WORK/nacre.toml"
target_start --config "$WORK/nacre.toml"
rpc bdev_nvme_set_options '{"tcp_connect_timeout_ms":60000}'
for scheme in tcp rdma; do
    kind=$scheme
    [ $scheme = tcp ] || kind=roce
    capture_start
    "$NACRE" bdev attach "nvmf+$scheme://10.50.0.2:4440/$FAR" --name far -r "$SOCK"
    "$NACRE" bdev detach far -r "$SOCK"
    capture_stop
    expect "DSCPs over $scheme" "$(dscps dcb1 $kind 10.50.0.1)" 28
done
nacre_stop

step "a VLAN maps the class's priority into its tag"
ip netns add far
trap 'ip netns delete far; far_clean' EXIT
for dev in "${DCB[@]}"; do echo "$dev"; dcb pfc set dev "$dev" prio-pfc all:off; done
"$NACRE" rdma qos undo --iface dcb0 --state "$WORK/qos" --yes >/dev/null
expect "trust" "$(cat $DCB_DEBUG/dcb0/trust)" pcp
ip link add link dcb1 name dcb1.5 type vlan id 5 egress-qos-map 3:3
ip link add link dcb0 name dcb0.5 type vlan id 5
ip link set dcb0.5 netns far
ip -n far address add 10.51.0.1/24 dev dcb0.5
ip -n far link set dcb0.5 up
ip address add 10.51.0.2/24 dev dcb1.5
ip link set dcb1.5 up
sed "s/dcb1/dcb1.5/; s/rdma = \"prefer\"/rdma = \"off\"/" "$WORK/listener.toml" | config_serving malloc 16MiB
target_start --config "$WORK/nacre.toml"
packets() { ethtool -S dcb0 | awk -v name="rx_prio$1_packets:" '$1 == name {print $2}'; }
before=$(packets 3)
ip netns exec far "$NACRE" discover tcp://10.51.0.2:4420 >"$WORK/log"
cat "$WORK/log"
[ $(($(packets 3) - before)) -ge 5 ] || die "the target's packets have another priority: $(ethtool -S dcb0 | grep prio._packets)"
nacre_stop
ip link delete dcb1.5
