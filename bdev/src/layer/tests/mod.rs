//! Tests of the layer: splitting, emulated operations, FUA, aborts and failures, on modules with
//! few features.

mod limited;

use std::time::Duration;

use nacre_hugepages::{Buf, ClassSpec};
use nacre_reactor::{Idle, Nanos};
use proptest::prelude::*;

use super::plan::Plan;
use super::*;
use crate::conformance::Suite;
use crate::io::{Completion, Extents, Flags, Io, Status};
use crate::queue::{Busy, Done};
use crate::stats::{Class, OpStats, Reset};
use limited::{BLOCK, BLOCKS, LimitedDevice};

struct Rig {
    device: LimitedDevice,
    layer: Arc<Layer>,
    queue: LayerQueue,
    pool: Pool,
    now: Nanos,
    done: Done,
}

impl Rig {
    fn new(device: LimitedDevice) -> Self {
        let classes = [
            ClassSpec {
                size: 8 * BLOCK,
                count: 8,
            },
            ClassSpec {
                size: 256 << 10,
                count: 8,
            },
        ];
        let pool = Pool::heap(&classes);
        let layer = Layer::new(Arc::new(device.clone()));
        let queue = layer.open_queue(&pool).expect("opens");
        Self {
            device,
            layer,
            queue,
            pool,
            now: Nanos(1_000),
            done: Done::with_capacity(8),
        }
    }

    fn buf(&self, blocks: usize, fill: u8) -> Buf {
        let mut buf = self.pool.acquire(blocks * BLOCK).expect("free");
        buf.bytes_mut().expect("not shared").fill(fill);
        buf
    }

    fn submit(&mut self, io: Io) {
        self.queue.submit(io).expect("room");
    }

    fn turn(&mut self) -> Vec<Completion> {
        self.now = self.now + Duration::from_nanos(10);
        self.queue.poll(self.now, &mut self.done);
        self.done.drain().collect()
    }

    fn finish(&mut self) -> Vec<Completion> {
        let mut ended = Vec::new();
        for _ in 0..10_000 {
            ended.extend(self.turn());
            if self.queue.inflight() == 0 {
                return ended;
            }
        }
        panic!("{} I/Os never end", self.queue.inflight());
    }

    fn run(&mut self, io: Io) -> (Status, Extents) {
        self.submit(io);
        let mut ended = self.finish();
        assert_eq!(ended.len(), 1);
        let completion = ended.remove(0);
        (completion.status, completion.data)
    }
}

/// Runs the conformance suite on the poorest module, and on modules that lack one ability each.
#[test]
fn conforms() {
    let variants: [fn(LimitedDevice) -> LimitedDevice; 4] = [
        |device| device,
        |device| LimitedDevice {
            native_fua: true,
            ..device
        },
        |mut device| {
            device.native.push(Op::Compare);
            device.limits.optimal_boundary_blocks = 0;
            device.limits.max_blocks = 17;
            device.limits.queue_depth = 64;
            device
        },
        |mut device| {
            device.native.pop();
            device.limits.volatile_cache = false;
            device.limits.max_blocks = 1;
            device.limits.queue_depth = 1;
            device
        },
    ];
    for (seed, variant) in variants.iter().enumerate() {
        let suite = Suite::new(|| Arc::new(variant(LimitedDevice::new(seed as u64))));
        match variant(LimitedDevice::new(0))
            .limits
            .optimal_boundary_blocks
        {
            0 => suite.run(),
            // This suite checks that no request crosses the module's boundary, so it submits only
            // through the layer.
            _ => suite.layer_only().run(),
        }
    }
}

