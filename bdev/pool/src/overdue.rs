//! The time limit for reads of an external device, a block device outside of the pool.
//!
//! The limit is counted in ticks, eight per limit, as in a replicated volume's lane. So a read
//! costs no timer, and time during which the thread did not run does not count against the device.
//!
//! A read beyond the limit is *overdue*: its submitter gets [`nacre_bdev::Status::Gone`] at once.
//! The device keeps the buffers until it answers or its queue is closed.

use std::time::Duration;

use nacre_reactor::Nanos;

/// Time limit of a read. Twice the deadline of a replicated volume's I/O (8 s) and some: the device
/// may be such a volume. Shorter than the 30 s after which Linux resets a controller.
pub(crate) const LIMIT: Duration = if cfg!(test) {
    Duration::from_millis(800)
} else {
    Duration::from_secs(20)
};
/// Number of overdue reads of one queue at which further reads fail at once. Reads that are
/// in flight by then may become overdue, too, and the device holds their buffers as well.
pub(crate) const MOST: usize = 64;
/// Ticks per limit.
const TICKS: u32 = 8;

/// The tick of the present time. It advances while reads are in flight.
#[derive(Debug, Default)]
pub(crate) struct Ticks {
    now: u32,
    next: Option<Nanos>,
}

impl Ticks {
    /// The tick at which a read begins.
    pub(crate) fn now(&self) -> u32 {
        self.now
    }

    /// Returns true when a tick has passed: look for overdue reads. `has_reads`: some are in flight
    /// and not overdue.
    pub(crate) fn advance(&mut self, now: Nanos, has_reads: bool) -> bool {
        if !has_reads {
            self.next = None;
            return false;
        }
        let next = *self.next.get_or_insert(now + LIMIT / TICKS);
        if next > now {
            return false;
        }
        self.now = self.now.wrapping_add(1);
        self.next = Some(now + LIMIT / TICKS);
        true
    }

    /// True when a read that began at a tick is overdue: after the limit, and at most an eighth
    /// more.
    pub(crate) fn is_overdue(&self, begun: u32) -> bool {
        self.now.wrapping_sub(begun) > TICKS
    }

    /// The time of the next tick.
    pub(crate) fn due(&self) -> Option<Nanos> {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A read is overdue after the limit and before nine eighths of it. A pause of the thread
    /// counts as one tick. The number of ticks may wrap.
    #[test]
    fn ticks_count_the_time_that_the_thread_ran() {
        let mut ticks = Ticks {
            now: u32::MAX - 2,
            next: None,
        };
        let begun = ticks.now();
        let mut now = Nanos(5);
        assert!(!ticks.advance(now, true));
        let mut count = 0;
        while !ticks.is_overdue(begun) {
            now = now + LIMIT / 64;
            count += u32::from(ticks.advance(now, true));
        }
        let waited = now.since(Nanos(5));
        assert!(waited >= LIMIT && waited <= LIMIT * 9 / 8, "{waited:?}");
        assert_eq!(count, TICKS + 1);

        let begun = ticks.now();
        assert!(ticks.advance(now + LIMIT * 100, true));
        assert!(!ticks.is_overdue(begun));
        // No read is in flight: no tick is due.
        assert!(!ticks.advance(now + LIMIT * 200, false));
        assert_eq!(ticks.due(), None);
    }
}
