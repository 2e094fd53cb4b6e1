//! Sleeping: interrupts, which cost a microsecond each, are on only while the core wants them.
//!
//! ```text
//! polled ── arm, with I/O in flight ─▶ drains ── empty ─▶ asked ── recreated ─▶ interrupts
//! interrupts ── many looks without arm ─▶ drains ─ …                         ─▶ polled
//! ```
//!
//! While the queue pair drains, submitted I/O waits and the core does not sleep. Once the queue is
//! empty no interrupt is needed, and the control's bell wakes the core. So the switch neither
//! interrupts a command nor sends one twice.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use nacre_reactor::Idle;
use nacre_reactor::Nanos;

use super::{LOOK, LOOK_SOON, Pair};
use crate::link::Want;

/// This many consecutive looks at commands in flight, without a wish to sleep in between, mean that
/// the core polls.
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

    /// Lets the queue run empty, if it can be made otherwise at all.
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
            self.report(Want::Interrupts { on });
        }
    }

    /// The queue was recreated, for this or another reason, or is gone.
    pub(super) fn end_switching(&mut self) {
        if self.switch.to.take().is_some() {
            self.lanes.hungry -= 1;
        }
        self.switch.requested = false;
    }

    /// Counts one look at commands in flight. Starts the switch to polling when enough looks
    /// found no wish to sleep.
    pub(super) fn look_at_interrupts(&mut self) {
        // It may not have been heard.
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

    pub fn arm(&mut self, at: usize, now: Nanos) -> Idle {
        self.switch.polled_looks = 0;
        // Before the look at the phase: later bells are heard.
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
        // Some controllers send no further interrupt before they know that the completions of the
        // last one were read.
        if !self.head.is_rung() {
            self.ring_doorbells(true);
        }
        self.acknowledge();
        Idle::Until((now + LOOK).min(self.next_scan.max(now + LOOK_SOON)))
    }

    /// What fired before is no reason to wake up.
    fn acknowledge(&self) {
        if let Some(vector) = self.link.vector {
            self.link.grant().function.acknowledge(vector);
        }
    }

    /// The descriptor of its vector, as of now.
    pub fn vector_fd(&self) -> Option<RawFd> {
        let grant = self.link.grant();
        self.link
            .vector
            .and_then(|vector| grant.function.vector_fd(vector))
    }
}
