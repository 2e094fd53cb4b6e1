//! The versions of a pool and their maps: the state that the records of the log change.
//!
//! A *version* is a volume, a snapshot, or an external device of which volumes are clones. Its map
//! is a tree; a *leaf* has the entries of consecutive places. A unit has the *generation* of the
//! version that allocated it. The *floor* of a version is the generation of its parent: units above
//! it are exclusive to the version. A *pass* visits the leaves of a hidden version in steps, and
//! frees the units that no child uses; its *cursor* is the first leaf that it has not visited.
//!
//! Records change the state only through [`State::apply`]. A running pool and a recovery call it
//! with the same records, so they come to the same state.
//!
//! ```text
//!   volume      online ── HIDE ──▶ hidden ── PASS, STEP …, END ──▶ gone
//!   prepared    hidden ── ADOPT ─▶ the volume, whose old contents are hidden
//!   snapshot    online ── HIDE ──▶ hidden ── PASS, STEP …, END ──▶ gone (no child, or one)
//!                                   ▲ └───── PASS, STEP …, END ──┐
//!                                   └── several children ────────┘
//!   external    known ── HIDE ──▶ hidden ── PASS, STEP …, END ──▶ gone (once it has no child)
//! ```
//!
//! While a version is merged into its only child, the places before the pass's cursor belong to the
//! child: its floor there is that of the merged version, whose own entries there are void.

mod external;
mod moving;
mod parents;
mod search;
mod versions;

use crate::format::record::{Cut, Identity, PassKind, Record};
use crate::geometry::Geometry;
use crate::ids::{Generation, Lsn, MAX_GENERATION, MAX_VERSIONS, VersionId};
use crate::map::{Entry, LostNode, MapError, Part, Shape, Tree, count_mapped};
use crate::mutation::Mutation;

pub use external::UnmapEffect;
pub use moving::Users;
pub use search::Found;
pub use versions::Versions;

/// The value of [`Version::hidden_at`] for a hidden version that no pass may free yet.
pub const PREPARED: Lsn = Lsn::MAX;

#[derive(Debug, Clone)]
pub struct Version {
    pub identity: Identity,
    pub parent: Option<VersionId>,
    pub generation: Generation,
    /// A block device outside of the pool, which users do not see among the volumes. Clones read
    /// from it what they have not written.
    pub is_external: bool,
    pub is_snapshot: bool,
    /// The pool keeps room for every place of the volume.
    pub is_thick: bool,
    /// Deleted: no longer visible, but its units may still be in use.
    pub is_hidden: bool,
    /// A volume that does not change any more.
    pub is_read_only: bool,
    /// Size of its address range, in units.
    pub units: u64,
    /// The pass over it, with its cursor.
    pub pass: Option<(PassKind, u64)>,
    pub tree: Tree,
    /// Places whose own unit is exclusive. Counted for thick volumes only.
    pub owned: u64,
    /// Places with data, of an external device included. Unreadable ones do not count.
    pub mapped: u64,
    /// The record that hid it. 0: not hidden, or hidden before this process opened the pool.
    /// [`PREPARED`]: a volume is about to adopt its contents.
    pub hidden_at: Lsn,
}

/// The reason why a record cannot be applied to the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ApplyError {
    UnknownVersion,
    VersionExists,
    OutOfRange,
    /// The version does not allow this change.
    WrongKind,
    /// A place refers to at most two units, and the record needs a third.
    ThirdUnit,
    /// A node of the map is unreadable in both copies.
    Lost,
}

impl From<LostNode> for ApplyError {
    fn from(_: LostNode) -> Self {
        Self::Lost
    }
}

impl From<MapError> for ApplyError {
    fn from(_: MapError) -> Self {
        Self::ThirdUnit
    }
}

#[derive(Debug, Clone)]
pub struct State {
    pub geometry: Geometry,
    pub versions: Versions,
    pub next_generation: Generation,
    /// A version whose unit moved last: a hint for the next move.
    last_moved: VersionId,
    /// Nodes that changed since the last checkpoint began.
    pub changed_nodes: usize,
}

