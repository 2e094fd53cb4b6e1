//! Locks of stripes across cores, which exclude overlapping writes: one atomic word per stripe, in
//! a table of bounded size.
//!
//! A stripe is free, or belongs to one lane (with a count of its writes in it), or to the control,
//! which copies, compares or repairs there. No stripe has two owners, so overlapping writes of
//! different cores reach all replicas in one order, and nothing is copied while it is written.
//! Within a lane the lane itself orders overlapping writes.
//!
//! No call blocks: a lane or control that does not get a stripe marks it and tries again. A mark
//! keeps the stripe's owner from taking it once more, so that it becomes free; the control's mark
//! also keeps other lanes out. Stripes that share a word (the table is shorter than a large volume)
//! only wait for each other more often than necessary.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

/// Bytes of a stripe, log2.
pub const STRIPE_SHIFT: u32 = 16;
/// Most words in the table.
const TABLE: u64 = 1 << 16;

/// The control as an owner. Lanes have the lower numbers, from 1.
pub const CONTROL: Owner = Owner(0xff);

const COUNT: u32 = 0x003f_ffff;
const CONTROL_WANTS: u32 = 1 << 22;
const LANE_WANTS: u32 = 1 << 23;
const OWNER_SHIFT: u32 = 24;

/// The owner of a stripe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner(u8);

impl Owner {
    /// Lane `index`, below 250.
    pub fn lane(index: usize) -> Self {
        assert!(index < 250, "too many lanes");
        Self(index as u8 + 1)
    }

    fn bits(self) -> u32 {
        u32::from(self.0) << OWNER_SHIFT
    }
}

/// A range that was acquired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acquired {
    /// No part of it had an owner.
    Fresh,
    /// The owner itself already has a part of it: it must check for overlaps.
    Again,
    /// Another owner has a part, or waits for it. Nothing was taken.
    No,
}

pub struct Stripes {
    words: Box<[AtomicU32]>,
    mask: u64,
    /// log2 of the blocks of a stripe.
    shift: u32,
}

impl Stripes {
    pub fn new(blocks: u64, block_size: u32) -> Self {
        let shift = STRIPE_SHIFT - block_size.ilog2().min(STRIPE_SHIFT);
        let count = (blocks >> shift).clamp(512, TABLE).next_power_of_two();
        Self {
            words: (0..count).map(|_| AtomicU32::new(0)).collect(),
            mask: count - 1,
            shift,
        }
    }

    /// Most blocks of one acquisition.
    pub fn max_blocks(&self) -> u64 {
        (self.words.len() as u64 / 2) << self.shift
    }

    /// Splits a range into pieces of one stripe each.
    pub fn pieces(&self, lba: u64, blocks: u64) -> impl Iterator<Item = (u64, u64)> + use<> {
        let (shift, end) = (self.shift, lba + blocks);
        let mut at = lba;
        std::iter::from_fn(move || {
            let next = (((at >> shift) + 1) << shift).min(end);
            let piece = (at, next - at);
            (at < end).then(|| {
                at = next;
                piece
            })
        })
    }

    fn range(&self, lba: u64, blocks: u64) -> Range<u64> {
        lba >> self.shift..((lba + blocks.max(1) - 1) >> self.shift) + 1
    }

    fn word(&self, stripe: u64) -> &AtomicU32 {
        &self.words[(stripe & self.mask) as usize]
    }

    /// Takes all stripes of a range for `owner`, or none.
    pub fn acquire(&self, owner: Owner, lba: u64, blocks: u64) -> Acquired {
        let range = self.range(lba, blocks);
        let mut outcome = Acquired::Fresh;
        for stripe in range.clone() {
            match self.acquire_one(owner, stripe) {
                Acquired::Fresh => {}
                Acquired::Again => outcome = Acquired::Again,
                Acquired::No => {
                    for taken in range.start..stripe {
                        self.release_one(taken);
                    }
                    return Acquired::No;
                }
            }
        }
        outcome
    }

    pub fn release(&self, lba: u64, blocks: u64) {
        for stripe in self.range(lba, blocks) {
            self.release_one(stripe);
        }
    }

    /// Removes the control's marks from a range that it did not get and no longer wants.
    pub fn forget(&self, lba: u64, blocks: u64) {
        for stripe in self.range(lba, blocks) {
            self.word(stripe)
                .fetch_and(!CONTROL_WANTS, Ordering::SeqCst);
        }
    }

    /// Number of words of the table.
    pub fn words(&self) -> u64 {
        self.words.len() as u64
    }

    /// Takes for the control those of these words that have no owner, and removes them from the
    /// list. Marks the others.
    pub fn acquire_words(&self, left: &mut Vec<u64>) {
        left.retain(|word| self.acquire_one(CONTROL, *word) == Acquired::No);
    }

    /// Releases the control's words, which are all but those `left`, and removes its marks from
    /// those. `left` is in ascending order.
    pub fn release_words(&self, left: &[u64]) {
        let mut left = left.iter().peekable();
        for word in 0..self.words() {
            if left.next_if_eq(&&word).is_some() {
                self.word(word).fetch_and(!CONTROL_WANTS, Ordering::SeqCst);
            } else {
                self.release_one(word);
            }
        }
    }

