//! The result of a test suite: numbers of passed, failed and skipped tests ([`Tally`]). The sum of
//! all suites gives the exit code and the last line of `cargo xtask test`.

use std::fmt;
use std::process::ExitCode;

use crate::process::End;

/// Results of a suite: the number of passed tests, the names of failed ones, and the reasons for
/// skipped ones.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Tally {
    pub passed: u64,
    pub failed: u64,
    pub failures: Vec<String>,
    pub skipped: Vec<String>,
}

impl Tally {
    pub(crate) fn pass(&mut self) {
        self.passed += 1;
    }

    pub(crate) fn fail(&mut self, what: impl Into<String>) {
        self.failed += 1;
        self.failures.push(what.into());
    }

    /// One failure: a suite that could not run.
    pub(crate) fn of_error(what: &str, error: &anyhow::Error) -> Self {
        let mut tally = Self::default();
        tally.fail(format!("{what}: {error:#}"));
        tally
    }

    pub(crate) fn skip(&mut self, what: impl Into<String>) {
        self.skipped.push(what.into());
    }

    pub(crate) fn check(&mut self, what: &str, ok: bool) {
        if ok { self.pass() } else { self.fail(what) }
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.failures.extend(other.failures);
        self.skipped.extend(other.skipped);
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        if self.failed == 0 {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }

    /// Prints failed and skipped tests.
    pub(crate) fn print_details(&self) {
        for skipped in &self.skipped {
            println!("SKIPPED: {skipped}");
        }
        for failure in &self.failures {
            println!("FAILED: {failure}");
        }
    }
}

/// The last line, which continuous integration reads.
impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

/// Parses the output of `cargo test`, one line at a time.
///
/// A test that cannot run on this machine writes `SKIPPED: name: why` to its real stderr (the
/// harness captures only the print macros) and passes. It is listed as skipped, not counted as
/// passed.
#[derive(Default)]
pub(crate) struct CargoTest {
    tally: Tally,
    binary: String,
    has_result: bool,
    /// Tests of this binary that libtest reported as slow and that have not ended.
    slow: Vec<String>,
}

impl CargoTest {
    /// For the output of one test program, which does not have its name.
    pub(crate) fn of(binary: &str) -> Self {
        Self {
            binary: binary.to_owned(),
            ..Self::default()
        }
    }

    pub(crate) fn line(&mut self, line: &str) {
        let trimmed = line.trim();
        if let Some(binary) = trimmed
            .strip_prefix("Running ")
            .or_else(|| trimmed.strip_prefix("Doc-tests "))
        {
            self.binary = named(binary);
            self.slow.clear();
        } else if let Some(rest) = trimmed.strip_prefix("test result: ") {
            self.has_result = true;
            self.tally.passed += count(rest, " passed");
            self.tally.failed += count(rest, " failed");
            let ignored = count(rest, " ignored");
            if ignored > 0 {
                // Doc examples marked `ignore` are listed as well.
                self.tally
                    .skip(format!("{}: {ignored} ignored test(s)", self.binary));
            }
        } else if let Some((name, end)) = trimmed
            .strip_prefix("test ")
            .and_then(|rest| rest.split_once(" ... "))
            .filter(|(_, end)| !end.starts_with("SKIPPED: "))
        {
            self.slow.retain(|slow| slow != name);
            if end == "FAILED" {
                self.tally.failures.push(format!("{}: {name}", self.binary));
            }
        } else if let Some((name, _)) = trimmed
            .strip_prefix("test ")
            .and_then(|rest| rest.split_once(" has been running for over "))
        {
            self.slow.push(name.to_owned());
        } else if let Some(at) = trimmed.find("SKIPPED: ") {
            // The harness may already have written `test name ... ` on this line.
            self.tally.skip(&trimmed[at + "SKIPPED: ".len()..]);
        }
    }

    /// The totals. A run that was killed counts as one more failure, which names the tests that
    /// were running. So does a failed run without a failed test: it did not build, or it crashed.
    pub(crate) fn finish(self, suite: &str, end: End) -> Tally {
        let mut tally = self.ended(suite, end);
        if end.success() && tally.passed == 0 && tally.skipped.is_empty() {
            tally.fail(format!("{suite}: succeeded without running a single test"));
        }
        tally
    }

