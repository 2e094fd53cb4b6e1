//! Goal: a limited device delivers exactly its limits, and hosts notice only the time. Method:
//! queues on a null device in virtual time.

use std::sync::Arc;
use std::time::Duration;

use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_reactor::{Idle, Nanos};

use super::LOOK_EVERY;
use crate::device::Bdev;
use crate::io::{Completion, Io, Op, Status};
use crate::layer::{Layer, LayerQueue};
use crate::qos::{CREDIT, RateLimits};
use crate::queue::{Done, Queue};
use crate::registry::Registry;
use crate::{null, passthru};

const BLOCK: u32 = 4096;

struct Rig {
    registry: Registry,
    pool: Pool,
    buf: Buf,
    now: Nanos,
    done: Done,
}

impl Rig {
    fn new() -> Self {
        let registry = Registry::new();
        let config = serde_json::json!({"name": "n", "block_size": BLOCK, "num_blocks": 1 << 20});
        let config = serde_json::from_value(config).expect("complete");
        let null = null::create(config).expect("a good one");
        registry.register(null).expect("free");
        let class = |size, count| ClassSpec { size, count };
        let pool = Pool::heap(&[class(16 * BLOCK as usize, 128), class(1 << 20, 16)]);
        Self {
            registry,
            buf: pool.acquire(1 << 20).expect("free"),
            pool,
            now: Nanos(7_000_000_000),
            done: Done::with_capacity(512),
        }
    }

    fn layer(&self, name: &str) -> Arc<Layer> {
        self.registry.lookup(name).expect("registered")
    }

    fn limit(&self, name: &str, limits: RateLimits) {
        self.layer(name).qos().set(limits);
    }

    fn open(&self, name: &str) -> LayerQueue {
        self.layer(name).open_queue(&self.pool).expect("opens")
    }

    fn io(&self, token: u64, op: Op, blocks: u32) -> Io {
        let io = Io::new(token, op, 0, blocks);
        let len = (blocks * BLOCK) as usize;
        match op {
            Op::Read => io.with(self.pool.acquire(len).expect("free")),
            Op::Write => io.with(self.buf.slice(0, len)),
            _ => io,
        }
    }

    fn poll(&mut self, queue: &mut LayerQueue) -> Vec<Completion> {
        queue.poll(self.now, &mut self.done);
        self.done.drain().collect()
    }

    /// The number of `op` that some queues complete together in a second, with `depth` of them
    /// always in flight and a poll every `step`; each sleep is as long as the queues allow.
    fn per_second(&mut self, name: &str, queues: usize, op: Op, blocks: u32, depth: usize) -> u64 {
        let mut queues: Vec<LayerQueue> = (0..queues).map(|_| self.open(name)).collect();
        let end = self.now + Duration::from_secs(1);
        let mut count = 0;
        while self.now < end {
            let mut wake = Idle::Quiet;
            for queue in queues.iter_mut() {
                for completion in self.poll(queue) {
                    assert_eq!(completion.status, Status::Ok);
                    count += 1;
                }
                while queue.inflight() < depth {
                    queue.submit(self.io(count, op, blocks)).expect("room");
                }
                wake = wake.and(queue.arm(self.now));
            }
            self.now = match wake {
                Idle::Until(at) => at.max(self.now + Duration::from_micros(1)),
                _ => self.now + Duration::from_micros(50),
            };
        }
        count
    }
}

fn ios(rw_ios: u64) -> RateLimits {
    RateLimits {
        rw_ios,
        ..RateLimits::default()
    }
}

/// I/Os and bytes are limited, for one queue and for two together, also when reactors sleep until
/// they are due; a limit that was lifted is forgotten.
#[test]
fn a_device_keeps_its_rate() {
    let mut rig = Rig::new();
    let near = |count: u64, wanted: u64| {
        let most = wanted + wanted / 20 + 8;
        assert!(
            (wanted - wanted / 50..=most).contains(&count),
            "{count}, not {wanted}"
        );
    };
    rig.limit("n", ios(2000));
    near(rig.per_second("n", 1, Op::Read, 1, 32), 2000);
    near(rig.per_second("n", 2, Op::Write, 1, 32), 2000);
    let bytes = RateLimits {
        rw_bytes: 64 << 20,
        write_bytes: 16 << 20,
        ..RateLimits::default()
    };
    rig.limit("n", bytes);
    near(rig.per_second("n", 2, Op::Read, 16, 8), 1024);
    near(rig.per_second("n", 2, Op::Write, 16, 8), 256);
    rig.limit("n", RateLimits::default());
    assert!(rig.per_second("n", 2, Op::Read, 1, 32) > 100_000);
    let snapshot = rig.layer("n").stats().snapshot();
    assert!(snapshot.throttled > 3000, "{}", snapshot.throttled);
}

/// Writes at their limit leave reads alone, and flushes and unmaps everything.
#[test]
fn limits_are_independent() {
    let mut rig = Rig::new();
    let mut queue = rig.open("n");
    let limits = RateLimits {
        write_bytes: 1 << 20,
        ..RateLimits::default()
    };
    rig.limit("n", limits);
    rig.poll(&mut queue);
    for token in 0..4 {
        queue.submit(rig.io(token, Op::Write, 256)).expect("room");
    }
    for (token, op) in [(10, Op::Read), (11, Op::Flush), (12, Op::Unmap)] {
        queue
            .submit(rig.io(token, op, u32::from(op != Op::Flush)))
            .expect("room");
    }
    let mut ended: Vec<u64> = rig.poll(&mut queue).iter().map(|c| c.token).collect();
    ended.sort_unstable();
    assert_eq!(ended, [0, 10, 11, 12]);
    assert_eq!(queue.inflight(), 3);
}

