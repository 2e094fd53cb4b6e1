#!/usr/bin/env python3
"""Compares Nacre with SPDK's own target.

    compare.py --spdk DIR --nacre PATH [--part PART] [--verbose]

Starts SPDK's nvmf_tgt and Nacre under the name nvmf_tgt, each in a temporary directory, on RAM disks and loopback, and
runs five parts:

    calls      sends both the same calls: each method that both have, with good parameters, missing ones, wrong types,
               unknown fields, unknown objects and objects that exist; compares error codes and shapes of results
    config     loads in SPDK what Nacre exports, and in Nacre what SPDK saves
    discovery  connects SPDK's host to Nacre by discovery, and restarts Nacre under it
    hosts      connects spdk_nvme_perf under host names that are no valid NQNs
    keys       authenticates SPDK's hosts at Nacre, and Nacre at SPDK's target, with right and wrong keys

A difference that is intended stands in INTENDED with its reason; every other one is a failure. An entry of INTENDED that
matches nothing is a failure too. Only the standard library is needed.
"""

import argparse
import base64
import copy
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zlib

# (method, label, difference, reason): the first three are regular expressions for the whole text.
# "A, not B": Nacre's code is A, SPDK's B.
INTENDED = [
    (".*", ".* null", r"(answered .*|-\d+), not -32(602|603|700)", "null stands for a parameter that is left out"),
    ("nvmf_set_max_subsystems", "params null", "-32602, not answered true", "SPDK takes whatever it has then"),
    ("framework_wait_init|iobuf_get_stats|keyring_get_keys", "params {}|unknown zz", "-32602, not answered .*",
     "no method without parameters takes any"),
    ("nvmf_subsystem_add_host", "unknown zz", "-32602, not -32603", "a misspelt parameter is refused"),
    ("keyring_file_add_key", "unknown zz", "-32602, not -17", "a misspelt parameter is refused"),
    ("nvmf_discovery_add_referral", "unknown zz", "-32602, not answered true", "a misspelt parameter is refused"),
    ("spdk_get_version", "good", r"\.nacre is ours alone|\.fields\.commit is missing", "our own version"),
    ("framework_get_config", ".*", r"\[\]\.params\.\w+ is missing",
     "what has no effect here is not saved; the part `config` shows that it loads"),
    ("framework_get_reactors", "good", r"\.reactors\[\]\.(mode|sleep|sleeps|stalls) is ours alone", "our own counters"),
    ("thread_get_pollers", "good",
     r"\.threads\[\]\.active_pollers is not empty|\.threads\[\]\.timed_pollers is empty",
     "SPDK's pollers of a thread without work are timed; ours are not"),
    ("iobuf_get_stats", "good", r"\[\]\.\w+_pool\.(free|low_water) is ours alone", "our own counters"),
    ("accel_get_opc_assignments", "good", r"\.\w+ is missing", "operations that nothing here needs"),
    ("log_get_flags", "good", r"\.\w+ is (missing|ours alone)", "flags are parts of the program"),
    ("bdev_(malloc|null)_create", "dif_type = -1", "-32603, not -22", "it is no number of a type"),
    ("bdev_malloc_create", "block_size 0", "-22, not -12", "SPDK runs into a failed allocation"),
    ("bdev_aio_create", "without block_size", "-17, not -22", "a block size is found without being given"),
    ("bdev_get_bdevs", ".*", r"\[\]\.(numa_id|memory_domains) is missing", "optional; nothing here has them"),
    ("bdev_get_bdevs", ".*",
     r"\[\]\.driver_specific\.(nacre|volume|controller|losses|refused|state|nvme\[\]\.ns_data\.\w+) is ours alone",
     "our own facts about devices"),
    ("bdev_get_histogram(_borders)?", "not enabled", "-32603, not -12", "SPDK allocates a histogram of no size"),
    ("nvmf_create_subsystem", "nqn nqn.2026-13.*", "-32603, not answered true", "there is no month 13"),
    ("nvmf_subsystem_listener_set_ana_state", "without listen_address.trsvcid", "-32602, not -32603",
     "an address of TCP has a port"),
    ("nvmf_ns_add_host", "no NQN", "answered true, not -32602", "hosts in use have such names"),
    ("nvmf_subsystem_(add|remove)_host", "host (hostnqn|nqn.2014.*)", "answered true, not -32603",
     "hosts in use have such names"),
    ("nvmf_discovery_add_referral", "trtype zz", "-32602, not answered true",
     "SPDK takes it for a transport of the user's own"),
    ("nvmf_get_stats", ".*", r"\.listeners is ours alone", "our own counters"),
    ("bdev_nvme_set_options", "ctrlr_loss_timeout_sec = -1", "answered true, not -22",
     "a reconnect delay of 0 is a short one, not none"),
    ("bdev_nvme_set_options", "bdev_retry_count = -1", "-95, not answered true", "retries have an end"),
    ("bdev_nvme_attach_controller", "without trsvcid", "-17, not -5", "a target without a port is on 4420"),
    ("bdev_nvme_attach_controller", "without subnqn", "-17, not -114", "a subsystem must be named"),
    ("config", "spdk-to-nacre", r"\.bdevs\.EE_\w+\.uuid: .*", "SPDK saves none, and derives it in a way of its own"),
    ("config", "nacre-to-spdk", r"\.bdevs\.EE_\w+\.uuid: .*", "SPDK ignores the UUID of an error bdev"),
    ("config", "spdk-to-nacre", r"\.bdevs\.r\.num_blocks: 16384 became 14336", "a replica keeps its first MiB"),
    ("bdev_nvme_attach_controller", "name ", "-32602, not -17", "SPDK takes an empty name"),
    ("bdev_nvme_get_controllers", ".*", r"\[\]\.ctrlrs\[\]\.(bdevs|io_queues|connects|losses|away) is ours alone",
     "our own facts about controllers"),
    ("bdev_nvme_get_controller_health_info", "good", "-95, not answered .*", "drives have a health, remote controllers not"),
]

HOST = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555"
NQN = "nqn.2026-01.io.example:one"
OTHER = "nqn.2026-01.io.example:two"
UUID = "f81d4fae-7dec-41d0-a765-00a0c91e6bf6"
DISCOVERY = "nqn.2014-08.org.nvmexpress.discovery"
MIB = 1 << 20


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Daemon:
    """A target with its management socket."""

    def __init__(self, name, command, directory, env=None):
        self.name, self.command, self.env = name, command, env
        self.directory = directory
        self.socket = os.path.join(directory, "rpc.sock")
        self.port = self.peer_port = str(free_port())
        self.process = None
        self.stream = None
        os.makedirs(directory, exist_ok=True)

    def start(self, *arguments, ready=True):
        self.log = open(os.path.join(self.directory, "log"), "ab")
        self.process = subprocess.Popen(
            [*self.command, "-r", self.socket, *arguments], stdout=self.log, stderr=self.log, env=self.env,
            cwd=self.directory)
        end = time.monotonic() + 60
        while True:
            if self.process.poll() is not None:
                raise Failed(f"{self.name} did not start:\n{self.log_tail()}")
            try:
                self.connect()
                break
            except OSError:
                if time.monotonic() > end:
                    raise Failed(f"{self.name} does not answer:\n{self.log_tail()}") from None
                time.sleep(0.05)
        if ready:
            self.call("framework_wait_init")
        return self

    def connect(self):
        self.stream = socket.socket(socket.AF_UNIX)
        self.stream.settimeout(60)
        self.stream.connect(self.socket)
        self.buffer = ""

    def log_tail(self):
        with open(os.path.join(self.directory, "log"), errors="replace") as log:
            return "".join(log.readlines()[-15:])

    def place(self, value):
        """The value with this daemon's port and directory, and the other's port, in place of @PORT@, @DIR@, @PEER@."""
        if isinstance(value, str):
            for name, own in [("@PORT@", self.port), ("@DIR@", self.directory), ("@PEER@", self.peer_port)]:
                value = value.replace(name, own)
            return value
        if isinstance(value, list):
            return [self.place(v) for v in value]
        if isinstance(value, dict):
            return {k: self.place(v) for k, v in value.items()}
        return value

    def send(self, method, params=Ellipsis):
        """The whole answer. Without params the request has no such member."""
        request = {"jsonrpc": "2.0", "id": 1, "method": method}
        if params is not Ellipsis:
            request["params"] = self.place(params)
        self.stream.sendall(json.dumps(request).encode())
        while True:
            try:
                answer, end = json.JSONDecoder().raw_decode(self.buffer.lstrip())
                self.buffer = self.buffer.lstrip()[end:]
                return answer
            except ValueError:
                data = self.stream.recv(1 << 20)
                if not data:
                    raise Failed(f"{self.name} closed the connection at {method} {params}:\n{self.log_tail()}") from None
                self.buffer += data.decode()

    def call(self, method, params=Ellipsis):
        answer = self.send(method, params)
        if "error" in answer:
            raise Failed(f"{self.name}: {method} {params}: {answer['error']}\n{self.log_tail()}")
        return answer["result"]

    def stop(self, kill=False):
        if self.process is None:
            return
        if self.stream is not None:
            self.stream.close()
        if self.process.poll() is None:
            self.process.kill() if kill else self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None
        self.log.close()


class Failed(Exception):
    pass


