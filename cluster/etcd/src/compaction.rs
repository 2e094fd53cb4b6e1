//! Compacts the history of etcd for a daemon without a cluster. etcd keeps each earlier value of a
//! key until its history is compacted, and refuses writes once its quota is full.
//!
//! The store compacts after changes of its own only: an idle daemon writes nothing. Revisions of
//! the last minutes stay, for watches that are behind.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::{debug, warn};

use crate::client::Client;
use crate::error::Error;

/// The interval of compactions, and the part of the history that they keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compaction {
    /// Time between two compactions.
    pub every: Duration,
    /// Age up to which revisions stay.
    pub keep: Duration,
}

impl Default for Compaction {
    fn default() -> Self {
        Self {
            every: Duration::from_secs(60),
            keep: Duration::from_secs(300),
        }
    }
}

/// Compacts until the store is dropped. `last` is the revision of the last own change.
pub(crate) async fn compact(client: Arc<Client>, how: Compaction, last: Arc<AtomicI64>) {
    // Revisions with the time when each was the last one, oldest first.
    let mut seen: VecDeque<(Instant, i64)> = VecDeque::new();
    let mut compacted = 0;
    loop {
        sleep(how.every).await;
        let now = Instant::now();
        let revision = last.load(Ordering::Relaxed);
        if revision > seen.back().map_or(compacted, |(_, revision)| *revision) {
            seen.push_back((now, revision));
        }
        let mut due = None;
        while seen.front().is_some_and(|(at, _)| *at + how.keep <= now) {
            due = seen.pop_front().map(|(_, revision)| revision);
        }
        let Some(revision) = due else { continue };
        match client.compact(revision).await {
            Ok(()) => compacted = revision,
            Err(error @ (Error::Denied { .. } | Error::Rejected { .. })) => {
                let remedy = "start etcd with --auto-compaction-retention=1h";
                warn!(%error, remedy, "the history of etcd is not compacted");
                return;
            }
            // The next change leads to the next attempt.
            Err(error) => debug!(%error, "not compacted"),
        }
    }
}
