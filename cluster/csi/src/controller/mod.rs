//! `csi.v1.Controller`: volumes of the daemon or its cluster. It keeps no state: each call asks the
//! daemon for the present state, changes it, and looks again. That includes the cluster: the daemon
//! may have been replaced by one in another cluster.

mod create;
mod list;
mod publish;
mod snapshots;

use tonic::Status;
use uuid::Uuid;

use self::snapshots::ContentSource;
use crate::capability::{Capability, MIB, Parameters, Sizes, volume_id};
use crate::daemon::{Daemon, Volume};
use crate::messages::controller::{
    self as messages, Confirmed, ControllerCall, ControllerExpandVolumeRequest,
    ControllerExpandVolumeResponse, ControllerGetCapabilitiesResponse, ControllerRpc,
    ControllerServiceCapability, ValidateVolumeCapabilitiesRequest,
    ValidateVolumeCapabilitiesResponse,
};
use crate::messages::{AccessType, VolumeCapability};
use crate::pending::Pending;

#[derive(Debug)]
pub struct Controller {
    daemon: Daemon,
    pending: Pending,
}

impl Controller {
    pub fn new(daemon: Daemon) -> Self {
        Self {
            daemon,
            pending: Pending::default(),
        }
    }

    /// The controller for one call, which finds out anew where the daemon is.
    pub(crate) fn for_call(&self) -> Self {
        Self {
            daemon: self.daemon.anew(),
            pending: self.pending.clone(),
        }
    }

    /// Snapshots and clones need a daemon in no cluster, or a cluster whose nodes all know them.
    pub(crate) fn capabilities(&self) -> Result<ControllerGetCapabilitiesResponse, Status> {
        let mut calls = vec![
            ControllerCall::CreateDeleteVolume,
            ControllerCall::PublishUnpublishVolume,
            ControllerCall::ListVolumes,
            ControllerCall::ListVolumesPublishedNodes,
            ControllerCall::GetCapacity,
            ControllerCall::ExpandVolume,
            ControllerCall::SingleNodeMultiWriter,
        ];
        if self.daemon.has_snapshots()? {
            calls.extend([
                ControllerCall::CreateDeleteSnapshot,
                ControllerCall::ListSnapshots,
                ControllerCall::CloneVolume,
            ]);
        }
        let capability = |call: ControllerCall| ControllerServiceCapability {
            rpc: Some(ControllerRpc { kind: call.into() }),
        };
        Ok(ControllerGetCapabilitiesResponse {
            capabilities: calls.into_iter().map(capability).collect(),
        })
    }

    /// The volume of a request, which must exist.
    fn existing(&self, id: Option<Uuid>, text: &str) -> Result<Volume, Status> {
        let found = match id {
            Some(id) => self.daemon.volume(id)?,
            None => None,
        };
        found.ok_or_else(|| Status::not_found(format!("there is no volume {text}")))
    }

    pub(crate) fn validate(
        &self,
        asked: ValidateVolumeCapabilitiesRequest,
    ) -> Result<ValidateVolumeCapabilitiesResponse, Status> {
        let id = volume_id(&asked.volume_id)?;
        require_capabilities(&asked.volume_capabilities)?;
        let volume = self.existing(id, &asked.volume_id)?;
        let unfit = asked
            .volume_capabilities
            .iter()
            .find_map(|one| Capability::read(Some(one)).err());
        let unfit = unfit.map(|unfit| unfit.to_string());
        let context = (!asked.volume_context.is_empty())
            .then(|| "volume_context: volumes of this driver have none".to_owned());
        let parameters = match Parameters::read(&asked.parameters) {
            Ok(parameters) => create::differs(&volume, &parameters),
            Err(refused) => Some(refused.message().to_owned()),
        };
        let parameters = parameters.filter(|_| !asked.parameters.is_empty());
        let mutable = (!asked.mutable_parameters.is_empty())
            .then(|| "mutable_parameters: this driver has none".to_owned());
        if let Some(message) = unfit.or(context).or(parameters).or(mutable) {
            return Ok(ValidateVolumeCapabilitiesResponse {
                confirmed: None,
                message,
            });
        }
        Ok(ValidateVolumeCapabilitiesResponse {
            confirmed: Some(Confirmed {
                volume_context: asked.volume_context,
                volume_capabilities: asked.volume_capabilities,
                parameters: asked.parameters,
            }),
            message: String::new(),
        })
    }

    pub(crate) fn expand(
        &self,
        asked: &ControllerExpandVolumeRequest,
    ) -> Result<ControllerExpandVolumeResponse, Status> {
        let id = volume_id(&asked.volume_id)?;
        let Some(range) = &asked.capacity_range else {
            return Err(Status::invalid_argument("capacity_range is missing"));
        };
        let sizes = Sizes::read(Some(range))?;
        let is_block = match &asked.volume_capability {
            None => false,
            Some(asked) => {
                Capability::read(Some(asked)).map_err(|unfit| unfit.invalid())?;
                matches!(asked.access_type, Some(AccessType::Block(_)))
            }
        };
        let _one = self.pending.start(&asked.volume_id)?;
        let volume = self.existing(id, &asked.volume_id)?;
        let bytes = if volume.bytes >= sizes.least {
            volume.bytes
        } else {
            let wanted = sizes.chosen()?;
            self.daemon.grow(&volume, wanted / MIB)?.bytes
        };
        if !sizes.admits(bytes) {
            let text = format!(
                "volume {} has {bytes} bytes, and does not shrink",
                volume.name
            );
            return Err(Status::out_of_range(text));
        }
        Ok(ControllerExpandVolumeResponse {
            capacity_bytes: signed(bytes),
            node_expansion_required: !is_block,
        })
    }
}

fn require_capabilities(asked: &[VolumeCapability]) -> Result<(), Status> {
    if asked.is_empty() {
        return Err(Status::invalid_argument("volume_capabilities are missing"));
    }
    Ok(())
}

/// The interface counts bytes in signed numbers.
fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

fn described(volume: &Volume) -> messages::VolumeInfo {
    messages::VolumeInfo {
        capacity_bytes: signed(volume.bytes),
        volume_id: volume.id.to_string(),
        content_source: create::source(volume).map(ContentSource::message),
        ..Default::default()
    }
}
