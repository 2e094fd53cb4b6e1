//! The engine's side of a node: it serves volumes, and reaches their members.
//!
//! ```text
//!   driver ── Serving: acquire, merge, open, close, … ──▶ engine
//!   driver ◀── Reports: granted, merged, drained, … ────── engine
//! ```
//!
//! Calls come from the cluster's thread and must return at once. The engine answers later, from any
//! thread. Reports about one member keep their order: the end of a connection comes before the
//! grant on the next one, and no report about an earlier connection comes after that.

use std::sync::Arc;

use arrayvec::ArrayVec;
use nacre_cluster_core::assent::Members;
use nacre_cluster_core::gate::Key;
use nacre_cluster_core::ids::MAX_MEMBERS;
use nacre_cluster_core::lease::Word;
use nacre_cluster_core::volume::{Ana, State};
use nacre_cluster_core::{MemberId, Record, VolumeId};
use tokio::sync::mpsc;

/// Reports that may wait for the cluster's thread.
pub(crate) const WAITING: usize = 16_384;

pub trait Serving: Send {
    /// The members of the volume that this node can reach now. A member that has just failed is
    /// not among them until its connection is there again.
    fn reached(&mut self, volume: VolumeId) -> ArrayVec<MemberId, MAX_MEMBERS>;

    /// Acquires the member's gate: answered by [`Answer::Granted`], [`Answer::Refused`] or
    /// [`Answer::LostGate`].
    fn acquire(&mut self, volume: VolumeId, member: MemberId, key: Key);

    /// Makes the in-sync members equal: answered by [`Answer::Merged`].
    fn merge(&mut self, volume: VolumeId, number: u64);

    /// Opens the lanes to hosts.
    fn open(&mut self, volume: VolumeId);

    /// Refuses new commands: answered by [`Answer::Drained`] when none is in flight.
    fn close(&mut self, volume: VolumeId, number: u64);

    /// Aborts the commands in flight.
    fn abort(&mut self, volume: VolumeId);

    /// Drops all answers and commands, and ends the hosts' connections: another node may serve.
    fn drop_all(&mut self, volume: VolumeId);

    /// The volume's role on this node has changed.
    fn show(&mut self, volume: VolumeId, role: &Role);

    /// The volume was deleted.
    fn forget(&mut self, volume: VolumeId);
}

/// A volume on this node, as hosts and lanes see it.
#[derive(Debug, Clone, PartialEq)]
pub struct Role {
    pub state: State,
    pub ana: Ana,
    /// The key of this node at the members' gates, while it is the holder.
    pub key: Option<Key>,
    /// The members that each write waits for, and that assent needs. `None`: no answer may leave.
    pub may_be_in_sync: Option<Members>,
    pub record: Record,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    Granted {
        member: MemberId,
        key: Key,
    },
    /// The gate has another key: `current`.
    Refused {
        member: MemberId,
        key: Key,
        current: Option<Key>,
    },
    /// The gate was asked without success, or its connection ended.
    LostGate {
        member: MemberId,
    },
    Merged {
        number: u64,
    },
    Drained {
        number: u64,
    },
    /// The member does not answer in time, or answers with errors.
    PutOut {
        member: MemberId,
    },
    /// The member has all data, and gets every write of this key's holder.
    Promote {
        member: MemberId,
        key: Key,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    pub volume: VolumeId,
    pub answer: Answer,
}

/// The queue of reports is full, or the cluster's thread has ended: send the report again later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the queue of reports to the cluster's thread is full: report again later")]
pub struct Full;

#[derive(Debug, Clone)]
pub struct Reports(pub(crate) mpsc::Sender<Report>);

impl Reports {
    pub fn send(&self, volume: VolumeId, answer: Answer) -> Result<(), Full> {
        self.0.try_send(Report { volume, answer }).map_err(|_| Full)
    }
}

/// The parts of the driver that the engine's side needs.
#[derive(Debug, Clone)]
pub struct Link {
    /// Read by each lane before answers leave, with a clock read after the data was collected.
    pub word: Arc<Word>,
    pub reports: Reports,
}
