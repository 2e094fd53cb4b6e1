//! Tests of the malloc module: conformance, each operation, and its configuration.

use nacre_hugepages::{ClassSpec, Pool};
use nacre_reactor::Nanos;

use super::*;
use crate::io::{Io, Op, Status};
use crate::layer::Layer;
use crate::qos::RateLimits;
use crate::queue::{Done, Queue};

fn config(block_size: u32) -> Config {
    Config {
        name: "Malloc0".into(),
        block_size,
        num_blocks: 2048,
        physical_block_size: None,
        uuid: None,
        optimal_io_boundary: None,
        numa_id: None,
    }
}

#[test]
fn conforms() {
    for block_size in [512, 4096] {
        crate::conformance::run(|| create(config(block_size)).expect("a good configuration"));
    }
}

/// The layer splits at the boundary, unseen by the user.
#[test]
fn conforms_with_a_boundary() {
    let config = Config {
        optimal_io_boundary: Some(7),
        ..config(512)
    };
    crate::conformance::run(|| create(config.clone()).expect("a good configuration"));
}

/// A device that does not fit the machine is a named error with the numbers, not a crash.
#[test]
fn too_large() {
    let config = Config {
        num_blocks: 1 << 50,
        ..config(512)
    };
    let error = create(config).err().expect("half an exabyte of memory");
    assert!(
        matches!(error, ConfigError::Memory { bytes, .. } if bytes == 1 << 59),
        "{error}"
    );
}

/// An operation that the disk supports directly is executed synchronously. It counts as any other
/// I/O, and none remains in flight. I/O that would have to wait, or needs more than one request, is
/// handed back untouched. Cases: a rate limit, a compare-and-write and the writes that it orders, a
/// range outside the device, a removed device.
#[test]
fn supported_io_is_executed_synchronously() {
    let pool = Pool::heap(&[ClassSpec {
        size: 4096,
        count: 8,
    }]);
    let filled = |byte| {
        let mut buf = pool.acquire(4096).expect("a buffer");
        buf.bytes_mut().expect("not shared").fill(byte);
        buf
    };
    let layer = Layer::new(create(config(4096)).expect("a good configuration"));
    let mut queue = layer.open_queue(&pool).expect("opens");
    let mut ask = |mut io: Io| {
        let mut zero_copy = None;
        let status = queue.run_sync(&mut io, &mut zero_copy);
        assert_eq!(queue.inflight(), 0);
        assert_eq!(queue.poll(Nanos(1), &mut Done::with_capacity(1)), 0);
        (status, zero_copy, io)
    };

    let (status, _, io) = ask(Io::new(1, Op::Write, 3, 1).with(filled(7)));
    assert_eq!(status, Some(Status::Ok));
    assert_eq!(io.data.len(), 1, "the buffer stays with its owner");
    let (status, zero_copy, io) = ask(Io::new(2, Op::Read, 3, 1).with(filled(0)));
    assert_eq!((status, zero_copy.is_none()), (Some(Status::Ok), true));
    assert_eq!(io.data[0][..], [7; 4096]);
    let (status, zero_copy, _) = ask(Io::new(3, Op::Read, 3, 1));
    assert_eq!(status, Some(Status::Ok));
    let zero_copy = zero_copy.expect("a view");
    let mut read = [0; 4096];
    zero_copy.read(0, &mut read);
    assert_eq!(read, [7; 4096]);
    let (status, ..) = ask(Io::new(4, Op::Compare, 3, 1).with(filled(8)));
    assert_eq!(status, Some(Status::Miscompare));
    assert!(ask(Io::new(5, Op::Read, 2048, 1)).0.is_none(), "the end");

    let stats = layer.stats().snapshot();
    assert_eq!(
        (stats.op(Op::Read).ops, stats.op(Op::Read).bytes),
        (2, 8192)
    );
    assert_eq!(
        (stats.op(Op::Write).ops, stats.op(Op::Write).bytes),
        (1, 4096)
    );
    assert_eq!(stats.op(Op::Compare).errors, 1);

    let most = |per_second| RateLimits {
        rw_ios: per_second,
        ..RateLimits::default()
    };
    layer.qos().set(most(1000));
    assert!(ask(Io::new(6, Op::Read, 3, 1)).0.is_none(), "a limit");
    layer.qos().set(most(0));
    assert!(ask(Io::new(7, Op::Read, 3, 1)).0.is_some());

    let swap = Io::new(8, Op::CompareAndWrite, 3, 1);
    let (status, _, swap) = ask(swap.with(filled(7)).with(filled(9)));
    assert!(status.is_none() && swap.data.len() == 2);
    queue.submit(swap).expect("room");
    let mut write = Io::new(9, Op::Write, 3, 1).with(filled(1));
    assert!(
        queue.run_sync(&mut write, &mut None).is_none(),
        "it is to be ordered"
    );
    assert_eq!(write.data.len(), 1);
    let mut done = Done::with_capacity(4);
    for turn in 1.. {
        queue.poll(Nanos(turn), &mut done);
        if !done.is_empty() {
            break;
        }
        assert!(turn < 1000, "it never ends");
    }
    assert_eq!(done.drain().map(|c| c.status).next(), Some(Status::Ok));

    layer.set_gone();
    assert!(
        queue
            .run_sync(&mut Io::new(10, Op::Read, 3, 1), &mut None)
            .is_none()
    );
}
