//! Tracks the written parts of lazily allocated memory.
//!
//! Reading untouched memory maps the kernel's shared huge zero page. A later write splits it into 4
//! KiB pages, one fault each, and the range never becomes a huge page again. Disks are read before
//! they are written, by programs that look for a file system. So the first write to each [`UNIT`]
//! allocates a huge page of its own. Parts that were never written are known to be zero.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::pages::MIB;

/// The unit of allocation: a transparent huge page.
pub(crate) const UNIT: usize = 2 * MIB as usize;

/// The 2 MiB units of an untouched mapping that were written. The first write to a unit allocates a
/// huge page for it.
#[derive(Debug)]
pub(crate) struct WrittenUnits {
    /// The written units. A flag is never cleared, because another core may write to a range while
    /// a host discards it.
    units: Box<[AtomicBool]>,
    /// Locked while a unit is allocated, so that no other core writes to it meanwhile.
    taking: Mutex<()>,
}

impl WrittenUnits {
    /// `len` bytes without a written unit.
    pub(crate) fn none(len: usize) -> Self {
        Self {
            units: (0..len.div_ceil(UNIT))
                .map(|_| AtomicBool::new(false))
                .collect(),
            taking: Mutex::new(()),
        }
    }

    /// Calls `take` with the bytes of each unit of `range` that was never written. They are zero,
    /// and no other core writes to them before `take` returns.
    #[inline]
    pub(crate) fn before_write(&self, range: Range<usize>, take: impl Fn(Range<usize>)) {
        for unit in units(&range) {
            if !self.is_taken(unit) {
                self.take(unit, &take);
            }
        }
    }

    /// The parts of `range` that may not be zero.
    pub(crate) fn written(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        units(&range)
            .filter(|&unit| self.is_taken(unit))
            .map(move |unit| (unit * UNIT).max(range.start)..((unit + 1) * UNIT).min(range.end))
    }

    #[inline]
    fn is_taken(&self, unit: usize) -> bool {
        self.units[unit].load(Ordering::Acquire)
    }

    #[cold]
    #[inline(never)]
    fn take(&self, unit: usize, take: &dyn Fn(Range<usize>)) {
        let _alone = self.taking.lock();
        if !self.is_taken(unit) {
            take(unit * UNIT..(unit + 1) * UNIT);
            self.units[unit].store(true, Ordering::Release);
        }
    }
}

#[inline]
fn units(range: &Range<usize>) -> Range<usize> {
    if range.is_empty() {
        0..0
    } else {
        range.start / UNIT..range.end.div_ceil(UNIT)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Goal: each unit is allocated once, before the first write that touches it.
    #[test]
    fn units_are_taken_once() {
        let taken = WrittenUnits::none(5 * UNIT);
        let write = |range: Range<usize>| {
            let calls = RefCell::new(Vec::new());
            taken.before_write(range, |unit| calls.borrow_mut().push(unit));
            calls.into_inner()
        };
        assert_eq!(write(10..10), []);
        assert_eq!(write(UNIT - 1..UNIT), vec![0..UNIT]);
        assert_eq!(write(0..UNIT), []);
        assert_eq!(write(UNIT - 1..UNIT + 1), vec![UNIT..2 * UNIT]);
        assert_eq!(
            write(3 * UNIT..5 * UNIT),
            [3 * UNIT..4 * UNIT, 4 * UNIT..5 * UNIT]
        );

        let written = |range| taken.written(range).collect::<Vec<_>>();
        assert_eq!(written(2 * UNIT..3 * UNIT), []);
        assert_eq!(
            written(UNIT + 7..4 * UNIT + 9),
            [
                UNIT + 7..2 * UNIT,
                3 * UNIT..4 * UNIT,
                4 * UNIT..4 * UNIT + 9
            ]
        );
        assert_eq!(written(7..7), []);
    }
}
