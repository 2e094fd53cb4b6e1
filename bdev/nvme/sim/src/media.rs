//! The blocks that the simulated drive stores: those on the media, and those in its volatile write
//! cache only.

use std::collections::{BTreeMap, BTreeSet};

use nacre_random::Random;

use crate::config::NamespaceConfig;

/// The unflushed blocks that a cache keeps when it loses power.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheSurvival {
    All,
    Nothing,
    /// Each block with probability 1/2.
    Some,
}

pub(crate) struct Namespace {
    pub config: NamespaceConfig,
    /// The namespace is in the active namespace list (CNS 02h). A detached namespace exists, but
    /// not for this host.
    pub attached: bool,
    /// Blocks that cannot be read until they are written.
    pub bad: BTreeSet<u64>,
    bytes: Vec<u8>,
    /// Contents of the medium for blocks that the cache holds in a newer version, keyed by block.
    durable: BTreeMap<u64, Box<[u8]>>,
    /// Block buffers kept for reuse.
    spare: Vec<Box<[u8]>>,
}

/// The contents of a deallocated block, if undefined.
const GARBAGE: u8 = 0xdb;

impl Namespace {
    pub(crate) fn new(config: NamespaceConfig) -> Self {
        let bytes = config.blocks as usize * config.current().block_size as usize;
        Self {
            attached: true,
            bad: BTreeSet::new(),
            bytes: vec![config.contents; bytes],
            config,
            durable: BTreeMap::new(),
            spare: Vec::new(),
        }
    }

    pub(crate) fn block_size(&self) -> usize {
        self.config.current().block_size as usize
    }

    pub(crate) fn holds(&self, lba: u64, blocks: u64) -> bool {
        lba.checked_add(blocks)
            .is_some_and(|end| end <= self.config.blocks)
    }

    pub(crate) fn is_readable(&self, lba: u64, blocks: u64) -> bool {
        self.bad.range(lba..lba + blocks).next().is_none()
    }

    /// The bytes of a range inside the namespace.
    pub(crate) fn read(&self, lba: u64, blocks: u64) -> &[u8] {
        let (at, len) = self.range(lba, blocks);
        &self.bytes[at..at + len]
    }

    /// The bytes of a range, to be written. `volatile`: the data stays in the cache.
    pub(crate) fn write(&mut self, lba: u64, blocks: u64, volatile: bool) -> &mut [u8] {
        let (at, len) = self.range(lba, blocks);
        let size = self.block_size();
        if !self.bad.is_empty() {
            self.bad.retain(|bad| !(lba..lba + blocks).contains(bad));
        }
        for (block, old) in (lba..).zip(self.bytes[at..at + len].chunks_exact(size)) {
            if !volatile {
                self.spare.extend(self.durable.remove(&block));
            } else if !self.durable.contains_key(&block) {
                let old = match self.spare.pop() {
                    Some(mut spare) => {
                        spare.copy_from_slice(old);
                        spare
                    }
                    None => old.into(),
                };
                self.durable.insert(block, old);
            }
        }
        &mut self.bytes[at..at + len]
    }

    pub(crate) fn deallocate(&mut self, lba: u64, blocks: u64, volatile: bool) {
        let zeroes = self.config.deallocated_zeroes;
        let fill = if zeroes { 0 } else { GARBAGE };
        self.write(lba, blocks, volatile).fill(fill);
    }

    pub(crate) fn copy(&mut self, from: u64, to: u64, blocks: u64, volatile: bool) {
        let (source, len) = self.range(from, blocks);
        let (target, _) = self.range(to, blocks);
        self.write(to, blocks, volatile);
        self.bytes.copy_within(source..source + len, target);
    }

    pub(crate) fn flush(&mut self) {
        while let Some((_, old)) = self.durable.pop_first() {
            self.spare.push(old);
        }
    }

    /// Number of blocks that only the cache holds.
    pub(crate) fn dirty(&self) -> usize {
        self.durable.len()
    }

    pub(crate) fn lose_power(&mut self, keep: CacheSurvival, random: &mut Random) {
        let size = self.block_size();
        while let Some((block, old)) = self.durable.pop_first() {
            let kept = match keep {
                CacheSurvival::All => true,
                CacheSurvival::Nothing => false,
                CacheSurvival::Some => random.below(2) == 0,
            };
            if !kept {
                let at = block as usize * size;
                self.bytes[at..at + size].copy_from_slice(&old);
            }
            self.spare.push(old);
        }
    }

    pub(crate) fn resize(&mut self, blocks: u64) {
        self.config.blocks = blocks;
        self.bytes.resize(blocks as usize * self.block_size(), 0);
        self.durable.retain(|&block, _| block < blocks);
    }

    fn range(&self, lba: u64, blocks: u64) -> (usize, usize) {
        let size = self.block_size();
        (lba as usize * size, blocks as usize * size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: flushed blocks, and blocks written through the cache, survive a power loss; others
    /// survive at random.
    #[test]
    fn power() {
        let mut random = Random::new(3);
        let mut media = Namespace::new(NamespaceConfig::new(1, 512, 64));
        media.write(0, 4, true).fill(1);
        media.flush();
        media.write(0, 1, true).fill(2);
        media.write(1, 1, true).fill(3);
        media.write(1, 1, false).fill(4);
        assert_eq!(media.dirty(), 1);
        media.lose_power(CacheSurvival::Nothing, &mut random);
        let first = |media: &Namespace, lba| media.read(lba, 1)[0];
        assert_eq!([0, 1, 2].map(|lba| first(&media, lba)), [1, 4, 1]);
        media.write(0, 64, true).fill(9);
        media.lose_power(CacheSurvival::Some, &mut random);
        let kept = (0..64).filter(|&lba| first(&media, lba) == 9).count();
        assert!((10..54).contains(&kept), "{kept}");
        media.copy(0, 1, 8, true);
        media.lose_power(CacheSurvival::All, &mut random);
        assert_eq!(media.dirty(), 0);
        media.resize(32);
        assert!(media.holds(31, 1) && !media.holds(31, 2) && !media.holds(u64::MAX, 2));
    }
}
