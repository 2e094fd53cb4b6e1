//! `nacre backup`: backups of snapshots of pools in a directory or an object store.

use std::io::IsTerminal;
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use serde_json::Value;
use uuid::Uuid;

use super::pool::number;
use super::reply::items;
use super::{Connection, Failure, output};
use nacre_engine::methods::backup::{
    BackupParams, BackupStore, CancelJob, CreateBackup, CreateBackupParams, DeleteBackup,
    JobParams, ListBackups, ListBackupsParams, ListJobs, RestoreBackup, RestoreBackupParams,
    VerifyBackup,
};
use nacre_engine::services::Engine;
use nacre_engine_rpc::client::Client;
use nacre_engine_rpc::{Method, NoParams};

const PAUSE: Duration = Duration::from_millis(300);

#[derive(Debug, Args)]
#[command(
    mut_args = |arg| arg.global(true),
    after_help = "STORE is file:///path of a directory on the daemon's machine, or \
        s3://bucket/prefix. docs/operate/backup.md has examples."
)]
pub(crate) struct BackupArgs {
    #[command(flatten)]
    connection: Connection,
    #[command(subcommand)]
    command: BackupCommand,
}

#[derive(Debug, Subcommand)]
enum BackupCommand {
    /// Back up a snapshot; unchanged data of the newest backup is not written again
    Create {
        /// The snapshot, such as pool0/v1@monday
        snapshot: String,
        #[command(flatten)]
        store: BackupStore,
        /// The volume to which the backup belongs, where several grew from the snapshot
        #[arg(long)]
        volume: Option<String>,
        /// Write all data
        #[arg(long)]
        full: bool,
        #[command(flatten)]
        wait: JobWaitArgs,
    },
    /// List the backups in a store
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        store: BackupStore,
    },
    /// Read all data of a backup, and compare the checksums
    Verify {
        #[command(flatten)]
        store: BackupStore,
        /// UUID of the backup
        backup: Uuid,
        #[command(flatten)]
        wait: JobWaitArgs,
    },
    /// Make a new volume from a backup
    Restore {
        #[command(flatten)]
        store: BackupStore,
        /// UUID of the backup
        backup: Uuid,
        /// The new volume, such as pool0/v2
        #[arg(value_name = "POOL/NAME")]
        name: String,
        #[command(flatten)]
        wait: JobWaitArgs,
    },
    /// Delete a backup, with the data that no other backup has
    #[command(visible_alias = "rm")]
    Delete {
        #[command(flatten)]
        store: BackupStore,
        /// UUID of the backup
        backup: Uuid,
        #[command(flatten)]
        wait: JobWaitArgs,
    },
    /// List running jobs, and the last ended ones
    Jobs,
    /// End a job
    Cancel {
        /// Its number
        job: u32,
    },
}

#[derive(Debug, Args)]
struct JobWaitArgs {
    /// Do not wait for the end: `nacre backup jobs` shows the progress
    #[arg(long)]
    no_wait: bool,
}

pub(crate) fn run(args: BackupArgs) -> Result<(), Failure> {
    let connection = &args.connection;
    match args.command {
        BackupCommand::Create {
            snapshot,
            store,
            volume,
            full,
            wait,
        } => {
            let params = CreateBackupParams {
                snapshot,
                store,
                volume,
                full,
            };
            job::<CreateBackup>(connection, &params, &wait)
        }
        BackupCommand::List { store } => list(connection, store),
        BackupCommand::Verify {
            store,
            backup,
            wait,
        } => job::<VerifyBackup>(connection, &on(store, backup), &wait),
        BackupCommand::Delete {
            store,
            backup,
            wait,
        } => job::<DeleteBackup>(connection, &on(store, backup), &wait),
        BackupCommand::Restore {
            store,
            backup,
            name,
            wait,
        } => {
            let Some((pool, name)) = name.split_once('/') else {
                let cause = format!("\"{name}\" has no \"/\": name it as POOL/NAME");
                return Err(Failure::Failed(anyhow::anyhow!(cause)));
            };
            let params = RestoreBackupParams {
                backup,
                store,
                pool: pool.to_owned(),
                name: name.to_owned(),
                uuid: None,
            };
            job::<RestoreBackup>(connection, &params, &wait)
        }
        BackupCommand::Jobs => jobs(connection),
        BackupCommand::Cancel { job } => {
            let answer = connection.call_for_json::<CancelJob>(&JobParams { job })?;
            if connection.json {
                return output::json(&answer);
            }
            Ok(())
        }
    }
}

fn on(store: BackupStore, backup: Uuid) -> BackupParams {
    BackupParams { backup, store }
}

