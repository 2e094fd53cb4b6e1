//! Reading the log from a root's position to its end.
//!
//! The first page that is not the next one is the end: pages behind it were in flight and never
//! acknowledged. The whole ring is read, because three findings behind the end are damage:
//!
//! - a page says that a record of the lost page is settled: the page was complete once;
//! - the lost page is unreadable, and the log went on behind it: a crash leaves no bad sector;
//! - a page is of a later import, or of a later lap: the newest root is lost.

use super::{Import, ImportError, Phase, ReadFor};
use crate::disks::Location;
use crate::format::Page;
use crate::format::log_page::LogPage;
use crate::format::record::Record;
use crate::format::superblock::Superblock;
use crate::geometry::{Geometry, PAGE};
use crate::ids::Lsn;
use crate::interface::IoFailed;
use crate::log::LogPosition;
use crate::mutation::Mutation;

/// Most pages that one read asks for.
const READ_PAGES: u64 = 64;

#[derive(Debug)]
pub(super) struct LogReader {
    geometry: Geometry,
    tag: u64,
    imports: u64,
    /// The next page to read.
    next: u64,
    /// Pages from here on are not read: the ring is full.
    limit: u64,
    expected: Expected,
    /// The first missing page.
    gap: Option<Gap>,
    /// Pages before this one are read one by one: a read of several failed.
    single_until: u64,
    records: Vec<(Lsn, Record)>,
    settled: Lsn,
    error: Option<ImportError>,
}

/// A page that is not the next one of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gap {
    /// It has other contents: the log ends here, or the page was lost.
    Foreign,
    /// The disk cannot read it.
    Unreadable,
}

#[derive(Debug, Clone, Copy)]
struct Expected {
    sequence: u64,
    first: Lsn,
    previous: u64,
}

/// The log after a root.
#[derive(Debug)]
pub(super) struct ReadLog {
    pub records: Vec<(Lsn, Record)>,
    pub settled: Lsn,
    /// Where the log goes on.
    pub end: LogPosition,
}

impl LogReader {
    pub(super) fn new(root: &Superblock) -> Self {
        Self {
            geometry: root.geometry,
            tag: root.tag(),
            imports: root.imports,
            next: root.log_sequence,
            limit: root.log_sequence + root.geometry.log_pages,
            expected: Expected {
                sequence: root.log_sequence,
                first: root.checkpoint + 1,
                previous: root.log_previous,
            },
            gap: None,
            single_until: 0,
            records: Vec::new(),
            settled: root.settled,
            error: None,
        }
    }

    /// Offset and pages of the next read. `None`: the ring is read.
    fn next_read(&self) -> Option<(u64, u64)> {
        let to_wrap = self.geometry.log_pages - self.next % self.geometry.log_pages;
        let most = if self.next < self.single_until {
            1
        } else {
            READ_PAGES
        };
        let pages = (self.limit - self.next).min(to_wrap).min(most);
        (pages > 0).then(|| (self.geometry.log_offset(self.next), pages))
    }

    /// Takes the next page of the ring. `None`: it is unreadable.
    fn take(&mut self, page: Option<&Page>) {
        let sequence = self.next;
        self.next += 1;
        let is_readable = page.is_some();
        let page = page.and_then(|page| LogPage::decode(page).ok());
        let page = page.filter(|page| page.head.tag == self.tag);
        let ignores = Mutation::IgnoreLaterImports.is_active();
        let is_newer = |page: &LogPage| {
            let found = (page.head.imports, page.head.sequence);
            found.0 > self.imports || (found.0 == self.imports && found.1 > sequence)
        };
        if page.as_ref().is_some_and(is_newer) && !ignores {
            return self.damaged();
        }
        let page =
            page.filter(|page| page.head.sequence == sequence && page.head.imports == self.imports);
        let expected = self.expected;
        match (page, self.gap) {
            (Some(page), None)
                if page.head.first == expected.first && page.head.previous == expected.previous =>
            {
                self.settled = self.settled.max(page.head.settled);
                self.expected = Expected {
                    sequence: sequence + 1,
                    first: page.last() + 1,
                    previous: page.sum,
                };
                let first = page.head.first;
                let records = page.records.into_iter().enumerate();
                self.records
                    .extend(records.map(|(at, record)| (first + at as u64, record)));
            }
            (_, None) if !is_readable => self.gap = Some(Gap::Unreadable),
            (page, gap) => {
                self.gap = Some(gap.unwrap_or(Gap::Foreign));
                let proves = |page: LogPage| {
                    page.head.settled >= expected.first || gap == Some(Gap::Unreadable)
                };
                if page.is_some_and(proves) {
                    self.damaged();
                }
            }
        }
    }

    fn damaged(&mut self) {
        self.error = Some(ImportError::LogDamaged {
            sequence: self.expected.sequence,
        });
    }
}

impl Import {
    pub(super) fn log_read(&mut self, pages: u64, result: Result<&[u8], IoFailed>) {
        let Phase::Log(reader) = &mut self.phase else {
            return;
        };
        match result {
            Ok(bytes) => bytes
                .chunks_exact(PAGE)
                .for_each(|page| reader.take(page.first_chunk())),
            // One unreadable sector fails the whole read: the pages are read one by one.
            Err(IoFailed) if pages > 1 => reader.single_until = reader.next + pages,
            Err(IoFailed) => reader.take(None),
        }
    }

    pub(super) fn next_log_read(&mut self) {
        let Phase::Log(reader) = &mut self.phase else {
            return;
        };
        if let Some(error) = reader.error.take() {
            return self.fail(error);
        }
        if let Some((offset, pages)) = reader.next_read() {
            let len = pages as usize * PAGE;
            let at = Location { disk: 0, offset };
            self.queue.push_back((ReadFor::Log { pages }, at, len));
            return;
        }
        let end = LogPosition {
            imports: reader.imports + 1,
            sequence: reader.expected.sequence,
            previous: reader.expected.previous,
            next: reader.expected.first,
        };
        // The mark may lie behind the end only if settled pages are lost.
        if reader.settled >= end.next {
            let sequence = end.sequence;
            return self.fail(ImportError::LogDamaged { sequence });
        }
        self.log = Some(ReadLog {
            records: std::mem::take(&mut reader.records),
            settled: reader.settled,
            end,
        });
        self.begin_flush();
    }
}
