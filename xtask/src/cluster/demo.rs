//! The machines of the demonstration: network namespaces, members of etcd, daemons and their
//! volume.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::{Act, Options, seconds};
use crate::process::{self, Group};

const CALL_LIMIT: Duration = Duration::from_secs(60);
/// Time for daemons to start, for nodes to join, and for replicas to be in sync again.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);
const STOP_LIMIT: Duration = Duration::from_secs(30);

pub(super) const NODES: [&str; 3] = ["a", "b", "c"];
pub(super) const HOST: &str = "host";
/// The namespace with the bridges.
const SWITCH: &str = "switch";
const HOST_NQN: &str = "nqn.2026-01.io.nacre:demo";
const DEVICE_BYTES: u64 = 64 << 20;
/// Load before the act. Long enough for a first round of comparisons.
const BEFORE: Duration = Duration::from_secs(3);

/// A bridge, with an interface on each machine that uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Network {
    /// Daemons and members of etcd.
    Etcd,
    /// Replicas: each node reaches the devices of the others.
    Data,
    /// Hosts and nodes. Nodes do not reach each other here, or a cut of `Data` would cut nothing.
    Hosts,
}

impl Network {
    pub(super) const ALL: [Self; 3] = [Self::Etcd, Self::Data, Self::Hosts];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::Data => "data",
            Self::Hosts => "hosts",
        }
    }

    /// Machines with an interface.
    fn machines(self) -> impl Iterator<Item = &'static str> {
        let host = (self == Self::Hosts).then_some(HOST);
        NODES.into_iter().chain(host)
    }

    pub(super) fn address_of(self, machine: &str) -> String {
        let index = NODES.iter().position(|node| *node == machine);
        let index = index.unwrap_or(NODES.len()) + 1;
        format!("10.77.{}.{index}", self as u8)
    }

    /// The machine's port of the bridge.
    fn port_of(self, machine: &str) -> String {
        format!("to-{machine}-{}", self.name())
    }
}

/// A namespace per machine, each with an interface at the bridges.
pub(super) fn make_network() -> Result<()> {
    // The names of namespaces are files in /run/netns.
    call(Command::new("mount").args(["-t", "tmpfs", "none", "/run"]))?;
    for machine in NODES.iter().chain([&HOST, &SWITCH]) {
        call(Command::new("ip").args(["netns", "add", machine]))?;
        call(Command::new("ip").args(["-n", machine, "link", "set", "lo", "up"]))?;
    }
    for network in Network::ALL {
        make_bridge(network)?;
    }
    Ok(())
}

fn make_bridge(network: Network) -> Result<()> {
    let ip = |machine: &str, arguments: &[&str]| {
        call(Command::new("ip").args(["-n", machine]).args(arguments))
    };
    let bridge = network.name();
    ip(SWITCH, &["link", "add", bridge, "type", "bridge"])?;
    ip(SWITCH, &["link", "set", bridge, "up"])?;
    for machine in network.machines() {
        let (port, interface) = (network.port_of(machine), format!("eth-{bridge}"));
        ip(
            SWITCH,
            &[
                "link", "add", &port, "type", "veth", "peer", &interface, "netns", machine,
            ],
        )?;
        ip(SWITCH, &["link", "set", &port, "master", bridge, "up"])?;
        if network == Network::Hosts && machine != HOST {
            let isolated = [
                "link",
                "set",
                &port,
                "type",
                "bridge_slave",
                "isolated",
                "on",
            ];
            ip(SWITCH, &isolated)?;
        }
        let address = format!("{}/24", network.address_of(machine));
        ip(machine, &["addr", "add", &address, "dev", &interface])?;
        ip(machine, &["link", "set", &interface, "up"])?;
    }
    Ok(())
}

pub(super) fn call(command: &mut Command) -> Result<String> {
    process::capture(command, CALL_LIMIT)
}

/// A command on a machine.
pub(super) fn on(machine: &str, program: &Path) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", machine]).arg(program);
    command
}

