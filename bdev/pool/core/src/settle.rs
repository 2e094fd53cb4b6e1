//! Settling: makes records durable by flushes, and moves the mark up to which a recovery does not
//! verify the data of records.
//!
//! ```text
//!   Idle ─▶ Flush ─▶ Mark ─▶ FlushMark ─▶ Idle
//!     bound   data and    a log page     and the page
//!             records     says so        is durable
//! ```
//!
//! Records after the mark are about *unsettled* granules, which nothing overwrites: a recovery
//! compares them with the records' checksums.

use std::collections::{BTreeMap, HashMap};

use crate::ids::Lsn;
use crate::mutation::Mutation;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SettleStep {
    Idle,
    /// A flush makes durable the data and records up to `bound`.
    Flush {
        bound: Lsn,
    },
    /// The next log page has the mark. `sequence`: that page.
    Mark {
        bound: Lsn,
        sequence: Option<u64>,
    },
    /// A flush makes that page durable.
    FlushMark {
        bound: Lsn,
    },
}

#[derive(Debug)]
pub(crate) struct Settle {
    /// Nothing up to here is verified any more, after any crash.
    settled: Lsn,
    /// What log pages say from now on.
    mark: Lsn,
    /// The highest record that a caller wants settled.
    wanted: Lsn,
    pub step: SettleStep,
    /// Granules of units that unsettled records are about, and the disk of each unit.
    unsettled: BTreeMap<Lsn, (u64, u16, usize)>,
    /// The disks of those, a bit each.
    disks: u64,
    by_unit: HashMap<u64, u16>,
}

impl Settle {
    pub(crate) fn new(settled: Lsn) -> Self {
        Self {
            settled,
            mark: settled,
            wanted: settled,
            step: SettleStep::Idle,
            unsettled: BTreeMap::new(),
            disks: 0,
            by_unit: HashMap::new(),
        }
    }

    pub(crate) fn settled(&self) -> Lsn {
        self.settled
    }

    pub(crate) fn mark(&self) -> Lsn {
        self.mark
    }

    pub(crate) fn want(&mut self, lsn: Lsn) {
        self.wanted = self.wanted.max(lsn);
    }

    /// Records about granules that a recovery would have to verify.
    pub(crate) fn unsettled_records(&self) -> usize {
        self.unsettled.len()
    }

    pub(crate) fn note(&mut self, lsn: Lsn, unit: u64, granules: u16, disk: usize) {
        self.unsettled.insert(lsn, (unit, granules, disk));
        self.disks |= 1 << disk;
        *self.by_unit.entry(unit).or_default() |= granules;
    }

    pub(crate) fn is_unsettled(&self, unit: u64, granules: u16) -> bool {
        self.by_unit.get(&unit).copied().unwrap_or(0) & granules != 0
    }

    /// The disks that the present step must flush: that of the log, and before the mark those with
    /// data of unsettled records. A bit each.
    pub(crate) fn disks_to_flush(&self) -> u64 {
        match self.step {
            SettleStep::Flush { .. } if !Mutation::SettleFirstDiskOnly.is_active() => {
                self.disks | 1
            }
            _ => 1,
        }
    }

    /// Begins to settle up to `bound`, if that is wanted. Returns whether a flush must begin.
    pub(crate) fn begin(&mut self, bound: Lsn) -> bool {
        if self.step != SettleStep::Idle || self.wanted <= self.settled || bound <= self.settled {
            return false;
        }
        self.step = SettleStep::Flush { bound };
        true
    }

    pub(crate) fn data_flushed(&mut self) {
        if let SettleStep::Flush { bound } = self.step {
            self.mark = bound;
            self.step = SettleStep::Mark {
                bound,
                sequence: None,
            };
        }
    }

    /// True when a log page must go out, even without records.
    pub(crate) fn needs_page(&self) -> bool {
        matches!(self.step, SettleStep::Mark { sequence: None, .. })
    }

    /// A log page with the mark is on its way.
    pub(crate) fn marked_in(&mut self, page: u64) {
        if let SettleStep::Mark { sequence, .. } = &mut self.step
            && sequence.is_none()
        {
            *sequence = Some(page);
        }
    }

    /// All log pages before `complete_sequence` are complete. Returns whether a flush must begin.
    pub(crate) fn pages_completed(&mut self, complete_sequence: u64) -> bool {
        match self.step {
            SettleStep::Mark {
                bound,
                sequence: Some(sequence),
            } if sequence < complete_sequence => {
                self.step = SettleStep::FlushMark { bound };
                true
            }
            _ => false,
        }
    }

    pub(crate) fn mark_flushed(&mut self) {
        let SettleStep::FlushMark { bound } = self.step else {
            return;
        };
        self.step = SettleStep::Idle;
        self.settled = bound;
        let rest = self.unsettled.split_off(&(bound + 1));
        let done = std::mem::replace(&mut self.unsettled, rest);
        let disks = self.unsettled.values();
        self.disks = disks.fold(0, |set, (_, _, disk)| set | 1 << disk);
        for (unit, granules, _) in done.into_values() {
            if let Some(set) = self.by_unit.get_mut(&unit) {
                *set &= !granules;
                if *set == 0 {
                    self.by_unit.remove(&unit);
                }
            }
        }
    }

    /// True when the flush of the present step is left out: by a mutation.
    pub(crate) fn skips_flush(&self) -> bool {
        match self.step {
            SettleStep::Flush { .. } => Mutation::SettleWithoutFirstFlush.is_active(),
            SettleStep::FlushMark { .. } => Mutation::SettleWithoutSecondFlush.is_active(),
            _ => false,
        }
    }
}
