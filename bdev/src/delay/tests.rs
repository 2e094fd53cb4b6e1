//! Tests of the delay module: conformance, due times, and the share of slow I/Os.

use super::*;
use crate::io::{Io, Op, Status};
use crate::malloc;
use crate::queue::Done;
use nacre_hugepages::ClassSpec;
use nacre_reactor::{Idle, Nanos};
use std::time::Duration;

fn delay(latency_us: u64) -> Arc<Delay> {
    let registry = Registry::new();
    let base = serde_json::json!({"name": "Base", "block_size": 512, "num_blocks": 2048});
    let base = serde_json::from_value(base).expect("a complete configuration");
    registry
        .register(malloc::create(base).expect("a good one"))
        .expect("free");
    let config = Config {
        name: "Delay0".into(),
        base_bdev_name: "Base".into(),
        avg_read_latency: latency_us,
        p99_read_latency: latency_us,
        avg_write_latency: latency_us / 2,
        p99_write_latency: latency_us / 2,
        uuid: None,
    };
    create(config, &registry).expect("the base is there")
}

#[test]
fn conforms() {
    crate::conformance::run(|| delay(0));
    crate::conformance::run(|| delay(20));
}

/// In virtual time: an I/O is held for exactly its latency, the reactor learns until when, and a
/// new latency applies to later I/O.
#[test]
fn holds_until_due() {
    let device = delay(1000);
    let pool = Pool::heap(&[ClassSpec {
        size: 512,
        count: 4,
    }]);
    let mut queue = Arc::clone(&device).open(&pool).expect("opens");
    let mut done = Done::with_capacity(4);
    let at = |us: u64| Nanos(1_000_000) + Duration::from_micros(us);
    let io = |token, op| Io::new(token, op, 0, 1).with(pool.acquire(512).expect("free"));
    queue.submit(io(1, Op::Read)).expect("room");
    queue.submit(io(2, Op::Write)).expect("room");
    queue.submit(Io::new(3, Op::Flush, 0, 0)).expect("room");
    let mut ended = |queue: &mut Box<dyn Queue>, us| {
        queue.poll(at(us), &mut done);
        done.drain()
            .map(|c| (c.token, c.status))
            .collect::<Vec<_>>()
    };
    assert_eq!(ended(&mut queue, 0), [(3, Status::Ok)]);
    assert_eq!(queue.arm(at(0)), Idle::Until(at(500)));
    assert_eq!(ended(&mut queue, 499), []);
    assert_eq!(queue.arm(at(500)), Idle::Busy);
    assert_eq!(ended(&mut queue, 500), [(2, Status::Ok)]);
    device.update_latency(Latency::AvgRead, 0);
    device.update_latency(Latency::P99Read, 0);
    queue.submit(io(4, Op::Read)).expect("room");
    assert_eq!(ended(&mut queue, 600), [(4, Status::Ok)]);
    assert!(queue.abort(1) && !queue.abort(4));
    assert_eq!(ended(&mut queue, 601), [(1, Status::Aborted)]);
    assert_eq!(queue.arm(at(601)), Idle::Quiet);
    assert_eq!(device.config().avg_read_latency, 0);
}

/// About one in a hundred takes the long latency.
#[test]
fn one_percent_is_slow() {
    let device = delay(0);
    device.update_latency(Latency::P99Write, 1_000_000);
    let pool = Pool::heap(&[ClassSpec {
        size: 512,
        count: 1,
    }]);
    let buf = pool.acquire(512).expect("free");
    let mut queue = Arc::clone(&device).open(&pool).expect("opens");
    let mut done = Done::with_capacity(32);
    let mut fast = 0;
    for token in 0..10_000 {
        let io = Io::new(token, Op::Write, 0, 1).with(buf.clone());
        queue.submit(io).expect("only the slow ones stay");
        fast += queue.poll(Nanos(1), &mut done);
        done.drain().for_each(drop);
    }
    assert!((9_850..=9_950).contains(&fast), "{fast} of 10000 were fast");
    assert_eq!(queue.inflight(), 10_000 - fast);
}
