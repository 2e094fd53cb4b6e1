//! Seeded randomness: the same seed gives the same run, as far as the test controls it.

use std::time::{SystemTime, UNIX_EPOCH};

/// The environment variable with the seed to replay.
pub const SEED_VARIABLE: &str = "NACRE_TEST_SEED";

/// Splitmix64.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// Takes the seed from [`SEED_VARIABLE`] or a fresh one, and prints it for a failing test.
    pub fn announced(test: &str) -> Rng {
        let seed = match std::env::var(SEED_VARIABLE) {
            Ok(text) => text.parse().expect("a seed is a number"),
            Err(_) => {
                let since = SystemTime::now().duration_since(UNIX_EPOCH);
                since.map_or(1, |d| mix(d.as_nanos() as u64) >> 32)
            }
        };
        println!("{test}: replay with {SEED_VARIABLE}={seed} cargo test -p nacre-tests {test}");
        Rng(seed)
    }

    pub fn seeded(seed: u64) -> Rng {
        Rng(seed)
    }

    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`, which must be small enough for an even distribution.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.draw() % bound
    }
}

/// Mixes the bits of `x`.
pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
