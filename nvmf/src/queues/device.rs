//! The bdev queues of one core: opened at the first use of a namespace, and closed when no queue
//! pair has access to the namespace.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Busy, Done, Io, Queue, Status, Token};
use nacre_hugepages::{MemoryView, Pool};
use nacre_reactor::{EventSet, Idle, Interest, Nanos};

use crate::queues::decode::Plan;
use crate::queues::queue_pair::QueuePair;
use crate::queues::queue_pairs::QueuePairs;
use crate::queues::waiting::WaitingList;
use crate::subsystems::core_handle::ReqIndex;
use crate::subsystems::core_handle::ReqRef;
use crate::subsystems::namespace::Namespace;

/// The token of a device I/O: 32 bits of queue pair index, 16 of request index, 16 of child number.
pub(crate) fn token(queue: u32, request: ReqIndex, child: u32) -> Token {
    u64::from(queue) << 32 | u64::from(request) << 16 | u64::from(child & 0xffff)
}

pub(crate) fn split_token(token: Token) -> (u32, ReqIndex, u32) {
    (
        (token >> 32) as u32,
        (token >> 16) as u16,
        token as u32 & 0xffff,
    )
}

pub(crate) struct Device {
    namespace: Arc<Namespace>,
    queue: Box<dyn Queue>,
    /// Requests that wait because the device's queue was full.
    pub waiting: WaitingList,
    /// The slot is in [`Devices::busy`].
    listed: bool,
    /// The device executed I/O synchronously since the last poll.
    used: bool,
    /// Index of a queue pair that had access to the namespace at the last [`Devices::release`].
    user: u32,
}

/// Delay before a failed open is retried: an open costs system calls, and a host may send commands
/// for the device continuously.
const OPEN_AGAIN: Duration = Duration::from_millis(100);
/// Time before the error is logged again.
const TELL_AGAIN: Duration = Duration::from_secs(10);

/// A namespace whose device could not be opened.
struct RefusedNamespace {
    serial: u64,
    at: Nanos,
    told: Nanos,
}

pub(crate) struct Devices {
    core: usize,
    /// Namespaces whose open failure was logged within the last [`TELL_AGAIN`].
    refused: Vec<RefusedNamespace>,
    slots: Vec<Option<Device>>,
    open: usize,
    /// Slots with work: I/O in flight or waiting, I/O executed since the last poll, or pending
    /// cleanup. Only these are polled, so that the cost of a turn does not depend on the number of
    /// open devices.
    busy: Vec<usize>,
    /// True if a slot in `busy` may have no work any more.
    tidying: bool,
    /// A view changed or a queue pair was removed, so a device may be unused now.
    pub stale: bool,
}

impl Devices {
    pub(crate) fn new(core: usize) -> Self {
        Self {
            core,
            refused: Vec::new(),
            slots: Vec::new(),
            open: 0,
            busy: Vec::new(),
            tidying: false,
            stale: false,
        }
    }

    pub(crate) fn open(&self) -> usize {
        self.open
    }

    /// The slot of this core's queue to a namespace's bdev, opened on demand. `None`: it cannot be
    /// opened, or an attempt failed recently; the reason is logged.
    pub(crate) fn slot_of(
        &mut self,
        namespace: &Arc<Namespace>,
        pool: &Pool,
        sleepers: &EventSet,
        now: Nanos,
    ) -> Option<usize> {
        if let Some(slot) = namespace.slot(self.core) {
            return Some(slot);
        }
        let is_it = |refused: &&RefusedNamespace| refused.serial == namespace.serial;
        let before = self.refused.iter().find(is_it);
        if before.is_some_and(|refused| now.since(refused.at) < OPEN_AGAIN) {
            return None;
        }
        let queue = match namespace.backing.open(pool) {
            Ok(queue) => queue,
            Err(error) => {
                self.refuse(namespace, now, &error, "cannot open the namespace's bdev");
                return None;
            }
        };
        if let Some(fd) = queue.wake_fd()
            && let Err(error) = sleepers.add(fd, 0, Interest::READ)
        {
            self.refuse(
                namespace,
                now,
                &error,
                "cannot watch the bdev's completions",
            );
            return None;
        }
        self.refused.retain(|r| r.serial != namespace.serial);
        let device = Device {
            namespace: Arc::clone(namespace),
            queue,
            waiting: WaitingList::new(),
            listed: false,
            used: false,
            user: 0,
        };
        let slot = match self.slots.iter().position(Option::is_none) {
            Some(slot) => slot,
            None => {
                self.slots.push(None);
                self.slots.len() - 1
            }
        };
        self.slots[slot] = Some(device);
        self.open += 1;
        namespace.set_slot(self.core, Some(slot));
        Some(slot)
    }

