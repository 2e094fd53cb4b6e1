//! `nacre csi`: the CSI driver, for Kubernetes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use nacre_cluster_csi::node::{Guardian, HostId, MAX_NODE_ID, Machine};
use nacre_cluster_csi::{Controller, Daemon, Driver, Endpoint, Identity, Node, serve};
use nacre_engine_rpc::client::Client;
use tokio::signal::unix::{SignalKind, signal};
use tracing::Level;
use uuid::Uuid;

use super::{Failure, tls};

/// Time for calls that still run when the driver ends; one may wait for the kernel for ever.
const LAST: Duration = Duration::from_secs(5);
/// NQNs of hosts are made of the machine's id in this name space.
const MACHINES: Uuid = Uuid::from_u128(0x6d0c_8e5a_8f0b_4c8e_9b52_3c5f_6a1d_7e90);
const NQN_PREFIX: &str = "nqn.2014-08.org.nvmexpress:uuid:";

#[derive(Debug, Args)]
#[command(
    after_help = "Without --controller and --node, it runs both. docs/operate/kubernetes.md \
                  explains it; deploy/kubernetes has manifests.\n\n\
                  Example: nacre csi --endpoint unix:///csi/csi.sock --controller"
)]
pub(crate) struct CsiArgs {
    /// The socket to serve: unix:///DIRECTORY/NAME.sock
    #[arg(long, value_name = "URI", env = "CSI_ENDPOINT")]
    endpoint: Endpoint,
    /// Create, publish and delete volumes: run this once
    #[arg(long)]
    controller: bool,
    /// Connect and mount volumes on this machine: run this on each host, as root
    #[arg(long)]
    node: bool,
    /// The daemon's socket, for --controller: any daemon of a cluster
    #[arg(short = 'r', long, value_name = "PATH", env = "NACRE_RPC_SOCKET")]
    socket: Option<PathBuf>,
    /// How long to wait for a reply of the daemon
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = nacre_engine_values::time::parse)]
    timeout: Duration,
    /// NQN of this host, which is also its id as a node [default: that of nvme-cli, else one made
    /// of the machine's id]
    #[arg(long, value_name = "NQN")]
    node_id: Option<String>,
    /// Identifier of this host, a UUID [default: that of nvme-cli, else the UUID of its NQN]
    #[arg(long, value_name = "UUID")]
    host_id: Option<Uuid>,
    /// Directory for the list of staged volumes
    #[arg(long, value_name = "DIR", default_value = "/var/lib/nacre-csi")]
    state_dir: PathBuf,
    /// error, warn, info or debug: debug has a line for each call
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log_level: Level,
}

