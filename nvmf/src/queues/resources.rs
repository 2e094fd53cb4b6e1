//! [`Resources`]: the transports, buffers and devices of one core, and the handling of new commands
//! and ending queue pairs.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use nacre_hugepages::Buf;
use nacre_nvmf_wire::{Sqe, StatusCode};
use nacre_reactor::{EventSet, Nanos, Repeats};

use crate::queues::buffers::Buffers;
use crate::queues::command::Command;
use crate::queues::connect;
use crate::queues::device::Devices;
use crate::queues::ports::Ports;
use crate::queues::queue_pair::{QueuePair, Stage};
use crate::queues::request::{NoRoom, Step};
use crate::queues::reservation::Reserving;
use crate::queues::{admin, authentication, completion};
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
    pub reserving: Reserving,
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
            reserving: Reserving::default(),
            aborts: VecDeque::new(),
            refusals: Repeats::new(REFUSAL_LOG_INTERVAL),
            sleepers: EventSet::new()?,
        })
    }

    /// Access to a command in the queue pair's table.
    #[inline]
    pub(crate) fn command<'a>(
        &'a mut self,
        queue: &'a mut QueuePair,
        index: ReqIndex,
        now: Nanos,
    ) -> Command<'a> {
        Command {
            queue,
            index,
            core: self,
            now,
        }
    }

    /// Handles a command capsule.
    #[inline]
    pub(crate) fn capsule(&mut self, qp: &mut QueuePair, sqe: Sqe, data: Option<Buf>, now: Nanos) {
        if qp.stage == Stage::Ending {
            return;
        }
        if let Err(data) = self.run_sync(qp, &sqe, data, now) {
            self.begin(qp, sqe, data, now);
        }
    }

    /// Adds a command to the table and starts it.
    fn begin(&mut self, qp: &mut QueuePair, sqe: Sqe, data: Option<Buf>, now: Nanos) {
        let mut taken = qp.requests.begin(sqe, now);
        if taken == Err(NoRoom::DuplicateId) && qp.forget_event_request(&sqe) {
            taken = qp.requests.begin(sqe, now);
        }
        let index = match taken {
            Ok(index) => index,
            Err(NoRoom::DuplicateId) => {
                self.fused_half_refused(qp, &sqe, now);
                return self.refuse(qp, sqe, StatusCode::COMMAND_ID_CONFLICT);
            }
            Err(NoRoom::QueueOverrun) => {
                tracing::warn!(peer = %qp.ends.peer, qid = qp.qid, entries = qp.flow.entries, "host overran its submission queue");
                return self.close(qp, CloseWhy::Now);
            }
        };
        qp.requests[index].data = data;
        let mut command = self.command(qp, index, now);
        match command.queue.stage {
            Stage::Fresh => return connect::first_command(&mut command),
            Stage::Authenticating => return authentication::before(&mut command),
            Stage::Live | Stage::Ending => {}
        }
        if let Some(association) = &command.queue.association {
            association.touch();
        }
        if command.queue.is_admin() {
            return admin::arrived(&mut command);
        }
        command.arrived();
    }

    /// Handles a capsule with damaged data.
    pub(crate) fn capsule_damaged(&mut self, qp: &mut QueuePair, sqe: Sqe, now: Nanos) {
        self.fused_half_refused(qp, &sqe, now);
        self.refuse(qp, sqe, StatusCode::TRANSIENT_TRANSPORT_ERROR);
    }

    /// Handles the end of a data transfer from the host, or its failure.
    pub(crate) fn fetched(
        &mut self,
        qp: &mut QueuePair,
        index: ReqIndex,
        data: Result<Buf, StatusCode>,
        now: Nanos,
    ) {
        self.buffers.fetch_ended(qp, index);
        let mut command = self.command(qp, index, now);
        match data {
            Ok(data) => {
                command.request().data = Some(data);
                command.execute();
            }
            Err(status) => command.finish(status),
        }
        self.fetch_next(qp, now);
    }

    /// Starts data transfers of commands that waited for a part of the fetch window.
    fn fetch_next(&mut self, qp: &mut QueuePair, now: Nanos) {
        while qp.stage != Stage::Ending
            && let Some(&index) = qp.fetches.waiting.front()
        {
            // Skip a request that has ended meanwhile.
            let waits = qp.requests[index].step == Step::Buffer;
            if waits && !qp.may_fetch(qp.bytes_from_host(index)) {
                return;
            }
            qp.fetches.waiting.pop_front();
            if waits {
                self.command(qp, index, now).gather_or_wait(false);
            }
        }
    }

    /// Completes a command that got no place in the table.
    fn refuse(&mut self, qp: &mut QueuePair, sqe: Sqe, status: StatusCode) {
        let response = completion::refusal(qp, &sqe, status);
        self.ports.respond(qp, response);
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
        if !qp.closed {
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
