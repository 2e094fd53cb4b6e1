//! Checks that pseudo-random numbers come from the crate `random`: a seed that a test prints has
//! to replay in every later version, and one crate pins the sequence.

use std::path::Path;

use anyhow::Result;

use super::{read, rust_files};

/// Multipliers of well-known generators, without separators. Split in pieces, so that this file
/// does not match.
const MULTIPLIERS: &[&str] = &[
    concat!("6364136223", "846793005"),
    concat!("1103", "515245"),
    concat!("0xbf58476d", "1ce4e5b9"),
    concat!("0x2545f491", "4f6cdd1d"),
];

/// Files with a generator of their own, each with its reason.
const ALLOWED: &[(&str, &str)] = &[
    ("random/src/lib.rs", "the generator itself"),
    (
        "nvmf/src/auth/fuzzing.rs",
        "the fuzzer found its corpus with this sequence",
    ),
];

pub(super) fn findings(root: &Path, files: &[String]) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for file in rust_files(files) {
        let is_allowed = ALLOWED.iter().any(|(allowed, _)| allowed == file);
        match (generator(&read(root, file)?), is_allowed) {
            (Some(line), false) => findings.push(format!(
                "{file}:{line}: a random generator: use Random or mix of the crate random"
            )),
            (None, true) => findings.push(format!(
                "{file}: has no random generator: remove the exception in \
                 xtask/src/tidy/generators.rs"
            )),
            _ => {}
        }
    }
    Ok(findings)
}

/// The first line of `text` with the multiplier of a generator.
fn generator(text: &str) -> Option<usize> {
    let has_one = |line: &str| {
        let digits = line.replace('_', "").to_lowercase();
        MULTIPLIERS.iter().any(|number| digits.contains(number))
    };
    Some(text.lines().position(has_one)? + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multipliers_are_found_in_any_spelling() {
        let grouped = concat!("let a;\nx.wrapping_mul(6_364_136_223", "_846_793_005)\n");
        assert_eq!(generator(grouped), Some(2));
        assert_eq!(generator(concat!("z * 0xBF58_476D", "_1CE4_E5B9")), Some(1));
        assert_eq!(generator("random.draw() >> 33\n"), None);
    }
}
