//! Tests of the split module: conformance, the bounds of each part, and the layout compared with
//! SPDK's.

use nacre_hugepages::ClassSpec;
use nacre_reactor::Nanos;

use super::*;
use crate::io::{Io, Op, Status};
use crate::malloc::{self, Malloc};
use crate::null;
use crate::queue::Done;
use crate::registry::{Removal, Shrink};
use crate::{LayerQueue, RegistryError};

const BLOCK: usize = 512;
/// Number of blocks of a part in most tests: 1 MiB.
const PART: u64 = 2048;

fn config(count: u32, size_mb: u64) -> Config {
    Config {
        base_bdev: "Base".into(),
        split_count: count,
        split_size_mb: size_mb,
        part_bytes: None,
    }
}

fn base(registry: &Registry, blocks: u64) -> Arc<Malloc> {
    let uuid = "33333333-2222-3333-4444-555555555555";
    let config = serde_json::json!({"name": "Base", "block_size": BLOCK, "num_blocks": blocks, "uuid": uuid});
    let config = serde_json::from_value(config).expect("a complete configuration");
    let device = malloc::create(config).expect("a valid configuration");
    registry
        .register(Arc::clone(&device) as Arc<dyn Bdev>)
        .expect("free");
    device
}

fn pool() -> Pool {
    Pool::heap(&[ClassSpec {
        size: 4096,
        count: 64,
    }])
}

/// Executes one I/O.
fn run(queue: &mut dyn Queue, io: Io) -> (Status, Vec<u8>) {
    queue.submit(io).expect("room");
    let mut done = Done::with_capacity(1);
    while queue.poll(Nanos::ZERO, &mut done) == 0 {}
    let ended = done.drain().next().expect("one completion");
    let bytes = ended.data.iter().flat_map(|buf| buf.to_vec()).collect();
    (ended.status, bytes)
}

fn write(pool: &Pool, lba: u64, byte: u8) -> Io {
    let mut buf = pool.acquire(BLOCK).expect("free");
    buf.bytes_mut().expect("unshared").fill(byte);
    Io::new(1, Op::Write, lba, 1).with(buf)
}

fn read(pool: &Pool, lba: u64) -> Io {
    Io::new(2, Op::Read, lba, 1).with(pool.acquire(BLOCK).expect("free"))
}

#[test]
fn conforms() {
    for part in [0, 2] {
        crate::conformance::run(|| {
            let registry = Registry::new();
            base(&registry, 3 * PART);
            let mut parts = create(&mut config(3, 0), &registry).expect("the base is there");
            parts.swap_remove(part)
        });
    }
}

/// Goal: no operation reaches another part, whatever its range. Method: each part has its own byte
/// in its first and last block; every operation that crosses a bound is refused, also on the
/// module's own queue.
#[test]
fn each_part_has_bounds() {
    let registry = Registry::new();
    base(&registry, 3 * PART);
    let parts = create(&mut config(3, 0), &registry).expect("the base is there");
    let pool = pool();
    let mut queues: Vec<Box<dyn Queue>> = parts
        .iter()
        .map(|part| Bdev::open(Arc::clone(part), &pool).expect("a queue"))
        .collect();
    for (at, queue) in queues.iter_mut().enumerate() {
        for lba in [0, PART - 1] {
            let (status, _) = run(&mut **queue, write(&pool, lba, at as u8 + 1));
            assert_eq!(status, Status::Ok);
        }
    }
    for lba in [PART, PART + 1, u64::MAX] {
        assert_eq!(
            run(&mut *queues[0], write(&pool, lba, 9)).0,
            Status::OutOfRange
        );
        assert_eq!(run(&mut *queues[0], read(&pool, lba)).0, Status::OutOfRange);
        let mut data = write(&pool, lba, 9);
        let at_once = queues[0].run_sync(&mut data, &mut None);
        assert_eq!((at_once, data.lba), (Some(Status::OutOfRange), lba));
    }
    for op in [Op::Unmap, Op::WriteZeroes, Op::Verify] {
        let crossing = Io::new(3, op, PART - 1, 2);
        assert_eq!(
            run(&mut *queues[0], crossing).0,
            Status::OutOfRange,
            "{op:?}"
        );
    }
    let from_next = Io::new(4, Op::Copy, 0, 1).source(PART);
    assert_eq!(run(&mut *queues[0], from_next).0, Status::OutOfRange);
    assert_eq!(
        run(&mut *queues[0], Io::new(5, Op::Flush, 0, 0)).0,
        Status::Ok
    );
    for (at, queue) in queues.iter_mut().enumerate() {
        for lba in [0, PART - 1] {
            let (status, bytes) = run(&mut **queue, read(&pool, lba));
            assert_eq!(status, Status::Ok);
            assert!(bytes.iter().all(|byte| *byte == at as u8 + 1), "part {at}");
        }
    }
}

