//! The block device of a volume that is not open yet: hosts can use it, and their I/O waits.
//!
//! ```text
//!   Prepared::new ── frozen ──open_prepared──▶ serving     the same lanes, the same tables
//!                      ▲            │
//!                      └── failed ◀─┘                      tables reset: no lane uses them yet
//! ```
//!
//! It announces the limits of the volume's last opening, so that hosts find an unchanged device. If
//! the replicas now support less, another device is needed ([`Prepared::is_served_by`]).
//!
//! | why it is not open | hosts |
//! |---|---|
//! | another holder has it, or has had it since | a path error at once: it is served elsewhere |
//! | the store does not list it any longer | as above |
//! | no replica in sync, no store, foreign reservation, no memory | wait, then get a path error |

use std::sync::Arc;

use nacre_bdev::{Bdev, Limits};
use uuid::Uuid;

use crate::handle::{VolumeError, VolumeHandle, VolumeState, VolumeStatus};
use crate::model::{KeptLimits, VolumeRecord};
use crate::shared::Shared;
use crate::store::StoreError;
use crate::view::{Mode, View};
use crate::volume::Volume;

#[derive(Clone)]
pub struct Prepared {
    id: Uuid,
    shared: Arc<Shared>,
    volume: Option<Arc<Volume>>,
}

impl Prepared {
    pub fn new(record: &VolumeRecord) -> Self {
        let shared = Shared::new(record);
        let mut view = View::closed(&record.settings);
        view.mode = Mode::Frozen;
        shared.publish(view);
        let volume = record
            .limits
            .map(|kept| Volume::new(record, Arc::clone(&shared), kept.promised()));
        Self {
            id: record.id,
            shared,
            volume,
        }
    }

    pub fn id(&self) -> Uuid {
        self.id
    }

    /// The block device. `None`: the limits that it may promise are unknown.
    pub fn volume(&self) -> Option<Arc<dyn Bdev>> {
        let volume = self.volume.as_ref();
        volume.map(|volume| Arc::clone(volume) as Arc<dyn Bdev>)
    }

    /// Gives the device the size of the record, which another holder has enlarged. Returns false if
    /// the device's tables are too small for it, or the size is below the present one.
    pub fn grow(&self, record: &VolumeRecord) -> bool {
        self.shared.grow(record.blocks).is_ok()
    }

    /// True when the open volume serves through this device, so that its users may keep it.
    pub fn is_served_by(&self, handle: &VolumeHandle) -> bool {
        Arc::ptr_eq(&self.shared, &handle.shared)
    }

    pub(crate) fn limits(&self) -> Option<Limits> {
        self.volume.as_ref().map(|volume| volume.limits())
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Fails waiting and new I/O while `failing`, also after the volume is open.
    pub fn set_failing(&self, failing: bool) {
        self.shared.set_failing(failing);
    }

    pub fn is_failing(&self) -> bool {
        self.shared.is_failing()
    }

    /// The volume will not be opened: waiting and new I/O ends with a path error.
    pub fn shut(&self) {
        self.shared.shut();
    }

    /// The status of a volume that is not open, for the reason `why`, if an opening was tried.
    pub fn status(&self, record: &VolumeRecord, why: Option<&VolumeError>) -> VolumeStatus {
        let mut status = VolumeStatus::of(record);
        status.count(&self.shared);
        let reason = match why {
            Some(why) => why.to_string(),
            None => "it is being opened".into(),
        };
        (status.state, status.why) = match why {
            Some(VolumeError::Store(StoreError::NotFound { .. })) => {
                (VolumeState::Closed, Some(reason))
            }
            Some(why) if is_elsewhere(why) => (VolumeState::Fenced, Some(reason)),
            _ if self.is_failing() => (VolumeState::Failing, Some("by the operator".into())),
            Some(VolumeError::Store(StoreError::Unavailable { .. })) => {
                (VolumeState::StoreLost, Some(reason))
            }
            _ => (VolumeState::Frozen, Some(reason)),
        };
        status
    }

    pub(crate) fn not_opened(&self, why: &VolumeError) {
        let mode = if is_elsewhere(why) {
            Mode::Closed
        } else {
            Mode::Frozen
        };
        self.shared.reset(mode);
    }
}

/// True when no promised limit exceeds the limits `now`.
pub(crate) fn keeps(now: &Limits, promised: &Limits) -> bool {
    promised.max_blocks <= now.max_blocks
        && promised.max_unmap_blocks <= now.max_unmap_blocks
        && promised.atomic_blocks <= now.atomic_blocks
        && promised.zero_copy_blocks <= now.zero_copy_blocks
        && promised.volatile_cache >= now.volatile_cache
        && promised.read_only == now.read_only
}

/// True if hosts should try another path.
fn is_elsewhere(why: &VolumeError) -> bool {
    matches!(
        why,
        VolumeError::Fenced { .. }
            | VolumeError::Newer { .. }
            | VolumeError::Store(
                StoreError::NotFound { .. } | StoreError::Owned { .. } | StoreError::Fenced { .. }
            )
    )
}

impl KeptLimits {
    pub(crate) fn of(limits: &Limits) -> Self {
        Self {
            max_blocks: limits.max_blocks,
            max_unmap_blocks: limits.max_unmap_blocks,
            atomic_blocks: limits.atomic_blocks,
            zero_copy_blocks: limits.zero_copy_blocks,
            read_only: limits.read_only,
        }
    }

    fn promised(self) -> Limits {
        Limits {
            max_blocks: self.max_blocks,
            max_unmap_blocks: self.max_unmap_blocks,
            atomic_blocks: self.atomic_blocks.max(1),
            zero_copy_blocks: self.zero_copy_blocks,
            read_only: self.read_only,
            volatile_cache: true,
            // The other limits are the same for every volume.
            ..Limits::unlimited(1)
        }
    }
}
