//! A volume or snapshot as a block device.

use std::sync::Arc;

use nacre_bdev::listing::{ListAnswer, ListQuery};
use nacre_bdev::{Bdev, Geometry, Limits, Op, OpenError, Queue, Support};
use nacre_hugepages::Pool;
use parking_lot::Mutex;
use serde_json::json;
use uuid::Uuid;

use crate::BLOCK;
use crate::lane::{Lane, LaneSpec};
use crate::listing::Listing;
use crate::map::LvolMap;
use crate::model::LvolInfo;
use crate::port::Shared;

/// Most I/Os of a queue.
const DEPTH: u32 = 256;
/// Blocks of the largest read or write: a few units.
const MAX_BLOCKS: u32 = 256;
/// Blocks of the largest unmap: a few leaves.
const MAX_UNMAP_BLOCKS: u64 = 65_536;

pub struct Lvol {
    /// The UUID as text: names of volumes change.
    device: String,
    pub(crate) shared: Arc<Shared>,
    pub(crate) map: Arc<LvolMap>,
    info: Mutex<LvolInfo>,
}

impl Lvol {
    pub(crate) fn new(shared: Arc<Shared>, info: LvolInfo, map: Arc<LvolMap>) -> Self {
        Self {
            device: info.id.to_string(),
            shared,
            map,
            info: Mutex::new(info),
        }
    }

    /// The volume as it was when [`Lvol::update`] was last called.
    pub fn info(&self) -> LvolInfo {
        self.info.lock().clone()
    }

    /// Takes over a changed name, parent, size or use.
    pub fn update(&self, info: LvolInfo) {
        *self.info.lock() = info;
    }

    /// Id of the pool.
    pub fn pool(&self) -> Uuid {
        self.shared.status.lock().id
    }

    pub fn pool_name(&self) -> String {
        self.shared.status.lock().name.clone()
    }

    /// The names of the pool's devices. They are not bases of the volume: limits and paths of a
    /// disk are not those of each volume on it.
    pub fn disks(&self) -> Vec<String> {
        self.shared.bases()
    }

    pub(crate) fn unit_blocks(&self) -> u64 {
        let geometry = self.shared.geometry.get();
        geometry.map_or(16, |geometry| u64::from(geometry.granules_per_unit))
    }
}

impl Bdev for Lvol {
    fn name(&self) -> &str {
        &self.device
    }

    fn product_name(&self) -> &'static str {
        "Logical Volume"
    }

    fn uuid(&self) -> Uuid {
        self.info.lock().id
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: BLOCK,
            blocks: self.map.units() * self.unit_blocks(),
            physical_block_size: BLOCK,
        }
    }

    fn limits(&self) -> Limits {
        let unit = self.unit_blocks() as u32;
        Limits {
            max_blocks: MAX_BLOCKS,
            max_unmap_blocks: MAX_UNMAP_BLOCKS,
            unmap_granularity_blocks: unit,
            // The first write to a unit allocates it, and a write of all of it needs no second one.
            optimal_write_blocks: unit,
            volatile_cache: self.shared.has_cache(),
            unmap_zeroes: true,
            zeroes_deallocate: true,
            read_only: self.map.is_read_only(),
            ..Limits::unlimited(DEPTH)
        }
    }

    fn supports(&self, op: Op) -> Support {
        match op {
            Op::Read | Op::Write | Op::Unmap | Op::WriteZeroes => Support::Native,
            Op::Flush if self.shared.has_cache() => Support::Native,
            _ => Support::No,
        }
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        let spec = LaneSpec {
            device: &self.device,
            shared: Arc::clone(&self.shared),
            map: Arc::clone(&self.map),
            depth: DEPTH as usize,
        };
        Ok(Box::new(Lane::open(spec, pool)?))
    }

    fn allocated_blocks(&self) -> Option<u64> {
        Some(self.map.mapped()? * self.unit_blocks())
    }

    fn list_allocated(&self, query: ListQuery, answer: ListAnswer) {
        if self.map.mapped().is_none() {
            return answer.give_all(&query);
        }
        let lvol = (Arc::clone(&self.shared), self.uuid());
        Listing::start(lvol, self.unit_blocks(), query, answer);
    }

    fn losses(&self) -> u64 {
        self.shared.losses()
    }

    fn driver_specific(&self) -> serde_json::Value {
        let info = self.info.lock();
        let status = self.shared.status.lock();
        let unit = status.unit_bytes.max(1);
        let mut fields = json!({"lvol": {
            "lvol_store_uuid": status.id,
            "base_bdev": status.disk,
            "thin_provision": !info.is_thick,
            "num_allocated_clusters": info.used_bytes / unit,
            "snapshot": info.is_snapshot,
            "clone": info.parent.is_some(),
            "esnap_clone": info.external_parent.is_some(),
        }});
        // As SPDK, which has the name for clones of devices only.
        if let Some(external) = &info.external_parent {
            fields["lvol"]["external_snapshot_name"] = json!(external.id);
        }
        fields
    }
}
