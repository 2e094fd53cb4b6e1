//! Goal: short histories survive a crash at every point. Method: every sequence of operations up to
//! a length, on a fresh pool; before each I/O ends, a crash that keeps none, all, each one, all but
//! each one, or a random part of the writes that can be lost, torn ones included; then an import,
//! and another after a crash of that. Longer sequences for changes of parents and read-only
//! volumes, and writes during copies.

use std::collections::HashSet;

use nacre_random::Random;

use super::content::{Value, value};
use super::disk::{ALL_SECTORS, Crash, Disk};
use super::external;
use super::histories::{Disks, OPS, Op};
use super::length::Length;
use super::rig::{self, Rig, identity};
use crate::ids::{Token, VersionId};
use crate::interface::Request;
use crate::mutation::Mutation;

const UNITS: u64 = 6;
const GRANULES: usize = 8;
/// The number of the volume.
const VOLUME: u64 = 1;

/// The contents of the first places of a version, by its number.
type Contents = Vec<(u64, [Value; GRANULES])>;

/// A run of one sequence. The states after each operation are the ones that a crash may show: from
/// the last durable one to the one after the operation in flight.
pub(super) struct Run {
    rig: Rig,
    states: Vec<Contents>,
    /// The volume's parent that users see in each state, from a run without crashes.
    parents: Vec<Option<VersionId>>,
    durable: usize,
    answered: usize,
    next: u64,
    volume: VersionId,
    snapshot: Option<(u64, VersionId)>,
    /// The first state with a read-only volume.
    read_only: Option<usize>,
    sequence: Vec<Op>,
    disks: Disks,
    random: Random,
    crashes: u64,
    /// Disks that were imported, with the oldest state and the durable one.
    seen: HashSet<(u64, usize, usize)>,
}

impl Run {
    fn new(disks: Disks, sequence: &[Op], seed: u64) -> Self {
        let further: &[u64] = match disks {
            Disks::One | Disks::External => &[],
            Disks::Beside | Disks::Two => &[24],
            Disks::Three => &[24, 16],
        };
        let mut rig = Rig::create_beside(96, 9, 64, true, further);
        if matches!(disks, Disks::Two | Disks::Three) {
            for _ in further {
                let addition = rig.addition().expect("a further disk");
                rig.run(addition).unwrap();
            }
        }
        let (volume, mut first) = match disks {
            Disks::External => (rig.on_device(1, 1, UNITS), external::values(1)),
            _ => (rig.created(1, UNITS, false), [0; GRANULES]),
        };
        rig.wrote(volume, 0, &[(0, value(1, 0, 1)), (1, value(1, 1, 2))]);
        let snapshot = rig.snapshot(volume, 2);
        rig.run(Request::Flush).unwrap();
        first[..2].copy_from_slice(&[value(1, 0, 1), value(1, 1, 2)]);
        Self {
            rig,
            states: vec![vec![(1, first), (2, first)]],
            parents: Vec::new(),
            durable: 0,
            answered: 0,
            next: 10,
            volume,
            snapshot: Some((2, snapshot)),
            read_only: None,
            sequence: sequence.to_vec(),
            disks,
            random: Random::new(seed),
            crashes: 0,
            seen: HashSet::new(),
        }
    }

    pub(super) fn run(disks: Disks, sequence: &[Op], seed: u64) -> u64 {
        let mut run = Self::new(disks, sequence, seed);
        run.parents = Self::new(disks, sequence, seed).parents_of(sequence);
        // Crashes during the operations before the last are those of shorter sequences.
        let (last, before) = sequence.split_last().unwrap();
        run.run_before(before);
        if let Some(token) = run.begin(*last) {
            run.run_to_its_end(&[(token, *last)], true);
        }
        run.crashes
    }

    fn run_before(&mut self, sequence: &[Op]) {
        for op in sequence {
            if let Some(token) = self.begin(*op) {
                self.run_to_its_end(&[(token, *op)], false);
            }
        }
    }

    fn parent(&self, rig: &Rig) -> Option<VersionId> {
        rig.pool.state().visible_parent(self.volume)
    }

    /// Runs a sequence without crashes. Returns the volume's parent in each state.
    fn parents_of(mut self, sequence: &[Op]) -> Vec<Option<VersionId>> {
        let mut parents = vec![self.parent(&self.rig)];
        for op in sequence {
            if let Some(token) = self.begin(*op) {
                self.run_to_its_end(&[(token, *op)], false);
                parents.push(self.parent(&self.rig));
            }
        }
        parents
    }

