# limit: 900
# A namespace of the kernel's target over two of its ports, one path over RDMA and one over TCP,
# under a host's verified load. A port closes and opens, ANA states change, both paths are used at
# once: no I/O fails.
nacre_only "several paths to a remote namespace"
rdma_up
modprobe -a nvmet nvmet-tcp nvmet-rdma
FAR=nqn.2026-01.org.example:far
FAR_PORT=4430
declare -A FAR_PORTS=([TCP]="$NVMET/ports/11" [RDMA]="$NVMET/ports/12")
# The cleanup of the guest knows only the first port.
far_clean() { rm -f "$NVMET"/ports/1[12]/subsystems/*; rmdir "$NVMET"/ports/1[12]; } 2>/dev/null
trap far_clean EXIT
far_serve() { ln -s "$NVMET/subsystems/$FAR" "${FAR_PORTS[$1]}/subsystems/$FAR"; }
far_drop() { rm "${FAR_PORTS[$1]}/subsystems/$FAR"; }
far_ana() { echo "$2" >"${FAR_PORTS[$1]}/ana_groups/1/ana_state"; } # far_ana KIND STATE
mkdir -p "$NVMET/subsystems/$FAR"
echo 1 >"$NVMET/subsystems/$FAR/attr_allow_any_host"
nvmet_ns_add "$FAR" 1 64
for kind in TCP RDMA; do
    port=${FAR_PORTS[$kind]}
    mkdir "$port"
    echo "${kind,,}" >"$port/addr_trtype"
    echo ipv4 >"$port/addr_adrfam"
    echo "$ADDR" >"$port/addr_traddr"
    echo "$FAR_PORT" >"$port/addr_trsvcid"
    far_serve "$kind"
done

# The machine may be emulated, so waits are long.
export NACRE_REPLICATION_KEEP_ALIVE_MS=120000
TRTYPE=tcp
target_start
rpc bdev_nvme_set_options '{"tcp_connect_timeout_ms":60000}'
attach() { # attach KIND
    rpc bdev_nvme_attach_controller "{\"name\":\"far\",\"trtype\":\"$1\",\"adrfam\":\"ipv4\",\"traddr\":\"$ADDR\",\"trsvcid\":\"$FAR_PORT\",
        \"subnqn\":\"$FAR\",\"multipath\":\"multipath\",\"ctrlr_loss_timeout_sec\":-1,\"reconnect_delay_sec\":1}"
}
# path KIND FIELD, path_is KIND FIELD VALUE
path() { rpc remote_get_paths '{"name":"farn1"}' | jq -r ".[] | select(.trid.trtype == \"$1\") | $2"; }
path_is() { [ "$(path "$1" "$2")" = "$3" ]; }
path_is_lost() { [ "$(path "$1" .state)" != enabled ]; }
path_serves() { # path_serves KIND: new I/O went over it
    local before
    before=$(path "$1" ".reads + .writes")
    load_goes_on
    [ "$(path "$1" ".reads + .writes")" -gt "$before" ]
}

step "one device, a path over RDMA and one over TCP"
attach rdma
attach tcp
for kind in RDMA TCP; do wait_until 180 path_is $kind .state enabled; done
expect "the devices" "$(rpc bdev_get_bdevs | jq -r '[.[].name] | join(" ")')" farn1
subsystem_create "$NQN" any
rpc nvmf_subsystem_add_ns "{\"nqn\":\"$NQN\",\"namespace\":{\"nsid\":1,\"bdev_name\":\"farn1\"}}"
connect_and_find "$NQN"
load_start "$DEV" 16m "${PACED[@]}"
trap 'load_kill; far_clean' EXIT

for at in "RDMA TCP" "TCP RDMA"; do
    read -r lost left <<<"$at"
    step "the port of $lost closes, and opens"
    far_drop "$lost"
    wait_until 180 path_is_lost "$lost"
    path_serves "$left" || die "$left does not serve"
    far_serve "$lost"
    wait_until 180 path_is "$lost" .state enabled
    load_goes_on
done

for at in "RDMA TCP" "TCP RDMA"; do
    read -r worse better <<<"$at"
    for state in non-optimized inaccessible; do
        step "the port of $worse becomes $state"
        far_ana "$worse" $state
        wait_until 60 path_is "$worse" .ana_state ${state//-/_}
        path_serves "$better" || die "$better does not serve"
        # Each queue changes the path with its next I/O.
        wait_until 60 path_is "$worse" .current false
    done
    far_ana "$worse" optimized
    wait_until 60 path_is "$worse" .ana_state optimized
done

step "both paths at once"
rpc bdev_nvme_set_multipath_policy '{"name":"farn1","policy":"active_active","selector":"round_robin"}'
for kind in RDMA TCP; do path_serves $kind || die "$kind does not serve"; done
rpc remote_get_paths '{"name":"farn1"}' | jq -c '.[] | {trtype: .trid.trtype, reads, writes, resent, failed}'

step "the statistics of both transports"
rpc bdev_nvme_get_transport_statistics | jq -ce '[.poll_groups[].transports[]] |
    (map(select(.trname == "RDMA").devices[]) | length > 0 and all(.dev_name == "rxe0" and .completions > 0 and
        .total_send_wrs >= .completions and .total_recv_wrs >= .completions and .send_doorbell_updates > 0)) and
    (map(select(.trname == "TCP")) | length > 0 and all(.nvme_completions > 0 and
        .submitted_requests >= .nvme_completions and .polls >= .idle_polls))'

step "no I/O failed"
load_end
disconnect "$NQN"
nacre_stop
