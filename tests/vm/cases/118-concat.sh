# limit: 420
# kernel: newer
# Secure channel concatenation with the stock host: authentication in clear makes the key of TLS.
# Load, resets, authentication again, `kill -9`, SHA-384, and what either end refuses.
nacre_only "keys are given by its own calls"
case $(cat /dev/nvme-fabrics) in *,concat*) ;; *) skip "the host of Linux $(uname -r) has no concat" ;; esac
# The daemon refuses a host that does not prove itself, or not as it must.
allow_errors '^Authentication' '^Connect: Authentication Required' '^(Read|Write|Flush) of namespace 1: Command Sequence Error'
REQUIRE=4421 OFF=4422
tls_up
target_start
rpc nvmf_create_subsystem "{\"nqn\":\"$NQN\",\"allow_any_host\":false,\"serial_number\":\"NACRETEST\"}"
for at in "$PORT allow" "$REQUIRE require" "$OFF off"; do
    read -r port tls <<<"$at"
    rpc nvmf_subsystem_add_listener "{\"nqn\":\"$NQN\",\"options\":{\"tls\":\"$tls\"},
        \"listen_address\":{\"trtype\":\"tcp\",\"adrfam\":\"ipv4\",\"traddr\":\"$ADDR\",\"trsvcid\":\"$port\"}}"
done
ns_add "$NQN" 1 64
for name in own other wrong; do key_make $name; done
host_add() { # host_add HOSTNQN KEY [JSON]
    rpc nvmf_subsystem_add_host "{\"nqn\":\"$NQN\",\"host\":\"$1\",\"dhchap_key\":\"$2\"${3:-}}"
}
host_add "$HOST_A" own ',"concat":true'
host_add "$HOST_B" other

connect_and_check() { # connect_and_check KEY HOSTNQN HASH CIPHER [OPTIONS]: sets CTRL and DEV
    concat_connect "$1" "$2" "$PORT" "${5:-}"
    CTRL=$(ctrl_of "$NQN")
    wait_until 60 ns_dev "$NQN" 1
    DEV=$(ns_dev "$NQN" 1)
    expect_handshake "client ok NVMe1G$3 $2 $NQN *"
    expect_secure "$2" "$3" "$4"
}
# All queues, each over TLS with one generated key.
expect_secure() { # expect_secure HOSTNQN HASH CIPHER
    rpc nvmf_subsystem_get_qpairs "{\"nqn\":\"$NQN\"}" |
        jq -e --arg identity "NVMe1G$2 $1 $NQN " --arg cipher "$3" 'length == 3 and ([.[].tls.identity] | unique | length == 1)
            and all(.[].tls; (.identity | startswith($identity)) and .cipher == $cipher)'
}
identity_now() { tls_of 0 identity; }

step "a key that authentication makes"
connect_and_check own "$HOST_A" 01 TLS_AES_128_GCM_SHA256 ,reconnect_delay=1
first=$(identity_now)
fio_verify "$DEV" made --rw=randrw --bsrange=4k-64k --iodepth=16 --size=4M

step "reset, authentication again and kill -9 under load: no I/O fails, and each association has its own key"
fio_verify "$DEV" killed --rw=randrw --bsrange=4k-64k --iodepth=8 --size=8M --time_based --runtime=10 --verify_backlog=64 &
load=$!
sleep 2
nvme reset "/dev/$CTRL"
wait_until 60 is_live "$CTRL"
expect_secure "$HOST_A" 01 TLS_AES_128_GCM_SHA256
second=$(identity_now)
[ "$second" != "$first" ] || die "the reset has kept the key"
sleep 1
# The host's admin queue replaces its key (SC_C 3), and the queues go on with theirs.
rpc nvmf_subsystem_set_keys "{\"nqn\":\"$NQN\",\"host\":\"$HOST_A\",\"dhchap_key\":\"other\"}"
secret other >"/sys/class/nvme/$CTRL/dhchap_secret"
sleep 2
expect "the state" "$(cat "/sys/class/nvme/$CTRL/state")" live
nacre_kill
nacre_start
wait_until 60 is_live "$CTRL"
wait $load
expect_secure "$HOST_A" 01 TLS_AES_128_GCM_SHA256
[ "$(identity_now)" != "$second" ] || die "the restarted daemon knows the key"
disconnect "$NQN"
rpc nvmf_subsystem_set_keys "{\"nqn\":\"$NQN\",\"host\":\"$HOST_A\",\"dhchap_key\":\"own\"}"

step "refused: a wrong key, authentication without concatenation, nothing at all"
none() { expect "controllers" "$(ctrl_of "$NQN" | wc -l)" 0; }
expect_failure concat_connect wrong "$HOST_A" "$PORT"
none
expect_failure connect "$NQN" --dhchap-secret="$(secret own)"
none
expect_failure connect "$NQN"
none

step "refused: listeners that take nothing in clear, or have no TLS"
for port in "$REQUIRE" "$OFF"; do
    expect_failure concat_connect own "$HOST_A" "$port"
    none
done

step "a host whose entry leaves it the choice"
connect_and_check other "$HOST_B" 01 TLS_AES_128_GCM_SHA256
disconnect "$NQN"
connect "$NQN" --hostnqn="$HOST_B" --hostid="$HOST_B_ID" --dhchap-secret="$(secret other)"
expect "TLS of the admin queue" "$(tls_of 0 identity)" null
disconnect "$NQN"

step "SHA-384: the key of 48 bytes, and AES-256"
nacre_kill
NACRE_NVMF_DHCHAP_DIGESTS=sha384 nacre_start
connect_and_check own "$HOST_A" 02 TLS_AES_256_GCM_SHA384
fio_verify "$DEV" sha384 --rw=randrw --bsrange=4k-64k --iodepth=8 --size=4M
nvme reset "/dev/$CTRL"
wait_until 60 is_live "$CTRL"
expect_secure "$HOST_A" 02 TLS_AES_256_GCM_SHA384
disconnect "$NQN"

step "no secret is in the log, the state or an answer"
expect_no_leak