/// Verifies have the limits of reads, and those that wait hold back no write.
#[test]
fn verifies_wait_beside_reads() {
    let mut rig = Rig::new();
    let mut queue = rig.open("n");
    let limits = RateLimits {
        read_bytes: 1 << 20,
        ..RateLimits::default()
    };
    rig.limit("n", limits);
    rig.poll(&mut queue);
    for token in 0..4 {
        queue.submit(rig.io(token, Op::Verify, 256)).expect("room");
    }
    queue.submit(rig.io(10, Op::Write, 1)).expect("room");
    let mut ended: Vec<u64> = rig.poll(&mut queue).iter().map(|c| c.token).collect();
    ended.sort_unstable();
    assert_eq!(ended, [0, 10]);
    assert_eq!(queue.inflight(), 3);
}

/// The reactor learns until when to sleep, and completes held I/O then: a second late, which counts
/// as its latency.
#[test]
fn held_io_completes_when_due() {
    let mut rig = Rig::new();
    let mut queue = rig.open("n");
    rig.limit("n", ios(1));
    rig.poll(&mut queue);
    queue.submit(rig.io(1, Op::Read, 1)).expect("room");
    queue.submit(rig.io(2, Op::Read, 1)).expect("room");
    assert_eq!(rig.poll(&mut queue).len(), 1);
    let begin = rig.now;
    let due = begin + Duration::from_secs(1) - CREDIT;
    while rig.now < due {
        assert_eq!(rig.poll(&mut queue).len(), 0);
        let until = due.min(rig.now + LOOK_EVERY);
        assert_eq!(queue.arm(rig.now), Idle::Until(until));
        rig.now = until;
    }
    assert_eq!(queue.arm(rig.now), Idle::Busy);
    assert_eq!(rig.poll(&mut queue)[0].token, 2);
    assert_eq!(queue.arm(rig.now), Idle::Quiet);
    let read = *rig.layer("n").stats().snapshot().op(Op::Read);
    assert_eq!(read.latency_max_ns, due.since(begin).as_nanos() as u64);
}

/// Held I/Os count towards the depth, can be aborted, end when the device goes, and start when the
/// limit is lifted.
#[test]
fn held_io_is_bounded_and_can_be_aborted() {
    let mut rig = Rig::new();
    let depth = rig.layer("n").limits().queue_depth as usize;
    for way in ["abort", "gone", "lifted", "dropped"] {
        let mut queue = rig.open("n");
        rig.limit("n", RateLimits::default());
        rig.limit("n", ios(1));
        rig.poll(&mut queue);
        let mut taken = 0;
        while queue.submit(rig.io(taken, Op::Write, 1)).is_ok() {
            taken += 1;
            assert!(taken as usize <= depth, "more than the depth was taken");
        }
        assert_eq!(taken as usize, depth);
        assert!(
            queue.submit(rig.io(taken, Op::Flush, 0)).is_err(),
            "full is full"
        );
        assert_eq!(rig.poll(&mut queue).len(), 1, "the first was admitted");
        let status = match way {
            "abort" => {
                assert!((1..taken).all(|token| queue.abort(token)));
                assert!(!queue.abort(taken));
                Status::Aborted
            }
            "lifted" => {
                rig.limit("n", RateLimits::default());
                Status::Ok
            }
            "gone" => {
                // Another device: this one goes on being used here.
                let ended = gone(&mut rig);
                assert!(ended.iter().all(|status| *status == Status::Gone) && !ended.is_empty());
                continue;
            }
            _ => continue,
        };
        let mut ended = Vec::new();
        while queue.inflight() > 0 {
            ended.extend(rig.poll(&mut queue));
        }
        assert_eq!(ended.len(), depth - 1);
        assert!(ended.iter().all(|c| c.status == status), "{way}");
    }
}

/// The results of held I/O when a device goes.
fn gone(rig: &mut Rig) -> Vec<Status> {
    let config = serde_json::json!({"name": "g", "block_size": BLOCK, "num_blocks": 1024});
    let config = serde_json::from_value(config).expect("complete");
    let layer = Layer::new(null::create(config).expect("a good one"));
    layer.qos().set(ios(1));
    let mut queue = layer.open_queue(&rig.pool).expect("opens");
    rig.poll(&mut queue);
    for token in 0..5 {
        queue.submit(rig.io(token, Op::Read, 1)).expect("room");
    }
    rig.poll(&mut queue);
    layer.set_gone();
    let ended = rig.poll(&mut queue);
    assert_eq!((ended.len(), queue.inflight()), (4, 0));
    ended.into_iter().map(|c| c.status).collect()
}

/// The limits of a device apply to the devices on top of it, beside their own.
#[test]
fn limits_of_the_base_apply() {
    let mut rig = Rig::new();
    for (name, base) in [("p", "n"), ("q", "p")] {
        let config = passthru::Config {
            name: name.into(),
            base_bdev_name: base.into(),
            uuid: None,
        };
        let bdev = passthru::create(config, &rig.registry).expect("the base is there");
        rig.registry.register(bdev).expect("free");
    }
    for (below, own, wanted) in [(500, 0, 500), (500, 300, 300), (200, 300, 200)] {
        rig.limit("n", ios(below));
        rig.limit("q", ios(own));
        let count = rig.per_second("q", 1, Op::Read, 1, 16);
        assert!(
            (wanted - 10..=wanted + wanted / 20 + 5).contains(&count),
            "{count}, not {wanted}"
        );
    }
}
