//! Makes an emulated compare-and-write atomic against every write of every core. Writes pay nothing
//! for it while no host uses compare-and-write.
//!
//! ```text
//!             a compare-and-write arrives          every core's untracked count was seen at 0
//!   Normal ───────────────────────────> Draining ──────────────────────────────> Tracked
//!      ^                                                                            │
//!      └──────────────── none for QUIET, none in flight ────────────────────────────┘
//! ```
//!
//! - **Normal**: a core publishes its number of writes in flight in a cache line of its own and
//!   reads the mode. Its first write after idleness costs a fence (Dekker's argument: either the
//!   writer sees the new mode, or the core that set the mode sees the count). Later writes need no
//!   fence: a count above 0 already blocks every compare-and-write.
//! - **Draining, Tracked**: a write enters its range in a table under a lock, in order of arrival.
//!   It waits, polled, while an earlier overlapping entry exists and one of the two is a
//!   compare-and-write. The order of arrival prevents starvation. A compare-and-write also waits
//!   until the earlier untracked writes are over.
//! - After the return to Normal, tracked writes stay in the table until they complete, and the next
//!   compare-and-write waits for them.
//!
//! Reads take no part: a compare-and-write is atomic towards writers, as NVMe requires.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};
use std::time::Duration;

use nacre_reactor::Nanos;
use parking_lot::Mutex;

/// Time after the last compare-and-write until writes go untracked again. Clustered file systems
/// use compare-and-write in bursts (a heartbeat every second or two). VMware's renew a lock every 3
/// s.
const QUIET: Duration = Duration::from_secs(4);
/// Interval at which a queue checks for the end of `QUIET`. The check takes the lock.
const LOOK_EVERY: Duration = Duration::from_millis(500);

const NORMAL: u8 = 0;
const DRAINING: u8 = 1;
const TRACKED: u8 = 2;

/// One gate per device, shared by the device's queues on all cores.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    mode: Padded<AtomicU8>,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    entries: Vec<Entry>,
    next: u64,
    counts: Vec<Arc<Padded<AtomicU64>>>,
    /// When the last compare-and-write was submitted or completed.
    last: Nanos,
}

#[derive(Debug)]
struct Entry {
    /// Increases with each arrival.
    id: u64,
    first: u64,
    /// First block after the range.
    end: u64,
    /// True for a compare-and-write.
    exclusive: bool,
}

impl Entry {
    fn waits_for(&self, earlier: &Self) -> bool {
        earlier.id < self.id
            && (self.exclusive || earlier.exclusive)
            && self.first < earlier.end
            && earlier.first < self.end
    }
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct Padded<T>(T);

/// An entry of the table. Must be returned through [`GateQueue::leave`].
#[derive(Debug)]
#[must_use]
pub(crate) struct Ticket {
    id: u64,
}

/// One queue's part of the gate.
#[derive(Debug)]
pub(crate) struct GateQueue {
    gate: Arc<Gate>,
    mine: Arc<Padded<AtomicU64>>,
    /// The value stored in `mine`.
    untracked: u64,
    /// Ids of tickets in use. Dropping the queue with I/O in flight returns them.
    tickets: Vec<u64>,
    next_look: Nanos,
}

impl Gate {
    pub(crate) fn join(self: &Arc<Self>) -> GateQueue {
        let mine = Arc::new(Padded(AtomicU64::new(0)));
        self.table.lock().counts.push(Arc::clone(&mine));
        GateQueue {
            gate: Arc::clone(self),
            mine,
            untracked: 0,
            tickets: Vec::with_capacity(16),
            next_look: Nanos::ZERO,
        }
    }
}

impl GateQueue {
    /// Begins a write without a table entry. Returns false when the write needs a ticket.
    #[inline]
    pub(crate) fn begin_untracked(&mut self) -> bool {
        self.untracked += 1;
        self.mine.0.store(self.untracked, Ordering::Relaxed);
        if self.untracked == 1 {
            // Pairs with the fence in `enter`: either `enter` sees the store above, or this load
            // sees the mode.
            fence(Ordering::SeqCst);
        }
        if self.gate.mode.0.load(Ordering::Relaxed) == NORMAL {
            return true;
        }
        self.end_untracked();
        false
    }

    #[inline]
    pub(crate) fn end_untracked(&mut self) {
        self.untracked -= 1;
        // Release: a core that reads 0 also sees the write's effect on the device's memory.
        self.mine.0.store(self.untracked, Ordering::Release);
    }

    /// Adds an entry to the table for a write, or for a compare-and-write (`exclusive`). The I/O
    /// may begin once [`GateQueue::granted`] returns true.
    pub(crate) fn enter(&mut self, lba: u64, blocks: u64, exclusive: bool, now: Nanos) -> Ticket {
        let mut table = self.gate.table.lock();
        if exclusive {
            table.last = table.last.max(now);
            if self.gate.mode.0.load(Ordering::Relaxed) == NORMAL {
                self.gate.mode.0.store(DRAINING, Ordering::Relaxed);
                fence(Ordering::SeqCst);
            }
        }
        let id = table.next;
        table.next += 1;
        table.entries.push(Entry {
            id,
            first: lba,
            end: lba.saturating_add(blocks),
            exclusive,
        });
        self.tickets.push(id);
        Ticket { id }
    }

