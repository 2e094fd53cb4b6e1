//! The outcome of a check of a pool.

/// A fault of a pool's state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Finding {
    #[error("unit {unit} is in use at two places")]
    UsedTwice { unit: u64 },
    #[error("unit {unit} is in use, and counts as free")]
    UsedAndFree { unit: u64 },
    #[error("unit {unit} is in limbo, and in use")]
    UsedInLimbo { unit: u64 },
    #[error("unit {unit} is not free, and nothing uses it")]
    Leaked { unit: u64 },
    #[error("unit {unit} is shared with a parent that does not have it")]
    Stray { unit: u64 },
    #[error("the metadata of leaf {leaf} is lost: its places answer errors until they are cleared")]
    Lost { leaf: u64 },
    #[error("both copies of page {page} of the directory were bad; the next root writes it again")]
    ListLost { page: u64 },
    #[error("a volume owns {counted} places, its count says {kept}")]
    Owned { counted: u64, kept: u64 },
}

/// Findings that a report names; it counts the others.
const MOST_FINDINGS: usize = 64;

/// The outcome of a check of the whole pool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Pages of metadata, each of which was read in both copies.
    pub pages: u64,
    /// Copies that were bad, and that were written again.
    pub repaired: u64,
    /// Bad copies that could not be written.
    pub not_repaired: u64,
    /// Units that maps use.
    pub units: u64,
    pub findings: Vec<Finding>,
    /// Findings beyond those.
    pub more_findings: u64,
}

impl CheckReport {
    pub(crate) fn find(&mut self, finding: Finding) {
        if self.findings.len() < MOST_FINDINGS {
            self.findings.push(finding);
        } else {
            self.more_findings += 1;
        }
    }
}
