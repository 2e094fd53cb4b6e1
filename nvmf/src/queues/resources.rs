//! [`Resources`]: the transports, buffers and devices of one core, and the end of a queue pair.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::Status;
use nacre_bdev::listing::AllocatedRanges;
use nacre_reactor::{EventSet, Nanos, Repeats};
use parking_lot::Mutex;

use crate::queues::buffers::Buffers;
use crate::queues::device::Devices;
use crate::queues::ports::Ports;
use crate::queues::queue_pair::{QueuePair, Stage};
use crate::queues::reserving::ReservationWork;
use crate::subsystems::association::Teardown;
use crate::subsystems::core_handle::{GroupHandle, ReqIndex, ReqRef};
use crate::subsystems::namespace::Namespace;
use crate::subsystems::nvmf_target::Target;
use crate::transport::{CloseWhy, Pools};

/// Shortest time between two log lines about the same refused host.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The resources of one core without its queue pairs, so that code can borrow both at the same
/// time.
pub(crate) struct Resources {
    pub target: Arc<Target>,
    pub handle: GroupHandle,
    pub ports: Ports,
    pub buffers: Buffers,
    pub devices: Devices,
    /// Pending reservation commands.
    pub reserving: ReservationWork,
    /// Pending Get LBA Status commands.
    pub listings: Listings,
    /// New Abort commands. The commands to abort may be on other queue pairs.
    pub aborts: VecDeque<Abort>,
    /// Refused Connects by host and reason, for the log.
    pub refusals: Repeats<(String, String)>,
    pub sleepers: EventSet,
}

/// An Abort command `admin` for the command `cid` of queue `sqid`.
pub(crate) struct Abort {
    pub admin: ReqRef,
    pub sqid: u16,
    pub cid: u16,
}

impl Resources {
    pub(crate) fn new(
        target: Arc<Target>,
        handle: GroupHandle,
        pools: Pools,
        wake: Arc<dyn Fn() + Send + Sync>,
    ) -> std::io::Result<Self> {
        Ok(Self {
            target,
            ports: Ports::new(wake),
            buffers: Buffers::new(pools),
            devices: Devices::new(handle.core),
            handle,
            reserving: ReservationWork::default(),
            listings: Listings::default(),
            aborts: VecDeque::new(),
            refusals: Repeats::new(REFUSAL_LOG_INTERVAL),
            sleepers: EventSet::new()?,
        })
    }

    /// Adopts the association's present view of the namespaces.
    #[inline]
    pub(crate) fn refresh_view(&mut self, qp: &mut QueuePair) {
        if qp.refresh_view() {
            self.view_changed(qp);
        }
    }

    /// Handles a change of a queue's view.
    #[cold]
    pub(crate) fn view_changed(&mut self, qp: &mut QueuePair) {
        self.devices.stale = true;
        if qp.is_admin() || qp.stage != Stage::Live {
            return;
        }
        let in_place = qp.view.iter().all(|namespace| namespace.immediate);
        if std::mem::replace(&mut qp.in_place.now, in_place) != in_place {
            qp.in_place.before |= !in_place;
            self.ports.of(qp).set_in_place(qp.conn, in_place);
        }
    }

    /// The slot of this core's queue to a namespace's bdev, opened on demand.
    pub(crate) fn open_device(&mut self, namespace: &Arc<Namespace>, now: Nanos) -> Option<usize> {
        let pool = &self.buffers.pools.io;
        self.devices.slot_of(namespace, pool, &self.sleepers, now)
    }

    // Ending a queue pair.

    /// Closes a queue pair. [`super::QueueGroup`] removes it after its last I/O.
    pub(crate) fn close(&mut self, qp: &mut QueuePair, why: CloseWhy) {
        if qp.stage == Stage::Ending {
            return;
        }
        if !qp.closing.is_closed {
            self.ports.close(qp, why);
        }
        self.end(qp);
        if let Some(association) = &qp.association
            && qp.is_admin()
        {
            association.tear_down(Teardown::HostLeft);
        }
    }

    /// Stops accepting commands, drops waiting ones, and aborts those in a device.
    pub(crate) fn end(&mut self, qp: &mut QueuePair) {
        qp.stage = Stage::Ending;
        self.buffers.abandon_fetches(qp);
        if let Some(association) = &qp.association {
            association.end_queue(qp.qid);
        }
        let active: Vec<ReqIndex> = qp.requests.active().collect();
        for index in active {
            if qp.requests[index].inflight == 0 {
                qp.requests.end(index);
            } else {
                self.devices.abort_children(qp, index);
            }
        }
    }
}

type ListedRanges = Result<AllocatedRanges, Status>;

/// Get LBA Status commands that wait for the answer of a bdev. Each is a request of an admin queue.
#[derive(Default)]
pub(crate) struct Listings {
    waiting: Vec<(ReqRef, Arc<Mutex<Option<ListedRanges>>>)>,
}

/// Most of these commands of one core; more are to be sent again.
const MOST_LISTINGS: usize = 8;

impl Listings {
    pub(super) fn is_full(&self) -> bool {
        self.waiting.len() >= MOST_LISTINGS
    }

    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    /// `slot`: where the answer will be.
    pub(super) fn add(&mut self, request: ReqRef, slot: Arc<Mutex<Option<ListedRanges>>>) {
        self.waiting.push((request, slot));
    }

    /// Gives up the commands for which `is_there` is false.
    pub(super) fn retain(&mut self, is_there: impl Fn(&ReqRef) -> bool) {
        self.waiting.retain(|(request, _)| is_there(request));
    }

    pub(super) fn take_answered(&mut self) -> Vec<(ReqRef, ListedRanges)> {
        let mut answered = Vec::new();
        self.waiting.retain(|(request, slot)| {
            let answer = slot.lock().take();
            let waits = answer.is_none();
            answered.extend(answer.map(|answer| (*request, answer)));
            waits
        });
        answered
    }
}