class Report:
    """Counts checks and collects failures."""

    def __init__(self, verbose):
        self.verbose = verbose
        self.passed = 0
        self.failures = []
        self.used = set()

    def check(self, what, ok, detail=""):
        if ok:
            self.passed += 1
            if self.verbose:
                print(f"ok: {what}")
        else:
            self.failures.append(what)
            print(f"FAILED: {what}{': ' if detail else ''}{detail}", flush=True)

    def intended(self, method, label, difference):
        for at, (m, l, d, _) in enumerate(INTENDED):
            if re.fullmatch(m, method) and re.fullmatch(l, label) and re.fullmatch(d, difference, re.S):
                self.used.add(at)
                return True
        return False


# ---- calls ---------------------------------------------------------------------------------------


def kind(value):
    """The JSON type."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(value)]


def merge(values):
    """One value that has every key of the values: the shape of a list's elements."""
    objects = [v for v in values if isinstance(v, dict)]
    if len(objects) < len(values) or not objects:
        return values[0] if values else None
    merged = {}
    for key in {k: None for o in objects for k in o}:
        merged[key] = merge([o[key] for o in objects if key in o])
    return merged


def compare(theirs, ours, path=""):
    """Differences in shape between two results, as texts."""
    if kind(theirs) != kind(ours):
        return [f"{path or '.'} is {kind(ours)}, not {kind(theirs)}"]
    if isinstance(theirs, list):
        if bool(theirs) != bool(ours):
            return [f"{path or '.'} is {'not ' if ours else ''}empty"]
        return compare(merge(theirs), merge(ours), f"{path}[]") if theirs else []
    if isinstance(theirs, dict):
        found = [f"{path}.{key} is missing" for key in theirs if key not in ours]
        found += [f"{path}.{key} is ours alone" for key in ours if key not in theirs]
        for key in theirs:
            if key in ours:
                found += compare(theirs[key], ours[key], f"{path}.{key}")
        return found
    return []


def mutations(params):
    """Parameters with one thing wrong each, with a label."""
    wrong = {"string": [7], "number": ["seven", -1, 1.5], "boolean": ["yes"], "array": ["x", [7]], "object": [7]}

    def at(path, value):
        changed = copy.deepcopy(params)
        where = changed
        for key in path[:-1]:
            where = where[key]
        if value is Ellipsis:
            del where[path[-1]]
        else:
            where[path[-1]] = value
        return changed

    def walk(value, path):
        for key, inner in value.items():
            here = [*path, key]
            name = ".".join(here)
            yield f"without {name}", at(here, Ellipsis)
            yield f"{name} null", at(here, None)
            for other in wrong[kind(inner)]:
                if kind(inner) == "array" and other == [7] and inner and kind(inner[0]) == "number":
                    continue
                yield f"{name} = {json.dumps(other)}", at(here, other)
            if isinstance(inner, dict):
                yield from walk(inner, here)
                yield f"unknown {name}.zz", at([*here, "zz"], 1)

    yield "params []", []
    yield "params null", None
    yield "unknown zz", {**params, "zz": 1}
    yield from walk(params, [])


class Calls:
    """Sends both daemons the same calls."""

    def __init__(self, report, spdk, nacre):
        self.report, self.spdk, self.nacre = report, spdk, nacre
        self.both = [spdk, nacre]
        self.called = set()
        self.count = 0

    def send(self, method, params=Ellipsis, label="good"):
        """One call of both, compared. Returns both answers."""
        self.count += 1
        self.called.add(method)
        theirs = self.spdk.send(method, params)
        ours = self.nacre.send(method, params)
        if "error" in theirs or "error" in ours:
            codes = [a["error"]["code"] if "error" in a else f"answered {json.dumps(a['result'])[:60]}"
                     for a in (theirs, ours)]
            found = [] if codes[0] == codes[1] else [f"{codes[1]}, not {codes[0]}"]
        else:
            found = compare(theirs["result"], ours["result"])
        found = [d for d in found if not self.report.intended(method, label, d)]
        text = "no params" if params is Ellipsis else json.dumps(params)
        detail = ""
        if found:
            detail = "; ".join(found) + f"  ({text}; SPDK {short(theirs)}; Nacre {short(ours)})"
        self.report.check(f"{method}, {label}", not found, detail)
        return theirs, ours

    def good(self, method, params=Ellipsis):
        """A call that both must answer."""
        answers = self.send(method, params)
        for daemon, answer in zip(self.both, answers):
            if "error" in answer:
                self.report.check(f"{method} is good parameters for {daemon.name}", False, json.dumps(answer["error"]))
        return answers

    def bad(self, method, params, optional=()):
        """Without one of the optional fields the call would be good."""
        left_out = [text for field in optional for text in [f"without {field}", f"{field} null"]]
        for label, mutated in mutations(params):
            if label not in left_out:
                self.send(method, mutated, label)

    def make(self, method, params, again=True):
        """Creates an object, creates it again, and then tries wrong parameters: whatever gets past the decoder meets
        the object that exists."""
        self.good(method, params)
        if again:
            self.send(method, params, "again")
        self.bad(method, params)

    def change(self, method, params, optional=()):
        """Wrong parameters first, then the good ones."""
        self.bad(method, params, optional)
        self.good(method, params)

    def remove(self, method, params, optional=()):
        self.change(method, params, optional)
        self.send(method, params, "again")

    def ask(self, method, params=None):
        """A question, with optional parameters."""
        self.good(method)
        if params is None:
            self.send(method, {}, "params {}")
            self.send(method, {"zz": 1}, "unknown zz")
        else:
            self.change(method, params)


def short(answer):
    text = json.dumps(answer.get("error", answer.get("result")))
    return text if len(text) < 300 else text[:300] + "..."


def startup_calls(t):
    """What may be called before the start only."""
    both = set.intersection(*(set(d.call("rpc_get_methods")) for d in t.both))
    t.ask("rpc_get_methods", {"current": True, "include_aliases": False})
    t.ask("spdk_get_version")
    t.send("nvmf_get_subsystems", Ellipsis, "too early")
    t.send("bdev_get_bdevs", Ellipsis, "too early")
    t.change("iobuf_set_options", {"small_pool_count": 8192, "large_pool_count": 1024, "small_bufsize": 8192,
                                   "large_bufsize": 135168, "enable_numa": False})
    t.send("iobuf_set_options", {"small_pool_count": 1}, "too small")
    t.change("bdev_set_options", {"bdev_io_pool_size": 65535, "bdev_io_cache_size": 256, "bdev_auto_examine": True,
                                  "iobuf_small_cache_size": 128, "iobuf_large_cache_size": 16})
    t.send("bdev_set_options", {"bdev_io_pool_size": 1}, "too small")
    t.change("accel_set_options", {"small_cache_size": 128, "large_cache_size": 16, "task_count": 2048,
                                   "sequence_count": 2048, "buf_count": 2048})
    t.change("sock_set_default_impl", {"impl_name": "posix"})
    t.send("sock_set_default_impl", {"impl_name": "zz"}, "unknown object")
    t.change("sock_impl_get_options", {"impl_name": "posix"})
    t.send("sock_impl_get_options", {"impl_name": "zz"}, "unknown object")
    t.change("sock_impl_set_options", {
        "impl_name": "posix", "recv_buf_size": 2097152, "send_buf_size": 2097152, "enable_recv_pipe": True,
        "enable_quickack": False, "enable_placement_id": 0, "enable_zerocopy_send_server": True,
        "enable_zerocopy_send_client": False, "zerocopy_threshold": 0, "tls_version": 0, "enable_ktls": False})
    t.send("sock_impl_set_options", {"impl_name": "zz"}, "unknown object")
    t.ask("sock_get_default_impl")
    t.change("nvmf_set_max_subsystems", {"max_subsystems": 1024})
    t.send("nvmf_set_max_subsystems", {"max_subsystems": 1024}, "again")
    t.change("nvmf_set_crdt", {"crdt1": 0, "crdt2": 0, "crdt3": 0})
    t.change("nvmf_set_config", {
        "admin_cmd_passthru": {"identify_ctrlr": False}, "discovery_filters": ["transport"],
        "dhchap_digests": ["sha256"], "dhchap_dhgroups": ["null"], "dup_host_policy": "allow"})
    t.change("framework_set_scheduler", {"name": "static"})
    t.send("framework_set_scheduler", {"name": "zz"}, "unknown object")
    t.send("framework_get_scheduler", Ellipsis)
    t.good("framework_start_init")
    t.send("framework_start_init", Ellipsis, "again")
    t.ask("framework_wait_init")
    t.send("nvmf_set_crdt", {"crdt1": 0}, "too late")
    t.send("iobuf_set_options", {"small_pool_count": 8192}, "too late")
    return both


def framework_calls(t):
    t.ask("rpc_get_methods", {"current": True, "include_aliases": False})
    t.ask("framework_get_subsystems")
    for name in ["bdev", "nvmf", "sock", "iobuf"]:
        t.send("framework_get_config", {"name": name, "with_batches": False}, f"name {name}")
    t.change("framework_get_config", {"name": "sock", "with_batches": False})
    t.send("framework_get_config", {"name": "zz"}, "unknown object")
    for method in ["framework_get_reactors", "framework_get_scheduler", "framework_get_governor", "thread_get_stats",
                   "thread_get_pollers", "thread_get_io_channels", "iobuf_get_stats", "notify_get_types",
                   "accel_get_module_info", "accel_get_opc_assignments", "log_get_level", "log_get_print_level",
                   "log_get_flags", "bdev_wait_for_examine", "nvmf_get_targets"]:
        t.ask(method)
    for method in ["log_set_level", "log_set_print_level"]:
        t.change(method, {"level": "NOTICE"})
        t.send(method, {"level": "LOUD"}, "unknown object")
    for method in ["log_set_flag", "log_clear_flag"]:
        t.change(method, {"flag": "nvmf"})
        t.send(method, {"flag": "zz"}, "unknown object")
    t.change("log_enable_timestamps", {"enabled": True})


