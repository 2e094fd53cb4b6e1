//! The set of regions that one replica lacks. The control sets it, and lanes add regions of failed
//! writes. Lanes check it for each read.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

pub struct MissingRegions {
    words: Box<[AtomicU64]>,
    regions: u64,
    /// An upper bound of the number of bits, at any moment: a bit is counted before it is set, and
    /// until after it is cleared. Most replicas lack nothing, and then a read checks only this.
    most: AtomicU64,
}

impl MissingRegions {
    pub fn new(regions: u64) -> Self {
        let count = regions.div_ceil(64);
        Self {
            words: (0..count).map(|_| AtomicU64::new(0)).collect(),
            regions,
            most: AtomicU64::new(0),
        }
    }

    /// True when the replica certainly lacks nothing.
    #[inline]
    pub fn is_none(&self) -> bool {
        self.most.load(Ordering::SeqCst) == 0
    }

    #[inline]
    pub fn contains(&self, region: u64) -> bool {
        self.words[(region / 64) as usize].load(Ordering::SeqCst) >> (region % 64) & 1 == 1
    }

    #[inline]
    pub fn contains_all(&self, mut regions: Range<u64>) -> bool {
        regions.all(|region| self.contains(region))
    }

    #[inline]
    pub fn contains_any(&self, mut regions: Range<u64>) -> bool {
        regions.any(|region| self.contains(region))
    }

    pub fn insert(&self, region: u64) {
        let bit = 1 << (region % 64);
        self.change(region / 64, 1, |word| {
            word.fetch_or(bit, Ordering::SeqCst) & bit
        });
    }

    pub fn remove(&self, region: u64) {
        let bit = 1 << (region % 64);
        self.change(region / 64, 0, |word| {
            word.fetch_and(!bit, Ordering::SeqCst) & bit
        });
    }

    /// Makes the set consist of exactly the regions for which `needed` is true.
    pub fn assign(&self, needed: impl Fn(u64) -> bool) {
        for index in 0..self.words.len() as u64 {
            let first = index * 64;
            let bits = (first..self.regions.min(first + 64))
                .filter(|region| needed(*region))
                .fold(0, |bits: u64, region| bits | 1 << (region - first));
            let set = bits.count_ones();
            self.change(index, set, |word| word.swap(bits, Ordering::SeqCst));
        }
    }

    /// `change` sets `set` bits, and returns those that it cleared or that were set before.
    fn change(&self, word: u64, set: u32, change: impl FnOnce(&AtomicU64) -> u64) {
        self.most.fetch_add(u64::from(set), Ordering::SeqCst);
        let former = change(&self.words[word as usize]);
        let gone = u64::from(former.count_ones());
        self.most.fetch_sub(gone, Ordering::SeqCst);
    }

    /// The first missing region from `from` on.
    pub fn next(&self, from: u64) -> Option<u64> {
        let mut at = from;
        while at < self.regions {
            let bits = self.words[(at / 64) as usize].load(Ordering::SeqCst) >> (at % 64);
            if bits != 0 {
                return Some(at + u64::from(bits.trailing_zeros())).filter(|r| *r < self.regions);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }

    pub fn count(&self) -> u64 {
        let ones = |w: &AtomicU64| u64::from(w.load(Ordering::Relaxed).count_ones());
        self.words.iter().map(ones).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.is_none() || self.next(0).is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_of_regions() {
        let missing = MissingRegions::new(130);
        assert!(missing.is_empty());
        missing.assign(|region| region % 65 == 64);
        assert_eq!((missing.count(), missing.next(0)), (2, Some(64)));
        assert_eq!((missing.next(65), missing.next(130)), (Some(129), None));
        missing.insert(0);
        missing.insert(0);
        missing.remove(129);
        missing.remove(129);
        assert!(
            missing.contains(0) && missing.contains_any(60..65) && !missing.contains_all(63..65)
        );
        assert_eq!(missing.next(65), None);
        assert!(!missing.is_none());
        missing.assign(|_| false);
        assert!(missing.is_none() && missing.is_empty());
    }

    /// Several threads change it at once: a result of "lacks nothing" is correct, and in the end
    /// the count is exact.
    #[test]
    fn an_empty_set_is_exact_under_concurrency() {
        let missing = MissingRegions::new(200);
        std::thread::scope(|scope| {
            for mine in 0..3 {
                let missing = &missing;
                scope.spawn(move || {
                    for round in 0..20_000 {
                        // Its own and one that all of them set and clear.
                        let region = [mine, 100, 64 + mine][round % 3];
                        missing.insert(region);
                        assert!(region == 100 || !missing.is_none());
                        missing.remove(region);
                    }
                });
            }
        });
        assert!(missing.is_none());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..2_000).for_each(|round| missing.assign(|region| region % 7 == round % 7))
            });
            scope.spawn(|| (0..20_000).for_each(|round| missing.insert(round % 200)));
            scope.spawn(|| (0..20_000).for_each(|round| missing.remove(round % 200)));
        });
        missing.assign(|_| false);
        assert!(missing.is_none());
        missing.insert(7);
        assert!(!missing.is_none());
        missing.remove(7);
        assert!(missing.is_none());
    }
}