    fn acquire_one(&self, owner: Owner, stripe: u64) -> Acquired {
        let word = self.word(stripe);
        let wants = match owner {
            CONTROL => CONTROL_WANTS,
            _ => LANE_WANTS,
        };
        let mut now = word.load(Ordering::SeqCst);
        loop {
            let free = now & COUNT == 0;
            let mine = !free && now >> OWNER_SHIFT == u32::from(owner.0);
            let allowed = match owner {
                CONTROL => free,
                _ if free => now & CONTROL_WANTS == 0,
                _ => mine && now & (CONTROL_WANTS | LANE_WANTS) == 0,
            };
            let (next, outcome) = match allowed {
                true if free => (
                    (now & !wants & (CONTROL_WANTS | LANE_WANTS)) | owner.bits() | 1,
                    Acquired::Fresh,
                ),
                true => (now + 1, Acquired::Again),
                // Another owner waits: only the lane's own count could let it in again.
                false if mine || now & wants != 0 => return Acquired::No,
                false => (now | wants, Acquired::No),
            };
            match word.compare_exchange_weak(now, next, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return outcome,
                Err(changed) => now = changed,
            }
        }
    }

    fn release_one(&self, stripe: u64) {
        let before = self.word(stripe).fetch_sub(1, Ordering::SeqCst);
        debug_assert!(before & COUNT > 0, "released a stripe without an owner");
    }

    /// True when all stripes are free; for tests and for the end.
    pub fn all_free(&self) -> bool {
        let free = |w: &AtomicU32| w.load(Ordering::SeqCst) & COUNT == 0;
        self.words.iter().all(free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_exclude_each_other_and_none_starves() {
        let stripes = Stripes::new(1 << 20, 512);
        let (a, b) = (Owner::lane(0), Owner::lane(1));
        assert_eq!(stripes.acquire(a, 0, 8), Acquired::Fresh);
        assert_eq!(stripes.acquire(a, 8, 8), Acquired::Again);
        assert_eq!(stripes.acquire(b, 16, 8), Acquired::No);
        assert_eq!(stripes.acquire(a, 24, 8), Acquired::No, "b waits");
        stripes.release(0, 8);
        stripes.release(8, 8);
        assert_eq!(stripes.acquire(b, 16, 8), Acquired::Fresh);
        assert_eq!(stripes.acquire(CONTROL, 0, 1024), Acquired::No);
        assert_eq!(stripes.acquire(b, 16, 8), Acquired::No, "the control waits");
        assert_eq!(stripes.acquire(a, 128, 8), Acquired::Fresh, "not there");
        stripes.release(16, 8);
        assert_eq!(stripes.acquire(a, 16, 8), Acquired::No, "still");
        assert_eq!(stripes.acquire(CONTROL, 0, 128), Acquired::Fresh);
        stripes.release(0, 128);
        stripes.release(128, 8);
        stripes.forget(0, 1024);
        assert!(stripes.all_free());
    }

    /// Lanes and the control on threads of their own: no two owners share a stripe, every owner
    /// gets in, and nothing remains.
    #[test]
    fn many_threads() {
        use nacre_random::Random;
        use std::sync::atomic::AtomicUsize;
        const PLACES: usize = 8;
        let stripes = Stripes::new(1 << 20, 4096);
        let inside: [AtomicUsize; PLACES] = Default::default();
        std::thread::scope(|scope| {
            for who in 0..4 {
                let (stripes, inside) = (&stripes, &inside);
                let owner = if who == 3 { CONTROL } else { Owner::lane(who) };
                scope.spawn(move || {
                    let mut random = Random::new(who as u64);
                    for _ in 0..3000 {
                        let first = random.index(PLACES);
                        let count = 1 + random.index((PLACES - first).min(3));
                        // Stripes of 16 blocks.
                        let (lba, blocks) = (first as u64 * 16, count as u64 * 16);
                        while stripes.acquire(owner, lba, blocks) == Acquired::No {
                            std::thread::yield_now();
                        }
                        for place in &inside[first..first + count] {
                            assert_eq!(place.swap(who + 1, Ordering::Relaxed), 0);
                        }
                        for place in &inside[first..first + count] {
                            assert_eq!(place.swap(0, Ordering::Relaxed), who + 1);
                        }
                        stripes.release(lba, blocks);
                    }
                });
            }
        });
        assert!(stripes.all_free());
    }

    /// A range across stripes is taken as a whole or not at all.
    #[test]
    fn all_or_nothing() {
        let stripes = Stripes::new(1 << 20, 4096);
        let (a, b) = (Owner::lane(0), Owner::lane(7));
        assert_eq!(stripes.acquire(a, 32, 1), Acquired::Fresh);
        assert_eq!(stripes.acquire(b, 0, 64), Acquired::No);
        stripes.release(32, 1);
        assert!(stripes.all_free());
        assert_eq!(stripes.acquire(b, 0, 64), Acquired::Fresh);
        stripes.release(0, 64);
        assert!(stripes.all_free());
    }
}
