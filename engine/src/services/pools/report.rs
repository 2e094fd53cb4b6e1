//! The pools, as input of `nacre doctor`.

use nacre_bdev_pool::DiskStatus;

use super::{IMPORT, state_word};
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