/// A FUA write is on the media when it completes, however it is emulated. A write without FUA
/// causes no flush.
#[test]
fn force_unit_access() {
    for blocks in [1, 2, 20] {
        let mut rig = Rig::new(LimitedDevice::new(3));
        let buf = rig.buf(blocks, 0xEE);
        rig.run(Io::new(1, Op::Write, 5, blocks as u32).with(buf));
        assert!(
            rig.device.disk.lock().media.iter().all(|byte| *byte == 0),
            "no flush was requested"
        );
        for (op, fill) in [(Op::Write, 0xAA), (Op::WriteZeroes, 0), (Op::Copy, 0)] {
            let mut io = Io::new(2, op, 5, blocks as u32)
                .flags(Flags::FUA)
                .source(100);
            if op == Op::Write {
                io = io.with(rig.buf(blocks, fill));
            }
            assert_eq!(rig.run(io).0, Status::Ok);
            let media = &rig.device.disk.lock().media[5 * BLOCK..(5 + blocks) * BLOCK];
            assert!(media.iter().all(|byte| *byte == fill), "{op:?} of {blocks}");
        }
    }
    let mut rig = Rig::new(LimitedDevice {
        native_fua: true,
        ..LimitedDevice::new(3)
    });
    let buf = rig.buf(1, 1);
    rig.run(Io::new(1, Op::Write, 5, 1).with(buf).flags(Flags::FUA));
    assert_eq!(
        rig.device.take_requests(),
        [(Op::Write, 5, 1)],
        "the module executes it natively"
    );
}

/// A module announces write zeroes and then refuses one. All its blocks are then written from a
/// buffer, also those of requests not refused yet. The module gets no further write zeroes.
#[test]
fn refused_zeroes() {
    let mut device = LimitedDevice::new(5);
    device.native = Op::ALL.to_vec();
    device.limits.max_unmap_blocks = 4;
    device.disk.lock().cache.fill(7);
    device.disk.lock().refuses = Some(Op::WriteZeroes);
    let mut rig = Rig::new(device);
    // The layer reserved no memory for an emulation, so the I/O waits for free memory.
    let all: Vec<Buf> = std::iter::from_fn(|| rig.pool.acquire(8 * BLOCK)).collect();
    rig.submit(Io::new(1, Op::WriteZeroes, 5, 30).flags(Flags::FUA));
    for _ in 0..100 {
        assert!(rig.turn().is_empty(), "without memory");
    }
    drop(all);
    assert_eq!(rig.finish()[0].status, Status::Ok);
    {
        let disk = rig.device.disk.lock();
        for side in [&disk.cache, &disk.media] {
            let zeroes = side[5 * BLOCK..35 * BLOCK].iter().all(|byte| *byte == 0);
            assert!(zeroes && side[4 * BLOCK] == 7 && side[35 * BLOCK] == 7);
        }
    }
    rig.device.take_requests();
    assert_eq!(rig.run(Io::new(2, Op::WriteZeroes, 40, 2)).0, Status::Ok);
    assert_eq!(rig.device.take_requests(), [(Op::Write, 40, 2)]);
    assert!(
        rig.device.disk.lock().cache[40 * BLOCK..42 * BLOCK]
            .iter()
            .all(|byte| *byte == 0)
    );
}

/// A large read is split at the module's limits and nowhere else. Its buffers return complete.
#[test]
fn split() {
    let mut rig = Rig::new(LimitedDevice::new(1));
    let (a, b) = (rig.buf(2, 1), rig.buf(5, 1));
    let addresses = (a.as_ptr(), b.as_ptr());
    let (status, data) = rig.run(Io::new(1, Op::Read, 6, 7).with(a).with(b));
    assert_eq!(status, Status::Ok);
    let mut requests = rig.device.take_requests();
    requests.sort_unstable_by_key(|(_, lba, _)| *lba);
    assert_eq!(
        requests,
        [(Op::Read, 6, 2), (Op::Read, 8, 3), (Op::Read, 11, 2)]
    );
    assert_eq!((data[0].as_ptr(), data[1].as_ptr()), addresses);
    assert_eq!((data[0].len(), data[1].len()), (2 * BLOCK, 5 * BLOCK));
}