    /// Runs a sequence, then an operation that changes no contents, and after some I/Os of that a
    /// write. Returns false if the operation ended before the write.
    pub(super) fn run_with_a_write(
        disks: Disks,
        before: &[Op],
        (op, write): (Op, Op),
        ios: usize,
    ) -> bool {
        let sequence = [before, &[op, write]].concat();
        let mut run = Self::new(disks, &sequence, ios as u64);
        run.parents = Self::new(disks, &sequence, 0).parents_of(&sequence);
        run.run_before(before);
        let first = run.begin(op).expect("a parent");
        run.rig.pump();
        for _ in 0..ios {
            let Some(at) = run.rig.ready().into_iter().next() else {
                return false;
            };
            run.rig.end(at);
        }
        if op == Op::RemoveDisk {
            if run.rig.pool.leaving().is_none() {
                return false;
            }
        } else if run.rig.answers.iter().any(|(of, _)| *of == first) {
            return false;
        }
        let second = run.begin(write).unwrap();
        run.run_to_its_end(&[(first, op), (second, write)], true);
        assert!(run.crashes > 0);
        true
    }

    /// Submits an operation, and adds the state after it.
    fn begin(&mut self, op: Op) -> Option<Token> {
        let changes_nothing = [
            Op::Snapshot,
            Op::Clone,
            Op::Delete,
            Op::Flush,
            Op::Checkpoint,
            Op::Grow,
            Op::AddDisk,
            Op::RemoveDisk,
            Op::CloneExternal,
        ];
        let may_begin = op != Op::Snapshot && changes_nothing.contains(&op);
        if self.read_only.is_some() && !may_begin {
            return None;
        }
        let mut state = self.states.last().unwrap().clone();
        self.next += 1;
        let next = self.next;
        let volume = self.volume;
        let mut write = |rig: &mut Rig, place: u64, granules: &[u32]| {
            let values: Vec<(u32, Value)> = granules
                .iter()
                .map(|granule| {
                    let at = place * 4 + u64::from(*granule);
                    let value = value(1, at, next);
                    state[0].1[at as usize] = value;
                    (*granule, value)
                })
                .collect();
            rig.write(volume, place, &values, false)
        };
        let token = match op {
            Op::Write => write(&mut self.rig, 1, &[0, 1, 2, 3]),
            Op::Overwrite => write(&mut self.rig, 0, &[0]),
            Op::Partial => write(&mut self.rig, 0, &[1, 2]),
            Op::Unmap => {
                state[0].1[0] = 0;
                state[0].1[1] = 0;
                self.rig.submit(Request::Unmap {
                    version: volume,
                    first: 0,
                    granules: 2,
                })
            }
            Op::UnmapLeaf => {
                state[0].1 = [0; GRANULES];
                let units = self.rig.pool.state().versions[&volume].units;
                self.rig.submit(Request::Unmap {
                    version: volume,
                    first: 0,
                    granules: (units * 4).min(16),
                })
            }
            Op::Shrink => self.rig.submit(Request::Resize {
                version: volume,
                units: GRANULES as u64 / 4,
            }),
            Op::Snapshot => {
                let contents = state[0].1;
                state.push((next, contents));
                let cut = vec![(volume, identity(next))];
                self.rig.submit(Request::Snapshot(cut))
            }
            Op::Clone => {
                let (number, source) = self.snapshot?;
                let contents = state.iter().find(|(of, _)| *of == number)?.1;
                state.push((next, contents));
                self.rig.submit(Request::Clone {
                    source,
                    identity: identity(next),
                    thick: false,
                })
            }
            Op::Delete => {
                let (number, version) = self.snapshot.take()?;
                state.retain(|(of, _)| *of != number);
                self.rig.submit(Request::Delete { version })
            }
            Op::Flush => self.rig.submit(Request::Flush),
            Op::Checkpoint => {
                self.rig.pool.checkpoint();
                self.rig.submit(Request::Flush)
            }
            Op::Restore => {
                let (number, source) = self.snapshot?;
                let contents = state.iter().find(|(of, _)| *of == number)?.1;
                state[0].1 = contents;
                self.rig.submit(Request::Restore {
                    version: volume,
                    source,
                })
            }
            Op::Decouple => {
                self.rig.pool.state().versions[&volume].parent?;
                self.rig.submit(Request::Decouple { version: volume })
            }
            Op::SetParent => {
                let (number, source) = self.snapshot?;
                let known = self.rig.pool.state();
                let of = |id| &known.versions[&id];
                if of(volume).parent == Some(source) || of(volume).units != of(source).units {
                    return None;
                }
                let below = state.iter().find(|(of, _)| *of == number)?.1;
                external::keep_owned(&self.rig, volume, &mut state[0].1, &below);
                self.rig.submit(Request::SetParent {
                    version: volume,
                    source,
                })
            }
            Op::SetExternal => {
                let parent = self.parent(&self.rig);
                let parent = parent.and_then(|of| self.rig.pool.state().versions.get(&of));
                let device = external::device(2, UNITS);
                if parent.is_some_and(|of| of.identity == device.identity) {
                    return None;
                }
                external::keep_owned(
                    &self.rig,
                    volume,
                    &mut state[0].1,
                    &external::values::<GRANULES>(2),
                );
                self.rig.submit(Request::SetExternal {
                    version: volume,
                    device,
                })
            }
            Op::CloneExternal => {
                state.push((next, external::values(1)));
                self.rig.submit(Request::CloneExternal {
                    device: external::device(1, UNITS),
                    identity: identity(next),
                })
            }
            Op::ReadOnly => {
                self.read_only = Some(self.states.len());
                self.rig.submit(Request::ReadOnly { version: volume })
            }
            Op::Inflate => self.rig.submit(Request::Inflate { version: volume }),
            Op::AddDisk => {
                let addition = self.rig.addition()?;
                self.rig.submit(addition)
            }
            Op::RemoveDisk => self.rig.submit(Request::RemoveDisk { disk: 1 }),
            Op::Grow => {
                let growth = self.rig.growth();
                self.rig.submit(growth)
            }
            Op::Resize => self.rig.submit(Request::Resize {
                version: volume,
                units: UNITS + 1,
            }),
        };
        self.states.push(state);
        Some(token)
    }

