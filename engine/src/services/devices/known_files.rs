//! Records the file that each file bdev was created on, and the file's state at the last stop. At
//! the next start the same path may lead to another file, or the file may have other contents.

use std::io;
use std::sync::{Arc, Weak};

use nacre_bdev::Bdev;
use nacre_bdev_uring::{Contents, Identity, UringBdev};
use serde::Serialize;
use tracing::warn;
use uuid::Uuid;

use crate::bdev_modules;
use crate::journal::{self, seen_key};
use crate::plane::Plane;
use crate::services::Engine;
use crate::store::{Change, Edit, Record};

/// The file that a restored bdev must have, and its contents.
#[derive(Debug, Default, Serialize)]
pub struct Expected {
    pub identity: Option<Identity>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub contents: Option<Contents>,
}

/// The recorded file of a restored or declared bdev. Empty in other calls, and without a record.
pub fn expected(engine: &Engine, uuid: Option<Uuid>) -> Expected {
    let again = journal::is_replaying() || journal::is_declaring();
    let seen = uuid.filter(|_| again);
    let seen = seen.and_then(|uuid| engine.journal.seen(uuid));
    let Some(seen) = seen else {
        return Expected::default();
    };
    // One that a later release wrote may not be readable here.
    Expected {
        identity: serde_json::from_value(seen["identity"].clone()).ok(),
        contents: serde_json::from_value(seen["contents"].clone()).ok(),
    }
}

/// The edit that records the file of an open bdev.
pub fn opened(bdev: &UringBdev) -> Edit {
    edit(bdev, bdev.contents())
}

fn edit(bdev: &UringBdev, contents: Option<Contents>) -> Edit {
    let expected = Expected {
        identity: Some(bdev.identity().clone()),
        contents,
    };
    let mut params = serde_json::to_value(expected).expect("plain data");
    params["path"] = serde_json::to_value(bdev.path()).unwrap_or_default();
    Edit::Put(Record {
        key: seen_key(bdev.uuid()),
        method: "seen".to_owned(),
        params,
    })
}

/// Removes the recorded contents of files that changed while the daemon was stopped. The daemon
/// calls the function once the users of their bdevs do not rely on the old contents any more.
pub async fn forget_changes(engine: &Engine, files: &[Arc<UringBdev>]) {
    let is_due = |file: &&Arc<UringBdev>| {
        let seen = engine.journal.seen(file.uuid());
        file.contents().is_none() && seen.is_some_and(|seen| seen.get("contents").is_some())
    };
    let edits: Vec<Edit> = files.iter().filter(is_due).map(|f| opened(f)).collect();
    if !edits.is_empty() {
        record(engine, edits).await;
    }
}

/// Stores the edits. A failure is only logged.
pub async fn record(engine: &Engine, edits: Vec<Edit>) {
    if let Err(error) = engine.journal.commit(Change(edits)).await {
        warn!(
            %error,
            "cannot record the state of files: after the next start, replicas on them may count as changed, and are \
             filled anew"
        );
    }
}

/// After the last I/O: flushes all files, and records their state.
pub async fn leave(engine: &Engine, plane: &Plane) {
    let files: Vec<Arc<UringBdev>> = files(plane).iter().filter_map(|f| f.upgrade()).collect();
    let look = move || -> Vec<Edit> {
        let left = files.iter().map(|file| (file, file.leave()));
        let kept = |(file, left): (&Arc<UringBdev>, io::Result<Option<Contents>>)| match left {
            Ok(contents) => contents.map(|contents| edit(file, Some(contents))),
            Err(error) => {
                warn!(bdev = file.name(), %error, "the file cannot be written to its disk");
                None
            }
        };
        left.filter_map(kept).collect()
    };
    let Ok(edits) = tokio::task::spawn_blocking(look).await else {
        return;
    };
    record(engine, edits).await;
}

pub(super) fn files(plane: &Plane) -> Vec<Weak<UringBdev>> {
    let devices = plane.bdevs.list().into_iter();
    let files =
        devices.filter_map(|listed| bdev_modules::device::<UringBdev>(listed.layer.module()));
    files.map(|file| Arc::downgrade(&file)).collect()
}