def bdev_calls(t):
    malloc = {"name": "m", "num_blocks": 16384, "block_size": 512, "physical_block_size": 512, "uuid": UUID,
              "optimal_io_boundary": 0, "md_size": 0, "md_interleave": False, "dif_type": 0,
              "dif_is_head_of_md": False, "dif_pi_format": 0, "numa_id": -1}
    t.make("bdev_malloc_create", malloc)
    for daemon in t.both:
        # One without a name may have been made.
        if "error" not in daemon.send("bdev_get_bdevs", {"name": "Malloc0"}):
            daemon.send("bdev_malloc_delete", {"name": "Malloc0"})
    for field, value in [("block_size", 500), ("block_size", 0), ("num_blocks", 0), ("uuid", "zz"),
                         ("physical_block_size", 500), ("name", ""), ("uuid", UUID)]:
        t.send("bdev_malloc_create", {"name": "m9", "num_blocks": 2048, "block_size": 512, field: value},
               f"{field} {value}")
    for name in ["m1", "m2", "m3"]:
        t.good("bdev_malloc_create", {"name": name, "num_blocks": 16384, "block_size": 512})
    null = {"name": "n", "num_blocks": 16384, "block_size": 512, "uuid": "f81d4fae-7dec-41d0-a765-00a0c91e6bf7",
            "physical_block_size": 512, "md_size": 0, "dif_type": 0, "dif_pi_format": 0, "dif_is_head_of_md": False,
            "preferred_write_granularity": 0, "preferred_write_alignment": 0, "optimal_write_size": 0,
            "preferred_unmap_granularity": 0, "preferred_unmap_alignment": 0}
    t.make("bdev_null_create", null)
    for field, value in [("block_size", 500), ("block_size", 0), ("num_blocks", 0), ("uuid", "zz"), ("name", ""),
                         ("physical_block_size", 500)]:
        t.send("bdev_null_create", {"name": "n9", "num_blocks": 2048, "block_size": 512, field: value},
               f"{field} {value}")
    t.change("bdev_null_resize", {"name": "n", "new_size": 16})
    t.send("bdev_null_resize", {"name": "n", "new_size": 1}, "smaller")
    t.send("bdev_null_resize", {"name": "zz", "new_size": 16}, "unknown object")
    t.send("bdev_null_resize", {"name": "m", "new_size": 16}, "other kind")
    for daemon in t.both:
        for file in ["aio", "aio2", "uring"]:
            with open(os.path.join(daemon.directory, file), "wb") as f:
                f.truncate(8 * MIB)
    aio = {"name": "a", "filename": "@DIR@/aio", "block_size": 512, "readonly": False, "fallocate": False,
           "uuid": "f81d4fae-7dec-41d0-a765-00a0c91e6bf8", "nowait": False}
    t.make("bdev_aio_create", aio)
    for field, value in [("filename", "@DIR@/none"), ("filename", ""), ("block_size", 500), ("name", ""),
                         ("uuid", "zz")]:
        t.send("bdev_aio_create", {"name": "a9", "filename": "@DIR@/aio2", "block_size": 512, field: value},
               f"{field} {value}")
    for kind_, maker in [("aio", {"name": "a"}), ("uring", {"name": "u"})]:
        if f"bdev_{kind_}_create" not in t.shared:
            continue
        if kind_ == "uring":
            t.make("bdev_uring_create", {"filename": "@DIR@/uring", "name": "u", "block_size": 512,
                                         "uuid": "f81d4fae-7dec-41d0-a765-00a0c91e6bf9"})
            t.send("bdev_uring_create", {"filename": "@DIR@/none", "name": "u9", "block_size": 512}, "no file")
        t.change(f"bdev_{kind_}_rescan", maker)
        t.send(f"bdev_{kind_}_rescan", {"name": "zz"}, "unknown object")
        t.send(f"bdev_{kind_}_rescan", {"name": "m"}, "other kind")
    stacked_calls(t)
    t.ask("bdev_get_bdevs", {"name": "m", "timeout": 0})
    t.send("bdev_get_bdevs", {"name": "zz"}, "unknown object")
    t.send("bdev_get_bdevs", {"name": "zz", "timeout": 50}, "late object")
    t.send("bdev_get_bdevs", {"name": UUID}, "by UUID")
    t.ask("bdev_get_iostat", {"names": ["m"], "per_channel": False, "reset_mode": "none"})
    t.send("bdev_get_iostat", {"names": ["zz"]}, "unknown object")
    t.send("bdev_get_iostat", {"names": ["m"], "per_channel": True}, "per channel")
    t.send("bdev_get_iostat", {"per_channel": True}, "per channel of all")
    t.send("bdev_get_iostat", {"names": ["m", "n"], "per_channel": True}, "per channel of two")
    t.send("bdev_get_iostat", {"names": ["m"], "reset_mode": "zz"}, "unknown mode")
    t.ask("bdev_reset_iostat", {"name": "m", "mode": "all"})
    t.send("bdev_reset_iostat", {"name": "zz"}, "unknown object")
    t.send("bdev_reset_iostat", {"name": "m", "mode": "zz"}, "unknown mode")
    # SPDK sets the limits of a device only once: a device of its own, and one good call.
    limits = ["rw_ios_per_sec", "rw_mbytes_per_sec", "r_mbytes_per_sec", "w_mbytes_per_sec"]
    t.good("bdev_malloc_create", {"name": "q", "num_blocks": 2048, "block_size": 512})
    t.change("bdev_set_qos_limit", {"name": "q", **dict.fromkeys(limits, 20000)}, limits)
    t.send("bdev_set_qos_limit", {"name": "zz", "rw_ios_per_sec": 20000}, "unknown object")
    t.send("bdev_set_qos_limit", {"name": "m"}, "no limit")
    t.send("bdev_get_bdevs", {"name": "q"}, "limited")
    t.change("bdev_set_qd_sampling_period", {"name": "m", "period": 10000})
    t.send("bdev_set_qd_sampling_period", {"name": "zz", "period": 10000}, "unknown object")
    t.send("bdev_get_iostat", {"names": ["m"]}, "sampled")
    t.good("bdev_set_qd_sampling_period", {"name": "m", "period": 0})
    t.send("bdev_get_histogram", {"name": "m"}, "not enabled")
    t.send("bdev_get_histogram_borders", {"name": "m", "borders": [10, 100]}, "not enabled")
    t.change("bdev_enable_histogram", {"name": "m", "enable": True, "opc": "read", "granularity": 7,
                                       "min_nsec": 1000, "max_nsec": 1000000})
    t.send("bdev_enable_histogram", {"name": "m", "enable": True, "opc": "zz"}, "unknown operation")
    t.send("bdev_enable_histogram", {"name": "zz", "enable": True}, "unknown object")
    t.change("bdev_get_histogram", {"name": "m"})
    t.send("bdev_get_histogram", {"name": "zz"}, "unknown object")
    t.change("bdev_get_histogram_borders", {"name": "m", "borders": [10, 100]})
    t.send("bdev_get_histogram_borders", {"name": "zz", "borders": [10, 100]}, "unknown object")
    t.good("bdev_enable_histogram", {"name": "m", "enable": False})
    t.bad("bdev_examine", {"name": "m"})
    t.send("bdev_examine", {"name": "m"}, "examined by itself")
    t.send("bdev_examine", {"name": "zz"}, "unknown object")
    t.ask("notify_get_notifications", {"id": 0, "max": 10})
    t.send("notify_get_notifications", {"id": 100000}, "beyond the last")