    /// Ends operations, the last of which made the last states.
    fn run_to_its_end(&mut self, operations: &[(Token, Op)], crashes: bool) {
        let first_state = self.states.len() - operations.len();
        self.rig.pump();
        let mut has_ended = false;
        loop {
            self.take_answers(first_state, operations, has_ended);
            if crashes {
                self.crash_everywhere();
            }
            let mut ready = self.rig.ready().into_iter().next();
            // A search for units of a disk that leaves may have to begin again.
            for _ in 0..4 {
                if ready.is_none() && self.rig.pool.leaving().is_some() {
                    self.rig.pump();
                    ready = self.rig.ready().into_iter().next();
                }
            }
            let Some(at) = ready else {
                break;
            };
            self.rig.end(at);
            has_ended = true;
        }
        assert!(self.rig.pending.is_empty());
        assert_eq!(self.rig.pool.leaving(), None);
    }

    /// Notes the operations that have ended. Before an I/O has ended, only trims: an operation
    /// without work says nothing about the writes before it, and may be refused.
    fn take_answers(&mut self, first_state: usize, operations: &[(Token, Op)], has_ended: bool) {
        for (state, (token, op)) in (first_state..).zip(operations) {
            let trims = matches!(op, Op::Unmap | Op::UnmapLeaf);
            if (has_ended || trims) && self.rig.answers.iter().any(|(of, _)| of == token) {
                let answer = self.rig.take_answer(*token);
                answer.unwrap_or_else(|e| panic!("{:?}: {e:?}", self.sequence));
                self.answered = self.answered.max(state);
                if !trims && !matches!(op, Op::Write | Op::Overwrite | Op::Partial) {
                    self.durable = self.durable.max(state);
                }
            }
        }
    }

    fn crash_everywhere(&mut self) {
        for crash in [Crash::Daemon, Crash::Power] {
            let count = self.rig.disk.losable(crash);
            let oldest = match crash {
                Crash::Daemon => self.answered,
                Crash::Power => self.durable,
            };
            self.check(self.rig.crashed(crash, |_| 0), oldest, crash);
            self.check(self.rig.crashed(crash, |_| ALL_SECTORS), oldest, crash);
            for one in 0..count {
                let only = |at| if at == one { ALL_SECTORS } else { 0 };
                self.check(self.rig.crashed(crash, only), oldest, crash);
                let all_but = |at| if at == one { 0 } else { ALL_SECTORS };
                self.check(self.rig.crashed(crash, all_but), oldest, crash);
                let torn = |at| if at == one { 0x0f } else { ALL_SECTORS };
                self.check(self.rig.crashed(crash, torn), oldest, crash);
            }
            for _ in 0..8 {
                let part: Vec<u8> = (0..count).map(|_| self.part()).collect();
                self.check(self.rig.crashed(crash, |at| part[at]), oldest, crash);
            }
        }
    }

