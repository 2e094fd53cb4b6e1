//! `nacre csi`: the CSI driver, for Kubernetes.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use nacre_cluster_csi::node::{HostId, Machine, Reconnector};
use nacre_cluster_csi::{Controller, Daemon, Driver, Endpoint, Identity, Node, serve};
use nacre_engine::signals::Stops;
use nacre_engine_rpc::client::Client;
use tracing::Level;
use uuid::Uuid;

use super::{Failure, tls};

/// Time for calls that still run when the driver ends. One that waits for a dead device does not
/// end.
const LAST: Duration = Duration::from_secs(5);

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
    /// NQN of this host, also its id as a node [default: that of the last start, else of nvme-cli,
    /// else made of the machine's id]
    #[arg(long, value_name = "NQN")]
    node_id: Option<String>,
    /// Identifier of this host, a UUID [default: the one of the last start, else that of nvme-cli,
    /// else the UUID of its NQN]
    #[arg(long, value_name = "UUID")]
    host_id: Option<Uuid>,
    /// Directory for the list of staged volumes and the identity of this host
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
        Reconnector::watch(node);
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
        let stops = Stops::new()?;
        let end = async move { stops.next().await };
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
    let (machine, state) = (Arc::new(Machine::default()), &args.state_dir);
    let me = HostId::find(&*machine, state, args.node_id.as_deref(), args.host_id);
    let me = me.map_err(|error| {
        if error.is_usage() {
            Failure::Usage(error.to_string())
        } else {
            Failure::Failed(error.into())
        }
    })?;
    let node = Node::new(machine, me, state);
    let node = node.with_context(|| format!("--state-dir {}", state.display()))?;
    Ok(Arc::new(node))
}
