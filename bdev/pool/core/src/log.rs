//! The log of a pool's metadata changes: a ring of 4 KiB pages with records. This module fills the
//! pages and counts them; the caller writes them.
//!
//! Records go into the current page; [`Log::emit`] closes it. Page writes complete in any order; a
//! record is *logged* when the writes of its page and of every page before it are complete. Pages
//! have sequence numbers that only grow; a page's position in the ring is its number modulo the
//! ring's size.
//!
//! ```text
//!   tail                          start of the last root       complete        next
//!    │ for a recovery that falls back │ for every recovery        │ in flight    │
//!    │ to the root before the last    │                           │              │
//! ```
//!
//! A root (checkpoint) has the state of all records before its start, so older pages are reused.

use std::collections::BTreeMap;

use crate::format::Page;
use crate::format::log_page::{LogHead, PageBuilder};
use crate::format::record::Record;
use crate::geometry::Geometry;
use crate::ids::Lsn;
use crate::mutation::Mutation;

#[derive(Debug)]
pub(crate) struct Log {
    /// Identifies the pool in each page.
    tag: u64,
    /// How often the pool was imported: distinguishes pages that an earlier import wrote.
    imports: u64,
    /// Pages of the ring.
    pages: u64,
    /// Most pages in flight.
    window: usize,
    /// First page that a recovery may need.
    tail: u64,
    next_sequence: u64,
    /// Checksum of the page before the current one; each page has it.
    previous: u64,
    next_lsn: Lsn,
    page: PageBuilder,
    /// First record of the current page.
    page_first: Lsn,
    in_flight: BTreeMap<u64, PageInFlight>,
    /// The last record that is logged.
    complete: Lsn,
    /// All pages before this one are complete.
    complete_sequence: u64,
}

#[derive(Debug)]
struct PageInFlight {
    last: Lsn,
    is_done: bool,
}

/// The point at which a log begins or continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LogPosition {
    /// How often the pool was imported.
    pub imports: u64,
    /// Number of the next page.
    pub sequence: u64,
    /// Checksum of the page before it.
    pub previous: u64,
    /// LSN of the next record.
    pub next: Lsn,
}

impl Log {
    /// A log that continues at `at`. `tag` identifies the pool; pages from `tail` on must not be
    /// overwritten; at most `window` pages are in flight.
    pub(crate) fn new(
        tag: u64,
        geometry: &Geometry,
        at: LogPosition,
        tail: u64,
        window: usize,
    ) -> Self {
        Self {
            tag,
            imports: at.imports,
            pages: geometry.log_pages,
            window,
            tail,
            next_sequence: at.sequence,
            previous: at.previous,
            next_lsn: at.next,
            page: PageBuilder::default(),
            page_first: at.next,
            in_flight: BTreeMap::new(),
            complete: at.next - 1,
            complete_sequence: at.sequence,
        }
    }

    /// The point at which a recovery would continue. The current page must be empty.
    pub(crate) fn position(&self) -> LogPosition {
        debug_assert_eq!(self.page.records(), 0, "the page must be closed");
        LogPosition {
            imports: self.imports,
            sequence: self.next_sequence,
            previous: self.previous,
            next: self.next_lsn,
        }
    }

    /// The last record that is logged.
    pub(crate) fn complete(&self) -> Lsn {
        if Mutation::ForgetPrefix.is_active() {
            let done = self.in_flight.values().filter(|page| page.is_done);
            done.map(|page| page.last).fold(self.complete, Lsn::max)
        } else {
            self.complete
        }
    }

    /// Number of the first page whose write is not complete.
    pub(crate) fn complete_sequence(&self) -> u64 {
        self.complete_sequence
    }

    pub(crate) fn next_lsn(&self) -> Lsn {
        self.next_lsn
    }

    pub(crate) fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    /// Number of pages that a recovery may need.
    pub(crate) fn live(&self) -> u64 {
        self.next_sequence - self.tail
    }

    /// True while less than half of the ring is in use. Requests of hosts and deletions wait until
    /// it is true; the other half is for records that must not wait.
    pub(crate) fn has_room(&self) -> bool {
        self.live() < self.pages / 2
    }

    /// Allows pages before `tail` to be overwritten.
    pub(crate) fn set_tail(&mut self, tail: u64) {
        self.tail = tail;
    }

    /// True when the current page has room for `record`.
    pub(crate) fn fits(&self, record: &Record) -> bool {
        self.page.has_room(record)
    }

    /// Appends a record, which must fit, to the current page. Returns its LSN.
    pub(crate) fn append(&mut self, record: &Record) -> Lsn {
        self.page.push(record);
        self.next_lsn += 1;
        self.next_lsn - 1
    }

    /// True when a page can be written now: fewer than `window` are in flight, and the ring has
    /// room.
    pub(crate) fn may_emit(&self) -> bool {
        self.in_flight.len() < self.window && self.live() + 1 < self.pages
    }

    /// Closes the current page, and returns its number and contents for the caller to write. `None`
    /// if it has no records and `even_empty` is false. Call it only if [`Log::may_emit`] is true.
    /// `settled` is the LSN up to which a recovery need not verify data.
    pub(crate) fn emit(&mut self, settled: Lsn, even_empty: bool) -> Option<(u64, Box<Page>)> {
        if self.page.records() == 0 && !even_empty {
            return None;
        }
        let head = LogHead {
            tag: self.tag,
            imports: self.imports,
            sequence: self.next_sequence,
            first: self.page_first,
            settled: settled.min(self.page_first - 1),
            previous: self.previous,
        };
        let (page, sum) = std::mem::take(&mut self.page).finish(&head);
        let sequence = self.next_sequence;
        let in_flight = PageInFlight {
            last: self.next_lsn - 1,
            is_done: false,
        };
        self.in_flight.insert(sequence, in_flight);
        self.previous = sum;
        self.next_sequence += 1;
        self.page_first = self.next_lsn;
        Some((sequence, page))
    }

    /// The write of page `sequence` is complete.
    pub(crate) fn written(&mut self, sequence: u64) {
        if let Some(page) = self.in_flight.get_mut(&sequence) {
            page.is_done = true;
        }
        while let Some(first) = self.in_flight.first_entry()
            && first.get().is_done
        {
            self.complete_sequence = first.key() + 1;
            self.complete = first.remove().last;
        }
    }
}
