//! Goal: in steady state the layer and the modules allocate no heap memory per I/O. Method: a
//! counting allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{
    Bdev, Done, Io, Layer, LayerQueue, Op, Queue, Registry, delay, malloc, null, passthru,
};
use nacre_bdev_replica::model::{Settings, VolumeRecord};
use nacre_bdev_replica::shared::Shared;
use nacre_bdev_replica::view::{Mode, ReplicaView, Role, View};
use nacre_bdev_replica::volume::{Volume, weakest};
use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_reactor::Nanos;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is the system allocator's; counting touches no memory that it manages.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise is passed on as it is.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const DEPTH: u64 = 64;

struct Load {
    queue: LayerQueue,
    bufs: Vec<Buf>,
    done: Done,
    now: Nanos,
    next: u64,
}

impl Load {
    fn new(device: Arc<dyn Bdev>, pool: &Pool) -> Self {
        let queue = Layer::new(device).open_queue(pool).expect("opens");
        let bufs = (0..DEPTH + 8)
            .map(|_| pool.acquire(4096).expect("enough"))
            .collect();
        Self {
            queue,
            bufs,
            done: Done::with_capacity(32),
            now: Nanos(1),
            next: 0,
        }
    }

    /// Reads, writes, and everything that the layer emulates or splits.
    fn run(&mut self, count: u64) {
        let last = self.next + count;
        while self.next < last || self.queue.inflight() > 0 {
            while self.next < last && (self.queue.inflight() as u64) < DEPTH {
                let lba = self.next * 7 % 500;
                let io = match self.next % 16 {
                    0 => Io::new(self.next, Op::WriteZeroes, lba, 8),
                    1 => Io::new(self.next, Op::Copy, lba, 8).source(500 - lba),
                    2 => Io::new(self.next, Op::Flush, 0, 0),
                    3 => Io::new(self.next, Op::Compare, lba, 8).with(self.buf()),
                    4 => {
                        let (old, new) = (self.buf(), self.buf());
                        Io::new(self.next, Op::CompareAndWrite, lba, 8)
                            .with(old)
                            .with(new)
                    }
                    n if n % 2 == 0 => Io::new(self.next, Op::Write, lba, 8).with(self.buf()),
                    _ => Io::new(self.next, Op::Read, lba, 8).with(self.buf()),
                };
                self.next += 1;
                if let Err((_, io)) = self.queue.submit(io) {
                    self.next -= 1;
                    self.bufs.extend(io.data);
                    break;
                }
            }
            self.now = self.now + Duration::from_micros(1);
            self.queue.poll(self.now, &mut self.done);
            for completion in self.done.drain() {
                self.bufs.extend(completion.data);
            }
        }
    }

    fn buf(&mut self) -> Buf {
        self.bufs.pop().expect("as many as there are I/Os")
    }
}

#[test]
fn steady_state_allocates_nothing() {
    let pool = Pool::heap(&[
        ClassSpec {
            size: 4096,
            count: 400,
        },
        ClassSpec {
            size: 64 << 10,
            count: 16,
        },
    ]);
    for (name, device) in devices() {
        let mut load = Load::new(device, &pool);
        load.run(20_000);
        let before = ALLOCATIONS.with(Cell::get);
        load.run(20_000);
        let after = ALLOCATIONS.with(Cell::get);
        assert_eq!(after - before, 0, "{name} allocates");
    }
}

fn devices() -> Vec<(&'static str, Arc<dyn Bdev>)> {
    fn config<T: serde::de::DeserializeOwned>(json: serde_json::Value) -> T {
        serde_json::from_value(json).expect("a complete configuration")
    }
    let shape =
        |name: &str| serde_json::json!({"name": name, "block_size": 512, "num_blocks": 1024});
    let registry = Registry::new();
    let malloc = |name: &str| {
        let device = malloc::create(config(shape(name))).expect("a good configuration");
        registry
            .register(Arc::clone(&device) as Arc<dyn Bdev>)
            .expect("a free name");
        device
    };
    malloc("B1");
    malloc("B2");
    let over = serde_json::json!({"name": "P", "base_bdev_name": "B1"});
    // The device's identity seeds its delays. With a new seed each time, some runs reach their peak
    // only late.
    let slow = serde_json::json!({"name": "D", "base_bdev_name": "B2", "avg_read_latency": 20,
        "p99_read_latency": 100, "avg_write_latency": 10, "p99_write_latency": 90,
        "uuid": "5eed0000-0000-4000-8000-000000000001"});
    vec![
        ("malloc", malloc("M")),
        (
            "null",
            null::create(config(shape("N"))).expect("a good configuration"),
        ),
        (
            "passthru",
            passthru::create(config(over), &registry).expect("the base is there"),
        ),
        (
            "delay",
            delay::create(config(slow), &registry).expect("the base is there"),
        ),
        ("volume", volume()),
    ]
}

/// Over two RAM disks, every region dirty: so that a write never waits for the log.
fn volume() -> Arc<dyn Bdev> {
    let record = VolumeRecord {
        id: uuid::Uuid::nil(),
        name: "V".into(),
        block_size: 512,
        blocks: 1024,
        region_shift: 20,
        epoch: 1,
        serving: 1,
        revision: 1,
        holder: None,
        replicas: Vec::new(),
        settings: Settings::default(),
        limits: None,
        restored: None,
        origin: None,
    };
    let shared = Shared::new(&record);
    let mut view = View::closed(&record.settings);
    view.mode = Mode::Serving;
    let disks = ["V1", "V2"].map(|name| {
        let shape = serde_json::json!({"name": name, "block_size": 512, "num_blocks": 1024 + 2048});
        let config = serde_json::from_value(shape).expect("a complete configuration");
        Layer::new(malloc::create(config).expect("a good configuration"))
    });
    for (slot, device) in disks.iter().enumerate() {
        view.replicas[slot] = Some(ReplicaView {
            device: Arc::clone(device),
            incarnation: 1,
            role: Role::InSync,
            local: true,
            losses: 0,
            flushed: true,
            decided: 0,
        });
    }
    shared.regions.set_dirty(0);
    shared.publish(view);
    let limits = weakest(disks.iter().map(|disk| &**disk));
    Volume::new(&record, shared, limits)
}
