//! `nacre cluster evict` (empties a node), `repair` (replaces lost replicas after a large failure)
//! and `upgrade` (names the next node of a rolling upgrade).

use clap::Args;
use serde_json::Value;

use super::super::output::done;
use super::super::reply::items;
use super::super::{Connection, Failure, output};
use super::{CALL, NodeWaitArgs, Work, follow};
use nacre_engine::methods::cluster::evict::{Evict, EvictParams, Repair, RepairParams};
use nacre_engine::methods::cluster::upgrade::{NextUpgrade, NextUpgradeParams};

#[derive(Debug, Args)]
#[command(
    after_help = "Other nodes take the volumes of the node, and its replicas on pools that the \
                  cluster chose are moved. An eviction stays until --undo, also over restarts. \
                  Replicas on devices that an operator named stay. Exit code 1: work is left after \
                  the time of --wait, or a replica does not move."
)]
pub(super) struct EvictArgs {
    #[command(flatten)]
    node: NodeWaitArgs,
    /// End the eviction: the node may take volumes and replicas again
    #[arg(long, conflicts_with = "wait")]
    undo: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "When more than a third of the nodes, or of a zone, lose their leases within 10 \
                  minutes, no lost replica is replaced: the nodes may return. That ends when they \
                  are back, or with this command."
)]
pub(super) struct RepairArgs {
    #[command(flatten)]
    connection: Connection,
    /// The nodes that are gone stay away: you vouch for it
    #[arg(long, required = true)]
    go: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "For each node: nacre cluster drain NODE --wait; stop its daemon, install, start \
                  it; wait until all volumes are healthy; nacre cluster undrain NODE."
)]
pub(super) struct UpgradeArgs {
    #[command(flatten)]
    connection: Connection,
    /// Name the next node; refused while a node is away or a volume is degraded
    #[arg(long, required = true)]
    next: bool,
    /// The version that all nodes shall have; that of this program unless given
    #[arg(long)]
    version: Option<String>,
}

pub(super) fn evict(EvictArgs { node: args, undo }: EvictArgs) -> Result<(), Failure> {
    let connection = args.connection.patient(CALL);
    if undo {
        let params = EvictParams {
            node: args.node,
            evict: Some(false),
            wait_s: 0,
        };
        let answer = connection.call_for_json::<Evict>(&params)?;
        return done(&connection, answer);
    }
    let mut client = connection.open()?;
    let answer = follow(&args, "evict", |wait_s| {
        let params = EvictParams {
            node: args.node.clone(),
            evict: wait_s.is_none().then_some(true),
            wait_s: wait_s.unwrap_or(0),
        };
        Ok(client.call_for_json::<Evict, _>(&params)?)
    })?;
    if connection.json {
        return output::json(&answer);
    }
    ended(&args.node, &answer, args.wait.is_some())
}

/// The end of an eviction in words. Work that is left after a wait is a failure.
fn ended(node: &str, answer: &Value, has_waited: bool) -> Result<(), Failure> {
    let left = Work::of(answer);
    let stuck = items(&answer["stuck"]);
    for one in stuck {
        let text = |key: &str| output::cell(one.get(key));
        let name = match text("name") {
            name if name.is_empty() => text("volume"),
            name => name,
        };
        output::line(&format!("volume {name}: {}", text("why")))?;
    }
    match (left.is_done(), stuck.len(), has_waited) {
        (true, 0, _) => output::line(&format!("{node} has no replica, and serves no volume")),
        (true, count, _) => Err(Failure::Failed(anyhow::anyhow!(
            "{} on {node} not moved: see above",
            output::count(count as u64, "replica")
        ))),
        (false, _, false) => {
            output::line(&format!("{left}: `nacre cluster nodes` shows the progress"))
        }
        (false, _, true) => Err(Failure::Failed(anyhow::anyhow!(
            "{node}: {left}; the eviction goes on. `nacre cluster status` and `nacre cluster pools` \
             show the obstacles"
        ))),
    }
}

pub(super) fn repair(args: RepairArgs) -> Result<(), Failure> {
    let RepairArgs { connection, go } = args;
    let answer = connection.call_for_json::<Repair>(&RepairParams { go })?;
    if connection.json {
        return output::json(&answer);
    }
    output::line(if answer["released"] == true {
        "lost replicas are replaced again"
    } else {
        "no brake was set"
    })
}

pub(super) fn upgrade(args: UpgradeArgs) -> Result<(), Failure> {
    let version = args.version;
    let version = version.unwrap_or_else(|| env!("CARGO_PKG_VERSION").to_owned());
    let params = NextUpgradeParams {
        version: Some(version.clone()),
    };
    let connection = args.connection;
    let answer = connection.call_for_json::<NextUpgrade>(&params)?;
    if connection.json {
        return output::json(&answer);
    }
    let node = &answer["node"];
    let Some(name) = node["name"].as_str() else {
        return output::line(&format!("all nodes have version {version}"));
    };
    let step = if node["is_drained"] == true {
        "it is drained: upgrade and start its daemon"
    } else {
        "drain it first: nacre cluster drain"
    };
    let left = answer["left"].as_u64().unwrap_or(0);
    output::line(&format!(
        "{name} (version {}), {step}; {} left",
        output::cell(node.get("version")),
        output::count(left, "node")
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Goal: the exit code of an eviction says whether the node is empty.
    #[test]
    fn the_end_of_an_eviction() {
        let answer =
            |held, moving, stuck: Value| json!({ "held": held, "moving": moving, "stuck": stuck });
        let stuck = json!([{ "volume": "7", "name": "v", "why": "an operator named its device" }]);
        let is_good = |answer: Value, has_waited| ended("bee", &answer, has_waited).is_ok();
        assert!(is_good(answer(0, 0, json!([])), true));
        assert!(is_good(answer(1, 2, json!([])), false));
        assert!(!is_good(answer(1, 0, json!([])), true));
        assert!(!is_good(answer(0, 2, json!([])), true));
        assert!(!is_good(answer(0, 0, stuck), false));
    }
}
