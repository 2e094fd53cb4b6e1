//! The contents of compared messages: every eight bytes depend on seed, queue pair, message number
//! and offset. So an old, foreign or shifted message does not pass the comparison.
//!
//! Both ends compute the contents, so they are a part of the protocol, which a test pins.

/// The contents of one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pattern(u64);

impl Pattern {
    pub(crate) fn new(seed: u32, queue_pair: u16, number: u64) -> Self {
        let start = u64::from(seed) << 32 | u64::from(queue_pair);
        Self(mix(mix(start).wrapping_add(number)))
    }

    fn word(self, index: u64) -> [u8; 8] {
        mix(self.0.wrapping_add(index)).to_le_bytes()
    }

    /// Fills `bytes`, which start at offset `from` (a multiple of 8) of the message.
    pub(crate) fn fill(self, bytes: &mut [u8], from: usize) {
        debug_assert_eq!(from % 8, 0);
        let first = from as u64 / 8;
        for (index, chunk) in bytes.chunks_mut(8).enumerate() {
            chunk.copy_from_slice(&self.word(first + index as u64)[..chunk.len()]);
        }
    }

    /// Finds the first wrong byte of `bytes`, which start at offset `from` (a multiple of 8) of the
    /// message. Returns its offset in the message, the expected byte, and the actual byte.
    pub(crate) fn differs(self, bytes: &[u8], from: usize) -> Option<(usize, u8, u8)> {
        debug_assert_eq!(from % 8, 0);
        let first = from as u64 / 8;
        for (index, chunk) in bytes.chunks(8).enumerate() {
            let word = self.word(first + index as u64);
            if chunk == &word[..chunk.len()] {
                continue;
            }
            let at = chunk
                .iter()
                .zip(word)
                .position(|(is, should)| *is != should)?;
            return Some((from + index * 8 + at, word[at], chunk[at]));
        }
        None
    }
}

/// One word of splitmix64: every bit of the output depends on every bit of the input.
fn mix(x: u64) -> u64 {
    nacre_random::mix(x.wrapping_add(0x9e37_79b9_7f4a_7c15))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: any wrong byte is found at its offset. Method: change every byte of messages of all
    /// small lengths, also in messages that are compared in two parts.
    #[test]
    fn every_byte_counts() {
        for len in 1..100 {
            let pattern = Pattern::new(7, 3, 11);
            let mut bytes = vec![0; len];
            pattern.fill(&mut bytes, 0);
            assert_eq!(pattern.differs(&bytes, 0), None);
            for at in 0..len {
                let should = bytes[at];
                bytes[at] ^= 0x10;
                assert_eq!(
                    pattern.differs(&bytes, 0),
                    Some((at, should, should ^ 0x10))
                );
                let half = len / 2 / 8 * 8;
                let parts = [(0, &bytes[..half]), (half, &bytes[half..])];
                let found = parts
                    .iter()
                    .find_map(|(from, part)| pattern.differs(part, *from));
                assert_eq!(found, Some((at, should, should ^ 0x10)));
                bytes[at] = should;
            }
        }
    }

    /// Goal: two versions of the program expect the same contents.
    #[test]
    fn the_contents_are_a_protocol() {
        let pattern = Pattern::new(7, 3, 11);
        let words = [0, 1].map(|index| u64::from_le_bytes(pattern.word(index)));
        assert_eq!(words, [0x4382_a67f_3f62_6dde, 0x7075_9953_07d0_90ba]);
    }

    /// Goal: wrong messages are distinguished from the right one.
    #[test]
    fn other_messages_differ() {
        let mut bytes = [0; 16];
        Pattern::new(1, 1, 1).fill(&mut bytes, 0);
        for other in [
            Pattern::new(2, 1, 1),
            Pattern::new(1, 2, 1),
            Pattern::new(1, 1, 2),
            Pattern::new(1, 1, 0),
        ] {
            assert!(other.differs(&bytes, 0).is_some());
        }
        assert!(Pattern::new(1, 1, 1).differs(&bytes, 8).is_some());
    }
}
