//! Runs `nacre serve` as a process in its own directory, for the end-to-end tests: starts, calls,
//! observes, kills and restarts it.
//!
//! It reads no configuration of this machine or user, keeps its state in a temporary directory, and
//! serves on one core without root or hugepages. Dropping [`Daemon`] kills it by its own process
//! id.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

use nacre_engine_rpc::client::{Client, ClientError};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Time limit for a daemon on a busy machine to start, to reply, and to end.
const PATIENCE: Duration = Duration::from_secs(180);

/// The directory of one daemon, and its settings.
pub struct Place {
    dir: tempfile::TempDir,
    env: Vec<(String, String)>,
    cores: usize,
    /// The network namespace to run in; `None`: the test's.
    network: Option<String>,
}

impl Default for Place {
    fn default() -> Self {
        Self::new()
    }
}

impl Place {
    pub fn new() -> Self {
        let place = Self {
            dir: tempfile::tempdir().expect("a temporary directory"),
            env: Vec::new(),
            cores: 1,
            network: None,
        };
        // The default discovery port is shared by the machine, and tests run in parallel.
        place.with("NACRE_NVMF_DISCOVERY_PORT", 0)
    }

    /// Sets an environment variable of the daemon, for example a setting.
    pub fn with(mut self, variable: &str, value: impl ToString) -> Self {
        self.env.retain(|(name, _)| name != variable);
        self.env.push((variable.into(), value.to_string()));
        self
    }

    /// Takes a variable back.
    pub fn without(mut self, variable: &str) -> Self {
        self.env.retain(|(name, _)| name != variable);
        self
    }

    /// Sets the number of cores to serve on; the default is one.
    pub fn on_cores(mut self, cores: usize) -> Self {
        self.cores = cores;
        self
    }

    /// Runs in this network namespace, through `ip netns exec`.
    pub fn in_network(mut self, namespace: &str) -> Self {
        self.network = Some(namespace.to_owned());
        self
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn socket(&self) -> PathBuf {
        self.path("nacre.sock")
    }

    pub fn nacre(&self) -> Command {
        let mut command = match &self.network {
            None => Command::new(nacre_binary()),
            // `ip netns exec` replaces itself by the program, so the process id stays.
            Some(namespace) => {
                let mut command = Command::new("ip");
                command
                    .args(["netns", "exec", namespace])
                    .arg(nacre_binary());
                command
            }
        };
        command
            .env_clear()
            .env("HOME", self.dir.path())
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .envs(self.env.iter().cloned())
            .stdin(Stdio::null());
        command
    }

    /// The command `nacre serve` in this place, for a test that expects it to end by itself.
    pub fn serve_command(&self, socket: &Path, data_dir: &Path) -> Command {
        let mut command = self.nacre();
        command.arg("serve").arg("-r").arg(socket);
        command.arg("--data-dir").arg(data_dir);
        let (cores, memory) = (
            format!("auto:{}", self.cores),
            (32 * self.cores).to_string(),
        );
        command.args(["--cores", &cores, "--mem-size", &memory]);
        command
    }

    /// Runs a client command of `nacre` against this daemon.
    pub fn client(&self, args: &[&str]) -> Output {
        let mut command = self.nacre();
        command.args(args).arg("-r").arg(self.socket());
        command.output().expect("nacre runs")
    }

    /// Starts the daemon and waits until it is initialized.
    pub fn start(&self) -> Daemon {
        let mut daemon = self.spawn();
        let mut client = daemon.connect();
        client
            .call_by_name("framework_wait_init", Value::Null)
            .unwrap_or_else(|error| panic!("{error}\n{}", daemon.log()));
        daemon.client = Some(client);
        daemon
    }

    /// Starts the daemon without waiting for it.
    pub fn spawn(&self) -> Daemon {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.path("log"))
            .expect("a log");
        self.spawn_logging_to(log)
    }

    /// Starts the daemon and sends its log to `log`.
    pub fn spawn_logging_to(&self, log: impl Into<Stdio>) -> Daemon {
        let mut command = self.serve_command(&self.socket(), &self.path("data"));
        command.stdout(Stdio::null()).stderr(log);
        self.spawned(command)
    }

    /// Runs a command of [`Place::serve_command`], and waits until the daemon is initialised.
    pub fn started(&self, command: Command) -> Daemon {
        let mut daemon = self.spawned(command);
        daemon.call("framework_wait_init", Value::Null);
        daemon
    }

    fn spawned(&self, mut command: Command) -> Daemon {
        Daemon {
            child: command.spawn().expect("nacre starts"),
            client: None,
            socket: self.socket(),
            log: self.path("log"),
        }
    }
}

/// A running daemon. Killed when dropped.
pub struct Daemon {
    child: Child,
    client: Option<Client>,
    socket: PathBuf,
    log: PathBuf,
}

