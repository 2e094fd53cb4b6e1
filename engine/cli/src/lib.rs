//! The commands of `nacre`, one file or folder per subcommand. `nacre help` is the reference.
//!
//! Exit codes: 0 done, 1 failed, 2 wrong usage, 3 the daemon cannot be reached, 4 the daemon
//! refused the call. Some commands have codes of their own, which their help explains.

#![forbid(unsafe_code)]

mod address;
mod alert;
mod appliance;
mod attempts;
mod audit;
mod backup;
mod bdev;
mod bench;
mod cluster;
mod completions;
mod config;
mod connect;
mod console;
mod csi;
mod discover;
mod doctor;
mod events;
mod features;
mod host;
mod hugepages;
mod identify;
mod info;
mod initiator;
mod key;
mod lcores;
mod listener;
mod lvol;
mod metrics;
mod nvme;
pub mod output;
mod perf;
mod pool;
mod rdma;
mod record;
mod remote;
mod reply;
mod rpc;
mod sandbox;
mod serve;
mod state;
mod subsystem;
mod test;
mod tls;
mod top;
mod volume;
mod web;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use serde::Serialize;
use serde_json::Value;

use nacre_engine::config::Personality;
use nacre_engine::services::Engine;
use nacre_engine_rpc::Method;
use nacre_engine_rpc::client::{Client, ClientError};

/// Userspace NVMe-oF storage engine: the daemon, and the commands to manage it.
#[derive(Debug, Parser)]
#[command(
    name = "nacre",
    version,
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no daemon running, 4 the daemon \
        refused."
)]
struct Cli {
    #[command(flatten)]
    tls: tls::TlsArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the daemon
    Serve(Box<serve::ServeArgs>),
    /// Call any method of the daemon
    Rpc(rpc::RpcArgs),
    /// Block devices
    Bdev(bdev::BdevArgs),
    /// Replicated volumes
    Volume(volume::VolumeArgs),
    /// Storage pools
    Pool(pool::PoolArgs),
    /// The cluster that this daemon is a node of
    Cluster(cluster::ClusterArgs),
    /// Volumes, snapshots and clones of pools
    Lvol(lvol::LvolArgs),
    /// Backups of snapshots of pools
    Backup(backup::BackupArgs),
    /// Subsystems that hosts connect to
    Subsystem(subsystem::SubsystemArgs),
    /// Listeners: addresses of subsystems
    Listener(listener::ListenerArgs),
    /// Hosts that may connect
    Host(host::HostArgs),
    /// Keys with which hosts and targets authenticate themselves
    Key(key::KeyArgs),
    /// Show the daemon's activity, live
    Top(top::TopArgs),
    /// Show past events, and follow new ones
    Events(events::EventsArgs),
    /// Receivers of alerts: webhooks and mail
    Alert(alert::AlertArgs),
    /// The administration page and its accounts
    Web(web::WebArgs),
    /// Show who changed something, or tried to
    Audit(audit::AuditArgs),
    /// Show the counters of a part of the daemon, or its sandbox
    #[command(visible_alias = "INFO")]
    Info(info::InfoArgs),
    /// Huge pages of this machine
    Hugepages(hugepages::HugepagesArgs),
    /// Check this machine's readiness for serving, and show remedies
    Doctor(doctor::DoctorArgs),
    /// Connect this Linux host to a subsystem: over RDMA, else over TCP
    Connect(Box<connect::ConnectArgs>),
    /// This machine as a host
    Initiator(initiator::InitiatorArgs),
    /// RDMA devices of this machine
    Rdma(rdma::RdmaArgs),
    /// NVMe drives of this machine, and their drivers
    Nvme(nvme::NvmeArgs),
    /// Show the features of this version, and the maturity of each
    Features(features::FeaturesArgs),
    /// Check, show or export the configuration
    Config(config::ConfigArgs),
    /// Show the configured objects, where they are stored, and restore failures
    State(state::StateArgs),
    /// Show the daemon's metrics
    Metrics(metrics::MetricsArgs),
    /// List the records of a discovery controller
    Discover(discover::DiscoverArgs),
    /// Show the Identify data of a controller and its namespaces
    Identify(identify::IdentifyArgs),
    /// Put load on a remote namespace, measure and verify it
    Perf(Box<perf::PerfArgs>),
    /// Test the paths of a subsystem or volume, with verified I/O
    Test(test::TestArgs),
    /// Compare TCP, RDMA and devices without a transport: throughput, latency, processor time
    Bench(Box<bench::BenchArgs>),
    /// Updates, backup, reset and network of a machine that runs Nacre from its image
    Appliance(appliance::ApplianceArgs),
    /// The screen of the appliance's own terminals: state, network, restart, reset
    Console(console::ConsoleArgs),
    /// Run the CSI driver: volumes for Kubernetes
    Csi(Box<csi::CsiArgs>),
    /// Print a completion script for a shell
    Completions(completions::CompletionsArgs),
}