    #[cold]
    fn refuse(
        &mut self,
        namespace: &Namespace,
        now: Nanos,
        error: &dyn std::error::Error,
        what: &str,
    ) {
        let (serial, nsid, core) = (namespace.serial, namespace.nsid, self.core);
        self.refused
            .retain(|refused| now.since(refused.told) < TELL_AGAIN);
        match self.refused.iter_mut().find(|r| r.serial == serial) {
            Some(refused) => refused.at = now,
            None => {
                tracing::error!(nsid, core, %error, "{what}");
                let (at, told) = (now, now);
                self.refused.push(RefusedNamespace { serial, at, told });
            }
        }
    }

    // The error carries the I/O back by value: boxing it would allocate on the data path.
    #[allow(clippy::result_large_err)]
    pub(crate) fn submit(&mut self, slot: usize, io: Io) -> Result<(), (Busy, Io)> {
        self.list(slot);
        self.device(slot).queue.submit(io)
    }

    /// See [`Queue::run_sync`].
    pub(crate) fn run_sync(
        &mut self,
        slot: usize,
        io: &mut Io,
        zero_copy: &mut Option<MemoryView>,
    ) -> Option<Status> {
        let device = self.slots[slot].as_mut().expect("open device");
        let status = device.queue.run_sync(io, zero_copy)?;
        if !device.used {
            device.used = true;
            self.tidying = true;
            self.list(slot);
        }
        Some(status)
    }

    /// Adds a request to the list that waits for the device; `first`: at its head.
    pub(crate) fn wait(&mut self, slot: usize, request: ReqRef, first: bool) {
        self.list(slot);
        let waiting = &mut self.device(slot).waiting;
        if first {
            waiting.push_first(request)
        } else {
            waiting.push(request)
        }
    }

    fn list(&mut self, slot: usize) {
        let device = self.slots[slot].as_mut().expect("open device");
        if !device.listed {
            device.listed = true;
            self.busy.push(slot);
        }
    }

    /// Number of busy devices; [`Devices::busy_at`] gives the slot at an index.
    pub(crate) fn busy(&self) -> usize {
        self.busy.len()
    }

    pub(crate) fn busy_at(&self, at: usize) -> usize {
        self.busy[at]
    }

    /// Removes devices without work from the busy list. `did`: a command completed, so that there
    /// may be one.
    pub(crate) fn remove_idle(&mut self, did: bool) {
        if !did && !self.tidying {
            return;
        }
        self.tidying = false;
        let mut at = 0;
        while let Some(&slot) = self.busy.get(at) {
            let listed = self.slots[slot].as_mut().is_some_and(|device| {
                device.listed = !device.queue.is_settled() || !device.waiting.is_empty();
                self.tidying |= device.listed && device.queue.inflight() == 0;
                device.listed
            });
            if listed {
                at += 1;
            } else {
                self.busy.swap_remove(at);
            }
        }
    }

    /// Adds devices to the busy list that have work without I/O in flight, for example a volume
    /// whose replicas changed. Returns true if there was one.
    pub(crate) fn list_pending_cleanup(&mut self) -> bool {
        let before = self.busy.len();
        for (slot, device) in self.slots.iter_mut().enumerate() {
            if let Some(device) = device
                && !device.listed
                && !device.queue.is_settled()
            {
                device.listed = true;
                self.busy.push(slot);
                self.tidying = true;
            }
        }
        self.busy.len() > before
    }

    /// Aborts an I/O of namespace `nsid`, or of any namespace. Returns true if a device tries. The
    /// namespace may have been removed already, with the device open only for this I/O.
    #[cold]
    pub(crate) fn abort(&mut self, nsid: Option<u32>, token: Token) -> bool {
        let mut may_be = self.slots.iter_mut().flatten();
        may_be.any(|device| {
            nsid.is_none_or(|nsid| nsid == device.namespace.nsid) && device.queue.abort(token)
        })
    }

