# limit: 300
# Both ends of a cable compared by `nacre doctor --peer` and `--answer`: equal settings pass; other
# settings, a rewritten DSCP, lost packets and a smaller MTU on the way are found. This guest has no
# ping(8).
nacre_only "its own doctor"
dcb_up
dcb_addresses
cat >"$WORK/qos.toml" <<END
[qos]
storage  = { dscp = 26, prio = 3, share = 60 }
lossless = true
END
apply() { "$NACRE" rdma qos apply --iface "$1" -c "$WORK/qos.toml" --state "$WORK/qos" --yes >/dev/null; }
PEER=10.50.0.2
compare() { # compare [OPTIONS…]: dcb0 with dcb1, whose end answers
    "$NACRE" doctor --answer $PEER --for 60s >"$WORK/answer" 2>&1 &
    local answer=$!
    wait_until 20 grep -q "answers .nacre doctor" "$WORK/answer"
    report=$("$NACRE" doctor -c "$WORK/qos.toml" --peer $PEER --json "$@" || true)
    wait $answer || die "the responder: $(cat "$WORK/answer")"
    echo "$report" | jq -r --arg peer $PEER '.findings[] | select(.subject // "" | startswith($peer)) | "\(.status) \(.id) [\(.subject)] \(.evidence)"'
}
of() { echo "$report" | jq -r --arg id "$1" --arg of "$PEER${2:+ $2}" '[.findings[] | select(.id == $id and .subject == $of) | .status] | unique | join(",")'; }
says() { echo "$report" | jq -r --arg id "$1" --arg of "$PEER${2:+ $2}" '[.findings[] | select(.id == $id and .subject == $of) | .evidence] | join(" ")'; }

step "no responder"
report=$("$NACRE" doctor -c "$WORK/qos.toml" --peer $PEER --json || true)
expect peer.compare "$(of peer.compare)" SKIP
[[ $(says peer.compare) == *"nacre doctor --answer $PEER"* ]] || die "it does not say how: $(says peer.compare)"
! command -v ping >/dev/null || echo "this guest has ping; it is not used"
[[ $(says net.peer) == *"10.50.0.1 (dcb0) reaches it by ICMP"* ]] || die "no echo: $(says net.peer)"
expect net.mtu "$(of net.mtu)" PASS
[[ $(says net.mtu) == "packets of 4200 bytes pass unfragmented" ]] || die "$(says net.mtu)"

step "an echo without CAP_NET_RAW, by the group of ping_group_range"
unprivileged() { setpriv --inh-caps=-net_raw --bounding-set=-net_raw "$NACRE" doctor --peer $PEER --json || true; }
report=$(unprivileged)
expect net.mtu "$(of net.mtu)" SKIP
[[ $(says net.mtu) == *"CAP_NET_RAW"*"ping_group_range"* ]] || die "no remedy: $(says net.mtu)"
sysctl -qw net.ipv4.ping_group_range="0 0"
report=$(unprivileged)
expect net.mtu "$(of net.mtu)" PASS
sysctl -qw net.ipv4.ping_group_range="1 0"

step "equal ends"
apply dcb0
apply dcb1
compare --report "$WORK/report.txt"
for id in mtu pfc trust ets; do expect "peer.$id" "$(of peer.$id)" PASS; done
expect peer.ecn "$(of peer.ecn)" SKIP
for class in storage unmarked; do
    for id in loss dscp priority; do expect "peer.$id $class" "$(of peer.$id $class)" PASS; done
done
[[ $(says peer.priority storage) == *"256 packets sent on priority 3; there (dcb1): 256 received on 3" ]] || die "$(says peer.priority storage)"
grep -qF "BETWEEN THIS MACHINE AND $PEER" "$WORK/report.txt" || die "the report does not have it"

step "a switch that rewrites the DSCP"
dcb_set dcb1 1 rewrite
compare
dcb_set dcb1 0 rewrite
expect "peer.dscp storage" "$(of peer.dscp storage)" FAIL
[[ $(says peer.dscp storage) == *"sent to the peer with 26, arrived with 0 (256 of 256)" ]] || die "$(says peer.dscp storage)"
expect "peer.priority storage" "$(of peer.priority storage)" FAIL
expect "peer.dscp unmarked" "$(of peer.dscp unmarked)" PASS

step "a switch that loses packets of priority 3"
dcb_set dcb1 8 lossy
dcb_set dcb1 4 drop
compare
dcb_set dcb1 0 drop
expect "peer.loss storage" "$(of peer.loss storage)" FAIL
[[ $(says peer.loss storage) == "256 packets with DSCP 26 sent, 192 arrived, 192 returned; this class must lose none" ]] || die "$(says peer.loss storage)"
expect "peer.loss unmarked" "$(of peer.loss unmarked)" PASS

step "a switch port with a smaller MTU"
dcb_set dcb1 1514 largest
compare
dcb_set dcb1 0 largest
expect net.mtu "$(of net.mtu)" WARN
[[ $(says net.mtu) == *"of 4200 bytes, not to be fragmented: no answer; packets of 1500 bytes pass" ]] || die "$(says net.mtu)"

step "ends with other settings"
dcb pfc set dev dcb1 prio-pfc all:off 4:on
dcb app replace dev dcb1 dscp-prio 26:4
ip link set dcb1 mtu 1500
compare
expect peer.pfc "$(of peer.pfc)" FAIL
[[ $(says peer.pfc) == *"here (dcb0): 3; there (dcb1): 4" ]] || die "$(says peer.pfc)"
expect peer.trust "$(of peer.trust)" FAIL
expect peer.mtu "$(of peer.mtu)" WARN
expect "peer.priority storage" "$(of peer.priority storage)" FAIL
