//! The daemon that the TCP benchmarks measure.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::process::{self, End, Group};
use crate::setup;

pub const ADDRESS: &str = "127.0.0.1";
/// Away from the usual port, so that a target in use is not disturbed.
pub const PORT: &str = "14420";
pub const NQN: &str = "nqn.2026-01.io.nacre:bench";
pub const TARGET_CORE: &str = "0";
/// As a mask: a bare number is a count of reactors there.
const TARGET_CORE_MASK: &str = "0x1";
pub const HOST_CORE: &str = "1";

/// Seconds that a load runs before it is measured, as those of the limit program do: the congestion window opens, the
/// sockets' buffers grow.
pub const WARM_UP: &str = "0.3";

/// 16 MiB: a processor's shared cache may hold it. Random writes all over a larger RAM disk measure the memory behind
/// it (at 256 MiB they are slower by two fifths), not the way there.
const DISK_BLOCKS: u64 = 4096;
const DISK_BYTES: u64 = DISK_BLOCKS * 4096;
/// Of one of the requests that a disk is filled by.
const FILL: u64 = 128 << 10;
const RPC_LIMIT: Duration = Duration::from_secs(30);

/// A daemon of one reactor with a malloc bdev, in a folder that goes with it.
pub struct Target<'a> {
    nacre: &'a Path,
    dir: PathBuf,
    group: Group,
}

impl<'a> Target<'a> {
    pub fn start(nacre: &'a Path) -> Result<Target<'a>> {
        Target::start_as(nacre, Command::new(nacre), &[])
    }

    /// Started by `command`, which runs `nacre` itself or through a tool; `more` goes behind the usual arguments.
    pub fn start_as(nacre: &'a Path, mut command: Command, more: &[&str]) -> Result<Target<'a>> {
        let dir = std::env::temp_dir().join(format!("nacre-bench-{}", std::process::id()));
        setup::create_dir(&dir)?;
        let log = process::log_file(&dir.join("nacre.log"))?;
        command
            .args(["serve", "--cores", TARGET_CORE_MASK, "--data-dir"])
            .arg(dir.join("data"))
            .arg("-r")
            .arg(dir.join("nacre.sock"))
            .args(more)
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("sharing the daemon's log")?)
            .stderr(log);
        let group = Group::spawn(&mut command)?;
        let target = Target { nacre, dir, group };
        target.configure()?;
        Ok(target)
    }

    /// Of the daemon.
    pub fn pid(&self) -> u32 {
        self.group.id()
    }

    fn configure(&self) -> Result<()> {
        let start = Instant::now();
        while self.rpc("framework_wait_init", None).is_err() {
            if start.elapsed() > RPC_LIMIT {
                bail!(
                    "the daemon does not answer: {}",
                    std::fs::read_to_string(self.dir.join("nacre.log"))?
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
            Some(json!({ "name": "m", "block_size": 4096, "num_blocks": DISK_BLOCKS })),
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
            json!({ "trtype": "tcp", "adrfam": "ipv4", "traddr": ADDRESS, "trsvcid": PORT });
        self.rpc(
            "nvmf_subsystem_add_listener",
            Some(json!({ "nqn": NQN, "listen_address": address })),
        )?;
        Ok(())
    }

    fn rpc(&self, method: &str, params: Option<Value>) -> Result<String> {
        let mut command = Command::new(self.nacre);
        command
            .arg("rpc")
            .arg("--socket")
            .arg(self.dir.join("nacre.sock"))
            .arg(method);
        command.args(params.map(|params| params.to_string()));
        process::capture(&mut command, RPC_LIMIT)
    }

    /// Calls a method, and gives its answer.
    pub fn json(&self, method: &str, params: Value) -> Result<Value> {
        let out = self.rpc(method, Some(params))?;
        serde_json::from_str(&out).with_context(|| format!("no JSON: {out:?}"))
    }

    /// Runs `nacre perf` against it with `load`, and gives what it printed for programs.
    pub fn load(&self, load: &[&str], limit: Duration) -> Result<Value> {
        let mut command = Command::new(self.nacre);
        command
            .args(["perf", "--traddr", ADDRESS, "--trsvcid", PORT])
            .args(["--nqn", NQN, "--cores", HOST_CORE, "--json"])
            .args(load);
        let out = process::capture(&mut command, limit)?;
        serde_json::from_str(&out).with_context(|| format!("no JSON: {out:?}"))
    }

    /// Writes every block of a namespace as large as the malloc bdev. Memory that was never written is one page of zeroes
    /// for the kernel, whatever is read: as fast as a disk with data never is.
    pub fn fill(&self, nsid: &str) -> Result<()> {
        let size = FILL.to_string();
        let ios = (DISK_BYTES / FILL).to_string();
        let load = [
            "--nsid", nsid, "--rw", "write", "--size", &size, "--depth", "16", "--queues", "1",
            "--ios", &ios,
        ];
        self.load(&load, RPC_LIMIT).map(|_| ())
    }

    pub fn stop(mut self) -> Result<()> {
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

/// The number at `path` in a JSON document.
pub fn number(document: &Value, path: &[&str]) -> Result<f64> {
    path.iter()
        .try_fold(document, |value, key| value.get(key))
        .and_then(Value::as_f64)
        .with_context(|| format!("no number at {} in {document}", path.join(".")))
}
