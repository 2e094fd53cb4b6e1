//! Sets up a simulation run from its seed: the disks, the volume on them and the first holder.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use nacre_bdev::Limits;
use nacre_bdev_replica::handle::NewVolume;
use nacre_bdev_replica::model::{ReadPolicy, Settings};
use nacre_bdev_replica::store::{Call, MemoryStore, Plan};
use nacre_random::Random;
use nacre_reactor::VirtualClock;
use parking_lot::Mutex;
use uuid::Uuid;

use crate::agenda::Agenda;
use crate::checker::Checker;
use crate::disk::{SimDisk, Traits};
use crate::faults::{Faults, Profile, StoreFaults};
use crate::holder::Holder;
use crate::holds::Holds;
use crate::leases::{Leases, has_leases, node_of};
use crate::load::{Hosts, HotRanges, Numbers};
use crate::media::Format;
use crate::report::{Options, Report};
use crate::world::World;

/// Time before the first disk is truncated.
const CALM: Duration = Duration::from_millis(50);

impl World {
    pub(crate) fn new(seed: u64, options: Options) -> Self {
        let mut random = Random::new(seed);
        let clock = VirtualClock::new();
        let block = *random.pick(&[512, 4096, 4096]);
        let format = Format { block };
        let region = format.region();
        let regions = random.within(1, 4);
        // Not always whole regions, and often with room to grow.
        let cut = *random.pick(&[0, 0, 1, 48]);
        let room = cut + region * *random.pick(&[0, 1, 1, 2]);
        let blocks = regions * region - cut;
        let count = *random.pick(&[1, 2, 2, 2, 3, 3, 3, 4]);
        let at_once = seed.is_multiple_of(3);
        let disks: Vec<Arc<SimDisk>> = (0..count + 1)
            .map(|index| {
                let mut traits = traits(&mut random);
                traits.limits.is_sync = at_once;
                let size = format.reserved() + blocks + room;
                SimDisk::new(format!("disk{index}"), format, size, traits, random.fork())
            })
            .collect();
        let profile = if has_leases(seed) {
            Profile::of_leases(&mut random)
        } else {
            Profile::new(&mut random)
        };
        for disk in &disks {
            let mut disk = disk.inner.lock();
            disk.fault_rates.latency = profile.latency;
            disk.watched = options.block.map(|block| format.reserved() + block);
        }
        let mut checker = Checker::new(blocks + room);
        for (index, disk) in disks.iter().enumerate() {
            // Old data beyond the volume, which it will later grow over.
            for block in (blocks..blocks + room).filter(|_| !random.one_in(4)) {
                let tag = 1 << 60 | (index as u64) << 40 | block;
                let cell = format.cells(format.reserved() + block).start;
                disk.inner.lock().media.write(cell, tag, true);
                checker.was_there(block, tag);
            }
        }
        let store_faults = Arc::new(Mutex::new(StoreFaults::new(random.fork())));
        let store = MemoryStore::new();
        let queues = Arc::new(AtomicU64::new(1));
        let node = if has_leases(seed) {
            node_of(1)
        } else {
            Uuid::from_u128(0xa0)
        };
        // Options of only some runs draw from a generator of their own, so that older seeds give
        // the same runs as before.
        let slow = seed % 4 == 2;
        let mut settings = settings(&mut random, count);
        if slow {
            settings.resync_bytes_per_s = 1 << 20;
        }
        let leases = has_leases(seed).then(|| Leases::new(seed, &clock));
        if leases.is_some() {
            // Longer than the patience with a disk whose node has no lease.
            settings.deadline_ms *= *Random::new(!seed).pick(&[1, 8]);
            for (index, disk) in disks.iter().enumerate() {
                disk.add_gate(Random::new(seed.rotate_left(56) ^ index as u64));
            }
        }
        let book = leases.as_ref().map(|leases| Arc::clone(&leases.book));
        let mut holder = Holder::new(1, node, &clock, &store, &disks, &queues, book.as_ref());
        store_faults.lock().book = book;
        let id = holder.create(NewVolume {
            name: "volume".to_owned(),
            id: Some(Uuid::from_u128(0x1234_5678)),
            bytes: Some(blocks * block as u64),
            devices: disks[..count].iter().map(|d| d.name.clone()).collect(),
            settings,
            // Checking that new disks are empty would be most of a short run's work.
            force: true,
            copied_from: None,
        });
        let id = id.expect("a volume on new disks");
        // Leases and their ends take longer than most runs.
        let (pace, ranges) = if leases.is_some() { (4, 1) } else { (1, 5) };
        holder.open(id);
        let record = store.records().remove(0);
        let planned = Arc::clone(&store_faults);
        let plan = move |call: &Call| -> Plan { planned.lock().plan(call) };
        store.plan(Some(Box::new(plan)));
        Self {
            hosts: Hosts {
                hot: HotRanges::new(&mut random, ranges, blocks + room, region),
                pace: if slow { 8 } else { pace },
                aborts: seed.is_multiple_of(3).then(|| Random::new(!seed)),
                leaves: (seed % 5 == 1).then(|| Random::new(seed.rotate_left(32))),
                next_io: clock.now(),
                burst: 0,
            },
            faults: Faults {
                profile,
                next: clock.now(),
                buffers_only: seed % 4 != 3,
                cuts: (seed % 5 == 3).then(|| Random::new(seed.rotate_left(16))),
                next_cut: clock.now() + CALM,
                holds: Holds::new(seed, &clock),
            },
            checker,
            most_blocks: blocks + room,
            options,
            format,
            random,
            clock,
            carried_out: store.carried_out(),
            store,
            store_faults,
            disks,
            queues,
            holders: vec![holder],
            lives: 1,
            id,
            numbers: Numbers::default(),
            agenda: Agenda::default(),
            leases,
            lively: true,
            record,
            report: Report::default(),
            log: VecDeque::new(),
            hoard: Vec::new(),
        }
    }
}

fn traits(random: &mut Random) -> Traits {
    let cached = random.percent(80);
    Traits {
        limits: Limits {
            max_blocks: *random.pick(&[32, 128, u32::MAX]),
            max_unmap_blocks: *random.pick(&[64, u64::MAX]),
            volatile_cache: cached,
            unmap_zeroes: random.one_in(2),
            ..Limits::unlimited(*random.pick(&[8, 32, 128]))
        },
        native_fua: random.one_in(2),
        unmaps: random.percent(70),
        writes_zeroes: random.percent(70),
        local: random.one_in(2),
    }
}

fn settings(random: &mut Random, count: usize) -> Settings {
    Settings {
        read_policy: *random.pick(&[
            ReadPolicy::LocalFirst,
            ReadPolicy::LeastOutstanding,
            ReadPolicy::RoundRobin,
        ]),
        min_in_sync: if count > 1 && random.one_in(8) { 2 } else { 1 },
        deadline_ms: random.within(100, 500),
        frozen_hold_ms: random.within(100, 3000),
        read_errors: random.within(2, 16) as u32,
        resync_bytes_per_s: if random.one_in(4) { 16 << 20 } else { 0 },
        settle_ms: random.within(5, 50),
        ..Settings::default()
    }
}
