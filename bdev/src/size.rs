//! The size of a device that can shrink, and the smallest size that it has had.
//!
//! A file that was truncated and extended again reads as zeroes beyond the smallest size. The
//! current size does not show that. So the smallest size is recorded until the device's user no
//! longer needs the data beyond it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Sizes in blocks, readable from any thread.
#[derive(Debug)]
pub struct Size {
    blocks: AtomicU64,
    least: AtomicU64,
    cuts: AtomicU64,
}

impl Size {
    pub fn new(blocks: u64) -> Self {
        Self {
            blocks: AtomicU64::new(blocks),
            least: AtomicU64::new(blocks),
            cuts: AtomicU64::new(0),
        }
    }

    #[inline]
    pub fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Acquire)
    }

    /// Adopts a size. Returns the old one.
    pub fn set(&self, blocks: u64) -> u64 {
        // First: an I/O that finds the new size finds the loss counted.
        self.least.fetch_min(blocks, Ordering::AcqRel);
        if blocks < self.blocks() {
            self.cuts.fetch_add(1, Ordering::AcqRel);
        }
        self.blocks.swap(blocks, Ordering::AcqRel)
    }

    /// Records an observed size, which counts for the smallest size even if it is not adopted.
    pub fn note(&self, blocks: u64) {
        if blocks < self.least.fetch_min(blocks, Ordering::AcqRel) {
            self.cuts.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// The smallest number of blocks since the creation, or since [`Size::forget_least`].
    pub fn least(&self) -> u64 {
        self.least.load(Ordering::Acquire)
    }

    /// Resets [`Size::least`] to the present size: the user no longer needs data beyond the
    /// smallest. Returns the old value.
    pub fn forget_least(&self) -> u64 {
        let least = self.least.swap(self.blocks(), Ordering::AcqRel);
        // It may have become smaller between the two.
        self.least.fetch_min(self.blocks(), Ordering::AcqRel);
        least
    }

    /// Number of decreases, adopted by [`Size::set`] or only observed by [`Size::note`].
    pub fn cuts(&self) -> u64 {
        self.cuts.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::Size;

    /// A device that was smaller for a while says so until that is of no interest.
    #[test]
    fn keeps_the_minimum() {
        let size = Size::new(100);
        assert_eq!((size.blocks(), size.least(), size.cuts()), (100, 100, 0));
        assert_eq!(size.set(120), 100);
        assert_eq!(size.least(), 100, "growing is no loss");
        assert_eq!(size.set(40), 120);
        assert_eq!(size.set(120), 40);
        assert_eq!((size.blocks(), size.least(), size.cuts()), (120, 40, 1));
        assert_eq!(size.forget_least(), 40);
        assert_eq!((size.least(), size.cuts()), (120, 1));
        size.note(60);
        assert_eq!((size.blocks(), size.least(), size.cuts()), (120, 60, 2));
    }
}