fn list(connection: &Connection, store: BackupStore) -> Result<(), Failure> {
    let params = ListBackupsParams {
        store,
        volume_uuid: None,
    };
    let answer = connection.call_for_json::<ListBackups>(&params)?;
    if connection.json {
        return output::json(&answer);
    }
    let rows = items(&answer["backups"]).iter().map(|backup| {
        let text = |field: &str| output::cell(backup.get(field));
        let bytes = |field: &str| output::bytes(number(backup, field));
        vec![
            text("backup"),
            moment(number(backup, "created")),
            text("snapshot"),
            bytes("size_bytes"),
            bytes("stored_bytes"),
            bytes("new_bytes"),
        ]
    });
    let header = ["backup", "created", "snapshot", "size", "stored", "new"];
    output::table(&header, rows)?;
    for bad in items(&answer["bad"]) {
        let cause = output::cell(bad.get("cause"));
        output::line(&format!("{}: {cause}", output::cell(bad.get("backup"))))?;
    }
    Ok(())
}

fn moment(seconds: u64) -> String {
    let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
    // The text form ends with the year 9999.
    let time = time.filter(|_| seconds < 253_402_300_800);
    time.map_or_else(String::new, |time| {
        humantime::format_rfc3339_seconds(time).to_string()
    })
}

/// Begins a job, and waits for its end.
fn job<M: Method<Engine>>(
    connection: &Connection,
    params: &M::Params,
    wait: &JobWaitArgs,
) -> Result<(), Failure>
where
    M::Params: Serialize,
{
    let mut client = connection.open()?;
    let mut job = client.call_for_json::<M, _>(params)?;
    if !wait.no_wait {
        job = ended(&mut client, job, connection.json)?;
    }
    if connection.json {
        output::json(&job)?;
    } else {
        for line in lines(&job) {
            output::line(&line)?;
        }
    }
    match failure(&job) {
        Some(cause) => Err(Failure::Failed(anyhow::anyhow!(cause))),
        None => Ok(()),
    }
}

/// The last state of a job.
fn ended(client: &mut Client, mut job: Value, hidden: bool) -> Result<Value, Failure> {
    let hidden = hidden || !std::io::stderr().is_terminal();
    let bar = ProgressBar::with_draw_target(
        Some(1000),
        if hidden {
            ProgressDrawTarget::hidden()
        } else {
            ProgressDrawTarget::stderr()
        },
    );
    let style = ProgressStyle::with_template("{bar:24} {msg}");
    bar.set_style(style.expect("the template is right"));
    while job["state"] == "running" {
        let (done, total) = (number(&job, "done_objects"), number(&job, "total_objects"));
        bar.set_position(done.saturating_mul(1000) / total.max(1));
        bar.set_message(progress(&job));
        std::thread::sleep(PAUSE);
        let jobs = client.call_for_json::<ListJobs, _>(&NoParams {})?;
        let found = items(&jobs).iter().find(|one| one["job"] == job["job"]);
        let Some(found) = found else {
            let cause = "the daemon does not know the job any more: it was started again";
            return Err(Failure::Failed(anyhow::anyhow!(cause)));
        };
        job = found.clone();
    }
    bar.finish_and_clear();
    Ok(job)
}

/// The progress of a job in words.
fn progress(job: &Value) -> String {
    let (done, total) = (number(job, "done_objects"), number(job, "total_objects"));
    if total == 0 {
        return "begins".to_owned();
    }
    let percent = done.saturating_mul(100) / total;
    let left = job["left_s"].as_f64().map(|seconds| {
        let seconds = Duration::from_secs(seconds.clamp(0.0, 1e9) as u64);
        format!(", {} left", humantime::format_duration(seconds))
    });
    let stored = output::bytes(number(job, "stored_bytes"));
    format!("{percent} %, {stored}{}", left.unwrap_or_default())
}

/// The result of a job in words.
fn lines(job: &Value) -> Vec<String> {
    let text = |field: &str| output::cell(job.get(field));
    let result = &job["result"];
    let bytes = |field: &str| output::bytes(number(result, field));
    match (job["state"].as_str(), job["operation"].as_str()) {
        (Some("running"), _) => vec![format!("job {}", text("job"))],
        (Some("complete"), Some("create")) => vec![format!(
            "{}: {} stored, {} of it new",
            text("backup"),
            bytes("stored_bytes"),
            bytes("new_bytes")
        )],
        (Some("complete"), Some("restore")) => vec![text("subject")],
        (Some("complete"), Some("verify")) => {
            let damaged = items(&job["damaged"]).iter();
            let mut lines: Vec<_> = damaged.map(|one| output::cell(Some(one))).collect();
            match number(job, "more_damaged") {
                0 if lines.is_empty() => lines.push(format!("{}: sound", text("backup"))),
                0 => {}
                more => lines.push(format!("and {more} more")),
            }
            lines
        }
        (Some("complete"), Some("delete")) if job["deferred"] == true => {
            vec!["another daemon backs up the volume: a later deletion removes the data".to_owned()]
        }
        (Some("complete"), Some("delete")) if !items(&job["left"]).is_empty() => {
            let mut lines = vec![
                "the backup is deleted, but data without a backup stays until a later deletion:"
                    .to_owned(),
            ];
            let left = items(&job["left"]).iter();
            lines.extend(left.map(|one| format!("warning: {}", output::cell(Some(one)))));
            lines
        }
        _ => Vec::new(),
    }
}

