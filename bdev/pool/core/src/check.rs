//! Compares the allocation bitmap of a pool with the block maps of all its volumes and snapshots.
//!
//! A unit (64 KiB) must have exactly one use: data of a volume or snapshot, metadata, or pending
//! (in limbo). The check finds units that are used twice, used and marked free, allocated but not
//! used, or shared with a parent that does not have them, and parts of a map that are unreadable.
//!
//! `Accounts` works in small steps while the pool is in use; `findings` is the same comparison
//! in one step.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use crate::bits::Bits;
use crate::format::record::PassKind;
use crate::ids::VersionId;
use crate::map::{Entry, LostNode, Node, Shape};
pub use crate::report::{CheckReport, Extent, Finding};
use crate::space::Space;
use crate::state::{State, Version, count_owned};
use crate::zones::Zones;

/// Most unreadable leaves that one step counts.
const LOST: u64 = 64;
/// Words (of 64 units) of the bitmaps that a step compares.
const WORDS: usize = 1 << 12;

/// Compares the units in use at one moment with the maps of that moment, a few leaves at a time.
///
/// Every unit that a map uses has one owner: the version (volume or snapshot) to which it is
/// exclusive. A version that shares the unit has it from its parent, which has it at the same
/// place. If the owner's map is unreadable there, the unit is an *orphan*: no version owns it.
#[derive(Debug)]
pub(crate) struct Accounts {
    state: State,
    /// Units that the pool counts as allocated.
    used: Bits,
    /// Units of the leaves counted so far, without orphans.
    owned: Bits,
    orphans: HashSet<u64>,
    /// Allocated units that no map refers to: being written, or in limbo until a free is settled.
    pending: HashSet<u64>,
    /// Units of metadata.
    zones: Bits,
    /// Versions to count, the last one first.
    versions: Vec<VersionId>,
    /// The next leaf of that version, and the places that it owns in the leaves before.
    next: u64,
    places: u64,
    /// Lost leaves of that version that are not in the report yet.
    lost: Range<u64>,
    /// The next word to compare, once all versions are counted.
    word: usize,
}

/// The origin of a shared unit.
enum Origin {
    /// A readable version above has the unit.
    Known,
    /// The map of the version that should have it is unreadable there.
    Lost,
    /// The parent does not have it.
    None,
}

impl Accounts {
    /// A snapshot of this moment. `pending`: allocated units that no map refers to.
    pub(crate) fn new(
        state: &State,
        space: &Space,
        zones: &Zones,
        pending: impl Iterator<Item = u64>,
    ) -> Self {
        Self {
            owned: Bits::new(space.units()),
            orphans: HashSet::new(),
            used: space.used().clone(),
            pending: pending.collect(),
            zones: zones.bits().clone(),
            versions: state.versions.keys().copied().collect(),
            state: state.clone(),
            next: 0,
            places: 0,
            lost: 0..0,
            word: 0,
        }
    }

    /// Counts at most `leaves` leaves, or compares [`WORDS`] of the bitmaps. Adds findings to
    /// `report`. Returns true when the check is complete.
    pub(crate) fn advance(&mut self, leaves: usize, report: &mut CheckReport) -> bool {
        for _ in 0..leaves {
            let Some(id) = self.versions.last().copied() else {
                return self.compare(report);
            };
            match self.next_leaf(id) {
                Some(leaf) => self.next = self.count(id, leaf, report),
                None => {
                    self.report_lost(id, report);
                    self.compare_places(id, report);
                    self.versions.pop();
                    (self.next, self.places) = (0, 0);
                }
            }
        }
        false
    }

    /// The next leaf that the version does not share with its parent.
    fn next_leaf(&self, id: VersionId) -> Option<u64> {
        let version = &self.state.versions[&id];
        let from = match version.pass {
            Some((PassKind::Free | PassKind::Merge, cursor)) => cursor.max(self.next),
            _ => self.next,
        };
        let parent = version.parent.and_then(|id| self.state.versions.get(&id));
        // The child of a version that is being merged owns the units of that version.
        let parent = parent.filter(|parent| !matches!(parent.pass, Some((PassKind::Merge, _))));
        let other = parent.map(|parent| &parent.tree);
        let tree = &version.tree;
        tree.next_difference(other, self.state.shape(), from)
    }

