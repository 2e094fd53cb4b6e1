# The settings of a card with DCB, as the kernel's own tools see them: our reading is theirs for
# random settings, `apply` sets what they then show, `undo` restores it, and a failure in the middle
# leaves nothing behind.
nacre_only "its own commands"
dcb_up
cat >"$WORK/qos.toml" <<END
[qos]
storage     = { dscp = 26, prio = 3, share = 50 }
replication = { dscp = 28, prio = 4, share = 20 }
lossless    = true
END
qos() { local what=$1; shift; "$NACRE" rdma qos "$what" "$@"; }
apply() { qos apply --iface dcb0 -c "$WORK/qos.toml" --state "$WORK/qos" --yes "$@"; }
undo() { qos undo --iface dcb0 --state "$WORK/qos" --yes; }

# What the tools say, in the fields that both have.
theirs() { # theirs DEVICE
    local pause
    pause=$(ethtool -a "$1" | awk '/Autonegotiate/ {a = $2} /^RX:/ {r = $2} /^TX:/ {t = $2} END {print a, r, t}')
    jq -nc --argjson pfc "$(dcb -j -s pfc show dev "$1")" --argjson ets "$(dcb -j ets show dev "$1")" \
        --argjson buffer "$(dcb -j buffer show dev "$1")" --argjson app "$(dcb -j app show dev "$1")" \
        --argjson rate "$(dcb -j maxrate show dev "$1")" --argjson mode "$(dcb -j dcbx show dev "$1")" \
        --arg trust "$(cat "$DCB_DEBUG/$1/trust")" --arg pause "$pause" '{
            pfc: [$pfc.prio_pfc | to_entries[] | select(.value) | .key],
            capability: $pfc.pfc_cap, delay: $pfc.delay, bypass: $pfc.macsec_bypass,
            sent: $pfc.requests, received: $pfc.indications,
            willing: $ets.willing, share: $ets.tc_bw, algorithm: $ets.tc_tsa, class_of: $ets.prio_tc,
            buffer_of: $buffer.prio_buffer, bytes: $buffer.buffer_size, total: $buffer.total_size,
            dscp: ($app.dscp_prio // [] | sort), ports: ($app.stream_port_prio // [] | sort),
            rates: $rate.tc_maxrate,
            mode: ($mode | keys), trust: ($trust / " "),
            pause: ($pause / " " | map(. == "on"))}'
}
ours() { # ours DEVICE
    qos show --iface "$1" --json | jq -c '
        def of($selector): [.dcb.apps[] | select(.selector == $selector) | [.value, .priority]] | sort;
        def bits: . as $set | [range(8) | select(($set / pow(2; .) | floor) % 2 == 1)];
        {
            pfc: (.dcb.pfc.enabled | bits),
            capability: .dcb.pfc.capability, delay: .dcb.pfc.delay, bypass: .dcb.pfc.bypass,
            sent: .dcb.pfc.sent, received: .dcb.pfc.received,
            willing: .dcb.ets.willing, share: .dcb.ets.share, algorithm: .dcb.ets.algorithm, class_of: .dcb.ets.class_of,
            buffer_of: .dcb.buffers.buffer_of, bytes: .dcb.buffers.bytes, total: .dcb.buffers.total,
            dscp: of("dscp"), ports: of("stream"),
            rates: .dcb.rates,
            mode: (.dcb.mode as $mode | [["host", 1], ["ieee", 8], ["static", 16]] | map(select($mode / .[1] | floor % 2 == 1) | .[0]) | sort),
            trust: .dcb.trust,
            pause: [.pause.autoneg, .pause.rx, .pause.tx]}'
}
agree() { expect "our reading of $1" "$(ours "$1")" "$(theirs "$1")"; }

step "random settings are read as the tools read them"
agree dcb0
RANDOM=7
for round in 1 2 3; do
    share=$((RANDOM % 101))
    port=$((RANDOM % 60000 + 1)) dscp=$((RANDOM % 64)) other=$((RANDOM % 64))
    dcb ets set dev dcb0 willing $([ $((round % 2)) = 0 ] && echo on || echo off) \
        tc-tsa all:strict $((round)):ets 7:ets tc-bw all:0 $((round)):$share 7:$((100 - share)) \
        prio-tc all:0 $((RANDOM % 8)):$((round)) 6:7
    dcb pfc set dev dcb0 prio-pfc all:off $((RANDOM % 8)):on delay $((RANDOM))
    dcb buffer set dev dcb0 prio-buffer all:0 $((RANDOM % 8)):2 buffer-size 0:$((RANDOM * 2)) 2:$((RANDOM * 2))
    dcb app add dev dcb0 dscp-prio $dscp:$((RANDOM % 8)) $other:$((RANDOM % 8)) stream-port-prio $port:$((RANDOM % 8))
    dcb maxrate set dev dcb0 tc-maxrate all:0 $round:$((RANDOM % 40 + 1))Gbit
    dcb_set dcb0 "rx_prio3_pause $RANDOM$RANDOM"
    dcb_set dcb0 "tx_prio$((RANDOM % 8))_pause $RANDOM$RANDOM"
    agree dcb0
