//! The backup jobs by number: the running ones, and the last ones that ended.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_engine_backup::{Failure, Header, Progress, Removed, Verified};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::Notify;
use uuid::Uuid;

use super::facts;
use super::work::{BackupPlace, Shared};
use crate::refusal::Refusal;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;

/// Most running jobs. Each has buffers of up to 64 MiB.
const RUNNING: usize = 4;
/// Most jobs in the list, including ended ones.
const KNOWN: usize = 64;
/// Time limit for the jobs to end when the daemon stops.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    Create,
    Verify,
    Restore,
    Delete,
}

impl Operation {
    pub const ALL: [Self; 4] = [Self::Create, Self::Verify, Self::Restore, Self::Delete];

    pub fn word(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Verify => "verify",
            Self::Restore => "restore",
            Self::Delete => "delete",
        }
    }
}

/// The result of a job.
#[derive(Debug)]
pub enum Ended {
    Created(Header),
    Verified(Verified),
    Restored(Header),
    Deleted(Removed),
}

#[derive(Debug)]
pub enum JobState {
    Runs,
    Complete(Ended),
    Failed(RpcError),
    Cancelled,
}

#[derive(Debug)]
pub struct Job {
    pub number: u32,
    pub operation: Operation,
    pub location: String,
    pub backup: Uuid,
    /// Name of the snapshot to back up, or of the new volume to restore to; empty for the other
    /// operations.
    pub subject: String,
    pub state: RefCell<JobState>,
    pub progress: Shared,
    started: Instant,
    ended: Cell<Option<Instant>>,
}

impl Job {
    pub fn is_running(&self) -> bool {
        matches!(*self.state.borrow(), JobState::Runs)
    }

    pub fn elapsed(&self) -> Duration {
        let until = self.ended.get().unwrap_or_else(Instant::now);
        until.duration_since(self.started)
    }

    /// Estimated time left, at the speed so far. `None` before any progress, and after the end.
    pub fn left(&self) -> Option<Duration> {
        let (done, total) = (self.progress.done(), self.progress.total());
        let left = total.checked_sub(done)?;
        if done == 0 || !self.is_running() {
            return None;
        }
        Some(self.elapsed().mul_f64(left as f64 / done as f64))
    }

    pub(super) fn progress(&self) -> Shared {
        Arc::clone(&self.progress)
    }

    pub(super) fn thread(&self) -> String {
        format!("backup-{}", self.number)
    }
}

#[derive(Default)]
pub struct Backups {
    last: Cell<u32>,
    known: RefCell<BTreeMap<u32, Rc<Job>>>,
    /// Volumes of which a job creates or deletes a backup: one job at a time for each.
    writers: RefCell<BTreeSet<Uuid>>,
    /// Notified when a job or a writer ends.
    changed: Notify,
    stored_bytes: Cell<u64>,
    failures: RefCell<BTreeMap<Operation, u64>>,
}

/// The exclusive right to change the backups of a volume, until it is dropped.
pub(super) struct Writer<'a> {
    backups: &'a Backups,
    volume: Uuid,
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        self.backups.writers.borrow_mut().remove(&self.volume);
        self.backups.changed.notify_waiters();
    }
}

impl Backups {
    /// All jobs in the list, by number.
    pub fn list(&self) -> Vec<Rc<Job>> {
        self.known.borrow().values().cloned().collect()
    }

    pub fn find(&self, number: u32) -> Result<Rc<Job>, RpcError> {
        let found = self.known.borrow().get(&number).cloned();
        found.ok_or_else(|| {
            RpcError::errno(Errno::ENOENT, format!("there is no job {number}"))
                .field("job")
                .remedy("backup_jobs lists them")
        })
    }

    pub fn running(&self) -> usize {
        let known = self.known.borrow();
        known.values().filter(|job| job.is_running()).count()
    }

    /// Bytes that created backups have added to their stores.
    pub fn stored_bytes(&self) -> u64 {
        self.stored_bytes.get()
    }

    pub fn failures(&self, of: Operation) -> u64 {
        self.failures.borrow().get(&of).copied().unwrap_or(0)
    }