/// An emulated verify reads in pieces of the module's best read size and discards the data. A
/// native verify is split at its own limit, and at no boundary.
#[test]
fn verifies() {
    let mut device = LimitedDevice::new(1);
    device.limits.max_verify_blocks = 5;
    let mut rig = Rig::new(device.clone());
    let (status, data) = rig.run(Io::new(1, Op::Verify, 6, 7));
    assert_eq!((status, data.len()), (Status::Ok, 0));
    let read = [(Op::Read, 6, 2), (Op::Read, 8, 3), (Op::Read, 11, 2)];
    assert_eq!(rig.device.take_requests(), read);
    device.native.push(Op::Verify);
    let mut rig = Rig::new(device);
    assert_eq!(rig.run(Io::new(1, Op::Verify, 6, 7)).0, Status::Ok);
    let mut requests = rig.device.take_requests();
    requests.sort_unstable_by_key(|(_, lba, _)| *lba);
    assert_eq!(requests, [(Op::Verify, 6, 5), (Op::Verify, 11, 2)]);
}

/// A failed piece fails the whole I/O, once no piece is in flight. All buffers return.
#[test]
fn a_piece_fails() {
    let free = |pool: &Pool| pool.stats().iter().map(|class| class.free).sum::<usize>();
    for op in Op::ALL {
        for seed in 0..8 {
            let mut rig = Rig::new(LimitedDevice::new(seed));
            if rig.layer.supports(op) == Support::No || op == Op::Flush {
                continue;
            }
            let before = free(&rig.pool);
            rig.device.disk.lock().bad_block = Some(40);
            let mut io = Io::new(9, op, 30, 20).source(300);
            for _ in 0..op.data_len(1) {
                io = io.with(rig.buf(20, 0));
            }
            let given: Vec<usize> = io.data.iter().map(Buf::len).collect();
            let (status, data) = rig.run(io);
            assert!(
                matches!(status, Status::ReadError | Status::WriteError),
                "{op:?}: {status:?}"
            );
            assert_eq!(
                data.iter().map(Buf::len).collect::<Vec<_>>(),
                given,
                "{op:?}"
            );
            drop(data);
            assert_eq!(free(&rig.pool), before, "{op:?} keeps buffers");
        }
    }
}

/// A split I/O can be aborted at any moment. It ends once, and returns its buffers.
#[test]
fn abort_in_pieces() {
    for op in [
        Op::Read,
        Op::Write,
        Op::WriteZeroes,
        Op::Compare,
        Op::CompareAndWrite,
        Op::Copy,
        Op::Verify,
    ] {
        for turns in 0..12 {
            let mut rig = Rig::new(LimitedDevice::new(turns));
            let mut io = Io::new(9, op, 30, 40).source(300);
            for _ in 0..op.data_len(1) {
                io = io.with(rig.buf(40, 0));
            }
            rig.submit(io);
            let mut ended: Vec<Completion> = (0..turns).flat_map(|_| rig.turn()).collect();
            let was_aborted = rig.queue.abort(9);
            if rig.queue.inflight() > 0 {
                ended.extend(rig.finish());
            }
            assert_eq!(ended.len(), 1, "{op:?} after {turns}");
            let ended = &ended[0];
            let lens: Vec<usize> = ended.data.iter().map(Buf::len).collect();
            assert_eq!(
                lens,
                vec![40 * BLOCK; op.data_len(1) as usize],
                "{op:?} after {turns}"
            );
            let may =
                ended.status == Status::Ok || (was_aborted && ended.status == Status::Aborted);
            assert!(may, "{op:?} after {turns}: {:?}", ended.status);
            let first = rig.device.disk.lock().cache[30 * BLOCK];
            assert_eq!(first, 0, "a swap of equal data changes nothing");
        }
    }
}

/// Two extents that are adjacent in one buffer stay separate, however the I/O ends.
#[test]
fn adjacent_extents_are_not_merged() {
    for op in [Op::Read, Op::Write] {
        for turns in 0..40 {
            let mut rig = Rig::new(LimitedDevice::new(turns));
            let mut first = rig.buf(40, 1);
            let second = first.split_off(13 * BLOCK);
            rig.submit(Io::new(9, op, 30, 40).with(first).with(second));
            let mut ended: Vec<Completion> = (0..turns / 2).flat_map(|_| rig.turn()).collect();
            if turns % 2 == 0 {
                rig.queue.abort(9);
            }
            if rig.queue.inflight() > 0 {
                ended.extend(rig.finish());
            }
            let lens: Vec<usize> = ended[0].data.iter().map(Buf::len).collect();
            assert_eq!(lens, [13 * BLOCK, 27 * BLOCK], "{op:?} after {turns}");
        }
    }
}