def stacked_calls(t):
    delay = {"name": "d", "base_bdev_name": "m1", "avg_read_latency": 1, "p99_read_latency": 1,
             "avg_write_latency": 1, "p99_write_latency": 1, "uuid": "f81d4fae-7dec-41d0-a765-00a0c91e6b01"}
    t.make("bdev_delay_create", delay)
    t.send("bdev_delay_create", {**delay, "name": "d9", "uuid": "f81d4fae-7dec-41d0-a765-00a0c91e6b99"}, "base in use")
    t.change("bdev_delay_update_latency", {"delay_bdev_name": "d", "latency_type": "avg_read", "latency_us": 2})
    t.send("bdev_delay_update_latency", {"delay_bdev_name": "zz", "latency_type": "avg_read", "latency_us": 2},
           "unknown object")
    t.send("bdev_delay_update_latency", {"delay_bdev_name": "m", "latency_type": "avg_read", "latency_us": 2},
           "other kind")
    t.send("bdev_delay_update_latency", {"delay_bdev_name": "d", "latency_type": "zz", "latency_us": 2},
           "unknown type")
    passthru = {"name": "p", "base_bdev_name": "d", "uuid": "f81d4fae-7dec-41d0-a765-00a0c91e6b02"}
    t.make("bdev_passthru_create", passthru)
    t.send("bdev_passthru_create", {"name": "p9", "base_bdev_name": "d"}, "base in use")
    t.good("bdev_malloc_create", {"name": "s", "num_blocks": 16384, "block_size": 512})
    t.make("bdev_split_create", {"base_bdev": "s", "split_count": 4, "split_size_mb": 1})
    t.send("bdev_get_bdevs", {"name": "sp3"}, "a part")
    t.make("bdev_error_create", {"base_name": "m2", "uuid": "f81d4fae-7dec-41d0-a765-00a0c91e6b03"})
    inject = {"name": "EE_m2", "io_type": "read", "error_type": "failure", "num": 1, "queue_depth": 0,
              "corrupt_offset": 0, "corrupt_value": 0, "nvme_sct": 0, "nvme_sc": 0}
    t.change("bdev_error_inject_error", inject)
    for field, value in [("name", "zz"), ("name", "m"), ("io_type", "zz"), ("error_type", "zz"), ("nvme_sct", 1),
                         ("error_type", "nvme_failure"), ("error_type", "corrupt_data"), ("io_type", "clear")]:
        t.send("bdev_error_inject_error", {**inject, field: value}, f"{field} {value}")
    t.change("bdev_error_resume_pending", {"name": "EE_m2"})
    t.send("bdev_error_resume_pending", {"name": "zz"}, "unknown object")
    t.send("bdev_error_resume_pending", {"name": "m"}, "other kind")
    for daemon in t.both:
        for name in ["r1", "r2", "r3"]:
            daemon.call("bdev_malloc_create", {"name": name, "num_blocks": 16384, "block_size": 512})
    raid = {"name": "r", "raid_level": "raid1", "base_bdevs": ["r1", "r2"], "superblock": True,
            "uuid": "f81d4fae-7dec-41d0-a765-00a0c91e6b04"}
    t.make("bdev_raid_create", raid)
    for field, value in [("raid_level", "raid7"), ("base_bdevs", []), ("base_bdevs", ["r3"]), ("name", ""),
                         ("base_bdevs", [""]), ("strip_size_kb", 4)]:
        t.send("bdev_raid_create", {"name": "r9", "raid_level": "raid1", "base_bdevs": ["r3", "m3"], field: value},
               f"{field} {value}")
        for daemon in t.both:
            daemon.send("bdev_raid_delete", {"name": "r9"})
    t.change("bdev_raid_get_bdevs", {"category": "all"})
    for category in ["online", "configuring", "offline", "zz"]:
        t.send("bdev_raid_get_bdevs", {"category": category}, f"category {category}")
    t.change("bdev_raid_set_options", {"process_window_size_kb": 1024, "process_max_bandwidth_mb_sec": 0})
    t.send("bdev_raid_set_options", {"process_window_size_kb": 0}, "no window")
    t.send("bdev_raid_remove_base_bdev", {"name": "zz"}, "unknown object")
    t.send("bdev_raid_remove_base_bdev", {"name": "m"}, "other kind")
    t.change("bdev_raid_remove_base_bdev", {"name": "r2"})
    time.sleep(0.5)
    t.send("bdev_raid_add_base_bdev", {"raid_bdev": "zz", "base_bdev": "r3"}, "unknown object")
    t.send("bdev_raid_add_base_bdev", {"raid_bdev": "r", "base_bdev": "r1"}, "base in use")
    t.change("bdev_raid_add_base_bdev", {"raid_bdev": "r", "base_bdev": "r3"})
    time.sleep(1)
    t.send("bdev_raid_get_bdevs", {"category": "all"}, "again whole")


def bdev_removals(t):
    t.remove("bdev_raid_delete", {"name": "r"})
    t.send("bdev_split_delete", {"base_bdev": "zz"}, "unknown object")
    t.remove("bdev_split_delete", {"base_bdev": "s"})
    t.send("bdev_get_bdevs", {"name": "sp3"}, "a part that is gone")
    for method, name in [("passthru", "p"), ("delay", "d"), ("error", "EE_m2"), ("aio", "a"), ("uring", "u"),
                         ("null", "n"), ("malloc", "m3")]:
        if f"bdev_{method}_delete" not in t.shared:
            continue
        t.send(f"bdev_{method}_delete", {"name": "zz"}, "unknown object")
        t.send(f"bdev_{method}_delete", {"name": "m" if method != "malloc" else "n"}, "other kind")
        t.remove(f"bdev_{method}_delete", {"name": name})
    t.send("bdev_delay_create", {"name": "later", "base_bdev_name": "m7", "avg_read_latency": 1,
                                 "p99_read_latency": 1, "avg_write_latency": 1, "p99_write_latency": 1},
           "no base yet")
    t.send("bdev_passthru_create", {"name": "later2", "base_bdev_name": "later"}, "no base yet")
    t.good("bdev_malloc_create", {"name": "m7", "num_blocks": 16384, "block_size": 512})
    time.sleep(0.3)
    t.send("bdev_get_bdevs", {"name": "later2"}, "came with its base")
    t.good("bdev_malloc_delete", {"name": "m7"})


def address(port="@PORT@", **other):
    return {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port, **other}


