//! `cargo xtask cluster`: demonstrates a volume that outlives the node that serves it.
//!
//! Starts three members of etcd and three daemons in network namespaces, each pair a machine, and
//! a fourth daemon as the host with a path to each node. Then something happens to the node that
//! serves the volume, under verified load, and the longest I/O is printed.
//!
//! ```text
//!             bridge 10.77.0.0/24
//!   ┌────────────┬───────┴────┬────────────┐
//!   a            b            c            host
//!   etcd         etcd         etcd         nacre serve (3 paths) ◀── nacre perf
//!   nacre serve  nacre serve  nacre serve
//! ```
//!
//! The command restarts itself in a network and a mount namespace of its own, so that nothing of
//! the machine's network changes and nothing stays. Without root these are in a user namespace.

mod scale;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use crate::process::{self, Group};
use crate::run::Scratch;
use crate::setup::{self, need};
use crate::tally::Tally;

const BUILD_LIMIT: Duration = Duration::from_secs(1800);
const CALL_LIMIT: Duration = Duration::from_secs(60);
/// Time for daemons to start, for nodes to join, and for replicas to be in sync again.
const PATIENCE: Duration = Duration::from_secs(120);
const STOP_LIMIT: Duration = Duration::from_secs(30);

const NODES: [&str; 3] = ["a", "b", "c"];
const HOST: &str = "host";
/// The namespace with the bridge.
const SWITCH: &str = "switch";
const NETWORK: &str = "10.77.0.";
const HOST_NQN: &str = "nqn.2026-01.io.nacre:demo";
const DEVICE_BYTES: u64 = 64 << 20;
/// Load before the act. Long enough for a first round of comparisons.
const BEFORE: Duration = Duration::from_secs(3);

/// The name of the suite, for filters.
const NAME: &str = "cluster-network";
const SUITE_LIMIT: Duration = Duration::from_secs(300);
/// Longest I/O of the suite, in milliseconds: the lease, the time until the host gives up the
/// silent path, and room for a busy machine.
const SUITE_BAR_MS: &str = "10000";

#[derive(Args)]
pub(crate) struct Options {
    /// What happens to the node that serves the volume, one after the other.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kill")]
    act: Vec<Act>,
    /// Time without a renewal after which other nodes take a node's volumes, in seconds.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=30))]
    lease: u64,
    /// I/Os per second of the load.
    #[arg(long, default_value_t = 1000)]
    rate: u64,
    /// Fail if an I/O takes longer than this, in milliseconds.
    #[arg(long)]
    bar: Option<u64>,
    /// Serve until interrupted, so that commands can be tried.
    #[arg(long)]
    stay: bool,
    /// Use this `nacre` instead of building one.
    #[arg(long)]
    nacre: Option<PathBuf>,
    /// Use this `etcd` instead of Debian's.
    #[arg(long)]
    etcd: Option<PathBuf>,
    /// Instead: many nodes and volumes on one member of etcd, without daemons. Prints leases,
    /// fail-over and load beside their bars, and fails above one.
    #[arg(
        long,
        value_name = "NODES,VOLUMES",
        num_args = 0..=1,
        default_missing_value = "100,10000",
        value_parser = scale::nodes_and_volumes,
        conflicts_with_all = ["act", "bar", "stay", "nacre"]
    )]
    scale: Option<String>,
    /// Set by the command itself, when it restarts in its namespaces: the folder for all files.
    #[arg(long, hide = true)]
    inside: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Act {
    /// The daemon is killed (SIGKILL). Its replica is back when it starts again.
    Kill,
    /// The machine is cut off from the network, with its member of etcd.
    Silence,
    /// The daemon stops in order (SIGTERM).
    Stop,
    /// An operator moves the volume to another node.
    Move,
}

