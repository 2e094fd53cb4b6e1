//! The value of the key `snap/S` in etcd, as JSON: a snapshot of a replicated volume. It consists
//! of pool snapshots (*cuts*), one of the lvol of each replica in sync, on that replica's node. All
//! have the same contents. A change keeps fields that this version does not know.
//!
//! ```text
//!   asked     an operator wants the snapshot
//!   chosen    the holder (or, without one, the node of a replica in sync) names the replicas in
//!             sync, and the revision of vol/V that says so
//!   there     each node has made its pool snapshot, and vol/V still has that revision
//!   failed    there is none; `why` has the reason
//! ```
//!
//! A holder changes `vol/V` before it acknowledges a write that an in-sync replica does not have.
//! So if `vol/V` has the same revision before and after a cut, the cut has every write that was
//! acknowledged before it. A transaction compares the revision, so a cut that came too late never
//! counts.
//!
//! The contents of several cuts are the same if no write was executed between the first and the
//! last of them. Without a holder there is none. A holder holds writes back (`held_by`) before it
//! names the replicas. It lets them go on when all are cut, and only then, if they were held all
//! the time, says that the snapshot is there.
//!
//! Pool snapshots that no longer count stay in `former`, each with its node, until their deletion.

use nacre_cluster_core::{ExportId, Holder, NodeId, VolumeId};
use nacre_cluster_etcd::KeyValue;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::error::Error;
use crate::export::Want;
use crate::keys::{FORMAT, decode};

/// The name in [`crate::Description::features`] of nodes that know these keys. (`snapshots` is that
/// of earlier versions, which know a single cut.)
pub const SNAPSHOTS: &str = "snapshots_of_replicas";
/// Most snapshots of a cluster.
pub const MAX_SNAPSHOTS: usize = 4096;
/// Most snapshots of one volume.
pub const MAX_OF_VOLUME: usize = 256;
/// Most attempts to make one snapshot, while the record of the volume changes again and again.
pub const MAX_CUTS: u32 = 16;
/// The number of lvols in `former` from which the snapshot is not cut again.
pub(crate) const MAX_FORMER: usize = 64;
/// Most bytes of a name.
pub(crate) const MAX_NAME: usize = 63;

/// The value of `snap/S`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotKey {
    v: u64,
    volume: Uuid,
    pub name: String,
    /// Size of the volume at the cut, in bytes; 0: no replica is chosen yet.
    #[serde(default)]
    pub bytes: u64,
    /// The time of the cut, in seconds since 1970; 0: it is not cut yet.
    #[serde(default)]
    pub created: u64,
    pub want: Want,
    pub is: CutState,
    /// Attempts so far.
    #[serde(default, rename = "cuts")]
    pub attempts: u32,
    /// One for each replica, from [`CutState::Chosen`] on.
    #[serde(
        default,
        rename = "cut",
        deserialize_with = "one_or_several",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub cuts: Vec<Cut>,
    /// The holder that holds writes back while the replicas are cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_by: Option<HeldBy>,
    /// Lvols to be deleted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub former: Vec<Cut>,
    /// The reason of [`CutState::Failed`], or the reason why an lvol is not deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<CutProblem>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CutState {
    Asked,
    Chosen,
    There,
    Failed,
}

/// The lvol of a snapshot, on one node, or the request to make it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cut {
    pub node: Uuid,
    /// The replica's device on the node.
    pub device: String,
    pub lvol: Uuid,
    /// `None`: the node has not cut it yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<Uuid>,
    /// The revision of `vol/V` that names the replica as in sync.
    pub revision: i64,
    /// The reason why the lvol is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<CutProblem>,
}

/// A process of a node, as [`Holder`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldBy {
    node: Uuid,
    incarnation: u64,
}

impl From<Holder> for HeldBy {
    fn from(holder: Holder) -> Self {
        Self {
            node: holder.node.0,
            incarnation: holder.incarnation.0,
        }
    }
}

/// Earlier versions wrote a single cut.
fn one_or_several<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Cut>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Cuts {
        One(Cut),
        Several(Vec<Cut>),
    }
    Ok(match Cuts::deserialize(deserializer)? {
        Cuts::One(cut) => vec![cut],
        Cuts::Several(cuts) => cuts,
    })
}

