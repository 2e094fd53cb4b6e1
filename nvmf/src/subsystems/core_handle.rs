//! The handle of a core's queue group for other cores and for management: wake-ups, messages and
//! counters.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use crossbeam_queue::ArrayQueue;
use parking_lot::Mutex;

use crate::auth::Answer;
use crate::subsystems::stats::Totals;
use crate::transport::ListenerId;

/// The handle of a core's queue group. Clones refer to the same group.
#[derive(Clone)]
pub struct GroupHandle {
    pub core: usize,
    attention: Arc<AtomicBool>,
    wake: Arc<dyn Fn() + Send + Sync>,
    messages: Arc<ArrayQueue<GroupMessage>>,
    /// Pending requests of Preempt and Abort commands. Each command waits for its reply, which
    /// bounds the list.
    fences: Arc<Mutex<Vec<Arc<Fence>>>>,
    counts: Arc<GroupCounts>,
}

/// Counters of a group since its start. Updated when queues are created or deleted and by the
/// upkeep; `copied_bytes` also by the data path.
#[derive(Debug, Default)]
pub struct GroupCounts {
    /// Connections without a controller, at the last upkeep.
    pub unassociated: AtomicU64,
    /// Commands that wait for a busy device or for a buffer, at the last upkeep.
    pub waiting: AtomicU64,
    /// Number of queues that were connected so far.
    pub admin_queues: AtomicU64,
    pub io_queues: AtomicU64,
    /// Commands completed on deleted queues.
    pub retired_commands: AtomicU64,
    /// Bytes of command data copied out of receive buffers, because the device needs the data for
    /// longer than the receive buffer is available.
    pub copied_bytes: AtomicU64,
    /// Statistics of deleted queues, by listener.
    by_listener: Mutex<BTreeMap<ListenerId, Totals>>,
}

impl GroupCounts {
    pub(crate) fn retire(&self, listener: ListenerId, totals: Totals) {
        self.retired_commands
            .fetch_add(totals.operations(), Ordering::Relaxed);
        let mut all = self.by_listener.lock();
        *all.entry(listener).or_default() += totals;
    }

    /// Statistics of deleted queues for existing listeners. Drops those of removed listeners.
    pub(crate) fn retired_by_listener(
        &self,
        is_there: impl Fn(ListenerId) -> bool,
    ) -> Vec<(ListenerId, Totals)> {
        let mut all = self.by_listener.lock();
        all.retain(|id, _| is_there(*id));
        all.iter().map(|(id, totals)| (*id, *totals)).collect()
    }
}

/// A request from one group to another, or from the helper thread.
pub(crate) enum GroupMessage {
    /// Abort a command of an I/O queue of this group.
    Abort {
        queue: QueueId,
        cid: u16,
        reply: AbortReply,
    },
    /// The reply to `Abort`.
    Aborted { reply: AbortReply, aborted: bool },
    /// The helper thread has completed a job of an authentication of this group.
    Computed {
        queue: QueueId,
        /// The number of the queue's transaction.
        transaction: u64,
        answer: Box<Answer>,
    },
}

/// The destination of the reply to an abort: an Abort command of an admin queue.
#[derive(Clone)]
pub(crate) struct AbortReply {
    pub group: GroupHandle,
    pub(crate) request: ReqRef,
}

impl GroupHandle {
    pub(crate) fn new(core: usize, wake: Arc<dyn Fn() + Send + Sync>) -> Self {
        let attention = Arc::new(AtomicBool::new(false));
        Self {
            core,
            attention,
            wake,
            messages: Arc::new(ArrayQueue::new(1024)),
            fences: Arc::default(),
            counts: Arc::default(),
        }
    }

    pub fn counts(&self) -> &GroupCounts {
        &self.counts
    }

    /// Makes the group check its associations and namespaces in its next turn.
    pub fn wake(&self) {
        self.attention.store(true, Ordering::Release);
        (self.wake)();
    }

    pub(crate) fn raise(&self, fence: Arc<Fence>) {
        self.fences.lock().push(fence);
        self.wake();
    }

    pub(crate) fn take_fences(&self) -> Vec<Arc<Fence>> {
        std::mem::take(&mut self.fences.lock())
    }

    pub(crate) fn take_attention(&self) -> bool {
        self.attention.load(Ordering::Relaxed) && self.attention.swap(false, Ordering::Acquire)
    }

    /// Queues a message. Returns it as the error if the group's queue is full.
    pub(crate) fn send(&self, message: GroupMessage) -> Result<(), GroupMessage> {
        self.messages.push(message)?;
        (self.wake)();
        Ok(())
    }

    pub(crate) fn take_message(&self) -> Option<GroupMessage> {
        self.messages.pop()
    }

    pub(crate) fn messages(&self) -> usize {
        self.messages.len()
    }

    pub(crate) fn has_messages(&self) -> bool {
        !self.messages.is_empty() || self.attention.load(Ordering::Acquire)
    }
}

/// Commands of preempted hosts that must end before the completion of a Preempt and Abort. Each
/// core that may have such commands aborts them, waits until they are gone, and decrements `cores`.
pub(crate) struct Fence {
    pub subsystem: SubsystemId,
    pub nsid: u32,
    /// Host identifiers.
    pub hosts: Vec<[u8; 16]>,
    pub cores: AtomicUsize,
    pub owner: GroupHandle,
}

/// Identifies a subsystem among all subsystems of the process, including deleted ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SubsystemId(pub u64);

/// Identifies a queue pair of a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueueId {
    /// Index in the core's table.
    pub index: u32,
    /// Distinguishes queue pairs that used the same index.
    pub generation: u32,
}

/// Index of a request in its queue's table.
pub(crate) type ReqIndex = u16;

/// Identifies a request of this core. `generation` distinguishes queue pairs that used the same
/// slot, `begun` commands that used the same place in the queue's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReqRef {
    pub queue: u32,
    pub generation: u32,
    pub request: ReqIndex,
    pub begun: u32,
}