impl Act {
    fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

pub(crate) fn run(root: &Path, options: &Options) -> Result<ExitCode> {
    if let Some(dir) = &options.inside {
        process::catch_interrupts()?;
        let (Some(nacre), Some(etcd)) = (&options.nacre, &options.etcd) else {
            bail!("--inside needs --nacre and --etcd");
        };
        return demonstrate(options, dir, nacre, etcd);
    }
    if let Some(scale) = &options.scale {
        let etcd = options.etcd.clone();
        return scale::measure(root, scale, &etcd.map_or_else(debian_etcd, Ok)?);
    }
    setup::ensure(&[need("ip", "iproute2"), need("unshare", "util-linux")])?;
    let nacre = match &options.nacre {
        Some(path) => path.clone(),
        None => {
            let arguments = ["--release", "--locked", "--package", "nacre-engine-cli"];
            setup::cargo_build(root, &arguments, BUILD_LIMIT)?;
            crate::target_dir(root).join("release/nacre")
        }
    };
    let etcd = match &options.etcd {
        Some(path) => path.clone(),
        None => debian_etcd()?,
    };
    // Removed here, because a time limit kills the other process.
    let scratch = Scratch::create()?;
    let acts: Vec<String> = options.act.iter().map(|act| act.name()).collect();
    let mut again = in_namespaces(&std::env::current_exe().context("finding this program")?)?;
    again
        .args(["cluster", "--act", &acts.join(","), "--inside"])
        .arg(&scratch.path);
    again.arg("--nacre").arg(nacre).arg("--etcd").arg(etcd);
    again.args(["--lease", &options.lease.to_string()]);
    again.args(["--rate", &options.rate.to_string()]);
    if let Some(bar) = options.bar {
        again.args(["--bar", &bar.to_string()]);
    }
    if options.stay {
        again.arg("--stay");
    }
    // A terminal interrupts both; the inner one cleans up.
    process::catch_interrupts()?;
    let status = again.status().context("running unshare")?;
    Ok(ExitCode::from(u8::from(!status.success())))
}

/// The suite of `cargo xtask test`: a node that is cut off. The test of daemons has the other acts.
pub(crate) fn suite(root: &Path, nacre: Option<&Path>) -> Result<Tally> {
    let mut tally = Tally::default();
    setup::ensure(&[need("ip", "iproute2"), need("unshare", "util-linux")])?;
    if let Err(error) = call(&mut in_namespaces(Path::new("true"))?) {
        tally.skip(format!("{NAME}: no network namespaces here: {error:#}"));
        return Ok(tally);
    }
    let etcd = match debian_etcd() {
        Ok(etcd) => etcd,
        Err(error) => {
            tally.skip(format!(
                "{NAME}: no etcd (Debian's package etcd-server): {error:#}"
            ));
            return Ok(tally);
        }
    };
    let nacre = crate::vm::debug_nacre(root, nacre)?;
    let scratch = Scratch::create()?;
    let mut again = in_namespaces(&std::env::current_exe().context("finding this program")?)?;
    again
        .args([
            "cluster",
            "--act",
            "silence",
            "--bar",
            SUITE_BAR_MS,
            "--inside",
        ])
        .arg(&scratch.path);
    again.arg("--nacre").arg(nacre).arg("--etcd").arg(etcd);
    let end = process::stream(&mut again, SUITE_LIMIT, |_| {})?;
    tally.check(&format!("{NAME}: {end}"), end.success());
    Ok(tally)
}

pub(crate) fn matches(filter: &[String]) -> bool {
    filter.is_empty() || filter.iter().any(|part| NAME.contains(part.as_str()))
}

fn debian_etcd() -> Result<PathBuf> {
    let program = "usr/bin/etcd";
    Ok(crate::vm::unpacked("etcd-server", program)?.join(program))
}

/// The program, with namespaces of its own.
fn in_namespaces(program: &Path) -> Result<Command> {
    let mut unshare = Command::new("unshare");
    if !setup::is_root()? {
        unshare.args(["--user", "--map-root-user"]);
    }
    // With a process namespace, daemons cannot outlive this command.
    unshare.args([
        "--net",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]);
    unshare.arg("--").arg(program);
    Ok(unshare)
}

fn demonstrate(options: &Options, dir: &Path, nacre: &Path, etcd: &Path) -> Result<ExitCode> {
    make_network()?;
    let mut demo = Demo {
        nacre: nacre.to_owned(),
        dir: dir.to_owned(),
        etcd: BTreeMap::new(),
        daemons: BTreeMap::new(),
    };
    demo.start(etcd, options.lease)?;
    let nqn = demo.publish()?;
    demo.connect(&nqn)?;
    let mut results = Vec::new();
    for act in &options.act {
        results.push((*act, demo.round(*act, options)?));
    }
    println!(
        "\n{:<10}{:>18}{:>14}{:>14}",
        "", "served again", "longest I/O", "wrong blocks"
    );
    for (act, result) in &results {
        let served = seconds(result.served);
        let longest = seconds(result.longest);
        println!(
            "{:<10}{served:>18}{longest:>14}{:>14}",
            act.name(),
            result.wrong
        );
    }
    if options.stay {
        demo.serve_until_interrupted()?;
    }
    demo.stop()?;
    let bar = Duration::from_millis(options.bar.unwrap_or(u64::MAX));
    let is_good = |result: &Round| result.wrong == 0 && result.longest <= bar;
    if results.iter().all(|(_, result)| is_good(result)) {
        Ok(ExitCode::SUCCESS)
    } else {
        println!("\nfailed: blocks are wrong, or an I/O took longer than --bar");
        Ok(ExitCode::FAILURE)
    }
}

fn seconds(time: Duration) -> String {
    format!("{:.2} s", time.as_secs_f64())
}

/// A namespace per machine, each with an interface at the bridge.
fn make_network() -> Result<()> {
    // The names of namespaces are files in /run/netns.
    call(Command::new("mount").args(["-t", "tmpfs", "none", "/run"]))?;
    call(Command::new("ip").args(["netns", "add", SWITCH]))?;
    let on_switch =
        |arguments: &[&str]| call(Command::new("ip").args(["-n", SWITCH]).args(arguments));
    on_switch(&["link", "add", "bridge", "type", "bridge"])?;
    on_switch(&["link", "set", "bridge", "up"])?;
    for machine in NODES.iter().chain([&HOST]) {
        call(Command::new("ip").args(["netns", "add", machine]))?;
        let port = port_of(machine);
        on_switch(&[
            "link", "add", &port, "type", "veth", "peer", "eth0", "netns", machine,
        ])?;
        on_switch(&["link", "set", &port, "master", "bridge", "up"])?;
        let address = format!("{}/24", address_of(machine));
        for arguments in [
            &["addr", "add", &address, "dev", "eth0"][..],
            &["link", "set", "eth0", "up"],
            &["link", "set", "lo", "up"],
        ] {
            call(Command::new("ip").args(["-n", machine]).args(arguments))?;
        }
    }
    Ok(())
}

/// The machine's port of the bridge.
fn port_of(machine: &str) -> String {
    format!("to-{machine}")
}

fn address_of(machine: &str) -> String {
    let index = NODES.iter().position(|node| *node == machine);
    format!("{NETWORK}{}", index.unwrap_or(NODES.len()) + 1)
}

fn call(command: &mut Command) -> Result<String> {
    process::capture(command, CALL_LIMIT)
}

/// A command on a machine.
fn on(machine: &str, program: &Path) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", machine]).arg(program);
    command
}