    /// Aborts all I/Os of a command. Returns true if at least one device tries.
    pub(crate) fn abort_children(&mut self, qp: &QueuePair, index: ReqIndex) -> bool {
        let request = &qp.requests[index];
        let nsid = match request.plan {
            Plan::Flush { all: true } => None,
            _ => Some(request.sqe.nsid()),
        };
        let mut aborted = false;
        for child in 0..request.next_child {
            aborted |= self.abort(nsid, token(qp.id.index, index, child));
        }
        aborted
    }

    pub(crate) fn poll(&mut self, slot: usize, now: Nanos, done: &mut Done) -> usize {
        let Some(device) = &mut self.slots[slot] else {
            return 0;
        };
        if std::mem::take(&mut device.used) || !device.queue.is_settled() {
            device.queue.poll(now, done)
        } else {
            0
        }
    }

    fn device(&mut self, slot: usize) -> &mut Device {
        self.slots[slot].as_mut().expect("open device")
    }

    /// Removes and returns the next request that waits for a device.
    pub(crate) fn next_waiting(&mut self, slot: usize) -> Option<ReqRef> {
        self.slots[slot].as_mut()?.waiting.pop()
    }

    /// Removes requests that do not wait any more, if the list is long.
    pub(crate) fn tidy_waiting(&mut self, slot: usize, queues: &QueuePairs) {
        if let Some(device) = &mut self.slots[slot] {
            let waits = |known: &ReqRef| queues.waits_for_room(known);
            device.waiting.tidy(waits);
        }
    }

    pub(crate) fn waiting(&self, slot: usize) -> usize {
        self.slots[slot].as_ref().map_or(0, |d| d.waiting.len())
    }

    /// Number of requests that wait for a device.
    pub(crate) fn all_waiting(&self) -> usize {
        self.slots.iter().flatten().map(|d| d.waiting.len()).sum()
    }

    /// Closes the devices without I/O to which no queue pair has access.
    pub(crate) fn release_unused(&mut self, queues: &QueuePairs, sleepers: &EventSet) {
        if !self.stale || self.open == 0 {
            return;
        }
        let sees = |q: u32, namespace: &Namespace| {
            let seen = queues.get(q).and_then(|qp| qp.view.get(namespace.nsid));
            seen.is_some_and(|seen| seen.serial == namespace.serial)
        };
        self.stale = !self.release(queues.places(), sees, sleepers);
    }

    /// Closes devices without I/O that none of the `queues` queue pairs uses. Returns true if every
    /// unused device could be closed. It searches all queue pairs only if the last known user of a
    /// device is gone, because thousands of queue pairs may be removed at once.
    pub(crate) fn release(
        &mut self,
        queues: u32,
        mut sees: impl FnMut(u32, &Namespace) -> bool,
        sleepers: &EventSet,
    ) -> bool {
        let mut all = true;
        for slot in &mut self.slots {
            let Some(Device {
                namespace, user, ..
            }) = slot
            else {
                continue;
            };
            if sees(*user, namespace) {
                continue;
            }
            if let Some(found) = (0..queues).find(|q| sees(*q, namespace)) {
                *user = found;
                continue;
            }
            let Some(device) = slot.take_if(|d| d.queue.inflight() == 0 && d.waiting.is_empty())
            else {
                all = false;
                continue;
            };
            device.namespace.set_slot(self.core, None);
            if let Some(fd) = device.queue.wake_fd()
                && let Err(error) = sleepers.delete(fd)
            {
                tracing::warn!(%error, "cannot stop to watch a bdev's completions");
            }
            self.open -= 1;
        }
        all
    }

    pub(crate) fn arm(&mut self, now: Nanos) -> Idle {
        let mut idle = if self.list_pending_cleanup() {
            Idle::Busy
        } else {
            Idle::Quiet
        };
        for device in self.slots.iter_mut().flatten() {
            idle = idle.and(device.queue.arm(now));
        }
        idle
    }

    pub(crate) fn disarm(&mut self) {
        for device in self.slots.iter_mut().flatten() {
            device.queue.disarm();
        }
    }
}
