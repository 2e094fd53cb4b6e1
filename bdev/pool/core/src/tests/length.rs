//! How much the seeded and the exhaustive tests try.

/// The lengths of a test, by `NACRE_TEST_AT_LENGTH`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Length {
    /// For a developer who changed something else: the variable is not set.
    Short,
    /// `ci`: `cargo xtask test` and the continuous integration have time for it. It has every kind
    /// of history and every operation, a sixteenth of the seeds, a fifth of the histories of three
    /// operations, and a part of the points in time.
    Ci,
    /// Any other value.
    Full,
}

impl Length {
    pub(super) fn of_environment() -> Self {
        match std::env::var_os("NACRE_TEST_AT_LENGTH") {
            None => Self::Short,
            Some(value) if value == "ci" => Self::Ci,
            Some(_) => Self::Full,
        }
    }

    /// The value for this length.
    pub(super) fn choose<T>(self, short: T, ci: T, full: T) -> T {
        match self {
            Self::Short => short,
            Self::Ci => ci,
            Self::Full => full,
        }
    }
}
