//! The expected data of each block range: patterns that this run wrote, or checksums of data that
//! it read.

use std::hash::{DefaultHasher, Hasher};

use serde::Serialize;

use crate::pattern::{Stamp, Wrong};

/// The expected contents of the tested block range, by unit (the blocks of one I/O).
#[derive(Debug)]
pub struct Contents {
    nsid: u32,
    block_size: u32,
    /// First block of the range.
    first: u64,
    unit_blocks: u32,
    run: u64,
    writes: bool,
    /// In a test that writes, the number of writes of each unit (0: none); else the checksum of the
    /// last read (0: none).
    known: Vec<u64>,
    /// True for a unit whose last write failed: each block has the old contents or the new ones.
    doubtful: Vec<bool>,
    /// True for a unit with an I/O of this run in flight.
    busy: Vec<bool>,
    report: ContentsReport,
}

/// Results of the comparisons.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ContentsReport {
    pub units_written: u64,
    pub units_compared: u64,
    /// In a test that only reads: units that differ from the earlier read. Another host wrote them.
    pub units_changed: u64,
    pub units_wrong: u64,
    pub first_wrong: Option<String>,
}

impl Contents {
    /// For a namespace with this NSID and block size in bytes. The range has `units` units of
    /// `unit_blocks` blocks from block `first` on. The test `writes` or only reads. The number
    /// `run` distinguishes runs.
    pub fn new(
        (nsid, block_size): (u32, u32),
        (first, units, unit_blocks): (u64, u64, u32),
        writes: bool,
        run: u64,
    ) -> Self {
        Self {
            nsid,
            block_size,
            first,
            unit_blocks,
            run,
            writes,
            known: vec![0; units as usize],
            doubtful: vec![false; units as usize],
            busy: vec![false; units as usize],
            report: ContentsReport::default(),
        }
    }

    /// Number of units in the range.
    pub fn units(&self) -> u64 {
        self.known.len() as u64
    }

    /// True if the test writes patterns, false if it only reads.
    pub fn writes(&self) -> bool {
        self.writes
    }

    pub fn report(&self) -> &ContentsReport {
        &self.report
    }

    /// Reserves a unit for one I/O; `false` if an I/O on it is in flight.
    pub fn take(&mut self, unit: u64) -> bool {
        !std::mem::replace(&mut self.busy[unit as usize], true)
    }

    pub fn release(&mut self, unit: u64) {
        self.busy[unit as usize] = false;
    }

    /// Fills `data` with the pattern of the next write of a unit. The pattern is the same until
    /// [`Contents::wrote`].
    pub fn fill(&self, unit: u64, data: &mut [u8]) {
        let generation = self.known[unit as usize] + 1;
        for (lba, block) in self.blocks(unit).zip(data.chunks_exact_mut(self.block())) {
            self.stamp(lba, generation).fill(block);
        }
    }

    /// Records a completed write of the pattern of [`Contents::fill`].
    pub fn wrote(&mut self, unit: u64) {
        self.known[unit as usize] += 1;
        self.doubtful[unit as usize] = false;
        self.report.units_written += 1;
    }

    /// Records a write of the pattern of [`Contents::fill`] that failed for good. Until the next
    /// write, each block may have that pattern or the contents from before.
    pub fn write_failed(&mut self, unit: u64) {
        self.doubtful[unit as usize] = true;
    }

    /// Compares data that was read with the pattern of the last write, and with that of a failed
    /// one after it. Before the first successful write of a unit, any data is right. In a test that
    /// only reads, compares it with the last read of the unit, and counts a difference as a change.
    pub fn read(&mut self, unit: u64, data: &[u8]) {
        self.report.units_compared += 1;
        if self.writes {
            if let Some(text) = self.mismatch(unit, data) {
                self.wrong(text);
            }
            return;
        }
        let (known, sum) = (self.known[unit as usize], checksum(data));
        if known != 0 && known != sum {
            self.report.units_changed += 1;
        }
        self.known[unit as usize] = sum;
    }

    /// True if the data equals the known data of the unit.
    pub fn is_known(&self, unit: u64, data: &[u8]) -> bool {
        if self.writes {
            self.mismatch(unit, data).is_none()
        } else {
            self.known[unit as usize] == checksum(data)
        }
    }

    /// Counts a unit that the caller compares with [`Contents::is_known`].
    pub fn count_compared(&mut self) {
        self.report.units_compared += 1;
    }

    /// Records a unit that `path` returns with other data than the other paths.
    pub fn differs(&mut self, unit: u64, path: &str) {
        let lba = self.first + unit * u64::from(self.unit_blocks);
        self.wrong(format!("LBA {lba} over {path}: not as over other paths"));
    }

    fn wrong(&mut self, text: String) {
        self.report.units_wrong += 1;
        self.report.first_wrong.get_or_insert(text);
    }

