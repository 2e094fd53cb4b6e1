//! Switches a queue pair between polling and interrupts. An interrupt costs about a microsecond, so
//! interrupts are enabled only for a core that sleeps.
//!
//! ```text
//! polled ── arm, with I/O in flight ─▶ drains ── empty ─▶ requested ── recreated ─▶ interrupts
//! interrupts ── many polls without arm ─▶ drains ─ …                             ─▶ polled
//! ```
//!
//! While the queue pair drains, submitted I/O waits and the core does not sleep. Once the queue is
//! empty no interrupt is needed, and the control's bell wakes the core. So no command is
//! interrupted or sent twice by a switch.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nacre_reactor::Idle;
use nacre_reactor::Nanos;

use super::{LOOK, LOOK_SOON, Pair};
use crate::link::Request;

/// The core counts as polling after this many consecutive checks of commands in flight without a
/// call of `arm` in between.
const POLLED_LOOKS: u8 = 2 * super::TICKS as u8;

/// State of a switch from interrupts to polling, or back.
#[derive(Debug, Default)]
pub(super) struct Switch {
    to: Option<bool>,
    requested: bool,
    polled_looks: u8,
}

impl Pair {
    pub(super) fn is_switching(&self) -> bool {
        self.switch.to.is_some()
    }

    /// Starts to drain the queue, unless it has no vector, or is in this mode or switching already.
    #[cold]
    fn switch(&mut self, on: bool) {
        let is_so = self.link.interrupts.load(Ordering::Relaxed) == on;
        if self.link.vector.is_none() || is_so || self.is_switching() {
            return;
        }
        self.switch.to = Some(on);
        self.lanes.hungry += 1;
        self.go_on_switching();
    }

    #[cold]
    pub(super) fn go_on_switching(&mut self) {
        if let Some(on) = self.switch.to
            && self.sent == 0
            && self.live
            && !self.switch.requested
        {
            self.switch.requested = true;
            self.report(Request::Interrupts { on });
        }
    }

    /// Ends the switch, because the queue was recreated or is gone.
    pub(super) fn end_switching(&mut self) {
        if self.switch.to.take().is_some() {
            self.lanes.hungry -= 1;
        }
        self.switch.requested = false;
    }

    /// Counts one check of commands in flight. Starts the switch to polling after enough checks
    /// without a call of `arm`.
    pub(super) fn look_at_interrupts(&mut self) {
        // The control may have missed the request, so `go_on_switching` repeats it.
        self.switch.requested = false;
        if self.grant.vector.is_none() || !self.live {
            return;
        }
        self.switch.polled_looks += 1;
        if self.switch.polled_looks >= POLLED_LOOKS {
            self.switch.polled_looks = 0;
            self.switch(false);
        }
    }

    pub(crate) fn arm(&mut self, at: usize, now: Nanos) -> Idle {
        self.switch.polled_looks = 0;
        // Clear the bell before checking the phase, so that a later ring is not lost.
        self.link.clear_bell();
        let lane = self.lanes.get(at);
        if !lane.ready.is_empty() {
            return Idle::Busy;
        }
        if lane.inflight == 0 {
            return Idle::Quiet;
        }
        if self.link.phase.word() != self.word {
            return Idle::Busy;
        }
        if !self.live {
            self.acknowledge();
            return Idle::Until(now + LOOK);
        }
        if !self.tail.is_rung() {
            return Idle::Busy;
        }
        if self.is_switching() {
            if !self.switch.requested {
                return Idle::Busy;
            }
            self.acknowledge();
            return Idle::Until(now + LOOK);
        }
        if self.lanes.hungry > 0 || !self.again.is_empty() {
            return Idle::Until(now + LOOK_SOON);
        }
        if self.grant.vector.is_none() {
            self.switch(true);
            return Idle::Busy;
        }
        // Some controllers send no further interrupt before the completions of the last one are
        // acknowledged.
        if !self.head.is_rung() {
            self.ring_doorbells(true);
        }
        self.acknowledge();
        Idle::Until((now + LOOK).min(self.next_scan.max(now + LOOK_SOON)))
    }

    /// Clears interrupts that fired before.
    fn acknowledge(&self) {
        if let Some(vector) = self.link.vector {
            self.link.grant().function.acknowledge(vector);
        }
    }

    /// The descriptor of the current vector.
    pub(crate) fn vector_fd(&self) -> Option<Arc<OwnedFd>> {
        let grant = self.link.grant();
        self.link
            .vector
            .and_then(|vector| grant.function.vector_fd(vector))
    }
}
