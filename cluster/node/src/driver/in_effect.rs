//! The publications (lists of a volume's allowed hosts) that this node has seen, and those that are
//! in effect on it: hosts that they do not name have no connection to the node. The node's lease
//! key in etcd tells the other nodes which are in effect.

use std::collections::{BTreeMap, BTreeSet};

use nacre_cluster_core::VolumeId;
use nacre_cluster_etcd::{BehindCause, InEffect};

use crate::clock::seconds;
use crate::follow::{KeyChange, Kind};
use crate::serving::Serving;

/// Most volumes that a lease key names as behind: each renewal writes the key, and all nodes' keys
/// are read at once. With more, the key has neither a revision nor a list.
const MAX_BEHIND: usize = 32;

/// Most causes in a lease key, and most bytes of one, without the `…` that ends a shortened text.
const MAX_CAUSES: usize = 8;
const MAX_CAUSE: usize = 160;

const UNREADABLE: &str = "its publication is damaged, or of a later version";

/// Shortens the cause's text to `MAX_CAUSE` bytes.
fn short(mut cause: BehindCause) -> BehindCause {
    if let Some(why) = &mut cause.why
        && why.len() > MAX_CAUSE
    {
        let end = (0..=MAX_CAUSE).rev().find(|at| why.is_char_boundary(*at));
        why.truncate(end.unwrap_or(0));
        why.push('…');
    }
    cause
}

#[derive(Debug, Default)]
pub(super) struct SeenPublications {
    /// The last revision up to which the engine has been shown all publications. `None`: their list
    /// has not arrived.
    revision: Option<i64>,
    /// The revision of the last whole list.
    listed: Option<i64>,
    /// Volumes whose publication cannot be read. The former one is in effect.
    unread: BTreeMap<VolumeId, BehindCause>,
}

impl SeenPublications {
    /// The revision of a change, if it is one of publications.
    pub(super) fn revision_of(kind: Kind, change: &KeyChange) -> Option<i64> {
        match change {
            _ if kind != Kind::Publications => None,
            KeyChange::All { revision, .. } | KeyChange::Deleted { revision, .. } => {
                Some(*revision)
            }
            KeyChange::Put(kv) => Some(kv.mod_revision),
            KeyChange::OtherStore => None,
        }
    }

    /// Notes that the engine has got the change of this revision, or the whole list. A single
    /// change before the first list is ignored: it says nothing about other publications.
    pub(super) fn shown(&mut self, revision: i64, is_list: bool) {
        if is_list {
            self.listed = Some(revision);
        }
        match self.revision {
            None if !is_list => {}
            known => self.revision = known.max(Some(revision)),
        }
    }

    /// True if the engine has got a whole list that etcd made at this revision or later.
    pub(super) fn are_listed_since(&self, revision: i64) -> bool {
        self.listed.is_some_and(|listed| listed >= revision)
    }

    /// Notes whether this node can read the publication of the volume. `is_read` true: the engine
    /// has got it, or its deletion. False: it is damaged, or written by a later version of Nacre,
    /// and the former one stays in effect.
    pub(super) fn set_read(&mut self, volume: VolumeId, is_read: bool) {
        if is_read {
            self.unread.remove(&volume);
        } else {
            self.unread.entry(volume).or_insert_with(|| BehindCause {
                since: seconds(),
                why: Some(UNREADABLE.to_owned()),
            });
        }
    }

    /// What the lease key says about publications. `None`: no whole list has arrived, or more than
    /// `MAX_BEHIND` volumes are behind. The revision is taken before the engine is asked: a
    /// publication that the engine gets meanwhile only adds to those that are behind.
    pub(super) fn in_effect(&self, serving: &mut dyn Serving) -> Option<InEffect> {
        let revision = self.revision?;
        let mut behind: BTreeSet<VolumeId> = serving.behind().into_iter().collect();
        behind.extend(self.unread.keys());
        if behind.len() > MAX_BEHIND {
            return None;
        }
        let mut causes = serving.causes();
        causes.extend(self.unread.clone());
        let causes = causes
            .into_iter()
            .filter(|(volume, _)| behind.contains(volume));
        Some(InEffect {
            revision,
            causes: causes
                .take(MAX_CAUSES)
                .map(|(volume, cause)| (volume.0, short(cause)))
                .collect(),
            behind: behind.into_iter().map(|volume| volume.0).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::tests::Engine;

    fn volume(number: u128) -> VolumeId {
        VolumeId(Uuid::from_u128(number))
    }

    /// Goal: a lease says no revision before the list of publications, and names the volumes whose
    /// publication is not in effect, or cannot be read.
    #[test]
    fn a_lease_says_what_is_in_effect() {
        let mut seen = SeenPublications::default();
        let mut engine = Engine::default();
        seen.shown(7, false);
        assert_eq!(seen.in_effect(&mut engine), None);
        assert!(!seen.are_listed_since(1));
        seen.shown(8, true);
        seen.shown(6, false);
        seen.shown(8, false);
        assert!(seen.are_listed_since(8) && !seen.are_listed_since(9));
        let says = |seen: &SeenPublications, engine: &mut Engine| {
            let found = seen.in_effect(engine).expect("few are behind");
            let behind = found.behind.iter().map(Uuid::as_u128);
            (found.revision, behind.collect::<Vec<_>>())
        };
        assert_eq!(says(&seen, &mut engine), (8, vec![]));
        seen.set_read(volume(2), false);
        seen.shown(9, false);
        assert_eq!(says(&seen, &mut engine), (9, vec![2]));
        let causes = seen.in_effect(&mut engine).expect("one is").causes;
        assert_eq!(causes[&volume(2).0].why.as_deref(), Some(UNREADABLE));
        engine.set_behind(&[volume(1), volume(2)]);
        assert_eq!(says(&seen, &mut engine), (9, vec![1, 2]));
        seen.set_read(volume(2), true);
        engine.set_behind(&[]);
        assert_eq!(says(&seen, &mut engine), (9, vec![]));
        // A cause of a volume that is not behind any more does not count, and a long one is cut.
        let cause = |why: String| BehindCause {
            since: 9,
            why: Some(why),
        };
        engine.set_behind(&[volume(1)]);
        engine.set_causes(&[
            (volume(1), cause("ü".repeat(200))),
            (volume(2), cause("late".to_owned())),
        ]);
        let found = seen.in_effect(&mut engine).expect("few are behind");
        let expected = cause(format!("{}…", "ü".repeat(80)));
        assert_eq!(
            found.causes.into_iter().collect::<Vec<_>>(),
            [(volume(1).0, expected)]
        );
        let some: Vec<VolumeId> = (0..20).map(volume).collect();
        engine.set_behind(&some);
        let causes = some.iter().map(|id| (*id, cause("late".to_owned())));
        engine.set_causes(&causes.collect::<Vec<_>>());
        let found = seen.in_effect(&mut engine).expect("few are behind");
        assert_eq!((found.behind.len(), found.causes.len()), (20, MAX_CAUSES));
        let many: Vec<VolumeId> = (0..=MAX_BEHIND as u128).map(volume).collect();
        engine.set_behind(&many);
        assert_eq!(seen.in_effect(&mut engine), None, "too many to name");
    }
}
