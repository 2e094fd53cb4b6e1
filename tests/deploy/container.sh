#!/usr/bin/env bash
# Goal: the image of deploy/Containerfile builds, starts, serves and stops as
# docs/operate/install.md says, and the three nodes of deploy/compose.yml hold a volume. Method:
# podman and podman-compose, in namespaces of their own. The image for the compiler is a stand-in
# that has the given binary, and the base image comes from Debian's mirror, not from a registry.
#
#     unshare --mount --pid --fork --kill-child --mount-proc \
#         container.sh NACRE CACHE SCRATCH PODMAN_COMPOSE
#
# The second half runs in a network of its own. Containers have no groups of the kernel (cgroups)
# here, and limits that this machine cannot raise are left as they are. CACHE keeps the base image
# and the layer of Debian's packages.
set -u
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"

NACRE=$1
CACHE=$2
SCRATCH=$3
COMPOSE=$4
REPOSITORY=$(cd "$(dirname "$0")/../.." && pwd)
STORAGE=$CACHE/images
CONTAINERFILE=$REPOSITORY/deploy/Containerfile
# The Debian of the Containerfile's default base image.
SUITE=$(sed -n 's/^ARG BASE_IMAGE=debian:\(.*\)-slim$/\1/p' "$CONTAINERFILE")
VOLUME="$NQN:disk"

configure_podman() {
    local folder
    mkdir -p "$SCRATCH"
    # Podman keeps states in these folders, too: they are not for this machine's own podman.
    for folder in /run/libpod /run/crun /run/containers /dev/shm; do
        mkdir -p "$folder" && mount -t tmpfs podman "$folder"
    done
    cat >"$SCRATCH/storage.conf" <<CONF
[storage]
driver = "overlay"
graphroot = "$STORAGE"
runroot = "/run/containers/storage"
CONF
    cat >"$SCRATCH/containers.conf" <<CONF
[containers]
cgroups = "disabled"
default_ulimits = ["nofile=$(ulimit -Hn):$(ulimit -Hn)", "nproc=$(ulimit -Hu):$(ulimit -Hu)"]
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "crun"
CONF
    export CONTAINERS_STORAGE_CONF=$SCRATCH/storage.conf CONTAINERS_CONF=$SCRATCH/containers.conf
    # Old groups beside new ones are more than crun takes.
    umount -R /sys/fs/cgroup 2>/dev/null
    mount -t cgroup2 none /sys/fs/cgroup
}

# What a test that was interrupted left in the cache: containers keep their names.
remove_leftovers() {
    podman rm --all --force --time 0 && podman volume rm --all --force
}

# As Debian's slim image: without documents.
base_image() {
    podman image exists "localhost/debian:$SUITE" && return
    local tar=$SCRATCH/base.tar path exclude=()
    for path in doc info locale man; do exclude+=("--dpkgopt=path-exclude=/usr/share/$path/*"); done
    mmdebstrap --quiet --format=tar --variant=minbase "${exclude[@]}" "$SUITE" "$tar" http://deb.debian.org/debian &&
        podman import "$tar" "localhost/debian:$SUITE" && rm "$tar"
}

# An image whose `cargo build` yields the given binary.
stand_in() {
    local context=$SCRATCH/stand-in
    mkdir -p "$context"
    strip --strip-debug -o "$context/nacre" "$NACRE" || return
    cat >"$context/cargo" <<'CARGO'
#!/bin/sh
while [ "$1" != --profile ]; do shift; done
mkdir -p "target/$2" && cp /given/nacre "target/$2/nacre"
CARGO
    ln -sf /bin/true "$context/strip"
    chmod +x "$context/cargo"
    printf 'FROM localhost/debian:%s\nCOPY cargo /usr/local/bin/\nRUN ln -s /bin/true /usr/local/bin/strip\n' "$SUITE" >"$context/Containerfile"
    podman build --quiet --isolation chroot -t localhost/rust "$context"
}

build() {
    podman build --isolation chroot --network host --layers -t nacre -f "$CONTAINERFILE" \
        --build-arg RUST_IMAGE=localhost/rust --build-arg "BASE_IMAGE=localhost/debian:$SUITE" \
        --volume "$SCRATCH/stand-in:/given:ro" "$REPOSITORY"
}

property_is() { # property_is FORMAT VALUE
    local said
    said=$(podman image inspect --format "{{json .Config.$1}}" nacre)
    [ "$said" = "$2" ] || { echo "$1 is $said, not $2"; false; }
}

# True if a limit can be set to the value that the documents have.
can_set() { (ulimit "$1" "$2") 2>/dev/null; }

