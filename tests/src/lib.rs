//! Tests of Nacre as a whole: against itself end to end, and against real peers in a virtual machine (`vm/`).
//!
//! What is here is shared by those tests. It is not shipped.

#![forbid(unsafe_code)]

pub mod daemon;
pub mod host;
pub mod rng;
pub mod target;

use std::io::Write;

/// Set where tests are to take as long as they do any good: `cargo xtask test` does.
pub const AT_LENGTH_VARIABLE: &str = "NACRE_TEST_AT_LENGTH";

/// How often, or for how long, a test does what finds more the more of it there is: as a rule as much as shows that it
/// works, so that nobody waits for it who changed something else.
pub fn at_length<T>(as_a_rule: T, at_length: T) -> T {
    match std::env::var_os(AT_LENGTH_VARIABLE) {
        Some(_) => at_length,
        None => as_a_rule,
    }
}

/// Says aloud that a test could not run on this machine, and why; the test then returns.
///
/// The line goes to the real standard error, past the test harness, which captures only what the print macros
/// write: `cargo xtask test` collects these lines and does not count the test as passed.
pub fn skip(test: &str, why: &str) {
    // When standard error is closed there is nobody to tell.
    let _ = writeln!(std::io::stderr().lock(), "SKIPPED: {test}: {why}");
}