/// While the module is busy with pieces, the layer hands new I/O back, and the pieces complete.
#[test]
fn busy_in_pieces() {
    let mut rig = Rig::new(LimitedDevice::new(5));
    rig.device.disk.lock().stuck = true;
    let buf = rig.buf(64, 3);
    rig.submit(Io::new(1, Op::Write, 0, 64).with(buf));
    assert!(rig.turn().is_empty());
    let buf = rig.buf(1, 0);
    let (Busy, back) = rig
        .queue
        .submit(Io::new(2, Op::Read, 9, 1).with(buf))
        .expect_err("it waits");
    assert_eq!((back.token, back.data.len()), (2, 1));
    rig.device.disk.lock().stuck = false;
    assert_eq!(rig.finish().len(), 1);
    assert_eq!(rig.layer.stats().snapshot().busy, 1);
    let (status, data) = rig.run(back);
    assert!(status.is_ok() && data[0].iter().all(|byte| *byte == 3));
}

/// When a device is removed, I/O that waits in the layer completes with `Gone`, and so does later
/// I/O.
#[test]
fn a_removed_device_completes_io_with_gone() {
    let mut rig = Rig::new(LimitedDevice::new(5));
    rig.device.disk.lock().stuck = true;
    let buf = rig.buf(64, 3);
    rig.submit(Io::new(1, Op::Write, 0, 64).with(buf));
    rig.turn();
    rig.layer.set_gone();
    rig.device.disk.lock().stuck = false;
    let ended = rig.finish();
    assert_eq!(ended[0].status, Status::Gone);
    assert_eq!(ended[0].data[0].len(), 64 * BLOCK);
    assert_eq!(rig.run(Io::new(2, Op::Flush, 0, 0)).0, Status::Gone);
    assert!(rig.layer.open_queue(&rig.pool).is_err());
}

/// Latency counts in turns of the reactor; a sleep before a submission does not count.
#[test]
fn latency() {
    let mut device = LimitedDevice::new(0);
    device.limits.queue_depth = 1;
    let mut rig = Rig::new(device);
    let at = |ns| Nanos(ns);
    let mut done = Done::with_capacity(4);
    rig.device.disk.lock().stuck = true;
    rig.queue.poll(at(1_000), &mut done);
    let buf = rig.buf(1, 0);
    rig.submit(Io::new(1, Op::Read, 0, 1).with(buf));
    rig.queue.poll(at(1_300), &mut done);
    rig.device.disk.lock().stuck = false;
    while rig.queue.inflight() > 0 {
        rig.queue.poll(at(1_500), &mut done);
    }
    let stats = rig.layer.stats().snapshot();
    let expected = OpStats {
        ops: 1,
        bytes: BLOCK as u64,
        errors: 0,
        latency_sum_ns: 500,
        latency_min_ns: 500,
        latency_max_ns: 500,
    };
    assert_eq!(stats.op(Op::Read), &expected);
    assert_eq!(stats.histogram(Class::Read).quantile(0.5), Some(511));

    rig.layer.stats().reset(Reset::All);
    assert_eq!(rig.queue.arm(at(1_600)), Idle::Quiet);
    let buf = rig.buf(1, 0);
    rig.submit(Io::new(2, Op::Read, 0, 1).with(buf));
    rig.device.disk.lock().stuck = true;
    rig.queue.poll(at(1_000_000), &mut done);
    rig.device.disk.lock().stuck = false;
    while rig.queue.inflight() > 0 {
        rig.queue.poll(at(1_000_070), &mut done);
    }
    assert_eq!(rig.layer.stats().snapshot().op(Op::Read).latency_max_ns, 70);
}

