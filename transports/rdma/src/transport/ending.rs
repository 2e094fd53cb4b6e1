//! Handles disconnect events and errors of a connection, and closes it: its work requests are
//! flushed, then it is destroyed.
//!
//! ```text
//!   open ─▶ closing: the queue pair flushes ─▶ all requests done ─▶ Closed, queue pair back
//!                        └─ takes too long ───▶ it is destroyed here ┘
//! ```

use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_nvmf::transport::{Address, Closed, ConnId, Event, Events};
use nacre_reactor::Nanos;
use nacre_transport_rdma_verbs::{Queues, WcOpcode, WcStatus};

use super::RdmaTransport;
use crate::accept::CROWDED_PATIENCE;
use crate::conn::Conn;
use crate::incident::Incident;
use crate::shared::ToControl;
use crate::stats::add;

impl RdmaTransport {
    /// Starts to close a connection: its queue pair flushes.
    pub(super) fn end(&mut self, index: u32, why: Closed) {
        let Some(conn) = self.slots[index as usize].conn.as_deref_mut() else {
            return;
        };
        if conn.closing.is_some() {
            return;
        }
        conn.closing = Some(why);
        conn.forget();
        if let Err(error) = conn.lane.drain() {
            tracing::debug!(%error, "cannot flush a queue pair; destroying it");
        }
        conn.deadline = self.now + self.shared.config.drain_timeout;
        self.next_deadline = self.next_deadline.min(conn.deadline);
        self.notice(index);
    }

    /// A request failed: its queue pair ends, other connections continue.
    pub(super) fn failed(
        &mut self,
        index: u32,
        wc: &nacre_transport_rdma_verbs::WorkCompletion,
        opcode: WcOpcode,
    ) {
        let flushed = wc.status == WcStatus::WorkRequestFlushed;
        let Some(conn) = self.slots[index as usize].conn.as_deref_mut() else {
            return;
        };
        if !flushed {
            add(&self.stats[conn.device].errors[wc.status as usize], 1);
        }
        // This status means that SEND_WITH_INVALIDATE failed. A host that reconnects gets responses
        // without it.
        if wc.status == WcStatus::LocalQpOperation
            && conn.invalidated
            && let Some(device) = &self.devices[conn.device]
            && device.may_invalidate.swap(false, Ordering::Relaxed)
        {
            tracing::warn!(
                device = device.queues.domain().attributes().name,
                "the device says that it has SEND_WITH_INVALIDATE, and a queue pair that used it failed: \
                 it is not used on this device any more"
            );
        }
        let open = conn.closing.is_none();
        // The peer saw the same failure and may have closed the connection first. Its silence is
        // then no new failure.
        let silent = matches!(
            wc.status,
            WcStatus::RetryExceeded | WcStatus::RnrRetryExceeded
        );
        if !flushed && !conn.failure_reported && (open || !silent) {
            conn.failure_reported = true;
            let device = self.devices[conn.device].as_ref();
            let incident = Incident::QueuePairFailed {
                device: device.map_or_else(String::new, |device| {
                    device.queues.domain().attributes().name.clone()
                }),
                number: wc.qp,
                local: conn.names.local,
                peer: conn.names.peer,
                status: wc.status,
                vendor_error: wc.vendor_error,
                opcode,
            };
            tracing::warn!("{incident}");
            self.shared.incidents.add(incident);
        }
        if open {
            self.end(
                index,
                Closed::Broken(format!("{}: {}", wc.status, wc.status.meaning())),
            );
        }
        self.notice(index);
    }

    /// Reports the events of one connection. Returns false when `events` is full.
    pub(super) fn advance_ending(&mut self, index: u32, events: &mut Events) -> bool {
        let slot = &mut self.slots[index as usize];
        let id = ConnId {
            index,
            generation: slot.generation,
        };
        let Some(conn) = slot.conn.as_deref_mut() else {
            return true;
        };
        conn.attention = false;
        if conn.live && !conn.opened && conn.closing.is_none() {
            if !events.has_room() {
                return false;
            }
            conn.opened = true;
            add(&self.stats[conn.device].accepted, 1);
            let (listener, local, peer) = (conn.names.listener, conn.names.local, conn.names.peer);
            let (local, peer) = (Address::Ip(local), Address::Ip(peer));
            events.push(Event::Opened {
                conn: id,
                listener,
                local,
                peer,
            });
        }
        while let Some((sqe, data)) = conn.early.pop_front() {
            if !events.has_room() {
                conn.early.push_front((sqe, data));
                return false;
            }
            events.push(Event::Capsule {
                conn: id,
                sqe,
                data,
            });
        }
        while let Some((tag, status)) = conn.refused.pop_front() {
            if !events.has_room() {
                conn.refused.push_front((tag, status));
                return false;
            }
            events.push(Event::FetchRefused {
                conn: id,
                tag,
                status,
            });
        }
        if conn.draining && conn.closing.is_none() && conn.has_drained() {
            self.end(index, Closed::Local);
        }
        self.finish(index, events)
    }

