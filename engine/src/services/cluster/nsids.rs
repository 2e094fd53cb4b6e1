//! The NSIDs of this node's exports. Hosts that know a namespace refuse another one under its NSID.
//! So an NSID is used again as late as possible: they are given in ascending order, and then from 1
//! again. A file in the data directory has the last NSID, so that the order outlives restarts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nacre_cluster_core::ExportId;
use tracing::warn;

use crate::values::files;

/// Most namespaces of the node's subsystem, and so most replicas on one node.
pub(super) const MAX_EXPORTS: u32 = 1024;

/// The file of the last NSID in the data directory.
const FILE: &str = "export-nsid";

#[derive(Debug, thiserror::Error)]
pub(super) enum NsidError {
    #[error("the node exports {MAX_EXPORTS} devices, which is the most")]
    Full,
    #[error("cannot note the next NSID in {}: {why}", path.display())]
    Note { path: PathBuf, why: String },
    #[error("the disk of the data directory has not noted the next NSID within {0:?}")]
    Late(Duration),
}

#[derive(Debug)]
pub(super) struct Nsids {
    path: PathBuf,
    used: BTreeMap<ExportId, u32>,
    /// The NSID that was chosen last. `None`: no file has one yet.
    last: Option<u32>,
}

/// A new last NSID, to be written to the file before a namespace has it.
#[derive(Debug)]
pub(super) struct LastNsid {
    path: PathBuf,
    nsid: u32,
}

impl LastNsid {
    /// Writes the file. It is durable when this returns.
    pub(super) async fn write(self) -> Result<(), NsidError> {
        let Self { path, nsid } = self;
        let written = {
            let path = path.clone();
            tokio::task::spawn_blocking(move || files::replace(&path, nsid.to_string().as_bytes()))
        };
        let why = match written.await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        Err(NsidError::Note { path, why })
    }
}

impl Nsids {
    /// Reads the file in the data directory. A damaged file counts as none. Blocks.
    pub(super) fn of(dir: &Path) -> Self {
        let path = dir.join(FILE);
        let last = match std::fs::read_to_string(&path) {
            Ok(text) => {
                let last = text.trim().parse().ok();
                let last = last.filter(|last| (1..=MAX_EXPORTS).contains(last));
                if last.is_none() {
                    let path = path.display();
                    warn!(%path, "the file has no NSID; NSIDs of ended exports may be used again");
                }
                last
            }
            Err(error) => {
                if error.kind() != std::io::ErrorKind::NotFound {
                    let path = path.display();
                    warn!(%path, %error, "the last NSID of exports cannot be read");
                }
                None
            }
        };
        Self {
            path,
            used: BTreeMap::new(),
            last,
        }
    }

    /// Takes over the NSIDs that etcd has; 0: none was chosen yet. Drops exports that have ended.
    pub(super) fn update(&mut self, stored: &BTreeMap<ExportId, u32>) {
        self.used.retain(|id, _| stored.contains_key(id));
        for (id, nsid) in stored.iter().filter(|(_, nsid)| **nsid != 0) {
            self.used.insert(*id, *nsid);
        }
    }

    /// The NSID of an export. With a note: a new one, for [`Nsids::take`] after the note is
    /// written.
    pub(super) fn choose(&self, id: ExportId) -> Result<(u32, Option<LastNsid>), NsidError> {
        if let Some(nsid) = self.used.get(&id) {
            return Ok((*nsid, None));
        }
        let highest = || self.used.values().copied().max().unwrap_or(0);
        let last = self.last.unwrap_or_else(highest).min(MAX_EXPORTS);
        let mut order = (last + 1..=MAX_EXPORTS).chain(1..=last);
        let is_free = |nsid: &u32| !self.used.values().any(|used| used == nsid);
        let nsid = order.find(is_free).ok_or(NsidError::Full)?;
        let path = self.path.clone();
        Ok((nsid, Some(LastNsid { path, nsid })))
    }

    /// Gives an export the NSID that was chosen for it.
    pub(super) fn take(&mut self, id: ExportId, nsid: u32) {
        self.last = Some(nsid);
        self.used.insert(id, nsid);
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn export_id(id: u128) -> ExportId {
        ExportId(Uuid::from_u128(id))
    }

    /// As an export gets its NSID; `None`: all are in use.
    async fn add(nsids: &mut Nsids, id: u128) -> Option<u32> {
        let id = export_id(id);
        let (nsid, note) = nsids.choose(id).ok()?;
        if let Some(note) = note {
            note.write().await.unwrap();
            nsids.take(id, nsid);
        }
        Some(nsid)
    }

    fn stored(exports: &[(u128, u32)]) -> BTreeMap<ExportId, u32> {
        let exports = exports.iter().map(|(id, nsid)| (export_id(*id), *nsid));
        exports.collect()
    }

    /// Goal: an export keeps its id over restarts, and the id of an ended one is used last.
    #[tokio::test]
    async fn namespace_ids_are_used_again_last() {
        let dir = tempfile::tempdir().unwrap();
        let mut nsids = Nsids::of(dir.path());
        nsids.update(&stored(&[(1, 0), (2, 7)]));
        assert_eq!(add(&mut nsids, 2).await, Some(7));
        assert_eq!(add(&mut nsids, 1).await, Some(8));
        assert_eq!(add(&mut nsids, 1).await, Some(8));
        nsids.update(&stored(&[(2, 7)]));
        assert_eq!(add(&mut nsids, 3).await, Some(9));
        for id in 10..MAX_EXPORTS {
            let next = add(&mut nsids, id.into()).await;
            assert_eq!(next, Some(id), "in order");
        }
        assert_eq!(add(&mut nsids, 5000).await, Some(MAX_EXPORTS));
        assert_eq!(add(&mut nsids, 5001).await, Some(1), "from the start");
        for id in 0..6 {
            assert!(add(&mut nsids, 6000 + id).await.is_some());
        }
        assert!(matches!(
            nsids.choose(export_id(7000)),
            Err(NsidError::Full)
        ));
    }

    /// Goal: after the last NSID the order begins at 1, although exports with higher ones exist.
    #[tokio::test]
    async fn the_order_goes_round() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE), "1023").unwrap();
        let mut nsids = Nsids::of(dir.path());
        let mut all = vec![(1, 1000)];
        for (id, expected) in [(3, 1024), (4, 1), (5, 2)] {
            nsids.update(&stored(&all));
            assert_eq!(add(&mut nsids, id).await, Some(expected));
            if expected != 1 {
                all.push((id, expected));
            }
        }
    }

    /// Goal: the NSID of an ended export is not used soon after a restart, and a damaged file or
    /// none does not prevent new exports.
    #[tokio::test]
    async fn the_order_outlives_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let mut nsids = Nsids::of(dir.path());
        for id in 1..=3 {
            assert_eq!(add(&mut nsids, id).await, Some(id as u32));
        }
        let restart = || {
            let mut nsids = Nsids::of(dir.path());
            nsids.update(&stored(&[(1, 1)]));
            nsids
        };
        assert_eq!(add(&mut restart(), 4).await, Some(4));
        assert_eq!(add(&mut restart(), 5).await, Some(5));
        for damaged in ["", "x", "0", "1025"] {
            std::fs::write(dir.path().join(FILE), damaged).unwrap();
            assert_eq!(add(&mut restart(), 6).await, Some(2), "{damaged:?}");
        }
        let gone = dir.path().join("gone");
        let (_, note) = Nsids::of(&gone).choose(export_id(1)).unwrap();
        let error = note.unwrap().write().await.unwrap_err().to_string();
        assert!(error.contains("gone/export-nsid"), "{error}");
    }
}