def nvmf_calls(t):
    # rpc.py sends all of these flags.
    transport = {"trtype": "TCP", "max_queue_depth": 128, "max_io_qpairs_per_ctrlr": 127, "in_capsule_data_size": 4096,
                 "max_io_size": 131072, "io_unit_size": 131072, "max_aq_depth": 128, "num_shared_buffers": 511,
                 "iobuf_small_cache_size": 32, "iobuf_large_cache_size": 16, "dif_insert_or_strip": False,
                 "zcopy": False, "c2h_success": True, "sock_priority": 0, "abort_timeout_sec": 1, "no_srq": False,
                 "no_wr_batching": False, "disable_mappable_bar0": False, "disable_adaptive_irq": False,
                 "disable_shadow_doorbells": False, "disable_command_passthru": False, "kas": 100, "min_kato": 10000,
                 "ack_timeout": 0, "data_wr_pool_size": 0, "control_msg_num": 32, "acceptor_poll_rate": 10000}
    t.send("nvmf_get_transports", {"trtype": "TCP"}, "unknown object")
    t.send("nvmf_create_transport", {"trtype": "zz"}, "unknown type")
    t.send("nvmf_create_transport", {"trtype": "TCP", "tgt_name": "zz"}, "unknown target")
    t.make("nvmf_create_transport", transport)
    t.ask("nvmf_get_transports", {"trtype": "TCP", "tgt_name": "nvmf_tgt"})
    t.send("nvmf_get_transports", {"tgt_name": "zz"}, "unknown target")
    t.send("nvmf_get_transports", {"trtype": "RDMA"}, "unknown object")
    subsystem = {"nqn": NQN, "serial_number": "SPDK0", "model_number": "M", "max_namespaces": 8,
                 "allow_any_host": False, "ana_reporting": True, "min_cntlid": 1, "max_cntlid": 65519,
                 "passthrough": False, "enable_nssr": False}
    t.make("nvmf_create_subsystem", subsystem)
    for field, value in [("nqn", "zz"), ("nqn", "nqn.2026-13.io.example:x"), ("nqn", ""), ("serial_number", "x" * 21),
                         ("model_number", "x" * 41), ("serial_number", "\u00e9"), ("min_cntlid", 0),
                         ("max_cntlid", 65535), ("tgt_name", "zz"), ("nqn", DISCOVERY)]:
        t.send("nvmf_create_subsystem", {"nqn": OTHER, field: value}, f"{field} {value}")
    t.spdk.send("nvmf_delete_subsystem", {"nqn": "nqn.2026-13.io.example:x"})
    t.good("nvmf_create_subsystem", {"nqn": OTHER, "allow_any_host": True})
    t.ask("nvmf_get_subsystems", {"nqn": NQN, "tgt_name": "nvmf_tgt"})
    of_nqn = [
        ("nvmf_get_subsystems", {"nqn": NQN}), ("nvmf_delete_subsystem", {"nqn": NQN}),
        ("nvmf_subsystem_add_listener", {"nqn": NQN, "listen_address": address()}),
        ("nvmf_subsystem_remove_listener", {"nqn": NQN, "listen_address": address()}),
        ("nvmf_subsystem_listener_set_ana_state", {"nqn": NQN, "listen_address": address(), "ana_state": "optimized"}),
        ("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "m1"}}),
        ("nvmf_subsystem_remove_ns", {"nqn": NQN, "nsid": 1}),
        ("nvmf_subsystem_set_ns_ana_group", {"nqn": NQN, "nsid": 1, "anagrpid": 1}),
        ("nvmf_ns_add_host", {"nqn": NQN, "nsid": 1, "host": HOST}),
        ("nvmf_ns_remove_host", {"nqn": NQN, "nsid": 1, "host": HOST}),
        ("nvmf_subsystem_add_host", {"nqn": NQN, "host": HOST}),
        ("nvmf_subsystem_remove_host", {"nqn": NQN, "host": HOST}),
        ("nvmf_subsystem_set_keys", {"nqn": NQN, "host": HOST}),
        ("nvmf_subsystem_allow_any_host", {"nqn": NQN, "allow_any_host": True}),
        ("nvmf_subsystem_get_controllers", {"nqn": NQN}), ("nvmf_subsystem_get_qpairs", {"nqn": NQN}),
        ("nvmf_subsystem_get_listeners", {"nqn": NQN}),
    ]
    for method, params in of_nqn:
        t.send(method, {**params, "nqn": "nqn.2026-01.io.example:none"}, "unknown object")
        t.send(method, {**params, "nqn": "zz"}, "no NQN")
        t.send(method, {**params, "tgt_name": "zz"}, "unknown target")
    listen = {"nqn": NQN, "listen_address": address(), "secure_channel": False, "ana_state": "optimized"}
    t.make("nvmf_subsystem_add_listener", listen)
    for field, value in [("trtype", "zz"), ("trtype", "RDMA"), ("adrfam", "zz"), ("adrfam", "IPv6"),
                         ("traddr", "zz"), ("traddr", "192.0.2.1"), ("trsvcid", "zz"), ("trsvcid", "65536"),
                         ("trsvcid", "")]:
        t.send("nvmf_subsystem_add_listener", {"nqn": OTHER, "listen_address": {**address(), field: value}},
               f"{field} {value}")
    t.send("nvmf_subsystem_add_listener", {**listen, "ana_state": "zz"}, "unknown state")
    t.good("nvmf_subsystem_add_listener", {"nqn": OTHER, "listen_address": address()})
    t.good("nvmf_subsystem_add_listener", {"nqn": DISCOVERY, "listen_address": address()})
    t.change("nvmf_subsystem_listener_set_ana_state",
             {"nqn": NQN, "listen_address": address(), "ana_state": "non_optimized", "anagrpid": 1})
    t.send("nvmf_subsystem_listener_set_ana_state",
           {"nqn": NQN, "listen_address": address("1"), "ana_state": "optimized"}, "unknown listener")
    t.send("nvmf_subsystem_listener_set_ana_state",
           {"nqn": NQN, "listen_address": address(), "ana_state": "zz"}, "unknown state")
    t.send("nvmf_subsystem_listener_set_ana_state",
           {"nqn": NQN, "listen_address": address(), "ana_state": "optimized", "anagrpid": 99}, "unknown group")
    t.send("nvmf_subsystem_listener_set_ana_state",
           {"nqn": OTHER, "listen_address": address(), "ana_state": "inaccessible"}, "without ANA")
    t.change("nvmf_subsystem_get_listeners", {"nqn": NQN})
    namespace_calls(t)
    host_calls(t)
    t.ask("nvmf_get_subsystems")
    t.send("nvmf_get_stats", {"tgt_name": "zz"}, "unknown target")
    t.ask("nvmf_get_stats", {"tgt_name": "nvmf_tgt"})
    referral_calls(t)
    t.send("nvmf_create_target", {"name": "nvmf_tgt"}, "again")
    t.bad("nvmf_create_target", {"name": "nvmf_tgt"})
    t.bad("nvmf_delete_target", {"name": "zz"})
    t.send("nvmf_delete_target", {"name": "zz"}, "unknown object")
    for method in ["nvmf_publish_mdns_prr", "nvmf_stop_mdns_prr"]:
        if method in t.shared:
            t.send(method, {"tgt_name": "zz"}, "unknown target")
            t.send(method, {"zz": 1}, "unknown zz")


def namespace_calls(t):
    namespace = {"nsid": 1, "bdev_name": "m1", "nguid": "0123456789ABCDEF0123456789ABCDEF",
                 "eui64": "0123456789ABCDEF", "uuid": "f81d4fae-7dec-41d0-a765-00a0c91e6b05", "anagrpid": 1,
                 "no_auto_visible": True, "hide_metadata": False}
    # m1 is below d and m2 below EE_m2: both are claimed.
    t.send("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": namespace}, "device in use")
    namespace["bdev_name"] = "m"
    t.make("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": namespace})
    for field, value in [("bdev_name", "zz"), ("nguid", "zz"), ("eui64", "zz"), ("uuid", "zz"), ("nsid", 9),
                         ("nsid", 4294967295), ("anagrpid", 99), ("nsid", 1)]:
        t.send("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "n", field: value}},
               f"{field} {value}")
    answers = t.good("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "n"}})
    t.report.check("nvmf_subsystem_add_ns answers the same id", answers[0].get("result") == answers[1].get("result"))
    t.change("nvmf_subsystem_set_ns_ana_group", {"nqn": NQN, "nsid": 1, "anagrpid": 2})
    t.send("nvmf_subsystem_set_ns_ana_group", {"nqn": NQN, "nsid": 7, "anagrpid": 2}, "unknown namespace")
    t.send("nvmf_subsystem_set_ns_ana_group", {"nqn": NQN, "nsid": 1, "anagrpid": 99}, "unknown group")
    t.make("nvmf_ns_add_host", {"nqn": NQN, "nsid": 1, "host": HOST})
    t.send("nvmf_ns_add_host", {"nqn": NQN, "nsid": 7, "host": HOST}, "unknown namespace")
    t.send("nvmf_ns_add_host", {"nqn": NQN, "nsid": 2, "host": HOST}, "visible to all")
    t.send("nvmf_ns_add_host", {"nqn": NQN, "nsid": 1, "host": "hostnqn"}, "no NQN")
    t.send("nvmf_ns_add_host", {"nqn": NQN, "nsid": 1, "host": ""}, "no name")
    t.send("nvmf_ns_remove_host", {"nqn": NQN, "nsid": 7, "host": HOST}, "unknown namespace")
    t.send("nvmf_ns_remove_host", {"nqn": NQN, "nsid": 2, "host": HOST}, "visible to all")
    t.remove("nvmf_ns_remove_host", {"nqn": NQN, "nsid": 1, "host": HOST})
    t.send("nvmf_subsystem_remove_ns", {"nqn": NQN, "nsid": 7}, "unknown namespace")
    t.send("nvmf_subsystem_remove_ns", {"nqn": NQN, "nsid": 0}, "namespace 0")


def key_calls(t):
    host = "nqn.2026-01.io.example:with-key"
    for daemon in t.both:
        for name in ["key", "key2"]:
            make_key(daemon.directory, name)
        make_key(daemon.directory, "open", 0o644)
    t.make("keyring_file_add_key", {"name": "key", "path": "@DIR@/key"})
    t.good("keyring_file_add_key", {"name": "key2", "path": "@DIR@/key2"})
    for label, path in [("relative", "key"), ("missing", "@DIR@/none"), ("readable by others", "@DIR@/open")]:
        t.send("keyring_file_add_key", {"name": "k9", "path": path}, label)
    t.ask("keyring_get_keys")
    t.good("nvmf_subsystem_add_host", {"nqn": NQN, "host": host, "dhchap_key": "key", "dhchap_ctrlr_key": "key2"})
    t.send("nvmf_subsystem_add_host", {"nqn": NQN, "host": host, "dhchap_ctrlr_key": "key"}, "no host key")
    t.good("nvmf_subsystem_set_keys", {"nqn": NQN, "host": host, "dhchap_key": "key2"})
    t.good("nvmf_get_subsystems", {"nqn": NQN})
    t.good("nvmf_subsystem_remove_host", {"nqn": NQN, "host": host})
    t.good("keyring_file_remove_key", {"name": "key2"})
    t.remove("keyring_file_remove_key", {"name": "key"})


def host_calls(t):
    key_calls(t)
    t.make("nvmf_subsystem_add_host", {"nqn": NQN, "host": HOST})
    for host in ["hostnqn", "", "nqn.2014-08.org.nvmexpress:uuid:07e4a0a641d54bff96b28a173dcfb6b5", "x" * 224]:
        t.send("nvmf_subsystem_add_host", {"nqn": NQN, "host": host}, f"host {host[:20]}")
        t.send("nvmf_subsystem_remove_host", {"nqn": NQN, "host": host}, f"host {host[:20]}")
    for key in ["psk", "dhchap_key", "dhchap_ctrlr_key"]:
        t.send("nvmf_subsystem_add_host", {"nqn": NQN, "host": HOST + "9", key: "zz"}, f"unknown {key}")
    t.change("nvmf_subsystem_set_keys", {"nqn": NQN, "host": HOST})
    t.send("nvmf_subsystem_set_keys", {"nqn": NQN, "host": "nqn.2026-01.io.example:none"}, "unknown host")
    t.send("nvmf_subsystem_set_keys", {"nqn": NQN, "host": HOST, "dhchap_key": "zz"}, "unknown key")
    t.good("nvmf_get_subsystems", {"nqn": NQN})
    t.remove("nvmf_subsystem_remove_host", {"nqn": NQN, "host": HOST, "timeout_ms": 1000},
             ["timeout_ms"])
    t.change("nvmf_subsystem_allow_any_host", {"nqn": NQN, "allow_any_host": True})
    t.send("nvmf_subsystem_allow_any_host", {"nqn": NQN, "allow_any_host": True}, "again")


def referral_calls(t):
    referral = {"address": address("8009", traddr="192.0.2.9"), "secure_channel": False, "subnqn": OTHER}
    t.make("nvmf_discovery_add_referral", referral)
    for field, value in [("trtype", "zz"), ("adrfam", "zz"), ("trsvcid", "")]:
        t.send("nvmf_discovery_add_referral", {"address": {**address("8010"), field: value}}, f"{field} {value}")
    t.send("nvmf_discovery_add_referral", {**referral, "subnqn": "x" * 300}, "long subnqn")
    for method in ["nvmf_discovery_add_referral", "nvmf_discovery_remove_referral"]:
        t.send(method, {"address": address("8009", traddr="192.0.2.9"), "tgt_name": "zz"}, "unknown target")
    t.send("nvmf_discovery_get_referrals", {"tgt_name": "zz"}, "unknown target")
    t.ask("nvmf_discovery_get_referrals", {"tgt_name": "nvmf_tgt"})
    t.send("nvmf_discovery_remove_referral", {"address": address("8011")}, "unknown object")
    del referral["secure_channel"]
    t.remove("nvmf_discovery_remove_referral", referral, ["address.adrfam"])


def initiator_calls(t):
    """Each connects to the other's target."""
    t.change("bdev_nvme_set_options", {
        "action_on_timeout": "none", "timeout_us": 0, "timeout_admin_us": 0, "keep_alive_timeout_ms": 10000,
        "arbitration_burst": 0, "low_priority_weight": 0, "medium_priority_weight": 0, "high_priority_weight": 0,
        "nvme_adminq_poll_period_us": 10000, "nvme_ioq_poll_period_us": 0, "io_queue_requests": 0,
        "delay_cmd_submit": True, "transport_retry_count": 4, "bdev_retry_count": 3, "transport_ack_timeout": 0,
        "ctrlr_loss_timeout_sec": 0, "reconnect_delay_sec": 0, "fast_io_fail_timeout_sec": 0,
        "disable_auto_failback": False, "generate_uuids": False, "transport_tos": 0, "nvme_error_stat": False,
        "rdma_srq_size": 0, "io_path_stat": False, "allow_accel_sequence": False})
    t.change("bdev_nvme_set_hotplug", {"enable": False, "period_us": 100000})
    attach = {"name": "c", "trtype": "TCP", "traddr": "127.0.0.1", "adrfam": "IPv4", "trsvcid": "@PEER@",
              "subnqn": OTHER, "hostnqn": HOST}
    t.good("nvmf_subsystem_add_ns", {"nqn": OTHER, "namespace": {"bdev_name": "m3"}})
    t.make("bdev_nvme_attach_controller", attach)
    for field, value in [("trtype", "zz"), ("adrfam", "zz"), ("trsvcid", "1"), ("multipath", "zz"),
                         ("name", "")]:
        t.send("bdev_nvme_attach_controller", {**attach, "name": "c9", field: value}, f"{field} {value}")
    t.ask("bdev_nvme_get_controllers", {"name": "c"})
    t.send("bdev_nvme_get_controllers", {"name": "zz"}, "unknown object")
    t.send("bdev_get_bdevs", {"name": "c" + "n1"}, "remote")
    t.bad("bdev_nvme_get_controller_health_info", {"name": "c"})
    t.send("bdev_nvme_get_controller_health_info", {"name": "c"})
    t.send("bdev_nvme_get_controller_health_info", {"name": "zz"}, "unknown object")
    t.change("bdev_nvme_reset_controller", {"name": "c"})
    t.send("bdev_nvme_reset_controller", {"name": "zz"}, "unknown object")
    t.change("nvmf_subsystem_get_controllers", {"nqn": OTHER})
    t.change("nvmf_subsystem_get_qpairs", {"nqn": OTHER})
    t.good("nvmf_get_stats")
    t.good("thread_get_io_channels")
    t.send("bdev_nvme_set_keys", {"name": "zz"}, "unknown object")
    t.send("bdev_nvme_set_keys", {"name": "c", "dhchap_key": "zz"}, "unknown key")
    t.send("bdev_nvme_set_keys", {}, "without name")
    t.send("bdev_nvme_detach_controller", {"name": "zz"}, "unknown object")
    t.remove("bdev_nvme_detach_controller", {"name": "c"})


def nvmf_removals(t):
    t.remove("nvmf_subsystem_remove_ns", {"nqn": NQN, "nsid": 1})
    t.send("nvmf_subsystem_remove_listener", {"nqn": NQN, "listen_address": address("1")}, "unknown listener")
    t.send("nvmf_subsystem_remove_listener", {"nqn": NQN, "listen_address": address(trtype="RDMA")}, "no transport")
    t.remove("nvmf_subsystem_remove_listener", {"nqn": NQN, "listen_address": address()}, ["listen_address.adrfam"])
    t.remove("nvmf_delete_subsystem", {"nqn": NQN})
    t.good("nvmf_delete_subsystem", {"nqn": OTHER})
    t.good("nvmf_get_subsystems")


def calls_part(report, programs):
    spdk, nacre = programs.spdk("spdk"), programs.nacre("nacre", "--data-dir", "none")
    spdk.peer_port, nacre.peer_port = nacre.port, spdk.port
    t = Calls(report, spdk, nacre)
    try:
        for daemon in t.both:
            daemon.start("--wait-for-rpc", ready=False)
        t.shared = startup_calls(t)
        for part in [framework_calls, bdev_calls, nvmf_calls, initiator_calls, nvmf_removals, bdev_removals]:
            part(t)
        for mutated in ["SIGZZ", 7, None]:
            t.send("spdk_kill_instance", {"sig_name": mutated}, f"signal {mutated}")
        t.good("spdk_kill_instance", {"sig_name": "SIGTERM"})
        nacre.process.wait(30)
        report.check("Nacre ends in good order", nacre.process.returncode == 0)
        missed = sorted(t.shared - t.called)
        report.check("every method of both is compared", not missed, ", ".join(missed))
        print(f"{t.count} calls of {len(t.called)} methods")
    finally:
        for daemon in t.both:
            daemon.stop()


# ---- config --------------------------------------------------------------------------------------


def save_config(daemon):
    """What rpc.py save_config writes."""
    subsystems = []
    for entry in daemon.call("framework_get_subsystems"):
        name = entry["subsystem"]
        subsystems.append({"subsystem": name, "config": daemon.call("framework_get_config", {"name": name})})
    return {"subsystems": subsystems}


def populate(daemon, files):
    """One of each kind of object, with options. Paths and ports stay the same for both daemons."""
    disk = {"num_blocks": 16384, "block_size": 512}
    for name in ["m", "below_delay", "below_passthru", "below_error", "mirror1", "mirror2"]:
        daemon.call("bdev_malloc_create", {"name": name, **disk})
    daemon.call("bdev_null_create", {"name": "n", "physical_block_size": 4096, **disk})
    daemon.call("bdev_aio_create", {"name": "a", "filename": files[0], "block_size": 4096})
    # Nacre finds a block size by itself, and must save it.
    if daemon.name.startswith("nacre"):
        daemon.call("bdev_aio_create", {"name": "sized", "filename": files[1]})
    daemon.call("bdev_delay_create", {"name": "d", "base_bdev_name": "below_delay", "avg_read_latency": 1,
                                      "p99_read_latency": 2, "avg_write_latency": 3, "p99_write_latency": 4})
    daemon.call("bdev_passthru_create", {"name": "p", "base_bdev_name": "below_passthru"})
    daemon.call("bdev_error_create", {"base_name": "below_error"})
    daemon.call("bdev_set_qos_limit", {"name": "m", "rw_ios_per_sec": 20000, "w_mbytes_per_sec": 100})
    daemon.call("nvmf_create_transport", {"trtype": "TCP", "max_queue_depth": 64, "in_capsule_data_size": 8192})
    daemon.call("nvmf_create_subsystem", {"nqn": NQN, "serial_number": "S1", "model_number": "M1",
                                          "max_namespaces": 16, "ana_reporting": True})
    daemon.call("nvmf_create_subsystem", {"nqn": OTHER, "allow_any_host": True})
    for nqn in [NQN, OTHER]:
        daemon.call("nvmf_subsystem_add_listener", {"nqn": nqn, "listen_address": address()})
    daemon.call("nvmf_subsystem_add_host", {"nqn": NQN, "host": HOST})
    daemon.call("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {
        "nsid": 3, "bdev_name": "d", "nguid": "0123456789ABCDEF0123456789ABCDEF", "eui64": "0123456789ABCDEF",
        "uuid": UUID, "anagrpid": 2, "no_auto_visible": True}})
    daemon.call("nvmf_ns_add_host", {"nqn": NQN, "nsid": 3, "host": HOST})
    for name in ["p", "a", "EE_below_error"]:
        daemon.call("nvmf_subsystem_add_ns", {"nqn": OTHER, "namespace": {"bdev_name": name}})
    daemon.call("nvmf_discovery_add_referral", {"address": address("8009", traddr="192.0.2.9"),
                                                "secure_channel": False})