/// Goal: number and size of the parts are those of SPDK, and divisions that SPDK refuses are
/// refused.
#[test]
fn the_layout_is_that_of_spdk() {
    let registry = Registry::new();
    base(&registry, 5 * PART + 7);
    let layout = |count, size_mb| {
        let made = create(&mut config(count, size_mb), &registry)?;
        Ok::<_, CreateError>((made.len(), made[0].blocks, made[made.len() - 1].offset))
    };
    assert_eq!(
        layout(2, 0).unwrap(),
        (2, (5 * PART + 7) / 2, (5 * PART + 7) / 2)
    );
    assert_eq!(layout(3, 1).unwrap(), (3, PART, 2 * PART));
    assert_eq!(layout(9, 1).unwrap(), (5, PART, 4 * PART), "no more fit");
    for (count, size_mb, at) in [
        (0, 0, "split_count"),
        (u32::MAX, 0, "split_count"),
        (MAX_PARTS + 1, 0, "split_count"),
        (1, 6, "split_size_mb"),
        (1, u64::MAX, "split_size_mb"),
    ] {
        match layout(count, size_mb) {
            Err(CreateError::Parameter { field, .. }) => assert_eq!(field, at, "{count}"),
            other => panic!("{count} parts of {size_mb} MiB: {other:?}"),
        }
    }
    assert!(registry.get("Base").unwrap().claims.is_empty());
    assert_eq!(Part::names(&config(u32::MAX, 0)).len(), MAX_PARTS as usize);
}

/// Goal: a stored division of a base into equal parts gives the same parts on a larger base.
/// Without the stored size, offsets and UUIDs differ: no UUID ever serves other blocks.
#[test]
fn parts_keep_their_offsets_on_a_larger_base() {
    let places = |config: &mut Config, blocks| {
        let registry = Registry::new();
        base(&registry, blocks);
        let made = create(config, &registry).expect("they fit");
        let place = |part: &Arc<Part>| (part.offset, part.blocks, part.uuid);
        made.iter().map(place).collect::<Vec<_>>()
    };
    for (blocks, size_mb, part_bytes) in [
        (3 * PART, 1, None),
        (3 * PART + 3, 0, Some((PART + 1) * BLOCK as u64)),
    ] {
        let mut call = config(3, 0);
        let first = places(&mut call, blocks);
        assert_eq!((call.split_size_mb, call.part_bytes), (size_mb, part_bytes));
        assert_eq!(places(&mut call, 9 * PART), first);
        let moved = places(&mut config(3, 0), 9 * PART);
        for (before, now) in first.iter().zip(moved) {
            assert_ne!(before.2, now.2);
        }
    }
}

/// Goal: a size in bytes must be a multiple of the block size, and excludes other size parameters.
#[test]
fn a_size_in_bytes_is_checked() {
    let registry = Registry::new();
    base(&registry, 5 * PART);
    for (size_mb, bytes) in [(0, 0), (0, 511), (1, 512), (0, 6 * PART * BLOCK as u64)] {
        let mut call = Config {
            part_bytes: Some(bytes),
            ..config(1, size_mb)
        };
        match create(&mut call, &registry) {
            Err(CreateError::Parameter { field, .. }) => assert_eq!(field, "part_bytes"),
            other => panic!("{bytes}: {:?}", other.map(|made| made.len())),
        }
    }
}

/// Goal: only parts that begin at a multiple of the base's units have these units.
#[test]
fn units_apply_to_aligned_parts() {
    let registry = Registry::new();
    let config_of_base = serde_json::json!({"name": "Base", "block_size": 512, "num_blocks": 3 * 2048 + 3,
        "physical_block_size": 4096, "optimal_io_boundary": 2048});
    let device = malloc::create(serde_json::from_value(config_of_base).unwrap()).unwrap();
    registry.register(device).expect("free");
    let of = |mut config: Config| {
        let parts = create(&mut config, &registry).expect("the base is there");
        let unit = |part: &Arc<Part>| {
            let limits = Bdev::limits(&**part);
            let physical = Bdev::geometry(&**part).physical_block_size;
            (physical, limits.optimal_boundary_blocks)
        };
        parts.iter().map(unit).collect::<Vec<_>>()
    };
    assert_eq!(of(config(3, 1)), [(4096, 2048); 3]);
    assert_eq!(of(config(3, 0)), [(4096, 2048), (512, 0), (512, 0)]);
}

