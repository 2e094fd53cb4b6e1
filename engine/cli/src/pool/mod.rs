//! `nacre pool`: lists, creates, imports, exports, renames, grows, checks and deletes storage
//! pools; adds and removes their disks.

mod removal;

use clap::{Args, Subcommand};
use serde_json::Value;
use uuid::Uuid;

use super::output::done;
use super::reply::items;
use super::{Connection, Failure, output};
use nacre_engine::methods::pool::{
    AddDisk, AddDiskParams, CheckPool, CreatePool, CreatePoolParams, DeletePool, ExportPool,
    GetPool, GrowPool, ImportPool, ImportPoolParams, ListPools, PoolParams, RemoveDiskParams,
    RenamePool, RenamePoolParams,
};
use nacre_engine_rpc::NoParams;
use nacre_engine_rpc::client::to_json;

#[derive(Debug, Args)]
#[command(
    mut_args = |arg| arg.global(true),
    after_help = "docs/operate/pools.md explains pools, and what to do when one is full."
)]
pub(crate) struct PoolArgs {
    #[command(flatten)]
    connection: Connection,
    #[command(subcommand)]
    command: PoolCommand,
}

#[derive(Debug, Subcommand)]
enum PoolCommand {
    /// List the open pools
    #[command(visible_alias = "ls")]
    List,
    /// Show everything about one
    Show {
        /// Name or UUID of the pool
        pool: String,
    },
    /// Create one on a block device
    Create {
        /// Name of the new pool
        name: String,
        /// The block device: nothing else may use it
        disk: String,
        /// Accept a device with data on it, which is lost
        #[arg(long)]
        force: bool,
    },
    /// Open the pool on a block device; from then on every start of the daemon opens it
    Import {
        /// The block device: one of the pool's disks, if it has several
        disk: String,
        /// The pool that must be on it
        #[arg(long)]
        uuid: Option<Uuid>,
        /// Give it this name, as an open pool has its own
        #[arg(long, value_name = "NEW")]
        name: Option<String>,
        /// Open it although another daemon has it open: if that one still runs, both destroy it
        #[arg(long)]
        force: bool,
    },
    /// Close an unused pool, so that another machine may import it
    Export {
        /// Name or UUID of the pool
        pool: String,
    },
    /// Give a pool another name
    Rename {
        /// Name or UUID of the pool
        pool: String,
        /// Its new name
        new_name: String,
    },
    /// Add a block device to a pool in use
    AddDisk {
        /// Name or UUID of the pool
        pool: String,
        /// The block device: nothing else may use it
        disk: String,
        /// Accept a device with data on it, which is lost
        #[arg(long)]
        force: bool,
    },
    /// Move the data of a disk to the others of its pool, then free the disk
    RemoveDisk {
        /// Name or UUID of the pool
        pool: String,
        /// The disk: its device, or its id in the pool
        disk: String,
        /// Keep a disk that is leaving
        #[arg(long)]
        cancel: bool,
        /// Show the progress, and return when the disk is free
        #[arg(long, conflicts_with = "cancel")]
        wait: bool,
    },
    /// Take the rest of disks that have grown
    Grow {
        /// Name or UUID of the pool
        pool: String,
    },
    /// Read both copies of all metadata, repair bad ones, and compare the used space with the maps
    Check {
        /// Name or UUID of the pool
        pool: String,
    },
    /// Delete a pool without volumes and snapshots
    #[command(visible_alias = "rm")]
    Delete {
        /// Name or UUID of the pool
        pool: String,
    },
}

