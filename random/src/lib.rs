//! A seeded pseudo-random generator for simulators, tests and probabilities. The same seed gives
//! the same numbers.
//!
//! A seed that a failing test prints must replay in every later version. So the sequence is part of
//! this crate's interface, and a test pins it. Generators of other crates may change their sequence
//! in a new version, so they are not used. The numbers are predictable: never use them for secrets.

#![forbid(unsafe_code)]

pub mod seeds;

/// A generator (xorshift64*).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A generator that starts from `seed`; any seed is valid. Neighbouring seeds give unrelated
    /// sequences.
    pub fn new(seed: u64) -> Self {
        // Any state but 0.
        Self(mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)) | 1)
    }

    /// 64 random bits.
    #[inline]
    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Another generator, independent of this one.
    pub fn fork(&mut self) -> Self {
        Self::new(self.draw())
    }

    /// A number from 0 to `bound - 1`. `bound` must not be 0.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(bound)) >> 64) as u64
    }

    /// An index from 0 to `len - 1`. `len` must not be 0.
    #[inline]
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// A number from `low` to `high`, both included. `low` must not exceed `high`; the full range
    /// of u64 is not supported ([`Random::draw`] has it).
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True with probability 1/`times`. `times` must not be 0.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// True with a probability of `percent`/100; always true from 100 up.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// True with a probability of `per_million`/1,000,000. 0 draws no number.
    pub fn per_million(&mut self, per_million: u32) -> bool {
        per_million > 0 && self.below(1_000_000) < u64::from(per_million)
    }

    /// True with a probability of `probability`, from 0.0 to 1.0.
    pub fn happens(&mut self, probability: f64) -> bool {
        // 53 bits: as many as the number has.
        ((self.draw() >> 11) as f64) < probability * (1u64 << 53) as f64
    }

    /// An element of a list that is not empty.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.index(from.len())]
    }

    /// Permutes the list in place; every order is equally likely.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for end in (1..list.len()).rev() {
            list.swap(end, self.index(end + 1));
        }
    }
}

/// Mixes bits: every bit of the result depends on every bit of `x` (the finalizer of splitmix64).
#[inline]
pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests;
