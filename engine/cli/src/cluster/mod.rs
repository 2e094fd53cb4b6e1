//! `nacre cluster`: creates a cluster, shows it, and acts on its nodes.

mod access;
mod backup;
mod evict;
mod init;
mod join;
mod node_file;
mod rebuild;
mod show;

use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::output::done;
use super::{Connection, Failure, output};
use nacre_engine::methods::cluster::nodes::{
    Drain, DrainParams, Fence, FenceParams, RemoveNode, RemoveNodeParams, SetCordon,
    SetCordonParams,
};
use nacre_engine::methods::cluster::volumes::{MoveVolume, MoveVolumeParams};
use nacre_engine_rpc::client::ClientError;
use nacre_engine_rpc::error::Errno;

/// Longest part of a wait that one call does.
const PART: Duration = Duration::from_secs(5);
/// Time that a call may take beside its wait.
const CALL: Duration = Duration::from_secs(30);
/// Pause before a refused call is repeated.
const AGAIN: Duration = Duration::from_millis(500);

#[derive(Debug, Args)]
#[command(after_help = "docs/operate/cluster.md explains clusters.")]
pub(crate) struct ClusterArgs {
    #[command(subcommand)]
    command: ClusterCommand,
}

#[derive(Debug, Subcommand)]
enum ClusterCommand {
    /// Create a cluster in etcd, and print the configuration of its nodes; needs no daemon
    Init(Box<init::InitArgs>),
    /// Make this machine a node: look for the cluster, and write the configuration file; needs no
    /// daemon
    Join(Box<join::JoinArgs>),
    /// Show the cluster on one page: etcd, nodes, volumes
    Status(StatusArgs),
    /// List the nodes
    Nodes(ListArgs),
    /// List the volumes, with the nodes that serve and show them
    Volumes(ListArgs),
    /// List the pools of all nodes, with the space that is promised
    Pools(ListArgs),
    /// Show the last decisions of this node, and follow new ones
    Events(ClusterEventsArgs),
    /// Give a node no new replicas; it takes a volume only if no other node can
    Cordon(NodeArgs),
    /// End a cordon
    Uncordon(NodeArgs),
    /// Let other nodes take the volumes of a node; its replicas stay
    Drain(DrainArgs),
    /// End a drain
    Undrain(NodeArgs),
    /// Let other nodes take the volumes and the replicas of a node
    Evict(evict::EvictArgs),
    /// Replace the replicas of nodes that went at once
    Repair(evict::RepairArgs),
    /// Say which node of a rolling upgrade comes next
    Upgrade(evict::UpgradeArgs),
    /// End the lease of a node that is off, so that others take its volumes at once
    Fence(FenceArgs),
    /// Remove a node that never returns
    #[command(visible_alias = "rm")]
    Remove(NodeArgs),
    /// Let another node serve a volume; hosts see no error
    Move(MoveArgs),
    /// Save the cluster's keys in etcd to a file; needs no daemon
    Backup(Box<backup::ClusterBackupArgs>),
    /// Write a backup into an etcd that lost the cluster; needs no daemon
    Restore(Box<backup::RestoreArgs>),
    /// Make the keys of a cluster again after all of etcd was lost, from the labels of replicas and
    /// the nodes' copies of the keys; needs no backup
    RebuildStore(Box<rebuild::RebuildArgs>),
}

#[derive(Debug, Args)]
struct ListArgs {
    #[command(flatten)]
    connection: Connection,
}

#[derive(Debug, Args)]
struct StatusArgs {
    #[command(flatten)]
    connection: Connection,
    /// Show it again every second
    #[arg(short, long)]
    watch: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "The last 1024 events since the start of the daemon are kept. Each node has \
                        its own ones."
)]
struct ClusterEventsArgs {
    #[command(flatten)]
    connection: Connection,
    /// Continue with new events
    #[arg(short, long)]
    follow: bool,
    /// Only events after the one of this number
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    after: u64,
}

#[derive(Debug, Args)]
struct NodeArgs {
    #[command(flatten)]
    connection: Connection,
    /// Name or id of the node
    node: String,
}

#[derive(Debug, Args)]
#[command(
    after_help = "A drain stays until `nacre cluster undrain`, also over a restart of the \
                        node. Exit code 1: volumes are left after the time of --wait."
)]
struct DrainArgs {
    #[command(flatten)]
    node: NodeWaitArgs,
}