    fn mismatch(&self, unit: u64, data: &[u8]) -> Option<String> {
        let generation = self.known[unit as usize];
        let is_doubtful = self.doubtful[unit as usize];
        if generation == 0 {
            return None;
        }
        let mut blocks = self.blocks(unit).zip(data.chunks_exact(self.block()));
        blocks.find_map(|(lba, block)| {
            let wrong = self.stamp(lba, generation).check(block).err()?;
            if is_doubtful && self.stamp(lba, generation + 1).check(block).is_ok() {
                return None;
            }
            let found = match wrong {
                Wrong::Zeroes => "zeroes".to_owned(),
                Wrong::Foreign { .. } => "data of another program".to_owned(),
                Wrong::Other { found } if found.lba != lba => format!("LBA {}", found.lba),
                Wrong::Other { found } => format!("its write {}", found.generation),
                Wrong::Damaged { offset, .. } => format!("damage from byte {offset}"),
            };
            let or = if is_doubtful {
                format!(" or {}", generation + 1)
            } else {
                String::new()
            };
            Some(format!(
                "LBA {lba}: {found} in place of write {generation}{or}"
            ))
        })
    }

    fn block(&self) -> usize {
        self.block_size as usize
    }

    fn blocks(&self, unit: u64) -> std::ops::Range<u64> {
        let first = self.first + unit * u64::from(self.unit_blocks);
        first..first + u64::from(self.unit_blocks)
    }

    fn stamp(&self, lba: u64, generation: u64) -> Stamp {
        Stamp {
            lba,
            nsid: self.nsid,
            generation: generation as u32,
            run: self.run,
        }
    }
}

/// Not 0, which means unknown.
fn checksum(data: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(data);
    hasher.finish().max(1)
}

/// A checksum whose sum over all units does not depend on their order.
pub(super) fn checksum_at(unit: u64, data: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write_u64(unit);
    hasher.write(data);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: usize = 4096;

    fn contents(writes: bool) -> Contents {
        Contents::new((1, 512), (100, 4, 8), writes, 7)
    }

    /// Goal: written data verifies, and stale, misplaced and damaged data is found and named.
    #[test]
    fn writes_are_verified() {
        let mut contents = contents(true);
        let mut old = [0; UNIT];
        contents.fill(2, &mut old);
        contents.wrote(2);
        contents.read(2, &old);
        let mut new = [0; UNIT];
        contents.fill(2, &mut new);
        assert!(contents.is_known(2, &old) && !contents.is_known(2, &new));
        contents.wrote(2);
        contents.read(2, &new);
        assert_eq!(contents.report().units_wrong, 0);
        contents.read(2, &old);
        assert_eq!(
            contents.report().first_wrong.as_deref(),
            Some("LBA 116: its write 1 in place of write 2")
        );
        new[1000] ^= 1;
        contents.read(2, &new);
        contents.read(2, &[0; UNIT]);
        let report = contents.report();
        assert_eq!((report.units_wrong, report.units_compared), (3, 5));
        assert_eq!((report.units_written, report.units_changed), (2, 0));
    }

    /// Goal: after a write that failed for good, each block may have the old contents or the new
    /// ones, and no others, until the next write.
    #[test]
    fn a_failed_write_leaves_old_or_new_contents() {
        let mut contents = contents(true);
        let foreign = [9; UNIT];
        let mut first = [0; UNIT];
        contents.fill(2, &mut first);
        // No write of the unit was successful: its contents are not known.
        contents.read(2, &foreign);
        contents.write_failed(2);
        contents.read(2, &foreign);
        contents.read(2, &first);
        contents.wrote(2);
        let mut second = [0; UNIT];
        contents.fill(2, &mut second);
        contents.write_failed(2);
        let mut mixed = first;
        mixed[512..1536].copy_from_slice(&second[512..1536]);
        for data in [&first, &second, &mixed] {
            assert!(contents.is_known(2, data));
            contents.read(2, data);
        }
        assert_eq!(contents.report().units_wrong, 0);
        let mut torn = first;
        torn[..256].copy_from_slice(&second[..256]);
        for data in [&foreign, &torn] {
            assert!(!contents.is_known(2, data));
            contents.read(2, data);
        }
        assert_eq!(contents.report().units_wrong, 2);
        let text = contents.report().first_wrong.clone().unwrap();
        assert!(text.ends_with("in place of write 1 or 2"), "{text}");
        // The next write decides.
        let mut again = [0; UNIT];
        contents.fill(2, &mut again);
        contents.wrote(2);
        assert!(contents.is_known(2, &again) && !contents.is_known(2, &first));
        assert_eq!(contents.report().units_written, 2);
    }

    /// Goal: without writes a difference is a change of another host, until two paths disagree.
    #[test]
    fn reads_are_compared_with_each_other() {
        let mut contents = contents(false);
        contents.read(0, &[1; UNIT]);
        contents.read(0, &[1; UNIT]);
        assert_eq!(contents.report().units_changed, 0);
        contents.read(0, &[2; UNIT]);
        assert_eq!(contents.report().units_changed, 1);
        assert!(contents.is_known(0, &[2; UNIT]));
        contents.differs(0, "rdma://192.0.2.1:4420");
        let report = contents.report();
        assert_eq!(report.units_wrong, 1);
        assert!(
            report
                .first_wrong
                .as_ref()
                .unwrap()
                .starts_with("LBA 100 over rdma:")
        );
    }

    #[test]
    fn a_unit_has_one_io() {
        let mut contents = contents(true);
        assert!(contents.take(3) && !contents.take(3) && contents.take(0));
        contents.release(3);
        assert!(contents.take(3));
    }
}