    /// The version that a shared unit of this leaf comes from.
    fn parent(&self, id: VersionId, leaf: u64) -> Option<VersionId> {
        let mut id = self.state.versions[&id].parent?;
        loop {
            let parent = self.state.versions.get(&id)?;
            match parent.pass {
                Some((PassKind::Merge, cursor)) if leaf < cursor => id = parent.parent?,
                _ => return Some(id),
            }
        }
    }

    /// Counts a leaf. Returns the next leaf to look at.
    fn count(&mut self, id: VersionId, leaf: u64, report: &mut CheckReport) -> u64 {
        let (shape, floor) = (self.state.shape(), self.state.floor(id, leaf));
        let parent = self.parent(id, leaf);
        if let Some(lost) = self.state.versions[&id].tree.lost_span(shape, leaf) {
            return self.count_lost(id, leaf, lost.end, report);
        }
        let first = leaf * shape.units_per_leaf as u64;
        let has_device = self.state.external_parent(id).is_some();
        for place in first..first + shape.units_per_leaf as u64 {
            let entry = self.state.entry(id, place).unwrap_or_default();
            self.places += u64::from(entry.own.is_exclusive(floor));
            let at = self.extent(id, place, 1);
            for part in entry.parts() {
                let unit = part.unit;
                if part.is_external() {
                    if !has_device {
                        report.find(Finding::Stray { unit, at });
                    }
                    continue;
                }
                if part.is_exclusive(floor) {
                    self.own(unit, at, report);
                    continue;
                }
                match self.origin(parent, place, unit) {
                    Origin::Known => {}
                    Origin::Lost => self.adopt(unit, at, report),
                    Origin::None => report.find(Finding::Stray { unit, at }),
                }
            }
        }
        leaf + 1
    }

    /// Units of a version, as bytes.
    fn extent(&self, id: VersionId, place: u64, units: u64) -> Extent {
        let unit = self.state.geometry.unit_bytes();
        Extent {
            lvol: self.state.versions[&id].identity.id,
            offset: place * unit,
            bytes: units * unit,
        }
    }

    /// Leaves that a version can have.
    fn leaves(&self, id: VersionId) -> u64 {
        let per_leaf = self.state.shape().units_per_leaf as u64;
        self.state.versions[&id].units.div_ceil(per_leaf)
    }

    /// Notes lost leaves from `leaf` on, at most [`LOST`] of them and up to `end`. The finding of a
    /// parent names those that the parent has lost too. Returns the next leaf to look at.
    fn count_lost(&mut self, id: VersionId, leaf: u64, end: u64, report: &mut CheckReport) -> u64 {
        let shape = self.state.shape();
        let last = self.leaves(id).min(end);
        if leaf >= last {
            return end;
        }
        let next = last.min(leaf + LOST);
        for leaf in leaf..next {
            let parent = self.parent(id, leaf);
            let is_named = parent.is_some_and(|parent| {
                let tree = &self.state.versions[&parent].tree;
                leaf < self.leaves(parent) && tree.lost_span(shape, leaf).is_some()
            });
            if is_named {
                continue;
            }
            if self.lost.end != leaf {
                self.report_lost(id, report);
                self.lost = leaf..leaf;
            }
            self.lost.end = leaf + 1;
        }
        next
    }

    fn report_lost(&mut self, id: VersionId, report: &mut CheckReport) {
        let lost = std::mem::take(&mut self.lost);
        if lost.is_empty() {
            return;
        }
        let per_leaf = self.state.shape().units_per_leaf as u64;
        let (first, units) = (lost.start * per_leaf, self.state.versions[&id].units);
        let end = units.min(lost.end * per_leaf);
        let at = self.extent(id, first, end - first);
        report.find(Finding::Lost { at });
    }

    /// The origin of a unit that a child of `parent` shares.
    fn origin(&self, mut parent: Option<VersionId>, place: u64, unit: u64) -> Origin {
        let leaf = self.state.leaf_of(place);
        let mut otherwise = Origin::None;
        while let Some(id) = parent {
            match self.state.entry(id, place) {
                Ok(entry) if entry.uses(unit) => return Origin::Known,
                Ok(_) => return otherwise,
                Err(LostNode) => otherwise = Origin::Lost,
            }
            parent = self.parent(id, leaf);
        }
        otherwise
    }

    fn own(&mut self, unit: u64, at: Extent, report: &mut CheckReport) {
        if self.owned.has(unit) || self.orphans.contains(&unit) {
            let at = Some(at);
            report.find(Finding::UsedTwice { unit, at });
        }
        self.owned.add(unit);
        self.compare_use(unit, at, report);
    }

