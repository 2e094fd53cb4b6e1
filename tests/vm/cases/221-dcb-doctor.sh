# limit: 400
# The doctor's group `roce` on an interface with soft-RoCE and DCB, against a switch that a script
# plays: the settings asked for pass, each wrong setting is found, and the switch's own settings are
# compared.
nacre_only "its own doctor"
dcb_up
dcb_addresses
dcb_rdma
trap 'switch_down' EXIT
cat >"$WORK/qos.toml" <<END
[qos]
storage  = { dscp = 26, prio = 3, share = 60 }
lossless = true
END
qos() { "$NACRE" rdma qos "$@"; }
apply() { qos apply --iface "$1" -c "$WORK/qos.toml" --state "$WORK/qos" --yes >/dev/null; }
examine() { # examine [OPTIONS…]: of dcb0
    report=$("$NACRE" doctor -c "$WORK/qos.toml" --listener name:dcb0 --json "$@" || true)
    echo "$report" | jq -r '.findings[] | select(.id | test("^roce|counters")) | "\(.status) \(.id) [\(.subject)] \(.evidence)"'
}
of() { echo "$report" | jq -r --arg id "$1" '[.findings[] | select(.id == $id and .subject == "dcb0") | .status] | unique | join(",")'; }
says() { echo "$report" | jq -r --arg id "$1" '[.findings[] | select(.id == $id and .subject == "dcb0") | .evidence + " " + .remedy] | join(" ")'; }

step "a card with its factory settings"
examine
expect roce.pfc.set "$(of roce.pfc.set)" FAIL
expect roce.ets "$(of roce.ets)" WARN
expect roce.trust "$(of roce.trust)" FAIL
expect roce.buffer "$(of roce.buffer)" FAIL
expect roce.lossless "$(of roce.lossless)" WARN
expect roce.pause.rate "$(of roce.pause.rate)" SKIP

step "settings as asked for, and a switch that agrees"
apply dcb0
apply dcb1
switch_up dcb1 leaf-7
switch_says 11 08,08
switch_says 9 00,00,03,00,00,28,00,00,3c,00,00,00,00,02,00,00,02,00,00,00,00
switch_says 12 00,65,00,1a
examine --wait 5s --report "$WORK/report.txt"
for id in dcbx pfc.set pfc ets trust pause.global pause.rate buffer lossless; do
    expect "roce.$id" "$(of roce.$id)" PASS
done
expect roce.ecn "$(of roce.ecn)" SKIP
[[ $(says roce.pfc) == *leaf-7* ]] || die "it does not name the switch"
cat "$WORK/report.txt"
for text in "leaf-7" "DSCP 26, priority 3, share 60 %" "class 3: priorities 3, 60 %" "25000 Mb/s"; do
    grep -qF "$text" "$WORK/report.txt" || die "the report does not have '$text'"
done

step "lldpd and Nacre receive the same settings from the switch"
lldpd_prepare
"$LLDPD/usr/sbin/lldpd" -d -r -L "$LLDPD/usr/sbin/lldpcli" -u "$WORK/other.sock" -p "$WORK/other.pid" -I dcb0 >"$WORK/other.log" 2>&1 &
other=$!
heard() {
    "$LLDPD/usr/sbin/lldpcli" -u "$WORK/other.sock" -f json0 show neighbors details | jq -e '.lldp[0].interface[0]'
}
wait_until 60 heard
heard >"$WORK/theirs"
kill $other
wait $other 2>/dev/null || true
expect "the chassis" "$(jq -r '.chassis[0].name[0].value' "$WORK/theirs")" leaf-7
port=$(jq -r '.port[0].id[0].value' "$WORK/theirs")
[[ $(says roce.pfc) == *"leaf-7 port $port"* ]] || die "our port is not $port: $(says roce.pfc)"
# lldpd does not decode DCBX: it gives the bytes that we decode.
expect "the PFC bytes" "$(jq -r '[.. | .["unknown-tlv"]? // empty | .[] | select(.subtype == "11") | .value] | first' "$WORK/theirs")" "08,08"
unset LD_LIBRARY_PATH

step "a switch with other priorities"
switch_forgets
switch_says 11 08,28
examine --wait 5s
expect roce.pfc "$(of roce.pfc)" FAIL
[[ $(says roce.pfc) == *"ours: 3; leaf-7"*": 3,5"* ]] || die "it does not print both"
expect roce.lossless "$(of roce.lossless)" WARN

step "a switch with the older DCBX only"
switch_forgets
switch_says 2 02,0a,00,00,00,00,00,01,00,00,00,01 00,1b,21
examine --wait 5s
expect roce.dcbx "$(of roce.dcbx)" FAIL
switch_down
examine --wait 2s
expect "roce.pfc without a switch" "$(of roce.pfc)" WARN

step "pauses, storms and a firmware's agent"
grows() { # grows NAME STEP: a counter of dcb0, several times a second
    local value=0
    while sleep 0.1; do
        value=$((value + $2))
        dcb_set dcb0 "$1 $value"
    done
}
for row in "rx_prio3_pause 200 WARN" "rx_prio3_pause_duration 100000 FAIL" "tx_pause_storm_warning_events 1 FAIL"; do
    read -r name by status <<<"$row"
    grows "$name" "$by" &
    examine --wait 2s
    kill $!
    expect "roce.pause.rate with $name" "$(of roce.pause.rate)" "$status"
done
dcb dcbx set dev dcb0 lld-managed ieee
examine
expect roce.dcbx "$(of roce.dcbx)" WARN
# The agent knows the other end.
expect roce.pfc "$(of roce.pfc)" PASS
dcb pfc set dev dcb1 prio-pfc all:off 4:on
examine
expect roce.pfc "$(of roce.pfc)" FAIL

step "settings that contradict each other"
dcb dcbx set dev dcb0 host ieee
dcb pfc set dev dcb0 prio-pfc all:on 0:off 1:off 2:off 7:off
examine
expect roce.pfc.set "$(of roce.pfc.set)" FAIL
dcb pfc set dev dcb0 prio-pfc all:off
ethtool -A dcb0 rx on tx on
examine
expect roce.pause.global "$(of roce.pause.global)" FAIL
ethtool -A dcb0 rx off tx off
dcb app replace dev dcb0 dscp-prio 26:5
examine
expect roce.trust "$(of roce.trust)" FAIL
[[ $(says roce.trust) == *"dscp-prio 26:3"* ]] || die "no remedy"
dcb app replace dev dcb0 dscp-prio 26:3
examine
expect roce.trust "$(of roce.trust)" PASS

step "the daemon compares with its own [qos]"
apply dcb0
apply dcb1
cat >>"$WORK/qos.toml" <<END
[[nvmf.listener]]
iface = ["name:dcb1"]
rdma = "require"
END
config_serving malloc 16MiB <"$WORK/qos.toml"
target_start --config "$WORK/nacre.toml"
report=$(rpc doctor_run '{"listeners":["name:dcb0"]}')
expect "roce.trust in the daemon" "$(of roce.trust)" PASS
warned() { grep -q "RDMA is used on .*rdma.software" "$DAEMON_LOG"; }
wait_until 30 warned
if grep "RDMA is used on .*: roce\." "$DAEMON_LOG"; then die "it complains about a network that is as asked for"; fi
nacre_stop