/// Repeats the question until the answer is there.
fn until<T>(what: &str, mut ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
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

/// The result of one act.
struct Round {
    /// From the act until another node served the volume.
    served: Duration,
    longest: Duration,
    wrong: u64,
}

struct Demo {
    nacre: PathBuf,
    dir: PathBuf,
    // Killed when dropped: the daemons first.
    daemons: BTreeMap<&'static str, Group>,
    etcd: BTreeMap<&'static str, Group>,
}

impl Demo {
    fn start(&mut self, etcd: &Path, lease: u64) -> Result<()> {
        println!("three members of etcd: {}", self.endpoints());
        for node in NODES {
            let member = self.start_etcd(etcd, node)?;
            self.etcd.insert(node, member);
        }
        let mut init = on(HOST, &self.nacre);
        init.args(["cluster", "init", "demo", "--etcd", &self.endpoints()]);
        init.arg(format!("--lease={lease}s"));
        println!("$ {}", process::shown(&init));
        until("etcd has a leader", || {
            let mut again = on(HOST, &self.nacre);
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
            .map(|node| format!("http://{}:2379", address_of(node)))
            .join(",")
    }

    fn start_etcd(&self, etcd: &Path, node: &str) -> Result<Group> {
        let address = address_of(node);
        let (client, peer) = (
            format!("http://{address}:2379"),
            format!("http://{address}:2380"),
        );
        let members = NODES.map(|node| format!("{node}=http://{}:2380", address_of(node)));
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
        let mut command = self.daemon(node);
        command
            .arg("--data-dir")
            .arg(self.dir.join(node))
            .env("NACRE_CLUSTER_NAME", "demo")
            .env("NACRE_CLUSTER_NODE", node)
            .env("NACRE_STORE_ENDPOINTS", self.endpoints())
            .env(
                "NACRE_NVMF_LISTEN",
                format!("tcp://{}:4420", address_of(node)),
            );
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

    fn socket(&self, machine: &str) -> PathBuf {
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
    fn spawn(&self, command: &mut Command, log: &str) -> Result<Group> {
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

    fn rpc(&self, machine: &str, method: &str, params: &Value) -> Result<Value> {
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
    fn holder(&self, asked: &str) -> Result<Option<&'static str>> {
        let nodes = self.nodes(asked)?;
        let holder = nodes.iter().find(|node| node["held"] == 1);
        Ok(holder.and_then(|holder| NODES.into_iter().find(|node| holder["name"] == **node)))
    }

    fn wait_until_healthy(&self, asked: &str) -> Result<&'static str> {
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
    fn publish(&self) -> Result<String> {
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
    fn connect(&mut self, nqn: &str) -> Result<()> {
        let mut command = self.daemon(HOST);
        command
            .args(["--data-dir", "none"])
            .env("NACRE_REPLICATION_KEEP_ALIVE_MS", "1000")
            .env("NACRE_REPLICATION_FAST_FAIL_MS", "0");
        self.start_daemon(HOST, &mut command)?;
        for node in NODES {
            let path = json!({
                "name": "v", "trtype": "TCP", "traddr": address_of(node), "trsvcid": "4420",
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
        let address = json!({ "trtype": "tcp", "traddr": address_of(HOST), "trsvcid": "4420" });
        let listener = json!({ "nqn": HOST_NQN, "listen_address": address });
        self.rpc(HOST, "nvmf_subsystem_add_listener", &listener)?;
        println!("the host has a path to each node");
        Ok(())
    }

    /// Load, the act, and the return of the node.
    fn round(&mut self, act: Act, options: &Options) -> Result<Round> {
        let holder = self.wait_until_healthy("a")?;
        let asked = if holder == "a" { "b" } else { "a" };
        println!(
            "\n{}: node {holder} serves the volume, under verified load",
            act.name()
        );
        // Until long after the latest take.
        let time = BEFORE.as_secs() + 4 * options.lease + 4;
        let report = self.dir.join("load.log");
        let _ = std::fs::remove_file(&report);
        let mut perf = on(HOST, &self.nacre);
        perf.args(["perf", "--traddr", &address_of(HOST), "--nqn", HOST_NQN])
            .args([
                "--rw",
                "randwrite",
                "--verify",
                "--queues",
                "1",
                "--json",
                "--quiet",
            ])
            .args([
                "--rate",
                &options.rate.to_string(),
                "--seconds",
                &time.to_string(),
            ])
            .args(["--range", "16m"]);
        let mut load = self.spawn(&mut perf, "load")?;
        std::thread::sleep(BEFORE);
        let start = Instant::now();
        self.act(act, holder)?;
        let next = until("another node serves the volume", || {
            Ok(self.holder(asked)?.filter(|now| *now != holder))
        })?;
        let served = start.elapsed();
        println!("node {next} serves the volume after {}", seconds(served));
        let end = load.wait(Duration::from_secs(time) + PATIENCE)?;
        let report = std::fs::read_to_string(report).context("reading the report")?;
        if !end.success() {
            bail!("the load failed ({end}):\n{report}");
        }
        let report: Value = serde_json::from_str(&report)
            .with_context(|| format!("the report of the load is no JSON:\n{report}"))?;
        self.undo(act, holder)?;
        let start = Instant::now();
        self.wait_until_healthy(asked)?;
        println!(
            "all replicas are in sync {} later",
            seconds(start.elapsed())
        );
        let nanos = report["write"]["latency_ns"]["max"].as_u64();
        let wrong = report["verification"]["blocks_wrong"].as_u64();
        Ok(Round {
            served,
            longest: Duration::from_nanos(nanos.context("the report has no longest write")?),
            wrong: wrong.context("the report has no wrong blocks")?,
        })
    }

    fn act(&mut self, act: Act, holder: &'static str) -> Result<()> {
        match act {
            Act::Kill => {
                self.daemons.remove(holder);
            }
            Act::Silence => self.set_port(holder, "down")?,
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
                self.set_port(former, "up")
            }
            Act::Move => Ok(()),
        }
    }

    fn serve_until_interrupted(&mut self) -> Result<()> {
        println!("\nserving until interrupted (Ctrl-C); try for example");
        let (nacre, socket) = (self.nacre.display(), self.socket("a"));
        println!("    {nacre} cluster status --socket {}", socket.display());
        while !process::interrupted() {
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    fn set_port(&self, machine: &str, state: &str) -> Result<()> {
        let port = port_of(machine);
        call(Command::new("ip").args(["-n", SWITCH, "link", "set", &port, state]))?;
        Ok(())
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

    fn stop(&mut self) -> Result<()> {
        for machine in [HOST, "a", "b", "c"] {
            self.stop_daemon(machine)?;
        }
        println!("\nall daemons stopped cleanly");
        Ok(())
    }
}
