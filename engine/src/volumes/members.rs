//! Where volumes get their members' devices: from the registry of bdevs, for themselves alone.

use std::sync::Arc;

use nacre_bdev::registry::{Holder, Registry, RegistryError, Usage};
use nacre_bdev::{Bdev, Layer};
use nacre_bdev_replica::handle::{Devices, MemberDevice, NoDevice};

/// `product_name` of remote namespaces, as SPDK has it.
pub const REMOTE_PRODUCT: &str = "NVMe disk";

pub struct Members(pub Registry);

impl Devices for Members {
    fn claim(&self, name: &str, volume: &str) -> Result<MemberDevice, NoDevice> {
        // Not as a device stacked on it: a member that goes does not take the volume along.
        let holder = Holder::User(holder(volume));
        let claim = self.0.claim(name, holder, Usage::Exclusive);
        let claim = claim.map_err(|error| NoDevice {
            name: name.to_owned(),
            why: match error {
                RegistryError::NotFound { .. } => "there is no such bdev".into(),
                error => error.to_string(),
            },
        })?;
        let layer = Arc::clone(claim.layer());
        Ok(MemberDevice {
            local: is_local(&self.0, &layer),
            layer,
            claim: Box::new(claim),
        })
    }
}

/// Who has a member's device, in words.
pub fn holder(volume: &str) -> String {
    format!("replica of volume \"{volume}\"")
}

/// Whether everything below the device is in this machine.
pub fn is_local(registry: &Registry, layer: &Layer) -> bool {
    let below = layer.module().bases();
    let below = below.iter().filter_map(|name| registry.lookup(name));
    layer.product_name() != REMOTE_PRODUCT && below.into_iter().all(|l| is_local(registry, &l))
}
