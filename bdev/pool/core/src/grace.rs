//! Grace periods: a period ends when every I/O on data that was in flight at its beginning has
//! ended.
//!
//! The pool requests one at a time; the caller reports its end when each core has completed its
//! earlier I/O. Requests during a period wait for the next one.

#[derive(Debug, Default)]
pub(crate) struct Grace {
    begun: u64,
    ended: u64,
    needed: u64,
}

impl Grace {
    /// The number of a period that begins after now.
    pub(crate) fn request(&mut self) -> u64 {
        self.needed = self.begun + 1;
        self.needed
    }

    /// The number of the period to begin now.
    pub(crate) fn begin(&mut self) -> Option<u64> {
        if self.begun > self.ended || self.needed <= self.begun {
            return None;
        }
        self.begun += 1;
        Some(self.begun)
    }

    pub(crate) fn end(&mut self, epoch: u64) {
        debug_assert_eq!(epoch, self.begun);
        self.ended = epoch;
    }

    pub(crate) fn ended(&self) -> u64 {
        self.ended
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.ended == self.begun && self.needed <= self.begun
    }
}