/// The daemon's address and the output format; flattened into every client command.
#[derive(Debug, Clone, Args)]
pub struct Connection {
    /// The daemon's socket
    #[arg(short = 'r', long, value_name = "PATH", env = "NACRE_RPC_SOCKET")]
    socket: Option<PathBuf>,
    /// How long to wait for a reply
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = nacre_engine_values::time::parse)]
    timeout: Duration,
    /// Print JSON for programs instead of a table for people
    #[arg(long)]
    pub json: bool,
}

impl Connection {
    /// The daemon of `--tls`, else the socket named or the default one; SPDK's, if only that is
    /// there.
    pub fn open(&self) -> Result<Client, Failure> {
        if let Some(remote) = tls::remote() {
            if self.socket.is_some() {
                let cause = "--tls and --socket name two daemons: leave out one of them, also as a variable (NACRE_TLS, NACRE_RPC_SOCKET)";
                return Err(Failure::Usage(cause.into()));
            }
            return Ok(Client::over_tls(remote, self.timeout)?);
        }
        let path = match &self.socket {
            Some(path) => path.clone(),
            None => {
                let ours = nacre_engine::config::default_socket();
                let spdks = Path::new("/var/tmp/spdk.sock");
                if !ours.exists() && spdks.exists() {
                    spdks.to_owned()
                } else {
                    ours
                }
            }
        };
        Ok(Client::connect(&path, self.timeout)?)
    }

    /// The same daemon, for a call that takes at least this long on a slow drive.
    fn patient(&self, least: Duration) -> Self {
        Self {
            timeout: self.timeout.max(least),
            ..self.clone()
        }
    }

    /// One call on a connection of its own, with the reply for output.
    pub fn call_for_json<M: Method<Engine>>(&self, params: &M::Params) -> Result<Value, Failure>
    where
        M::Params: Serialize,
    {
        Ok(self.open()?.call_for_json::<M, _>(params)?)
    }

    /// As [`Connection::call_for_json`], for a method whose name is known only at run time.
    pub fn call_by_name(&self, method: &str, params: Value) -> Result<Value, Failure> {
        Ok(self.open()?.call_by_name(method, params)?)
    }
}

/// A path as sent to the daemon and stored in its settings.
fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    let refuse =
        |cause: &dyn std::fmt::Display| Failure::Usage(format!("{}: {cause}", path.display()));
    match std::path::absolute(path) {
        Ok(absolute) if absolute.to_str().is_none() => Err(refuse(
            &"the path is not UTF-8: rename it, or create a link",
        )),
        Ok(absolute) => Ok(absolute),
        Err(error) => Err(refuse(&error)),
    }
}

