//! `cargo xtask run`: demonstrates Nacre in a minute.
//!
//! Builds Nacre, starts `nacre serve` without a configuration, and adds a file-backed namespace on
//! 127.0.0.1:4420. Writes and reads it back verified through Nacre's own host side over NVMe/TCP.
//! Prints the figures and the command for a Linux host, and stops the daemon cleanly.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::json;

use crate::process::{self, End, Group};
use crate::setup;

const BUILD_LIMIT: Duration = Duration::from_secs(1800);
const START_LIMIT: Duration = Duration::from_secs(30);
const STOP_LIMIT: Duration = Duration::from_secs(20);
const RPC_LIMIT: Duration = Duration::from_secs(30);

const USUAL_PORT: u16 = 4420;
const ADDRESS: &str = "127.0.0.1";
const NQN: &str = "nqn.2026-01.io.nacre:demo";
const BDEV: &str = "demo";

#[derive(Args)]
pub(crate) struct Options {
    /// Seconds per measurement.
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Size of the namespace in MiB.
    #[arg(long, default_value_t = 256)]
    size: u64,
    /// The TCP port to serve on [default: 4420, or a free one if that is taken].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// Serve until interrupted, so that a host can be connected.
    #[arg(long)]
    stay: bool,
    /// Use this `nacre` instead of building one.
    #[arg(long)]
    nacre: Option<PathBuf>,
}

pub(crate) fn run(root: &Path, options: &Options) -> Result<ExitCode> {
    process::catch_interrupts()?;
    // Choose the port before the build, which takes minutes and does not depend on it.
    let port = choose_port(options.port, USUAL_PORT)?;
    let nacre = match &options.nacre {
        Some(path) => path.clone(),
        None => {
            setup::cargo_build(
                root,
                &["--release", "--locked", "--package", "nacre-engine-cli"],
                BUILD_LIMIT,
            )?;
            crate::target_dir(root).join("release/nacre")
        }
    };
    let scratch = Scratch::create()?;
    let mut daemon = Daemon::start(&nacre, &scratch.path, port)?;
    daemon.serve_file(&scratch.path.join("namespace.img"), options)?;
    daemon.perf(
        options,
        "write, then read back and compare",
        &["--rw", "randwrite", "--verify"],
    )?;
    daemon.perf(options, "random reads of 4 KiB", &["--rw", "randread"])?;
    println!("\nA Linux host connects with:");
    println!("    modprobe nvme-tcp");
    println!("    nvme connect -t tcp -a {ADDRESS} -s {port} -n {NQN}");
    if options.stay {
        println!("\nserving until interrupted (Ctrl-C)");
        daemon.wait_for_interrupt()?;
    }
    daemon.stop()?;
    println!("\nthe daemon stopped cleanly");
    Ok(ExitCode::SUCCESS)
}

/// The requested port, or the usual one, or a free one if the usual port is taken.
fn choose_port(requested: Option<u16>, usual: u16) -> Result<u16> {
    let bind = |port| TcpListener::bind((ADDRESS, port));
    let Err(error) = bind(requested.unwrap_or(usual)) else {
        return Ok(requested.unwrap_or(usual));
    };
    if let Some(port) = requested {
        return Err(error).with_context(|| {
            format!("{ADDRESS}:{port} cannot be served on: choose another --port")
        });
    }
    let free = bind(0)
        .and_then(|socket| socket.local_addr())
        .with_context(|| format!("no port of {ADDRESS} can be served on"))?
        .port();
    println!("{ADDRESS}:{usual} cannot be served on ({error}): taking port {free} instead");
    Ok(free)
}

/// A folder that is removed on drop.
pub(crate) struct Scratch {
    pub path: PathBuf,
}

impl Scratch {
    pub(crate) fn create() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("nacre-run-{}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok(Self { path })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            eprintln!("warning: cannot remove {}: {error}", self.path.display());
        }
    }
}

/// A running `nacre serve`, killed on drop.
struct Daemon<'a> {
    nacre: &'a Path,
    socket: PathBuf,
    log: PathBuf,
    port: u16,
    group: Group,
}

impl<'a> Daemon<'a> {
    fn start(nacre: &'a Path, scratch: &Path, port: u16) -> Result<Self> {
        let socket = scratch.join("nacre.sock");
        let log = scratch.join("nacre.log");
        let out = process::log_file(&log)?;
        let mut command = Command::new(nacre);
        command
            .arg("serve")
            .arg("--data-dir")
            .arg(scratch.join("data"))
            .arg("-r")
            .arg(&socket)
            .stdin(Stdio::null())
            .stdout(out.try_clone().context("sharing the daemon's log")?)
            .stderr(out);
        println!("$ {}", process::shown(&command));
        let group = Group::spawn(&mut command)?;
        let mut daemon = Daemon {
            nacre,
            socket,
            log,
            port,
            group,
        };
        daemon.wait_for_start()?;
        Ok(daemon)
    }

