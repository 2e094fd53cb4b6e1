# limit: 600
# Obstacles to RDMA on an address: each with its reason, exact text and remedy, while the daemon
# serves TCP.
nacre_only "it tells why"
rdma_up
REAL=$NACRE
serve_with() { # serve_with LISTENER-LINES: one listener on the interface
    config_serving null 16MiB <<END
[[nvmf.listener]]
name = "data"
iface = ["ip:10.9.8.1"]
rdma = "prefer"
$1
END
    target_start --config "$WORK/nacre.toml"
}
of_rdma() { rpc nvmf_get_listeners | jq -r --arg field "$1" '.listeners[] | select(.address.trtype == "RDMA") | .[$field] // ""'; }
absent_for() { [ "$(of_rdma actual) $(of_rdma reason)" = "absent $1" ]; }
says() { # says FIELD TEXT
    local text
    text=$(of_rdma "$1")
    [[ $text == *"$2"* ]] || die "the $1 is '$text', without '$2'"
}
tcp_serves() { TRTYPE=tcp connect_and_find "$NQN" --nr-io-queues=1; disconnect "$NQN"; }

step "a host beyond max_connections is refused with the limit, and the target logs it once"
config_serving null 16MiB <<END
[nvmf]
max_connections = 3
[[nvmf.listener]]
name = "data"
iface = ["ip:10.9.8.1"]
rdma = "require"
END
target_start --config "$WORK/nacre.toml"
listens() { [ "$(of_rdma actual)" = listening ]; }
wait_until 30 listens
refused_events() { rpc events_get | jq '[.events[] | select(.type | test("refused"))] | length'; }
began=$SECONDS
expect_failure "$REAL" perf "rdma://10.9.8.1:4420/$NQN" --queues 8 --ios 100 --quiet
[[ $FAILURE == *"limit of connections"* ]] || die "the refusal does not name the limit"
expect_at_most "the seconds of eight queues against a limit of three" $((SECONDS - began)) 20
rpc events_get | jq -c '.events[] | select(.type | test("refused"))'
expect_at_most "events of refused connections" "$(refused_events)" 4
grep -c max_connections "$DAEMON_LOG" || die "the log does not name max_connections"

step "the doctor's checks leave no warning on the peer"
warnings() { grep -c WARN "$DAEMON_LOG" || true; }
before=$(warnings)
"$REAL" doctor --rdma --peer 10.9.8.1 || true
sleep 1
expect "warnings after the doctor" "$(warnings)" "$before"

step "counters that do not change fill no tables"
timeout -s INT 4 "$REAL" rdma counters --watch 500ms >"$WORK/watched" || true
cat "$WORK/watched"
expect "tables without a row" "$(awk 'tolower($1) == "device" { header = 1; next } header && NF == 0 { empty++ } { header = 0 } END { print empty + 0 }' "$WORK/watched")" 0
nacre_stop

step "the wrong entry of the GID table"
serve_with "rdma_gid_index = 0"
wait_until 30 absent_for no_gid_for_ip
says evidence "have: "
says evidence "10.9.8.1"
says remedy "nacre rdma gids"
tcp_serves
nacre_stop

step "the module of the connection manager is missing"
modprobe -r rdma_ucm
[ ! -e /dev/infiniband/rdma_cm ] || die "rdma_ucm is still there"
serve_with ""
wait_until 30 absent_for no_rdma_cm
says evidence "/dev/infiniband/rdma_cm is not there"
says remedy "modprobe rdma_ucm"
tcp_serves
step "the module is loaded while the daemon runs"
modprobe rdma_ucm
wait_until 30 listens
nacre_stop

step "libibverbs is not installed"
cat >"$WORK/without-verbs" <<END
#!/bin/bash
# In a separate mount namespace, where the library is not a library.
exec unshare --mount bash -c 'for lib in /usr/lib/*/libibverbs.so.1; do mount --bind /dev/null "\$lib" || exit 1; done; exec "$REAL" "\$@"' nacre "\$@"
END
chmod +x "$WORK/without-verbs"
export NACRE=$WORK/without-verbs
serve_with ""
wait_until 30 absent_for no_uverbs
says evidence "libibverbs"
says remedy "apt install libibverbs1"
tcp_serves
nacre_stop

step "locked memory is limited"
cat >"$WORK/without-memory" <<END
#!/bin/bash
ulimit -l 64
exec setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock "$REAL" "\$@"
END
chmod +x "$WORK/without-memory"
export NACRE=$WORK/without-memory
serve_with ""
wait_until 30 absent_for memlock
says evidence "bytes asked"
says evidence "limit 65536"
says remedy "memlock"
tcp_serves
nacre_stop
export NACRE=$REAL
