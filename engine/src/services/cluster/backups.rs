//! A backup of the cluster a day in the data directory of each node. The last three stay.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use nacre_cluster_node::{Backup, Operator};
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use super::Running;
use crate::services::engine::Engine;
use crate::values::files;

/// The files, with their time between both, which sorts them.
const PREFIX: &str = "cluster-backup-";
const SUFFIX: &str = ".jsonl";
const KEPT: usize = 3;
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// Time from the start to the first look, and between two.
const FIRST: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_secs(600);
/// Time limit of one backup.
const LIMIT: Duration = Duration::from_secs(300);

/// Runs until the daemon ends.
pub(super) async fn keep(engine: Rc<Engine>, running: Rc<Running>) {
    let Some(dir) = engine.journal.store_path().map(Path::to_owned) else {
        return;
    };
    let mut wait = FIRST;
    loop {
        sleep(wait).await;
        wait = LOOK;
        if running.is_ending.get() || engine.plane().is_err() {
            return;
        }
        if running.cluster().is_none() {
            // It has no lease yet.
            wait = FIRST;
            continue;
        }
        let (dir, operator) = (dir.clone(), running.operator.clone());
        let kept = tokio::task::spawn_blocking(move || keep_one(&dir, &operator)).await;
        match kept {
            Ok(Ok(Some(file))) => info!(file = %file.display(), "the cluster is saved"),
            Ok(Ok(None)) | Err(_) => {}
            Ok(Err(error)) => {
                warn!("no backup of the cluster; it is tried again: {error:#}");
            }
        }
    }
}

/// Saves the cluster, if the last backup is a day old. Blocks.
fn keep_one(dir: &Path, operator: &Operator) -> anyhow::Result<Option<PathBuf>> {
    let now = SystemTime::now();
    let found = backups(dir)?;
    if !is_due(&found, now) {
        return Ok(None);
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()?;
    let saved = async { timeout(LIMIT, operator.backup(seconds())).await };
    let saved = runtime.block_on(saved).context("etcd is too slow")??;
    let file = dir.join(name(now));
    write_backup(&file, &saved)?;
    prune(dir)?;
    Ok(Some(file))
}

/// Writes the backup durably, with mode 0600.
pub(crate) fn write_backup(file: &Path, backup: &Backup) -> anyhow::Result<()> {
    let shown = || file.display().to_string();
    files::replace_private(file, &backup.encode()).with_context(shown)
}

/// The time of day in seconds since 1970.
pub(crate) fn seconds() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

/// The name of a backup that is made now.
fn name(now: SystemTime) -> String {
    let time = humantime::format_rfc3339_seconds(now).to_string();
    format!("{PREFIX}{}{SUFFIX}", time.replace(':', "-"))
}

/// The names of the backups, the oldest first.
fn backups(dir: &Path) -> anyhow::Result<Vec<String>> {
    let shown = || dir.display().to_string();
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(shown)? {
        let name = entry.with_context(shown)?.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(PREFIX) && name.ends_with(SUFFIX) {
            found.push(name.into_owned());
        }
    }
    found.sort();
    Ok(found)
}

/// True if the last one is a day old, or of a time that has not come: the clock was set.
fn is_due(found: &[String], now: SystemTime) -> bool {
    let before = now.checked_sub(DAY).unwrap_or(now);
    let last = found.last();
    last.is_none_or(|last| *last <= name(before) || *last > name(now))
}

fn prune(dir: &Path) -> anyhow::Result<()> {
    let found = backups(dir)?;
    for name in &found[..found.len().saturating_sub(KEPT)] {
        let path = dir.join(name);
        std::fs::remove_file(&path).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(1_800_000_000 + seconds)
    }

    /// Goal: a backup a day, also after the clock was set, and three files in all.
    #[test]
    fn one_a_day_and_three_in_all() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        std::fs::write(dir.join("cluster-backup-of-mine"), "").unwrap();
        let day = DAY.as_secs();
        let mut now = 0;
        for days in 0..5 {
            now = days * day;
            let found = backups(dir).unwrap();
            assert!(is_due(&found, at(now)), "{found:?}");
            std::fs::write(dir.join(name(at(now))), "").unwrap();
            prune(dir).unwrap();
            assert!(!is_due(&backups(dir).unwrap(), at(now + day - 1)));
        }
        let kept: Vec<String> = (2..5).map(|days| name(at(days * day))).collect();
        assert_eq!(backups(dir).unwrap(), kept);
        assert_eq!(
            std::fs::read_dir(dir).unwrap().count(),
            4,
            "other files stay"
        );
        assert!(is_due(&kept, at(now - day / 2)), "the clock was set back");
        assert_eq!(name(at(0)), "cluster-backup-2027-01-15T08-00-00Z.jsonl");
    }
}