/// The failures of a command, each with its exit code.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("{}", nacre_engine_rpc::error::causes(.0))]
    Failed(#[from] anyhow::Error),
    #[error("{0}")]
    Usage(String),
    #[error("{}", output::refusal(.0))]
    Daemon(#[from] ClientError),
    /// A failure with its own exit code, which the command's help explains.
    #[error("{}", nacre_engine_rpc::error::causes(.error))]
    Exit { code: u8, error: anyhow::Error },
}

impl Failure {
    fn exit_code(&self) -> u8 {
        match self {
            Self::Failed(_) => 1,
            Self::Usage(_) => 2,
            Self::Daemon(ClientError::Unreachable { .. } | ClientError::Remote { .. }) => 3,
            Self::Daemon(ClientError::Refused { .. }) => 4,
            Self::Daemon(_) => 1,
            Self::Exit { code, .. } => *code,
        }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::Failed(error.into())
    }
}

/// The program: parses the process's arguments and runs the command.
pub fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    let is_nvmf_tgt = called_as_nvmf_tgt(&args);
    if is_nvmf_tgt || args.get(1).is_some_and(|command| command == "serve") {
        // Before the arguments are read.
        if let Err(error) = nacre_engine::signals::shield() {
            eprintln!("warning: some signals end the daemon: {error}");
        }
    }
    // A closed output (`nacre … | head`) ends the program quietly.
    let outcome = if is_nvmf_tgt {
        serve::run_nvmf_tgt(args)
    } else {
        run(args)
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Failed(error)) if output::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::from(failure.exit_code())
        }
    }
}

fn run(args: Vec<OsString>) -> Result<(), Failure> {
    let mut root = Cli::command();
    let matches = root
        .try_get_matches_from_mut(&args)
        .unwrap_or_else(|error| with_whole_usage(error, root, &args).exit());
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|e| e.exit());
    cli.tls.set();
    match cli.command {
        Command::Serve(args) => serve::run(*args, Personality::Nacre),
        Command::Rpc(args) => rpc::run(args),
        Command::Bdev(args) => bdev::run(args),
        Command::Volume(args) => volume::run(args),
        Command::Pool(args) => pool::run(args),
        Command::Cluster(args) => cluster::run(args),
        Command::Lvol(args) => lvol::run(args),
        Command::Backup(args) => backup::run(args),
        Command::Subsystem(args) => subsystem::run(args),
        Command::Listener(args) => listener::run(args),
        Command::Host(args) => host::run(args),
        Command::Key(args) => key::run(args),
        Command::Top(args) => top::run(args),
        Command::Events(args) => events::run(args),
        Command::Alert(args) => alert::run(args),
        Command::Web(args) => web::run(args),
        Command::Audit(args) => audit::run(args),
        Command::Info(args) => info::run(args),
        Command::Hugepages(args) => hugepages::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Connect(args) => connect::run(*args),
        Command::Initiator(args) => initiator::run(args),
        Command::Rdma(args) => rdma::run(args),
        Command::Nvme(args) => nvme::run(args),
        Command::Features(args) => features::run(args),
        Command::Config(args) => config::run(args),
        Command::State(args) => state::run(args),
        Command::Metrics(args) => metrics::run(args),
        Command::Discover(args) => discover::run(args),
        Command::Identify(args) => identify::run(args),
        Command::Perf(args) => perf::run(*args),
        Command::Test(args) => test::run(args),
        Command::Bench(args) => bench::run(*args),
        Command::Appliance(args) => appliance::run(args),
        Command::Console(args) => console::run(args),
        Command::Csi(args) => csi::run(*args),
        Command::Completions(args) => completions::run(args),
    }
}

/// Replaces the usage line of an error by that of the subcommand's help. clap's own line lists an
/// option as required if an environment variable sets it.
fn with_whole_usage(
    mut error: clap::Error,
    mut root: clap::Command,
    args: &[OsString],
) -> clap::Error {
    root.build();
    let mut command = &mut root;
    for name in args.iter().skip(1) {
        if command.find_subcommand(name).is_none() {
            break;
        }
        command = command
            .find_subcommand_mut(name)
            .expect("it was just found");
    }
    if error.get(ContextKind::Usage).is_some() {
        let usage = ContextValue::StyledStr(command.render_usage());
        error.insert(ContextKind::Usage, usage);
    }
    error
}

fn called_as_nvmf_tgt(args: &[OsString]) -> bool {
    args.first().is_some_and(|name| {
        Path::new(name)
            .file_name()
            .is_some_and(|name| name == "nvmf_tgt")
    })
}

/// The whole command, for completions and tests.
fn command() -> clap::Command {
    Cli::command()
}

#[cfg(test)]
mod tests;
