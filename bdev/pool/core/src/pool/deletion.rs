//! Frees the units of deleted (hidden) versions in the background, by passes over their maps, one
//! at a time.
//!
//! A pass begins when the deletion is durable. Each step visits one leaf that the version does not
//! share with its child, and is a record; the units that it frees wait in limbo. Two passes in one
//! family would free units that are in use, so there is one in the pool.
//!
//! A hidden version with several children keeps the units that a child uses. It gets a pass when it
//! is deleted, and again when another version is (`Pool::reclaim` asks for one as well).

use std::collections::BTreeSet;

use super::store::Store;
use super::writes::Writes;
use crate::format::record::{PassKind, Record};
use crate::ids::VersionId;
use crate::mutation::Mutation;
use crate::state::PREPARED;

#[derive(Debug)]
pub(super) struct Deletion {
    /// The version that a pass is on.
    pass: Option<VersionId>,
    /// A version may need a pass.
    may_find: bool,
    /// Versions with several children that a pass has visited since something was deleted.
    reclaimed: BTreeSet<VersionId>,
    /// The leaf of these versions that the next step reads: no new record is about it.
    held: Option<(Vec<VersionId>, u64)>,
}

impl Default for Deletion {
    fn default() -> Self {
        Self {
            pass: None,
            may_find: true,
            reclaimed: BTreeSet::new(),
            held: None,
        }
    }
}

impl Deletion {
    /// Looks for a version that needs a pass.
    pub(super) fn search(&mut self) {
        self.may_find = true;
        self.reclaimed.clear();
    }

    pub(super) fn is_idle(&self) -> bool {
        self.pass.is_none() && !self.may_find
    }

    pub(super) fn holds(&self, version: VersionId, leaf: u64) -> bool {
        let held = self.held.as_ref();
        held.is_some_and(|(versions, held)| *held == leaf && versions.contains(&version))
    }
}

impl Deletion {
    /// Takes one step, if it is possible now.
    pub(super) fn advance(&mut self, store: &mut Store, writes: &Writes) {
        if !store.has_root {
            return;
        }
        match self.pass {
            None if self.may_find => self.begin_pass(store),
            None => {}
            Some(version) => self.step(store, writes, version),
        }
        if Mutation::TwoPasses.is_active() {
            self.step_others(store, writes);
        }
    }

    /// Hides an external device that no volume shows any more. Returns true if there was one.
    fn hide_external(&mut self, store: &mut Store) -> bool {
        let state = &store.state;
        let forgets = Mutation::ForgetShownExternal.is_active();
        let mut unused = state
            .externals()
            .filter(|(id, _)| state.versions.children(*id).len() == 0 || forgets);
        let Some(version) = unused.next().map(|(id, _)| id) else {
            return false;
        };
        drop(unused);
        let record = Record::Hide { version };
        if store.log_takes(&record) {
            let lsn = store.append(&record);
            store.apply(lsn, &record);
        }
        true
    }

    fn begin_pass(&mut self, store: &mut Store) {
        if self.hide_external(store) {
            return;
        }
        let hidden = store
            .state
            .versions
            .iter()
            .filter(|(_, version)| version.is_hidden)
            .filter(|(_, version)| {
                version.hidden_at != PREPARED || Mutation::FreePrepared.is_active()
            });
        let settled = store.settle.settled();
        let durable = |hidden_at| {
            let broken = [Mutation::FreeBeforeHidden, Mutation::FreePrepared];
            hidden_at <= settled || broken.iter().any(|rule| rule.is_active())
        };
        let mut is_waiting = false;
        let mut found = None;
        for (id, version) in hidden {
            if version.pass.is_some() {
                found = Some((*id, None));
                break;
            }
            let kind = match store.state.versions.children(*id).len() {
                0 => PassKind::Free,
                1 => PassKind::Merge,
                _ if self.reclaimed.contains(id) => continue,
                _ => PassKind::Reclaim,
            };
            if !durable(version.hidden_at) {
                store.settle.want(version.hidden_at);
                is_waiting = true;
                continue;
            }
            found = found.or(Some((*id, Some(kind))));
        }
        let Some((version, kind)) = found else {
            self.may_find = is_waiting;
            return;
        };
        if let Some(kind) = kind {
            let record = Record::Pass { version, kind };
            if !store.log_takes(&record) {
                return;
            }
            let lsn = store.append(&record);
            store.apply(lsn, &record);
        }
        self.pass = Some(version);
        store.has_news = true;
    }

    fn step(&mut self, store: &mut Store, writes: &Writes, version: VersionId) {
        let Some(leaf) = store.state.next_step(version) else {
            self.held = None;
            let record = Record::End { version };
            if store.log_takes(&record) {
                let lsn = store.append(&record);
                store.apply(lsn, &record);
                self.pass = None;
                if store.state.versions.contains_key(&version) {
                    self.reclaimed.insert(version)
                } else {
                    self.reclaimed.remove(&version)
                };
                self.may_find = true;
            }
            return;
        };
        let children = store.state.children(version);
        let per_leaf = u64::from(store.superblock.geometry.units_per_leaf);
        let places = leaf * per_leaf..(leaf + 1) * per_leaf;
        let is_busy = |child: &VersionId| writes.occupies(*child, places.clone());
        let record = Record::Step { version, leaf };
        let waits = children.iter().any(is_busy);
        if waits || !store.log_takes(&record) {
            self.held = waits.then_some((children, leaf));
            return;
        }
        self.held = None;
        let lsn = store.append(&record);
        store.apply(lsn, &record);
    }

    /// The fault [`Mutation::TwoPasses`]: every other hidden version is passed over as well.
    fn step_others(&mut self, store: &mut Store, writes: &Writes) {
        let settled = store.settle.settled();
        let hidden = store.state.versions.iter();
        let hidden = hidden.filter(|(_, v)| v.is_hidden && v.hidden_at <= settled);
        let hidden: Vec<VersionId> = hidden.map(|(id, _)| *id).collect();
        for id in hidden {
            if self.pass == Some(id) || !store.log.has_room() {
                continue;
            }
            let children = store.state.versions.children(id).len();
            let kind = match children {
                0 => PassKind::Free,
                1 => PassKind::Merge,
                _ => continue,
            };
            if store.state.versions[&id].pass.is_some() {
                self.step(store, writes, id);
            } else if self.pass.is_some() {
                let record = Record::Pass { version: id, kind };
                let lsn = store.append(&record);
                store.apply(lsn, &record);
            }
        }
    }
}
