//! `ListVolumes`: all volumes with the hosts that may use them, in pages. `GetCapacity`: the size
//! of the largest volume that can be made.

use tonic::Status;
use uuid::Uuid;

use super::{Controller, described, signed};
use crate::capability::{Capability, MIB, Parameters};
use crate::messages::Int64Value;
use crate::messages::controller::{
    GetCapacityRequest, GetCapacityResponse, ListVolumesRequest, ListVolumesResponse, ListedStatus,
    ListedVolume,
};

/// Most volumes in one answer: gRPC's clients accept 4 MiB.
const MAX_ENTRIES: usize = 4000;

pub(super) fn page_size(asked: i32) -> Result<usize, Status> {
    match usize::try_from(asked) {
        Ok(0) => Ok(MAX_ENTRIES),
        Ok(most) => Ok(most.min(MAX_ENTRIES)),
        Err(_) => Err(Status::invalid_argument("max_entries is negative")),
    }
}

/// The id after which a page begins: the token of the page before. `ABORTED` for another text.
pub(super) fn after(token: &str) -> Result<Option<Uuid>, Status> {
    if token.is_empty() {
        return Ok(None);
    }
    Uuid::parse_str(token).map(Some).map_err(|_| {
        let text = "starting_token is not one of this driver: start again without one";
        Status::aborted(text)
    })
}

impl Controller {
    /// Volumes in the order of their ids. A token is the last id of a page, so that it stays valid
    /// whatever is created and deleted between two pages.
    pub(crate) fn list(&self, asked: &ListVolumesRequest) -> Result<ListVolumesResponse, Status> {
        let most = page_size(asked.max_entries)?;
        let after = after(&asked.starting_token)?;
        let mut volumes = self.daemon.volumes()?;
        volumes.retain(|volume| after.is_none_or(|after| volume.id > after));
        let is_last = volumes.len() <= most;
        volumes.truncate(most);
        let next_token = match volumes.last() {
            Some(last) if !is_last => last.id.to_string(),
            _ => String::new(),
        };
        let hosts = self.daemon.publications(&volumes)?;
        let entry = |(volume, published_node_ids)| ListedVolume {
            volume: Some(described(volume)),
            status: Some(ListedStatus { published_node_ids }),
        };
        Ok(ListVolumesResponse {
            entries: volumes.iter().zip(hosts).map(entry).collect(),
            next_token,
        })
    }

    pub(crate) fn capacity(
        &self,
        asked: &GetCapacityRequest,
    ) -> Result<GetCapacityResponse, Status> {
        let parameters = Parameters::read(&asked.parameters)?;
        parameters.refuse_ignored(self.daemon.deployment()?.is_cluster())?;
        let capabilities = &asked.volume_capabilities;
        let is_unfit = capabilities
            .iter()
            .any(|one| Capability::read(Some(one)).is_err());
        let room = if is_unfit {
            0
        } else {
            self.daemon.room(&parameters)? / MIB * MIB
        };
        let bytes = |value| Some(Int64Value { value });
        Ok(GetCapacityResponse {
            available_capacity: signed(room),
            maximum_volume_size: bytes(signed(room)),
            minimum_volume_size: bytes(signed(MIB)),
        })
    }
}