impl State {
    pub fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            versions: Versions::default(),
            next_generation: 1,
            last_moved: VersionId(0),
            changed_nodes: 0,
        }
    }

    pub fn shape(&self) -> Shape {
        Shape::from(&self.geometry)
    }

    pub fn leaf_of(&self, place: u64) -> u64 {
        place / u64::from(self.geometry.units_per_leaf)
    }

    /// The entry at a place of a version, which must exist.
    pub fn entry(&self, version: VersionId, place: u64) -> Result<Entry, LostNode> {
        self.versions[&version].tree.entry(self.shape(), place)
    }

    /// The generation up to which units of this leaf may be shared.
    pub fn floor(&self, version: VersionId, leaf: u64) -> Generation {
        let mut version = &self.versions[&version];
        loop {
            let Some(parent) = version.parent.and_then(|id| self.versions.get(&id)) else {
                return 0;
            };
            match parent.pass {
                Some((PassKind::Merge, cursor)) if leaf < cursor => version = parent,
                _ => return parent.generation,
            }
        }
    }

    pub fn children(&self, of: VersionId) -> Vec<VersionId> {
        self.versions.children(of).collect()
    }

    /// The first unit of the version, or of its nearest ancestor that has one.
    pub fn first_unit(&self, id: VersionId) -> Option<u64> {
        let per_leaf = u64::from(self.geometry.units_per_leaf);
        let mut next = self.versions.get(&id);
        while let Some(version) = next {
            let leaf = version.tree.next_difference(None, self.shape(), 0);
            let mut places = leaf.into_iter().flat_map(|leaf| {
                let first = leaf * per_leaf;
                first..first + per_leaf
            });
            let unit = places.find_map(|place| {
                let entry = version.tree.entry(self.shape(), place).ok()?;
                entry.units().next().map(|part| part.unit)
            });
            if unit.is_some() {
                return unit;
            }
            next = version.parent.and_then(|id| self.versions.get(&id));
        }
        None
    }

    /// The exclusive parts of a version's leaf that none of its children uses.
    fn unused_parts(&self, id: VersionId, children: &[VersionId], leaf: u64) -> Vec<Part> {
        let (shape, floor) = (self.shape(), self.floor(id, leaf));
        let first = leaf * shape.units_per_leaf as u64;
        let mut unused = Vec::new();
        for place in first..first + shape.units_per_leaf as u64 {
            // An unreadable leaf frees nothing; one of a child may use all units.
            let entry = self.entry(id, place).unwrap_or_default();
            let is_used = |part: &Part| {
                let mut entries = children.iter().map(|child| self.entry(*child, place));
                entries.any(|entry| entry.map_or(true, |entry| entry.uses(part.unit)))
            };
            let parts = entry.parts().filter(|part| part.is_exclusive(floor));
            unused.extend(parts.filter(|part| !is_used(part)));
        }
        unused
    }

    /// An id that no version has, and that is not in `besides`; `None`: all are in use.
    pub fn free_slot(&self, besides: &[VersionId]) -> Option<VersionId> {
        let slots = (0..MAX_VERSIONS).map(VersionId);
        let mut free = slots.filter(|id| !self.versions.contains_key(id) && !besides.contains(id));
        free.next()
    }

    /// Units that thick volumes have not taken yet.
    pub fn guaranteed(&self) -> u64 {
        self.versions.values().map(Version::guaranteed).sum()
    }

    /// Applies a record to the state. Units that become unused are added to `released`.
    pub fn apply(
        &mut self,
        lsn: Lsn,
        record: &Record,
        released: &mut Vec<u64>,
    ) -> Result<(), ApplyError> {
        match record {
            Record::Map {
                version,
                place,
                unit,
                granules,
                ..
            } => self.map(*version, *place, *unit, *granules, released),
            Record::Unmap {
                version,
                first,
                granules,
            } => self.unmap(*version, *first, *granules, released),
            Record::Create {
                version,
                units,
                identity,
                thick,
            } => self.create(*version, identity, *units, *thick),
            Record::Snapshot { cuts } => cuts.iter().try_for_each(|cut| self.cut(cut)),
            Record::Clone {
                version,
                source,
                identity,
                thick,
            } => self.clone_of(*version, *source, identity, *thick),
            Record::Hide { version } => {
                let version = self.version_mut(*version)?;
                version.is_hidden = true;
                version.hidden_at = lsn;
                Ok(())
            }
            Record::Pass { version, kind } => self.begin_pass(*version, *kind),
            Record::Step { version, leaf } => self.step(*version, *leaf, released),
            Record::End { version } => self.end_pass(*version),
            Record::Resize { version, units } => self.resize(*version, *units),
            Record::Rename { version, name } => {
                self.version_mut(*version)?.identity.name.clone_from(name);
                Ok(())
            }
            Record::Restore {
                version,
                source,
                old,
            } => self.restore(lsn, *version, *source, *old),
            Record::Detach { version } => self.detach(*version),
            Record::Decouple { version, ancestor } => self.decouple(*version, *ancestor),
            Record::ReadOnly { version } => {
                let version = self.version_mut(*version)?;
                if version.is_snapshot || version.is_hidden {
                    return Err(ApplyError::WrongKind);
                }
                version.is_read_only = true;
                Ok(())
            }
            Record::Prepare {
                version,
                source,
                new,
            } => self.prepare(*version, *source, *new),
            Record::Adopt { version, new } => self.adopt(lsn, *version, *new),
            Record::Cancel { .. } => Ok(()),
            Record::Move { place, from, to } => self.relocate(*place, *from, *to, released),
            Record::External {
                version,
                units,
                identity,
            } => self.create_external(*version, identity, *units),
            Record::Clear { version, leaf } => {
                let shape = self.shape();
                let tree = &mut self.version_mut(*version)?.tree;
                self.changed_nodes += tree.clear_lost(shape, *leaf);
                Ok(())
            }
        }
    }

    fn version_mut(&mut self, id: VersionId) -> Result<&mut Version, ApplyError> {
        self.versions.get_mut(&id).ok_or(ApplyError::UnknownVersion)
    }

    fn map(
        &mut self,
        id: VersionId,
        place: u64,
        unit: u64,
        granules: u16,
        released: &mut Vec<u64>,
    ) -> Result<(), ApplyError> {
        let geometry = self.geometry;
        let version = self.versions.get(&id).ok_or(ApplyError::UnknownVersion)?;
        if place >= version.units || unit >= geometry.units() || granules & !geometry.whole() != 0 {
            return Err(ApplyError::OutOfRange);
        }
        let new = Part {
            unit,
            generation: version.generation,
            granules,
        };
        let slot = (place % u64::from(geometry.units_per_leaf)) as usize;
        self.change(id, self.leaf_of(place), |entries, floor| {
            entries[slot].map(new, floor, released)?;
            Ok(())
        })
    }

    fn unmap(
        &mut self,
        id: VersionId,
        first: u64,
        granules: u64,
        released: &mut Vec<u64>,
    ) -> Result<(), ApplyError> {
        let geometry = self.geometry;
        let per_unit = u64::from(geometry.granules_per_unit);
        let version = self.versions.get(&id).ok_or(ApplyError::UnknownVersion)?;
        let end = first.checked_add(granules).ok_or(ApplyError::OutOfRange)?;
        if granules == 0 || end > version.units * per_unit {
            return Err(ApplyError::OutOfRange);
        }
        let (leaf, last) = (
            self.leaf_of(first / per_unit),
            self.leaf_of((end - 1) / per_unit),
        );
        if leaf != last {
            return Err(ApplyError::OutOfRange);
        }
        match self.effect_of_unmap(id, first, granules) {
            UnmapEffect::None => {
                version.tree.leaf(self.shape(), leaf)?;
                return Ok(());
            }
            UnmapEffect::Removal => return self.remove_leaf(id, leaf),
            UnmapEffect::Change | UnmapEffect::Split => {}
        }
        let base = leaf * u64::from(geometry.units_per_leaf);
        let mut is_empty = false;
        self.change(id, leaf, |entries, floor| {
            for place in first / per_unit..=(end - 1) / per_unit {
                let start = place * per_unit;
                let range = first.max(start) - start..end.min(start + per_unit) - start;
                let set = range.fold(0, |set, granule| set | 1 << granule);
                entries[(place - base) as usize].unmap(set, floor, released);
            }
            is_empty = entries.iter().all(Entry::is_empty);
            Ok(())
        })?;
        if is_empty {
            return self.remove_leaf(id, leaf);
        }
        Ok(())
    }

    /// Removes a leaf whose places are empty, or external ones that become so.
    fn remove_leaf(&mut self, id: VersionId, leaf: u64) -> Result<(), ApplyError> {
        let shape = self.shape();
        if Mutation::ForgetRemovedLeaf.is_active() {
            return Ok(());
        }
        let version = self.version_mut(id)?;
        let removed = version.tree.leaf(shape, leaf)?;
        let removed = removed.map_or(0, |node| node.own_mapped(shape, 0));
        let copied = version.tree.remove_leaf(shape, leaf)?;
        version.mapped -= removed;
        self.changed_nodes += copied;
        Ok(())
    }

    /// Changes the entries of a leaf, with the floor there. Counts the version's places.
    fn change(
        &mut self,
        id: VersionId,
        leaf: u64,
        change: impl FnOnce(&mut [Entry], Generation) -> Result<(), ApplyError>,
    ) -> Result<(), ApplyError> {
        let (shape, floor) = (self.shape(), self.floor(id, leaf));
        let version = self
            .versions
            .get_mut(&id)
            .ok_or(ApplyError::UnknownVersion)?;
        let (entries, copied) = version.tree.change(shape, leaf)?;
        let before = (count_owned(entries, floor), count_mapped(entries));
        let outcome = change(entries, floor);
        version.mapped = version.mapped + count_mapped(entries) - before.1;
        // A deleted volume with clones loses units to a pass; an import does not count its places.
        if version.is_thick && !version.is_hidden {
            version.owned = version.owned + count_owned(entries, floor) - before.0;
        }
        self.changed_nodes += copied;
        outcome
    }

    fn create(
        &mut self,
        id: VersionId,
        identity: &Identity,
        units: u64,
        is_thick: bool,
    ) -> Result<(), ApplyError> {
        if units > self.geometry.max_volume_units() {
            return Err(ApplyError::OutOfRange);
        }
        let generation = self.take_generation()?;
        let version = Version {
            identity: identity.clone(),
            parent: None,
            generation,
            is_snapshot: false,
            is_thick,
            is_hidden: false,
            is_read_only: false,
            is_external: false,
            units,
            pass: None,
            tree: Tree::default(),
            owned: 0,
            mapped: 0,
            hidden_at: 0,
        };
        self.insert(id, version)
    }

    fn cut(&mut self, cut: &Cut) -> Result<(), ApplyError> {
        let volume = self.versions.get(&cut.volume);
        let volume = volume.ok_or(ApplyError::UnknownVersion)?;
        if volume.is_fixed() || volume.is_hidden {
            return Err(ApplyError::WrongKind);
        }
        let snapshot = Version {
            identity: cut.identity.clone(),
            is_snapshot: true,
            is_thick: false,
            owned: 0,
            ..volume.clone()
        };
        self.insert(cut.snapshot, snapshot)?;
        let generation = self.take_generation()?;
        self.versions.set_parent(cut.volume, Some(cut.snapshot));
        let volume = self.version_mut(cut.volume)?;
        volume.generation = generation;
        volume.owned = 0;
        Ok(())
    }

    fn clone_of(
        &mut self,
        id: VersionId,
        source: VersionId,
        identity: &Identity,
        is_thick: bool,
    ) -> Result<(), ApplyError> {
        let version = self.versions.get(&source);
        let version = version.ok_or(ApplyError::UnknownVersion)?;
        if !version.is_fixed() || version.is_hidden {
            return Err(ApplyError::WrongKind);
        }
        let clone = Version {
            identity: identity.clone(),
            parent: Some(source),
            generation: self.next_generation,
            is_snapshot: false,
            is_thick,
            is_read_only: false,
            is_external: false,
            owned: 0,
            ..version.clone()
        };
        self.take_generation()?;
        self.insert(id, clone)
    }

    fn restore(
        &mut self,
        lsn: Lsn,
        id: VersionId,
        source: VersionId,
        old: VersionId,
    ) -> Result<(), ApplyError> {
        let snapshot = self.versions.get(&source);
        let snapshot = snapshot.ok_or(ApplyError::UnknownVersion)?;
        let volume = self.versions.get(&id).ok_or(ApplyError::UnknownVersion)?;
        if volume.is_fixed() || volume.is_hidden || !snapshot.is_snapshot || snapshot.is_hidden {
            return Err(ApplyError::WrongKind);
        }
        let restored = Version {
            identity: volume.identity.clone(),
            parent: Some(source),
            generation: self.next_generation,
            is_snapshot: false,
            is_thick: volume.is_thick,
            is_external: false,
            owned: 0,
            ..snapshot.clone()
        };
        let hidden = Version {
            is_hidden: true,
            hidden_at: lsn,
            is_thick: false,
            owned: 0,
            ..volume.clone()
        };
        self.take_generation()?;
        self.insert(old, hidden)?;
        self.versions.insert(id, restored);
        Ok(())
    }

    fn detach(&mut self, id: VersionId) -> Result<(), ApplyError> {
        let version = self.versions.get(&id).ok_or(ApplyError::UnknownVersion)?;
        let is_passed = |parent: &VersionId| {
            let parent = self.versions.get(parent);
            parent.is_some_and(|parent| parent.pass.is_some())
        };
        if version.is_fixed() || version.parent.as_ref().is_some_and(is_passed) {
            return Err(ApplyError::WrongKind);
        }
        self.versions.set_parent(id, None);
        Ok(())
    }

    fn take_generation(&mut self) -> Result<Generation, ApplyError> {
        let generation = self.next_generation;
        if generation > MAX_GENERATION {
            return Err(ApplyError::OutOfRange);
        }
        self.next_generation += 1;
        Ok(generation)
    }

    fn insert(&mut self, id: VersionId, version: Version) -> Result<(), ApplyError> {
        if id.0 >= MAX_VERSIONS {
            return Err(ApplyError::OutOfRange);
        }
        if self.versions.contains_key(&id) {
            return Err(ApplyError::VersionExists);
        }
        self.versions.insert(id, version);
        Ok(())
    }

    fn resize(&mut self, id: VersionId, units: u64) -> Result<(), ApplyError> {
        if units > self.geometry.max_volume_units() {
            return Err(ApplyError::OutOfRange);
        }
        let version = self.version_mut(id)?;
        if version.is_fixed() {
            return Err(ApplyError::WrongKind);
        }
        version.units = units;
        Ok(())
    }

    fn begin_pass(&mut self, id: VersionId, kind: PassKind) -> Result<(), ApplyError> {
        let children = self.versions.children(id).len();
        let version = self.version_mut(id)?;
        let fits = match kind {
            PassKind::Free => children == 0,
            PassKind::Merge => children == 1,
            PassKind::Reclaim => children > 1,
        };
        if !version.is_hidden || version.pass.is_some() || !fits {
            return Err(ApplyError::WrongKind);
        }
        version.pass = Some((kind, 0));
        Ok(())
    }

    /// The next leaf that the pass over `id` has to visit.
    pub fn next_step(&self, id: VersionId) -> Option<u64> {
        let version = &self.versions[&id];
        let (_, cursor) = version.pass?;
        // A leaf that a child shares loses no unit. A thick child counts its leaves anew.
        let child = self.versions.children(id).next();
        let child = child.map(|child| &self.versions[&child]);
        let child = child.filter(|child| !child.is_thick);
        let other = child.map(|child| &child.tree);
        version.tree.next_difference(other, self.shape(), cursor)
    }

    fn step(
        &mut self,
        id: VersionId,
        leaf: u64,
        released: &mut Vec<u64>,
    ) -> Result<(), ApplyError> {
        let (shape, floor) = (self.shape(), self.floor(id, leaf));
        let version = self.versions.get(&id).ok_or(ApplyError::UnknownVersion)?;
        let (kind, cursor) = version.pass.ok_or(ApplyError::WrongKind)?;
        if leaf < cursor || leaf >= shape.span(shape.levels) {
            return Err(ApplyError::OutOfRange);
        }
        let generation = version.generation;
        let children = self.children(id);
        let first = leaf * shape.units_per_leaf as u64;
        let places = first..first + shape.units_per_leaf as u64;
        let unused = self.unused_parts(id, &children, leaf);
        let units: Vec<u64> = unused.iter().map(|part| part.unit).collect();
        if kind == PassKind::Reclaim && !units.is_empty() {
            self.change(id, leaf, |entries, _| {
                for entry in entries {
                    entry.retain(|part| !units.contains(&part.unit));
                }
                Ok(())
            })?;
        }
        if kind == PassKind::Merge {
            for child in children {
                let gained = places.clone().filter(|place| {
                    let entry = self.entry(child, *place).unwrap_or_default();
                    entry.own.is_exclusive(floor) && entry.own.generation <= generation
                });
                let gained = gained.count() as u64;
                let child = self.version_mut(child)?;
                child.owned += if child.is_thick { gained } else { 0 };
            }
        }
        released.extend(units);
        self.version_mut(id)?.pass = Some((kind, leaf + 1));
        Ok(())
    }

    fn end_pass(&mut self, id: VersionId) -> Result<(), ApplyError> {
        let children = self.children(id);
        let version = self.version_mut(id)?;
        let (kind, _) = version.pass.take().ok_or(ApplyError::WrongKind)?;
        if kind == PassKind::Reclaim {
            return Ok(());
        }
        let parent = version.parent;
        for child in children {
            self.versions.set_parent(child, parent);
        }
        self.versions.remove(id);
        Ok(())
    }
}

impl Version {
    /// True for a version whose contents do not change: a snapshot or read-only volume.
    pub fn is_fixed(&self) -> bool {
        self.is_snapshot || self.is_read_only
    }

    /// Units that a thick volume has not taken yet; 0 for other versions.
    pub fn guaranteed(&self) -> u64 {
        if self.is_thick && !self.is_hidden && !self.is_read_only {
            self.units.saturating_sub(self.owned)
        } else {
            0
        }
    }
}

/// Places of a leaf whose own unit is exclusive, above `floor`.
pub fn count_owned(entries: &[Entry], floor: Generation) -> u64 {
    let owned = entries.iter().filter(|entry| entry.own.is_exclusive(floor));
    owned.count() as u64
}
