//! The value of the key `snap/S` in etcd, as JSON: a snapshot of a replicated volume. It is a pool
//! snapshot (a *cut*) of the lvol of one replica in sync, on that replica's node. A change keeps
//! fields that this version does not know.
//!
//! ```text
//!   asked     an operator wants the snapshot
//!   chosen    the holder (or, without one, the node of a replica in sync) names a replica in sync,
//!             and the revision of vol/V that says so
//!   there     the replica's node has made the pool snapshot, and vol/V still has that revision
//!   failed    there is none; `why` has the reason
//! ```
//!
//! A holder changes `vol/V` before it acknowledges a write that an in-sync replica does not have.
//! So if `vol/V` has the same revision before and after the cut, the cut has every write that was
//! acknowledged before it. A transaction compares the revision, so a cut that came too late never
//! counts.
//!
//! Pool snapshots that no longer count stay in `former`, each with its node, until their deletion.

use nacre_cluster_core::{ExportId, Holder, NodeId, VolumeId};
use nacre_cluster_etcd::KeyValue;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::error::Error;
use crate::export::Want;
use crate::keys::{FORMAT, decode};

/// The name in [`crate::Description::features`] of nodes that know these keys.
pub const SNAPSHOTS: &str = "snapshots";
/// Most snapshots of a cluster.
pub const MAX_SNAPSHOTS: usize = 4096;
/// Most snapshots of one volume.
pub const MAX_OF_VOLUME: usize = 256;
/// Most attempts to cut one snapshot, while the record of the volume changes again and again.
pub const MAX_CUTS: u32 = 16;
/// The number of lvols in `former` from which the snapshot is not cut again.
pub(crate) const MAX_FORMER: usize = 32;
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
    /// Cuts so far.
    #[serde(default)]
    pub cuts: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut: Option<Cut>,
    /// Lvols to be deleted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub former: Vec<Cut>,
    /// The reason of [`CutState::Failed`], or the reason why its lvol is missing or not deleted.
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
}

/// An error of the node that has the lvol: code and text, as in an RPC error.
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
            cuts: 0,
            cut: None,
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

    /// The node with the present lvol.
    pub fn node(&self) -> Option<NodeId> {
        self.cut.as_ref().map(|cut| NodeId(cut.node))
    }

    /// A client asks again for one that failed.
    pub(crate) fn asked_again(&self) -> Self {
        Self {
            is: CutState::Asked,
            cuts: 0,
            why: None,
            ..self.clone()
        }
    }

    /// The key after the choice of the replica to cut.
    #[must_use]
    pub fn chosen(&self, source: &CutSource, of: &CutSources) -> Self {
        Self {
            cuts: self.cuts + 1,
            is: CutState::Chosen,
            bytes: of.bytes,
            cut: Some(Cut {
                node: source.node.0,
                device: source.device.clone(),
                // A new one: a cut that comes late is not mistaken for a later one.
                lvol: Uuid::new_v4(),
                pool: None,
                revision: of.revision,
            }),
            why: None,
            ..self.clone()
        }
    }

    /// The key after the cut, which is in `pool`; `created`: seconds since 1970.
    #[must_use]
    pub fn made(&self, pool: Uuid, created: u64) -> Self {
        let mut made = Self {
            is: CutState::There,
            created,
            why: None,
            ..self.clone()
        };
        if let Some(cut) = &mut made.cut {
            cut.pool = Some(pool);
        }
        made
    }

    /// The key after a cut that does not count: another cut is needed, or the snapshot fails after
    /// [`MAX_CUTS`] of them. The node of the last cut deletes its lvol.
    #[must_use]
    pub fn again(&self) -> Self {
        let mut again = Self {
            is: CutState::Asked,
            ..self.clone()
        };
        again.former.extend(again.cut.take());
        if again.cuts >= MAX_CUTS || again.former.len() >= MAX_FORMER {
            let text = "the replicas of the volume leave and return at this time; try again later";
            return again.failed(EAGAIN, text);
        }
        again
    }

    /// The key after a failure. The lvol of the last cut, if there is one after all, is deleted.
    #[must_use]
    pub fn failed(&self, code: i32, text: &str) -> Self {
        let mut failed = Self {
            is: CutState::Failed,
            why: Some(CutProblem {
                code,
                text: text.to_owned(),
            }),
            ..self.clone()
        };
        failed.former.extend(failed.cut.take());
        failed
    }

    #[must_use]
    pub fn with_problem(&self, why: Option<CutProblem>) -> Self {
        Self {
            why,
            ..self.clone()
        }
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

/// True for a snapshot that was cut, or is no longer wanted: a restore of a backup writes its key.
pub(crate) fn outlives_its_store(value: &str) -> bool {
    let value: Value = serde_json::from_str(value).unwrap_or_default();
    value["is"] == "there" || value["want"] == "gone"
}
