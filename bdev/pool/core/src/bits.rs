//! A set of numbers, one bit each, whose copies share memory until they change.

use std::sync::Arc;

/// Words of a chunk: 32 KiB. A bitmap of 100 TiB has 6,400 chunks, and a change of a shared one
/// copies it in a few microseconds.
const WORDS: usize = 4096;

#[derive(Debug, Clone, Default)]
pub(crate) struct Bits {
    /// `None`: all bits are zero.
    chunks: Vec<Option<Arc<[u64; WORDS]>>>,
    words: usize,
}

impl Bits {
    /// No number of `0..len`.
    pub(crate) fn new(len: u64) -> Self {
        let mut bits = Self::default();
        bits.grow(len);
        bits
    }

    /// Makes room for the numbers of `0..len`.
    pub(crate) fn grow(&mut self, len: u64) {
        self.words = len.div_ceil(64) as usize;
        self.chunks.resize(self.words.div_ceil(WORDS), None);
    }

    /// Makes room for the numbers of `0..len`, if there is less.
    pub(crate) fn grow_to(&mut self, len: u64) {
        if len.div_ceil(64) as usize > self.words {
            self.grow(len);
        }
    }

    /// The number of words.
    pub(crate) fn words(&self) -> usize {
        self.words
    }

    /// The bits of 64 numbers.
    pub(crate) fn word(&self, at: usize) -> u64 {
        let chunk = self.chunks.get(at / WORDS).and_then(Option::as_ref);
        chunk.map_or(0, |chunk| chunk[at % WORDS])
    }

    pub(crate) fn has(&self, number: u64) -> bool {
        self.word((number / 64) as usize) >> (number % 64) & 1 == 1
    }

    pub(crate) fn add(&mut self, number: u64) {
        *self.word_mut(number) |= 1 << (number % 64);
    }

    pub(crate) fn remove(&mut self, number: u64) {
        *self.word_mut(number) &= !(1 << (number % 64));
    }

    fn word_mut(&mut self, number: u64) -> &mut u64 {
        let at = (number / 64) as usize;
        let chunk = self.chunks[at / WORDS].get_or_insert_with(|| Arc::new([0; WORDS]));
        &mut Arc::make_mut(chunk)[at % WORDS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a copy costs nothing per number, and keeps its numbers. Method: two chunks of three
    /// have numbers; the copy shares both until one changes.
    #[test]
    fn a_copy_shares_memory() {
        let far = 2 * WORDS as u64 * 64 + 65;
        let mut bits = Bits::new(far + 1);
        assert_eq!(bits.words(), 2 * WORDS + 2);
        assert!(bits.chunks.iter().all(Option::is_none));
        bits.add(3);
        bits.add(far);
        let copy = bits.clone();
        let shared = |bits: &Bits, at: usize| bits.chunks[at].as_ref().map(Arc::strong_count);
        assert_eq!(
            [0, 1, 2].map(|at| shared(&bits, at)),
            [Some(2), None, Some(2)]
        );
        bits.remove(3);
        bits.add(4);
        assert_eq!([0, 2].map(|at| shared(&bits, at)), [Some(1), Some(2)]);
        assert_eq!(
            [3, 4, far].map(|number| copy.has(number)),
            [true, false, true]
        );
        assert_eq!(
            [3, 4, far].map(|number| bits.has(number)),
            [false, true, true]
        );
        assert_eq!(bits.word(2 * WORDS + 1), 2);
    }
}