pub(crate) fn run(args: PoolArgs) -> Result<(), Failure> {
    let connection = &args.connection;
    match args.command {
        PoolCommand::List => list(connection),
        PoolCommand::Show { pool } => show(
            connection,
            connection.call_for_json::<GetPool>(&PoolParams { pool })?,
        ),
        PoolCommand::Create { name, disk, force } => {
            let params = CreatePoolParams {
                name,
                disk,
                uuid: None,
                force,
            };
            named(connection, connection.call_for_json::<CreatePool>(&params)?)
        }
        PoolCommand::Import {
            disk,
            uuid,
            name,
            force,
        } => {
            let params = ImportPoolParams {
                disk,
                uuid,
                new_name: name,
                force,
                known_disks: Vec::new(),
            };
            named(connection, connection.call_for_json::<ImportPool>(&params)?)
        }
        PoolCommand::Export { pool } => {
            let params = PoolParams { pool };
            connection.call_for_json::<ExportPool>(&params)?;
            done(connection, to_json(&params))
        }
        PoolCommand::Delete { pool } => {
            let params = PoolParams { pool };
            connection.call_for_json::<DeletePool>(&params)?;
            done(connection, to_json(&params))
        }
        PoolCommand::Rename { pool, new_name } => {
            let params = RenamePoolParams { pool, new_name };
            named(connection, connection.call_for_json::<RenamePool>(&params)?)
        }
        PoolCommand::AddDisk { pool, disk, force } => {
            let params = AddDiskParams { pool, disk, force };
            has_size(connection, connection.call_for_json::<AddDisk>(&params)?)
        }
        PoolCommand::RemoveDisk {
            pool,
            disk,
            cancel,
            wait,
        } => {
            let params = RemoveDiskParams { pool, disk, cancel };
            removal::run(connection, &params, wait)
        }
        PoolCommand::Grow { pool } => has_size(
            connection,
            connection.call_for_json::<GrowPool>(&PoolParams { pool })?,
        ),
        PoolCommand::Check { pool } => check(connection, pool),
    }
}

fn has_size(connection: &Connection, grown: Value) -> Result<(), Failure> {
    if connection.json {
        return output::json(&grown);
    }
    let size = output::bytes(number(&grown, "total_bytes"));
    output::line(&format!("{} has {size}", output::cell(grown.get("name"))))
}

fn list(connection: &Connection) -> Result<(), Failure> {
    let pools = connection.call_for_json::<ListPools>(&NoParams {})?;
    if connection.json {
        return output::json(&pools);
    }
    let rows = items(&pools).iter().map(|pool| {
        let used = number(pool, "total_bytes").saturating_sub(number(pool, "free_bytes"));
        vec![
            output::cell(pool.get("name")),
            output::cell(pool.get("state")),
            output::bytes(number(pool, "total_bytes")),
            output::bytes(used),
            output::bytes(number(pool, "free_bytes")),
            output::cell(pool.get("lvols")),
            disk_names(pool),
        ]
    });
    let header = ["name", "state", "size", "used", "free", "lvols", "disks"];
    output::table(&header, rows)
}

fn show(connection: &Connection, pool: Value) -> Result<(), Failure> {
    if connection.json {
        return output::json(&pool);
    }
    let text = |field: &str| output::cell(pool.get(field));
    let bytes = |field: &str| output::bytes(number(&pool, field));
    let lines = [
        ("name", text("name")),
        ("uuid", text("uuid")),
        ("state", text("state")),
        ("disks", disk_names(&pool)),
        ("size", bytes("total_bytes")),
        ("free", bytes("free_bytes")),
        ("reserved", bytes("reserved_bytes")),
        ("unit", bytes("unit_bytes")),
        ("lvols", text("lvols")),
        ("waiting writes", text("waiting_writes")),
        ("unsettled records", text("unsettled_records")),
        ("replayed at import", text("replayed_records")),
        ("unreadable map pages", text("lost_pages")),
        ("reactor", text("reactor")),
    ];
    for (name, value) in lines {
        output::line(&format!("{name:<21} {value}"))?;
    }
    let disks = items(&pool["disks"]);
    if disks.len() < 2 {
        return Ok(());
    }
    let rows = disks.iter().map(|disk| {
        let (total, free) = (number(disk, "total_bytes"), number(disk, "free_bytes"));
        vec![
            output::cell(disk.get("name")),
            removal::state(disk),
            output::bytes(total),
            output::bytes(total.saturating_sub(free)),
            output::bytes(free),
            output::cell(disk.get("uuid")),
        ]
    });
    output::line("")?;
    output::table(&["disk", "state", "size", "used", "free", "uuid"], rows)
}