start() {
    local limit=()
    if can_set -l unlimited; then
        limit=(--ulimit memlock=-1)
    fi
    podman run --detach --name one --network host "${limit[@]}" --security-opt seccomp=unconfined \
        --volume nacre:/var/lib/nacre --cap-add IPC_LOCK --stop-timeout 45 nacre &&
        answers one
}
answers() { until_true 20 podman exec "$1" nacre rpc framework_wait_init; }
is_process_one() { [ "$(podman exec one sh -c 'tr "\0" " " </proc/1/cmdline; id -u')" = "nacre serve 0" ]; }
has_packages() { podman exec one sh -ec 'for file in libibverbs.so.1 librdmacm.so.1; do ldconfig -p | grep "$file"; done; for program in mkfs.ext4 mkfs.xfs mount; do command -v "$program"; done'; }
serves() {
    podman exec one nacre bdev create file disk /var/lib/nacre/disk.img --size 64MiB &&
        podman exec one nacre subsystem create "$VOLUME" --allow-any-host --namespace disk --listen tcp://127.0.0.1:4420
}
load() { "$NACRE" perf "tcp://127.0.0.1:4420/$VOLUME" --rw randwrite --verify --seconds 1; }
doctor_sees_a_container() { podman exec one nacre doctor | grep -q "container"; }
stops() { podman stop one && [ "$(podman inspect --format '{{.State.ExitCode}}' one)" = 0 ]; }
starts_again() { podman start one && answers one; }
removes() { podman rm one && podman volume rm nacre; }

compose() { timeout 120 "$COMPOSE" -p deploy -f "$SCRATCH/compose.yml" "$@"; }

# compose.yml, with the limits of this machine where it cannot raise them.
limited_compose_file() {
    local memlock=-1 nofile=65536 nproc
    can_set -l unlimited || memlock=$(($(ulimit -Hl) * 1024))
    can_set -n 65536 || nofile=$(ulimit -Hn)
    # podman would set a limit of its own, beyond this machine's.
    nproc=$(ulimit -Hu)
    [ "$nproc" != unlimited ] || nproc=-1
    cp "$REPOSITORY/deploy/compose-initiator.sh" "$SCRATCH/"
    sed "s/memlock: -1/memlock: $memlock/; s/nofile: 65536/nofile: $nofile\n    nproc: $nproc/" "$REPOSITORY/deploy/compose.yml" \
        >"$SCRATCH/compose.yml"
}
initiator_is_content() { [ "$(timeout 120 podman wait deploy_initiator_1)" = 0 ] || { podman logs deploy_initiator_1; false; }; }
volume_is() { podman exec deploy_node1_1 nacre volume list | grep -q "$1"; }
loses_a_node() { podman kill deploy_node2_1 && until_true 30 volume_is degraded; }

if [ "${5:-}" != run ]; then
    # One test at a time uses the cache.
    exec 9>"$CACHE/lock"
    flock 9
    configure_podman
    podman info >"$SAID" 2>&1 || {
        skip deploy-container "podman does not start here: $(tail -n 1 "$SAID")"
        finish
    }
    # A cache that a power cut damaged is made anew.
    remove_leftovers >/dev/null 2>&1 || rm -rf "$STORAGE"
    check "the base image" base_image
    check "the stand-in for the compiler" stand_in
    check "the image builds" build
    # Everything below needs it.
    [ "$FAILED" = 0 ] || finish
    podman image prune --force >/dev/null 2>&1
    check "its entry point is nacre" property_is Entrypoint '["nacre"]'
    check "its command is serve" property_is Cmd '["serve"]'
    check "it is stopped by SIGTERM" property_is StopSignal '"SIGTERM"'
    check "its state is a volume" property_is Volumes '{"/var/lib/nacre":{}}'
    check "its ports are data, discovery and metrics" property_is ExposedPorts '{"4420/tcp":{},"8009/tcp":{},"9464/tcp":{}}'
    echo "$PASSED passed, $FAILED failed" >"$SCRATCH/first"
    rm -f "$SAID"
    exec unshare --net "$0" "$@" run
fi

export CONTAINERS_STORAGE_CONF=$SCRATCH/storage.conf CONTAINERS_CONF=$SCRATCH/containers.conf
read -r PASSED _ FAILED _ <"$SCRATCH/first"
ip link set lo up
check "a container starts" start
check "nacre serve is its first process, as root" is_process_one
check "it has the libraries of RDMA and the programs of CSI" has_packages
check "it serves" serves
check "verified I/O" load
check "the doctor sees the container" doctor_sees_a_container
check "it stops cleanly" stops
check "it starts again" starts_again
check "its namespace is there" load
check "it stops cleanly again" stops
check "it is removed" removes

limited_compose_file
check "three nodes and a host start" compose up --detach
check "the host verified a volume of three replicas" initiator_is_content
check "the volume is healthy" volume_is healthy
check "the volume outlives a node" loses_a_node
check "the nodes and their data are removed" compose down --volumes
finish