    pub(super) fn advance_endings(&mut self, events: &mut Events) {
        std::mem::swap(&mut self.attention, &mut self.looked_at);
        for at in 0..self.looked_at.len() {
            let index = self.looked_at[at];
            if !self.advance_ending(index, events) {
                self.notice(index);
            }
        }
        self.looked_at.clear();
    }

    /// Time limit for a host to connect its queue.
    pub(super) fn connect_patience(&self) -> Duration {
        let usual = Duration::from_millis(self.shared.config.connect_timeout_ms);
        if self.now < self.crowded_until {
            usual.min(CROWDED_PATIENCE)
        } else {
            usual
        }
    }

    /// Closes connections past their deadline, and computes the next deadline. Visits all
    /// connections.
    pub(super) fn handle_timeouts(&mut self) {
        self.next_deadline = Nanos::MAX;
        let patience = self.connect_patience();
        for index in 0..self.slots.len() as u32 {
            let Some(conn) = self.slots[index as usize].conn.as_deref_mut() else {
                continue;
            };
            let due = match (&conn.closing, conn.established) {
                (None, false) if !conn.draining => conn.since + patience,
                _ => conn.deadline,
            };
            if due > self.now {
                self.next_deadline = self.next_deadline.min(due);
            } else if conn.closing.is_some() {
                self.notice(index);
            } else {
                self.end(index, Closed::TimedOut);
            }
        }
    }

    /// Closes all connections of a device whose completion or shared receive queue failed.
    pub(super) fn device_failed(&mut self, at: usize, why: &str) {
        let Some(device) = self.devices[at].as_mut().filter(|device| !device.dead) else {
            return;
        };
        device.dead = true;
        tracing::error!(
            why,
            device = device.queues.domain().attributes().name,
            "RDMA queues of a core failed; their connections end"
        );
        for index in 0..self.slots.len() as u32 {
            let on_it = |conn: &Conn| conn.device == at;
            if self.slots[index as usize]
                .conn
                .as_deref()
                .is_some_and(on_it)
            {
                self.end(
                    index,
                    Closed::Broken("the queues of its core failed".into()),
                );
                self.notice(index);
            }
        }
        // New connections get another completion queue, unless one exists already.
        if let Some(device) = &self.devices[at] {
            let mut known = self.core.queues();
            let same = |(queues, _): &(Queues, u32)| queues.is_same(&device.queues);
            if known.get(&device.id).is_some_and(same) {
                known.remove(&device.id);
            }
        }
    }

    /// Releases a connection that has flushed.
    pub(super) fn finish(&mut self, index: u32, events: &mut Events) -> bool {
        let slot = &mut self.slots[index as usize];
        let Some(conn) = slot.conn.as_deref_mut() else {
            return true;
        };
        if conn.closing.is_none() {
            return true;
        }
        let device = self.devices[conn.device].as_ref();
        let dead = device.is_none_or(|device| device.dead);
        let late = self.now >= conn.deadline || dead;
        // The queue pair may hold a shared receive that has not completed yet.
        let takes = conn.live && !conn.last_receive && conn.lane.queues().is_shared();
        let waits = !conn.lane.is_idle()
            || takes && device.is_some_and(|device| device.reports_last_receive);
        if !waits {
            // Its last shared receives may still lie in the completion queue.
            conn.quiet += 1;
        }
        if conn.quiet < 2 && !late {
            // Flush completions and the device's report wake the connection; no poll is needed.
            return waits;
        }
        if conn.opened && !events.has_room() {
            return false;
        }
        let Some(conn) = slot.conn.take() else {
            return true;
        };
        let generation = slot.generation;
        slot.generation = generation.wrapping_add(1);
        let stats = &self.stats[conn.device];
        if let Some(why) = conn.closing {
            let counter = match &why {
                Closed::Peer => &stats.closed_by_peer,
                Closed::Broken(_) | Closed::Refused(_) => &stats.closed_broken,
                Closed::Protocol(_) => &stats.closed_protocol,
                Closed::TimedOut => &stats.closed_timeout,
                Closed::Local => &stats.closed_local,
            };
            add(counter, 1);
            if conn.opened {
                let conn = ConnId { index, generation };
                events.push(Event::Closed { conn, why });
            }
        }
        self.by_id.remove(&conn.names.id);
        if let Some(device) = &mut self.devices[conn.device] {
            device.by_number.remove(&conn.lane.number());
            device.conns -= 1;
        }
        if conn.dirty {
            self.dirty.retain(|&dirty| dirty != index);
        }
        if conn.starved {
            self.starved.retain(|&starved| starved != index);
        }
        if !conn.lane.queues().is_shared() {
            self.stats[conn.device].receives_are(0, conn.limits.depth);
        }
        // A queue pair that has not flushed is destroyed here, immediately, with its buffers.
        let endpoint = match conn.lane.retire() {
            Ok(endpoint) => Some(endpoint),
            Err(lane) => {
                add(&stats.drains_given_up, 1);
                drop(lane);
                None
            }
        };
        self.shared
            .mailbox
            .send(ToControl::Done(conn.names.id, endpoint));
        self.free.push(index);
        self.count -= 1;
        true
    }
}