/// The cause of a job's failure, if it is one.
fn failure(job: &Value) -> Option<String> {
    let damaged = items(&job["damaged"]).len() as u64 + number(job, "more_damaged");
    match job["state"].as_str() {
        Some("failed") => Some(output::cell(job.get("error"))),
        Some("cancelled") => Some("cancelled".to_owned()),
        _ if damaged == 1 => Some("1 object is damaged".to_owned()),
        _ if damaged > 1 => Some(format!("{damaged} objects are damaged")),
        _ => None,
    }
}

fn jobs(connection: &Connection) -> Result<(), Failure> {
    let jobs = connection.call_for_json::<ListJobs>(&NoParams {})?;
    if connection.json {
        return output::json(&jobs);
    }
    let rows = items(&jobs).iter().map(|job| {
        let text = |field: &str| output::cell(job.get(field));
        vec![
            text("job"),
            text("operation"),
            text("backup"),
            text("location"),
            state(job),
        ]
    });
    let header = ["job", "operation", "backup", "store", "state"];
    output::table(&header, rows)
}

/// The state of a job in a table.
fn state(job: &Value) -> String {
    let state = output::cell(job.get("state"));
    match (&*state, failure(job)) {
        ("running", _) => progress(job),
        ("cancelled", _) | (_, None) => state,
        (_, Some(cause)) => format!("{state}: {cause}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Goal: every end of a job has the right words, and damage is a failure.
    #[test]
    fn ends_of_jobs_in_words() {
        let job = |state: &str, operation: &str| {
            json!({
                "job": 3, "state": state, "operation": operation, "backup": "b", "subject": "p/v2",
                "damaged": [], "more_damaged": 0, "deferred": false, "error": "no room",
                "result": { "stored_bytes": 2048, "new_bytes": 1024 },
            })
        };
        let said = |job: &Value| (lines(job).join("; "), failure(job));
        let table = [
            (job("running", "create"), "job 3", None),
            (
                job("complete", "create"),
                "b: 2.0 KiB stored, 1.0 KiB of it new",
                None,
            ),
            (job("complete", "restore"), "p/v2", None),
            (job("complete", "verify"), "b: sound", None),
            (job("complete", "delete"), "", None),
            (job("failed", "create"), "", Some("no room")),
            (job("cancelled", "create"), "", Some("cancelled")),
        ];
        for (job, line, failed) in table {
            assert_eq!(said(&job), (line.to_owned(), failed.map(str::to_owned)));
        }
        let mut deleted = job("complete", "delete");
        deleted["left"] = json!(["x is damaged"]);
        let (line, failed) = said(&deleted);
        assert!(line.ends_with("deletion:; warning: x is damaged"), "{line}");
        assert_eq!(failed, None, "the backup is deleted");
        let mut damaged = job("complete", "verify");
        damaged["damaged"] = json!(["x is damaged"]);
        let (line, failed) = said(&damaged);
        assert_eq!(
            (&*line, failed.as_deref()),
            ("x is damaged", Some("1 object is damaged"))
        );
        assert_eq!(state(&damaged), "complete: 1 object is damaged");
        assert_eq!(state(&job("failed", "create")), "failed: no room");
        assert_eq!(state(&job("cancelled", "create")), "cancelled");
        assert_eq!(state(&job("complete", "create")), "complete");
        damaged["more_damaged"] = json!(2);
        assert_eq!(failure(&damaged).as_deref(), Some("3 objects are damaged"));
    }

    #[test]
    fn progress_in_words() {
        let job =
            json!({ "done_objects": 1, "total_objects": 4, "stored_bytes": 1024, "left_s": 61.7 });
        assert_eq!(progress(&job), "25 %, 1.0 KiB, 1m 1s left");
        assert_eq!(progress(&json!({ "total_objects": 0 })), "begins");
        assert_eq!(moment(1_700_000_000), "2023-11-14T22:13:20Z");
        assert_eq!(moment(u64::MAX), "");
    }
}
