//! The contents of a written block: a header with NSID, LBA, write generation and run, then a
//! pseudo-random payload that these determine. Offsets are in bytes, numbers little-endian.
//!
//! ```text
//!   0           8     16     20           24    32
//!   "NACREPRF"  LBA   NSID   generation   run   payload
//! ```
//!
//! This distinguishes misplaced blocks, stale blocks, blocks of another run and damaged blocks.
//! `--verify-only` can verify blocks long after the run, also with a later version. So the payload
//! is a format on disk, which a test pins.

use nacre_random::mix;
use serde::Serialize;

const MAGIC: u64 = u64::from_le_bytes(*b"NACREPRF");
const HEADER: usize = 32;

/// The identity of a written block: the values in its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Stamp {
    pub lba: u64,
    pub nsid: u32,
    /// Counts the writes of the block by the run, from 1.
    pub generation: u32,
    /// A number that distinguishes runs.
    pub run: u64,
}

/// How the contents of a block differ from the expected ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Wrong {
    /// Only zeroes: never written, or deallocated.
    Zeroes,
    /// Not a block of this program; `first` has its first 8 bytes.
    Foreign { first: u64 },
    /// A valid block of this program with another stamp.
    Other { found: Stamp },
    /// A damaged block. `offset` is that of the first wrong word in bytes, a multiple of 8;
    /// `expected` and `actual` are the word.
    Damaged {
        offset: u32,
        expected: u64,
        actual: u64,
    },
}

impl Stamp {
    /// Fills a block of at least 512 bytes with the header and the payload.
    pub fn fill(&self, block: &mut [u8]) {
        let words = self.header();
        for (word, out) in words.iter().zip(block.chunks_exact_mut(8)) {
            out.copy_from_slice(&word.to_le_bytes());
        }
        let mut sequence = self.sequence();
        for out in block[HEADER..].chunks_exact_mut(8) {
            out.copy_from_slice(&sequence.next().to_le_bytes());
        }
    }

    /// Checks that the block has exactly this stamp and its payload.
    pub fn check(&self, block: &[u8]) -> Result<(), Wrong> {
        let found = match Self::read(block) {
            Some(found) => found,
            None if block.iter().all(|byte| *byte == 0) => return Err(Wrong::Zeroes),
            None => {
                return Err(Wrong::Foreign {
                    first: word(block, 0),
                });
            }
        };
        if found != *self {
            // A damaged header looks like another stamp with a payload that does not match it.
            return Err(match found.check_payload(block) {
                Ok(()) => Wrong::Other { found },
                Err(_) => self.first_difference(block),
            });
        }
        self.check_payload(block)
    }

    /// The stamp in a block's header; `None` if the block does not begin with `NACREPRF`.
    pub fn read(block: &[u8]) -> Option<Self> {
        if word(block, 0) != MAGIC {
            return None;
        }
        let middle = word(block, 16);
        Some(Self {
            lba: word(block, 8),
            nsid: middle as u32,
            generation: (middle >> 32) as u32,
            run: word(block, 24),
        })
    }

    fn header(&self) -> [u64; 4] {
        let middle = u64::from(self.nsid) | u64::from(self.generation) << 32;
        [MAGIC, self.lba, middle, self.run]
    }

    fn sequence(&self) -> Sequence {
        let [_, lba, middle, run] = self.header();
        Sequence(run ^ lba.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ middle.rotate_left(17))
    }

    fn check_payload(&self, block: &[u8]) -> Result<(), Wrong> {
        let mut sequence = self.sequence();
        for (index, chunk) in block[HEADER..].chunks_exact(8).enumerate() {
            let (expected, actual) = (sequence.next(), word(chunk, 0));
            if expected != actual {
                let offset = (HEADER + index * 8) as u32;
                return Err(Wrong::Damaged {
                    offset,
                    expected,
                    actual,
                });
            }
        }
        Ok(())
    }

    fn first_difference(&self, block: &[u8]) -> Wrong {
        for (index, expected) in self.header().into_iter().enumerate() {
            let actual = word(block, index * 8);
            if expected != actual {
                let offset = (index * 8) as u32;
                return Wrong::Damaged {
                    offset,
                    expected,
                    actual,
                };
            }
        }
        let Err(wrong) = self.check_payload(block) else {
            unreachable!("a block without a difference was not the one expected")
        };
        wrong
    }
}

/// The words of a block's payload: splitmix64, whose words [`mix`] computes.
struct Sequence(u64);

impl Sequence {
    #[inline]
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let chunk = bytes[at..].first_chunk().copied();
    u64::from_le_bytes(chunk.expect("blocks have 512 bytes and more"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAMP: Stamp = Stamp {
        lba: 77,
        nsid: 3,
        generation: 5,
        run: 0xfeed,
    };

    fn block(stamp: Stamp) -> Vec<u8> {
        let mut block = vec![0xaa; 512];
        stamp.fill(&mut block);
        block
    }

    #[test]
    fn written_blocks_verify() {
        assert_eq!(STAMP.check(&block(STAMP)), Ok(()));
        assert_eq!(Stamp::read(&block(STAMP)), Some(STAMP));
    }

    /// Goal: a flip of any single bit is detected.
    #[test]
    fn any_flipped_bit_is_found() {
        for at in 0..512 {
            for bit in 0..8 {
                let mut damaged = block(STAMP);
                damaged[at] ^= 1 << bit;
                let wrong = STAMP.check(&damaged).unwrap_err();
                match wrong {
                    Wrong::Foreign { .. } => assert!(at < 8),
                    Wrong::Damaged { offset, .. } => {
                        assert_eq!(offset as usize, at / 8 * 8, "{wrong:?}");
                    }
                    _ => panic!("{wrong:?} at {at}"),
                }
            }
        }
    }

    /// Goal: `--verify-only` of a later version reads blocks that this version wrote.
    #[test]
    fn the_payload_is_a_format() {
        let block = block(STAMP);
        assert_eq!(word(&block, HEADER), 0xfac9_2237_c201_80d1);
        assert_eq!(word(&block, HEADER + 8), 0x213c_4d5b_acd8_0caf);
    }

    #[test]
    fn other_blocks_are_distinguished() {
        let others = [
            Stamp { lba: 78, ..STAMP },
            Stamp { nsid: 4, ..STAMP },
            Stamp {
                generation: 4,
                ..STAMP
            },
            Stamp { run: 1, ..STAMP },
        ];
        for found in others {
            assert_eq!(STAMP.check(&block(found)), Err(Wrong::Other { found }));
        }
        assert_eq!(STAMP.check(&[0; 512]), Err(Wrong::Zeroes));
        assert!(matches!(STAMP.check(&[1; 512]), Err(Wrong::Foreign { .. })));
    }
}