/// Repeats the question, also after errors, until the answer is there, for at most [`PATIENCE`].
pub(super) fn until<T>(what: &str, mut ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    loop {
        // Nodes that start or die refuse calls for a while.
        let answer = ask();
        if let Ok(Some(found)) = answer {
            return Ok(found);
        }
        if process::interrupted() {
            bail!("interrupted");
        }
        if start.elapsed() > PATIENCE {
            answer.with_context(|| format!("never: {what}"))?;
            bail!("never within {} s: {what}", PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Sets ports of the bridges `up` or `down`, all at once.
pub(super) fn set_ports(dir: &Path, links: &[(&str, Network)], state: &str) -> Result<()> {
    let lines = links.iter().map(|(machine, network)| {
        let port = network.port_of(machine);
        format!("link set {port} {state}\n")
    });
    let batch = dir.join("links");
    std::fs::write(&batch, lines.collect::<String>())
        .with_context(|| format!("writing {}", batch.display()))?;
    call(
        Command::new("ip")
            .args(["-n", SWITCH, "-batch"])
            .arg(&batch),
    )?;
    Ok(())
}

/// The result of one act.
pub(super) struct Round {
    /// From the act until another node served the volume.
    pub(super) served: Duration,
    pub(super) longest: Duration,
    pub(super) wrong: u64,
}

pub(super) struct Demo {
    nacre: PathBuf,
    pub(super) dir: PathBuf,
    // Killed when dropped: the daemons first.
    daemons: BTreeMap<&'static str, Group>,
    etcd: BTreeMap<&'static str, Group>,
}

impl Demo {
    pub(super) fn new(dir: &Path, nacre: &Path) -> Self {
        Self {
            nacre: nacre.to_owned(),
            dir: dir.to_owned(),
            etcd: BTreeMap::new(),
            daemons: BTreeMap::new(),
        }
    }

    pub(super) fn start(&mut self, etcd: &Path, lease: u64) -> Result<()> {
        println!("three members of etcd: {}", self.endpoints());
        for node in NODES {
            let member = self.start_etcd(etcd, node)?;
            self.etcd.insert(node, member);
        }
        let mut init = on(NODES[0], &self.nacre);
        init.args(["cluster", "init", "demo", "--etcd", &self.endpoints()]);
        init.arg(format!("--lease={lease}s"));
        println!("$ {}", process::shown(&init));
        until("etcd has a leader", || {
            let mut again = on(NODES[0], &self.nacre);
            again.args(init.get_args().skip(4));
            call(&mut again).map(Some)
        })?;
        for node in NODES {
            self.start_node(node)?;
            let file = self.dir.join(format!("{node}.img"));
            std::fs::File::create(&file)
                .and_then(|file| file.set_len(DEVICE_BYTES))
                .with_context(|| format!("creating {}", file.display()))?;
            let device = json!({ "name": "disk", "filename": file, "block_size": 4096 });
            self.rpc(node, "bdev_aio_create", &device)?;
        }
        until("all nodes have joined", || {
            let nodes = self.nodes("a")?;
            let named = nodes.iter().filter(|node| node["name"].is_string());
            Ok((named.count() == NODES.len()).then_some(()))
        })
    }

    fn endpoints(&self) -> String {
        NODES
            .map(|node| format!("http://{}:2379", Network::Etcd.address_of(node)))
            .join(",")
    }

    fn start_etcd(&self, etcd: &Path, node: &str) -> Result<Group> {
        let address = Network::Etcd.address_of(node);
        let (client, peer) = (
            format!("http://{address}:2379"),
            format!("http://{address}:2380"),
        );
        let members =
            NODES.map(|node| format!("{node}=http://{}:2380", Network::Etcd.address_of(node)));
        let mut command = on(node, etcd);
        command.args(["--name", node, "--data-dir"]);
        command.arg(self.dir.join(format!("etcd-{node}")));
        command.args([
            "--listen-client-urls",
            &client,
            "--advertise-client-urls",
            &client,
        ]);
        command.args([
            "--listen-peer-urls",
            &peer,
            "--initial-advertise-peer-urls",
            &peer,
        ]);
        command.args(["--initial-cluster", &members.join(",")]);
        command.args(["--heartbeat-interval=50", "--election-timeout=500"]);
        self.spawn(&mut command, &format!("etcd-{node}"))
    }

    fn start_node(&mut self, node: &'static str) -> Result<()> {
        let listeners = [Network::Data, Network::Hosts]
            .map(|network| format!("tcp://{}:4420", network.address_of(node)));
        let mut command = self.daemon(node);
        command
            .arg("--data-dir")
            .arg(self.dir.join(node))
            .env("NACRE_CLUSTER_NAME", "demo")
            .env("NACRE_CLUSTER_NODE", node)
            .env("NACRE_STORE_ENDPOINTS", self.endpoints())
            .env("NACRE_NVMF_LISTEN", listeners.join(","));
        self.start_daemon(node, &mut command)
    }

    fn daemon(&self, machine: &str) -> Command {
        let mut command = on(machine, &self.nacre);
        command
            .args(["serve", "-r"])
            .arg(self.socket(machine))
            .env("NACRE_NVMF_DISCOVERY_PORT", "0")
            // All of them share the cores of this machine.
            .env("NACRE_REACTOR_CORES", "auto:1")
            .env("NACRE_REACTOR_MODE", "interrupt")
            .env("NACRE_MEMORY_HUGEPAGES", "off");
        command
    }

    pub(super) fn socket(&self, machine: &str) -> PathBuf {
        self.dir.join(format!("{machine}.sock"))
    }

    fn start_daemon(&mut self, machine: &'static str, command: &mut Command) -> Result<()> {
        let group = self.spawn(command, machine)?;
        self.daemons.insert(machine, group);
        until(&format!("the daemon of {machine} answers"), || {
            if let Some(status) = self.daemons.get_mut(machine).map(Group::try_wait) {
                let status = status?;
                if let Some(status) = status {
                    let log = self.dir.join(format!("{machine}.log"));
                    let said = std::fs::read_to_string(log).unwrap_or_default();
                    println!("the daemon of {machine} ended ({status}):\n{said}");
                }
            }
            self.rpc(machine, "framework_wait_init", &Value::Null)
                .map(Some)
        })?;
        Ok(())
    }

    /// Appends the output to a log.
    pub(super) fn spawn(&self, command: &mut Command, log: &str) -> Result<Group> {
        let path = self.dir.join(format!("{log}.log"));
        let out = std::fs::File::options()
            .create(true)
            .append(true)
            .open(&path);
        let out = out.with_context(|| format!("creating {}", path.display()))?;
        command.stdin(Stdio::null());
        command
            .stdout(out.try_clone().context("sharing a log")?)
            .stderr(out);
        Group::spawn(command)
    }

    pub(super) fn rpc(&self, machine: &str, method: &str, params: &Value) -> Result<Value> {
        let mut command = Command::new(&self.nacre);
        command
            .args(["rpc", "--socket"])
            .arg(self.socket(machine))
            .arg(method);
        if !params.is_null() {
            command.arg(params.to_string());
        }
        let answer = call(&mut command)?;
        serde_json::from_str(&answer)
            .with_context(|| format!("{method} answered no JSON: {answer:?}"))
    }

    fn nodes(&self, asked: &str) -> Result<Vec<Value>> {
        let status = self.rpc(asked, "cluster_get_status", &Value::Null)?;
        Ok(status["nodes"].as_array().cloned().unwrap_or_default())
    }

    /// The node that serves the volume, as `asked` sees it.
    pub(super) fn holder(&self, asked: &str) -> Result<Option<&'static str>> {
        let nodes = self.nodes(asked)?;
        let holder = nodes.iter().find(|node| node["held"] == 1);
        Ok(holder.and_then(|holder| NODES.into_iter().find(|node| holder["name"] == **node)))
    }

    pub(super) fn wait_until_healthy(&self, asked: &str) -> Result<&'static str> {
        until("all replicas are in sync", || {
            let status = self.rpc(asked, "cluster_get_status", &Value::Null)?;
            if status["volumes"]["healthy"] == 1 {
                self.holder(asked)
            } else {
                Ok(None)
            }
        })
    }

    /// Creates the volume, and returns its NQN.
    pub(super) fn publish(&self) -> Result<String> {
        let mut create = Command::new(&self.nacre);
        create.args([
            "volume", "create", "v", "a:disk", "b:disk", "c:disk", "--socket",
        ]);
        println!("$ {}", process::shown(&create).replace(" --socket", ""));
        call(create.arg(self.socket("a")))?;
        let params = json!({ "name": "v", "allow_any_host": true });
        let published = self.rpc("a", "volume_publish", &params)?;
        let nqn = published["nqn"]
            .as_str()
            .context("volume_publish gave no NQN")?;
        let holder = self.wait_until_healthy("a")?;
        println!("node {holder} serves the volume, as {nqn}");
        Ok(nqn.to_owned())
    }

    /// Attaches the volume over all nodes, and serves it to the load.
    pub(super) fn connect(&mut self, nqn: &str) -> Result<()> {
        let mut command = self.daemon(HOST);
        command
            .args(["--data-dir", "none"])
            .env("NACRE_REPLICATION_KEEP_ALIVE_MS", "1000")
            .env("NACRE_REPLICATION_FAST_FAIL_MS", "0");
        self.start_daemon(HOST, &mut command)?;
        for node in NODES {
            let path = json!({
                "name": "v", "trtype": "TCP", "traddr": Network::Hosts.address_of(node), "trsvcid": "4420",
                "subnqn": nqn, "ctrlr_loss_timeout_sec": -1, "reconnect_delay_sec": 1,
            });
            until("a path to each node", || {
                self.rpc(HOST, "bdev_nvme_attach_controller", &path)
                    .map(Some)
            })?;
        }
        let subsystem = json!({ "nqn": HOST_NQN, "allow_any_host": true });
        self.rpc(HOST, "nvmf_create_subsystem", &subsystem)?;
        let namespace = json!({ "nqn": HOST_NQN, "namespace": { "bdev_name": "vn1" } });
        self.rpc(HOST, "nvmf_subsystem_add_ns", &namespace)?;
        let address = json!({ "trtype": "tcp", "traddr": Network::Hosts.address_of(HOST), "trsvcid": "4420" });
        let listener = json!({ "nqn": HOST_NQN, "listen_address": address });
        self.rpc(HOST, "nvmf_subsystem_add_listener", &listener)?;
        println!("the host has a path to each node");
        Ok(())
    }

    /// Starts the load, acts on the node that serves the volume, and lets it return.
    pub(super) fn round(&mut self, act: Act, options: &Options) -> Result<Round> {
        let holder = self.wait_until_healthy("a")?;
        let asked = if holder == "a" { "b" } else { "a" };
        println!(
            "\n{}: node {holder} serves the volume, under verified load",
            act.name()
        );
        // Until long after the latest take.
        let time = BEFORE.as_secs() + 4 * options.lease + 4;
        let mut load = self.load("randwrite", "16m", options.rate, time)?;
        std::thread::sleep(BEFORE);
        let start = Instant::now();
        self.act(act, holder)?;
        let next = until("another node serves the volume", || {
            Ok(self.holder(asked)?.filter(|now| *now != holder))
        })?;
        let served = start.elapsed();
        println!("node {next} serves the volume after {}", seconds(served));
        let (longest, wrong) = self.end_of_load(&mut load, time)?;
        self.undo(act, holder)?;
        let start = Instant::now();
        self.wait_until_healthy(asked)?;
        println!(
            "all replicas are in sync {} later",
            seconds(start.elapsed())
        );
        Ok(Round {
            served,
            longest,
            wrong,
        })
    }

    /// Starts `nacre perf --verify` through the host's paths, for so many seconds.
    pub(super) fn load(&self, kind: &str, range: &str, rate: u64, time: u64) -> Result<Group> {
        let _ = std::fs::remove_file(self.dir.join("load.log"));
        let (address, rate) = (Network::Hosts.address_of(HOST), rate.to_string());
        let mut perf = on(HOST, &self.nacre);
        perf.args(["perf", "--traddr", &address, "--nqn", HOST_NQN])
            .args(["--rw", kind, "--mix", "50", "--verify", "--queues", "1"])
            .args(["--json", "--quiet", "--range", range, "--rate", &rate])
            .args(["--seconds", &time.to_string()]);
        self.spawn(&mut perf, "load")
    }

    /// The longest I/O of the load, and the number of wrong blocks.
    pub(super) fn end_of_load(&self, load: &mut Group, time: u64) -> Result<(Duration, u64)> {
        let end = load.wait(Duration::from_secs(time) + PATIENCE)?;
        let report = std::fs::read_to_string(self.dir.join("load.log"));
        let report = report.context("reading the report")?;
        if !end.success() {
            bail!("the load failed ({end}):\n{report}");
        }
        let report: Value = serde_json::from_str(&report)
            .with_context(|| format!("the report of the load is no JSON:\n{report}"))?;
        let of = |direction: &str| report[direction]["latency_ns"]["max"].as_u64();
        let nanos = of("write").max(of("read"));
        let wrong = report["verification"]["blocks_wrong"].as_u64();
        Ok((
            Duration::from_nanos(nanos.context("the report has no longest I/O")?),
            wrong.context("the report has no wrong blocks")?,
        ))
    }

    fn act(&mut self, act: Act, holder: &'static str) -> Result<()> {
        match act {
            Act::Kill => {
                self.daemons.remove(holder);
            }
            Act::Silence => self.set_links_of(holder, "down")?,
            Act::Stop => self.stop_daemon(holder)?,
            Act::Move => {
                let to = if holder == "a" { "b" } else { "a" };
                let mut to_other = Command::new(&self.nacre);
                to_other.args(["cluster", "move", "v", "--to", to, "--socket"]);
                println!("$ {}", process::shown(&to_other).replace(" --socket", ""));
                call(to_other.arg(self.socket(to)))?;
            }
        }
        Ok(())
    }

    fn undo(&mut self, act: Act, former: &'static str) -> Result<()> {
        match act {
            Act::Kill | Act::Stop => {
                println!("node {former} starts again");
                self.start_node(former)
            }
            Act::Silence => {
                println!("node {former} is connected again");
                self.set_links_of(former, "up")
            }
            Act::Move => Ok(()),
        }
    }

    pub(super) fn serve_until_interrupted(&mut self) -> Result<()> {
        println!("\nserving until interrupted (Ctrl-C); try for example");
        let (nacre, socket) = (self.nacre.display(), self.socket("a"));
        println!("    {nacre} cluster status --socket {}", socket.display());
        while !process::interrupted() {
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Cuts the machine off from its networks (`down`), or connects it.
    fn set_links_of(&self, machine: &'static str, state: &str) -> Result<()> {
        set_ports(
            &self.dir,
            &Network::ALL.map(|network| (machine, network)),
            state,
        )
    }

    fn stop_daemon(&mut self, machine: &'static str) -> Result<()> {
        let Some(mut group) = self.daemons.remove(machine) else {
            return Ok(());
        };
        group.terminate();
        let end = group.wait_through_interrupts(STOP_LIMIT)?;
        if !end.success() {
            bail!("the daemon of {machine} did not stop cleanly: {end}");
        }
        Ok(())
    }

    pub(super) fn stop(&mut self) -> Result<()> {
        for machine in [HOST, "a", "b", "c"] {
            self.stop_daemon(machine)?;
        }
        println!("\nall daemons stopped cleanly");
        Ok(())
    }
}
