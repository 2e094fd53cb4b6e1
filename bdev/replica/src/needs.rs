//! The regions that one member lacks: set by the control, read by lanes.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

pub struct Needs {
    words: Box<[AtomicU64]>,
    regions: u64,
}

impl Needs {
    pub fn new(regions: u64) -> Needs {
        let count = regions.div_ceil(64);
        Needs {
            words: (0..count).map(|_| AtomicU64::new(0)).collect(),
            regions,
        }
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
        self.words[(region / 64) as usize].fetch_or(1 << (region % 64), Ordering::SeqCst);
    }

    pub fn remove(&self, region: u64) {
        self.words[(region / 64) as usize].fetch_and(!(1 << (region % 64)), Ordering::SeqCst);
    }

    /// Exactly the regions that `needed` says.
    pub fn assign(&self, needed: impl Fn(u64) -> bool) {
        for (index, word) in self.words.iter().enumerate() {
            let first = index as u64 * 64;
            let bits = (first..self.regions.min(first + 64))
                .filter(|region| needed(*region))
                .fold(0, |bits, region| bits | 1 << (region - first));
            word.store(bits, Ordering::SeqCst);
        }
    }

    /// The first needed region from `from` on.
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
        self.next(0).is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_of_regions() {
        let needs = Needs::new(130);
        assert!(needs.is_empty());
        needs.assign(|region| region % 65 == 64);
        assert_eq!((needs.count(), needs.next(0)), (2, Some(64)));
        assert_eq!((needs.next(65), needs.next(130)), (Some(129), None));
        needs.insert(0);
        needs.remove(129);
        assert!(needs.contains(0) && needs.contains_any(60..65) && !needs.contains_all(63..65));
        assert_eq!(needs.next(65), None);
    }
}