pub(crate) fn run(args: CsiArgs) -> Result<(), Failure> {
    let is_both = !args.controller && !args.node;
    log(args.log_level);
    let controller = (args.controller || is_both)
        .then(|| daemon(&args))
        .transpose()?;
    let node = (args.node || is_both).then(|| node(&args)).transpose()?;
    if let Some(node) = &node {
        Guardian::watch(node);
    }
    let ready = (controller.clone(), node.clone());
    let is_ready = move || {
        let (daemon, node) = &ready;
        let is_daemon = daemon.as_ref().is_none_or(Daemon::is_ready);
        Ok(is_daemon && node.as_ref().is_none_or(|node| node.is_ready()))
    };
    let driver = Arc::new(Driver {
        identity: Identity::new(is_ready),
        controller: controller.map(Controller::new),
        node,
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let served = runtime.block_on(async {
        let (mut term, mut int) = (
            signal(SignalKind::terminate())?,
            signal(SignalKind::interrupt())?,
        );
        let end = async move {
            tokio::select! {
                _ = term.recv() => {}
                _ = int.recv() => {}
            }
        };
        let served = serve(&args.endpoint, driver, end).await;
        anyhow::Ok(served?)
    });
    runtime.shutdown_timeout(LAST);
    Ok(served?)
}

/// Lines on standard error, where the orchestrator collects them.
fn log(level: Level) {
    let lines = tracing_subscriber::fmt().with_writer(std::io::stderr);
    lines.with_ansi(false).with_max_level(level).init();
}

fn daemon(args: &CsiArgs) -> Result<Daemon, Failure> {
    let timeout = args.timeout;
    if let Some(remote) = tls::remote() {
        if args.socket.is_some() {
            let cause = "--tls and --socket name two daemons: leave out one of them";
            return Err(Failure::Usage(cause.into()));
        }
        return Ok(Daemon::new(move || Client::over_tls(remote, timeout)));
    }
    let socket = args.socket.clone();
    let socket = socket.unwrap_or_else(nacre_engine::config::default_socket);
    Ok(Daemon::new(move || Client::connect(&socket, timeout)))
}

fn node(args: &CsiArgs) -> Result<Arc<Node>, Failure> {
    let me = host_id(args, Path::new("/etc"))?;
    let node = Node::new(Arc::new(Machine::default()), me, &args.state_dir);
    let node = node.with_context(|| format!("--state-dir {}", args.state_dir.display()))?;
    Ok(Arc::new(node))
}

fn host_id(args: &CsiArgs, etc: &Path) -> Result<HostId, Failure> {
    let line = |file: &str| {
        let text = std::fs::read_to_string(etc.join(file)).unwrap_or_default();
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    let made = || {
        let machine = line("machine-id")?;
        let id = Uuid::new_v5(&MACHINES, machine.as_bytes());
        Some(format!("{NQN_PREFIX}{id}"))
    };
    let nqn = args
        .node_id
        .clone()
        .or_else(|| line("nvme/hostnqn"))
        .or_else(made);
    let nqn = nqn.ok_or_else(|| {
        let cause =
            "this machine has neither /etc/nvme/hostnqn nor /etc/machine-id: give --node-id";
        Failure::Usage(cause.into())
    })?;
    let is_plain = |c: char| c.is_ascii_graphic() && c != ',';
    if !nqn.starts_with("nqn.") || nqn.len() > MAX_NODE_ID || !nqn.chars().all(is_plain) {
        let cause = format!("\"{nqn}\" is no NQN of at most {MAX_NODE_ID} bytes: give --node-id");
        return Err(Failure::Usage(cause));
    }
    // The kernel refuses one id for two NQNs, so that a foreign NQN gets an id of its own.
    let own = args.host_id.or_else(|| {
        let is_file = line("nvme/hostnqn").as_ref() == Some(&nqn);
        line("nvme/hostid").filter(|_| is_file)?.parse().ok()
    });
    let of_nqn = || nqn.strip_prefix(NQN_PREFIX)?.parse().ok();
    let id = own.or_else(of_nqn);
    let id = id.unwrap_or_else(|| Uuid::new_v5(&MACHINES, nqn.as_bytes()));
    Ok(HostId { nqn, id })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Only {
        #[command(flatten)]
        csi: CsiArgs,
    }

    /// Goal: a host has the same NQN as with nvme-cli, and always one id for it.
    #[test]
    fn a_host_has_one_identity() {
        let etc = tempfile::tempdir().expect("a directory");
        let found = |more: &[&str]| {
            let words = ["csi", "--endpoint", "/csi/csi.sock"];
            let args = Only::parse_from(words.iter().chain(more));
            host_id(&args.csi, etc.path())
        };
        assert!(found(&[]).is_err());
        std::fs::write(etc.path().join("machine-id"), "aa\n").expect("written");
        let made = found(&[]).expect("it is made of the machine's id");
        assert_eq!(made.nqn, format!("{NQN_PREFIX}{}", made.id));
        std::fs::create_dir(etc.path().join("nvme")).expect("made");
        let (nqn, id) = (
            format!("{NQN_PREFIX}{}", Uuid::from_u128(1)),
            Uuid::from_u128(2),
        );
        std::fs::write(etc.path().join("nvme/hostnqn"), format!("{nqn}\n")).expect("written");
        assert_eq!(found(&[]).expect("nvme-cli's").id, Uuid::from_u128(1));
        std::fs::write(etc.path().join("nvme/hostid"), id.to_string()).expect("written");
        let of_file = found(&[]).expect("nvme-cli's");
        assert_eq!((of_file.nqn, of_file.id), (nqn, id));
        let other = found(&["--node-id", "nqn.2025-01.io.example:h"]).expect("named");
        assert_ne!(other.id, id);
        for bad in ["h", "nqn.a,b", &format!("nqn.{}", "x".repeat(200))] {
            assert!(found(&["--node-id", bad]).is_err(), "{bad}");
        }
    }
}
