//! Volumes that get another parent, and those whose changes end.

use super::World;
use crate::ids::{Token, VersionId};
use crate::interface::Request;
use crate::tests::content::Value;
use crate::tests::model::{History, Kind, ModelVersion, Number};
use crate::tests::op::Op;

impl World {
    /// All granules of a leaf, unless data is being written there. Another trim may be in flight.
    pub(super) fn granules_to_trim(&self, number: Number) -> Option<Vec<u64>> {
        let version = &self.model.versions[&number];
        let mut granules = version.granules[..16].iter();
        let may_trim = |history: &History| !history.in_flight() || history.is_being_trimmed();
        granules.all(may_trim).then(|| (0..16).collect())
    }

    /// A request that gives a volume another parent, or ends its changes.
    pub(super) fn change_of_parent(
        &mut self,
        number: Number,
        version: VersionId,
    ) -> Option<(Token, Op)> {
        match self.random.below(16) {
            0..5 => {
                let decouple = Request::Decouple { version };
                Some((self.rig.submit(decouple), Op::Decouple { number }))
            }
            5 => {
                let read_only = Request::ReadOnly { version };
                Some((self.rig.submit(read_only), Op::ReadOnly { number }))
            }
            _ if self.has_external && self.random.one_in(2) => self.set_external(number, version),
            _ => self.set_parent(number, version),
        }
    }

    /// Gives a volume that no other request is about another snapshot of its family as parent.
    fn set_parent(&mut self, number: Number, version: VersionId) -> Option<(Token, Op)> {
        let volume = &self.model.versions[&number];
        let family = volume.family;
        let is_quiet = !volume.granules.iter().any(History::in_flight);
        if !is_quiet || self.ops.values().any(|op| op.is_about(number)) {
            return None;
        }
        let fits = |of: &ModelVersion| of.kind == Kind::Snapshot && of.family == family;
        let (snapshot, source) = self.pick_among(fits)?;
        let snapshot = &self.model.versions[&snapshot];
        let below = snapshot.granules.iter().map(History::last).collect();
        let op = self.begin_set_parent(number, version, below)?;
        let request = Request::SetParent { version, source };
        Some((self.rig.submit(request), op))
    }

    /// The values of a volume over those of a new parent, and the operation of the request. `None`:
    /// a deletion in progress may change the owner of units.
    pub(super) fn begin_set_parent(
        &mut self,
        number: Number,
        version: VersionId,
        below: Vec<Value>,
    ) -> Option<Op> {
        let parent = self.rig.pool.state().visible_parent(version);
        let mut deleting = self.model.versions.iter().filter(|(_, v)| v.is_deleting);
        if deleting.any(|(number, _)| self.rig.find(*number) == parent) {
            return None;
        }
        let above = self.rig.pool.state().own_above(version);
        for (granule, below) in below.into_iter().enumerate() {
            let (place, bit) = (granule as u64 / 4, granule % 4);
            let entry = self.rig.pool.lookup(version, place).ok()?;
            let owned = entry.parts().filter(|part| part.is_exclusive(above));
            let is_owned = owned.fold(0, |set, part| set | part.granules) >> bit & 1 == 1;
            let value = if is_owned {
                self.model.versions[&number].granules[granule].last()
            } else {
                below
            };
            self.model.begin_write(number, granule as u64, value);
        }
        Some(Op::SetParent {
            number,
            parent,
            generation: self.rig.pool.state().versions[&version].generation,
        })
    }
}
