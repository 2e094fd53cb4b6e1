//! The report of a check: how much it read, which copies it repaired, and which faults are left.

use std::fmt;

use uuid::Uuid;

/// A range of bytes of a volume or snapshot, perhaps of a deleted one, whose space others share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    pub lvol: Uuid,
    pub offset: u64,
    pub bytes: u64,
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, end) = (self.offset, self.offset.saturating_add(self.bytes));
        write!(
            f,
            "lvol {}, bytes {first} to {}",
            self.lvol,
            end.saturating_sub(1)
        )
    }
}

/// The end of a sentence about a unit.
fn place(at: &Option<Extent>) -> String {
    at.map_or_else(String::new, |at| format!(": {at}"))
}

/// A fault of a pool that the check found and did not repair.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Finding {
    #[error("unit {unit} is in use at two places{}", place(.at))]
    UsedTwice { unit: u64, at: Option<Extent> },
    #[error("unit {unit} is in use, and counts as free{}", place(.at))]
    UsedAndFree { unit: u64, at: Option<Extent> },
    #[error("unit {unit} is in limbo, and in use{}", place(.at))]
    UsedInLimbo { unit: u64, at: Option<Extent> },
    #[error("unit {unit} is not free, and nothing uses it")]
    Leaked { unit: u64 },
    #[error("unit {unit} is shared with a parent that does not have it: {at}")]
    Stray { unit: u64, at: Extent },
    #[error("a part of a map is lost, and its bytes answer errors until they are cleared: {at}")]
    Lost { at: Extent },
    #[error(
        "both copies of page {page} of a map are bad, and the check cannot write them again: an \
         import would lose {at}"
    )]
    NodeLost { page: u64, at: Extent },
    #[error("both copies of page {page} of the directory were bad; the next root writes it again")]
    ListLost { page: u64 },
    #[error("lvol {lvol} owns {counted} places, its count says {kept}")]
    Owned { lvol: Uuid, counted: u64, kept: u64 },
}

/// Most findings in a report, which counts the others.
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
