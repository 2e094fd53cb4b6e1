//! `nacre cluster evict`, `repair`, `upgrade`.

use std::time::Instant;

use clap::Args;
use serde_json::Value;

use super::super::subsystem::{done, items};
use super::super::{Connection, Failure, output};
use super::{CALL, PART, WaitArgs, seconds};
use nacre_engine::methods::cluster::evict::{Evict, EvictParams, Repair, RepairParams};
use nacre_engine::methods::cluster::upgrade::{NextUpgrade, NextUpgradeParams};

#[derive(Debug, Args)]
#[command(
    after_help = "An eviction stays until --undo, also over restarts. Replicas on devices that an \
                  operator named do not move by themselves. Exit code 1: something is left after \
                  the time of --wait, or does not move."
)]
pub(super) struct EvictArgs {
    #[command(flatten)]
    node: WaitArgs,
    /// End the eviction: the node may take volumes and replicas again
    #[arg(long, conflicts_with = "wait")]
    undo: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "When more than a third of the nodes, or of a zone, go within 10 minutes, no lost \
                  replica is replaced: they may return. This command ends that."
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
            evict: false,
            wait_s: 0,
        };
        let answer = connection.call_for_json::<Evict>(&params)?;
        return done(&connection, answer);
    }
    let wait = args.wait.unwrap_or_default();
    let (end, mut client) = (Instant::now() + wait, connection.open()?);
    let mut shown = None;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let params = EvictParams {
            node: args.node.clone(),
            evict: true,
            // The first call answers at once: its reply shows the work.
            wait_s: shown.as_ref().map_or(0, |_| seconds(left.min(PART))),
        };
        let answer: Value = client.call_for_json::<Evict, _>(&params)?;
        let number = |key: &str| answer[key].as_u64().unwrap_or(0);
        let (held, moving) = (number("held"), number("moving"));
        if held + moving == 0 || left.is_zero() || args.wait.is_none() {
            return if connection.json {
                output::json(&answer)
            } else {
                ended(&args.node, &answer, args.wait.is_some())
            };
        }
        if !connection.json && shown != Some((held, moving)) {
            eprintln!(
                "{} to hand over, {} to move",
                output::count(held, "volume"),
                output::count(moving, "replica")
            );
        }
        shown = Some((held, moving));
    }
}

/// The end of an eviction in words. Work that is left after a wait is a failure.
fn ended(node: &str, answer: &Value, has_waited: bool) -> Result<(), Failure> {
    let number = |key: &str| answer[key].as_u64().unwrap_or(0);
    let (held, moving) = (number("held"), number("moving"));
    let stuck = items(&answer["stuck"]);
    for one in stuck {
        let text = |key: &str| output::cell(one.get(key));
        let name = match text("name") {
            name if name.is_empty() => text("volume"),
            name => name,
        };
        output::line(&format!("volume {name}: {}", text("why")))?;
    }
    let left = format!(
        "{} to hand over, {} to move",
        output::count(held, "volume"),
        output::count(moving, "replica")
    );
    match (held + moving, stuck.len(), has_waited) {
        (0, 0, _) => output::line(&format!("{node} has no replica, and serves no volume")),
        (0, count, _) => Err(Failure::Failed(anyhow::anyhow!(
            "{} on {node} not moved: see above",
            output::count(count as u64, "replica")
        ))),
        (_, _, false) => output::line(&format!("{left}: `nacre cluster nodes` shows the progress")),
        (_, _, true) => Err(Failure::Failed(anyhow::anyhow!(
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
