//! The pools as `nacre doctor` checks them.

use super::{IMPORT, state_word};
use crate::doctor::pools::{Closed, Pool, Pools};
use crate::journal::EntryState;
use crate::services::Engine;

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