/// A queue that was not polled for a while does not use the time of its last turn as the current
/// time.
#[test]
fn latency_after_an_idle_time() {
    let mut rig = Rig::new(LimitedDevice::new(0));
    rig.turn();
    rig.now = Nanos(1_000_000_000);
    rig.queue.rested();
    let buf = rig.buf(1, 0);
    assert!(rig.run(Io::new(1, Op::Read, 0, 1).with(buf)).0.is_ok());
    let latency = rig.layer.stats().snapshot().op(Op::Read).latency_max_ns;
    assert!(latency < 1_000_000, "{latency} ns");
}

/// A read whose submitter keeps the statistics goes directly to the module, or is handed back.
#[test]
fn passed_reads() {
    let mut device = LimitedDevice::new(0);
    (
        device.limits.optimal_boundary_blocks,
        device.limits.queue_depth,
    ) = (0, 2);
    let mut rig = Rig::new(device);
    let (one, two) = (7 << 32 | 9, 8 << 32 | 10);
    let read = |rig: &Rig, token, lba, blocks: u32| {
        let buf = rig.buf(blocks as usize, 0);
        Io::new(token, Op::Read, lba, blocks).with(buf)
    };
    let not_plain = [
        read(&rig, one, BLOCKS - 1, 2),
        read(&rig, one, u64::MAX, 1),
        read(&rig, one, 0, 4),
        Io::new(one, Op::Read, 0, 0),
        Io::new(one, Op::Read, 0, 1),
        Io::new(one, Op::Flush, 0, 0),
        Io::new(one, Op::Write, 0, 1).with(rig.buf(1, 0)),
    ];
    for io in not_plain {
        assert_eq!(rig.queue.pass_read(io).unwrap_err().token, one);
    }
    assert_eq!(
        (rig.queue.inflight(), rig.device.take_requests()),
        (0, vec![])
    );

    rig.device.disk.lock().stuck = true;
    for token in [one, two] {
        let mut io = read(&rig, token, 5, 1);
        // The module may report busy at any time.
        while let Err(back) = rig.queue.pass_read(io) {
            assert_eq!(back.token, token);
            io = back;
        }
    }
    let third = read(&rig, 1, 5, 1);
    assert!(
        rig.queue.pass_read(third).is_err(),
        "the queue depth is reached"
    );
    assert_eq!(rig.queue.inflight(), 2);
    assert!(rig.queue.abort(two) && !rig.queue.abort(11 << 32 | 9));
    let ended: Vec<_> = rig.turn().iter().map(|c| (c.token, c.status)).collect();
    assert_eq!(ended, [(two, Status::Aborted)]);
    rig.device.disk.lock().stuck = false;
    let ended = rig.finish();
    assert_eq!((ended[0].token, ended[0].status), (one, Status::Ok));

    assert_eq!(rig.layer.stats().snapshot().op(Op::Read).ops, 0);
    let start = Nanos(rig.now.0 - 70);
    rig.queue.count_read(1, Status::Ok, Some(start));
    let stats = rig.layer.stats().snapshot();
    let read_stats = stats.op(Op::Read);
    assert_eq!((read_stats.ops, read_stats.bytes), (1, BLOCK as u64));
    assert_eq!(read_stats.latency_max_ns, 70);
    rig.layer.set_gone();
    let late = read(&rig, one, 0, 1);
    assert!(rig.queue.pass_read(late).is_err());
}

/// A pool that is too small causes an error that names the required size.
#[test]
fn no_memory_to_emulate() {
    let layer = Layer::new(Arc::new(LimitedDevice::new(0)));
    for classes in [
        &[][..],
        &[ClassSpec {
            size: 4096,
            count: 1,
        }],
    ] {
        let error = layer
            .open_queue(&Pool::heap(classes))
            .err()
            .expect("too small");
        assert!(error.to_string().contains("reserve 2 buffers"), "{error}");
    }
    // The reserve suffices, even if the pool has no other free buffer.
    let pool = Pool::heap(&[ClassSpec {
        size: 4096,
        count: 3,
    }]);
    let mut queue = layer.open_queue(&pool).expect("two buffers suffice");
    let (io, other) = (
        Io::new(1, Op::Copy, 0, 50).source(500),
        Io::new(2, Op::Copy, 100, 50).source(600),
    );
    let _taken = pool.acquire(512).expect("the last one");
    queue.submit(io).expect("room");
    queue.submit(other).expect("room");
    let mut done = Done::with_capacity(4);
    for _ in 0..10_000 {
        queue.poll(Nanos(1), &mut done);
    }
    let ended: Vec<_> = done.drain().map(|c| (c.token, c.status)).collect();
    assert_eq!(ended.len(), 2);
    assert!(ended.iter().all(|(_, status)| status.is_ok()));
}

