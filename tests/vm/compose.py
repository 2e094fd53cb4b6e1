#!/usr/bin/python3
"""Runs a compose file of deploy/ without containers: each service is a process with namespaces of its own.

    compose.py FILE NACRE FOLDER start SERVICE…     starts these services, waits for those that end by themselves
    compose.py FILE NACRE FOLDER stop SERVICE…      ends them as compose does; removes the networks of the file

A service gets the image's root (this machine's, read-only, with NACRE as `nacre`), its volumes (FOLDER/volumes), its
network (a network namespace with its address on a bridge, or the machine's), environment, capabilities and limits.
FOLDER/SERVICE.pid names its process, FOLDER/SERVICE.log has its output. `image`, `restart`, `depends_on` and
`security_opt` have no effect here; a key that this program does not know is an error.
"""

import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time

import yaml

FILE, NACRE, FOLDER, ACTION = pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]), sys.argv[4]
ENTRYPOINT = ["nacre"]
# What the image has of this machine's root.
ROOT = ["/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64"]
LIMITS = {"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE}
KNOWN = {
    "image", "command", "entrypoint", "restart", "stop_grace_period", "cap_add", "ulimits", "security_opt", "volumes",
    "networks", "network_mode", "depends_on", "environment", "devices",
}


def substituted(text):
    """`${NAME}` and `${NAME:?message}`, from the environment."""

    def value(found):
        name, _, message = found[1].partition(":?")
        if not os.environ.get(name):
            sys.exit(f"{name} {message or 'is not set'}")
        return os.environ[name]

    return re.sub(r"\$\{([^}]*)\}", value, text)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)


def bridge_of(network):
    """The bridge of a network of the file, which is created with its first service."""
    name = f"br-{network}"[:15]
    if not pathlib.Path(f"/sys/class/net/{name}").exists():
        ip("link", "add", name, "type", "bridge")
        ip("link", "set", name, "up")
    return name


def join(service, networks):
    """The network namespace of a service."""
    space = f"compose-{service}"
    ip("netns", "add", space)
    ip("-n", space, "link", "set", "lo", "up")
    for index, (network, options) in enumerate(networks.items()):
        length = file["networks"][network]["ipam"]["config"][0]["subnet"].split("/")[1]
        near, far = f"{service}-{index}"[-15:], f"eth{index}"
        # The kernel deletes the pair of a former namespace in the background.
        subprocess.run(["ip", "link", "delete", near], check=False, stderr=subprocess.DEVNULL)
        ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", space)
        ip("link", "set", near, "master", bridge_of(network), "up")
        ip("-n", space, "address", "add", f"{options['ipv4_address']}/{length}", "dev", far)
        ip("-n", space, "link", "set", far, "up")
    return ["ip", "netns", "exec", space]


def command(name, service, info):
    """The command line of a service. bwrap writes the process id of its child to the descriptor `info`."""
    unknown = set(service) - KNOWN
    if unknown:
        sys.exit(f"{FILE}: the test does not know {', '.join(sorted(unknown))} of {name}")
    line = []
    if service.get("network_mode") != "host":
        line = join(name, service["networks"])
    line += ["bwrap", "--info-fd", str(info), "--proc", "/proc", "--dev", "/dev", "--ro-bind", "/sys", "/sys", "--tmpfs", "/tmp"]
    for folder in ROOT:
        line += ["--ro-bind", folder, folder]
    line += ["--ro-bind", NACRE, "/opt/bin/nacre"]
    for device in service.get("devices", []):
        source, target = device.split(":")
        line += ["--dev-bind", source, target]
    for volume in service.get("volumes", []):
        source, target, *mode = volume.split(":")
        if source.startswith("."):
            place = (FILE.parent / source).resolve()
        else:
            place = FOLDER / "volumes" / source
            place.mkdir(parents=True, exist_ok=True)
        line += ["--ro-bind" if mode == ["ro"] else "--bind", str(place), target]
    line += ["--clearenv", "--setenv", "PATH", "/opt/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
    for key, value in service.get("environment", {}).items():
        line += ["--setenv", key, str(value)]
    line += ["--cap-drop", "ALL"]
    for capability in service.get("cap_add", []):
        line += ["--cap-add", f"CAP_{capability}"]
    return line + ["--"] + service.get("entrypoint", ENTRYPOINT) + service.get("command", [])


def start(name):
    service = file["services"][name]

    def limit():
        for key, value in service["ulimits"].items():
            value = resource.RLIM_INFINITY if value == -1 else value
            resource.setrlimit(LIMITS[key], (value, value))

    read, write = os.pipe()
    with (FOLDER / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command(name, service, write), stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=limit,
            start_new_session=True, pass_fds=[write],
        )
    os.close(write)
    with os.fdopen(read) as info:
        child = json.load(info)["child-pid"]
    (FOLDER / f"{name}.pid").write_text(f"{child}\n")
    return process


def stop(name):
    pid = int((FOLDER / f"{name}.pid").read_text())
    grace = int(file["services"][name].get("stop_grace_period", "10s").rstrip("s"))
    end = time.monotonic() + grace
    try:
        os.kill(pid, signal.SIGTERM)
        while time.monotonic() < end:
            os.kill(pid, 0)
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        sys.exit(f"{name} did not end within {grace} s")
    except ProcessLookupError:
        pass


file = yaml.safe_load(substituted(FILE.read_text()))
names = sys.argv[5:] or list(file["services"])
FOLDER.mkdir(exist_ok=True)
if ACTION == "start":
    processes = {name: start(name) for name in names}
    for name, process in processes.items():
        if "restart" not in file["services"][name] and process.wait() != 0:
            print((FOLDER / f"{name}.log").read_text())
            sys.exit(f"{name} ended with {process.returncode}")
else:
    for name in names:
        stop(name)
        if file["services"][name].get("network_mode") != "host":
            ip("netns", "delete", f"compose-{name}")
    for network in file.get("networks", {}):
        subprocess.run(["ip", "link", "delete", bridge_of(network)], check=True)
