# RDMA as the kernel reports it: soft-RoCE added and deleted, devices, links, GIDs, counters and the
# doctor's findings.
# limit: 500
nacre_only "its own commands"
rdma() { "$NACRE" rdma "$@"; }
cleanup_rdma() {
    rdma rxe del rxe7 >/dev/null 2>&1 || true
    ip link del nacrerdma >/dev/null 2>&1 || true
}
trap cleanup_rdma EXIT
modprobe -a dummy ib_uverbs rdma_ucm
ip link add nacrerdma type dummy
ip link set nacrerdma address 02:00:00:00:07:01 mtu 4200 up
ip address add 10.77.0.1/24 dev nacrerdma
ip address add fd77::1/64 dev nacrerdma nodad

step "an interface without RDMA"
expect "devices" "$(rdma devices --json | jq length)" 0
expect_failure "$NACRE" doctor --rdma --listener ip:10.77.0.1
[[ $FAILURE == *"rdma.devices: No RDMA devices found"* ]] || die "the doctor does not say that there are none"
[[ $FAILURE == *"rdma link add rxe0 type rxe netdev"* ]] || die "the doctor does not say what to type"
expect_failure rdma rxe add rxe7 --netdev nosuch
[[ $FAILURE == *'there is no network interface "nosuch"; have: '* ]] || die "not the reason"

step "soft-RoCE is added; the kernel loads its module itself"
rdma rxe add rxe7 --netdev nacrerdma
expect "driver" "$(rdma devices --json | jq -r '.[0].driver')" rxe
expect "software" "$(rdma devices --json | jq -r '.[0].software')" true
rdma devices
rdma devices -v
expect "profile of a software device" "$(rdma tune rxe7 --json | jq -c '.[0].settings')" "[]"
expect_failure "$NACRE" rdma tune mlx5_9
[[ $FAILURE == *"there is no RDMA device \"mlx5_9\"; have: rxe7"* ]] || die "not the reason"
expect "what iproute2 sees" "$(command rdma link show rxe7/1 | tr -s ' ' | sed 's/ $//')" \
    "link rxe7/1 state ACTIVE physical_state LINK_UP netdev nacrerdma"
expect "what Nacre sees" "$(rdma link | tail -1 | tr -s ' ')" "rxe7/1 ACTIVE LINK_UP nacrerdma"
expect "path MTU" "$(rdma devices --json | jq '.[0].ports[0].mtu')" 4096
expect "path MTU, as verbs say it" "$(ibv_devinfo -d rxe7 | sed -n 's/.*active_mtu:[^0-9]*\([0-9]*\).*/\1/p')" 4096

step "every address has a GID"
wait_until 20 bash -c "'$NACRE' rdma gids --json | jq -e 'any(.[]; .ip == \"fd77::1\")'"
rdma gids
for ip in 10.77.0.1 fd77::1; do
    entry=$(rdma gids rxe7 --json | jq -e --arg ip "$ip" '[.[] | select(.ip == $ip)] | if length == 1 then .[0] else error("not one") end')
    expect "kind of $ip" "$(echo "$entry" | jq -r .kind)" roce_v2
    expect "interface of $ip" "$(echo "$entry" | jq -r .ndev)" nacrerdma
    expect "use of $ip" "$(echo "$entry" | jq -r .used)" true
    index=$(echo "$entry" | jq -r .index)
    expect "GID $index in sysfs" "$(cat "/sys/class/infiniband/rxe7/ports/1/gids/$index")" \
        "$(echo "$entry" | jq -r .gid | python3 -c 'import ipaddress; print(ipaddress.ip_address(input()).exploded)')"
done

step "the doctor finds the machine capable"
report=$("$NACRE" doctor --rdma --listener name:nacrerdma --json)
echo "$report" | jq -r '.findings[] | "\(.status) \(.id) \(.subject // "") \(.evidence)"'
of() { echo "$report" | jq -r --arg id "$1" '[.findings[] | select(.id == $id and (.subject // "" | test($subject))) | .status] | unique | join(",")' --arg subject "${2:-.*}"; }
expect rdma.modules "$(of rdma.modules)" PASS
expect rdma.devices "$(of rdma.devices)" PASS
expect rdma.software "$(of rdma.software)" WARN
expect rdma.gid.type "$(of rdma.gid.type)" PASS
expect "rdma.capable on IPv4" "$(of rdma.capable 10.77.0.1)" PASS
expect "rdma.capable on IPv6" "$(of rdma.capable fd77::1)" PASS
expect net.mtu "$(of net.mtu)" PASS
expect failed "$(echo "$report" | jq .failed)" 0
"$NACRE" initiator check 10.77.0.1 || die "this host could not connect"

step "the daemon finds the machine capable, too"
target_start
rpc doctor_run '{"rdma":true,"listeners":["name:nacrerdma"]}' | jq -e '.failed == 0 and any(.findings[]; .id == "rdma.capable" and .status == "PASS")'

step "counters count"
rdma counters rxe7/1 --all --json | jq -e 'any(.[]; .group == "driver" and .counter == "sent_pkts")'

step "refusals name the RDMA device or interface in use"
expect_failure rdma rxe add rxe7 --netdev lo
[[ $FAILURE == *'there is an RDMA device "rxe7" already, on nacrerdma'* ]] || die "not the reason"
expect_failure rdma rxe add rxe8 --netdev nacrerdma
[[ $FAILURE == *'interface "nacrerdma" has the soft-RoCE device "rxe7" already'* ]] || die "not the reason"
expect_failure setpriv --reuid 65534 --clear-groups "$NACRE" rdma rxe add rxe8 --netdev lo
[[ $FAILURE == *"CAP_NET_ADMIN"* ]] || die "not the reason"

step "a link that goes down, and an address that has no GID"
ip link set nacrerdma down
report=$("$NACRE" doctor --rdma --listener name:nacrerdma --json || true)
expect "rdma.capable while down" "$(of rdma.capable 10.77.0.1)" FAIL
echo "$report" | jq -e 'any(.findings[]; .id == "rdma.capable" and (.evidence | startswith("port_down")))'
ip link set nacrerdma up

step "soft-RoCE is deleted; a daemon that has opened the device does not prevent it"
rpc rdma_get_devices '{"name":"rxe7"}' | jq -e 'length == 1 and .[0].limits.max_qp > 0'
timeout 60 "$NACRE" rdma rxe del rxe7
expect "devices" "$(rdma devices --json | jq length)" 0
expect_failure rdma rxe del rxe7
[[ $FAILURE == *'there is no RDMA device "rxe7"; have: none'* ]] || die "not the reason"

step "a daemon makes soft-RoCE where its configuration asks for it, once"
nacre_stop
config_serving malloc 16MiB <<END
[rdma]
rxe = ["nacrerdma", "nosuch"]
[[nvmf.listener]]
iface = ["ip:10.77.0.1"]
rdma = "require"
END
for start in first second; do
    target_start --config "$WORK/nacre.toml"
    expect "devices after the $start start" "$(rdma devices --json | jq -r 'map(.name) | join(" ")')" rxe0
    rpc nvmf_get_listeners | jq -e 'any(.listeners[]; .address.trtype == "RDMA" and .actual == "listening")'
    nacre_stop
done
grep -q 'there is no network interface "nosuch"' "$DAEMON_LOG" || die "the log does not say what could not be made"
rdma rxe del rxe0