/// The names of a pool's disks.
fn disk_names(pool: &Value) -> String {
    let names = items(&pool["disks"]).iter();
    let names: Vec<String> = names.map(|disk| output::cell(disk.get("name"))).collect();
    if names.is_empty() {
        // An earlier daemon has one disk for each pool.
        output::cell(pool.get("disk"))
    } else {
        names.join(", ")
    }
}

fn check(connection: &Connection, pool: String) -> Result<(), Failure> {
    let answer = connection.call_for_json::<CheckPool>(&PoolParams { pool })?;
    let (lines, faults) = verdict(&answer);
    if connection.json {
        output::json(&answer)?;
    } else {
        lines.iter().try_for_each(|line| output::line(line))?;
    }
    match faults {
        0 => Ok(()),
        1 => Err(Failure::Failed(anyhow::anyhow!("1 fault is left"))),
        _ => Err(Failure::Failed(anyhow::anyhow!("{faults} faults are left"))),
    }
}

/// The report of a check in words, and the number of faults that are left.
fn verdict(answer: &Value) -> (Vec<String>, u64) {
    let count = |field| number(answer, field);
    let (pages, units) = (count("pages"), count("units"));
    let (repaired, not_repaired) = (count("repaired"), count("not_repaired"));
    let (findings, more) = (items(&answer["findings"]), count("more_findings"));
    let faults = not_repaired + findings.len() as u64 + more;
    let mut lines = vec![format!(
        "{pages} pages of metadata, two copies of each; {units} units in use"
    )];
    if repaired > 0 {
        lines.push(format!("faults repaired: {repaired} bad copies"));
    }
    if not_repaired > 0 {
        let cause = "could not be written again: look at the disk";
        lines.push(format!("{not_repaired} bad copies {cause}"));
    }
    let words = findings.iter().map(|one| output::cell(Some(one)));
    lines.extend(words);
    if more > 0 {
        lines.push(format!("and {more} more"));
    }
    if faults + repaired == 0 {
        lines.push("no faults".to_owned());
    }
    (lines, faults)
}

/// Prints the name of a pool or volume for people, and all of it for programs.
pub(super) fn named(connection: &Connection, answer: Value) -> Result<(), Failure> {
    if connection.json {
        return output::json(&answer);
    }
    let name = answer.get("alias").or_else(|| answer.get("name"));
    output::line(&output::cell(name))
}

pub(super) fn number(of: &Value, field: &str) -> u64 {
    of[field].as_u64().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// "no faults" stands alone: neither a repair nor a finding is beside it.
    #[test]
    fn only_a_sound_pool_has_no_faults() {
        let report = |repaired, not_repaired, findings: &[&str], more_findings| {
            let answer = json!({
                "pages": 21, "units": 7, "repaired": repaired, "not_repaired": not_repaired,
                "findings": findings, "more_findings": more_findings,
            });
            let (mut lines, faults) = verdict(&answer);
            let first = lines.remove(0);
            assert_eq!(
                first,
                "21 pages of metadata, two copies of each; 7 units in use"
            );
            (lines.join("; "), faults)
        };
        let cases = [
            (report(0, 0, &[], 0), "no faults", 0),
            (report(2, 0, &[], 0), "faults repaired: 2 bad copies", 0),
            (
                report(0, 1, &[], 0),
                "1 bad copies could not be written again: look at the disk",
                1,
            ),
            (
                report(2, 0, &["unit 7 is lost"], 3),
                "faults repaired: 2 bad copies; unit 7 is lost; and 3 more",
                4,
            ),
        ];
        for ((lines, faults), expected, left) in cases {
            assert_eq!((lines.as_str(), faults), (expected, left));
        }
    }
}
