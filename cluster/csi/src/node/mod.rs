//! `csi.v1.Node`: volumes on this machine.
//!
//! ```text
//!   context   NQN, UUID and addresses of a volume                parse
//!   host      the kernel, its files and programs                 perform
//!   identity  the NQN of this host, which is the node's id       perform
//!   bounded   calls of the kernel, with deadlines                perform
//!   fabrics   paths and block devices of volumes, in sysfs       perform
//!   paths     connects and disconnects subsystems                perform
//!   mounts    mounts                                             perform
//!   format    file systems                                       perform
//!   records   staged volumes, kept over a restart                perform
//!   stage     NodeStageVolume, NodeUnstageVolume
//!   publish   NodePublishVolume, NodeUnpublishVolume
//!   usage     NodeGetVolumeStats, NodeExpandVolume
//!   reconnect connects missing paths again
//! ```

mod bounded;
pub mod context;
mod fabrics;
mod format;
mod host;
mod identity;
mod mounts;
mod paths;
mod publish;
mod reconnect;
mod records;
mod stage;
mod usage;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tonic::Status;
use uuid::Uuid;

use self::bounded::Bounded;
use self::fabrics::{Device, HostPath};
pub use self::host::{Host, Machine, Ran};
pub use self::identity::{HostId, HostIdError};
use self::paths::Paths;
pub use self::reconnect::Reconnector;
use self::records::{Records, Staged};
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
    /// The boot id of the kernel.
    boot_id: String,
    devices: Bounded<PathBuf>,
    /// Time for the cached data of a device to be written.
    flush_time: Duration,
    paths: Paths,
    /// The volumes with a running call.
    pending: Pending,
    /// `/dev/nvme-fabrics` was present at some time.
    was_ready: AtomicBool,
}

/// Default of [`Node::with_flush_time`]. The orchestrator repeats a call that fails.
const FLUSH: Duration = Duration::from_secs(60);

impl Node {
    /// `state` is a directory for the records of staged volumes, kept over restarts.
    pub fn new(host: Arc<dyn Host>, me: HostId, state: &Path) -> std::io::Result<Self> {
        let boot_id = host.boot_id()?;
        Ok(Self {
            records: Records::open(state, &boot_id)?,
            boot_id,
            paths: Paths::new(Arc::clone(&host), me.clone()),
            host,
            me,
            devices: Bounded::default(),
            flush_time: FLUSH,
            pending: Pending::default(),
            was_ready: AtomicBool::default(),
        })
    }

    /// Sets the time limit for a device to write its cached data, 60 s by default.
    #[must_use]
    pub fn with_flush_time(self, flush_time: Duration) -> Self {
        Self { flush_time, ..self }
    }

    /// Sets the time limit for the kernel to connect a path (15 s by default). The method also sets
    /// the limit for the kernel to delete the paths of a subsystem (30 s by default).
    #[must_use]
    pub fn with_path_time(self, time: Duration) -> Self {
        let paths = self.paths.with_time(time);
        Self { paths, ..self }
    }

    /// False: the kernel of this machine cannot connect volumes, because the module `nvme-fabrics`
    /// is not loaded. It stays true if the module is unloaded later: a restart of the driver would
    /// not load it.
    pub fn is_ready(&self) -> bool {
        if self.host.dev().join("nvme-fabrics").exists() {
            self.was_ready.store(true, Ordering::Relaxed);
        }
        self.was_ready.load(Ordering::Relaxed)
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

    /// Without topology: the interface allows it only with `VOLUME_ACCESSIBILITY_CONSTRAINTS`, and
    /// each host reaches each volume over the network. Failure domains of replicas are parameters.
    pub(crate) fn info(&self) -> Result<NodeGetInfoResponse, Status> {
        Ok(NodeGetInfoResponse {
            node_id: self.me.nqn.clone(),
            ..Default::default()
        })
    }

    /// The record of a volume that was staged since the machine started.
    fn staged(&self, volume: Uuid) -> Result<Option<Staged>, Status> {
        let found = self.records.read(volume)?;
        Ok(found.filter(|staged| staged.boot_id == self.boot_id))
    }

    /// Another volume of this subsystem with a record.
    fn other_of(&self, nqn: &str, volume: Uuid) -> Result<Option<Uuid>, Status> {
        let volumes = self.records.volumes().map_err(|error| {
            Status::internal(format!("cannot list the records of volumes: {error}"))
        })?;
        for other in volumes.into_iter().filter(|other| *other != volume) {
            let is_of = match self.staged(other) {
                Ok(staged) => staged.is_some_and(|staged| staged.nqn == nqn),
                // Its device says so instead. The record costs only the calls on its volume.
                Err(_) => {
                    let devices = fabrics::devices(&*self.host, other)?;
                    devices.iter().any(|device| device.nqn == nqn)
                }
            };
            if is_of {
                return Ok(Some(other));
            }
        }
        Ok(None)
    }

    /// Refuses a device that is not the one of the record: a copy of the volume at another target
    /// has the same UUID.
    fn refuse_other(&self, staged: &Staged, device: &Device) -> Result<(), Status> {
        if device.nqn != staged.nqn {
            let text = format!(
                "device {} has the UUID of volume {}, and is of subsystem {}, not {}: disconnect it",
                device.name, staged.uuid, device.nqn, staged.nqn
            );
            return Err(Status::failed_precondition(text));
        }
        let paths = self.paths.of(&staged.nqn)?;
        let is_ours = |path: &HostPath| path.address.as_ref().is_none_or(|one| staged.has(one));
        if paths.is_empty() || paths.iter().any(is_ours) {
            return Ok(());
        }
        let text = format!(
            "{} is connected to other addresses than those of volume {}: disconnect it",
            staged.nqn, staged.uuid
        );
        Err(Status::failed_precondition(text))
    }

    /// The volume of a call that needs an existing one: `NOT_FOUND` if its id `text` is not one of
    /// ours.
    fn known(&self, id: Option<Uuid>, text: &str) -> Result<Uuid, Status> {
        id.ok_or_else(|| Status::not_found(format!("there is no volume {text}")))
    }
}
