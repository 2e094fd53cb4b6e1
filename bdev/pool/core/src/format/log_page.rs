//! A page of the log.
//!
//! | bytes | |
//! |---|---|
//! | 0..8 | tag of the pool |
//! | 8..16 | number of imports |
//! | 16..24 | sequence |
//! | 24..32 | LSN of the first record |
//! | 32..40 | settled LSN |
//! | 40..48 | checksum of the page before |
//! | 48..52 | bytes of records, number of records |
//! | 52..56 | zero |
//! | 56..64 | CRC-64/NVME of the page, with zero here |
//! | 64.. | records; zero after them |

use super::record::Record;
use super::{FormatError, Page, Reader, Writer, checksum_of_parts, is_zero, wrong};
use crate::geometry::PAGE;
use crate::ids::Lsn;

/// Offset of the first record.
const RECORDS: usize = 64;
const SUM: usize = 56;
/// Bytes of records that a page has room for.
pub const ROOM: usize = PAGE - RECORDS;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogHead {
    pub tag: u64,
    pub imports: u64,
    pub sequence: u64,
    pub first: Lsn,
    pub settled: Lsn,
    pub previous: u64,
}

/// A page that is being filled.
#[derive(Debug, Clone)]
pub struct PageBuilder {
    page: Box<Page>,
    used: usize,
    records: u16,
}

impl Default for PageBuilder {
    fn default() -> Self {
        Self {
            page: Box::new([0; PAGE]),
            used: 0,
            records: 0,
        }
    }
}

impl PageBuilder {
    pub fn has_room(&self, record: &Record) -> bool {
        self.used + record.encoded_len() <= ROOM
    }

    /// Appends a record that the page has room for.
    pub fn push(&mut self, record: &Record) {
        let len = record.encoded_len();
        let at = RECORDS + self.used;
        record.encode(&mut self.page[at..at + len]);
        self.used += len;
        self.records += 1;
    }

    pub fn records(&self) -> u16 {
        self.records
    }

    /// The finished page, and its checksum.
    pub fn finish(mut self, head: &LogHead) -> (Box<Page>, u64) {
        let mut w = Writer::zeroed(&mut self.page[..RECORDS]);
        w.u64(head.tag);
        w.u64(head.imports);
        w.u64(head.sequence);
        w.u64(head.first);
        w.u64(head.settled);
        w.u64(head.previous);
        w.u16(self.used as u16);
        w.u16(self.records);
        let sum = seal(&mut self.page);
        (self.page, sum)
    }
}

/// A page of which every byte was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogPage {
    pub head: LogHead,
    pub sum: u64,
    pub records: Vec<Record>,
}

impl LogPage {
    pub fn decode(page: &Page) -> Result<Self, FormatError> {
        let broken = |field| wrong("log page", field);
        let sum = page_sum(page);
        if sum.to_le_bytes() != page[SUM..RECORDS] {
            return Err(broken("checksum"));
        }
        let mut r = Reader::new(page);
        let mut next = || r.u64().ok_or_else(|| broken("length"));
        let head = LogHead {
            tag: next()?,
            imports: next()?,
            sequence: next()?,
            first: next()?,
            settled: next()?,
            previous: next()?,
        };
        let (used, count, zero) = (r.u16(), r.u16(), r.u32());
        let used = usize::from(used.unwrap_or(0));
        if used > ROOM || zero != Some(0) {
            return Err(broken("length"));
        }
        if head.first == 0 || head.first > 1 << 62 || head.settled >= head.first {
            return Err(broken("LSN"));
        }
        let mut rest = &page[RECORDS..RECORDS + used];
        let mut records = Vec::new();
        while !rest.is_empty() {
            let (record, len) = Record::decode(rest)?;
            records.push(record);
            rest = &rest[len..];
        }
        if count != Some(records.len() as u16) {
            return Err(broken("number of records"));
        }
        if !is_zero(&page[RECORDS + used..]) {
            return Err(broken("reserved area"));
        }
        Ok(Self { head, sum, records })
    }

    /// LSN of the last record; without one, the LSN before the page.
    pub fn last(&self) -> Lsn {
        self.head.first + self.records.len() as u64 - 1
    }
}

fn page_sum(page: &Page) -> u64 {
    checksum_of_parts(&[&page[..SUM], &[0; RECORDS - SUM], &page[RECORDS..]])
}

/// Writes the checksum into a finished page.
pub(super) fn seal(page: &mut Page) -> u64 {
    let sum = page_sum(page);
    page[SUM..RECORDS].copy_from_slice(&sum.to_le_bytes());
    sum
}