impl Daemon {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The log of this daemon and of its predecessors in this place.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// A new connection to the management socket; waits until the daemon listens.
    pub fn connect(&mut self) -> Client {
        let until = Instant::now() + PATIENCE;
        loop {
            match Client::connect(&self.socket, PATIENCE) {
                Ok(client) => return client,
                Err(error) if Instant::now() > until => panic!("{error}\n{}", self.log()),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
            if let Some(status) = self.child.try_wait().expect("our child") {
                panic!("the daemon ended: {status}\n{}", self.log());
            }
        }
    }

    pub fn try_call(&mut self, method: &str, params: Value) -> Result<Value, ClientError> {
        if self.client.is_none() {
            self.client = Some(self.connect());
        }
        let client = self.client.as_mut().expect("just made");
        client.call_by_name(method, params)
    }

    /// A call that must succeed.
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.try_call(method, params)
            .unwrap_or_else(|error| panic!("{error}\n{}", self.log()))
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("our child can be signalled");
    }

    /// Stops the process like a machine that hangs. All threads are stopped when this returns:
    /// SIGSTOP alone stops one thread first, and the others may still run for a while.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        let tasks = format!("/proc/{}/task", self.pid());
        let is_stopped = |task: std::fs::DirEntry| {
            // The fields after the name, which is in parentheses.
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit(')')
                .next()
                .is_none_or(|rest| rest.trim_start().starts_with('T'))
        };
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            let mut all = std::fs::read_dir(&tasks)
                .expect("the daemon's threads")
                .flatten();
            if all.all(is_stopped) {
                return;
            }
            assert!(Instant::now() < end, "the daemon does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Kills the process as by `kill -9`: no drain, no message. Waits until the process is gone.
    pub fn kill(mut self) {
        self.child.kill().expect("our child can be killed");
        self.child.wait().expect("our child");
    }

    /// Stops the process as by `systemctl stop`: it must end by itself, with exit code 0.
    pub fn stop(self) {
        self.signal(Signal::TERM);
        let (status, log) = self.ended();
        assert!(status.success(), "the daemon ended with {status}\n{log}");
        // Without a watch, only timers wake a sleeping core.
        assert!(!log.contains("cannot watch"), "{log}");
    }

    /// Waits until the process is gone.
    pub fn ended(mut self) -> (ExitStatus, String) {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("our child") {
                return (status, self.log());
            }
            let log = || self.log();
            assert!(Instant::now() < until, "the daemon does not end\n{}", log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    // Objects.

    /// Creates a uring bdev of `bytes` with blocks of `block_size`, on a new file in the place.
    pub fn create_file(&mut self, name: &str, block_size: u32, bytes: u64) {
        let file = self.log.with_file_name(format!("{name}.img"));
        self.call(
            "bdev_uring_create",
            json!({ "name": name, "filename": file, "block_size": block_size, "size": bytes }),
        );
    }

    pub fn create_ram(&mut self, name: &str, block_size: u32, bytes: u64) {
        let blocks = bytes / u64::from(block_size);
        self.call(
            "bdev_malloc_create",
            json!({ "name": name, "num_blocks": blocks, "block_size": block_size }),
        );
    }

    pub fn create_subsystem(&mut self, nqn: &str) {
        self.call(
            "nvmf_create_subsystem",
            json!({ "nqn": nqn, "allow_any_host": true }),
        );
    }

    pub fn add_namespace(&mut self, nqn: &str, bdev: &str) -> u32 {
        let namespace = json!({ "bdev_name": bdev });
        let nsid = self.call(
            "nvmf_subsystem_add_ns",
            json!({ "nqn": nqn, "namespace": namespace }),
        );
        nsid.as_u64().expect("a namespace identifier") as u32
    }

    /// Adds a listener on `address`; port 0 takes any free port. Returns the actual address.
    pub fn listen(&mut self, nqn: &str, address: &str) -> SocketAddr {
        let wish: SocketAddr = address.parse().expect("an address");
        let before = self.listeners(nqn);
        self.call(
            "nvmf_subsystem_add_listener",
            json!({ "nqn": nqn, "listen_address": {
                "trtype": "TCP",
                "traddr": wish.ip().to_string(),
                "trsvcid": wish.port().to_string(),
            }}),
        );
        let new = self
            .listeners(nqn)
            .into_iter()
            .find(|l| !before.contains(l));
        new.expect("a new listener is listed")
    }

    pub fn listeners(&mut self, nqn: &str) -> Vec<SocketAddr> {
        let found = self.subsystem(nqn);
        let listeners = found["listen_addresses"].as_array().expect("a list");
        let address = |l: &Value| {
            let text = |key: &str| l[key].as_str().expect("a text").to_owned();
            let ip = text("traddr").parse().expect("an IP address");
            SocketAddr::new(ip, text("trsvcid").parse().expect("a port"))
        };
        listeners.iter().map(address).collect()
    }

    /// One subsystem, as listed.
    pub fn subsystem(&mut self, nqn: &str) -> Value {
        self.call("nvmf_get_subsystems", json!({ "nqn": nqn }))[0].take()
    }

    /// Number of controllers of a subsystem.
    pub fn controllers(&mut self, nqn: &str) -> usize {
        let found = self.call("nvmf_subsystem_get_controllers", json!({ "nqn": nqn }));
        found.as_array().expect("a list").len()
    }

    // Resource use.

    /// Number of open file descriptors.
    pub fn descriptors(&self) -> usize {
        let path = format!("/proc/{}/fd", self.pid());
        std::fs::read_dir(path).expect("our child's").count()
    }

    /// Bytes of resident memory.
    pub fn resident(&self) -> u64 {
        let path = format!("/proc/{}/status", self.pid());
        let status = std::fs::read_to_string(path).expect("our child's");
        let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
        let kib = line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok());
        kib.expect("VmRSS in kB") * 1024
    }

    /// CPU time of all its threads, user and system.
    pub fn processor_time(&self) -> Duration {
        let path = format!("/proc/{}/task", self.pid());
        let mut total = Duration::ZERO;
        for thread in std::fs::read_dir(path).expect("our child's") {
            let path = thread.expect("a thread").path().join("schedstat");
            // Skip a thread that ended meanwhile.
            let Ok(text) = std::fs::read_to_string(path) else {
                continue;
            };
            let run = text.split_whitespace().next().and_then(|n| n.parse().ok());
            total += Duration::from_nanos(run.expect("nanoseconds"));
        }
        total
    }

    /// Buffers in use on all reactors, by pool.
    pub fn buffers_in_use(&mut self) -> Vec<(String, u64)> {
        let pools = self.call("iobuf_get_stats", Value::Null);
        let mut used = Vec::new();
        for module in pools.as_array().expect("a list") {
            for size in ["small_pool", "large_pool"] {
                let of = |key: &str| module[size][key].as_u64().expect("a count");
                let name = format!("{} {size}", module["module"]);
                used.push((name, of("cache_size") - of("free")));
            }
        }
        used.retain(|(_, count)| *count > 0);
        used
    }

    /// Waits until every buffer is returned and no more than `descriptors` are open. Reactors
    /// release resources of closed connections with some delay.
    pub fn assert_comes_down_to(&mut self, descriptors: usize) {
        let until = Instant::now() + PATIENCE;
        loop {
            let left = (self.descriptors(), self.buffers_in_use());
            if left.0 == descriptors && left.1.is_empty() {
                return;
            }
            let late = Instant::now() > until;
            assert!(!late, "left: {left:?}; {descriptors} descriptors before");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Both fail if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- the daemon's log\n{}", self.log());
        }
    }
}

/// A free address on `ip`, see [`nacre_random_ports`].
pub fn free_address(ip: &str) -> SocketAddr {
    nacre_random_ports::free_address(ip.parse().expect("an IP address"))
}

/// The program under test, from the same build as the calling test. Cargo does not know this
/// dependency, so this function builds the program if it is missing or older than its library.
pub fn nacre_binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let test = std::env::current_exe().expect("the test's path");
        let deps = test.parent().expect("target/PROFILE/deps");
        let profile = deps.parent().expect("target/PROFILE");
        let binary = profile.join("nacre");
        if is_stale(&binary, deps) {
            build(profile);
        }
        assert!(binary.exists(), "no {}", binary.display());
        binary
    })
}

fn is_stale(binary: &Path, deps: &Path) -> bool {
    let modified = |path: &Path| path.metadata().and_then(|m| m.modified()).ok();
    let Some(built) = modified(binary) else {
        return true;
    };
    let is_library =
        |name: &str| name.starts_with("libnacre_engine_cli-") && name.ends_with(".rlib");
    let libraries = std::fs::read_dir(deps).expect("target/PROFILE/deps");
    let newest: Option<SystemTime> = libraries
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|path| {
            path.file_name()
                .and_then(|n| n.to_str())
                .is_some_and(is_library)
        })
        .filter_map(|path| modified(&path))
        .max();
    newest.is_some_and(|library| library > built)
}

fn build(profile: &Path) {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let name = profile.file_name().and_then(|n| n.to_str());
    let name = match name.expect("target/PROFILE") {
        "debug" => "dev",
        other => other,
    };
    let mut command = Command::new(cargo);
    command
        .args([
            "build",
            "--quiet",
            "-p",
            "nacre-engine-cli",
            "--bin",
            "nacre",
        ])
        .args(["--profile", name, "--target-dir"])
        .arg(profile.parent().expect("target"))
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let status = command.status().expect("cargo runs");
    assert!(status.success(), "nacre could not be built: {status}");
}
