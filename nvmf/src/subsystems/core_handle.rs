//! A core's group as other cores and management see it: attention, messages, counts.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crossbeam_queue::ArrayQueue;
use parking_lot::Mutex;

use crate::auth::Answer;
use crate::subsystems::association::Association;
use crate::subsystems::reservation::Fence;
use crate::subsystems::stats::Totals;
use crate::transport::ListenerId;

/// A core's queue-pair group, from outside.
#[derive(Clone)]
pub struct GroupHandle {
    pub core: usize,
    attention: Arc<AtomicBool>,
    wake: Arc<dyn Fn() + Send + Sync>,
    messages: Arc<ArrayQueue<GroupMessage>>,
    /// What Preempt and Abort commands ask of this core; each of them waits for its answer, so
    /// there are never more than commands.
    fences: Arc<Mutex<Vec<Arc<Fence>>>>,
    counts: Arc<GroupCounts>,
}

/// Counts of a group since its start. Off the data path: written when queues come and go, and by
/// the upkeep.
#[derive(Debug, Default)]
pub struct GroupCounts {
    /// Connections that have no controller, at the last upkeep.
    pub unassociated: AtomicU64,
    /// Commands that waited for a busy device or for a buffer, at the last upkeep.
    pub waiting: AtomicU64,
    /// Queues that were ever connected.
    pub admin_queues: AtomicU64,
    pub io_queues: AtomicU64,
    /// Commands that were completed on queues that are gone.
    pub retired_commands: AtomicU64,
    /// Bytes of command data that were copied into other buffers: the data came in a part of a
    /// receive buffer, and its device keeps it for longer than the receive buffer can be spared.
    pub copied_bytes: AtomicU64,
    /// What queues did that are gone, by the listener that they came through.
    by_listener: Mutex<BTreeMap<ListenerId, Totals>>,
}

impl GroupCounts {
    pub(crate) fn retire(&self, listener: ListenerId, totals: Totals) {
        self.retired_commands
            .fetch_add(totals.operations(), Ordering::Relaxed);
        let mut all = self.by_listener.lock();
        *all.entry(listener).or_default() += totals;
    }

    /// What queues did that are gone, of listeners that are there; the others are forgotten.
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
pub enum GroupMessage {
    /// Abort a command of an I/O queue here.
    Abort {
        association: Arc<Association>,
        qid: u16,
        cid: u16,
        reply: AbortReply,
    },
    /// The answer to `Abort`.
    Aborted { reply: AbortReply, aborted: bool },
    /// The helper thread has done the work of an authentication for a queue here.
    Computed {
        /// Its place in the core's table and its generation.
        queue: (u32, u32),
        /// Which of the queue's transactions it belongs to.
        transaction: u64,
        answer: Box<Answer>,
    },
}

/// Where the answer to an abort belongs: a command of an admin queue.
#[derive(Clone)]
pub struct AbortReply {
    pub group: GroupHandle,
    pub(crate) request: ReqRef,
}

impl GroupHandle {
    pub(crate) fn new(core: usize, wake: Arc<dyn Fn() + Send + Sync>) -> GroupHandle {
        let attention = Arc::new(AtomicBool::new(false));
        GroupHandle {
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

    /// Makes the group look at its associations and namespaces in its next turn.
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

    /// `Err` gives the message back: the group has too many waiting.
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

/// Index of a request in its queue's table.
pub(crate) type ReqIndex = u16;

/// Names a request of this core. The generation distinguishes a queue pair from its predecessor in
/// the slot, and `begun` a command from its predecessors in its place of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReqRef {
    pub queue: u32,
    pub generation: u32,
    pub request: ReqIndex,
    pub begun: u32,
}