/// Goal: the parts exclude other users of the base, until the last part is removed.
#[test]
fn the_base_is_claimed() {
    let registry = Registry::new();
    base(&registry, 3 * PART);
    for part in create(&mut config(3, 0), &registry).expect("the base is there") {
        registry.register(part).expect("free");
    }
    assert!(matches!(
        registry.open("Base", &pool()),
        Err(RegistryError::Claimed { .. })
    ));
    let again = create(&mut config(3, 0), &registry);
    assert!(matches!(
        again,
        Err(CreateError::Registry(RegistryError::Claimed { .. }))
    ));
    for name in ["Basep1", "Basep0", "Basep2"] {
        assert_eq!(registry.get("Base").unwrap().claims.len(), 1);
        let gone = registry.remove(name, Removal::Hot).expect("it is there");
        assert!(gone.is_done());
    }
    assert!(registry.get("Base").unwrap().claims.is_empty());
}

/// Goal: the base may be removed while parts have I/O: all I/O completes, and the parts are
/// removed.
#[test]
fn the_base_is_removed_under_io() {
    let registry = Registry::new();
    base(&registry, 3 * PART);
    for part in create(&mut config(3, 0), &registry).expect("the base is there") {
        registry.register(part).expect("free");
    }
    let pool = pool();
    let mut queues: Vec<LayerQueue> = (0..3)
        .map(|at| {
            registry
                .open(&format!("Basep{at}"), &pool)
                .expect("a queue")
        })
        .collect();
    for queue in &mut queues {
        queue.submit(write(&pool, 7, 1)).expect("room");
    }
    let gone = registry.remove("Base", Removal::Hot).expect("it is there");
    assert!(!gone.is_done(), "queues are open");
    let mut done = Done::with_capacity(4);
    for queue in &mut queues {
        while queue.inflight() > 0 {
            queue.poll(Nanos::ZERO, &mut done);
        }
        assert_eq!(done.drain().count(), 1);
        assert_eq!(run(queue, read(&pool, 7)).0, Status::Gone);
    }
    drop(queues);
    assert!(gone.is_done());
    assert!(registry.list().is_empty());
}

/// Goal: a part keeps its size when the base grows. A smaller base cuts the last parts, and each
/// part notifies its own user.
#[test]
fn the_base_changes_its_size() {
    let registry = Registry::new();
    let device = serde_json::json!({"name": "Base", "block_size": 512, "num_blocks": 3 * PART});
    let device = null::create(serde_json::from_value(device).unwrap()).unwrap();
    registry
        .register(Arc::clone(&device) as Arc<dyn Bdev>)
        .expect("free");
    for part in create(&mut config(3, 0), &registry).expect("the base is there") {
        registry.register(part).expect("free");
    }
    let sizes = || {
        let blocks = |at| {
            registry
                .lookup(&format!("Basep{at}"))
                .unwrap()
                .geometry()
                .blocks
        };
        [0, 1, 2].map(blocks)
    };
    device.resize(9 * PART).unwrap();
    registry.notify_resize("Base").unwrap();
    assert_eq!(sizes(), [PART; 3]);
    device.resize(PART + 5).unwrap();
    registry.take_size("Base", Shrink::Forced).unwrap();
    assert_eq!(sizes(), [PART, 5, 0]);
    device.resize(9 * PART).unwrap();
    registry.notify_resize("Base").unwrap();
    assert_eq!(sizes(), [PART; 3]);
    // Resetting the least size of one part does not affect the others.
    let part = |at| registry.lookup(&format!("Basep{at}")).unwrap();
    assert_eq!((part(1).least_blocks(), part(2).least_blocks()), (5, 0));
    assert_eq!(part(1).forget_least(), 5);
    assert_eq!((part(1).least_blocks(), part(2).least_blocks()), (PART, 0));
    assert_eq!((part(0).least_blocks(), part(0).losses()), (PART, 1));
}