    pub(super) fn add(
        &self,
        operation: Operation,
        place: &BackupPlace,
        backup: Uuid,
        subject: String,
    ) -> Result<Rc<Job>, RpcError> {
        if self.running() >= RUNNING {
            let cause = format!("{RUNNING} jobs run");
            return Err(RpcError::errno(Errno::EBUSY, cause)
                .remedy("wait for one, or end it with backup_cancel"));
        }
        let number = self.last.get().wrapping_add(1);
        self.last.set(number);
        let job = Rc::new(Job {
            number,
            operation,
            location: place.text.clone(),
            backup,
            subject,
            state: RefCell::new(JobState::Runs),
            progress: Arc::new(Progress::default()),
            started: Instant::now(),
            ended: Cell::new(None),
        });
        let mut known = self.known.borrow_mut();
        if known.len() >= KNOWN {
            let oldest = known.values().find(|job| !job.is_running());
            let oldest = oldest.map(|job| job.number);
            oldest.map(|number| known.remove(&number));
        }
        known.insert(number, Rc::clone(&job));
        Ok(job)
    }

    /// Waits until no other job changes the backups of the volume.
    pub(super) async fn writer(&self, volume: Uuid) -> Writer<'_> {
        loop {
            let changed = self.changed.notified();
            if self.writers.borrow_mut().insert(volume) {
                return Writer {
                    backups: self,
                    volume,
                };
            }
            changed.await;
        }
    }

    /// Cancels all jobs and waits for their ends, at most [`PATIENCE`].
    pub async fn stop(&self) {
        for job in self.list() {
            job.progress.cancel();
        }
        let all = async {
            loop {
                let changed = self.changed.notified();
                if self.running() == 0 {
                    return;
                }
                changed.await;
            }
        };
        if tokio::time::timeout(PATIENCE, all).await.is_err() {
            tracing::warn!("backup jobs did not end in time");
        }
    }
}

/// Stores the result of a job, and reports it as an event, unless the job was cancelled or found
/// its backup undamaged.
pub(super) fn end(engine: &Engine, job: &Job, result: Result<Ended, Failure>) {
    let backups = &engine.devices.backups;
    job.ended.set(Some(Instant::now()));
    let state = match result {
        Ok(ended) => {
            report(engine, job, &ended);
            JobState::Complete(ended)
        }
        Err(Failure::Cancelled) => JobState::Cancelled,
        Err(failure) => {
            *backups
                .failures
                .borrow_mut()
                .entry(job.operation)
                .or_default() += 1;
            let (word, location) = (job.operation.word(), &job.location);
            let text = format!("{word} of backup {} in {location}: {failure}", job.backup);
            let facts = json!({ "backup": job.backup, "operation": word, "location": location });
            let notes = &engine.notes;
            notes.report("backup_failed", job.backup.to_string(), text, facts);
            JobState::Failed(failure.refusal())
        }
    };
    job.state.replace(state);
    backups.changed.notify_waiters();
}

fn report(engine: &Engine, job: &Job, ended: &Ended) {
    let (backups, location) = (&engine.devices.backups, &job.location);
    let id = job.backup.to_string();
    let (kind, text, facts) = match ended {
        Ended::Created(header) => {
            let stored = backups.stored_bytes.get();
            backups.stored_bytes.set(stored + header.new_bytes);
            let text = format!("backed up {} to {location}", header.snapshot.name);
            ("backup_created", text, facts(header))
        }
        Ended::Restored(header) => {
            let text = format!(
                "restored {} from {location} as {}",
                header.snapshot.name, job.subject
            );
            ("backup_restored", text, facts(header))
        }
        Ended::Verified(verified) if verified.damaged.is_empty() => return,
        Ended::Verified(verified) => {
            let damaged = verified.damaged.len() as u64 + verified.more_damaged;
            let text = format!("damaged objects of a backup in {location}: {damaged}");
            ("backup_damaged", text, facts(&verified.header))
        }
        Ended::Deleted(removed) => {
            let mut text = format!(
                "deleted a backup in {location}: {} objects",
                removed.objects
            );
            let left: Vec<String> = removed.left.iter().map(ToString::to_string).collect();
            if !left.is_empty() {
                text += &format!("; others are left: {}", left.join("; "));
                let why = left.join("; ");
                tracing::warn!(backup = %job.backup, why, "a deletion left data without a backup");
            }
            let objects = removed.objects;
            let facts = json!({ "backup": job.backup, "objects": objects, "left": left });
            ("backup_deleted", text, facts)
        }
    };
    engine.notes.report(kind, id, text, facts);
}