    fn part(&mut self) -> u8 {
        match self.random.below(8) {
            0 => self.random.draw() as u8,
            1..=4 => ALL_SECTORS,
            _ => 0,
        }
    }

    /// Imports, and crashes every fourth import once. A disk that several crashes leave is imported
    /// once for each state that it may show.
    fn check(&mut self, disk: Disk, oldest: usize, crash: Crash) {
        if !self
            .seen
            .insert((disk.fingerprint(), oldest, self.states.len()))
        {
            return;
        }
        self.crashes += 1;
        let mut rig = self.imported(disk, oldest, crash);
        if !self.crashes.is_multiple_of(4) {
            return;
        }
        let before = self.contents(&rig);
        if rig.pool.leaving().is_some() && self.crashes.is_multiple_of(8) {
            // The removal goes on, to its end.
            rig.finish();
            assert_eq!(rig.left.len(), 1, "{:?} {crash:?}", self.sequence);
            let (again, _) = rig::import(rig.disk).unwrap();
            assert_eq!(again.pool.check(), []);
            assert_eq!(self.contents(&again), before);
            return;
        }
        rig.pump();
        for _ in 0..self.random.below(12) {
            if let Some(at) = rig.ready().into_iter().next() {
                rig.end(at);
            }
        }
        let count = rig.disk.losable(Crash::Power);
        let part: Vec<u8> = (0..count).map(|_| self.part()).collect();
        let again = self.imported(rig.crashed(Crash::Power, |at| part[at]), oldest, crash);
        assert_eq!(
            self.contents(&again),
            before,
            "{:?} {crash:?}",
            self.sequence
        );
    }

    fn imported(&self, disk: Disk, oldest: usize, crash: Crash) -> Rig {
        let (rig, _) = rig::import(disk)
            .unwrap_or_else(|error| panic!("{:?} {crash:?}: {error}", self.sequence));
        assert_eq!(rig.pool.check(), [], "{:?} {crash:?}", self.sequence);
        // A disk that is added is in or not; once that is answered, it is in.
        let disks = rig.pool.superblock().disks.disks().len();
        let adds = self.sequence.contains(&Op::AddDisk);
        let is_in = (self.sequence.iter().position(|op| *op == Op::AddDisk))
            .is_some_and(|at| at < self.durable);
        let removes = usize::from(self.sequence.contains(&Op::RemoveDisk));
        let has_left = self.rig.left.len();
        let possible = match self.disks {
            Disks::One | Disks::External => 1..=1,
            Disks::Two => 2 - removes..=2 - has_left,
            Disks::Three => 3 - removes..=3 - has_left,
            Disks::Beside => 1 + usize::from(is_in)..=1 + usize::from(adds),
        };
        assert!(
            possible.contains(&disks),
            "{:?} {crash:?}: {disks}",
            self.sequence
        );
        let is_read_only = rig.pool.state().versions[&self.volume].is_read_only;
        assert!(is_read_only || self.read_only.is_none_or(|from| oldest < from));
        // A change of the parent is durable when it is answered.
        let parent = self.parent(&rig);
        assert!(
            self.parents[self.durable..self.states.len()].contains(&parent),
            "{:?} {crash:?}: {parent:?} is none of {:?}",
            self.sequence,
            self.parents
        );
        let found = self.contents(&rig);
        let possible = &self.states[oldest..];
        // Each granule of a version has the value of a possible state. A snapshot that is not
        // answered yet may lack writes that were not flushed, as its volume may.
        let is_known = |number: u64| possible[0].iter().any(|(of, _)| *of == number);
        let fits = found.iter().all(|(number, values)| {
            let is_source = |of: u64| of == *number || (of == VOLUME && !is_known(*number));
            let states = possible.iter().flatten();
            let states: Vec<_> = states.filter(|(of, _)| is_source(*of)).collect();
            (0..GRANULES).all(|at| states.iter().any(|(_, known)| known[at] == values[at]))
        });
        let numbers = |state: &Contents| state.iter().map(|(of, _)| *of).collect::<Vec<_>>();
        let exists = possible
            .iter()
            .any(|state| numbers(state) == numbers(&found));
        assert!(
            fits && exists,
            "{:?} {crash:?}: {found:x?} is none of {possible:x?}",
            self.sequence
        );
        rig
    }