def populate_mirror(daemon):
    daemon.call("bdev_raid_create", {"name": "r", "raid_level": "raid1", "base_bdevs": ["mirror1", "mirror2"],
                                     "superblock": False})
    daemon.call("nvmf_subsystem_add_ns", {"nqn": OTHER, "namespace": {"bdev_name": "r"}})


def described(daemon):
    """What hosts can tell apart, by names and identifiers."""
    bdevs = {}
    for bdev in daemon.call("bdev_get_bdevs"):
        bdevs[bdev["name"]] = {key: bdev[key] for key in ["uuid", "block_size", "num_blocks", "assigned_rate_limits"]}
    subsystems = {}
    for subsystem in daemon.call("nvmf_get_subsystems"):
        if subsystem["subtype"] == "Discovery":
            continue
        keys = ["allow_any_host", "hosts", "serial_number", "model_number", "max_namespaces", "min_cntlid",
                "max_cntlid", "listen_addresses"]
        it = {key: subsystem[key] for key in keys}
        it["hosts"] = sorted(host["nqn"] for host in it["hosts"])
        it["namespaces"] = [{key: ns.get(key) for key in ["nsid", "bdev_name", "nguid", "eui64", "uuid", "anagrpid"]}
                            for ns in subsystem["namespaces"]]
        subsystems[subsystem["nqn"]] = it
    transport = daemon.call("nvmf_get_transports")[0]
    keys = ["trtype", "max_queue_depth", "max_io_qpairs_per_ctrlr", "in_capsule_data_size", "max_io_size",
            "max_aq_depth"]
    referrals = [(r["address"]["traddr"], r["subnqn"]) for r in daemon.call("nvmf_discovery_get_referrals")]
    return {"bdevs": bdevs, "subsystems": subsystems, "referrals": referrals,
            "transport": {key: transport[key] for key in keys}}


def differing(before, after, path=""):
    if isinstance(before, dict) and isinstance(after, dict):
        return [d for key in {**before, **after}
                for d in differing(before.get(key), after.get(key), f"{path}.{key}")]
    return [] if before == after else [f"{path}: {json.dumps(before)[:200]} became {json.dumps(after)[:200]}"]


