//! The target daemon of a benchmark over TCP (Nacre, or SPDK as the peer): starts, configures and
//! stops it.

use std::io::Write;
use std::net::TcpStream;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::process::{self, End, Group};
use crate::setup;

pub(super) const ADDRESS: &str = "127.0.0.1";
/// Not the default port, so that a target in use is not disturbed.
pub(super) const PORT: &str = "14420";
/// Port of the daemon that Nacre is compared with.
const PEER_PORT: &str = "14421";
/// Port of the limit target.
const LIMIT_PORT: &str = "14422";
pub(super) const NQN: &str = "nqn.2026-01.io.nacre:bench";
pub(super) const TARGET_CORE: &str = "0";
/// As a mask, because the option reads a plain number as a count of reactors.
const TARGET_CORE_MASK: &str = "0x1";
pub(super) const HOST_CORE: &str = "1";
pub(super) const HOST_CORE_MASK: &str = "0x2";

/// Seconds of load before the measurement, until the congestion window and the socket buffers have
/// grown. The same as in the limit program.
pub(super) const WARM_UP: &str = "0.3";

/// The malloc bdev of a target.
#[derive(Debug, Clone, Copy)]
pub(super) struct Disk {
    pub block_bytes: u64,
    pub blocks: u64,
}

/// 16 MiB, which fits into the CPU's shared cache. Random writes to a larger RAM disk measure main
/// memory instead: at 256 MiB they are 40 percent slower.
const CACHED_DISK: Disk = Disk {
    block_bytes: 4096,
    blocks: 4096,
};
/// Bytes per request when filling a disk.
const FILL: u64 = 128 << 10;
/// New memory of a busy machine takes a minute per gigabyte.
const FILL_LIMIT: Duration = Duration::from_secs(300);
const SOCKET: &str = "rpc.sock";
const LOG: &str = "log";
const RPC_LIMIT: Duration = Duration::from_secs(30);
/// Limit of a call that is measured, such as the import of a large pool.
const CALL_LIMIT: Duration = Duration::from_secs(300);

/// A daemon with one reactor and a malloc bdev, in a folder that is removed with it.
pub(super) struct Target<'a> {
    nacre: &'a Path,
    dir: PathBuf,
    port: &'static str,
    disk: Disk,
    group: Group,
}

impl<'a> Target<'a> {
    pub(super) fn start(nacre: &'a Path) -> Result<Self> {
        Target::start_as(nacre, Command::new(nacre), &[])
    }

    /// Starts `nacre` through `command`, which may be a tool that runs it; `more` follows the usual
    /// arguments.
    pub(super) fn start_as(nacre: &'a Path, command: Command, more: &[&str]) -> Result<Self> {
        Target::start_nacre(nacre, command, more, CACHED_DISK)
    }

    /// Starts `nacre` with a disk of another size.
    pub(super) fn start_with(nacre: &'a Path, disk: Disk) -> Result<Self> {
        Target::start_nacre(nacre, Command::new(nacre), &[], disk)
    }

    fn start_nacre(
        nacre: &'a Path,
        mut command: Command,
        more: &[&str],
        disk: Disk,
    ) -> Result<Self> {
        let dir = folder("nacre")?;
        command
            .args(["serve", "--cores", TARGET_CORE_MASK, "--data-dir"])
            .arg(dir.join("data"))
            .arg("-r")
            .arg(dir.join(SOCKET))
            .args(more);
        Target::launch(nacre, command, dir, PORT, disk)
    }

    /// Starts SPDK's target (`nvmf_tgt`) and configures it by the same calls.
    pub(super) fn start_spdk(
        nacre: &'a Path,
        nvmf_tgt: &Path,
        memory: &[&str],
        disk: Disk,
    ) -> Result<Self> {
        let dir = folder("spdk")?;
        let mut command = Command::new(nvmf_tgt);
        command
            .args(["-m", TARGET_CORE_MASK, "-r"])
            .arg(dir.join(SOCKET))
            .args(memory);
        Target::launch(nacre, command, dir, PEER_PORT, disk)
    }