done
theirs dcb0

step "apply sets what the tools then show"
# Whole-port pause and a firmware's agent have to give way.
dcb pfc set dev dcb0 prio-pfc all:off
ethtool -A dcb0 rx on tx on
dcb dcbx set dev dcb0 host ieee static
dcb ets set dev dcb0 willing on
before=$(theirs dcb0)
qos plan --iface dcb0 -c "$WORK/qos.toml" | tee "$WORK/plan"
apply --persist --units "$WORK/units"
after=$(theirs dcb0)
echo "$after"
agree dcb0
echo "$after" | jq -e '.pfc == [3, 4] and .pause == [false, false, false] and .mode == ["host", "ieee"]' >/dev/null
echo "$after" | jq -e '.share == [30, 0, 0, 50, 20, 0, 0, 0] and .class_of == [0, 0, 0, 3, 4, 0, 0, 0]' >/dev/null
echo "$after" | jq -e '(.willing | not) and .trust == ["dscp", "pcp"] and .buffer_of[3] == 1 and .buffer_of[4] == 1' >/dev/null
echo "$after" | jq -e '(.dscp | map(select(.[0] == 26 or .[0] == 28))) == [[26, 3], [28, 4]]' >/dev/null
[ -s "$WORK/units/nacre-qos-dcb0.service" ] || die "there is no unit"
[[ $(qos plan --iface dcb0 -c "$WORK/qos.toml") == *"is set as [qos] says"* ]] || die "the plan is not empty"

step "undo restores every setting"
qos undo --iface dcb0 --state "$WORK/qos" --units "$WORK/units" --yes
expect "the settings after undo" "$(theirs dcb0)" "$before"
[ ! -e "$WORK/units/nacre-qos-dcb0.service" ] || die "the unit is still there"
expect_failure undo

step "the printed commands do the same, for the other end"
# Debian 12's dcb does not know apptrust.
grep -v "apptrust\|^#" "$WORK/plan" | sed 's/dcb0/dcb1/' >"$WORK/commands"
ethtool -A dcb1 rx on tx on
dcb dcbx set dev dcb1 host ieee static
dcb buffer set dev dcb1 prio-buffer "$(theirs dcb0 | jq -r '.buffer_of | to_entries | map("\(.key):\(.value)") | join(" ")' | tr ' ' '\n' | sed -n 1p)"
# shellcheck disable=SC1091
. "$WORK/commands"
theirs dcb1 | jq -e --argjson after "$after" '(. as $is | ["pfc", "share", "algorithm", "class_of", "pause", "mode"] | map($is[.] == $after[.]) | all)' >/dev/null ||
    die "the commands did something else: $(theirs dcb1)"

step "a failure of any kind of setting leaves nothing behind"
for kind in "1 ets" "2 pfc" "4 buffer" "8 app" "16 trust" "32 dcbx" "64 pause"; do
    read -r bit name <<<"$kind"
    dcb_set dcb0 "$bit" refuse
    expect_failure apply
    dcb_set dcb0 0 refuse
    [[ $FAILURE == *"the steps before it were taken back"* ]] || die "it does not say that it was taken back"
    expect "the settings after $name failed" "$(theirs dcb0)" "$before"
    [ ! -e "$WORK/qos/dcb0.json" ] || die "a way back is written down"
done

step "refused settings, and interfaces without DCB"
sed -i 's/share = 50/share = 90/' "$WORK/qos.toml"
expect_failure apply
[[ $FAILURE == *"110 percent together"* ]] || die "not the reason"
sed -i 's/share = 90/share = 50/' "$WORK/qos.toml"
for dev in lo nosuch; do
    expect_failure qos plan --iface $dev -c "$WORK/qos.toml"
    expect_failure qos show --iface $dev
done
[[ $FAILURE == *'there is no network interface "nosuch"'* ]] || die "not the reason"
expect_failure setpriv --reuid 65534 --clear-groups "$NACRE" rdma qos apply --iface dcb0 -c "$WORK/qos.toml" --state "/tmp/qos.$$" --yes
[[ $FAILURE == *CAP_NET_ADMIN* ]] || die "not the reason"
rm -rf "/tmp/qos.$$"