def config_part(report, programs):
    directory = programs.directory
    files = [os.path.join(directory, name) for name in ["config-a", "config-b"]]
    for file in files:
        with open(file, "wb") as f:
            f.truncate(8 * MIB)
    load = {"spdk": programs.spdk, "nacre": lambda name: programs.nacre(name, "--data-dir", "none")}
    for source, sink in [("spdk", "nacre"), ("nacre", "spdk"), ("nacre", "nacre")]:
        name = f"{source}-to-{sink}"
        report_to(report, f"{name}", lambda: exchange(report, programs, load, source, sink, name, files))


def exchange(report, programs, load, source, sink, name, files):
    one = load[source](f"{source}-source-of-{name}")
    files_of = {}

    def keep(how, text):
        """A saved configuration with what the source has in it."""
        path = os.path.join(programs.directory, f"{name}-{len(files_of)}.json")
        with open(path, "w") as file:
            file.write(text)
        files_of[how] = path, described(one)

    try:
        one.start()
        populate(one, files)
        # A mirror is a volume here, which SPDK cannot load.
        if sink == "nacre":
            populate_mirror(one)
        keep("save_config", json.dumps(save_config(one), indent=1))
        if source == "nacre":
            keep("config export", programs.run_nacre("config", "export", "-r", one.socket))
            numbers = one.call("nvmf_get_transports")[0]
            unknown = [key for key, value in numbers.items() if value == 4294967295]
            report.check("a transport is told with the numbers in use", not unknown, ", ".join(unknown))
        if sink == "spdk":
            before = described(one)
            populate_mirror(one)
            keep("config export --spdk", programs.run_nacre("config", "export", "--spdk", "-r", one.socket))
            # All but the mirror.
            files_of["config export --spdk"] = files_of["config export --spdk"][0], before
    finally:
        one.stop()
    for how, (path, before) in files_of.items():
        two = load[sink](f"{sink}-sink-of-{name}-{how.replace(' ', '-')}")
        # The addresses in the file are the source's.
        two.port = one.port
        try:
            two.start("-c", path)
            found = differing(before, described(two))
            found = [d for d in found if not report.intended("config", name, d)]
            report.check(f"{sink} has all that {source} had, by {how}", not found, "; ".join(found))
        finally:
            two.stop()


def report_to(report, what, work):
    """Runs a part of the checks; if it breaks off, that is a failure of its own."""
    try:
        work()
    except (Failed, OSError, subprocess.SubprocessError, KeyError, IndexError) as error:
        report.check(what, False, f"{type(error).__name__}: {error}")


# ---- discovery -----------------------------------------------------------------------------------


def wait_until(done, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if done():
            return True
        time.sleep(0.1)
    return False


def discovery_part(report, programs):
    """SPDK's host finds the subsystems, hears of new ones, and still does when Nacre was restarted."""
    data = os.path.join(programs.directory, "discovery-data")
    target, host = programs.nacre("nacre-discovered", "serve", "--data-dir", data), programs.spdk("spdk-host")
    try:
        target.start()
        target.call("bdev_null_create", {"name": "n", "num_blocks": 2048, "block_size": 512})

        def subsystem(nqn):
            target.call("nvmf_create_subsystem", {"nqn": nqn, "allow_any_host": True})
            target.call("bdev_null_create", {"name": nqn[-3:], "num_blocks": 2048, "block_size": 512})
            target.call("nvmf_subsystem_add_ns", {"nqn": nqn, "namespace": {"bdev_name": nqn[-3:]}})
            target.call("nvmf_subsystem_add_listener", {"nqn": nqn, "listen_address": address()})

        def seen(nqn):
            return lambda: any(
                nqn == ctrlr["trid"]["subnqn"] for entry in host.call("bdev_nvme_get_controllers")
                for ctrlr in entry["ctrlrs"] if ctrlr["state"] == "enabled")

        subsystem(NQN)
        own = target.call("nvmf_get_subsystems", {"nqn": DISCOVERY})[0].get("unique_nqn", "")
        report.check("the discovery subsystem has a name of its own", own.startswith(DISCOVERY) and own != DISCOVERY,
                     own)
        host.start()
        host.call("bdev_nvme_start_discovery", {
            "name": "found", "trtype": "TCP", "traddr": "127.0.0.1", "adrfam": "IPv4", "trsvcid": target.port,
            "hostnqn": HOST, "wait_for_attach": True, "ctrlr_loss_timeout_sec": -1, "reconnect_delay_sec": 1})
        report.check("discovery attaches what is there", seen(NQN)())
        subsystem(OTHER)
        report.check("discovery hears of a new subsystem", wait_until(seen(OTHER)))
        target.stop()
        target.start()
        info = host.call("bdev_nvme_get_discovery_info")
        names = {entry["trid"]["subnqn"] for entry in info if "trid" in entry}
        names |= {referral["trid"]["subnqn"] for entry in info for referral in entry.get("referrals", [])}
        report.check("the host comes back by the unique name", own in names, json.dumps(info))
        report.check("the subsystems come back", wait_until(lambda: seen(NQN)() and seen(OTHER)()))

        def connected():
            controllers = target.call("nvmf_subsystem_get_controllers", {"nqn": DISCOVERY})
            return [c for c in controllers if c["hostnqn"] == HOST]

        report.check("the host is at the discovery subsystem again", wait_until(connected))
        # The host hears of this only where it took the subsystem for a discovery subsystem.
        third = "nqn.2026-01.io.example:tri"
        subsystem(third)
        report.check("discovery hears of a new subsystem after a restart of the target", wait_until(seen(third)))
        host.call("bdev_nvme_stop_discovery", {"name": "found"})
    finally:
        host.stop()
        target.stop()


# ---- hosts ---------------------------------------------------------------------------------------


def hosts_part(report, programs):
    """Hosts with names that SPDK and the kernel take are served where any host is allowed, and can be allowed."""
    target = programs.nacre("nacre-hosts", "serve", "--data-dir", "none")
    allowed = ["nqn.2014-08.org.nvmexpress:uuid:07e4a0a641d54bff96b28a173dcfb6b5", "hostnqn",
               "nqn.2026-01.io.example:host"]
    try:
        target.start()
        for name, nqn, any_host in [("m1", NQN, True), ("m2", OTHER, False)]:
            target.call("bdev_malloc_create", {"name": name, "num_blocks": 16384, "block_size": 512})
            target.call("nvmf_create_subsystem", {"nqn": nqn, "allow_any_host": any_host})
            target.call("nvmf_subsystem_add_ns", {"nqn": nqn, "namespace": {"bdev_name": name}})
            target.call("nvmf_subsystem_add_listener", {"nqn": nqn, "listen_address": address()})
        for host in allowed:
            target.call("nvmf_subsystem_add_host", {"nqn": OTHER, "host": host})
        for nqn, host, served in [*((NQN, h, True) for h in [*allowed, "another"]), *((OTHER, h, True) for h in allowed),
                                  (OTHER, "another", False)]:
            done = programs.perf(target.port, nqn, host)
            report.check(f"{'any host' if nqn == NQN else 'a list of hosts'}: {host} is {'' if served else 'not '}served",
                         bool(re.search(r"^Total", done.stdout, re.M)) == served, done.stdout[-600:] + done.stderr[-600:])
    finally:
        target.stop()


# ---- keys ----------------------------------------------------------------------------------------


def make_key(directory, name, mode=0o600):
    """A file with a new secret, as `nvme gen-dhchap-key` prints it."""
    secret = os.urandom(32)
    text = base64.b64encode(secret + zlib.crc32(secret).to_bytes(4, "little")).decode()
    path = os.path.join(directory, name)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, mode), "w") as file:
        file.write(f"DHHC-1:01:{text}:\n")
    return path