/// An error of a node that has an lvol of a snapshot: code and text, as in an RPC error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CutProblem {
    pub code: i32,
    pub text: String,
}

/// `snap/S` at one revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenSnapshot {
    pub key: SnapshotKey,
    pub revision: i64,
}

/// A volume at one revision of `vol/V`, and the replicas of which a snapshot can be cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CutSources {
    pub revision: i64,
    pub bytes: u64,
    pub holder: CutHolder,
    pub replicas: Vec<CutSource>,
}

/// The holder, which chooses the replica. After an unclean stop, in-sync replicas may differ in
/// blocks that were being written, until the next holder has made them equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CutHolder {
    /// The last holder has closed the volume, or none has opened it.
    None,
    Stands(Holder),
    /// This holder's lease has ended. It may still serve, as long as its replicas confirm it.
    Over(NodeId),
}

/// A replica in sync, whose node has a lease and knows snapshots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CutSource {
    pub node: NodeId,
    pub export_id: ExportId,
    /// Its name on the node.
    pub device: String,
}

impl SnapshotKey {
    pub(crate) fn new(volume: VolumeId, name: &str) -> Self {
        Self {
            v: FORMAT,
            volume: volume.0,
            name: name.to_owned(),
            bytes: 0,
            created: 0,
            want: Want::There,
            is: CutState::Asked,
            attempts: 0,
            cuts: Vec::new(),
            held_by: None,
            former: Vec::new(),
            why: None,
            rest: Map::new(),
        }
    }

    pub(crate) fn decode(kv: &KeyValue) -> Result<Self, Error> {
        decode(kv)
    }

    pub fn volume(&self) -> VolumeId {
        VolumeId(self.volume)
    }

