//! Metrics of storage pools: state and space.

use nacre_bdev_pool::PoolState;

use super::reactors::family;
use super::{Desc, MetricKind, MetricsSource, Moment, Scrape};
use crate::services::pools::state_word;

family!(
    STATE,
    "nacre_pool_state",
    Gauge,
    "1 for the state that the pool is in, 0 for the others.",
    ["pool", "state"]
);
family!(
    BYTES,
    "nacre_pool_bytes",
    Gauge,
    "Size of the pool.",
    ["pool"]
);
family!(
    FREE,
    "nacre_pool_free_bytes",
    Gauge,
    "Free bytes of the pool.",
    ["pool"]
);
family!(
    RESERVED,
    "nacre_pool_reserved_bytes",
    Gauge,
    "Free bytes that metadata and thick volumes keep.",
    ["pool"]
);
family!(
    LVOLS,
    "nacre_pool_lvols",
    Gauge,
    "Volumes and snapshots of the pool.",
    ["pool"]
);
family!(
    UNSETTLED,
    "nacre_pool_unsettled_records",
    Gauge,
    "Log records that an import would compare with the data.",
    ["pool"]
);
family!(
    WAITING,
    "nacre_pool_waiting_writes",
    Gauge,
    "Writes that wait for space in the full pool.",
    ["pool"]
);

family!(
    DISK_BYTES,
    "nacre_pool_disk_bytes",
    Gauge,
    "Space of the pool on one of its disks.",
    ["pool", "disk"]
);
family!(
    DISK_FREE,
    "nacre_pool_disk_free_bytes",
    Gauge,
    "Free bytes of the pool on the disk.",
    ["pool", "disk"]
);

family!(
    DISK_LEAVING,
    "nacre_pool_disk_leaving_bytes",
    Gauge,
    "Bytes in use on a disk that is leaving the pool.",
    ["pool", "disk"]
);

#[derive(Debug)]
pub struct PoolMetrics;

impl MetricsSource for PoolMetrics {
    fn describe(&self) -> &'static [&'static Desc] {
        static ALL: [&Desc; 10] = [
            &STATE,
            &BYTES,
            &FREE,
            &RESERVED,
            &LVOLS,
            &UNSETTLED,
            &WAITING,
            &DISK_BYTES,
            &DISK_FREE,
            &DISK_LEAVING,
        ];
        &ALL
    }

    fn collect(&self, of: &Moment, into: &mut Scrape) {
        for pool in of.engine.devices.pools.list() {
            let status = pool.handle.status();
            let name = status.name.as_str();
            for state in [PoolState::Online, PoolState::Held] {
                let is_in = status.state == state;
                into.value(&STATE, &[name, state_word(state)], is_in);
            }
            into.value(&BYTES, &[name], status.total_bytes);
            into.value(&FREE, &[name], status.free_bytes);
            into.value(&RESERVED, &[name], status.reserved_bytes);
            into.value(&LVOLS, &[name], status.versions);
            into.value(&UNSETTLED, &[name], status.unsettled_records);
            into.value(&WAITING, &[name], status.waiting_writes);
            for disk in &status.disks {
                let labels = [name, disk.name.as_str()];
                into.value(&DISK_BYTES, &labels, disk.total_bytes);
                into.value(&DISK_FREE, &labels, disk.free_bytes);
                if let Some(leaving) = disk.leaving {
                    into.value(&DISK_LEAVING, &labels, leaving.left_bytes);
                }
            }
        }
    }
}
