//! A daily backup of the cluster's keys in the data directory of each node. The last three are
//! kept.
//!
//! The ages of the files are in their contents, not in their names. So a change of the system time
//! does not stop the backups, and does not remove the latest one.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use nacre_cluster_core::NodeId;
use nacre_cluster_node::backup::{Age, LARGEST};
use nacre_cluster_node::{Backup, BackupError, Operator};
use tokio::time::{sleep, timeout};
use tracing::{info, warn};
use uuid::Uuid;

use super::Running;
use crate::services::Engine;
use crate::values::files;

/// Prefix and suffix of the file names.
const PREFIX: &str = "cluster-backup-";
const SUFFIX: &str = ".jsonl";
const KEPT: usize = 3;
/// Seconds of a day.
const DAY: u64 = 24 * 60 * 60;
/// Delay from the start to the first check, and the interval of later ones.
const FIRST: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_secs(600);
/// Time limit of one backup.
const LIMIT: Duration = Duration::from_secs(300);

/// Makes the backups until the daemon ends.
pub(super) async fn keep(engine: Rc<Engine>, running: Rc<Running>) {
    let Some(dir) = engine.journal.store_path().map(Path::to_owned) else {
        return;
    };
    let mut wait = FIRST;
    // The last day that has a backup: its files need no other look.
    let mut last_day = None;
    loop {
        sleep(wait).await;
        wait = LOOK;
        if running.is_ending.get() || engine.plane().is_err() {
            return;
        }
        let Some(cluster) = running.cluster() else {
            // It has no lease yet.
            wait = FIRST;
            continue;
        };
        let (dir, operator) = (dir.clone(), running.operator.clone());
        let when = When::new(running.me, seconds());
        let day = when.day(when.now);
        if last_day == Some(day) {
            continue;
        }
        let keep = move || keep_one(&dir, cluster, when, &operator);
        let kept = tokio::task::spawn_blocking(keep).await;
        if matches!(kept, Ok(Ok(_))) {
            last_day = Some(day);
        }
        match kept {
            Ok(Ok(Some(file))) => info!(file = %file.display(), "the cluster is saved"),
            Ok(Ok(None)) | Err(_) => {}
            Ok(Err(error)) => {
                warn!("no backup of the cluster; it is tried again: {error:#}");
            }
        }
    }
}

/// The time of a check, and the second of the day (UTC) at which the node's backup is due. It
/// differs between nodes, so that their requests do not reach etcd together.
#[derive(Debug, Clone, Copy)]
struct When {
    now: u64,
    of_day: u64,
}

impl When {
    fn new(node: NodeId, now: u64) -> Self {
        let of_day = (node.0.as_u128() % u128::from(DAY)) as u64;
        Self { now, of_day }
    }

    fn day(self, seconds: u64) -> u64 {
        (seconds + DAY - self.of_day) / DAY
    }

    /// True if the node has no backup of this day. Ignores backups from the future: the system time
    /// was changed.
    fn is_due(self, found: &[BackupFile]) -> bool {
        let ages = found.iter().filter_map(|file| file.age);
        let mut past = ages.filter(|age| age.created <= self.now);
        !past.any(|age| self.day(age.created) == self.day(self.now))
    }
}

/// A backup file of this cluster.
#[derive(Debug)]
struct BackupFile {
    path: PathBuf,
    /// `None`: the file is damaged.
    age: Option<Age>,
}

