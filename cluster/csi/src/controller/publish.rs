//! `ControllerPublishVolume`, `ControllerUnpublishVolume`: the hosts that may use a volume. The id
//! of a node is the NQN of its host.

use std::time::{Duration, Instant};

use tonic::Status;
use uuid::Uuid;

use super::Controller;
use crate::capability::{Capability, bounded, volume_id};
use crate::daemon::{Publication, Volume, listed};
use crate::messages::Nothing;
use crate::messages::controller::{
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse,
    ControllerUnpublishVolumeRequest,
};
use crate::node::context;

/// Longest id of a node in the interface.
const MAX_NODE_ID: usize = 256;
/// Tries to change a publication that others change, too.
const ATTEMPTS: usize = 5;
/// Longest wait for the end of a host's connections. The timeouts of the helpers in
/// deploy/kubernetes are longer.
const CUT_OFF: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(100);
const SOON: Duration = Duration::from_secs(1);

impl Controller {
    pub(crate) fn publish(
        &self,
        asked: &ControllerPublishVolumeRequest,
    ) -> Result<ControllerPublishVolumeResponse, Status> {
        let id = volume_id(&asked.volume_id)?;
        if asked.node_id.is_empty() {
            return Err(Status::invalid_argument("node_id is missing"));
        }
        let host = bounded("node_id", &asked.node_id, MAX_NODE_ID)?;
        let capability = Capability::read(asked.volume_capability.as_ref());
        let capability = capability.map_err(|unfit| unfit.invalid())?;
        if asked.readonly {
            let text = "readonly: this driver publishes volumes for writing; a node mounts them \
                        read-only";
            return Err(Status::invalid_argument(text));
        }
        let _one = self.pending.start(&asked.volume_id)?;
        let volume = self.existing(id, &asked.volume_id)?;
        if !context::is_option(host) {
            let text = format!("there is no node \"{host}\": the id of a node is its host's NQN");
            return Err(Status::not_found(text));
        }
        let publication = self.allow(&volume, host, capability.is_shared())?;
        if publication.addresses.is_empty() {
            return Err(Status::unavailable(format!(
                "volume {} has no address that hosts can reach: give the daemon a listener \
                 ([nvmf] listen)",
                volume.name
            )));
        }
        Ok(ControllerPublishVolumeResponse {
            publish_context: context::write(&publication.nqn, volume.id, &publication.addresses),
        })
    }

    /// Adds the host. The publication is read again afterwards, because another program may have
    /// replaced it meanwhile.
    fn allow(&self, volume: &Volume, host: &str, is_shared: bool) -> Result<Publication, Status> {
        for _ in 0..ATTEMPTS {
            let volume = self.existing(Some(volume.id), &volume.name)?;
            let before = self.daemon.publication(&volume)?;
            if let Some(found) = &before {
                let is_allowed = refuse_others(&volume, found, host, is_shared)?;
                if is_allowed {
                    return Ok(found.clone());
                }
            }
            let mut hosts = before.clone().unwrap_or_default().hosts;
            hosts.push(host.to_owned());
            match self.daemon.publish(&volume, before.as_ref(), &hosts) {
                Err(refused) if refused.code() != tonic::Code::AlreadyExists => {
                    return Err(refused);
                }
                _ => {}
            }
        }
        Err(contended(volume))
    }

    pub(crate) fn unpublish(
        &self,
        asked: &ControllerUnpublishVolumeRequest,
    ) -> Result<Nothing, Status> {
        let Some(id) = volume_id(&asked.volume_id)? else {
            return Ok(Nothing {});
        };
        let host = bounded("node_id", &asked.node_id, MAX_NODE_ID)?;
        let host = Some(host).filter(|host| !host.is_empty());
        let _one = self.pending.start(&asked.volume_id)?;
        for _ in 0..ATTEMPTS {
            let volume = self.daemon.volume(id)?;
            let before = match &volume {
                Some(volume) => self.daemon.publication(volume)?,
                None => None,
            };
            let (Some(volume), Some(before)) = (volume, before) else {
                self.until_cut_off(id, host)?;
                return Ok(Nothing {});
            };
            refuse_unremovable(&volume, &before)?;
            let is_left = |one: &&String| host.is_some_and(|host| *one != host);
            let left: Vec<String> = before.hosts.iter().filter(is_left).cloned().collect();
            if left.len() < before.hosts.len() {
                // First the hosts lose the permission, which ends their connections.
                self.daemon.publish(&volume, Some(&before), &left)?;
                continue;
            }
            self.until_cut_off(id, host)?;
            if before.hosts.is_empty() {
                self.daemon.unpublish(&volume)?;
            }
            return Ok(Nothing {});
        }
        let text = format!("volume {id}: another program publishes it at the same time; try again");
        Err(Status::aborted(text))
    }

    /// Waits until the host, or each host if it is `None`, has no connection, for at most
    /// [`CUT_OFF`].
    ///
    /// This daemon is asked. In a cluster, each node that serves or could serve the volume confirms
    /// it, by its lease, for the present publication. A node that is silent is fenced by the others
    /// first. A node that serves the volume without a lease never confirms: the call fails, and the
    /// orchestrator calls again.
    fn until_cut_off(&self, id: Uuid, host: Option<&str>) -> Result<(), Status> {
        let is_in_cluster = self.daemon.deployment()?.is_cluster();
        let began = Instant::now();
        loop {
            let obstacle = if self.daemon.is_connected(id, host)? {
                Some("a host is still connected".to_owned())
            } else if is_in_cluster {
                self.daemon.unconfirmed(id)?
            } else {
                None
            };
            let Some(obstacle) = obstacle else {
                return Ok(());
            };
            if began.elapsed() > CUT_OFF {
                let text = format!(
                    "volume {id}: {obstacle}, {} s after the host lost its permission",
                    began.elapsed().as_secs()
                );
                return Err(Status::deadline_exceeded(text));
            }
            // In a cluster, each look lists the leases.
            let pause = if began.elapsed() < SOON { LOOK } else { SOON };
            std::thread::sleep(pause);
        }
    }
}

/// Refuses a volume whose hosts this driver cannot cut off.
fn refuse_unremovable(volume: &Volume, found: &Publication) -> Result<(), Status> {
    let why = if found.any_host {
        "published to any host, so that no host can be cut off: unpublish it".to_owned()
    } else if found.others.is_empty() {
        return Ok(());
    } else {
        let others = listed(&found.others);
        format!("also in {others}, whose hosts are not cut off: delete that subsystem")
    };
    let text = format!("volume {} is {why}", volume.name);
    Err(Status::failed_precondition(text))
}

/// True if the host may use the volume already. Refuses a second host unless `is_shared`, and a
/// volume as [`refuse_unremovable`] does.
fn refuse_others(
    volume: &Volume,
    found: &Publication,
    host: &str,
    is_shared: bool,
) -> Result<bool, Status> {
    refuse_unremovable(volume, found)?;
    let others: Vec<String> = found.hosts.iter().filter(|h| *h != host).cloned().collect();
    if !is_shared && !others.is_empty() {
        let text = format!("volume {} is published to {}", volume.name, listed(&others));
        return Err(Status::failed_precondition(text));
    }
    Ok(others.len() < found.hosts.len())
}

fn contended(volume: &Volume) -> Status {
    Status::aborted(format!(
        "volume {}: another program changes its publication at the same time; try again",
        volume.name
    ))
}
