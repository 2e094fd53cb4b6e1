//! The dirty-region log in memory: one atomic word per region. Lanes read it for each write; the
//! control writes it to the replicas.
//!
//! ```text
//!   clean ──enter()──▶ wanted ──log page on media──▶ DIRTY ──idle, flushed──▶ CLEARING ──▶ clean
//!                        ▲                             │ enter() counts writes in flight   │
//!                        └────────── enter() while clearing: wanted again ◀────────────────┘
//! ```
//!
//! A lane may write into a region only between an [`Regions::enter`] that returned
//! [`Entered::Inside`] and its [`Regions::leave`]. The control clears a bit only while no write is
//! inside, by a compare-and-swap that fails if one entered.

use std::sync::atomic::{AtomicU32, Ordering};

/// Writes in flight.
const COUNT: u32 = 0xffff;
/// The bit is on the media of every relevant replica.
const DIRTY: u32 = 1 << 16;
/// A lane waits for the bit.
const WANTED: u32 = 1 << 17;
/// Written to since the last clearing pass.
const TOUCHED: u32 = 1 << 18;

pub struct Regions {
    words: Box<[AtomicU32]>,
}

/// The result of a request for a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entered {
    /// The caller is inside the region: it writes, then leaves.
    Inside,
    /// The region is not yet dirty on the media. The caller is the first to want it, and notifies
    /// the control.
    First,
    /// The region is not yet dirty on the media; the control knows.
    Wait,
}

impl Regions {
    pub fn new(count: u64) -> Self {
        Self {
            words: (0..count).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    pub fn len(&self) -> u64 {
        self.words.len() as u64
    }

    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Enters `region` for a write, if the region is dirty on the media; otherwise marks it as
    /// wanted.
    #[inline]
    pub fn enter(&self, region: u64) -> Entered {
        let word = &self.words[region as usize];
        let mut now = word.load(Ordering::SeqCst);
        loop {
            let dirty = now & DIRTY != 0;
            debug_assert!(now & COUNT < COUNT, "too many writes in one region");
            let next = match dirty {
                true => (now | TOUCHED) + 1,
                false if now & WANTED != 0 => return Entered::Wait,
                false => now | WANTED,
            };
            match word.compare_exchange_weak(now, next, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) if dirty => return Entered::Inside,
                Ok(_) => return Entered::First,
                Err(changed) => now = changed,
            }
        }
    }

    /// Announces a later write in `region`. Returns true if the caller is the first to want the
    /// region, and notifies the control.
    pub fn want(&self, region: u64) -> bool {
        let want = |now| (now & (DIRTY | WANTED) == 0).then_some(now | WANTED);
        let word = &self.words[region as usize];
        word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, want)
            .is_ok()
    }

    /// Leaves `region` after a write that entered it, whether it was executed or not.
    #[inline]
    pub fn leave(&self, region: u64) {
        let before = self.words[region as usize].fetch_sub(1, Ordering::SeqCst);
        debug_assert!(before & COUNT > 0, "left a region that was not entered");
    }

    /// The bit is on the media now: waiting writes may proceed.
    pub fn set_dirty(&self, region: u64) {
        let word = &self.words[region as usize];
        word.fetch_or(DIRTY | TOUCHED, Ordering::SeqCst);
        word.fetch_and(!WANTED, Ordering::SeqCst);
    }

    pub fn is_dirty(&self, region: u64) -> bool {
        self.words[region as usize].load(Ordering::SeqCst) & DIRTY != 0
    }

    pub fn is_wanted(&self, region: u64) -> bool {
        self.words[region as usize].load(Ordering::SeqCst) & WANTED != 0
    }

    /// Writes in flight in `region`.
    pub fn inside(&self, region: u64) -> u32 {
        self.words[region as usize].load(Ordering::SeqCst) & COUNT
    }

    pub fn dirty_count(&self) -> u64 {
        let dirty = |w: &&AtomicU32| w.load(Ordering::Relaxed) & DIRTY != 0;
        self.words.iter().filter(dirty).count() as u64
    }

    /// Resets the regions of a volume that never served. Returns how many were in use: there must
    /// be none.
    pub fn clear_all(&self) -> u64 {
        let count = |word: &AtomicU32| u64::from(word.swap(0, Ordering::SeqCst) & COUNT);
        self.words.iter().map(count).sum()
    }