/// Saves the cluster, if this day has no backup yet. Blocks.
fn keep_one(
    dir: &Path,
    cluster: Uuid,
    when: When,
    operator: &Operator,
) -> anyhow::Result<Option<PathBuf>> {
    if !when.is_due(&backups(dir, cluster)?) {
        return Ok(None);
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()?;
    let saved = async { timeout(LIMIT, operator.backup(when.now)).await };
    let saved = runtime.block_on(saved).context("etcd is too slow")??;
    let file = dir.join(name(when.now));
    write_backup(&file, &saved)?;
    // The new backup is good even if old ones cannot be deleted.
    let pruned = backups(dir, cluster).and_then(|found| prune(found, saved.age()?));
    if let Err(error) = pruned {
        warn!("old backups of the cluster stay: {error:#}");
    }
    Ok(Some(file))
}

/// Writes the backup durably, with mode 0600.
pub(crate) fn write_backup(file: &Path, backup: &Backup) -> anyhow::Result<()> {
    must_be_replaceable(file)?;
    let shown = || file.display().to_string();
    files::replace_private(file, &backup.encode()).with_context(shown)
}

/// Refuses a path that exists and is not a regular file: it would be replaced by one.
pub(crate) fn must_be_replaceable(file: &Path) -> anyhow::Result<()> {
    match std::fs::symlink_metadata(file) {
        Ok(found) if !found.is_file() => {
            bail!(
                "{}: it is not a regular file. Name another file",
                file.display()
            )
        }
        // The write reports other errors.
        _ => Ok(()),
    }
}

/// Reads and verifies a whole backup.
pub(crate) fn read_backup(file: &Path) -> anyhow::Result<Result<Backup, BackupError>> {
    let shown = || file.display().to_string();
    // Before it is opened: a pipe would wait for a writer.
    let found = std::fs::metadata(file).with_context(shown)?;
    if !found.is_file() {
        bail!(
            "{}: it is not a regular file. Name the file of a backup",
            shown()
        );
    }
    let bytes = found.len();
    if bytes > LARGEST {
        return Ok(Err(BackupError::TooLarge { bytes }));
    }
    let mut text = Vec::new();
    let opened = std::fs::File::open(file).with_context(shown)?;
    let mut limited = opened.take(LARGEST + 1);
    limited.read_to_end(&mut text).with_context(shown)?;
    Ok(Backup::parse(&text))
}

/// The time of day in seconds since 1970.
pub(crate) fn seconds() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

/// The name of a backup that is made at this time.
fn name(created: u64) -> String {
    let time = UNIX_EPOCH + Duration::from_secs(created);
    let time = humantime::format_rfc3339_seconds(time).to_string();
    format!("{PREFIX}{}{SUFFIX}", time.replace(':', "-"))
}

/// The backup files of this cluster. Skips files of other clusters and of later versions, and
/// unreadable ones.
fn backups(dir: &Path, cluster: Uuid) -> anyhow::Result<Vec<BackupFile>> {
    let shown = || dir.display().to_string();
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(shown)? {
        let path = entry.with_context(shown)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !name.starts_with(PREFIX) || !name.ends_with(SUFFIX) {
            continue;
        }
        let age = match read_backup(&path) {
            Ok(Ok(backup)) => match backup.age() {
                Ok(age) if age.cluster == cluster => Some(age),
                _ => continue,
            },
            Ok(Err(
                BackupError::Cut { .. }
                | BackupError::Damaged { .. }
                | BackupError::Checksum { .. },
            )) => None,
            Ok(Err(_)) | Err(_) => continue,
        };
        found.push(BackupFile { path, age });
    }
    Ok(found)
}

/// Removes all but the last [`KEPT`]. Backups of the same etcd as `last` are ordered by revision
/// and are newer than the others. Damaged files go first.
fn prune(mut found: Vec<BackupFile>, last: Age) -> anyhow::Result<()> {
    found.sort_by_key(|file| {
        let by_age = |age: Age| {
            let is_of_store = age.restored == last.restored;
            let revision = if is_of_store { age.revision } else { 0 };
            (is_of_store, revision, age.created)
        };
        std::cmp::Reverse(file.age.map(by_age))
    });
    for file in found.iter().skip(KEPT) {
        let path = &file.path;
        std::fs::remove_file(path).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use nacre_cluster_node::backup::SavedKey;
    use serde_json::json;

    use super::*;

    const START: u64 = 1_800_000_000;
    const CLUSTER: Uuid = Uuid::from_u128(7);

    fn backup(created: u64, revision: i64, restored: Option<u128>) -> Backup {
        let restored = restored.map(Uuid::from_u128);
        let meta = json!({
            "v": 1, "id": CLUSTER, "name": "lab", "lease_ms": 2000, "restored": restored,
        });
        Backup {
            id: CLUSTER,
            name: "lab".to_owned(),
            revision,
            created,
            keys: vec![SavedKey {
                key: "meta".to_owned(),
                value: meta.to_string(),
            }],
        }
    }

    fn when(now: u64) -> When {
        When { now, of_day: 3600 }
    }

    /// As [`keep_one`], without etcd.
    fn keep(dir: &Path, backup: &Backup) {
        write_backup(&dir.join(name(backup.created)), backup).unwrap();
        prune(backups(dir, CLUSTER).unwrap(), backup.age().unwrap()).unwrap();
    }

    fn names(dir: &Path) -> Vec<String> {
        let files = std::fs::read_dir(dir).unwrap();
        let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    /// Goal: a backup a day, and three files in all; other files stay.
    #[test]
    fn one_a_day_and_three_in_all() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let others = ["cluster-backup-of-mine", "cluster-backup-foreign.jsonl"];
        for other in others {
            std::fs::write(dir.join(other), "").unwrap();
        }
        for days in 0..5 {
            let now = START + days * DAY;
            assert!(when(now).is_due(&backups(dir, CLUSTER).unwrap()), "{days}");
            keep(dir, &backup(now, days as i64, None));
            let rest = DAY - 1 - (now - 3600) % DAY;
            for later in [now, now + rest] {
                assert!(!when(later).is_due(&backups(dir, CLUSTER).unwrap()));
            }
        }
        let mut expected: Vec<String> = (2..5).map(|days| name(START + days * DAY)).collect();
        expected.extend(others.map(str::to_owned));
        expected.sort();
        assert_eq!(names(dir), expected);
        assert_eq!(name(START), "cluster-backup-2027-01-15T08-00-00Z.jsonl");
    }

    /// Goal: after the clock was set back, backups go on, and the last one is not the one that is
    /// removed. A damaged file goes first.
    #[test]
    fn a_clock_that_was_set_back() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        for days in 10..12 {
            keep(dir, &backup(START + days * DAY, days as i64, None));
        }
        let damaged = dir.join(name(START + 20 * DAY));
        let text = backup(1, 99, None).encode();
        std::fs::write(&damaged, &text[..text.len() - 9]).unwrap();
        for days in 0..2 {
            let now = START + days * DAY;
            assert!(when(now).is_due(&backups(dir, CLUSTER).unwrap()));
            keep(dir, &backup(now, 20 + days as i64, None));
            assert!(!damaged.exists());
            assert!(!when(now).is_due(&backups(dir, CLUSTER).unwrap()));
        }
        let expected = [0, 1, 11].map(|days| name(START + days * DAY));
        assert_eq!(names(dir), expected);
    }

    /// Goal: revisions begin anew after a restore: later backups have smaller ones.
    #[test]
    fn a_restored_store_is_later() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        for days in 0..3 {
            keep(dir, &backup(START + days * DAY, 1000 + days as i64, None));
        }
        for days in 3..5 {
            keep(dir, &backup(START + days * DAY, days as i64, Some(1)));
        }
        let expected = [2, 3, 4].map(|days| name(START + days * DAY));
        assert_eq!(names(dir), expected);
    }

    /// Goal: nodes do not make their backups at the same time.
    #[test]
    fn each_node_has_a_time_of_its_own() {
        let nodes = (0..8).map(|_| When::new(NodeId(Uuid::new_v4()), START).of_day);
        let times: std::collections::BTreeSet<u64> = nodes.collect();
        assert!(times.len() > 1 && times.iter().all(|time| *time < DAY));
    }

    /// Goal: a backup never replaces a folder, a link or a device, and is never read from one.
    #[test]
    fn only_regular_files() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        for path in [dir.path(), &link, Path::new("/dev/null")] {
            for refused in [
                write_backup(path, &backup(1, 1, None)).unwrap_err(),
                read_backup(path).unwrap_err(),
            ] {
                let said = refused.to_string();
                assert!(said.contains("it is not a regular file"), "{said}");
            }
        }
    }
}
