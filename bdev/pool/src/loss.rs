//! Finds out whether a disk of the pool may have lost writes that were completed and not flushed: a
//! remote namespace after the end of a connection, or a drive that was replaced in its slot.
//!
//! ```text
//!   disk completes I/O ─▶ counts unchanged since the opening? ── yes ─▶ the completion counts
//!                                      │ no
//!                                      ▼
//!            lost, for good: lanes confirm nothing, the keeper stops, the pool is opened again
//! ```
//!
//! A disk counts a loss before it completes any later I/O ([`Bdev::losses`]). So a look after a
//! completion covers all that the disk completed before. Disks without a volatile cache lose
//! nothing that they completed. A disk that is cut ([`Bdev::cuts`]) keeps its other data.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use nacre_bdev::{Bdev, Claim, Layer};

/// The disks of a pool that may lose writes, and their losses before the pool used them.
#[derive(Default)]
pub(crate) struct LossWatch {
    disks: ArcSwap<Vec<Watched>>,
    is_lost: AtomicBool,
    /// Name of the first disk that was found.
    name: OnceLock<String>,
}

#[derive(Clone)]
struct Watched {
    layer: Arc<Layer>,
    before: u64,
}

impl LossWatch {
    /// Watches a disk. Call this before the pool's first I/O on it.
    pub(crate) fn add(&self, claim: &Claim) {
        let layer = claim.layer();
        if !layer.limits().volatile_cache {
            return;
        }
        let new = Watched {
            layer: Arc::clone(layer),
            before: unflushed(layer),
        };
        let disks = self.disks.load();
        let all = disks.iter().cloned().chain([new]).collect();
        self.disks.store(Arc::new(all));
    }

    /// Ends the watch of a disk that the pool no longer has, or never had.
    pub(crate) fn remove(&self, claim: &Claim) {
        // Losses until now count.
        self.has_lost();
        let disks = self.disks.load();
        let others = disks
            .iter()
            .filter(|disk| !Arc::ptr_eq(&disk.layer, claim.layer()));
        self.disks.store(Arc::new(others.cloned().collect()));
    }

    /// True if a disk may have lost writes since the opening of the pool. Stays true.
    #[inline]
    pub(crate) fn has_lost(&self) -> bool {
        let disks = self.disks.load();
        disks
            .iter()
            .any(|disk| unflushed(&disk.layer) != disk.before)
            && self.find()
            || self.is_lost.load(Ordering::SeqCst)
    }

    #[cold]
    fn find(&self) -> bool {
        let disks = self.disks.load();
        let lost = disks
            .iter()
            .find(|disk| unflushed(&disk.layer) != disk.before);
        if let Some(lost) = lost {
            self.name.get_or_init(|| lost.layer.name().to_owned());
            self.is_lost.store(true, Ordering::SeqCst);
        }
        lost.is_some()
    }

    /// The disk that may have lost writes.
    pub(crate) fn disk(&self) -> Option<String> {
        self.name.get().cloned()
    }
}

/// Counts events that may have undone writes which were not flushed.
fn unflushed(layer: &Layer) -> u64 {
    loop {
        let cuts = layer.cuts();
        let losses = layer.losses();
        if layer.cuts() == cuts {
            return losses.saturating_sub(cuts);
        }
    }
}
