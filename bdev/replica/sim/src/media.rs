//! The contents of a simulated disk: a medium, and a volatile cache in front of it.
//!
//! Each block of the volume's area is stored as one number: its tag, 0 for zeroes. Each write of
//! the load has a tag of its own in the first bytes of every block. In the reserved area (label and
//! log) a power failure can tear a write inside a block, so there each sector of 512 bytes has a
//! number. A block or sector with a number is a *cell*.

use std::collections::BTreeMap;
use std::ops::Range;

use nacre_bdev_replica::model::RESERVED;
use nacre_random::Random;

/// Bytes of the largest blocks.
const MOST: usize = 4096;
const SECTOR: usize = 512;

static ZEROES: [u8; MOST] = [0; MOST];

/// The block size, and values derived from it; the same for all disks of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Format {
    /// Bytes of a block: 512 to 4096.
    pub block: usize,
}

impl Format {
    /// Blocks of the reserved area.
    pub(crate) fn reserved(self) -> u64 {
        RESERVED / self.block as u64
    }

    /// Blocks of a region of the dirty-region log: 1 MiB.
    pub(crate) fn region(self) -> u64 {
        (1 << 20) / self.block as u64
    }

    /// The cells of a block: its sectors in the reserved area, one cell in the volume's area.
    pub(crate) fn cells(self, block: u64) -> Range<usize> {
        let sectors = (self.block / SECTOR) as u64;
        let (first, count) = if block < self.reserved() {
            (block * sectors, sectors)
        } else {
            (RESERVED / SECTOR as u64 + block - self.reserved(), 1)
        };
        first as usize..(first + count) as usize
    }

    pub(crate) fn cells_of(self, lba: u64, blocks: u64) -> Range<usize> {
        self.cells(lba).start..self.cells(lba + blocks - 1).end
    }
}

pub(crate) struct Media {
    pub format: Format,
    /// The present size; data past it is lost.
    blocks: u64,
    /// The original size.
    full: u64,
    /// Data that reads return, by cell.
    current: Vec<u64>,
    /// Data on the medium, by cell: it survives a power failure.
    durable: Vec<u64>,
    /// Writes in the cache only, in order, by cell.
    pending: BTreeMap<usize, Vec<u64>>,
    /// The bytes of each sector number, from 1 on.
    sectors: Vec<[u8; SECTOR]>,
}

/// The part of the cache that is lost when the power fails.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Loss {
    Everything,
    /// Each cell has one of the values written to it, or its old value.
    Some,
    Nothing,
}

