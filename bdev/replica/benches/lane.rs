//! Measures the cost of replication: 4 KiB I/O at depth 128 on a RAM disk, and on volumes of one
//! and of two such disks. `cargo bench -p nacre-bdev-replica` prints nanoseconds per I/O, the
//! median of several runs, and the rate as a fraction of the bare disk's.
//!
//! `lane count OP REPLICAS LEASE IOS` does so many I/Os, for callgrind: the difference of two runs
//! is the instructions of an I/O, with those of the bench itself. OP is `write`, `read`, or one of
//! them with `-queued`: always through the queue. LEASE is `lease` or `no`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nacre_bdev::{Bdev, Done, Io, Layer, LayerQueue, Op, Queue, malloc};
use nacre_bdev_replica::answers::AnswerLease;
use nacre_bdev_replica::model::{Settings, VolumeRecord};
use nacre_bdev_replica::shared::Shared;
use nacre_bdev_replica::view::{Mode, ReplicaView, Role, View};
use nacre_bdev_replica::volume::{Volume, weakest};
use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_random::Random;
use nacre_reactor::Nanos;
use uuid::Uuid;

const DEPTH: usize = 128;
const ROUNDS: usize = 21;
const IOS: usize = 100_000;
const BLOCKS: u64 = 128 << 11;

fn main() {
    let pool = Pool::heap(&[
        ClassSpec {
            size: 4096,
            count: DEPTH + 8,
        },
        ClassSpec {
            size: 64 << 10,
            count: 32,
        },
    ]);
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().is_some_and(|arg| arg == "count") {
        return count(&args[1..], &pool);
    }
    let bare = disk("bare", BLOCKS);
    let one = volume(1, false);
    let two = volume(2, false);
    let mut queues: Vec<LayerQueue> = [bare, one, two]
        .iter()
        .map(|layer| layer.open_queue(&pool).expect("opens"))
        .collect();
    println!(
        "{:<24} {:>10} {:>14} {:>14}",
        "ns per I/O, depth 128", "bare", "one replica", "two replicas"
    );
    for (name, op, is_zero_copy) in [
        ("write", Op::Write, false),
        ("read", Op::Read, false),
        ("read, zero copy", Op::Read, true),
    ] {
        for random in [true, false] {
            let mut times = [const { Vec::new() }; 3];
            // Interleaved, so that whatever else the machine does meets all.
            for round in 0..ROUNDS + 2 {
                for (queue, times) in queues.iter_mut().zip(&mut times) {
                    let time = measure(queue, Way::AtOnce, op, is_zero_copy, random, IOS, &pool);
                    if round > 1 {
                        times.push(time);
                    }
                }
            }
            let [bare, one, two] = times.map(median);
            let order = if random { "random" } else { "sequential" };
            println!(
                "{:<24} {bare:>10.1} {one:>8.1} {:>5.2} {two:>8.1} {:>5.2}",
                format!("{name}, {order}"),
                bare / one,
                bare / two
            );
        }
    }
}

/// How I/O reaches a volume: synchronously if possible, or always through its queue.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    AtOnce,
    Queued,
}

fn count(args: &[String], pool: &Pool) {
    let [op, replicas, lease, ios] = args else {
        panic!("count OP REPLICAS LEASE IOS");
    };
    let (op, way) = match op.as_str() {
        "write" => (Op::Write, Way::AtOnce),
        "read" => (Op::Read, Way::AtOnce),
        "write-queued" => (Op::Write, Way::Queued),
        "read-queued" => (Op::Read, Way::Queued),
        other => panic!("no operation: {other}"),
    };
    let replicas = replicas.parse().expect("a number of replicas");
    let volume = volume(replicas, lease == "lease");
    let mut queue = volume.open_queue(pool).expect("opens");
    let ios = ios.parse().expect("a number of I/Os");
    measure(&mut queue, way, op, false, false, ios, pool);
}

fn measure(
    queue: &mut LayerQueue,
    way: Way,
    op: Op,
    is_zero_copy: bool,
    is_random: bool,
    ios: usize,
    pool: &Pool,
) -> f64 {
    let mut random = Random::new(1);
    let mut bufs: Vec<Buf> = (0..DEPTH)
        .map(|_| pool.acquire(4096).expect("enough"))
        .collect();
    let mut done = Done::with_capacity(DEPTH);
    let (mut now, mut at) = (Nanos(1), 0u64);
    let started = Instant::now();
    for _ in 0..ios / DEPTH {
        let mut submitted = 0;
        for token in 0..DEPTH {
            at = if is_random {
                random.draw() >> 33
            } else {
                at + 1
            };
            let mut io = Io::new(token as u64, op, at * 8 % BLOCKS, 8);
            if !is_zero_copy {
                io = io.with(bufs.pop().expect("as many as the depth"));
            }
            // As the target does.
            let mut zero_copy = None;
            let status = match way {
                Way::AtOnce => queue.run_sync(&mut io, &mut zero_copy),
                Way::Queued => None,
            };
            match status {
                Some(status) => {
                    assert!(status.is_ok());
                    bufs.extend(io.data);
                }
                None => {
                    queue.submit(io).expect("below its depth");
                    submitted += 1;
                }
            }
        }
        // What overlaps goes one after the other.
        while done.len() < submitted {
            now = now + Duration::from_micros(10);
            queue.poll(now, &mut done);
        }
        for completion in done.drain() {
            assert!(completion.status.is_ok());
            bufs.extend(completion.data);
        }
    }
    started.elapsed().as_nanos() as f64 / ios as f64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn disk(name: &str, blocks: u64) -> Arc<Layer> {
    let config = serde_json::json!({"name": name, "block_size": 512, "num_blocks": blocks});
    let config = serde_json::from_value(config).expect("a complete configuration");
    Layer::new(malloc::create(config).expect("a good configuration"))
}

/// A lease that is good: one atomic word and a clock, like that of a node.
struct GoodLease(Instant, AtomicU64);

impl AnswerLease for GoodLease {
    fn is_good(&self) -> bool {
        let until = self.1.load(Ordering::Acquire);
        (self.0.elapsed().as_nanos() as u64) < until
    }
}

fn volume(replicas: u8, lease: bool) -> Arc<Layer> {
    let record = VolumeRecord {
        id: Uuid::nil(),
        name: format!("V{replicas}"),
        block_size: 512,
        blocks: BLOCKS,
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
    let disks: Vec<_> = (0..replicas)
        .map(|at| disk(&format!("{at}"), BLOCKS + 2048))
        .collect();
    let mut view = View::closed(&record.settings);
    view.mode = Mode::Serving;
    view.lease = lease.then(|| {
        let good = GoodLease(Instant::now(), AtomicU64::new(u64::MAX));
        Arc::new(good) as Arc<dyn AnswerLease>
    });
    for (slot, device) in disks.iter().enumerate() {
        view.replicas[slot] = Some(ReplicaView {
            device: Arc::clone(device),
            incarnation: 1,
            role: Role::InSync,
            flushed: true,
            local: true,
            losses: device.losses(),
            decided: 0,
        });
    }
    (0..shared.regions.len()).for_each(|region| shared.regions.set_dirty(region));
    shared.publish(view);
    let limits = weakest(disks.iter().map(|disk| &**disk));
    Layer::new(Volume::new(&record, shared, limits))
}