/// All devices of a core together reserve no more memory than one device, and all can use it.
#[test]
fn memory_to_emulate_is_shared_by_the_devices_of_a_core() {
    let pool = Pool::heap(&[ClassSpec {
        size: 64 << 10,
        count: 4,
    }]);
    let layers: Vec<_> = (0..100)
        .map(|seed| Layer::new(Arc::new(LimitedDevice::new(seed))))
        .collect();
    let open = |layer: &Arc<Layer>| layer.open_queue(&pool).expect("opens");
    let mut queues: Vec<LayerQueue> = layers.iter().map(open).collect();
    assert_eq!(pool.stats()[0].free, 2);
    let taken: Vec<Buf> = std::iter::from_fn(|| pool.acquire(BLOCK)).collect();
    for queue in &mut queues {
        let copy = Io::new(1, Op::Copy, 0, 50).source(500);
        queue.submit(copy).expect("room");
        queue
            .submit(Io::new(2, Op::WriteZeroes, 100, 50))
            .expect("room");
    }
    let mut done = Done::with_capacity(200);
    for _ in 0..10_000 {
        for queue in &mut queues {
            queue.poll(Nanos(1), &mut done);
        }
    }
    assert_eq!(done.len(), 200);
    assert!(done.drain().all(|c| c.status.is_ok()));
    // Closing the last queue returns the reserve.
    let last = queues.pop();
    drop((queues, taken));
    assert_eq!(pool.stats()[0].free, 2);
    drop(last);
    assert_eq!(pool.stats()[0].free, 4);
    assert!(layers[0].open_queue(&pool).is_ok());
}

/// The layer executes every operation that it announces.
#[test]
fn announced_limits() {
    let rig = Rig::new(LimitedDevice::new(0));
    let supports = Op::ALL.map(|op| rig.layer.supports(op));
    let (native, emulated, no) = (Support::Native, Support::Emulated, Support::No);
    assert_eq!(
        supports,
        [
            native, native, native, no, emulated, emulated, emulated, emulated, emulated
        ]
    );
    let limits = rig.layer.limits();
    assert_eq!((limits.max_blocks, limits.queue_depth), (u32::MAX, 4));
}

/// The layer does not announce a size as atomic if it may have to split it, even if the module
/// writes it atomically.
#[test]
fn split_sizes_are_not_atomic() {
    for (max_blocks, boundary, atomic) in [(64, 0, 16), (4, 0, 4), (64, 32, 1), (64, 8, 1)] {
        let mut device = LimitedDevice::new(0);
        device.limits.atomic_blocks = 16;
        device.limits.max_blocks = max_blocks;
        device.limits.optimal_boundary_blocks = boundary;
        let limits = Rig::new(device).layer.limits();
        assert_eq!(limits.atomic_blocks, atomic, "{max_blocks} {boundary}");
    }
}

/// A native compare-and-write has the module's limit and no more than one request; an emulated one
/// has the layer's limit. A larger one is not begun.
#[test]
fn compare_and_write_units() {
    let natively = [Op::Read, Op::Write, Op::Flush, Op::CompareAndWrite];
    for (native, own, max_blocks, blocks) in [
        (&natively[..], 2, 16, 2),
        (&natively[..], 32, 16, 16),
        (&natively[..], 0, 16, 1),
        (&natively[..3], 2, 3, 128),
        (&natively[..1], 2, 3, 0),
    ] {
        let mut device = LimitedDevice::new(0);
        device.native = native.to_vec();
        device.limits.compare_and_write_blocks = own;
        device.limits.max_blocks = max_blocks;
        let rig = Rig::new(device);
        assert_eq!(rig.layer.limits().compare_and_write_blocks, blocks);
        let data = rig.pool.acquire(BLOCK * (blocks as usize + 1)).unwrap();
        let io = Io::new(1, Op::CompareAndWrite, 0, blocks + 1);
        let shape = Shape::of(&**rig.layer.module());
        let plan = shape.plan(&io.with(data.clone()).with(data), BLOCKS);
        assert_eq!(plan, Plan::Now(Status::Unsupported), "{own} {max_blocks}");
    }
}