/// A node, and how long to wait for the end of the act on it.
#[derive(Debug, Args)]
struct NodeWaitArgs {
    #[command(flatten)]
    connection: Connection,
    /// Name or id of the node
    node: String,
    /// Wait until it is done; 10 minutes at most unless given
    #[arg(
        long,
        value_name = "TIME",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "10m",
        value_parser = nacre_engine_values::time::parse
    )]
    wait: Option<Duration>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Nodes fence a silent node by themselves after its lease: this command only \
                        saves that time. A node that still runs could answer reads with former \
                        data."
)]
struct FenceArgs {
    #[command(flatten)]
    connection: Connection,
    /// Name or id of the node
    node: String,
    /// The node is off: you vouch for it
    #[arg(long, required = true)]
    off: bool,
}

#[derive(Debug, Args)]
struct MoveArgs {
    #[command(flatten)]
    connection: Connection,
    /// Name or id of the volume
    volume: String,
    /// Name or id of the node that shall serve it
    #[arg(long, value_name = "NODE")]
    to: String,
    /// How long to wait for the end of the move
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = nacre_engine_values::time::parse)]
    wait: Duration,
}

pub(crate) fn run(args: ClusterArgs) -> Result<(), Failure> {
    match args.command {
        ClusterCommand::Init(args) => init::run(&args),
        ClusterCommand::Join(args) => join::run(&args),
        ClusterCommand::Backup(args) => backup::save(&args),
        ClusterCommand::Restore(args) => backup::restore(&args),
        ClusterCommand::RebuildStore(args) => rebuild::run(&args),
        ClusterCommand::Status(args) => show::status(&args.connection, args.watch),
        ClusterCommand::Nodes(args) => show::nodes(&args.connection),
        ClusterCommand::Volumes(args) => show::volumes(&args.connection),
        ClusterCommand::Pools(args) => show::pools(&args.connection),
        ClusterCommand::Evict(args) => evict::evict(args),
        ClusterCommand::Repair(args) => evict::repair(args),
        ClusterCommand::Upgrade(args) => evict::upgrade(args),
        ClusterCommand::Events(args) => show::events(&args.connection, args.after, args.follow),
        ClusterCommand::Cordon(args) => cordon(args, true),
        ClusterCommand::Uncordon(args) => cordon(args, false),
        ClusterCommand::Drain(args) => drain(args),
        ClusterCommand::Undrain(NodeArgs { connection, node }) => {
            let params = DrainParams {
                node,
                drain: Some(false),
                wait_s: 0,
            };
            let answer = connection.call_for_json::<Drain>(&params)?;
            done(&connection, answer)
        }
        ClusterCommand::Fence(args) => {
            let FenceArgs {
                connection,
                node,
                off,
            } = args;
            let answer = connection.call_for_json::<Fence>(&FenceParams { node, off })?;
            done(&connection, answer)
        }
        ClusterCommand::Remove(NodeArgs { connection, node }) => {
            let what = json!({ "node": node });
            connection.call_for_json::<RemoveNode>(&RemoveNodeParams { node })?;
            done(&connection, what)
        }
        ClusterCommand::Move(args) => {
            let params = MoveVolumeParams {
                volume: args.volume,
                node: args.to,
                wait_s: seconds(args.wait),
            };
            let connection = args.connection.patient(args.wait + CALL);
            let answer = connection.call_for_json::<MoveVolume>(&params)?;
            done(&connection, answer)
        }
    }
}

/// A part of a second counts.
fn seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

fn cordon(args: NodeArgs, cordon: bool) -> Result<(), Failure> {
    let NodeArgs { connection, node } = args;
    let what = json!({ "node": node, "cordon": cordon });
    connection.call_for_json::<SetCordon>(&SetCordonParams { node, cordon })?;
    done(&connection, what)
}

/// Follows the work on a node until none is left, or the time of `--wait` is over. `call` has the
/// wait of a call in seconds; `None`: the first one, which starts the work and answers at once. The
/// others only look: an operator may end the work meanwhile. A call that is refused because etcd
/// has not answered in time (EAGAIN, ETIMEDOUT) is repeated while there is time.
fn follow(
    args: &NodeWaitArgs,
    act: &str,
    mut call: impl FnMut(Option<u64>) -> Result<Value, Failure>,
) -> Result<Value, Failure> {
    let end = Instant::now() + args.wait.unwrap_or_default();
    let mut shown = None;
    let mut reason = String::new();
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let wait = shown.as_ref().map(|_| seconds(left.min(PART)));
        let answer = match call(wait) {
            Err(failure) if is_passing(&failure) && !left.is_zero() => {
                let text = failure.to_string();
                if text != reason {
                    eprintln!("{text}; trying again");
                    reason = text;
                }
                std::thread::sleep(left.min(AGAIN));
                continue;
            }
            answer => answer?,
        };
        let work = Work::of(&answer);
        if work.is_done() || left.is_zero() || args.wait.is_none() {
            return Ok(answer);
        }
        if answer[act] == false {
            return Err(Failure::Failed(anyhow::anyhow!(
                "{}: an operator has ended it; {work}",
                args.node
            )));
        }
        if !args.connection.json && shown != Some(work) {
            eprintln!("{work}");
        }
        shown = Some(work);
    }
}

