//! Devices of pools that lost blocks, for example because another program truncated a file.
//!
//! ```text
//!   external parent of lvols ──▶ given back, as if it was removed: the lvols are degraded
//!   disk of a pool           ──▶ reported; I/O in the lost blocks fails, the rest goes on
//! ```
//!
//! Blocks that come back later have other data. So lvols do not get that device again, only one
//! that is made anew.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use nacre_bdev::{Bdev, Layer};
use tracing::error;
use uuid::Uuid;

use super::report::report_lost;
use crate::services::Engine;

/// The remedy for a device in [`CutDevices`].
pub(super) const REMEDY: &str = "restore its data, then delete the bdev and make it again";

/// External parents that lost blocks under a claim of a pool.
#[derive(Debug, Default)]
pub(super) struct CutDevices(RefCell<Vec<Weak<Layer>>>);

impl CutDevices {
    fn add(&self, device: &Arc<Layer>) {
        let mut known = self.0.borrow_mut();
        known.retain(|known| known.strong_count() > 0);
        if !known.iter().any(|known| is_same(known, device)) {
            known.push(Arc::downgrade(device));
        }
    }

    pub(super) fn has(&self, device: &Arc<Layer>) -> bool {
        self.0.borrow().iter().any(|known| is_same(known, device))
    }
}

fn is_same(known: &Weak<Layer>, device: &Arc<Layer>) -> bool {
    std::ptr::eq(known.as_ptr(), Arc::as_ptr(device))
}

/// A bdev has fewer blocks than before.
pub fn device_cut(engine: &Rc<Engine>, name: &str) {
    let Ok(plane) = engine.plane() else { return };
    let Some(device) = plane.bdevs.lookup(name) else {
        return;
    };
    let (announced, id) = (device.geometry(), device.uuid());
    let blocks = device.present_blocks().min(announced.blocks);
    let left_bytes = blocks * u64::from(announced.block_size);
    for pool in engine.devices.pools.list() {
        let status = pool.handle.status();
        if left_bytes < announced.bytes() && pool.handle.bases().iter().any(|base| base == name) {
            let text = format!(
                "pool \"{}\": its disk {name} has only {left_bytes} of {} bytes left",
                status.name,
                announced.bytes()
            );
            error!("{text}: data behind its end is lost");
            let facts = serde_json::json!({
                "id": status.id, "disk": name, "left_bytes": left_bytes,
            });
            engine
                .notes
                .report("pool_disk_cut", status.name.clone(), text, facts);
        }
        if !status.external_claims.contains(&id) {
            continue;
        }
        let shown = status.externals.iter().filter(|of| of.parent.id == id);
        // A command is about to use all of it.
        let needed = shown.map(|of| of.bytes).max();
        if left_bytes >= needed.unwrap_or_else(|| announced.bytes()) {
            continue;
        }
        engine.devices.pools.cut.add(&device);
        let why = format!("has only {left_bytes} bytes left");
        report_lost(engine, &pool, name, id, &why);
        let (pool, id): (_, Uuid) = (Rc::clone(&pool), id);
        tokio::task::spawn_local(async move {
            // A pool that closes has no claim.
            let _ = pool.handle.detach(id).await;
        });
    }
}
