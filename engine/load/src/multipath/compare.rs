//! Passes that write the range, or read it and compare the paths.

use std::ops::Range;

use nacre_bdev::Op;

use super::contents::{Contents, checksum_at};
use super::mount::Mount;
use super::pass::{Data, PassPlan, PassReport};

/// Reads of a unit over every path before a difference counts: another host may write there.
const COMPARISONS: u32 = 8;

/// Ends a pass early with `false`.
pub(super) type KeepGoing<'a> = &'a mut dyn FnMut() -> bool;

/// Units that a path returned with other data than the reference: unit and index of the path.
pub(super) type Unequal = Vec<(u64, usize)>;

/// The passes over some paths of a mount.
pub(super) struct Compare<'a> {
    pub mount: &'a mut Mount,
    pub contents: &'a mut Contents,
    pub depth: u16,
}

impl Compare<'_> {
    /// Writes the plans' units at the same time.
    pub(super) fn write(&mut self, plans: &[PassPlan], watch: KeepGoing) -> Vec<PassReport> {
        let mut pattern = Pattern(self.contents);
        self.mount
            .pass(Op::Write, plans, self.depth, &mut pattern, watch)
    }

    /// Reads the plans' units at the same time, and compares them with the written patterns. In a
    /// test that does not write, the data of the path `reference` becomes the expected data. The
    /// method adds units that other paths return differently to `unequal`. Also returns a checksum
    /// of each plan.
    pub(super) fn read(
        &mut self,
        plans: &[PassPlan],
        reference: Option<usize>,
        unequal: &mut Unequal,
        watch: KeepGoing,
    ) -> (Vec<PassReport>, Vec<u64>) {
        let paths = self.mount.names().len();
        let mut comparison = Comparison {
            contents: self.contents,
            reference,
            unequal,
            sums: vec![0; paths],
        };
        let passes = self
            .mount
            .pass(Op::Read, plans, self.depth, &mut comparison, watch);
        let sums = plans.iter().map(|plan| comparison.sums[plan.path]);
        (passes, sums.collect())
    }

    /// Reads unequal units again over the paths, and records those that stay unequal.
    pub(super) fn recheck(&mut self, mut unequal: Unequal, paths: &[usize], watch: KeepGoing) {
        unequal.sort_unstable();
        unequal.dedup_by_key(|(unit, _)| *unit);
        let names = self.mount.names();
        for (unit, path) in unequal {
            if !self.agrees(unit, paths, watch) {
                self.contents.differs(unit, &names[path]);
            }
        }
    }

    /// Reads a unit over the paths in turn, in up to [`COMPARISONS`] rounds. Returns true when all
    /// reads of a round succeed and return the same data.
    fn agrees(&mut self, unit: u64, paths: &[usize], watch: KeepGoing) -> bool {
        (0..COMPARISONS).any(|_| {
            let mut unequal = Vec::new();
            let mut is_complete = true;
            for path in paths {
                let plan = one(*path, unit..unit + 1);
                let (passes, _) = self.read(&[plan], paths.first().copied(), &mut unequal, watch);
                is_complete &= passes.iter().all(PassReport::is_good);
            }
            is_complete && unequal.is_empty()
        })
    }
}

/// The plan of a pass of these units over one path.
pub(super) fn one(path: usize, units: Range<u64>) -> PassPlan {
    PassPlan { path, units }
}

/// Writes the next generation.
struct Pattern<'a>(&'a mut Contents);

impl Data for Pattern<'_> {
    fn fill(&mut self, unit: u64, data: &mut [u8]) {
        self.0.fill(unit, data);
    }

    fn wrote(&mut self, unit: u64) {
        self.0.wrote(unit);
    }

    fn write_failed(&mut self, unit: u64) {
        self.0.write_failed(unit);
    }

    fn read(&mut self, _path: usize, _unit: u64, _data: &[u8]) {}
}

struct Comparison<'a> {
    contents: &'a mut Contents,
    reference: Option<usize>,
    unequal: &'a mut Unequal,
    /// By path.
    sums: Vec<u64>,
}

impl Data for Comparison<'_> {
    fn fill(&mut self, _unit: u64, _data: &mut [u8]) {}

    fn wrote(&mut self, _unit: u64) {}

    fn write_failed(&mut self, _unit: u64) {}

    fn read(&mut self, path: usize, unit: u64, data: &[u8]) {
        self.sums[path] = self.sums[path].wrapping_add(checksum_at(unit, data));
        if self.contents.writes() || self.reference == Some(path) {
            self.contents.read(unit, data);
        } else {
            self.contents.count_compared();
            if !self.contents.is_known(unit, data) {
                self.unequal.push((unit, path));
            }
        }
    }
}
