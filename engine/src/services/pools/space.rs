//! The space of open pools: events about it, and the bytes that their volumes use.

use std::rc::Rc;

use nacre_bdev::Bdev;
use nacre_bdev_pool::{Lvol, LvolInfo};

use super::{OpenPool, interruption, removal};
use crate::services::Engine;
use crate::services::device_records;

/// Reports when the use of a pool passes a threshold, when writes begin to wait for space, and when
/// the removal of a disk ends. Opens the pool again when a disk may have lost writes.
pub(super) fn watch(engine: &Rc<Engine>, pool: &Rc<OpenPool>) {
    let news = pool.handle.news();
    let (engine, pool) = (Rc::downgrade(engine), Rc::downgrade(pool));
    tokio::task::spawn_local(async move {
        let (mut percent, mut waits) = (0, false);
        loop {
            news.notified().await;
            // Between two notices the task keeps neither the engine nor the pool.
            let (Some(engine), Some(pool)) = (engine.upgrade(), pool.upgrade()) else {
                return;
            };
            if pool.is_closed() {
                return;
            }
            if interruption::look(&engine, &pool) {
                return;
            }
            removal::report_departed(&engine, &pool).await;
            let status = pool.handle.status();
            let (now, name) = (status.full_percent, status.name);
            let facts = serde_json::json!({ "id": status.id, "percent": now });
            if now != percent {
                let (kind, text) = if now > percent {
                    let text = format!("pool \"{name}\" uses {now} % of its space");
                    ("pool_space_low", text)
                } else {
                    let text = format!("pool \"{name}\" uses less than {percent} % of its space");
                    ("pool_space_back", text)
                };
                engine.notes.report(kind, name.clone(), text, facts.clone());
            }
            if status.waiting_writes > 0 && !waits {
                let text = format!(
                    "pool \"{name}\" is full: writes wait for space, and fail once it is full for 20 s"
                );
                let about = (name, String::new());
                engine
                    .notes
                    .report_repeating("pool_full", about, text, facts);
            }
            (percent, waits) = (now, status.waiting_writes > 0);
        }
    });
}

/// Counts the space that each lvol uses, and gives it to the bdevs. Takes long in a large pool.
pub(super) async fn count(engine: Rc<Engine>, pool: Rc<OpenPool>) {
    // A pool that closes has no devices any more.
    if let Ok(lvols) = pool.lvols().await {
        take_counts(&engine, &lvols);
    }
}

/// Counts the used space of a bdev again, if it is an lvol.
pub async fn recount(engine: &Engine, device: &str) {
    let Some(lvol) = device_records::find::<Lvol>(engine, device) else {
        return;
    };
    // A device that goes meanwhile keeps its last count.
    if let Ok(pool) = engine.devices.pools.of(lvol.pool())
        && let Ok(counted) = pool.lvol(lvol.uuid()).await
    {
        take_counts(engine, &[counted]);
    }
}

/// Gives the used space to the bdevs, which report it.
pub fn take_counts(engine: &Engine, lvols: &[LvolInfo]) {
    for counted in lvols {
        if let Some(lvol) = device_records::find::<Lvol>(engine, &counted.id.to_string()) {
            lvol.update(LvolInfo {
                used_bytes: counted.used_bytes,
                exclusive_bytes: counted.exclusive_bytes,
                ..lvol.info()
            });
        }
    }
}
