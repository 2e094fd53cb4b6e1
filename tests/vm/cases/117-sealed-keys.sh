# limit: 300
# Keys that the daemon stores sealed, with the stock kernel as the host: authentication and TLS
# after a restart and after `kill -9`, a new store key, a lost one, and one from a credential.
nacre_only "keys are given by its own calls"
case $(nvme connect --help 2>&1) in *--dhchap-secret*) ;; *) skip "nvme-cli has no --dhchap-secret" ;; esac

allow_errors '^Authentication' '^(Read|Write|Flush) of namespace 1: Command Sequence Error'

STORE_KEY=$WORK/data/store.key
CREDENTIALS=$WORK/credentials

sealed_make() { # sealed_make NAME [--tls]: the host's copy is $WORK/keys/NAME
    mkdir -p "$WORK/keys"
    "$NACRE" key generate "$1" --sealed --out "$WORK/keys/$1" --socket "$SOCK" "${@:2}"
}
key_field() { rpc key_list | jq -r --arg name "$1" --arg field "$2" '.[] | select(.name == $name) | .[$field]'; }
as_host() { connect "$NQN" --dhchap-secret="$(secret own)"; }
restart() { nacre_stop && nacre_start; }

# Connects as both hosts, reads and writes, and leaves.
both_hosts_work() { # both_hosts_work NAME
    step "$1"
    expect "where the key of the first host is" "$(key_field own source)" sealed
    as_host
    wait_until 60 ns_dev "$NQN" 1
    fio_verify "$(ns_dev "$NQN" 1)" "chap-$1" --rw=randrw --bs=16k --iodepth=8 --size=4M
    disconnect "$NQN"
    tls_connect_and_find "$HOST_B" "$NQN" "$PORT"
    fio_verify "$DEV" "tls-$1" --rw=randrw --bs=16k --iodepth=8 --size=4M
    disconnect "$NQN"
}

tls_up
target_start
rpc nvmf_create_subsystem "{\"nqn\":\"$NQN\",\"allow_any_host\":false,\"serial_number\":\"NACRETEST\"}"
rpc nvmf_subsystem_add_listener "{\"nqn\":\"$NQN\",\"options\":{\"tls\":\"allow\"},
    \"listen_address\":{\"trtype\":\"tcp\",\"adrfam\":\"ipv4\",\"traddr\":\"$ADDR\",\"trsvcid\":\"$PORT\"}}"
ns_add "$NQN" 1 64
sealed_make own
sealed_make psk --tls
rpc nvmf_subsystem_add_host "{\"nqn\":\"$NQN\",\"host\":\"$HOST_A\",\"dhchap_key\":\"own\"}"
rpc nvmf_subsystem_add_host "{\"nqn\":\"$NQN\",\"host\":\"$HOST_B\",\"psk\":\"psk\"}"
kernel_key psk "$HOST_B" "$NQN" v0
both_hosts_work fresh

restart
both_hosts_work restarted

nacre_kill
nacre_start
both_hosts_work killed

before=$(sha256sum <"$STORE_KEY")
"$NACRE" key rotate-store --socket "$SOCK"
[ "$(sha256sum <"$STORE_KEY")" != "$before" ] || die "the store key is the former one"
nacre_kill
nacre_start
both_hosts_work rotated

step "without the store key the host is refused, and everything else is served"
mv "$STORE_KEY" "$WORK/store.key.away"
restart
expect "the state of the key" "$(key_field own state)" unreadable
expect_failure as_host
wait_until 30 gone "$NQN"
expect_failure rpc key_generate '{"name":"more","kind":"dhchap"}'
[ ! -e "$STORE_KEY" ] || die "a new store key hides that one is lost"
mv "$WORK/store.key.away" "$STORE_KEY"
both_hosts_work restored

# What LoadCredentialEncrypted= of the unit gives a daemon: a folder of files, and its name.
mkdir -m 700 "$CREDENTIALS"
od -An -tx1 -N32 /dev/urandom | tr -d ' \n' >"$CREDENTIALS/nacre-store-key"
chmod 400 "$CREDENTIALS/nacre-store-key"
export CREDENTIALS_DIRECTORY=$CREDENTIALS
restart
"$NACRE" key rotate-store --socket "$SOCK"
[ ! -e "$STORE_KEY" ] || die "the file of the store key is still there"
nacre_kill
nacre_start
both_hosts_work credential

step "no secret is in the log, the state or an answer"
expect_no_leak