    fn contents(&self, rig: &Rig) -> Contents {
        let mut numbers: Vec<u64> = self.states.iter().flatten().map(|(of, _)| *of).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let found = numbers.into_iter().filter_map(|number| {
            let version = rig.find(number)?;
            let values = std::array::from_fn(|at| {
                let read = rig.read(version, at as u64).unwrap();
                read.unwrap_or_else(|| panic!("{:?}: v{number} {at} is torn", self.sequence))
            });
            Some((number, values))
        });
        found.collect()
    }
}

/// All sequences of one and two operations; at [`Length::Full`] all of three, and at
/// [`Length::Ci`] every fifth of these: as the operations are 16, each is at each position.
#[test]
fn every_short_history() {
    let mut sequences: Vec<Vec<Op>> = OPS.iter().map(|op| vec![*op]).collect();
    let longest = Length::of_environment().choose(2, 3, 3);
    let step = Length::of_environment().choose(1, 5, 1);
    let mut begin = 0;
    for _ in 1..longest {
        let end = sequences.len();
        for at in begin..end {
            for op in OPS {
                let mut longer = sequences[at].clone();
                longer.push(op);
                sequences.push(longer);
            }
        }
        begin = end;
    }
    let (mut crashes, mut runs) = (0, 0);
    for (seed, sequence) in sequences.iter().enumerate() {
        if sequence.len() < 3 || seed % step == 0 {
            crashes += Run::run(Disks::One, sequence, seed as u64);
            runs += 1;
        }
    }
    assert!(crashes > 50 * runs, "only {crashes}");
}

/// Changes of parents and read-only volumes after, and before, operations that give them something
/// to copy: snapshots in between, units of the volume's own, trimmed ones, deleted snapshots.
#[test]
fn longer_histories_of_parents() {
    let changes = [Op::Decouple, Op::SetParent, Op::ReadOnly];
    let begins = [Op::Snapshot, Op::Decouple];
    let writes = [Op::Write, Op::Partial, Op::Unmap];
    let others = [Op::Checkpoint, Op::Delete, Op::Clone];
    let mut sequences = Vec::new();
    for (first, change) in begins
        .into_iter()
        .flat_map(|first| changes.map(|op| (first, op)))
    {
        for other in writes.into_iter().chain(others) {
            sequences.push(vec![first, other, change]);
            sequences.push(vec![first, change, other]);
        }
        for write in writes {
            sequences.push(vec![first, write, Op::Checkpoint, change]);
            sequences.push(vec![first, write, change, Op::SetParent]);
        }
    }
    let mut crashed = [0; OPS.len()];
    for (seed, sequence) in sequences.iter().enumerate() {
        let last = *sequence.last().unwrap();
        crashed[last as usize] += u64::from(Run::run(Disks::One, sequence, seed as u64) > 0);
    }
    let enough = |change: &Op| crashed[*change as usize] >= 8;
    assert!(changes.iter().all(enough), "{crashed:?}");
}

/// Goal: a write during the copies of a volume is neither lost nor copied over. Method: the write
/// comes after each number of I/Os.
#[test]
fn writes_during_copies() {
    // The first points differ: with a step of 2, the operations together come at every point.
    let step = Length::of_environment().choose(4, 2, 1);
    for (at, op) in [Op::Decouple, Op::Inflate].into_iter().enumerate() {
        for write in [Op::Overwrite, Op::Partial, Op::Unmap] {
            let mut ios = at % step;
            let before = [Op::Write, Op::Snapshot];
            while Run::run_with_a_write(Disks::One, &before, (op, write), ios) {
                ios += step;
            }
            assert!(ios > 2, "{op:?} {write:?}: {ios}");
        }
    }
}