    fn launch(
        nacre: &'a Path,
        mut command: Command,
        dir: PathBuf,
        port: &'static str,
        disk: Disk,
    ) -> Result<Self> {
        let log = process::log_file(&dir.join(LOG))?;
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("sharing the daemon's log")?)
            .stderr(log);
        let group = Group::spawn(&mut command)?;
        let target = Target {
            nacre,
            dir,
            port,
            disk,
            group,
        };
        target.configure()?;
        Ok(target)
    }

    /// The process id of the daemon.
    pub(super) fn pid(&self) -> u32 {
        self.group.id()
    }

    /// The daemon's port.
    pub(super) fn port(&self) -> &'static str {
        self.port
    }

    /// Pauses the daemon until [`Target::resume`]: a polling daemon would take half of the core of
    /// the daemon that is measured.
    pub(super) fn pause(&self) {
        self.group.signal("STOP");
    }

    pub(super) fn resume(&self) {
        self.group.signal("CONT");
    }

    fn configure(&self) -> Result<()> {
        let start = Instant::now();
        while self.rpc("framework_wait_init", None).is_err() {
            if start.elapsed() > RPC_LIMIT {
                bail!(
                    "the daemon does not answer: {}",
                    std::fs::read_to_string(self.dir.join(LOG))?
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        if !self
            .rpc("nvmf_get_transports", None)?
            .to_ascii_lowercase()
            .contains("\"tcp\"")
        {
            self.rpc("nvmf_create_transport", Some(json!({ "trtype": "tcp" })))?;
        }
        self.rpc(
            "bdev_malloc_create",
            Some(json!({
                "name": "m", "block_size": self.disk.block_bytes, "num_blocks": self.disk.blocks,
            })),
        )?;
        self.rpc(
            "nvmf_create_subsystem",
            Some(json!({ "nqn": NQN, "allow_any_host": true })),
        )?;
        self.rpc(
            "nvmf_subsystem_add_ns",
            Some(json!({ "nqn": NQN, "namespace": { "bdev_name": "m" } })),
        )?;
        let address =
            json!({ "trtype": "tcp", "adrfam": "ipv4", "traddr": ADDRESS, "trsvcid": self.port });
        self.rpc(
            "nvmf_subsystem_add_listener",
            Some(json!({ "nqn": NQN, "listen_address": address })),
        )?;
        Ok(())
    }

    /// Writes a key file in the daemon's folder. It has no end of line: SPDK takes none.
    pub(super) fn write_key(&self, text: &str) -> Result<PathBuf> {
        let path = self.dir.join("psk");
        let mut options = std::fs::OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600).open(&path);
        file.and_then(|mut file| file.write_all(text.as_bytes()))
            .with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }

    /// Adds a listener at `port` that requires TLS, for the host `host` with the key of the file.
    pub(super) fn use_tls(&self, port: &str, host: &str, psk: &Path) -> Result<()> {
        let key = json!({ "name": "bench", "path": psk });
        self.rpc("keyring_file_add_key", Some(key))?;
        let address =
            json!({ "trtype": "tcp", "adrfam": "ipv4", "traddr": ADDRESS, "trsvcid": port });
        self.rpc(
            "nvmf_subsystem_add_listener",
            Some(json!({ "nqn": NQN, "listen_address": address, "secure_channel": true })),
        )?;
        self.rpc(
            "nvmf_subsystem_add_host",
            Some(json!({ "nqn": NQN, "host": host, "psk": "bench" })),
        )?;
        Ok(())
    }

    /// From here on the target serves only the hosts that are in the subsystem's list.
    pub(super) fn refuse_other_hosts(&self) -> Result<()> {
        self.rpc(
            "nvmf_subsystem_allow_any_host",
            Some(json!({ "nqn": NQN, "allow_any_host": false })),
        )?;
        Ok(())
    }

    fn rpc(&self, method: &str, params: Option<Value>) -> Result<String> {
        let mut command = Command::new(self.nacre);
        command
            .arg("rpc")
            .arg("--socket")
            .arg(self.dir.join(SOCKET))
            .arg(method);
        command.args(params.map(|params| params.to_string()));
        process::capture(&mut command, RPC_LIMIT)
    }

    /// Calls a method and returns its result.
    pub(super) fn json(&self, method: &str, params: Value) -> Result<Value> {
        let out = self.rpc(method, Some(params))?;
        serde_json::from_str(&out).with_context(|| format!("no JSON: {out:?}"))
    }

    /// Calls a method over the socket, without the start of a program. Returns its result and the
    /// duration of the call.
    pub(super) fn timed(&self, method: &str, params: &Value) -> Result<(Value, Duration)> {
        let path = self.dir.join(SOCKET);
        let mut socket = UnixStream::connect(&path)
            .with_context(|| format!("connecting to {}", path.display()))?;
        socket.set_read_timeout(Some(CALL_LIMIT))?;
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        let start = Instant::now();
        serde_json::to_writer(&socket, &request)?;
        socket.flush()?;
        let answer = serde_json::Deserializer::from_reader(&mut socket)
            .into_iter::<Value>()
            .next();
        let duration = start.elapsed();
        let answer = answer.with_context(|| format!("{method}: no answer"))??;
        match answer.get("result") {
            Some(result) => Ok((result.clone(), duration)),
            None => bail!("{method}: {}", answer["error"]),
        }
    }

    /// Ends the daemon as a crash would. The folder stays until the drop.
    pub(super) fn crash(&self) {
        self.group.signal("KILL");
    }

    /// Runs `nacre perf` against the target with `load` and returns its JSON output.
    pub(super) fn load(&self, load: &[&str], limit: Duration) -> Result<Value> {
        self.load_at(self.port, load, limit)
    }

    /// The same at another port of the target.
    pub(super) fn load_at(&self, port: &str, load: &[&str], limit: Duration) -> Result<Value> {
        let mut command = Command::new(self.nacre);
        command
            .args(["perf", "--traddr", ADDRESS, "--trsvcid", port])
            .args(["--nqn", NQN, "--cores", HOST_CORE, "--json"])
            .args(load);
        let out = process::capture(&mut command, limit)?;
        serde_json::from_str(&out).with_context(|| format!("no JSON: {out:?}"))
    }

    /// Writes every block of a namespace as large as the malloc bdev. The kernel maps unwritten
    /// memory to one zero page, and reading that page is faster than reading real data.
    pub(super) fn fill(&self, nsid: &str) -> Result<()> {
        self.fill_bytes(nsid, self.disk.blocks * self.disk.block_bytes)
    }

    /// Writes the first `bytes` of a namespace.
    pub(super) fn fill_bytes(&self, nsid: &str, bytes: u64) -> Result<()> {
        let size = FILL.to_string();
        let ios = (bytes / FILL).to_string();
        let load = [
            "--nsid", nsid, "--rw", "write", "--size", &size, "--depth", "16", "--queues", "1",
            "--ios", &ios,
        ];
        self.load(&load, FILL_LIMIT).map(|_| ())
    }

    pub(super) fn stop(mut self) -> Result<()> {
        self.group.terminate();
        match self.group.wait(Duration::from_secs(20))? {
            End::Exited(status) if status.success() => Ok(()),
            end => bail!("the daemon did not stop cleanly ({end})"),
        }
    }
}

impl Drop for Target<'_> {
    fn drop(&mut self) {
        self.group.kill();
        if let Err(error) = std::fs::remove_dir_all(&self.dir) {
            eprintln!("warning: cannot remove {}: {error}", self.dir.display());
        }
    }
}

