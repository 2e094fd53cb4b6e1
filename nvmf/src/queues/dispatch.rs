//! A command from its capsule until its execution: decoding, buffer, data.
//!
//! ```text
//!   capsule ─▶ decode ─▶ gather ─▶ execute ─▶ run_io (execute.rs) ─▶ complete (completion.rs)
//!                          │ ▲         └────▶ run_fused (fused.rs)
//!                          ▼ │
//!                waits for a buffer, or for its data
//! ```

use std::sync::atomic::Ordering;

use nacre_hugepages::{Buf, Pool};
use nacre_nvmf_wire::{Fuse, Sgl, Sqe, StatusCode};
use nacre_reactor::Nanos;

use crate::queues::command::Command;
use crate::queues::decode::{self, Plan, Transfer};
use crate::queues::queue_pair::{QueuePair, Stage};
use crate::queues::request::{NoRoom, Step};
use crate::queues::resources::Resources;
use crate::queues::{admin, authentication, completion, connect, reservation};
use crate::subsystems::association::Phase;
use crate::subsystems::core_handle::ReqIndex;
use crate::transport::CloseWhy;

impl Resources {
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
        command.start();
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
}

impl Command<'_> {
    /// Handles a new command.
    fn start(&mut self) {
        let sqe = *self.sqe();
        match self.queue.stage {
            Stage::Fresh => {
                let plan = connect::plan(self.queue, &sqe);
                let is_refused = plan.is_err();
                self.gather_for(plan);
                if is_refused {
                    self.core.close(self.queue, CloseWhy::Drained);
                }
                return;
            }
            Stage::Authenticating => {
                let plan = if authentication::is_authentication(&sqe) {
                    authentication::plan(&sqe, &self.queue.limits)
                } else {
                    Err(StatusCode::AUTHENTICATION_REQUIRED.with_dnr())
                };
                return self.gather_for(plan);
            }
            Stage::Live | Stage::Ending => {}
        }
        if let Some(association) = &self.queue.association {
            association.touch();
        }
        if self.queue.is_admin() {
            let plan = if authentication::is_authentication(&sqe) {
                authentication::plan(&sqe, &self.queue.limits)
            } else {
                admin::plan(self.queue, &sqe)
            };
            return self.gather_for(plan);
        }
        self.arrived();
    }

    /// Handles a new I/O command.
    #[inline]
    fn arrived(&mut self) {
        self.core.refresh_view(self.queue);
        let qp = &mut *self.queue;
        let sqe = qp.requests[self.index].sqe;
        if authentication::is_authentication(&sqe) {
            let plan = authentication::plan(&sqe, &qp.limits);
            return self.gather_for(plan);
        }
        if sqe.is_fabrics() {
            return connect::fabrics_command(self);
        }
        match qp
            .association
            .as_ref()
            .map_or(Phase::Closing, |a| a.phase())
        {
            Phase::Ready => {}
            // The connection is being closed. The host repeats the command on the next one.
            Phase::Closing => {
                self.request().data = None;
                return self.request().step = Step::Deferred;
            }
            Phase::Connected => return self.finish(StatusCode::COMMAND_SEQUENCE_ERROR),
        }
        let plan = match decode::decode(&sqe, &qp.view, &qp.limits) {
            Ok(plan) => plan,
            Err(status) => {
                if self.pair(false) {
                    self.finish(status);
                }
                return;
            }
        };
        let namespace = qp.view.get(sqe.nsid()).map_or(0, |n| n.serial);
        let request = &mut qp.requests[self.index];
        (request.plan, request.namespace) = (plan, namespace);
        let unfused = sqe.fuse() == Fuse::Normal && qp.fused.is_none();
        if unfused && self.core.buffers.waiting.is_empty() && qp.has_all(self.index) {
            return self.run_io();
        }
        if !unfused && !self.pair(true) {
            return;
        }
        self.gather();
    }

    /// Gathers for the plan of an admin or fabrics command, or completes the command with the
    /// reason against it.
    fn gather_for(&mut self, plan: Result<Plan, StatusCode>) {
        match plan {
            Ok(plan) => {
                self.request().plan = plan;
                self.gather();
            }
            Err(status) => self.finish(status),
        }
    }

    /// Gets a buffer and the host's data for the command, and then executes it. Commands wait for
    /// buffers in the order of arrival.
    pub(crate) fn gather(&mut self) {
        self.gather_or_wait(true);
    }

    /// Like [`Command::gather`]. `fresh`: the command has not waited yet, so waiting commands go
    /// first.
    pub(crate) fn gather_or_wait(&mut self, fresh: bool) {
        let must_queue = self.queue.takes_io()
            && !matches!(self.request().plan, Plan::Admin { .. })
            && !self.core.buffers.waiting.is_empty()
            && self.request().data.is_none();
        if must_queue || !self.try_gather(fresh) {
            self.request().step = Step::Buffer;
            self.core.buffers.wait(self.queue, self.index);
        }
    }

    /// Returns false if there is no buffer now.
    pub(crate) fn try_gather(&mut self, fresh: bool) -> bool {
        let request = &self.queue.requests[self.index];
        match request.plan.transfer(&request.sqe) {
            Transfer::None => {
                self.execute();
                true
            }
            Transfer::FromHost(bytes) => self.gather_from_host(bytes as usize, fresh),
            Transfer::ToHost(bytes) => self.gather_for_host(bytes as usize),
        }
    }

    fn gather_from_host(&mut self, bytes: usize, fresh: bool) -> bool {
        if self.request().data.is_some() {
            if !self.make_data_keepable() {
                return false;
            }
            self.execute();
            return true;
        }
        if matches!(self.sqe().sgl(), Ok(Sgl::InCapsule { .. })) {
            self.finish(StatusCode::SGL_OFFSET_INVALID.with_dnr());
            return true;
        }
        let others_first = fresh && !self.queue.fetches.waiting.is_empty();
        if others_first || !self.queue.may_fetch(bytes) {
            self.request().step = Step::Buffer;
            self.queue.fetches.waiting.push_back(self.index);
            return true;
        }
        let buffers = &mut self.core.buffers;
        let buf = match self.queue.requests[self.index].plan {
            Plan::Admin { .. } => buffers.pools.for_admin(bytes),
            _ => buffers.to_fetch(bytes),
        };
        let Some(buf) = buf else {
            return false;
        };
        buffers.fetch_begins(self.queue, bytes);
        self.request().step = Step::Fetching;
        let (conn, tag) = (self.queue.conn, self.queue.tag(self.index));
        let port = self.core.ports.of(self.queue);
        port.fetch(conn, tag, &self.queue.requests[self.index].sqe, buf);
        true
    }

    fn gather_for_host(&mut self, bytes: usize) -> bool {
        if !self.queue.is_zero_copy(self.index) {
            let pools = &self.core.buffers.pools;
            let buf = match self.queue.requests[self.index].plan {
                Plan::Admin { .. } => pools.for_admin(bytes),
                _ => pools.io.acquire(bytes),
            };
            let Some(buf) = buf else {
                return false;
            };
            self.request().data = Some(buf);
        }
        self.execute();
        true
    }

    /// Copies data from a receive buffer to a buffer of the pool, which the device may use for any
    /// time. Not needed if all devices of the queue complete synchronously. Returns false if no
    /// buffer is free.
    fn make_data_keepable(&mut self) -> bool {
        let qp = &mut *self.queue;
        let pool = &self.core.buffers.pools.io;
        if let Some(data) = &qp.requests[self.index].data
            && qp.in_place.before
            && !qp.in_place.now
            && !pool.owns(data)
        {
            let Some(copy) = copy_of(data, pool) else {
                return false;
            };
            let copied_bytes = &self.core.handle.counts().copied_bytes;
            copied_bytes.fetch_add(copy.len() as u64, Ordering::Relaxed);
            qp.requests[self.index].data = Some(copy);
        }
        true
    }

    /// Executes a command that has its buffer and data.
    pub(crate) fn execute(&mut self) {
        if self.queue.stage == Stage::Fresh {
            return connect::run(self);
        }
        if self.queue.is_admin() {
            return if authentication::is_authentication(self.sqe()) {
                authentication::run(self)
            } else {
                admin::run(self)
            };
        }
        let request = self.request();
        if request.abort {
            return self.finish(StatusCode::ABORT_REQUESTED);
        }
        let failed = request.status;
        if !failed.is_success() {
            return self.finish(failed);
        }
        request.step = Step::Executing;
        match request.plan {
            Plan::Reservation(ask) => return reservation::run(self, ask),
            // On an I/O queue only authentication commands have this plan.
            Plan::Admin { .. } => return authentication::run(self),
            _ => {}
        }
        if request.sqe.fuse() != Fuse::Normal {
            return self.run_fused();
        }
        self.run_io();
    }
}

#[cold]
fn copy_of(data: &Buf, pool: &Pool) -> Option<Buf> {
    let mut copy = pool.acquire(data.len())?;
    copy.bytes_mut()?.copy_from_slice(data);
    Some(copy)
}
