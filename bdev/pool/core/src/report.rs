//! The report of a check: how much it read, which copies it repaired, and which faults are left.

/// A fault of a pool that the check found and did not repair.
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
    #[error(
        "the map of {leaves} leaves from leaf {leaf} on is lost: they answer errors until they are \
         cleared"
    )]
    Lost { leaf: u64, leaves: u64 },
    #[error(
        "both copies of page {page} of a map are bad, and the check cannot write them again: an \
         import would lose the leaves from leaf {leaf} on"
    )]
    NodeLost { page: u64, leaf: u64 },
    #[error("both copies of page {page} of the directory were bad; the next root writes it again")]
    ListLost { page: u64 },
    #[error("a volume owns {counted} places, its count says {kept}")]
    Owned { counted: u64, kept: u64 },
}

/// A report names so many findings, and counts the others.
const MOST_FINDINGS: usize = 64;

/// The result of a check of a whole pool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Pages of metadata. The check read both copies of each.
    pub pages: u64,
    /// Bad copies that the check wrote again. A flush followed, so they are durable.
    pub repaired: u64,
    /// Bad copies that the check could not write, or not flush.
    pub not_repaired: u64,
    /// Units that maps use.
    pub units: u64,
    pub findings: Vec<Finding>,
    /// The number of findings that `findings` has no room for.
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