    /// True if a program has printed its result, also of no test.
    pub(crate) fn has_result(&self) -> bool {
        self.has_result
    }

    /// The totals of one program of several: it may have no test.
    pub(crate) fn ended(mut self, suite: &str, end: End) -> Tally {
        self.tally.passed = self.tally.passed.saturating_sub(self.explicit_skips());
        if matches!(end, End::TimedOut(_)) || !end.success() && self.tally.failed == 0 {
            let mut what = format!("{suite}: {end}, last in {}", self.place());
            if !self.slow.is_empty() {
                what.push_str(&format!("; still running: {}", self.slow.join(", ")));
            }
            self.tally.fail(what);
        }
        self.tally
    }

    fn explicit_skips(&self) -> u64 {
        let explicit = self
            .tally
            .skipped
            .iter()
            .filter(|text| !text.ends_with("ignored test(s)"));
        explicit.count() as u64
    }

    fn place(&self) -> &str {
        if self.binary.is_empty() {
            "the build"
        } else {
            &self.binary
        }
    }
}

/// The name of a test binary: `unittests src/lib.rs of nacre_bdev` for `unittests src/lib.rs
/// (target/debug/deps/nacre_bdev-0123456789abcdef)`.
fn named(binary: &str) -> String {
    let Some((source, file)) = binary.split_once(" (") else {
        return binary.to_owned();
    };
    let file = file.trim_end_matches(')').rsplit('/').next();
    match file.and_then(|file| file.rsplit_once('-')) {
        Some((name, _)) if source.starts_with("unittests") => format!("{source} of {name}"),
        _ => source.to_owned(),
    }
}

/// Reads the output of a script, one line at a time: `FAILED: name`, `SKIPPED: name: why`, and the
/// totals in the last line.
pub(crate) struct ScriptTest {
    name: &'static str,
    tally: Tally,
    sum: Option<(u64, u64)>,
}

impl ScriptTest {
    /// `name`: of the suite, in front of each failure.
    pub(crate) fn new(name: &'static str) -> Self {
        Self {
            name,
            tally: Tally::default(),
            sum: None,
        }
    }

    pub(crate) fn line(&mut self, line: &str) {
        if let Some(failure) = line.strip_prefix("FAILED: ") {
            self.tally
                .failures
                .push(format!("{}: {failure}", self.name));
        } else if let Some(skipped) = line.strip_prefix("SKIPPED: ") {
            self.tally.skip(skipped);
        } else {
            self.sum = sum(line);
        }
    }