    /// Counts an orphan, which several versions may share.
    fn adopt(&mut self, unit: u64, at: Extent, report: &mut CheckReport) {
        if !self.orphans.insert(unit) {
            return;
        }
        if self.owned.has(unit) {
            let at = Some(at);
            report.find(Finding::UsedTwice { unit, at });
        }
        self.compare_use(unit, at, report);
    }

    fn compare_use(&self, unit: u64, at: Extent, report: &mut CheckReport) {
        report.units += 1;
        let at = Some(at);
        if !self.used.has(unit) {
            report.find(Finding::UsedAndFree { unit, at });
        }
        if self.zones.has(unit) {
            report.find(Finding::UsedTwice { unit, at });
        } else if self.pending.contains(&unit) {
            report.find(Finding::UsedInLimbo { unit, at });
        }
    }

    fn compare_places(&self, id: VersionId, report: &mut CheckReport) {
        let version = &self.state.versions[&id];
        let (counted, kept) = (self.places, version.owned);
        if version.is_thick && !version.is_hidden && kept != counted {
            let lvol = version.identity.id;
            report.find(Finding::Owned {
                lvol,
                counted,
                kept,
            });
        }
    }

    /// Finds used units without an owner, [`WORDS`] at a time. Returns true at the end.
    fn compare(&mut self, report: &mut CheckReport) -> bool {
        let end = self.used.words().min(self.word + WORDS);
        for word in self.word..end {
            let known = self.owned.word(word) | self.zones.word(word);
            let mut left = self.used.word(word) & !known;
            while left != 0 {
                let unit = word as u64 * 64 + u64::from(left.trailing_zeros());
                left &= left - 1;
                if !self.pending.contains(&unit) && !self.orphans.contains(&unit) {
                    report.find(Finding::Leaked { unit });
                }
            }
        }
        self.word = end;
        end == self.used.words()
    }
}

/// Where a unit is used: by the descendants of this oldest ancestor, at this place. Versions share
/// a unit only with their relatives, and only at the same place.
pub(crate) type Use = (VersionId, u64);

/// All units that maps refer to, with their use. Fails with the number of a unit with two uses.
pub(crate) fn uses(state: &State) -> Result<HashMap<u64, Use>, u64> {
    let mut uses: HashMap<u64, Use> = HashMap::new();
    for (id, version) in &state.versions {
        let family = oldest(state, *id);
        let mut wrong = None;
        each_leaf(state, version, |leaf, entries| {
            let first = leaf * entries.len() as u64;
            for (at, entry) in entries.iter().enumerate() {
                for part in entry.units() {
                    let place = (family, first + at as u64);
                    if *uses.entry(part.unit).or_insert(place) != place {
                        wrong = Some(part.unit);
                    }
                }
            }
        });
        if let Some(unit) = wrong {
            return Err(unit);
        }
    }
    Ok(uses)
}

/// For each thick volume that is not deleted: the number of places with an exclusive unit.
pub(crate) fn owned(state: &State) -> BTreeMap<VersionId, u64> {
    let thick = state.versions.iter();
    let thick = thick.filter(|(_, version)| version.is_thick && !version.is_hidden);
    thick
        .map(|(id, version)| {
            let mut owned = 0;
            each_leaf(state, version, |leaf, entries| {
                owned += count_owned(entries, state.floor(*id, leaf));
            });
            (*id, owned)
        })
        .collect()
}

/// For each version: the number of places with data. Nodes that versions share are counted once.
pub(crate) fn mapped(state: &State) -> BTreeMap<VersionId, u64> {
    let (shape, mut counted) = (state.shape(), HashMap::new());
    let versions = state.versions.iter();
    versions
        .map(|(id, version)| {
            let root = version.tree.root.as_ref();
            let mapped = root.map(|root| mapped_below(root, shape, shape.levels, &mut counted));
            (*id, mapped.unwrap_or(0))
        })
        .collect()
}

fn mapped_below(
    node: &Arc<Node>,
    shape: Shape,
    levels: u32,
    counted: &mut HashMap<*const Node, u64>,
) -> u64 {
    let Node::Interior(interior) = &**node else {
        return node.own_mapped(shape, levels);
    };
    if let Some(known) = counted.get(&Arc::as_ptr(node)) {
        return *known;
    }
    let children = interior.children.iter().flatten();
    let below = children.map(|child| mapped_below(child, shape, levels - 1, counted));
    let count = below.sum();
    counted.insert(Arc::as_ptr(node), count);
    count
}