/// True if the same call may succeed later.
fn is_passing(failure: &Failure) -> bool {
    let Failure::Daemon(ClientError::Refused { error, .. }) = failure else {
        return false;
    };
    [Errno::EAGAIN, Errno::ETIMEDOUT]
        .iter()
        .any(|errno| error.code == -(*errno as i32))
}

/// The work that is left on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Work {
    held: u64,
    /// `None`: replicas stay.
    moving: Option<u64>,
}

impl Work {
    fn of(answer: &Value) -> Self {
        Self {
            held: answer["held"].as_u64().unwrap_or(0),
            moving: answer["moving"].as_u64(),
        }
    }

    fn is_done(self) -> bool {
        self.held + self.moving.unwrap_or(0) == 0
    }
}

impl std::fmt::Display for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} to hand over", output::count(self.held, "volume"))?;
        match self.moving {
            Some(moving) => write!(f, ", {} to move", output::count(moving, "replica")),
            None => Ok(()),
        }
    }
}

fn drain(DrainArgs { node: args }: DrainArgs) -> Result<(), Failure> {
    let connection = args.connection.patient(CALL);
    let mut client = connection.open()?;
    let answer = follow(&args, "drain", |wait_s| {
        let params = DrainParams {
            node: args.node.clone(),
            drain: wait_s.is_none().then_some(true),
            wait_s: wait_s.unwrap_or(0),
        };
        Ok(client.call_for_json::<Drain, _>(&params)?)
    })?;
    if connection.json {
        return output::json(&answer);
    }
    ended(&args.node, Work::of(&answer).held, args.wait.is_some())
}

/// The end of a drain in words. Volumes that are left after a wait are a failure.
fn ended(node: &str, held: u64, has_waited: bool) -> Result<(), Failure> {
    match (held, has_waited) {
        (0, _) => output::line(&format!("{node} serves no volume")),
        (_, false) => output::line(&format!(
            "{} to hand over: `nacre cluster nodes` shows the progress",
            output::count(held, "volume")
        )),
        (_, true) => Err(Failure::Failed(anyhow::anyhow!(
            "{node} still serves {}: no other node can take them now. `nacre cluster status` shows \
             the nodes; the drain goes on",
            output::count(held, "volume")
        ))),
    }
}

#[cfg(test)]
mod tests {
    use nacre_engine_rpc::RpcError;

    use super::*;

    fn refused(errno: Errno) -> Failure {
        Failure::Daemon(ClientError::Refused {
            method: "cluster_drain".to_owned(),
            error: RpcError::errno(errno, "no answer from etcd within 2000 ms"),
        })
    }

    fn follow_with(
        wait: Option<Duration>,
        mut answers: Vec<Result<Value, Failure>>,
    ) -> (u64, bool) {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: NodeWaitArgs,
        }
        let Line { mut args } = clap::Parser::parse_from(["nacre", "ant"]);
        args.wait = wait;
        args.connection.json = true;
        let mut calls = 0;
        answers.reverse();
        let ended = follow(&args, "drain", |_| {
            calls += 1;
            answers.pop().expect("no further call")
        });
        (calls, ended.is_ok())
    }

    /// Goal: a silence of etcd does not end a command that waits, at its first call or later; other
    /// refusals do, and so does any refusal of a command that does not wait.
    #[test]
    fn a_passing_refusal_is_tried_again() {
        let minute = Some(Duration::from_secs(60));
        let held = |held: u64| Ok(json!({ "drain": true, "held": held }));
        let passing = || Err(refused(Errno::EAGAIN));
        let late = Err(refused(Errno::ETIMEDOUT));
        assert_eq!(
            follow_with(minute, vec![passing(), held(1), late, held(0)]),
            (4, true)
        );
        assert_eq!(follow_with(None, vec![passing()]), (1, false));
        let lasting = Err(refused(Errno::ENODEV));
        assert_eq!(follow_with(minute, vec![held(1), lasting]), (2, false));
    }
}
