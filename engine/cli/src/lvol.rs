//! `nacre lvol`: volumes, snapshots and clones of storage pools.

use clap::{Args, Subcommand};
use serde_json::Value;

use super::output::done;
use super::pool::{named, number};
use super::reply::items;
use super::{Connection, Failure, output};
use nacre_engine::methods::pool::lvols::{
    CloneParams, CloneSnapshot, CreateLvol, CreateLvolParams, DecoupleLvol, DeleteLvol,
    InflateLvol, ListLvols, ListLvolsParams, LvolParams, NewSnapshot, RenameLvol, RenameLvolParams,
    ResizeLvol, ResizeLvolParams, RestoreLvol, RestoreParams, SetParent, SetParentParams,
    SetReadOnly, SnapshotLvols, SnapshotParams,
};
use nacre_engine_rpc::client::to_json;

#[derive(Debug, Args)]
#[command(
    mut_args = |arg| arg.global(true),
    after_help = "Each volume and snapshot is a block device of the same name, such as pool0/v1. \
        docs/operate/pools.md has examples."
)]
pub(crate) struct LvolArgs {
    #[command(flatten)]
    connection: Connection,
    #[command(subcommand)]
    command: LvolCommand,
}

#[derive(Debug, Subcommand)]
enum LvolCommand {
    /// List volumes and snapshots, with their space
    #[command(visible_alias = "ls")]
    List {
        /// Only those of this pool
        pool: Option<String>,
    },
    /// Create a volume
    Create {
        /// Its name, such as pool0/v1
        #[arg(value_name = "POOL/NAME")]
        name: String,
        /// Such as 100GiB; may be more than the pool has
        #[arg(long, value_parser = nacre_engine_values::size::parse_bytes)]
        size: u64,
        /// Keep room for the whole size
        #[arg(long)]
        thick: bool,
    },
    /// Make snapshots, all at the same moment, while hosts write
    Snapshot {
        /// Volume and name of the snapshot, such as pool0/v1@monday
        #[arg(value_name = "POOL/LVOL@NAME", required = true)]
        snapshots: Vec<String>,
    },
    /// Make a writable volume from a snapshot
    Clone {
        /// The snapshot, such as pool0/v1@monday
        snapshot: String,
        /// The new volume, such as pool0/v2
        #[arg(value_name = "POOL/NAME")]
        name: String,
        /// Keep room for the whole size
        #[arg(long)]
        thick: bool,
    },
    /// Give an unused volume the contents of a snapshot; its present contents are lost
    Restore {
        /// The volume
        lvol: String,
        /// The snapshot
        snapshot: String,
    },
    /// Change the size of a volume
    Resize {
        /// The volume
        lvol: String,
        /// Such as 200GiB; data beyond a smaller size is lost
        #[arg(value_parser = nacre_engine_values::size::parse_bytes)]
        size: u64,
    },
    /// Rename a volume or snapshot
    Rename {
        /// The volume or snapshot
        lvol: String,
        /// Its new name, without the pool
        new_name: String,
    },
    /// Copy the data that a volume shares with its snapshot
    Inflate {
        /// The volume
        lvol: String,
    },
    /// Copy the data that a volume shares with its parent only; the parent's parent stays
    Decouple {
        /// The volume
        lvol: String,
    },
    /// Put an unused thin volume on another snapshot; the space that only it has stays on top
    SetParent {
        /// The volume
        lvol: String,
        /// The snapshot, of the same size
        snapshot: String,
    },
    /// End all writes to a volume, for good
    SetReadOnly {
        /// The volume
        lvol: String,
    },
    /// Delete an unused volume or snapshot
    #[command(visible_alias = "rm")]
    Delete {
        /// The volume or snapshot
        lvol: String,
    },
}