def keys_part(report, programs):
    """Each end's host authenticates itself at the other's target, and lets the target prove itself."""
    keys = {name: make_key(programs.directory, name) for name in ["own", "target", "wrong"]}
    for kind in ["Nacre", "SPDK"]:
        if kind == "Nacre":
            target = programs.nacre("nacre-keys", "serve", "--data-dir", "none")
            host = programs.spdk("spdk-keys-host")
        else:
            target, host = programs.spdk("spdk-keys"), programs.nacre("nacre-keys-host", "serve", "--data-dir", "none")
        try:
            target.start()
            host.start()
            for daemon in [target, host]:
                for name, path in keys.items():
                    daemon.call("keyring_file_add_key", {"name": name, "path": path})
            target.call("bdev_malloc_create", {"name": "m", "num_blocks": 16384, "block_size": 512})
            if kind == "SPDK":
                target.call("nvmf_create_transport", {"trtype": "TCP"})
            target.call("nvmf_create_subsystem", {"nqn": NQN})
            target.call("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "m"}})
            target.call("nvmf_subsystem_add_listener", {"nqn": NQN, "listen_address": address()})
            target.call("nvmf_subsystem_add_host",
                        {"nqn": NQN, "host": HOST, "dhchap_key": "own", "dhchap_ctrlr_key": "target"})
            check_keys(report, target, host, f"{kind}'s target")
            if kind == "Nacre":
                perf_with_keys(report, programs, target, keys)
        finally:
            host.stop()
            target.stop()


def check_keys(report, target, host, where):
    attach = {"name": "c", "trtype": "TCP", "traddr": "127.0.0.1", "adrfam": "IPv4", "trsvcid": target.port,
              "subnqn": NQN, "hostnqn": HOST}
    for own, other, served in [("wrong", None, False), ("own", "wrong", False), (None, None, False),
                               ("own", None, True), ("own", "target", True)]:
        given = {"dhchap_key": own, "dhchap_ctrlr_key": other}
        answer = host.send("bdev_nvme_attach_controller", {**attach, **{k: v for k, v in given.items() if v}})
        report.check(f"{where}, host key {own}, controller key {other}: {'' if served else 'not '}served",
                     ("result" in answer) == served, json.dumps(answer))
        if not served:
            continue
        states = {pair["auth"]["state"] for pair in target.call("nvmf_subsystem_get_qpairs", {"nqn": NQN})}
        report.check(f"{where} shows its queues as authenticated", states == {"completed"}, str(states))
        target.call("nvmf_subsystem_set_keys",
                    {"nqn": NQN, "host": HOST, "dhchap_key": "wrong", "dhchap_ctrlr_key": "target"})
        host.call("bdev_nvme_set_keys", {"name": "c", "dhchap_key": "wrong", **({"dhchap_ctrlr_key": other} if other else {})})
        report.check(f"{where}: the host goes on with new keys", wait_until(lambda: enabled(host)))
        target.call("nvmf_subsystem_set_keys",
                    {"nqn": NQN, "host": HOST, "dhchap_key": "own", "dhchap_ctrlr_key": "target"})
        host.call("bdev_nvme_detach_controller", {"name": "c"})


def enabled(host):
    controllers = host.call("bdev_nvme_get_controllers", {"name": "c"})
    return [ctrlr["state"] for entry in controllers for ctrlr in entry["ctrlrs"]] == ["enabled"]


def perf_with_keys(report, programs, target, keys):
    for own, other, served in [("own", "target", True), ("wrong", "target", False), ("own", "wrong", False)]:
        done = programs.perf(target.port, NQN, HOST, "--dhchap-key", keys[own], "--dhchap-ctrlr-key", keys[other])
        report.check(f"spdk_nvme_perf with {own} and {other} is {'' if served else 'not '}served",
                     bool(re.search(r"^Total", done.stdout, re.M)) == served, done.stdout[-600:] + done.stderr[-600:])


# ---- TLS -----------------------------------------------------------------------------------------


def make_psk(directory, name, size=32):
    """A file with a new pre-shared key, as `nvme gen-tls-key` prints it."""
    secret = os.urandom(size)
    text = base64.b64encode(secret + zlib.crc32(secret).to_bytes(4, "little")).decode()
    path = os.path.join(directory, name)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        # SPDK takes no end of line here.
        file.write(f"NVMeTLSkey-1:0{1 if size == 32 else 2}:{text}:")
    return path


def tls_part(report, programs):
    """SPDK's hosts use TLS with pre-shared keys at Nacre's target, and cannot leave it out."""
    psks = {"short": make_psk(programs.directory, "short"), "long": make_psk(programs.directory, "long", 48),
            "other": make_psk(programs.directory, "other")}
    target, host = programs.nacre("nacre-tls", "serve", "--data-dir", "none"), programs.spdk("spdk-tls-host")
    try:
        target.start()
        host.start()
        for daemon in [target, host]:
            for name, path in psks.items():
                daemon.call("keyring_file_add_key", {"name": name, "path": path})
        target.call("bdev_malloc_create", {"name": "m", "num_blocks": 16384, "block_size": 512})
        target.call("nvmf_create_subsystem", {"nqn": NQN, "allow_any_host": True})
        target.call("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "m"}})
        allows = str(free_port())
        target.call("nvmf_subsystem_add_listener", {"nqn": NQN, "listen_address": address(), "secure_channel": True})
        target.call("nvmf_subsystem_add_listener",
                    {"nqn": NQN, "listen_address": address(allows), "options": {"tls": "allow"}})
        long_host, plain = HOST.replace("1111", "2222", 1), HOST.replace("1111", "3333", 1)
        for nqn, psk in [(HOST, "short"), (long_host, "long")]:
            target.call("nvmf_subsystem_add_host", {"nqn": NQN, "host": nqn, "psk": psk})

        def perf(port, nqn, psk, served, *more):
            options = ["-S", "ssl", "--psk-path", psks[psk]] if psk else []
            done = programs.perf(port, NQN, nqn, *options, *more)
            where = "require" if port == target.port else "allow"
            report.check(f"tls = {where}: {nqn[-36:-32]} with psk {psk}{more and ' ' + ' '.join(more)} is "
                         f"{'' if served else 'not '}served",
                         bool(re.search(r"^Total", done.stdout, re.M)) == served,
                         done.stdout[-600:] + done.stderr[-600:] + target.log_tail())

        for port in [target.port, allows]:
            perf(port, HOST, "short", True)
            perf(port, long_host, "long", True)
            perf(port, HOST, "other", False)
            perf(port, plain, "short", False)
            # A host with a key cannot leave TLS out, another one can where it is allowed.
            perf(port, HOST, None, False)
            perf(port, plain, None, port == allows)
        perf(target.port, HOST, "short", True, "-q", "64", "-o", "131072", "-w", "randrw", "-M", "30")
        attach = {"name": "c", "trtype": "TCP", "traddr": "127.0.0.1", "adrfam": "IPv4", "trsvcid": target.port,
                  "subnqn": NQN, "hostnqn": HOST, "psk": "short"}
        answer = host.send("bdev_nvme_attach_controller", attach)
        report.check("SPDK attaches a controller over TLS", "result" in answer, json.dumps(answer))
        pairs = target.call("nvmf_subsystem_get_qpairs", {"nqn": NQN})
        secure = {(pair.get("tls", {}).get("cipher"), pair.get("tls", {}).get("derivation")) for pair in pairs}
        report.check("its queues are shown with their keys", secure == {("TLS_AES_128_GCM_SHA256", "standard")},
                     json.dumps(pairs))
        listed = target.call("nvmf_get_subsystems", {"nqn": NQN})[0]["hosts"]
        report.check("hosts are listed with their psk", {h["nqn"]: h.get("psk") for h in listed}
                     == {HOST: "short", long_host: "long"}, json.dumps(listed))
    finally:
        host.stop()
        target.stop()


# ---- the program ---------------------------------------------------------------------------------

MEMORY = ["--no-huge", "-s", "768", "--no-pci"]


class Programs:
    def __init__(self, spdk, nacre, directory):
        self.build = os.path.join(spdk, "build", "bin")
        self.directory = directory
        self.nacre_path = os.path.abspath(nacre)
        # The name decides whose defaults it has.
        self.as_nvmf_tgt = os.path.join(directory, "nvmf_tgt")
        os.symlink(self.nacre_path, self.as_nvmf_tgt)
        for program in ["nvmf_tgt", "spdk_nvme_perf"]:
            if not os.path.isfile(os.path.join(self.build, program)):
                raise Failed(f"{self.build}/{program} is missing: --spdk takes the folder of an SPDK build")

    def environment(self):
        others = {key: value for key, value in os.environ.items() if not key.startswith("NACRE_")}
        # The variable of the tests must not disturb the daemon.
        return {**others, "NACRE_NVMF_DISCOVERY_PORT": "0", "NACRE_SPDK_DIR": os.path.dirname(self.build)}

    def spdk(self, name, *arguments):
        command = [os.path.join(self.build, "nvmf_tgt"), *MEMORY, "--disable-cpumask-locks", "-m", "0x1", *arguments]
        return Daemon(name, command, os.path.join(self.directory, name))

    def nacre(self, name, *arguments):
        """Under the name nvmf_tgt; as itself if the first argument is "serve"."""
        itself = arguments[:1] == ("serve",)
        command = [self.nacre_path if itself else self.as_nvmf_tgt, *arguments]
        return Daemon(name, command, os.path.join(self.directory, name), self.environment())

    def run_nacre(self, *arguments):
        done = subprocess.run([self.nacre_path, *arguments], env=self.environment(), capture_output=True, text=True,
                              timeout=60)
        if done.returncode:
            raise Failed(f"nacre {' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def perf(self, port, nqn, host, *options):
        where = f"trtype:TCP adrfam:IPv4 traddr:127.0.0.1 trsvcid:{port} subnqn:{nqn} hostnqn:{host}"
        return subprocess.run(
            [os.path.join(self.build, "spdk_nvme_perf"), *MEMORY[:3], "-q", "1", "-o", "4096", "-w", "read", "-t", "1",
             "-r", where, *options], capture_output=True, text=True, timeout=60, errors="replace")


PARTS = {"calls": calls_part, "config": config_part, "discovery": discovery_part, "hosts": hosts_part, "keys": keys_part,
         "tls": tls_part}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--spdk", required=True, help="the folder of an SPDK build")
    parser.add_argument("--nacre", required=True, help="the program to compare with it")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="only this part; may be repeated")
    parser.add_argument("--verbose", action="store_true", help="name what passes, too")
    parser.add_argument("--keep", action="store_true", help="keep the temporary directory")
    options = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="nacre-spdk-")
    report = Report(options.verbose)
    parts = options.part or list(PARTS)
    try:
        programs = Programs(options.spdk, options.nacre, directory)
        for part in parts:
            print(f"-- {part}", flush=True)
            report_to(report, part, lambda: PARTS[part](report, programs))
        if parts == list(PARTS):
            for at, (method, label, difference, _) in enumerate(INTENDED):
                report.check(f"INTENDED: {method}, {label}, {difference}", at in report.used, "matches nothing any more")
    except Failed as error:
        report.check("the comparison", False, str(error))
    finally:
        if options.keep:
            print(f"kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    print(f"{report.passed} passed, {len(report.failures)} failed")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