/// The limit target (`benches/src/limit_target.rs`), on the core of the targets. Its admin queues
/// are those of a Nacre target, which must not be paused.
pub(super) struct LimitTarget {
    group: Group,
}

impl LimitTarget {
    pub(super) fn start(program: &Path, behind: &Target) -> Result<Self> {
        let mut command = Command::new(program);
        command
            .args(["--listen", &format!("{ADDRESS}:{LIMIT_PORT}")])
            .args(["--behind", &format!("{ADDRESS}:{}", behind.port)])
            .args(["--core", TARGET_CORE])
            .args(["--block-bytes", &behind.disk.block_bytes.to_string()])
            .args(["--blocks", &behind.disk.blocks.to_string()])
            .stdin(Stdio::null());
        let group = Group::spawn(&mut command)?;
        let start = Instant::now();
        while TcpStream::connect(format!("{ADDRESS}:{LIMIT_PORT}")).is_err() {
            if start.elapsed() > RPC_LIMIT {
                bail!("the limit target does not listen");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Self { group })
    }

    pub(super) fn port(&self) -> &'static str {
        LIMIT_PORT
    }
}

impl Drop for LimitTarget {
    fn drop(&mut self) {
        self.group.kill();
    }
}

/// A new folder for a daemon of this process.
fn folder(daemon: &str) -> Result<PathBuf> {
    let dir = std::env::temp_dir().join(format!("{daemon}-bench-{}", std::process::id()));
    setup::create_dir(&dir)?;
    Ok(dir)
}

/// The number at `path` in a JSON document.
pub(super) fn number(document: &Value, path: &[&str]) -> Result<f64> {
    path.iter()
        .try_fold(document, |value, key| value.get(key))
        .and_then(Value::as_f64)
        .with_context(|| format!("no number at {} in {document}", path.join(".")))
}