pub(crate) fn run(args: LvolArgs) -> Result<(), Failure> {
    let connection = &args.connection;
    let answer = match args.command {
        LvolCommand::List { pool } => return list(connection, pool),
        LvolCommand::Create { name, size, thick } => {
            let (pool, name) = split(&name, '/', "the volume's name is POOL/NAME")?;
            connection.call_for_json::<CreateLvol>(&CreateLvolParams {
                pool,
                name,
                size,
                thick,
                uuid: None,
            })?
        }
        LvolCommand::Snapshot { snapshots } => return snapshot(connection, snapshots),
        LvolCommand::Clone {
            snapshot,
            name,
            thick,
        } => {
            let (pool, name) = split(&name, '/', "the new volume's name is POOL/NAME")?;
            let of_pool = format!("{pool}/");
            if snapshot.contains('/') && !snapshot.starts_with(&of_pool) {
                let cause = "a clone is in the pool of its snapshot: name the same pool";
                return Err(Failure::Usage(cause.into()));
            }
            connection.call_for_json::<CloneSnapshot>(&CloneParams {
                snapshot,
                name,
                thick,
                uuid: None,
            })?
        }
        LvolCommand::Restore { lvol, snapshot } => {
            connection.call_for_json::<RestoreLvol>(&RestoreParams { lvol, snapshot })?
        }
        LvolCommand::Resize { lvol, size } => {
            connection.call_for_json::<ResizeLvol>(&ResizeLvolParams { lvol, size })?
        }
        LvolCommand::Rename { lvol, new_name } => {
            connection.call_for_json::<RenameLvol>(&RenameLvolParams { lvol, new_name })?
        }
        LvolCommand::Inflate { lvol } => {
            connection.call_for_json::<InflateLvol>(&LvolParams { lvol })?
        }
        LvolCommand::Decouple { lvol } => {
            connection.call_for_json::<DecoupleLvol>(&LvolParams { lvol })?
        }
        LvolCommand::SetParent { lvol, snapshot } => {
            connection.call_for_json::<SetParent>(&SetParentParams { lvol, snapshot })?
        }
        LvolCommand::SetReadOnly { lvol } => {
            connection.call_for_json::<SetReadOnly>(&LvolParams { lvol })?
        }
        LvolCommand::Delete { lvol } => {
            let params = LvolParams { lvol };
            connection.call_for_json::<DeleteLvol>(&params)?;
            return done(connection, to_json(&params));
        }
    };
    named(connection, answer)
}

fn snapshot(connection: &Connection, snapshots: Vec<String>) -> Result<(), Failure> {
    let new = |name: String| {
        let (lvol, _) = split(&name, '@', "a snapshot's name is POOL/LVOL@NAME")?;
        let own = name.rsplit('/').next().unwrap_or(&name).to_owned();
        let (name, uuid) = (own, None);
        Ok(NewSnapshot { lvol, name, uuid })
    };
    let snapshots: Result<_, Failure> = snapshots.into_iter().map(new).collect();
    let params = SnapshotParams {
        snapshots: snapshots?,
    };
    let answer = connection.call_for_json::<SnapshotLvols>(&params)?;
    if connection.json {
        return output::json(&answer);
    }
    let mut made = items(&answer).iter();
    made.try_for_each(|one| named(connection, one.clone()))
}

fn split(text: &str, at: char, rule: &str) -> Result<(String, String), Failure> {
    match text.split_once(at) {
        Some((before, after)) if !before.is_empty() && !after.is_empty() => {
            Ok((before.to_owned(), after.to_owned()))
        }
        _ => Err(Failure::Usage(format!("\"{text}\": {rule}"))),
    }
}

fn list(connection: &Connection, pool: Option<String>) -> Result<(), Failure> {
    let lvols = connection.call_for_json::<ListLvols>(&ListLvolsParams { pool })?;
    if connection.json {
        return output::json(&lvols);
    }
    let all = items(&lvols);
    let parent = |lvol: &Value| {
        if let Some(device) = lvol["external_parent"]["name"].as_str() {
            return format!("bdev {device}");
        }
        let of = all.iter().find(|other| other["uuid"] == lvol["parent"]);
        output::cell(of.and_then(|of| of.get("name")))
    };
    let rows = all.iter().map(|lvol| {
        let is = |word: &str| lvol[word] == true;
        let kind = if is("snapshot") {
            "snapshot"
        } else if is("read_only") {
            "read-only"
        } else if is("thick") {
            "thick"
        } else {
            "thin"
        };
        vec![
            output::cell(lvol.get("alias")),
            kind.to_owned(),
            output::bytes(number(lvol, "size_bytes")),
            output::bytes(number(lvol, "used_bytes")),
            output::bytes(number(lvol, "exclusive_bytes")),
            parent(lvol),
        ]
    });
    let header = ["name", "kind", "size", "used", "exclusive", "parent"];
    output::table(&header, rows)
}