/// Trims of places that another request in flight empties. Returns the runs in which the trim began
/// before that one ended.
fn trims_that_meet(disks: Disks) -> usize {
    let mut runs = 0;
    for before in [&[][..], &[Op::Write]] {
        for first in [Op::Unmap, Op::UnmapLeaf, Op::Restore] {
            let mut ios = 0;
            while Run::run_with_a_write(disks, before, (first, Op::UnmapLeaf), ios) {
                ios += 1;
            }
            runs += ios;
        }
    }
    runs
}

/// Goal: a trim of places that another request emptied is answered only when that request survives
/// a crash. Method: the second request comes after each number of I/Os of the first one; the same
/// with the rule broken.
#[test]
fn a_trim_of_empty_places_survives() {
    for disks in [Disks::One, Disks::External] {
        assert!(trims_that_meet(disks) > 10);
        Mutation::activate(Some(Mutation::UnmapUnlogged));
        let outcome = std::panic::catch_unwind(|| trims_that_meet(disks));
        Mutation::activate(None);
        assert!(outcome.is_err(), "{disks:?}: the fault is not found");
    }
}

/// Goal: no crash loses data of a pool of two disks, and a disk that is being added is in or not.
/// Method: the same, with two disks whose caches are lost independently.
#[test]
fn histories_of_two_disks() {
    let at_length = Length::of_environment() != Length::Short;
    let mut sequences: Vec<(Disks, Vec<Op>)> = Vec::new();
    let data = [Op::Write, Op::Overwrite, Op::Partial, Op::Unmap, Op::Flush];
    let befores = [Op::Write, Op::Snapshot, Op::Delete, Op::Checkpoint];
    for op in OPS {
        sequences.push((Disks::Two, vec![op]));
        for before in OPS {
            if at_length || (befores.contains(&before) && data.contains(&op)) {
                sequences.push((Disks::Two, vec![before, op]));
            }
        }
    }
    sequences.push((Disks::Beside, vec![Op::AddDisk]));
    for op in OPS {
        sequences.push((Disks::Beside, vec![op, Op::AddDisk]));
        sequences.push((Disks::Beside, vec![Op::AddDisk, op]));
    }
    sequences.push((Disks::Beside, vec![Op::AddDisk, Op::Grow, Op::Write]));
    let mut crashes = 0;
    for (seed, (disks, sequence)) in sequences.iter().enumerate() {
        crashes += Run::run(*disks, sequence, seed as u64);
    }
    assert!(crashes > 50 * sequences.len() as u64, "only {crashes}");
}

/// Goal: no crash loses data of a disk that leaves, or that has left; the removal goes on after the
/// crash. Method: as above; when the disk has left, it has other contents. The volume's units and
/// those of its snapshot lie on both disks.
#[test]
fn histories_with_a_removal() {
    let befores = [
        vec![],
        vec![Op::Write],
        vec![Op::Write, Op::Snapshot],
        vec![Op::Write, Op::Snapshot, Op::Partial, Op::Clone],
        vec![Op::Unmap, Op::Checkpoint],
        vec![Op::Write, Op::Delete],
    ];
    let at_length = Length::of_environment() != Length::Short;
    let mut crashes = 0;
    for disks in [Disks::Two, Disks::Three] {
        for (seed, before) in befores.iter().enumerate() {
            let sequence = [&before[..], &[Op::RemoveDisk]].concat();
            if at_length || disks == Disks::Two || seed % 2 == 1 {
                crashes += Run::run(disks, &sequence, seed as u64);
            }
        }
    }
    assert!(crashes > 5000, "only {crashes}");
}

/// Goal: operations of hosts while a disk leaves are neither lost nor undone. Method: each
/// operation comes after a number of I/Os of the removal; then a crash at every point.
#[test]
fn operations_during_a_removal() {
    // The first points differ, so the operations together come at most points.
    let step = Length::of_environment().choose(23, 13, 1);
    let others = [Op::Resize, Op::Grow, Op::Decouple, Op::ReadOnly];
    let ops: Vec<Op> = OPS.into_iter().filter(|op| !others.contains(op)).collect();
    let mut runs = 0;
    for (at, op) in ops.iter().copied().enumerate() {
        let disks = if at % 2 == 0 {
            Disks::Two
        } else {
            Disks::Three
        };
        let mut ios = at % step;
        let before = [Op::Write, Op::Snapshot, Op::Partial];
        while Run::run_with_a_write(disks, &before, (Op::RemoveDisk, op), ios) {
            ios += step;
            runs += 1;
        }
    }
    assert!(runs > 2 * ops.len(), "only {runs}");
}
