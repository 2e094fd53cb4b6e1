//! The life of a group's connections and associations: opening, closing, upkeep.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_reactor::Nanos;

use crate::controller::Outcome;
use crate::queues::group::{Group, Port};
use crate::queues::queue_pair::{QueuePair, Stage};
use crate::queues::request::Step;
use crate::queues::reservation::Errand;
use crate::subsystems::association::{Phase, Teardown};
use crate::subsystems::config::IoLimits;
use crate::subsystems::core_handle::ReqIndex;
use crate::subsystems::core_handle::{AbortReply, GroupMessage};
use crate::subsystems::namespace::Namespace;
use crate::subsystems::reservation::Command;
use crate::transport::{Address, CloseWhy, Closed, ConnId, ListenerId};

/// How often associations are looked after (keep-alive, leftovers) without being asked.
const UPKEEP: Duration = Duration::from_millis(100);

/// How long a connection may stay without a Connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

impl Group {
    pub(super) fn open_queue(
        &mut self,
        port: usize,
        conn: ConnId,
        ends: (ListenerId, Address, Address),
        now: Nanos,
    ) {
        let slot = match self.free_queues.pop() {
            Some(slot) => slot,
            None if self.queues.len() < self.config.max_queues => {
                self.queues.push(None);
                self.queues.len() as u32 - 1
            }
            None => {
                tracing::warn!(peer = %ends.2, limit = self.config.max_queues, "connection refused: this core has all of its queue pairs");
                return self.ports[port].io.close(conn, CloseWhy::Now);
            }
        };
        self.next_generation = self.next_generation.wrapping_add(1);
        let caps = self.ports[port].io.caps_of(conn);
        let limits = IoLimits::new(&self.target.config, caps);
        if !caps.keyed_sgl {
            let bytes = caps.in_capsule_bytes as usize;
            self.in_capsule_bytes = self.in_capsule_bytes.max(bytes);
        }
        let qp = QueuePair::new(port, conn, self.next_generation, ends, limits, now);
        self.queues[slot as usize] = Some(Box::new(qp));
        let table = &mut self.ports[port].queues;
        if table.len() <= conn.index as usize {
            table.resize(conn.index as usize + 1, None);
        }
        table[conn.index as usize] = Some((conn, slot));
    }

    /// Starts to end a queue pair. Commands that wait are dropped, those in a device are aborted;
    /// [`Group::reap`] removes it when nothing of it is left.
    pub(crate) fn close_queue(&mut self, q: u32, why: CloseWhy, now: Nanos) {
        let qp = self.queues[q as usize].as_mut().expect("queue pair");
        if qp.stage == Stage::Ending {
            return;
        }
        if !qp.closed {
            self.ports[qp.transport].io.close(qp.conn, why);
        }
        self.end_queue(q);
        let qp = self.queue_ref(q);
        if let Some(association) = &qp.association
            && qp.is_admin()
        {
            association.tear_down(Teardown::HostLeft);
        }
        self.reap(q, now);
    }

    /// Stops accepting commands, drops waiting ones, and aborts those in a device.
    pub(super) fn end_queue(&mut self, q: u32) {
        let qp = self.queue(q);
        qp.stage = Stage::Ending;
        if let Some(association) = &qp.association {
            association.end_queue(qp.qid);
        }
        let active: Vec<ReqIndex> = qp.requests.active().collect();
        for index in active {
            let qp = self.queue(q);
            if qp.requests[index].inflight == 0 {
                qp.requests.end(index);
            } else {
                self.abort_children(q, index);
            }
        }
    }

    pub(super) fn connection_closed(&mut self, q: u32, why: &Closed, now: Nanos) {
        let qp = self.queue(q);
        qp.closed = true;
        match why {
            Closed::Local | Closed::Peer => {
                tracing::debug!(peer = %qp.peer, qid = qp.qid, "connection closed: {why}");
            }
            _ => tracing::warn!(peer = %qp.peer, qid = qp.qid, "connection lost: {why}"),
        }
        self.close_queue(q, CloseWhy::Now, now);
        self.reap(q, now);
    }

