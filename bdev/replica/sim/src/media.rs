//! What a simulated disk holds: a medium, and a volatile cache in front of it.
//!
//! Contents are numbers. A block of the volume's area is its tag, 0 for zeroes: the load writes a tag of
//! its own into the first bytes of every block. In the reserved area, where tearing inside a block matters,
//! each sector has a number, which stands for its bytes.

use std::collections::BTreeMap;
use std::ops::Range;

use nacre_bdev_replica::model::RESERVED;

use crate::random::Random;

pub const BLOCK: usize = 4096;
const SECTOR: usize = 512;
/// Sectors of a block.
const SECTORS: u64 = (BLOCK / SECTOR) as u64;
/// Blocks of the reserved area.
pub const RESERVED_BLOCKS: u64 = RESERVED / BLOCK as u64;

static ZEROES: [u8; BLOCK] = [0; BLOCK];

pub struct Media {
    blocks: u64,
    /// What is read.
    current: Vec<u64>,
    /// What survives.
    durable: Vec<u64>,
    /// What was written since, in order, by cell.
    pending: BTreeMap<usize, Vec<u64>>,
    /// The bytes of sectors, by number less 1.
    sectors: Vec<[u8; SECTOR]>,
}

/// What of the cache reaches the medium when the power fails.
#[derive(Debug, Clone, Copy)]
pub enum Loss {
    Everything,
    /// Each cell has any of what was written to it, or what it had.
    Some,
    Nothing,
}

impl Media {
    pub fn new(blocks: u64) -> Media {
        let cells = (RESERVED_BLOCKS * SECTORS + blocks - RESERVED_BLOCKS) as usize;
        Media {
            blocks,
            current: vec![0; cells],
            durable: vec![0; cells],
            pending: BTreeMap::new(),
            sectors: Vec::new(),
        }
    }

    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The cells of a block: of the reserved area its sectors, of the volume's one.
    pub fn cells(block: u64) -> Range<usize> {
        let first = match block < RESERVED_BLOCKS {
            true => block * SECTORS,
            false => RESERVED_BLOCKS * SECTORS + block - RESERVED_BLOCKS,
        };
        let count = if block < RESERVED_BLOCKS { SECTORS } else { 1 };
        first as usize..(first + count) as usize
    }

    pub fn cells_of(lba: u64, blocks: u64) -> Range<usize> {
        Media::cells(lba).start..Media::cells(lba + blocks - 1).end
    }

    /// The contents of a block of bytes, by cell.
    pub fn intern(&mut self, block: u64, bytes: &[u8], out: &mut Vec<u64>) {
        if block >= RESERVED_BLOCKS {
            let (tag, rest) = bytes.split_at(8);
            assert!(
                rest == &ZEROES[8..],
                "a block of the volume was written that no load and no copy makes"
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

    /// The bytes of a block, of which the cells are `contents`.
    pub fn bytes(&self, block: u64, contents: &[u64], out: &mut [u8]) {
        if block >= RESERVED_BLOCKS {
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

    pub fn read(&self, cells: Range<usize>) -> &[u64] {
        &self.current[cells]
    }

    pub fn write(&mut self, cell: usize, content: u64, durable: bool) {
        self.current[cell] = content;
        match durable {
            true => {
                self.durable[cell] = content;
                self.pending.remove(&cell);
            }
            false => self.pending.entry(cell).or_default().push(content),
        }
    }

    pub fn flush(&mut self) {
        for (cell, contents) in std::mem::take(&mut self.pending) {
            self.durable[cell] = *contents.last().expect("something pends");
        }
    }

    pub fn lose_power(&mut self, random: &mut Random, loss: Loss) {
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

    /// The volume's blocks as they are read now.
    pub fn volume(&self) -> &[u64] {
        &self.current[Media::cells(RESERVED_BLOCKS).start..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_that_is_lost() {
        let mut media = Media::new(RESERVED_BLOCKS + 4);
        let mut random = Random::new(1);
        let cell = Media::cells(RESERVED_BLOCKS + 2).start;
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

    /// What is written inside the reserved area can tear inside a block.
    #[test]
    fn bytes_and_back() {
        let mut media = Media::new(RESERVED_BLOCKS + 1);
        let mut label = [0; BLOCK];
        label[..3].copy_from_slice(b"abc");
        label[4095] = 1;
        let mut contents = Vec::new();
        media.intern(1, &label, &mut contents);
        assert_eq!(contents, [1, 0, 0, 0, 0, 0, 0, 2]);
        let mut out = [9; BLOCK];
        media.bytes(1, &contents, &mut out);
        assert_eq!(out, label);
        let mut data = [0; BLOCK];
        data[0] = 77;
        contents.clear();
        media.intern(RESERVED_BLOCKS, &data, &mut contents);
        assert_eq!(contents, [77]);
        media.bytes(RESERVED_BLOCKS, &contents, &mut out);
        assert_eq!(out, data);
        assert_eq!(Media::cells_of(0, 2), 0..16);
    }
}