    pub(crate) fn finish(mut self, end: End) -> Tally {
        match self.sum {
            Some((passed, failed)) if end.success() == (failed == 0) => {
                self.tally.passed = passed;
                self.tally.failed = failed;
            }
            _ => self
                .tally
                .fail(format!("{}: {end} without a sum", self.name)),
        }
        self.tally
    }
}

/// The numbers of `12 passed, 3 failed`.
fn sum(line: &str) -> Option<(u64, u64)> {
    let (passed, failed) = line.split_once(" passed, ")?;
    let failed = failed.strip_suffix(" failed")?;
    Some((passed.parse().ok()?, failed.parse().ok()?))
}

/// The number before `word` in `ok. 12 passed; 0 failed; …`.
fn count(text: &str, word: &str) -> u64 {
    let Some(at) = text.find(word) else { return 0 };
    let before = &text[..at];
    let digits = before
        .rfind(|c: char| !c.is_ascii_digit())
        .map_or(0, |i| i + 1);
    before[digits..].parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;
    use std::time::Duration;

    fn exit(code: i32) -> End {
        End::Exited(ExitStatus::from_raw(code << 8))
    }

    fn parse(text: &str, end: End) -> Tally {
        let mut reader = CargoTest::default();
        text.lines().for_each(|line| reader.line(line));
        reader.finish("unit tests", end)
    }

    #[test]
    fn sums_over_binaries_and_names_failures() {
        let text = "     Running unittests src/lib.rs (target/debug/deps/nacre_bdev-1)\n\
            test queue::tests::a ... ok\n\
            test queue::tests::b ... FAILED\n\
            test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.0s\n\
               Doc-tests nacre_bdev\n\
            test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.0s\n";
        let tally = parse(text, exit(101));
        assert_eq!(tally.to_string(), "13 passed, 1 failed");
        assert_eq!(
            tally.failures,
            ["unittests src/lib.rs of nacre_bdev: queue::tests::b"]
        );
    }

    #[test]
    fn a_run_that_does_not_build_is_a_failure() {
        let tally = parse("error: could not compile `nacre-bdev`\n", exit(101));
        assert_eq!(tally.to_string(), "0 passed, 1 failed");
    }

    #[test]
    fn an_empty_run_is_a_failure() {
        assert_eq!(parse("", exit(0)).failed, 1);
    }

    #[test]
    fn a_run_past_its_limit_is_a_failure_that_names_the_place() {
        let text = "     Running tests/hang.rs (target/debug/deps/hang-1)\n";
        let tally = parse(text, End::TimedOut(Duration::from_secs(9)));
        assert_eq!(
            tally.failures,
            ["unit tests: killed after its limit of 9 s, last in tests/hang.rs"]
        );
    }

    /// Goal: a test that fails does not hide another one that never ends.
    #[test]
    fn a_test_that_never_ends_is_named() {
        let text = "     Running unittests src/lib.rs (target/debug/deps/nacre_bdev-1)\n\
            test a has been running for over 60 seconds\n\
            test b has been running for over 60 seconds\n\
            test a ... ok\n\
            test c ... FAILED\n\
            test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.0s\n\
                Running unittests src/lib.rs (target/debug/deps/nacre_nvmf-1)\n\
            test d has been running for over 60 seconds\n";
        let tally = parse(text, End::TimedOut(Duration::from_secs(9)));
        assert_eq!(tally.failed, 2);
        assert_eq!(
            tally.failures[1],
            "unit tests: killed after its limit of 9 s, last in unittests src/lib.rs of nacre_nvmf; \
             still running: d"
        );
    }

    #[test]
    fn skipped_and_ignored_tests_are_listed_and_not_counted_as_passed() {
        let text = "     Running tests/e2e.rs (target/debug/deps/e2e-1)\n\
            test needs_ipv6 ... SKIPPED: needs_ipv6: no ::1 here\n\
            ok\n\
            test result: ok. 4 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.0s\n";
        let tally = parse(text, exit(0));
        assert_eq!(tally.to_string(), "3 passed, 0 failed");
        assert_eq!(
            tally.skipped,
            ["needs_ipv6: no ::1 here", "tests/e2e.rs: 2 ignored test(s)"]
        );
    }

    fn script(text: &str, code: i32) -> Tally {
        let mut reader = ScriptTest::new("compare");
        text.lines().for_each(|line| reader.line(line));
        reader.finish(exit(code))
    }

    #[test]
    fn the_last_line_of_a_script_counts() {
        let good = script("-- calls\n1 calls of 1 methods\n12 passed, 0 failed\n", 0);
        assert_eq!(good.to_string(), "12 passed, 0 failed");
        let bad = script(
            "SKIPPED: y: no root\nFAILED: x, good: -1, not -19\n11 passed, 1 failed\n",
            1,
        );
        assert_eq!(bad.to_string(), "11 passed, 1 failed");
        assert_eq!(bad.failures, ["compare: x, good: -1, not -19"]);
        assert_eq!(bad.skipped, ["y: no root"]);
    }

    #[test]
    fn a_script_without_totals_is_a_failure() {
        for (text, code) in [
            ("", 0),
            ("Traceback\n", 1),
            ("12 passed, 0 failed\n", 1),
            ("11 passed, 1 failed\n", 0),
            ("12 passed, 0 failed\nTraceback\n", 1),
        ] {
            assert_eq!(script(text, code).failed, 1, "{text}");
        }
    }
}