    /// Removes an ending queue pair that has nothing left in a device or in the transport.
    pub(crate) fn reap(&mut self, q: u32, _now: Nanos) {
        let Some(qp) = self.queues[q as usize].as_mut() else {
            return;
        };
        if qp.stage == Stage::Ending
            && qp.inflight == 0
            && let Some(response) = qp.farewell.take()
            && !qp.closed
        {
            let io = &mut self.ports[qp.transport].io;
            io.respond(qp.conn, *response);
            return io.close(qp.conn, CloseWhy::Drained);
        }
        if qp.stage != Stage::Ending || !qp.closed || qp.inflight > 0 {
            return;
        }
        let qp = self.queues[q as usize].take().expect("just seen");
        self.devices_stale = true;
        // The transport released the connection long before a slow device finished its I/O: another
        // connection may have its place by now.
        let place = &mut self.ports[qp.transport].queues[qp.conn.index as usize];
        place.take_if(|(conn, _)| *conn == qp.conn);
        self.free_queues.push(q);
        if let Some(association) = &qp.association
            && association.remove_queue(qp.qid) == 0
        {
            association.tear_down(Teardown::HostLeft);
            let (host, cntlid) = (&association.hostnqn, association.cntlid);
            let reason = association
                .teardown_reason()
                .map_or("unknown", Teardown::text);
            tracing::info!(subsystem = %association.subsystem.nqn(), %host, cntlid, reason, "controller removed");
            self.target.forget(association);
        }
    }

    // Upkeep.

    pub(super) fn take_messages(&mut self, now: Nanos) -> u32 {
        let mut did = 0;
        if self.handle.take_attention() {
            did += 1;
            self.open_ports();
            self.upkeep(now);
            for fence in self.handle.take_fences() {
                self.take_fence(fence, now);
            }
        }
        // A message that is put back below waits for the next turn.
        for _ in 0..self.handle.messages() {
            let Some(message) = self.handle.take_message() else {
                break;
            };
            did += 1;
            match message {
                GroupMessage::Abort {
                    association,
                    qid,
                    cid,
                    reply,
                } => {
                    let aborted = self.abort_command(&association, qid, cid, now);
                    self.send_abort_reply(reply, aborted);
                }
                GroupMessage::Aborted { reply, aborted }
                    if reply.group.core == self.handle.core =>
                {
                    self.abort_answered(&reply, aborted, now)
                }
                GroupMessage::Aborted { reply, aborted } => self.send_abort_reply(reply, aborted),
            }
        }
        did
    }

    /// An answer that finds the other core's list full stays in this core's own, and is sent on in
    /// a later turn: the admin command over there waits for it.
    fn send_abort_reply(&mut self, reply: AbortReply, aborted: bool) {
        let group = reply.group.clone();
        let message = GroupMessage::Aborted { reply, aborted };
        if let Err(message) = group.send(message)
            && self.handle.send(message).is_err()
        {
            tracing::warn!(
                core = self.handle.core,
                "an answer to Abort is lost: the message lists of two cores are full"
            );
        }
    }

    fn open_ports(&mut self) {
        for plug in self.target.plugs() {
            if self.ports.iter().any(|p| p.kind == plug.kind()) {
                continue;
            }
            match plug.open(self.handle.core, Arc::clone(&self.wake)) {
                Ok(io) => {
                    for fd in io.wake_fds() {
                        if let Err(error) = self.sleepers.add_raw(fd, 0) {
                            tracing::error!(%error, "cannot watch a transport's descriptor");
                        }
                    }
                    self.ports.push(Port {
                        kind: plug.kind(),
                        io,
                        queues: Vec::new(),
                    });
                }
                Err(error) => {
                    tracing::error!(core = self.handle.core, kind = %plug.kind(), %error, "cannot open transport on this core");
                }
            }
        }
    }

