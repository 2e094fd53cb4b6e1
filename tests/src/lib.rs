//! Tests of Nacre as a whole: end to end against itself, and against real peers in a virtual
//! machine (`vm/`).
//!
//! This crate contains code shared by the tests. It is not shipped.

#![forbid(unsafe_code)]

pub mod daemon;
pub mod host;
pub mod seed;
pub mod target;

use std::io::Write;

/// The environment variable that makes tests run at full length. `cargo xtask test` sets it to `ci`
/// unless it is set, which shortens them.
pub const AT_LENGTH_VARIABLE: &str = "NACRE_TEST_AT_LENGTH";

/// The number of rounds, or the duration, of a test that finds more the longer it runs. By default,
/// and with `ci`, each kind of round comes once or a few times.
pub fn at_length<T>(as_a_rule: T, at_length: T) -> T {
    match std::env::var_os(AT_LENGTH_VARIABLE) {
        Some(value) if value != "ci" => at_length,
        _ => as_a_rule,
    }
}

/// Reports that a test cannot run on this machine, and why; the test then returns.
///
/// The line goes to the real stderr: the test harness captures only the print macros. `cargo xtask
/// test` collects these lines and does not count the test as passed.
pub fn skip(test: &str, why: &str) {
    // With stderr closed, the message is lost.
    let _ = writeln!(std::io::stderr().lock(), "SKIPPED: {test}: {why}");
}
