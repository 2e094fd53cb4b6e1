//! The log: a ring of pages with records.
//!
//! Records go into the current page; [`Log::emit`] closes it. Pages complete in any order; a record
//! is *logged* when its page and every page before it are complete.
//!
//! ```text
//!   tail            last root's start            complete        next
//!    │ needed to fall back │ needed to recover      │ in flight    │
//! ```

use std::collections::BTreeMap;

use crate::format::Page;
use crate::format::log_page::{LogHead, PageBuilder};
use crate::format::record::Record;
use crate::geometry::Geometry;
use crate::ids::Lsn;
use crate::mutation::Mutation;

#[derive(Debug)]
pub(crate) struct Log {
    tag: u64,
    imports: u64,
    pages: u64,
    /// Most pages in flight.
    window: usize,
    /// First page that a recovery may need.
    tail: u64,
    next_sequence: u64,
    previous: u64,
    next_lsn: Lsn,
    page: PageBuilder,
    page_first: Lsn,
    in_flight: BTreeMap<u64, PageInFlight>,
    complete: Lsn,
    /// All pages before this one are complete.
    complete_sequence: u64,
}

#[derive(Debug)]
struct PageInFlight {
    last: Lsn,
    is_done: bool,
}

/// Where a log begins or goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LogPosition {
    pub imports: u64,
    pub sequence: u64,
    pub previous: u64,
    /// LSN of the next record.
    pub next: Lsn,
}

impl Log {
    /// `tail`: the first page that must not be overwritten.
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

    pub(crate) fn complete_sequence(&self) -> u64 {
        self.complete_sequence
    }

    pub(crate) fn next_lsn(&self) -> Lsn {
        self.next_lsn
    }

    pub(crate) fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    /// Pages that a recovery may need.
    pub(crate) fn live(&self) -> u64 {
        self.next_sequence - self.tail
    }

    /// True when there is room for a record that may wait: half of the ring is for the others.
    pub(crate) fn has_room(&self) -> bool {
        self.live() < self.pages / 2
    }

    pub(crate) fn set_tail(&mut self, tail: u64) {
        self.tail = tail;
    }

    /// True when the current page takes one more record.
    pub(crate) fn fits(&self, record: &Record) -> bool {
        self.page.has_room(record)
    }

    /// Appends a record that fits.
    pub(crate) fn append(&mut self, record: &Record) -> Lsn {
        self.page.push(record);
        self.next_lsn += 1;
        self.next_lsn - 1
    }

    /// True when a page can be written now.
    pub(crate) fn may_emit(&self) -> bool {
        self.in_flight.len() < self.window && self.live() + 1 < self.pages
    }

    /// Closes the current page, if it has records or `even_empty` is set. The caller has asked
    /// [`Log::may_emit`], and writes the page.
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

    /// A page is on the disk.
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