fn oldest(state: &State, mut id: VersionId) -> VersionId {
    while let Some(parent) = state.versions.get(&id).and_then(|version| version.parent) {
        id = parent;
    }
    id
}

/// Calls `visit` with each leaf of a version whose entries are valid. A *pass* deletes or merges a
/// version leaf by leaf; leaves before its cursor are free or belong to the child.
fn each_leaf(state: &State, version: &Version, mut visit: impl FnMut(u64, &[Entry])) {
    let shape = state.shape();
    let from = match version.pass {
        Some((PassKind::Free | PassKind::Merge, cursor)) => cursor,
        _ => 0,
    };
    if let Some(root) = &version.tree.root {
        walk(root, shape, shape.levels, 0, from, &mut visit);
    }
}

fn walk(
    node: &Node,
    shape: Shape,
    levels: u32,
    first: u64,
    from: u64,
    visit: &mut impl FnMut(u64, &[Entry]),
) {
    if first + shape.span(levels) <= from {
        return;
    }
    match node {
        Node::External(_) | Node::Lost { .. } => {}
        Node::Leaf(leaf) => visit(first, &leaf.entries),
        Node::Interior(interior) => {
            for (at, child) in interior.children.iter().enumerate() {
                if let Some(child) = child {
                    let first = first + at as u64 * shape.span(levels - 1);
                    walk(child, shape, levels - 1, first, from, visit);
                }
            }
        }
    }
}

