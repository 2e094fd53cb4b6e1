//! `nacre volume snapshot`: snapshots of volumes.

use clap::Subcommand;
use nacre_engine::methods::volume::snapshots::{
    CreateVolumeSnapshot, CreateVolumeSnapshotParams, DeleteVolumeSnapshot,
    DeleteVolumeSnapshotParams, ListVolumeSnapshots, ListVolumeSnapshotsParams,
};
use nacre_engine_rpc::client::to_json;
use serde_json::Value;

use crate::output::{self, done};
use crate::{Connection, Failure};

#[derive(Debug, Subcommand)]
#[command(
    after_help = "For volumes with replicas on pools. nacre volume create --snapshot makes a volume \
                  that begins with one."
)]
pub(super) enum SnapshotCommand {
    /// Make one while hosts use the volume, and print its UUID
    Create {
        /// Name of the volume
        volume: String,
        /// Name of the snapshot
        name: String,
    },
    /// List them, with the nodes or pools that have them
    #[command(visible_alias = "ls")]
    List {
        /// Only those of this volume
        volume: Option<String>,
    },
    /// Delete one; volumes that began with it keep their contents
    #[command(visible_alias = "rm")]
    Delete {
        /// Its UUID, or its name if no other one has it
        snapshot: String,
    },
}

pub(super) fn run(connection: &Connection, command: SnapshotCommand) -> Result<(), Failure> {
    match command {
        SnapshotCommand::Create { volume, name } => {
            let uuid = None;
            let params = CreateVolumeSnapshotParams { volume, name, uuid };
            let made = connection.call_for_json::<CreateVolumeSnapshot>(&params)?;
            if connection.json {
                return output::json(&made);
            }
            output::line(made["uuid"].as_str().unwrap_or_default())
        }
        SnapshotCommand::List { volume } => {
            let params = ListVolumeSnapshotsParams { volume, uuid: None };
            let mut found = connection.call_for_json::<ListVolumeSnapshots>(&params)?;
            if connection.json {
                return output::json(&found);
            }
            for one in found.as_array_mut().into_iter().flatten() {
                add_places(one);
            }
            output::columns(
                &found,
                &[
                    ("name", "/name"),
                    ("volume", "/volume_name"),
                    ("state", "/state"),
                    ("bytes", "/size_bytes"),
                    ("on", "/on"),
                    ("id", "/uuid"),
                    ("why", "/why"),
                ],
            )
        }
        SnapshotCommand::Delete { snapshot } => {
            let params = DeleteVolumeSnapshotParams { snapshot };
            connection.call_for_json::<DeleteVolumeSnapshot>(&params)?;
            done(connection, to_json(&params))
        }
    }
}

/// Adds the nodes of a snapshot's lvols, outside of a cluster their pools, and the reason why one
/// of these is missing, for the table.
fn add_places(snapshot: &mut Value) {
    let lvols = snapshot["lvols"].as_array().cloned().unwrap_or_default();
    let place = |lvol: &Value| {
        let mut words = ["node", "pool_name", "pool"].iter().map(|key| &lvol[*key]);
        words
            .find(|word| !word.is_null())
            .cloned()
            .unwrap_or_default()
    };
    snapshot["on"] = lvols.iter().map(place).collect();
    if snapshot["why"].is_null() {
        let mut reasons = lvols.iter().map(|lvol| &lvol["why"]);
        let missing = reasons.find(|why| !why.is_null());
        snapshot["why"] = missing.cloned().unwrap_or_default();
    }
}
