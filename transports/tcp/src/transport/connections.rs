//! Adds accepted connections to a core, evicts pending ones, fires timeouts, and removes ended
//! connections.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nacre_nvmf::tcp::TargetConn;
use nacre_nvmf::transport::{CloseWhy, ConnId, Events, QueueKind, Transport};
use nacre_reactor::{Interest, Nanos};
use nacre_transport_tls::SessionCounts;

use super::{Conn, Slot, TcpTransport, count_pdus};
use crate::accept::{Incoming, ToCore};
use crate::stats::add;

/// Most messages of the accepting thread (mostly new connections) that a core takes in one turn.
const NEW_PER_TURN: usize = 16;

impl TcpTransport {
    pub(super) fn take_new(&mut self, events: &mut Events) {
        for _ in 0..NEW_PER_TURN {
            if !events.has_room() {
                return;
            }
            match self.core.inbox.pop() {
                Some(ToCore::Connection(incoming)) => self.adopt(incoming),
                Some(ToCore::Evict) => self.evict(),
                None => return,
            }
        }
    }

    fn adopt(&mut self, incoming: Incoming) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() as u32 - 1
        });
        if let Err(error) = self
            .epoll
            .add(&incoming.socket, u64::from(index), Interest::READ)
        {
            tracing::warn!(%error, peer = %incoming.peer, "a connection cannot be watched and is closed");
            self.free.push(index);
            self.forget_one(None);
            return;
        }
        add(&self.core.stats.accepted, 1);
        add(
            &self.core.stats.tls_opened,
            incoming.sealed.is_some().into(),
        );
        let Incoming {
            socket,
            listener,
            options,
            local,
            peer,
            pending,
            sealed,
        } = incoming;
        let own = options
            .in_capsule_data_size
            .map(|_| self.shared.config.with(&options));
        let rules = match &own {
            Some(config) => Rc::new(config.machine()),
            None => Rc::clone(&self.machine),
        };
        let caps = own.map(|config| Box::new(config.caps()));
        let machine = TargetConn::new(rules, self.now);
        if let Some(deadline) = machine.deadline() {
            self.next_deadline = self.next_deadline.min(deadline);
        }
        self.slots[index as usize].conn = Some(Box::new(Conn {
            machine,
            socket,
            sealed,
            listener,
            caps,
            local,
            peer,
            opened: false,
            established: None,
            unconnected: Some(pending),
            dirty: false,
            pending: true,
            blocked: false,
            hot: None,
            counted: (0, 0),
            counted_keys: SessionCounts::default(),
        }));
        self.count += 1;
        self.pending.push(index);
    }

    /// Closes the pending connections that the accepting thread has marked as evicted.
    fn evict(&mut self) {
        let is_evicted = |slot: &Slot| {
            let pending = slot.conn.as_ref()?.unconnected.as_ref()?;
            pending.evicted.load(Ordering::Acquire).then_some(())
        };
        for index in 0..self.slots.len() {
            let slot = &self.slots[index];
            if is_evicted(slot).is_some() {
                let generation = slot.generation;
                let conn = ConnId {
                    index: index as u32,
                    generation,
                };
                self.close(conn, CloseWhy::Now);
            }
        }
    }

    fn forget_one(&self, established: Option<QueueKind>) {
        if established.is_none() {
            self.shared.pending.fetch_sub(1, Ordering::Relaxed);
        }
        self.core.load.remove(established.unwrap_or(QueueKind::Io));
        self.shared.connections.fetch_sub(1, Ordering::AcqRel);
    }

    /// Fires expired timeouts, and computes `next_deadline`. Visits all connections.
    pub(super) fn handle_timeouts(&mut self) {
        let mut next = Nanos::MAX;
        for (index, slot) in self.slots.iter_mut().enumerate() {
            let Some(conn) = slot.conn.as_deref_mut() else {
                continue;
            };
            conn.machine.handle_timeout(self.now);
            if conn.machine.has_news() && !conn.pending {
                conn.pending = true;
                self.pending.push(index as u32);
            }
            if let Some(deadline) = conn.machine.deadline() {
                next = next.min(deadline);
            } else if conn.machine.is_finished() && !conn.pending {
                conn.pending = true;
                self.pending.push(index as u32);
            }
        }
        self.next_deadline = next;
    }

    pub(super) fn remove(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        let Some(mut conn) = slot.conn.take() else {
            return;
        };
        conn.machine.end_receive(&mut self.buffers, false, self.now);
        count_pdus(&mut conn, &self.core);
        add(&self.core.stats.tls_closed, conn.sealed.is_some().into());
        slot.generation = slot.generation.wrapping_add(1);
        if conn.hot.is_some() {
            self.hot.retain(|&hot| hot != index);
        }
        if conn.dirty {
            self.dirty.retain(|&dirty| dirty != index);
        }
        if conn.pending {
            self.pending.retain(|&pending| pending != index);
        }
        let established = conn.established;
        // Closing the socket takes it out of epoll.
        drop(conn);
        self.free.push(index);
        self.count -= 1;
        self.forget_one(established);
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        self.shared
            .cores()
            .retain(|core| !Arc::ptr_eq(core, &self.core));
        while let Some(message) = self.core.inbox.pop() {
            if matches!(message, ToCore::Connection(_)) {
                self.forget_one(None);
            }
        }
        for conn in self.slots.iter().filter_map(|slot| slot.conn.as_deref()) {
            self.forget_one(conn.established);
        }
    }
}