    fn wait_for_start(&mut self) -> Result<()> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.group.try_wait()? {
                bail!("the daemon ended at once ({status}):\n{}", self.said());
            }
            if self.socket.exists() && self.rpc("framework_wait_init", None).is_ok() {
                println!("up after {} ms", start.elapsed().as_millis());
                return Ok(());
            }
            if process::interrupted() {
                bail!("interrupted");
            }
            if start.elapsed() > START_LIMIT {
                bail!(
                    "the daemon does not answer after {} s:\n{}",
                    START_LIMIT.as_secs(),
                    self.said()
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Creates a bdev on a file, a subsystem that admits any host, and a listener.
    fn serve_file(&self, file: &Path, options: &Options) -> Result<()> {
        std::fs::File::create(file)
            .and_then(|file| file.set_len(options.size << 20))
            .with_context(|| format!("creating {}", file.display()))?;
        let transports = self.rpc("nvmf_get_transports", None)?;
        let has_tcp = transports.as_array().is_some_and(|list| {
            list.iter().any(|t| {
                t["trtype"]
                    .as_str()
                    .is_some_and(|s| s.eq_ignore_ascii_case("tcp"))
            })
        });
        if !has_tcp {
            self.rpc("nvmf_create_transport", Some(json!({ "trtype": "tcp" })))?;
        }
        self.rpc(
            "bdev_aio_create",
            Some(json!({ "name": BDEV, "filename": file, "block_size": 4096 })),
        )?;
        self.rpc(
            "nvmf_create_subsystem",
            Some(json!({ "nqn": NQN, "allow_any_host": true })),
        )?;
        self.rpc(
            "nvmf_subsystem_add_ns",
            Some(json!({ "nqn": NQN, "namespace": { "bdev_name": BDEV } })),
        )?;
        let address = json!({ "trtype": "tcp", "adrfam": "ipv4", "traddr": ADDRESS, "trsvcid": self.port.to_string() });
        self.rpc(
            "nvmf_subsystem_add_listener",
            Some(json!({ "nqn": NQN, "listen_address": address })),
        )?;
        println!(
            "serving {} MiB of {} as {NQN} on {ADDRESS}:{}",
            options.size,
            file.display(),
            self.port
        );
        Ok(())
    }

    fn rpc(&self, method: &str, params: Option<serde_json::Value>) -> Result<serde_json::Value> {
        let mut command = Command::new(self.nacre);
        command
            .arg("rpc")
            .arg("--socket")
            .arg(&self.socket)
            .arg(method);
        if let Some(params) = params {
            command.arg(params.to_string());
        }
        let out = process::capture(&mut command, RPC_LIMIT)?;
        serde_json::from_str(&out)
            .with_context(|| format!("{method} answered what is no JSON: {out:?}"))
    }

    fn perf(&self, options: &Options, what: &str, mode: &[&str]) -> Result<()> {
        println!("\n{what}:");
        let mut command = Command::new(self.nacre);
        command
            .arg("perf")
            .args([
                "--traddr", ADDRESS, "--nqn", NQN, "--size", "4k", "--depth", "32",
            ])
            .args(["--trsvcid", &self.port.to_string()])
            .args(["--seconds", &options.seconds.to_string()])
            .args(mode);
        println!("$ {}", process::shown(&command));
        let limit = Duration::from_secs(options.seconds * 4 + 60);
        let end = process::stream(&mut command, limit, |_| {})?;
        if !end.success() {
            bail!(
                "nacre perf failed ({end}); the daemon said:\n{}",
                self.said()
            );
        }
        Ok(())
    }

    /// Waits until an interrupt; fails if the daemon ends by itself.
    fn wait_for_interrupt(&mut self) -> Result<()> {
        while !process::interrupted() {
            if let Some(status) = self.group.try_wait()? {
                bail!("the daemon ended by itself ({status}):\n{}", self.said());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<()> {
        self.group.terminate();
        match self.group.wait_through_interrupts(STOP_LIMIT)? {
            End::Exited(status) if status.success() => Ok(()),
            end => bail!("the daemon did not stop cleanly ({end}):\n{}", self.said()),
        }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a usual port that is taken is skipped; a requested port that is taken is an error.
    #[test]
    fn a_taken_port_is_refused_or_skipped() {
        let taken = TcpListener::bind((ADDRESS, 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        let other = choose_port(None, port).unwrap();
        assert_ne!(other, port);
        let refused = format!("{:#}", choose_port(Some(port), USUAL_PORT).unwrap_err());
        assert!(
            refused.contains(&format!("{ADDRESS}:{port} ")) && refused.contains("--port"),
            "{refused}"
        );
        drop(taken);
        assert_eq!(choose_port(Some(port), USUAL_PORT).unwrap(), port);
    }
}
