#!/usr/bin/env bash
# The target of blktests' nvme group: the program that its variable NVME_TARGET_CONTROL names.
# blktests asks it for the addresses, and has it make and delete the subsystem of a test.
#
#   blktests.sh config --show-NAME
#   blktests.sh setup --subsysnqn NQN --subsys-uuid UUID --hostnqn NQN [--hostkey KEY]
#                     [--ctrkey KEY]
#   blktests.sh cleanup --subsysnqn NQN
#   blktests.sh keys hostkey|ctrlkey KEY            a new key of the host, or of the controller
#   blktests.sh offer dhchap_digests|dhchap_dhgroups WORD
#                                                   allows one hash function, or one group
#
# Needs in the environment: those of lib.sh, BLKTESTS_TRTYPE and BLKTESTS_ADDR.
# shellcheck source=lib.sh
. "$HERE/lib.sh"
trap - ERR
TRTYPE=$BLKTESTS_TRTYPE ADDR=$BLKTESTS_ADDR
UUID=91fdba0d-f87b-4c25-b80f-db7be1418b9e
KEYS=$WORK/blktests-keys OFFERS=$WORK/blktests-offers

# A key of a host as a key of the daemon: its name.
key() { # key KEY
    local name
    name=$(echo "$1" | sha256sum | cut -c1-16)
    if [ ! -f "$KEYS/$name" ]; then
        mkdir -p "$KEYS"
        (umask 077 && echo "$1" >"$KEYS/$name")
        rpc keyring_file_add_key "{\"name\":\"$name\",\"path\":\"$KEYS/$name\"}" >&2
    fi
    echo "$name"
}

# The host's keys, one `"FIELD":"NAME"` per line.
json_fields() { sed 's/\(.*\)=\(.*\)/"\1":"\2"/' "$WORK/blktests-fields"; }

setup() {
    local nqn uuid host field fields=
    : >"$WORK/blktests-fields"
    while [ $# -gt 0 ]; do
        case $1 in
            --subsysnqn) nqn=$2 ;;
            --subsys-uuid) uuid=$2 ;;
            --hostnqn) host=$2 ;;
            --hostkey) echo "dhchap_key=$(key "$2")" >>"$WORK/blktests-fields" ;;
            --ctrlkey | --ctrkey) echo "dhchap_ctrlr_key=$(key "$2")" >>"$WORK/blktests-fields" ;;
        esac
        shift 2
    done
    while read -r field; do fields+=",$field"; done < <(json_fields)
    rpc nvmf_create_subsystem "{\"nqn\":\"$nqn\",\"allow_any_host\":false,\"serial_number\":\"NACRETEST\"}"
    truncate -s 64M "$WORK/blktests.img"
    rpc bdev_aio_create "{\"name\":\"blktests\",\"filename\":\"$WORK/blktests.img\",\"block_size\":512}"
    rpc nvmf_subsystem_add_ns "{\"nqn\":\"$nqn\",\"namespace\":{\"nsid\":1,\"bdev_name\":\"blktests\",\"uuid\":\"$uuid\"}}"
    rpc nvmf_subsystem_add_host "{\"nqn\":\"$nqn\",\"host\":\"$host\"$fields}"
    echo "$host" >"$WORK/blktests-host"
    # Last, as blktests does with the kernel's target: a host that connects again and is refused
    # removes its controller.
    rpc nvmf_subsystem_add_listener \
        "{\"nqn\":\"$nqn\",\"listen_address\":{\"trtype\":\"$TRTYPE\",\"adrfam\":\"ipv4\",\"traddr\":\"$ADDR\",\"trsvcid\":\"$PORT\"}}"
}

cleanup() {
    subsystem_delete "$2"
    rpc bdev_aio_delete '{"name":"blktests"}'
    rm -f "$WORK/blktests.img" "$OFFERS"/*
}

keys() { # keys hostkey|ctrlkey KEY
    local field=dhchap_key
    [ "$1" = hostkey ] || field=dhchap_ctrlr_key
    # The other key stays.
    sed -i "/^$field=/d" "$WORK/blktests-fields"
    echo "$field=$(key "$2")" >>"$WORK/blktests-fields"
    rpc nvmf_subsystem_set_keys "{\"nqn\":\"$NQN\",\"host\":\"$(cat "$WORK/blktests-host")\",$(json_fields | paste -sd,)}"
}

# True if no queue pair of the host authenticates itself now. The controller's queue pair comes
# first, so that between two of them the number is no multiple of theirs.
no_authentication_runs() {
    local done queues
    done=$(rpc metrics_get '{"format":"text"}' | jq -r . |
        awk '$1 == "nacre_nvmf_authentications_total{result=\"succeeded\"}" {printf "%d", $2}')
    queues=$(cat /sys/class/nvme/*/queue_count | head -n 1)
    [ $((done % queues)) = 0 ]
}

# What hosts may use is chosen at the start of the daemon. A connected host connects again. The
# kernel's host never recovers if its connection ends while it authenticates an I/O queue again.
offer() { # offer FIELD WORD
    local variable ctrl fd
    mkdir -p "$OFFERS"
    # The daemon must not hold the pipes by which blktests reads the output of a test.
    for fd in /proc/$$/fd/*; do
        fd=${fd##*/}
        [ "$fd" -le 2 ] || eval "exec $fd>&-"
    done
    echo "$2" >"$OFFERS/$1"
    if [ -n "$(ctrl_of "$NQN")" ]; then
        wait_until 120 no_authentication_runs
        # The host still verifies the answers of the target.
        sleep 10
    fi
    nacre_kill
    for variable in "$OFFERS"/*; do
        export "NACRE_NVMF_$(basename "$variable" | tr '[:lower:]' '[:upper:]')=$(cat "$variable")"
    done
    nacre_start
    for ctrl in $(ctrl_of "$NQN"); do wait_until 180 is_live "$ctrl"; done
}

case $1 in
    config)
        case $2 in
            --show-blkdev-type) echo file ;;
            --show-trtype) echo "$TRTYPE" ;;
            --show-hostnqn) echo "$HOST_A" ;;
            --show-hostid) echo "$HOST_A_ID" ;;
            --show-host-traddr | --show-traddr) echo "$ADDR" ;;
            --show-trsvid) echo "$PORT" ;;
            --show-subsysnqn) echo "$NQN" ;;
            --show-subsys-uuid) echo "$UUID" ;;
            *) die "blktests asks for $2" ;;
        esac
        ;;
    setup | cleanup | keys | offer) "$@" >>"$WORK/blktests-target.log" 2>&1 ;;
    *) die "blktests calls $1" ;;
esac
