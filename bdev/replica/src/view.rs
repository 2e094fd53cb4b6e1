//! What lanes know of the members: made by the control, never changed, replaced as a whole.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::Layer;

use crate::model::{MAX_MEMBERS, ReadPolicy, Settings};

/// What may happen to hosts' I/O now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Serving,
    /// Nothing is in sync: I/O waits, and is answered with a path-related status in the end.
    Frozen,
    /// Another holder has the volume, or the store cannot be heard: nothing is acknowledged.
    Suspended,
    /// The operator gave up on it: I/O fails at once.
    FailIo,
    Closed,
}

/// What a member is to a lane. One that is out is not in the view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Written to always, read where it needs nothing.
    InSync,
    /// Being copied to: written to but for what is still to be copied, not read.
    Syncing,
}

#[derive(Clone)]
pub struct MemberView {
    pub device: Arc<Layer>,
    /// Differs from that of every earlier life of the member: its queues are opened anew.
    pub incarnation: u64,
    pub role: Role,
    /// Flushes go to it, and every write: it is in sync, or about to be.
    pub flushed: bool,
    /// In this machine.
    pub local: bool,
    /// [`nacre_bdev::Bdev::losses`] of the device when it was taken in.
    pub losses: u64,
    /// Failures of this slot that were reported up to this number have been decided upon.
    pub judged: u64,
}

#[derive(Clone)]
pub struct View {
    /// Grows with every view.
    pub version: u64,
    pub mode: Mode,
    pub members: [Option<MemberView>; MAX_MEMBERS],
    pub read_policy: ReadPolicy,
    pub min_in_sync: usize,
    pub deadline: Duration,
    pub frozen_hold: Duration,
}

impl View {
    /// Before anything is known.
    pub fn closed(settings: &Settings) -> View {
        View {
            version: 0,
            mode: Mode::Closed,
            members: Default::default(),
            read_policy: settings.read_policy,
            min_in_sync: usize::from(settings.min_in_sync.max(1)),
            deadline: Duration::from_millis(settings.deadline_ms),
            frozen_hold: Duration::from_millis(settings.frozen_hold_ms),
        }
    }

    pub fn in_sync(&self) -> impl Iterator<Item = (usize, &MemberView)> {
        let members = self.members.iter().enumerate();
        members.filter_map(|(slot, m)| {
            let member = m.as_ref()?;
            (member.role == Role::InSync).then_some((slot, member))
        })
    }
}
