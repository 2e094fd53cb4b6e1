//! `csi.v1.Node`: volumes on this machine.
//!
//! ```text
//!   context   facts of the controller about a volume             parse
//!   host      the kernel, its files and programs                 perform
//!   fabrics   paths and block devices of volumes, in sysfs       perform
//!   mounts    mounts                                             perform
//!   format    file systems                                       perform
//!   records   staged volumes, kept over a restart                perform
//!   stage     NodeStageVolume, NodeUnstageVolume
//!   publish   NodePublishVolume, NodeUnpublishVolume
//!   guardian  connects missing paths again
//! ```

pub mod context;
mod fabrics;
mod format;
mod guardian;
mod host;
mod mounts;
mod publish;
mod records;
mod stage;
mod usage;

use std::path::Path;
use std::sync::Arc;

use tonic::Status;
use uuid::Uuid;

pub use self::fabrics::HostId;
pub use self::guardian::Guardian;
pub use self::host::{Host, Machine, Ran};
use self::records::Records;
use crate::messages::node::{
    NodeCall, NodeGetCapabilitiesResponse, NodeGetInfoResponse, NodeRpc, NodeServiceCapability,
};
use crate::pending::Pending;

/// Longest id of a node: Kubernetes stores no longer one.
pub const MAX_NODE_ID: usize = 192;

#[derive(Debug)]
pub struct Node {
    host: Arc<dyn Host>,
    me: HostId,
    records: Records,
    pending: Pending,
}

impl Node {
    /// `state` is a directory of this service, kept over restarts.
    pub fn new(host: Arc<dyn Host>, me: HostId, state: &Path) -> std::io::Result<Self> {
        Ok(Self {
            host,
            me,
            records: Records::open(state)?,
            pending: Pending::default(),
        })
    }

    /// False: the kernel of this machine cannot connect volumes.
    pub fn is_ready(&self) -> bool {
        self.host.dev().join("nvme-fabrics").exists()
    }

    pub(crate) fn capabilities(&self) -> NodeGetCapabilitiesResponse {
        let calls = [
            NodeCall::StageUnstageVolume,
            NodeCall::GetVolumeStats,
            NodeCall::ExpandVolume,
            NodeCall::SingleNodeMultiWriter,
        ];
        let capability = |call: NodeCall| NodeServiceCapability {
            rpc: Some(NodeRpc { kind: call.into() }),
        };
        NodeGetCapabilitiesResponse {
            capabilities: calls.map(capability).into(),
        }
    }

    pub(crate) fn info(&self) -> Result<NodeGetInfoResponse, Status> {
        Ok(NodeGetInfoResponse {
            node_id: self.me.nqn.clone(),
            ..Default::default()
        })
    }

    /// The volume of a call on something that exists.
    fn known(&self, id: Option<Uuid>, text: &str) -> Result<Uuid, Status> {
        id.ok_or_else(|| Status::not_found(format!("there is no volume {text}")))
    }
}