impl Media {
    pub(crate) fn new(format: Format, blocks: u64) -> Self {
        let cells = format.cells(blocks).start;
        Self {
            format,
            blocks,
            full: blocks,
            current: vec![0; cells],
            durable: vec![0; cells],
            pending: BTreeMap::new(),
            sectors: Vec::new(),
        }
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    pub(crate) fn full(&self) -> u64 {
        self.full
    }

    /// Truncates the disk to `blocks` blocks.
    pub(crate) fn cut(&mut self, blocks: u64) {
        self.blocks = blocks;
        let first = self.format.cells(blocks).start;
        self.current[first..].fill(0);
        self.durable[first..].fill(0);
        self.pending.split_off(&first);
    }

    /// Restores the original size.
    pub(crate) fn enlarge(&mut self) {
        self.blocks = self.full;
    }

    pub(crate) fn holds(&self, lba: u64, blocks: u64) -> bool {
        lba + blocks <= self.blocks
    }

    /// Appends the numbers of the cells of a block with these bytes to `out`.
    pub(crate) fn intern(&mut self, block: u64, bytes: &[u8], out: &mut Vec<u64>) {
        if block >= self.format.reserved() {
            let (tag, rest) = bytes.split_at(8);
            assert!(
                rest == &ZEROES[8..bytes.len()],
                "a block of the volume was written that no load and no copy produces"
            );
            return out.push(u64::from_le_bytes(tag.try_into().expect("eight bytes")));
        }
        for sector in bytes.chunks_exact(SECTOR) {
            if sector == &ZEROES[..SECTOR] {
                out.push(0);
                continue;
            }
            self.sectors.push(sector.try_into().expect("a sector"));
            out.push(self.sectors.len() as u64);
        }
    }

    /// Writes the bytes of a block to `out`. `contents` are the numbers of its cells.
    pub(crate) fn bytes(&self, block: u64, contents: &[u64], out: &mut [u8]) {
        if block >= self.format.reserved() {
            out.fill(0);
            out[..8].copy_from_slice(&contents[0].to_le_bytes());
            return;
        }
        for (sector, content) in out.chunks_exact_mut(SECTOR).zip(contents) {
            match content {
                0 => sector.fill(0),
                number => sector.copy_from_slice(&self.sectors[*number as usize - 1]),
            }
        }
    }

    pub(crate) fn read(&self, cells: Range<usize>) -> &[u64] {
        &self.current[cells]
    }

    pub(crate) fn write(&mut self, cell: usize, content: u64, durable: bool) {
        self.current[cell] = content;
        if durable {
            self.durable[cell] = content;
            self.pending.remove(&cell);
        } else {
            self.pending.entry(cell).or_default().push(content)
        }
    }

    pub(crate) fn flush(&mut self) {
        for (cell, contents) in std::mem::take(&mut self.pending) {
            self.durable[cell] = *contents.last().expect("something pends");
        }
    }

    pub(crate) fn lose_power(&mut self, random: &mut Random, loss: Loss) {
        for (cell, contents) in std::mem::take(&mut self.pending) {
            let kept = match loss {
                Loss::Everything => 0,
                Loss::Some => random.index(contents.len() + 1),
                Loss::Nothing => contents.len(),
            };
            if kept > 0 {
                self.durable[cell] = contents[kept - 1];
            }
            self.current[cell] = self.durable[cell];
        }
    }

    /// The data that reads of the volume's blocks return now.
    pub(crate) fn volume(&self) -> &[u64] {
        &self.current[self.format.cells(self.format.reserved()).start..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_that_is_lost() {
        let format = Format { block: 512 };
        let mut media = Media::new(format, format.reserved() + 4);
        let mut random = Random::new(1);
        let cell = format.cells(format.reserved() + 2).start;
        media.write(cell, 5, true);
        media.write(cell, 6, false);
        assert_eq!(media.volume(), [0, 0, 6, 0]);
        media.lose_power(&mut random, Loss::Everything);
        assert_eq!(media.volume(), [0, 0, 5, 0]);
        media.write(cell, 6, false);
        media.flush();
        media.lose_power(&mut random, Loss::Everything);
        assert_eq!(media.volume(), [0, 0, 6, 0]);
        let mut seen = [false; 3];
        for _ in 0..50 {
            media.write(cell, 7, true);
            media.write(cell, 8, false);
            media.write(cell, 9, false);
            media.lose_power(&mut random, Loss::Some);
            seen[media.volume()[2] as usize - 7] = true;
        }
        assert_eq!(seen, [true; 3], "old, and any of the new");
    }

    /// A write inside the reserved area can tear inside a block.
    #[test]
    fn media_round_trip() {
        let format = Format { block: 4096 };
        let mut media = Media::new(format, format.reserved() + 1);
        let mut label = [0; 4096];
        label[..3].copy_from_slice(b"abc");
        label[4095] = 1;
        let mut contents = Vec::new();
        media.intern(1, &label, &mut contents);
        assert_eq!(contents, [1, 0, 0, 0, 0, 0, 0, 2]);
        let mut out = [9; 4096];
        media.bytes(1, &contents, &mut out);
        assert_eq!(out, label);
        let mut data = [0; 4096];
        data[0] = 77;
        contents.clear();
        media.intern(format.reserved(), &data, &mut contents);
        assert_eq!(contents, [77]);
        media.bytes(format.reserved(), &contents, &mut out);
        assert_eq!(out, data);
        assert_eq!(format.cells_of(0, 2), 0..16);
        let small = Format { block: 512 };
        assert_eq!(small.cells_of(small.reserved() - 1, 2), 2047..2049);
        assert_eq!(format.cells(format.reserved()), 2048..2049);
    }
}