    /// Looks after every association that has a queue here.
    pub(super) fn upkeep(&mut self, now: Nanos) {
        self.upkeep_at = now + UPKEEP;
        for q in 0..self.queues.len() as u32 {
            let Some(qp) = self.queues[q as usize].as_mut() else {
                continue;
            };
            if qp.stage == Stage::Fresh && now.since(qp.opened) > CONNECT_TIMEOUT {
                tracing::warn!(peer = %qp.peer, "no Connect within {CONNECT_TIMEOUT:?}");
                self.close_queue(q, CloseWhy::Now, now);
                continue;
            }
            if qp.stage == Stage::Fresh
                && let Some(index) = qp.waiting_connect.take()
            {
                self.run_connect(q, index, now);
                continue;
            }
            let Some(association) = &qp.association else {
                continue;
            };
            let reset = association.phase() == Phase::Connected && !qp.is_admin();
            if (reset || association.phase() == Phase::Closing) && qp.stage == Stage::Live {
                self.close_queue(q, CloseWhy::Now, now);
                continue;
            }
            if association.phase() == Phase::Closing && qp.farewell.take().is_some() && !qp.closed {
                self.ports[qp.transport].io.close(qp.conn, CloseWhy::Now);
            }
            if qp.refresh_view() {
                self.view_changed(q);
            }
            let qp = self.queue(q);
            let inflight = qp.requests.outstanding() as u64;
            qp.stats.inflight.store(inflight, Ordering::Relaxed);
            if qp.is_admin() && qp.stage == Stage::Live {
                self.controller_upkeep(q, now);
            }
            self.reap(q, now);
        }
        self.devices.attend();
        self.release_devices();
        self.tell_counts();
    }

    fn tell_counts(&self) {
        let queues = self.queues.iter().flatten();
        let unassociated = queues.filter(|qp| qp.association.is_none()).count();
        let starved = self.starved.len() + self.starved_admin.len();
        let waiting = starved + self.devices.all_waiting();
        let counts = self.handle.counts();
        counts
            .unassociated
            .store(unassociated as u64, Ordering::Relaxed);
        counts.waiting.store(waiting as u64, Ordering::Relaxed);
    }

    /// Closes the devices that no queue pair here can see any longer and that have nothing in
    /// flight.
    fn release_devices(&mut self) {
        if !self.devices_stale || self.devices.open() == 0 {
            return;
        }
        let queues = &self.queues;
        let sees = |q: u32, namespace: &Namespace| {
            let qp = queues.get(q as usize).and_then(Option::as_ref);
            let seen = qp.and_then(|qp| qp.view.get(namespace.nsid));
            seen.is_some_and(|seen| seen.serial == namespace.serial)
        };
        let all = queues.len() as u32;
        self.devices_stale = !self.devices.release(all, sees, &self.sleepers);
    }

    fn controller_upkeep(&mut self, q: u32, now: Nanos) {
        let qp = self.queue(q);
        let controller = qp.controller.as_mut().expect("admin queue");
        if controller.keep_alive_expired(now) {
            let association = qp.association.as_ref().expect("admin queue");
            let (host, cntlid) = (&association.hostnqn, association.cntlid);
            tracing::warn!(subsystem = %association.subsystem.nqn(), %host, cntlid, "keep-alive timer expired");
            association.tear_down(Teardown::KeepAliveExpired);
            return self.close_queue(q, CloseWhy::Now, now);
        }
        self.deliver_events(q, now);
    }

    /// Completes held event requests with noted events.
    pub(crate) fn deliver_events(&mut self, q: u32, now: Nanos) {
        loop {
            let qp = self.queue(q);
            let Some(controller) = qp.controller.as_mut() else {
                return;
            };
            let Some(cqe) = controller.next_event() else {
                return;
            };
            match qp.requests.find(cqe.cid()) {
                Some(index) => self.complete(q, index, cqe, now),
                None => debug_assert!(false, "an event request that is not in the table"),
            }
        }
    }

    /// What an admin command left to do.
    pub(crate) fn admin_outcome(&mut self, q: u32, index: ReqIndex, outcome: Outcome, now: Nanos) {
        match outcome {
            Outcome::Done(cqe) => self.complete(q, index, cqe, now),
            Outcome::Held => self.queue(q).requests[index].step = Step::Held,
            Outcome::Abort { sqid, cid } => {
                self.queue(q).requests[index].step = Step::Held;
                self.start_abort(q, index, sqid, cid, now);
            }
            Outcome::Persist { on, namespaces } => {
                let association = self.queue(q).association.as_ref().expect("admin queue");
                let (subsystem, host) = (Arc::clone(&association.subsystem), association.hostid);
                let errand = Errand {
                    subsystem,
                    host,
                    command: Command::Persist(on),
                    todo: namespaces,
                };
                self.reserve(q, index, errand, now);
            }
        }
        if self.queues[q as usize]
            .as_ref()
            .is_some_and(|qp| qp.stage == Stage::Live)
        {
            self.deliver_events(q, now);
        }
    }
}
