# limit: 420
# also: rdma
# DH-HMAC-CHAP with the stock host and with Nacre's own: right, wrong and missing keys, both
# directions, reconnects, authentication again under verified load, and new keys.
nacre_only "keys are given by its own calls"
case $(nvme connect --help 2>&1) in *--dhchap-ctrl-secret*) ;; *) skip "nvme-cli has no --dhchap-ctrl-secret" ;; esac

# The daemon refuses commands before authentication; the host reports its own failure.
allow_errors '^Authentication' '^(Read|Write|Flush) of namespace 1: Command Sequence Error'

as_host() { # as_host KEY [OPTIONS…]
    local key=$1
    shift
    connect "$NQN" --dhchap-secret="$(secret "$key")" "$@"
}
auth_of() { # auth_of QID FIELD
    rpc nvmf_subsystem_get_qpairs "{\"nqn\":\"$NQN\"}" |
        jq -r --argjson qid "$1" --arg field "$2" '.[] | select(.qid == $qid) | .auth[$field]'
}
set_keys() { # set_keys JSON
    rpc nvmf_subsystem_set_keys "{\"nqn\":\"$NQN\",\"host\":\"$HOST_A\",$1}"
}
failures() { rpc events_get '{}' | jq '[.. | objects | select(.type? == "auth_failed")] | length'; }
reported() { [ "$(failures)" -ge "$1" ]; }

target_start
subsystem_create "$NQN" listed
ns_add "$NQN" 1 128
for name in own other wrong; do key_make $name; done
rpc nvmf_subsystem_add_host "{\"nqn\":\"$NQN\",\"host\":\"$HOST_A\",\"dhchap_key\":\"own\"}"

step "the right key"
as_host own
CTRL=$(ctrl_of "$NQN")
wait_until 60 ns_dev "$NQN" 1
DEV=$(ns_dev "$NQN" 1)
expect "the admin queue" "$(auth_of 0 state)" completed
expect "the first I/O queue" "$(auth_of 1 state)" completed
expect "its hash function" "$(auth_of 1 digest)" sha256
expect "its group" "$(auth_of 1 dhgroup)" ffdhe3072
fio_verify "$DEV" right --rw=randrw --bsrange=4k-64k --iodepth=16 --size=16M

step "reset: the host authenticates every queue again"
nvme reset "/dev/$CTRL"
wait_until 60 is_live "$CTRL"
expect "the admin queue" "$(auth_of 0 state)" completed
dd if="$DEV" of=/dev/null bs=4k count=16 iflag=direct status=none

step "authentication again, by the host, under load"
fio_verify "$DEV" again --rw=randrw --bs=4k --iodepth=16 --size=32M --time_based --runtime=10 --verify_backlog=256 &
load=$!
sleep 2
set_keys '"dhchap_key":"other"'
secret other >"/sys/class/nvme/$CTRL/dhchap_secret"
sleep 2
expect "the state" "$(cat "/sys/class/nvme/$CTRL/state")" live
wait $load
disconnect "$NQN"

step "the old key is refused, the new one is accepted"
expect_failure as_host own
wait_until 30 gone "$NQN"
as_host other
wait_until 60 ns_dev "$NQN" 1
disconnect "$NQN"
set_keys '"dhchap_key":"own"'

step "a wrong key, no key, and a key of the wrong direction"
expect_failure as_host wrong
expect_failure connect "$NQN"
expect_failure as_host own --dhchap-ctrl-secret="$(secret other)"
wait_until 30 gone "$NQN"
wait_until 30 reported 2

step "both directions"
set_keys '"dhchap_key":"own","dhchap_ctrlr_key":"other"'
expect_failure as_host own --dhchap-ctrl-secret="$(secret wrong)"
wait_until 30 gone "$NQN"
as_host own --dhchap-ctrl-secret="$(secret other)"
wait_until 60 ns_dev "$NQN" 1
DEV=$(ns_dev "$NQN" 1)
fio_verify "$DEV" both --rw=randrw --bs=16k --iodepth=16 --size=16M

step "both directions, with Nacre as the host"
perf=("$NACRE" perf "$TRTYPE://$ADDR:$PORT/$NQN" -q "$HOST_B" -I "$HOST_B_ID" --connect-timeout 60s --cm-timeout 30s
    --keep-alive 60s --rw randrw --verify --range 1m --queues 2 --ios 200 --json)
keys=(--dhchap-key "$WORK/keys/wrong" --dhchap-ctrlr-key)
rpc nvmf_subsystem_add_host "{\"nqn\":\"$NQN\",\"host\":\"$HOST_B\",\"dhchap_key\":\"wrong\",\"dhchap_ctrlr_key\":\"own\"}"
"${perf[@]}" "${keys[@]}" "$WORK/keys/own" >"$WORK/perf.json"
jq -e '.errors == {} and .unfinished == 0 and .verification.blocks_wrong == 0 and .verification.blocks_checked > 0' "$WORK/perf.json"
expect_failure "${perf[@]}" "${keys[@]}" "$WORK/keys/other"
expect_failure "${perf[@]}" --dhchap-key "$WORK/keys/own"
expect_failure "${perf[@]}"
[[ $FAILURE == *key* ]] || die "it does not say that a key is missing"

step "the restarted daemon has its keys, and the host authenticates again"
CTRL=$(ctrl_of "$NQN")
nacre_kill
nacre_start
wait_until 120 is_live "$CTRL"
expect "the admin queue" "$(auth_of 0 state)" completed
dd if="$DEV" of=/dev/null bs=4k count=16 iflag=direct status=none
disconnect "$NQN"

step "no secret is in the log, the state or an answer"
expect_no_leak