/// The whole check in one step. It takes time in proportion to the pool's size, and its findings
/// name no position in a volume.
pub(crate) fn findings(
    state: &State,
    space: &Space,
    zones: &Zones,
    pending: impl Iterator<Item = u64>,
) -> Vec<Finding> {
    let uses = match uses(state) {
        Ok(uses) => uses,
        Err(unit) => return vec![Finding::UsedTwice { unit, at: None }],
    };
    let limbo: HashSet<u64> = pending.collect();
    let zones: HashSet<u64> = zones.units().collect();
    let mut findings = Vec::new();
    for unit in 0..space.units() {
        let users = [
            uses.contains_key(&unit),
            limbo.contains(&unit),
            zones.contains(&unit),
        ];
        let finding = match (users, space.is_used(unit)) {
            ([true, true, _], _) => Finding::UsedInLimbo { unit, at: None },
            ([true, _, true], _) => Finding::UsedTwice { unit, at: None },
            ([true, ..] | [_, true, _] | [.., true], false) => {
                Finding::UsedAndFree { unit, at: None }
            }
            ([false, false, false], true) => Finding::Leaked { unit },
            _ => continue,
        };
        findings.push(finding);
    }
    for (id, counted) in owned(state) {
        let version = &state.versions[&id];
        let (lvol, kept) = (version.identity.id, version.owned);
        if kept != counted {
            findings.push(Finding::Owned {
                lvol,
                counted,
                kept,
            });
        }
    }
    // It is in no structure on the disk, so a wrong count is no damage.
    for (id, counted) in mapped(state) {
        let version = &state.versions[&id];
        debug_assert_eq!(version.mapped, counted, "{}", version.identity.name);
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interface::Request;
    use crate::tests::content::value;
    use crate::tests::rig::{Rig, identity};

    /// Bytes of a unit of the toy geometry.
    const UNIT: u64 = 16 << 10;

    fn report(mut accounts: Accounts) -> CheckReport {
        let mut report = CheckReport::default();
        while !accounts.advance(1, &mut report) {}
        report
    }

    /// A volume with a snapshot, a clone of it, and shared and own units.
    fn family() -> (Rig, [VersionId; 3]) {
        let mut rig = Rig::create(64, 16, true);
        let volume = rig.created(1, 16, true);
        for place in 0..6 {
            rig.wrote(volume, place, &[(0, value(1, place * 4, 1))]);
        }
        let snapshot = rig.snapshot(volume, 2);
        rig.wrote(volume, 2, &[(1, value(1, 9, 2))]);
        let clone = Request::Clone {
            source: snapshot,
            identity: identity(3),
            thick: false,
        };
        rig.run(clone).unwrap();
        let clone = rig.find(3).unwrap();
        rig.wrote(clone, 3, &[(0, value(1, 12, 3))]);
        (rig, [volume, snapshot, clone])
    }

    /// The comparison of a large space takes many steps.
    #[test]
    fn a_step_has_a_bound() {
        let mut accounts = Rig::create(64, 16, true).pool.accounts();
        let units = (2 * WORDS as u64 + 1) * 64;
        for bits in [&mut accounts.used, &mut accounts.owned, &mut accounts.zones] {
            *bits = Bits::new(units);
        }
        accounts.used.add(units - 63);
        let mut report = CheckReport::default();
        let steps = (1..).find(|_| accounts.advance(4, &mut report));
        assert_eq!(steps, Some(3));
        let unit = 2 * WORDS as u64 * 64 + 1;
        assert_eq!(report.findings, [Finding::Leaked { unit }]);
    }

    /// A version that lost more than its parent has a finding for the rest.
    #[test]
    fn a_loss_is_named_once_and_as_a_whole() {
        use crate::map::Interior;

        let (rig, [volume, snapshot, _]) = family();
        let mut accounts = rig.pool.accounts();
        let lost = || {
            let pages = Default::default();
            Some(Arc::new(Node::Lost { pages }))
        };
        let interior = |children| {
            let pages = Default::default();
            Some(Arc::new(Node::Interior(Interior { children, pages })))
        };
        let first = interior([lost(), None].into());
        let versions = &mut accounts.state.versions;
        let mut root = |id, root| versions.get_mut(&id).unwrap().tree.root = root;
        root(snapshot, interior([first, None].into()));
        root(volume, lost());
        let leaf = |number, first: u64, count: u64| Finding::Lost {
            at: Extent {
                lvol: identity(number).id,
                offset: first * 4 * UNIT,
                bytes: count * 4 * UNIT,
            },
        };
        let mut found = report(accounts).findings;
        found.retain(|finding| matches!(finding, Finding::Lost { .. }));
        assert_eq!(found, [leaf(2, 0, 1), leaf(1, 1, 3)]);
    }

    /// Every wrong bit is found, and every unit that a map gained or lost.
    #[test]
    fn wrong_accounts() {
        let (rig, [volume, snapshot, clone]) = family();
        let sound = report(rig.pool.accounts());
        assert_eq!((sound.findings, sound.units), (vec![], 8));
        for unit in 0..64 {
            let mut accounts = rig.pool.accounts();
            if accounts.used.has(unit) {
                accounts.used.remove(unit);
            } else {
                accounts.used.add(unit);
            }
            let is_mapped = !accounts.pending.contains(&unit) && !accounts.zones.has(unit);
            let finding = match rig.pool.space().is_used(unit) {
                false => Finding::Leaked { unit },
                true if is_mapped => {
                    let found = report(accounts).findings;
                    let [Finding::UsedAndFree { unit: found, at }] = found[..] else {
                        panic!("{found:?}");
                    };
                    let at = at.unwrap();
                    assert_eq!((found, at.offset % UNIT, at.bytes), (unit, 0, UNIT));
                    continue;
                }
                // A unit of metadata.
                true => continue,
            };
            assert_eq!(report(accounts).findings, [finding]);
        }
        let change = |version, place, change: &dyn Fn(&mut Entry)| {
            let mut accounts = rig.pool.accounts();
            let shape = accounts.state.shape();
            let changed = accounts.state.versions.get_mut(&version).unwrap();
            let leaf = place / shape.units_per_leaf as u64;
            let (entries, _) = changed.tree.change(shape, leaf).unwrap();
            change(&mut entries[(place % shape.units_per_leaf as u64) as usize]);
            report(accounts).findings
        };
        let unit = rig.pool.lookup(snapshot, 2).unwrap().own.unit;
        let lost = change(snapshot, 2, &|entry| *entry = Entry::default());
        let at = |number| Extent {
            lvol: identity(number).id,
            offset: 2 * UNIT,
            bytes: UNIT,
        };
        let expected = [
            Finding::Stray { unit, at: at(3) },
            Finding::Stray { unit, at: at(1) },
            Finding::Leaked { unit },
        ];
        assert_eq!(lost, expected);
        let other = rig.pool.lookup(clone, 3).unwrap().own;
        let twice = change(volume, 9, &|entry| entry.own = other);
        let lvol = identity(1).id;
        let at = Extent {
            lvol,
            offset: 9 * UNIT,
            bytes: UNIT,
        };
        let expected = [
            Finding::UsedTwice {
                unit: other.unit,
                at: Some(at),
            },
            Finding::Owned {
                lvol,
                counted: 2,
                kept: 1,
            },
        ];
        for finding in expected {
            assert!(twice.contains(&finding), "{twice:?}");
        }
    }
}
