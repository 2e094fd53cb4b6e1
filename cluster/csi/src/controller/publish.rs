//! `ControllerPublishVolume`, `ControllerUnpublishVolume`: the hosts that may use a volume. The id
//! of a node is the NQN of its host.

use std::time::{Duration, Instant};

use tonic::Status;

use super::Controller;
use crate::capability::{Capability, bounded, volume_id};
use crate::daemon::{Place, Publication, Volume, listed};
use crate::messages::Nothing;
use crate::messages::controller::{
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse,
    ControllerUnpublishVolumeRequest,
};
use crate::node::context;

/// Longest id of a node in the interface.
const MAX_NODE_ID: usize = 256;
/// Longest NQN.
const MAX_NQN: usize = 223;
/// Tries to change a publication that others change, too.
const ATTEMPTS: usize = 5;
/// Longest wait for the end of a host's connections.
const CUT_OFF: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(100);

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
        if !is_nqn(host) {
            let text = format!("there is no node \"{host}\": the id of a node is its host's NQN");
            return Err(Status::not_found(text));
        }
        let publication = self.allow(&volume, host, capability.is_shared())?;
        if publication.portals.is_empty() {
            return Err(Status::unavailable(format!(
                "volume {} has no address that hosts can reach: give the daemon a listener \
                 ([nvmf] listen)",
                volume.name
            )));
        }
        Ok(ControllerPublishVolumeResponse {
            publish_context: context::write(&publication.nqn, volume.id, &publication.portals),
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
        let Some(volume) = self.daemon.volume(id)? else {
            return Ok(Nothing {});
        };
        for _ in 0..ATTEMPTS {
            let volume = self.existing(Some(id), &asked.volume_id)?;
            let Some(before) = self.daemon.publication(&volume)? else {
                return Ok(Nothing {});
            };
            let left: Vec<String> = match host {
                None => Vec::new(),
                Some(host) => {
                    let others = before.hosts.iter().filter(|one| *one != host);
                    others.cloned().collect()
                }
            };
            let gone: Vec<&String> = before.hosts.iter().filter(|h| !left.contains(h)).collect();
            if gone.is_empty() {
                return Ok(Nothing {});
            }
            let began = Instant::now();
            // First the hosts lose the permission, which waits for their connections to end.
            self.daemon.publish(&volume, Some(&before), &left)?;
            self.until_cut_off(&volume, &gone, began)?;
            if left.is_empty() && !before.any_host {
                self.daemon.unpublish(&volume)?;
            }
        }
        Err(contended(&volume))
    }

    /// Waits until the hosts have no connection. In a cluster the other nodes learn of the change
    /// by etcd: a node that does not is fenced at the latest after two leases.
    fn until_cut_off(
        &self,
        volume: &Volume,
        hosts: &[&String],
        began: Instant,
    ) -> Result<(), Status> {
        let others = match self.daemon.place()? {
            Place::Alone { .. } => Duration::ZERO,
            Place::Cluster { lease, .. } => lease * 2,
        };
        loop {
            let mut connected = false;
            for host in hosts {
                connected |= self.daemon.is_connected(volume, host)?;
            }
            if !connected && began.elapsed() >= others {
                return Ok(());
            }
            if began.elapsed() > CUT_OFF.max(others * 2) {
                let text = format!(
                    "volume {}: a host is still connected {} s after it lost its permission",
                    volume.name,
                    began.elapsed().as_secs()
                );
                return Err(Status::deadline_exceeded(text));
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// True if the host may use the volume already. Refuses a second host of a volume for one.
fn refuse_others(
    volume: &Volume,
    found: &Publication,
    host: &str,
    is_shared: bool,
) -> Result<bool, Status> {
    if found.any_host {
        let text = format!(
            "volume {} is published to any host, so that no host can be cut off: unpublish it",
            volume.name
        );
        return Err(Status::failed_precondition(text));
    }
    let others: Vec<String> = found.hosts.iter().filter(|h| *h != host).cloned().collect();
    if !is_shared && !others.is_empty() {
        let text = format!("volume {} is published to {}", volume.name, listed(&others));
        return Err(Status::failed_precondition(text));
    }
    Ok(others.len() < found.hosts.len())
}

fn is_nqn(text: &str) -> bool {
    text.starts_with("nqn.") && text.len() <= MAX_NQN && text.chars().all(|c| c.is_ascii_graphic())
}

fn contended(volume: &Volume) -> Status {
    Status::aborted(format!(
        "volume {}: another program changes its publication at the same time; try again",
        volume.name
    ))
}