    pub(crate) fn granted(&self, ticket: &Ticket) -> bool {
        let table = self.gate.table.lock();
        let Some(entry) = table.entries.iter().find(|entry| entry.id == ticket.id) else {
            return false;
        };
        if table.entries.iter().any(|earlier| entry.waits_for(earlier)) {
            return false;
        }
        if !entry.exclusive || self.gate.mode.0.load(Ordering::Relaxed) == TRACKED {
            return true;
        }
        let drained = table
            .counts
            .iter()
            .all(|count| count.0.load(Ordering::Acquire) == 0);
        if drained {
            self.gate.mode.0.store(TRACKED, Ordering::Relaxed);
        }
        drained
    }

    pub(crate) fn leave(&mut self, ticket: Ticket, now: Nanos) {
        self.tickets.retain(|id| *id != ticket.id);
        let mut table = self.gate.table.lock();
        if let Some(at) = table.entries.iter().position(|entry| entry.id == ticket.id)
            && table.entries.swap_remove(at).exclusive
        {
            table.last = table.last.max(now);
        }
    }

    /// Called once per turn: returns to Normal after `QUIET` without a compare-and-write.
    #[inline]
    pub(crate) fn turn(&mut self, now: Nanos) {
        if self.gate.mode.0.load(Ordering::Relaxed) != NORMAL && now >= self.next_look {
            self.next_look = now + LOOK_EVERY;
            self.calm(now);
        }
    }

    #[cold]
    fn calm(&self, now: Nanos) {
        let table = self.gate.table.lock();
        let busy = table.entries.iter().any(|entry| entry.exclusive);
        if !busy && now.since(table.last) >= QUIET {
            self.gate.mode.0.store(NORMAL, Ordering::Relaxed);
        }
    }

    #[cfg(test)]
    pub(crate) fn is_normal(&self) -> bool {
        self.gate.mode.0.load(Ordering::Relaxed) == NORMAL
    }
}

/// A closed queue has no I/O, so its count and its tickets are released.
impl Drop for GateQueue {
    fn drop(&mut self) {
        self.mine.0.store(0, Ordering::Release);
        let mut table = self.gate.table.lock();
        table.counts.retain(|count| !Arc::ptr_eq(count, &self.mine));
        table
            .entries
            .retain(|entry| !self.tickets.contains(&entry.id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Nanos {
        Nanos::ZERO + Duration::from_secs(seconds)
    }

    /// A compare-and-write waits for untracked writes of all queues. Later writes wait for it only
    /// where they overlap. After a quiet time writers go untracked again.
    #[test]
    fn tracking_starts_and_ends() {
        let gate = Arc::new(Gate::default());
        let (mut a, mut b) = (gate.join(), gate.join());
        assert!(a.begin_untracked() && b.begin_untracked());
        let swap = a.enter(10, 2, true, at(1));
        assert!(!a.granted(&swap));
        a.end_untracked();
        assert!(!a.granted(&swap), "the other core still writes");
        assert!(!b.begin_untracked(), "new writes are tracked");
        b.end_untracked();
        assert!(a.granted(&swap));

        let beside = b.enter(12, 4, false, at(1));
        let over = b.enter(11, 4, false, at(1));
        let behind = a.enter(14, 1, true, at(1));
        assert!(b.granted(&beside) && !b.granted(&over) && !a.granted(&behind));
        a.leave(swap, at(1));
        assert!(
            b.granted(&over) && !a.granted(&behind),
            "in order of arrival"
        );
        b.leave(over, at(2));
        assert!(!a.granted(&behind));
        b.leave(beside, at(2));
        assert!(a.granted(&behind));
        a.turn(at(100));
        assert!(!a.is_normal(), "a compare-and-write is in flight");
        a.leave(behind, at(101));
        a.turn(at(102));
        assert!(!a.is_normal());
        b.turn(at(106));
        assert!(b.is_normal() && b.begin_untracked());
        b.end_untracked();
    }

    /// Closing a queue releases its count and its tickets.
    #[test]
    fn closing_releases() {
        let gate = Arc::new(Gate::default());
        let (mut a, mut b) = (gate.join(), gate.join());
        assert!(b.begin_untracked());
        let swap = a.enter(0, 8, true, at(0));
        let _lost = b.enter(0, 8, true, at(0));
        let last = a.enter(0, 8, true, at(0));
        assert!(!a.granted(&swap));
        drop(b);
        assert!(a.granted(&swap));
        a.leave(swap, at(0));
        assert!(a.granted(&last));
        a.leave(last, at(0));
    }

    /// Two threads: an untracked write and a granted compare-and-write never overlap in time.
    #[test]
    fn no_overlap_between_threads() {
        let gate = Arc::new(Gate::default());
        let inside = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut queue = gate.join();
                for _ in 0..20_000 {
                    if queue.begin_untracked() {
                        assert_ne!(inside.fetch_add(1, Ordering::SeqCst), 1000, "beside a swap");
                        inside.fetch_sub(1, Ordering::SeqCst);
                        queue.end_untracked();
                    }
                }
            });
            scope.spawn(|| {
                let mut queue = gate.join();
                for round in 0..2_000 {
                    // A long time between rounds makes the mode change in both directions.
                    let now = at(round * 10);
                    let swap = queue.enter(0, 1, true, now);
                    while !queue.granted(&swap) {
                        std::thread::yield_now();
                    }
                    assert_eq!(
                        inside.fetch_add(1000, Ordering::SeqCst),
                        0,
                        "beside a write"
                    );
                    inside.fetch_sub(1000, Ordering::SeqCst);
                    queue.leave(swap, now);
                    queue.turn(now + Duration::from_secs(9));
                }
            });
        });
    }
}
