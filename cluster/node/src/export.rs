//! The value of the key `member/N/R` in etcd, as JSON: an *export*. An export is a block device of
//! node N that the other nodes reach over NVMe-oF, for a replica of a volume. An operator or the
//! cluster wants the export, and node N reports its state. A change keeps fields that this version
//! does not know.

use nacre_cluster_core::placement::lvol_of;
use nacre_cluster_core::{ExportId, Holder, Incarnation, NodeId, VolumeId};
use nacre_cluster_etcd::KeyValue;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::error::Error;
use crate::keys::{FORMAT, decode};

/// Most bytes of a device's name.
pub const MAX_DEVICE: usize = 255;

/// The value of `member/N/R`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Export {
    v: u64,
    volume: Uuid,
    /// The block device's name on node N.
    pub device: String,
    /// The pool in which node N makes the device, as an lvol. `None`: an operator made the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<PoolChoice>,
    /// The reason for which this replica replaces another one; `None`: it replaces none.
    #[serde(default, alias = "rebuild", skip_serializing_if = "Option::is_none")]
    pub resync: Option<Resync>,
    /// The last size of the device; 0: node N has not reported one yet.
    #[serde(default)]
    pub bytes: u64,
    #[serde(default)]
    pub block_size: u32,
    /// The namespace id in the subsystem of node N; 0: node N has not chosen it yet. Other nodes
    /// refuse another device under an id that they know, so it stays over restarts.
    #[serde(default)]
    pub nsid: u32,
    pub want: Want,
    /// The time since which it is no longer wanted, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gone_since: Option<u64>,
    /// The daemon that makes the replica, until the volume's record names it. `None`: the record
    /// has named it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    by: Option<Maker>,
    pub is: Is,
    /// The reason of [`Is::Failed`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Maker {
    node: Uuid,
    incarnation: u64,
}

/// The pool of a replica, and the wishes by which the cluster chose it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolChoice {
    pub pool: Uuid,
    /// Size of the lvol.
    pub bytes: u64,
    #[serde(default)]
    pub thin: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spread: Vec<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub strict: bool,
    /// The snapshot of which the new lvol is a clone. Nodes of earlier versions make no such lvols.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Uuid>,
}

/// The reason for which a replica is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resync {
    /// The former replica was lost. If it returns first, it stays.
    Lost,
    /// Its node is evicted.
    Evicted,
}

/// The wanted state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Want {
    There,
    /// Node N ends the export, then deletes the key.
    Gone,
}

/// The state that node N reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Is {
    Making,
    There,
    Failed,
}

/// The state of an export, as its node reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportState {
    pub is: Is,
    pub bytes: u64,
    pub block_size: u32,
    pub nsid: u32,
    /// The reason of [`Is::Failed`].
    pub why: Option<String>,
}

impl Export {
    pub(crate) fn new(volume: VolumeId, device: &str, by: Option<Holder>) -> Self {
        Self {
            v: FORMAT,
            volume: volume.0,
            device: device.to_owned(),
            place: None,
            resync: None,
            bytes: 0,
            block_size: 0,
            nsid: 0,
            want: Want::There,
            gone_since: None,
            by: by.map(|by| Maker {
                node: by.node.0,
                incarnation: by.incarnation.0,
            }),
            is: Is::Making,
            why: None,
            rest: Map::new(),
        }
    }

    /// An export whose device its node makes, as an lvol. `by`: the daemon that makes the replica.
    pub(crate) fn placed(
        volume: VolumeId,
        export_id: ExportId,
        place: PoolChoice,
        resync: Option<Resync>,
        by: Holder,
    ) -> Self {
        let device = lvol_of(export_id.0).to_string();
        Self {
            place: Some(place),
            resync,
            ..Self::new(volume, &device, Some(by))
        }
    }

    /// Applies the node's report. A report without a size keeps the last one, which shows that the
    /// device once existed.
    pub(crate) fn report(&mut self, state: &ExportState) {
        self.is = state.is;
        if state.bytes > 0 {
            self.bytes = state.bytes;
            self.block_size = state.block_size;
        }
        self.nsid = state.nsid;
        self.why = state.why.clone();
    }

    /// The daemon that makes the replica, until the volume's record names it.
    pub fn by(&self) -> Option<Holder> {
        let by = self.by?;
        Some(Holder {
            node: NodeId(by.node),
            incarnation: Incarnation(by.incarnation),
        })
    }

    /// Marks the export as no longer wanted, at `now` in seconds since 1970.
    pub(crate) fn unwanted(&mut self, now: u64) {
        if self.want != Want::Gone {
            self.gone_since = Some(now);
        }
        self.want = Want::Gone;
    }

    /// The time since which it is no longer wanted, in seconds since 1970; `None`: it is wanted, or
    /// an earlier version wrote the key.
    pub fn gone_since(&self) -> Option<u64> {
        self.gone_since.filter(|_| self.want == Want::Gone)
    }

    /// Notes that the volume's record names the replica: no daemon makes it any more.
    pub(crate) fn is_made(&mut self) {
        self.by = None;
    }

    pub fn volume(&self) -> VolumeId {
        VolumeId(self.volume)
    }

    pub(crate) fn decode(kv: &KeyValue) -> Result<Self, Error> {
        decode(kv)
    }
}
