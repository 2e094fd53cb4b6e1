//! Seeds of randomised tests: printed for a failing test, and replayed from an environment
//! variable.

use std::time::{SystemTime, UNIX_EPOCH};

use nacre_random::{Random, mix};

/// The environment variable with the seed to replay.
pub const SEED_VARIABLE: &str = "NACRE_TEST_SEED";

/// Takes the seed from [`SEED_VARIABLE`] or a fresh one, and prints it for a failing test.
pub fn announced(test: &str) -> Random {
    let seed = match std::env::var(SEED_VARIABLE) {
        Ok(text) => text.parse().expect("a seed is a number"),
        Err(_) => {
            let since = SystemTime::now().duration_since(UNIX_EPOCH);
            since.map_or(1, |d| mix(d.as_nanos() as u64) >> 32)
        }
    };
    println!("{test}: replay with {SEED_VARIABLE}={seed} cargo test -p nacre-tests {test}");
    Random::new(seed)
}