/// Goal: no view of memory crosses a boundary, and a module without zero-copy reads gets no read
/// without buffers.
#[test]
fn zero_copy_reads_stay_within_the_limits_of_the_module() {
    let mut device = LimitedDevice::new(0);
    device.limits.zero_copy_blocks = 8;
    device.limits.max_blocks = 4;
    device.limits.optimal_boundary_blocks = 0;
    let read = |blocks| Io::new(1, Op::Read, 0, blocks);
    let refused = Plan::Now(Status::Unsupported);
    let shape = Shape::of(&device);
    assert_eq!(shape.plan(&read(4), BLOCKS), Plan::Direct);
    assert_eq!(shape.plan(&read(5), BLOCKS), refused);
    device.limits.optimal_boundary_blocks = 16;
    assert_eq!(Shape::of(&device).plan(&read(1), BLOCKS), refused);
}

proptest! {
    /// Pieces cover a range exactly. Each is within the module's limits, from the first or the last
    /// block.
    #[test]
    fn pieces_cover(lba in 0..BLOCKS, blocks in 1u32..400, max in 1u32..40, boundary in 0u32..40) {
        let mut device = LimitedDevice::new(0);
        device.limits.max_blocks = max;
        device.limits.optimal_boundary_blocks = boundary;
        let shape = Shape::of(&device);
        let fits = |from: u64, len: u32| {
            let boundary = u64::from(boundary);
            let last = from + u64::from(len) - 1;
            len >= 1 && len <= max && (boundary == 0 || from / boundary == last / boundary)
        };
        let mut left = blocks;
        while left > 0 {
            let from = lba + u64::from(blocks - left);
            let piece = shape.piece(Op::Read, from, left);
            prop_assert!(piece <= left && fits(from, piece));
            left -= piece;
        }
        let mut left = blocks;
        while left > 0 {
            let end = lba + u64::from(left);
            let piece = shape.piece_before(end, left);
            prop_assert!(piece <= left && fits(end - u64::from(piece), piece));
            left -= piece;
        }
    }

    /// An I/O of any shape is either refused for a valid reason, or can be executed.
    #[test]
    fn plan_checks_everything(op in 0..Op::COUNT, lba in 0u64..2 * BLOCKS, blocks in 0u32..40, source in 0u64..2 * BLOCKS, given in 0usize..3) {
        let shape = Shape::of(&LimitedDevice::new(0));
        let op = Op::ALL[op];
        let pool = Pool::heap(&[ClassSpec { size: 64 * BLOCK, count: 2 }]);
        let mut io = Io::new(1, op, lba, blocks).source(source);
        for _ in 0..given {
            io.data.push(pool.acquire(blocks as usize * BLOCK).expect("two"));
        }
        let inside = |from: u64| from + u64::from(blocks) <= BLOCKS;
        let wanted = usize::from(op.data_len(1) > 0) + usize::from(op == Op::CompareAndWrite);
        match shape.plan(&io, BLOCKS) {
            Plan::Now(Status::OutOfRange) => prop_assert!(!inside(lba) || (op == Op::Copy && !inside(source))),
            Plan::Now(Status::Unsupported) => prop_assert!(op == Op::Unmap || given != wanted),
            Plan::Now(status) => prop_assert!(status == Status::Ok && blocks == 0),
            Plan::Direct | Plan::Job(_) => {
                prop_assert!(op == Op::Flush || (inside(lba) && (wanted == 0 || given == wanted)));
            }
        }
    }
}