    /// First half of a clearing pass: forgets that the region was touched. Returns true for a
    /// candidate: dirty, empty and untouched since the previous pass.
    pub fn age(&self, region: u64) -> bool {
        let before = self.words[region as usize].fetch_and(!TOUCHED, Ordering::SeqCst);
        before & DIRTY != 0 && before & (TOUCHED | COUNT) == 0
    }

    /// Second half, after the replicas were flushed: clears the bit in memory, unless a write
    /// entered meanwhile. Later writes wait until the bit is durable again, so the caller may write
    /// the log page without it, and before any page with it.
    pub fn clear(&self, region: u64) -> bool {
        let word = &self.words[region as usize];
        word.compare_exchange(DIRTY, 0, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The whole cycle, with a lane that enters at every point.
    #[test]
    fn a_region_is_dirty_before_a_write_enters() {
        let regions = Regions::new(2);
        assert_eq!(regions.enter(1), Entered::First);
        assert_eq!(regions.enter(1), Entered::Wait);
        assert!(regions.is_wanted(1) && !regions.is_dirty(1) && regions.inside(1) == 0);
        regions.set_dirty(1);
        assert_eq!(regions.enter(1), Entered::Inside);
        assert_eq!((regions.inside(1), regions.dirty_count()), (1, 1));
        assert!(!regions.age(1), "a write is inside");
        assert!(!regions.clear(1), "a write is inside");
        regions.leave(1);
        assert!(regions.age(1), "no write since the pass before");
        assert_eq!(regions.enter(1), Entered::Inside);
        regions.leave(1);
        assert!(!regions.clear(1), "touched since it was a candidate");
        assert!(!regions.age(1));
        assert!(regions.age(1) && regions.clear(1));
        assert_eq!(regions.enter(1), Entered::First);
        assert!(regions.want(0) && !regions.want(0) && !regions.want(1));
        assert_eq!(regions.enter(0), Entered::Wait);
        regions.set_dirty(0);
        assert!(!regions.want(0) && !regions.is_wanted(0));
    }

    /// Lanes enter and leave while the control sets and clears: no write is inside a region that is
    /// not dirty on the media, in any order.
    #[test]
    fn many_threads() {
        use std::sync::atomic::{AtomicBool, AtomicU64};

        use parking_lot::Mutex;
        let regions = Regions::new(1);
        let (media, over) = (AtomicBool::new(false), AtomicBool::new(false));
        let (wanted, cleared) = (Mutex::new(0u32), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let lanes: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
                        let mut round = 0u32;
                        // On a busy machine it may take longer until a check finds no write inside.
                        while round < 4000
                            || cleared.load(Ordering::SeqCst) == 0
                                && std::time::Instant::now() < end
                        {
                            round += 1;
                            loop {
                                match regions.enter(0) {
                                    Entered::Inside => break,
                                    Entered::First => *wanted.lock() += 1,
                                    Entered::Wait => {}
                                }
                                std::thread::yield_now();
                            }
                            assert!(media.load(Ordering::SeqCst), "inside, and not dirty");
                            regions.leave(0);
                            if round.is_multiple_of(64) {
                                std::thread::sleep(std::time::Duration::from_micros(50));
                            }
                        }
                    })
                })
                .collect();
            scope.spawn(|| {
                while !over.load(Ordering::SeqCst) {
                    if std::mem::take(&mut *wanted.lock()) > 0 {
                        media.store(true, Ordering::SeqCst);
                        regions.set_dirty(0);
                    } else if regions.age(0) && regions.clear(0) {
                        // A new write waits: none can be inside while the bit is not on the media.
                        media.store(false, Ordering::SeqCst);
                        cleared.fetch_add(1, Ordering::SeqCst);
                    }
                    std::thread::yield_now();
                }
            });
            lanes
                .into_iter()
                .for_each(|lane| lane.join().expect("a lane"));
            over.store(true, Ordering::SeqCst);
        });
        assert_eq!(regions.inside(0), 0);
        assert!(cleared.load(Ordering::SeqCst) > 0, "it was never cleared");
    }
}