    /// The nodes of the present lvols.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.cuts.iter().map(|cut| NodeId(cut.node))
    }

    /// A client asks again for one that failed.
    pub(crate) fn asked_again(&self) -> Self {
        Self {
            is: CutState::Asked,
            attempts: 0,
            why: None,
            ..self.clone()
        }
    }

    /// The key after the choice of the replicas to cut. `held_by`: the holder, if it holds writes
    /// back. Without it there is no holder, or one replica only.
    #[must_use]
    pub fn chosen(&self, sources: &[CutSource], of: &CutSources, held_by: Option<Holder>) -> Self {
        let cut = |source: &CutSource| Cut {
            node: source.node.0,
            device: source.device.clone(),
            // A new one: a cut that comes late is not mistaken for a later one.
            lvol: Uuid::new_v4(),
            pool: None,
            revision: of.revision,
            why: None,
        };
        Self {
            attempts: self.attempts + 1,
            is: CutState::Chosen,
            bytes: of.bytes,
            cuts: sources.iter().map(cut).collect(),
            held_by: held_by.map(HeldBy::from),
            why: None,
            ..self.clone()
        }
    }

    /// The key after a node has made this lvol, in `pool`.
    #[must_use]
    pub fn with_cut(&self, lvol: Uuid, pool: Uuid) -> Self {
        let mut next = self.clone();
        for cut in next.cuts.iter_mut().filter(|cut| cut.lvol == lvol) {
            cut.pool = Some(pool);
        }
        next
    }

    /// The key without this cut, whose replica is on no pool. `None`: it is the last one.
    #[must_use]
    pub fn without_cut(&self, lvol: Uuid) -> Option<Self> {
        let mut next = self.clone();
        next.cuts.retain(|cut| cut.lvol != lvol);
        (!next.cuts.is_empty()).then_some(next)
    }

    /// True if each chosen replica is cut.
    pub fn is_cut(&self) -> bool {
        !self.cuts.is_empty() && self.cuts.iter().all(|cut| cut.pool.is_some())
    }

    /// The key once all replicas are cut; `created`: seconds since 1970.
    #[must_use]
    pub fn made(&self, created: u64) -> Self {
        Self {
            is: CutState::There,
            created,
            held_by: None,
            why: None,
            ..self.clone()
        }
    }

    /// The key after cuts that do not count: others are needed, or the snapshot fails after
    /// [`MAX_CUTS`] attempts. The nodes of the cuts delete their lvols.
    #[must_use]
    pub fn again(&self) -> Self {
        let mut again = Self {
            is: CutState::Asked,
            held_by: None,
            ..self.clone()
        };
        again.former.append(&mut again.cuts);
        if again.attempts >= MAX_CUTS || again.former.len() >= MAX_FORMER {
            let text = "the replicas of the volume leave and return at this time; try again later";
            return again.failed(EAGAIN, text);
        }
        again
    }

    /// The key after an attempt in which the holder could not hold writes back: `why`. Nothing was
    /// cut. The snapshot fails after `most` attempts.
    #[must_use]
    pub fn not_held(&self, most: u32, why: &str) -> Self {
        let mut next = self.clone();
        next.attempts += 1;
        if next.attempts >= most {
            return next.failed(EAGAIN, why);
        }
        next
    }

    /// The key after a failure. The lvols of the last cuts, if there are any, are deleted.
    #[must_use]
    pub fn failed(&self, code: i32, text: &str) -> Self {
        let mut failed = Self {
            is: CutState::Failed,
            why: Some(CutProblem {
                code,
                text: text.to_owned(),
            }),
            held_by: None,
            ..self.clone()
        };
        failed.former.append(&mut failed.cuts);
        failed
    }

    /// The key after an lvol could not be deleted.
    #[must_use]
    pub fn with_problem(&self, why: CutProblem) -> Self {
        Self {
            why: Some(why),
            ..self.clone()
        }
    }

    /// The key after this lvol of the snapshot was missed, or (`None`) found again.
    #[must_use]
    pub fn with_missing(&self, lvol: Uuid, why: Option<&CutProblem>) -> Self {
        let mut next = self.clone();
        // Earlier versions wrote the reason there.
        next.why = None;
        for cut in next.cuts.iter_mut().filter(|cut| cut.lvol == lvol) {
            cut.why = why.cloned();
        }
        next
    }

    /// The key after the removal of a node from the cluster, with its lvols. A snapshot stays
    /// listed, as one that is not available, even without any.
    pub(crate) fn without_node(&self, node: NodeId) -> Self {
        let mut next = self.clone();
        let is_there = |cut: &Cut| cut.node == node.0;
        if next.is == CutState::Chosen && next.cuts.iter().any(is_there) {
            next = next.again();
        }
        if next.cuts.iter().any(|cut| !is_there(cut)) {
            next.cuts.retain(|cut| !is_there(cut));
        }
        next.former.retain(|cut| !is_there(cut));
        next
    }

    /// The key once the snapshot is no longer wanted.
    pub(crate) fn unwanted(&self) -> Self {
        let mut next = self.clone();
        next.want = Want::Gone;
        next.held_by = None;
        next.former.append(&mut next.cuts);
        next
    }

    /// The key after the deletion of one lvol of `former`. `None`: the snapshot is no longer
    /// wanted, and this was its last lvol, so the key is to be deleted.
    #[must_use]
    pub fn without(&self, lvol: Uuid) -> Option<Self> {
        let mut next = self.clone();
        next.former.retain(|cut| cut.lvol != lvol);
        if next.want == Want::Gone {
            next.why = None;
        }
        let is_over = next.want == Want::Gone && next.former.is_empty();
        (!is_over).then_some(next)
    }
}

/// The code of an error that passes.
const EAGAIN: i32 = -11;

impl SeenSnapshot {
    pub(crate) fn read(kv: &KeyValue) -> Result<Self, Error> {
        Ok(Self {
            key: SnapshotKey::decode(kv)?,
            revision: kv.mod_revision,
        })
    }
}

/// True for a snapshot with an lvol on the node, or one that the node is to delete.
pub(crate) fn has_cut_on(value: &Value, node: NodeId) -> bool {
    let key = serde_json::from_value::<SnapshotKey>(value.clone());
    key.is_ok_and(|key| {
        let mut cuts = key.cuts.iter().chain(&key.former);
        cuts.any(|cut| cut.node == node.0)
    })
}

/// True for a snapshot that was cut, or is no longer wanted: a restore of a backup writes its key.
pub(crate) fn outlives_its_store(value: &str) -> bool {
    let value: Value = serde_json::from_str(value).unwrap_or_default();
    value["is"] == "there" || value["want"] == "gone"
}
