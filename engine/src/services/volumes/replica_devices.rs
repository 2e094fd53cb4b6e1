//! The bdevs of replicas: found in the registry, and claimed exclusively.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::registry::{Holder, Listed, Registry, RegistryError, Usage};
use nacre_bdev::{Bdev, Layer};
use nacre_bdev_replica::handle::{Devices, NoDevice, ReplicaDevice, ReplicaStatus};

use crate::plane::Plane;
use crate::services::Engine;
use crate::services::volumes::AbsentDevices;

/// `product_name` of the bdevs of remote namespaces, as in SPDK.
pub const REMOTE_PRODUCT: &str = "NVMe disk";

const REPLICA_OF: &str = "replica of volume";

pub(super) struct VolumeDevices {
    registry: Registry,
    /// `None`: the daemon is not in a cluster.
    absent: Option<Arc<dyn AbsentDevices>>,
}

impl VolumeDevices {
    pub(super) fn of(engine: &Engine, plane: &Plane) -> Self {
        Self {
            registry: plane.bdevs.clone(),
            absent: engine.volumes.absent_devices(),
        }
    }
}

impl Devices for VolumeDevices {
    fn claim(&self, name: &str, volume: &str) -> Result<ReplicaDevice, NoDevice> {
        // A user claim instead of a stacked device: removing a replica's device must not remove the
        // volume.
        let holder = Holder::User(holder(volume));
        let claim = self.registry.claim(name, holder, Usage::Exclusive);
        let claim = claim.map_err(|error| NoDevice {
            name: name.to_owned(),
            why: match error {
                RegistryError::NotFound { .. } => "there is no such bdev".into(),
                error => error.to_string(),
            },
        })?;
        let layer = Arc::clone(claim.layer());
        Ok(ReplicaDevice {
            local: is_local(&self.registry, &layer),
            layer,
            claim: Box::new(claim),
        })
    }

    fn is_awaited(&self, name: &str) -> bool {
        self.absent
            .as_ref()
            .is_none_or(|absent| !absent.is_absent(name))
    }

    fn patience(&self, name: &str) -> Option<Duration> {
        self.absent.as_ref()?.patience(name)
    }
}

/// The text for the holder of a replica's claim.
pub(super) fn holder(volume: &str) -> String {
    format!("{REPLICA_OF} \"{volume}\"")
}

/// True if a volume still has its claim on the bdev of the replica. The registry ends the claim
/// first, and the volume's state follows.
pub fn is_claimed(registry: &Registry, replica: &ReplicaStatus) -> bool {
    // The volume may have had another name when it claimed the device.
    let is_volume = |user: &Holder| matches!(user, Holder::User(of) if of.starts_with(REPLICA_OF));
    let device = registry.get(&replica.device);
    let is_used = |device: Listed| device.claims.iter().any(|(user, _)| is_volume(user));
    replica.attached && device.is_ok_and(is_used)
}

/// True if the bdev and all bdevs below it are local.
pub fn is_local(registry: &Registry, layer: &Layer) -> bool {
    let below = layer.module().bases();
    let below = below.iter().filter_map(|name| registry.lookup(name));
    layer.product_name() != REMOTE_PRODUCT && below.into_iter().all(|l| is_local(registry, &l))
}
