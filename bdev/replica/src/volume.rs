//! [`Volume`]: a replicated volume as a [`Bdev`], for the registry and the layer.
//!
//! **Idle queues.** A lane adopts a new view, and closes its queues to removed replicas, when it is
//! polled. A remote replica's queue also moves to another connection only when it is polled. A
//! caller that polls only queues with I/O in flight must check [`Queue::is_settled`] too. The
//! target's groups do so in their upkeep, that is every 100 ms, before they sleep (the lane's bell
//! wakes a sleeping core), and at once when they are called (`Target::wake_groups`). So the control
//! only publishes a view, and waits until every lane has adopted it.

use std::sync::Arc;

use nacre_bdev::listing::{ListAnswer, ListQuery};
use nacre_bdev::{Bdev, Geometry, Layer, Limits, Op, OpenError, Queue, Support};
use nacre_hugepages::Pool;
use uuid::Uuid;

use crate::lane::{DEPTH, Lane};
use crate::model::{RESERVED, VolumeRecord};
use crate::shared::Shared;
use crate::view::{Mode, Role};

/// Most bytes of a read or write: the layer above splits larger ones.
const MAX_BYTES: u32 = 1 << 20;
/// Most bytes of one unmap or zeroing. It bounds the regions and stripes that one request holds.
const MAX_UNMAP_BYTES: u64 = 16 << 20;

pub struct Volume {
    name: String,
    uuid: Uuid,
    block_size: u32,
    limits: Limits,
    shared: Arc<Shared>,
}

impl Volume {
    /// `limits`: of the weakest replica, from [`weakest`].
    pub fn new(record: &VolumeRecord, shared: Arc<Shared>, limits: Limits) -> Arc<Self> {
        let block = record.block_size.max(1);
        let limits = Limits {
            max_blocks: limits.max_blocks.clamp(1, (MAX_BYTES / block).max(1)),
            max_unmap_blocks: limits
                .max_unmap_blocks
                .clamp(1, (MAX_UNMAP_BYTES / u64::from(block)).max(1)),
            queue_depth: DEPTH as u32,
            unmap_zeroes: true,
            immediate: false,
            ..limits
        };
        Arc::new(Self {
            name: record.name.clone(),
            uuid: record.id,
            block_size: record.block_size,
            limits,
            shared,
        })
    }

    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub fn blocks(&self) -> u64 {
        self.shared.blocks()
    }
}

impl Bdev for Volume {
    fn name(&self) -> &str {
        &self.name
    }

    fn product_name(&self) -> &'static str {
        "Replicated volume"
    }

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: self.block_size,
            blocks: self.blocks(),
            physical_block_size: self.block_size,
        }
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn supports(&self, op: Op) -> Support {
        match op {
            Op::Read | Op::Write | Op::Flush | Op::Unmap | Op::WriteZeroes => Support::Native,
            // The layer above splits these into reads and writes: a comparison is then made once,
            // and not by each replica for itself. A verify that meets a bad block is then a read
            // that does, which uses another replica and repairs the block.
            Op::Compare | Op::CompareAndWrite | Op::Copy | Op::Verify => Support::No,
        }
    }

    /// True: the layers above the replicas' devices execute or emulate FUA.
    fn native_fua(&self) -> bool {
        true
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        let what = |source| OpenError {
            bdev: self.name.clone(),
            what: "open a queue of the volume".to_owned(),
            source,
        };
        let lane = Lane::new(Arc::clone(&self.shared), self.block_size, pool).map_err(what)?;
        Ok(Box::new(lane))
    }

    /// The most of the in-sync replicas' numbers, if all of them have one. Blocks of a replica
    /// that only it takes, for its label and log, count up to the size of the volume.
    fn allocated_blocks(&self) -> Option<u64> {
        let view = self.shared.view();
        let replicas = view.in_sync().map(|(_, replica)| &*replica.device);
        let most = replicas.map(|device| allocated_bytes(device));
        let most = most.reduce(|a, b| Some(a?.max(b?)))??;
        Some(most.div_ceil(self.block_size.into()).min(self.blocks()))
    }

    /// Asks an in-sync replica: blocks that have no data there read as zeroes on all of them.
    fn list_allocated(&self, query: ListQuery, answer: ListAnswer) {
        let view = self.shared.view();
        let replica = view.in_sync().next().map(|(_, replica)| &replica.device);
        let fits = |device: &&Arc<Layer>| device.geometry().block_size == self.block_size;
        let Some(device) = replica
            .filter(fits)
            .filter(|_| self.allocated_blocks().is_some())
        else {
            return answer.give_all(&query);
        };
        let first = RESERVED / u64::from(self.block_size);
        let range = query.range.start + first..query.range.end + first;
        device.list_allocated(ListQuery { range, ..query }, answer.at_offset(first));
    }

    /// The replicas that take part now.
    fn bases(&self) -> Vec<String> {
        let view = self.shared.view();
        let replicas = view.replicas.iter().flatten();
        replicas.map(|m| m.device.name().to_owned()).collect()
    }

    fn driver_specific(&self) -> serde_json::Value {
        let view = self.shared.view();
        let replicas = view.replicas.iter().enumerate().filter_map(|(slot, m)| {
            let replica = m.as_ref()?;
            Some(serde_json::json!({
                "slot": slot,
                "device": replica.device.name(),
                "state": match replica.role {
                    Role::InSync => "in_sync",
                    Role::Syncing => "syncing",
                },
                "local": replica.local,
                "regions_needed": self.shared.missing[slot].count(),
                "in_flight": self.shared.outstanding(slot) > 0,
            }))
        });
        serde_json::json!({"volume": {
            "mode": match view.mode {
                Mode::Serving => "serving",
                Mode::Frozen => "frozen",
                Mode::Suspended => "suspended",
                Mode::FailIo => "fail_io",
                Mode::Closed => "closed",
            },
            "regions": self.shared.regions.len(),
            "regions_dirty": self.shared.regions.dirty_count(),
            "replicas": replicas.collect::<Vec<_>>(),
        }})
    }
}

