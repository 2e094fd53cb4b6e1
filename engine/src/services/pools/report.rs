//! The pools, as input of `nacre doctor`, and reports of devices that lvols lose or get back.

use nacre_bdev_pool::DiskStatus;
use tracing::{info, warn};
use uuid::Uuid;

use super::{IMPORT, OpenPool, state_word};
use crate::doctor::pools::{Closed, Disk, Leaving, Pool, Pools};
use crate::journal::EntryState;
use crate::services::Engine;

fn disk(status: DiskStatus) -> Disk {
    Disk {
        name: status.name,
        leaving: status.leaving.map(|leaving| Leaving {
            percent: leaving.percent(),
        }),
    }
}

pub fn for_doctor(engine: &Engine) -> Pools {
    let open = engine.devices.pools.list().into_iter().map(|pool| {
        let status = pool.handle.status();
        Pool {
            name: status.name,
            state: state_word(status.state).to_owned(),
            total_bytes: status.total_bytes,
            free_bytes: status.free_bytes,
            reserved_bytes: status.reserved_bytes,
            lost_pages: pool.report.lost,
            waiting_writes: status.waiting_writes,
            disks: status.disks.into_iter().map(disk).collect(),
        }
    });
    let imports = engine
        .journal
        .select(|entry| entry.record.method == IMPORT)
        .into_iter();
    let closed = imports.filter_map(|entry| match entry.state {
        EntryState::Failed { error, .. } => Some(Closed {
            disk: entry.record.params["disk"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            reason: error.to_string(),
        }),
        EntryState::Live | EntryState::Waiting => None,
    });
    Pools {
        open: open.collect(),
        closed: closed.collect(),
    }
}

/// Reports that lvols lose a bdev.
pub(super) fn report_lost(engine: &Engine, pool: &OpenPool, bdev: &str, device: Uuid, why: &str) {
    let pool_name = pool.name();
    warn!(
        pool = pool_name,
        bdev, why, "lvols lack a device that they show"
    );
    let text = format!("pool \"{pool_name}\": {bdev}, which lvols show, {why}");
    let facts = serde_json::json!({
        "id": pool.handle.id(), "bdev": bdev, "device": device,
    });
    let notes = &engine.notes;
    notes.report("pool_device_lost", pool_name, text, facts);
}

/// Reports that lvols have a bdev again.
pub(super) fn report_back(engine: &Engine, pool: &OpenPool, device: Uuid) {
    let pool_name = pool.name();
    info!(pool = pool_name, %device, "lvols show a device again");
    let text = format!("pool \"{pool_name}\": lvols show device {device} again");
    let facts = serde_json::json!({ "id": pool.handle.id(), "device": device });
    let notes = &engine.notes;
    notes.report("pool_device_back", pool_name, text, facts);
}