fn allocated_bytes(device: &dyn Bdev) -> Option<u64> {
    let block = u64::from(device.geometry().block_size);
    device.allocated_blocks().map(|blocks| blocks * block)
}

/// The limits of a volume over these replicas: each is that of the weakest replica.
pub fn weakest<'a>(replicas: impl IntoIterator<Item = &'a Layer>) -> Limits {
    let mut weakest = Limits {
        atomic_blocks: u32::MAX,
        zero_copy_blocks: u32::MAX,
        unmap_zeroes: true,
        is_sync: true,
        ..Limits::unlimited(DEPTH as u32)
    };
    let mut any = false;
    for replica in replicas {
        any = true;
        let limits = replica.limits();
        weakest.atomic_blocks = weakest.atomic_blocks.min(limits.atomic_blocks.max(1));
        weakest.zero_copy_blocks = weakest.zero_copy_blocks.min(limits.zero_copy_blocks);
        weakest.volatile_cache |= limits.volatile_cache;
        weakest.read_only |= limits.read_only;
        weakest.is_sync &= limits.is_sync;
        let block = replica.geometry().block_size.max(1);
        weakest.max_blocks = weakest
            .max_blocks
            .min(limits.max_blocks)
            .min(MAX_BYTES / block);
        weakest.max_unmap_blocks = weakest
            .max_unmap_blocks
            .min(limits.max_unmap_blocks)
            .min(MAX_UNMAP_BYTES / u64::from(block));
    }
    if !any {
        (weakest.atomic_blocks, weakest.zero_copy_blocks) = (1, 0);
        weakest.is_sync = false;
    }
    // Unmapped blocks read as zeroes on every replica: where a device does not guarantee it, or
    // only for aligned ranges, zeroes are written. So there is no granularity either.
    weakest
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nacre_bdev::malloc;

    use super::*;
    use crate::lane::tests::rig::{BLOCK, BLOCKS, Script, record, replica};
    use crate::shared::ResizeError;
    use crate::view::View;

    fn over(scripts: Vec<Script>) -> Limits {
        let layers: Vec<_> = scripts
            .into_iter()
            .map(|script| Layer::new(Arc::new(script) as Arc<dyn Bdev>))
            .collect();
        weakest(layers.iter().map(|layer| &**layer))
    }

    #[test]
    fn limits_are_those_of_the_weakest() {
        let (mut a, mut b) = (Script::new("A"), Script::new("B"));
        (a.limits.atomic_blocks, b.limits.atomic_blocks) = (8, 16);
        (a.limits.zero_copy_blocks, b.limits.zero_copy_blocks) = (64, 32);
        b.limits.volatile_cache = true;
        b.limits.unmap_zeroes = false;
        a.limits.optimal_boundary_blocks = 100;
        a.limits.unmap_granularity_blocks = 8;
        let limits = over(vec![a, b]);
        // A range that crosses a boundary is not written in one piece.
        assert_eq!((limits.atomic_blocks, limits.volatile_cache), (1, true));
        assert!(limits.unmap_zeroes && !limits.immediate && !limits.read_only);
        // No view of memory crosses a boundary; unmaps that a replica cannot execute become zeroes.
        assert_eq!(
            (limits.zero_copy_blocks, limits.optimal_boundary_blocks),
            (0, 0)
        );
        assert_eq!(limits.unmap_granularity_blocks, 0);
        assert_eq!(limits.max_blocks, MAX_BYTES / BLOCK);
        assert_eq!(limits.max_unmap_blocks, MAX_UNMAP_BYTES / u64::from(BLOCK));
        let atomic = |all: &[u32]| {
            let scripts = all.iter().map(|atomic_blocks| {
                let mut script = Script::new("A");
                script.limits.atomic_blocks = *atomic_blocks;
                script
            });
            over(scripts.collect()).atomic_blocks
        };
        assert_eq!((atomic(&[8, 16]), atomic(&[16, 1])), (8, 1));
        let at_once = |all: &[bool]| {
            let scripts = all.iter().map(|at_once| {
                let mut script = Script::new("A");
                script.limits.is_sync = *at_once;
                script
            });
            over(scripts.collect()).is_sync
        };
        assert!(at_once(&[true, true]) && !at_once(&[true, false]) && !at_once(&[]));
        let mut protected = Script::new("A");
        protected.limits.read_only = true;
        assert!(over(vec![protected, Script::new("B")]).read_only);
        let none = over(Vec::new());
        assert_eq!((none.atomic_blocks, none.zero_copy_blocks), (1, 0));
    }

    /// Goal: a volume takes as much as the in-sync replica that takes most, at most its size, and
    /// knows nothing if one of them does not.
    #[test]
    fn allocated_blocks_are_the_most_of_in_sync_replicas() {
        let record = record(BLOCKS, 3);
        let volume = Volume::new(&record, Shared::new(&record), over(Vec::new()));
        let of = |replicas: &[(Option<u64>, Role)]| {
            let mut view = View::closed(&record.settings);
            for (slot, (allocated, role)) in replicas.iter().enumerate() {
                let mut script = Script::new("A");
                script.allocated = *allocated;
                let layer = Layer::new(Arc::new(script) as Arc<dyn Bdev>);
                view.replicas[slot] = Some(replica(&layer, *role));
            }
            volume.shared().publish(view);
            volume.allocated_blocks()
        };
        let (in_sync, syncing) = (Role::InSync, Role::Syncing);
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[(Some(0), in_sync)]), Some(0));
        let two = [(Some(7), in_sync), (Some(9), in_sync)];
        assert_eq!(of(&two), Some(9));
        assert_eq!(of(&[two[0], two[1], (None, in_sync)]), None);
        assert_eq!(of(&[two[0], two[1], (None, syncing)]), Some(9));
        assert_eq!(of(&[(Some(u64::MAX), in_sync)]), Some(BLOCKS));

        let list = || {
            let (sender, answers) = std::sync::mpsc::channel();
            let answer = ListAnswer::new(move |answer| sender.send(answer).unwrap());
            let range = 0..BLOCKS;
            volume.list_allocated(ListQuery { range, most: 1 }, answer);
            answers.recv().unwrap().unwrap().ranges.pop()
        };
        assert_eq!(list(), Some(3..4));
        of(&[(None, in_sync)]);
        assert_eq!(list(), Some(0..BLOCKS));
    }

    #[test]
    fn capabilities_of_a_volume() {
        let config = serde_json::json!({"name": "M", "block_size": BLOCK, "num_blocks": 4096});
        let config = serde_json::from_value(config).expect("complete");
        let layer = Layer::new(malloc::create(config).expect("good"));
        let record = record(BLOCKS, 1);
        let shared = Shared::new(&record);
        let volume = Volume::new(&record, shared, weakest([&*layer]));
        assert_eq!(volume.limits().zero_copy_blocks, MAX_BYTES / BLOCK);
        assert_eq!(volume.supports(Op::Copy), Support::No);
        assert_eq!((volume.name(), volume.blocks()), ("V", BLOCKS));
        assert_eq!(volume.driver_specific()["volume"]["mode"], "closed");
        assert_eq!(
            volume.shared().grow(BLOCKS - 1),
            Err(ResizeError::Shrinks {
                now: BLOCKS,
                requested: BLOCKS - 1
            })
        );
        let requested = 1 << 40;
        assert_eq!(
            volume.shared().grow(requested),
            Err(ResizeError::NoTables { requested })
        );
        assert_eq!(volume.shared().grow(BLOCKS), Ok(()));
    }
}
