//! Tests of arenas on this machine and on simulated ones.

use parking_lot::Mutex;

use super::*;
use crate::pages::{GIB, HugepagePolicy, MIB};
use crate::register::{HookError, RegionId};
use crate::system::{Memlock, NodePages};

fn facts(memlock: Option<u64>, huge_free: u64) -> Facts {
    let pool = |size, free| NodePages {
        node: None,
        size,
        total: free,
        free,
        reserved: 0,
        surplus: 0,
        overcommit: 0,
    };
    Facts {
        pools: vec![pool(2 * MIB, huge_free), pool(GIB, 0)],
        node_pools: Vec::new(),
        nodes: vec![0],
        default_size: Some(2 * MIB),
        cgroup: Vec::new(),
        cgroup_memory: None,
        transparent: true,
        memlock: Memlock {
            limit: memlock,
            locked: 0,
        },
        address_space: None,
        strict_commit: false,
        available: GIB,
    }
}

fn allocate_on(options: ArenaOptions, facts: &Facts) -> Result<(Mapping, ArenaReport), ArenaError> {
    allocate_with(&options, Purpose::Dma, facts, &|| facts.clone())
}

/// Goal: an arena comes up on any machine, every page of it is writable, and its report line is
/// complete. Method: the machine that runs the test.
#[test]
fn an_arena_is_allocated_on_this_machine() {
    let arena = Arena::allocate(ArenaOptions::new(5 * MIB + 1)).unwrap();
    let report = arena.report();
    assert!(arena.len() as u64 > 5 * MIB && arena.len() as u64 == report.bytes);
    let text = report.to_string();
    assert!(
        !text.contains('\n') && text.contains("locked") && text.contains("any node"),
        "{text}"
    );
    assert!(
        report.pages < PageKind::Transparent || text.contains("remedy"),
        "{text}"
    );

    let slice = arena.carve(arena.len()).unwrap();
    let pool = crate::Pool::on_slice(
        slice,
        &[crate::ClassSpec {
            size: 4096,
            count: 1281,
        }],
    )
    .unwrap();
    let mut held = Vec::new();
    while let Some(mut buf) = pool.acquire(4096) {
        assert!(buf.iter().all(|&b| b == 0), "memory begins as zero");
        buf.bytes_mut().unwrap().fill(1);
        held.push(buf);
    }
    assert_eq!(held.len(), 1281);
}

/// Goal: if the kernel provides fewer pages than it reports, the next kind is taken and the reason
/// is kept. Method: facts that report unlimited 2 MiB pages, and a request for four terabytes.
#[test]
fn fewer_pages_than_reported_select_the_next_kind() {
    let options = ArenaOptions {
        hugepages: HugepagePolicy::TwoMiB,
        ..ArenaOptions::new(4 << 40)
    };
    let error = allocate_on(options, &facts(None, u64::MAX / 4)).unwrap_err();
    assert!(
        matches!(
            error,
            ArenaError::NotEnoughPages {
                asked: 2_097_152,
                ..
            }
        ),
        "{error}"
    );
}

/// Goal: without permission to lock memory, an arena is still allocated and reports the reason and
/// the remedy. With `require_lock` the allocation fails with that error. Method: a limit of 64 KiB
/// in the facts.
#[test]
fn without_permission_to_lock() {
    let poor = facts(Some(64 << 10), 0);
    let (mapping, report) = allocate_on(ArenaOptions::new(4 * MIB), &poor).unwrap();
    assert_eq!((mapping.len() as u64, report.locked), (4 * MIB, false));
    assert_eq!(
        report.to_string(),
        "4 MiB on transparent 2 MiB pages, any node, not locked; \
         not enough 2 MiB pages: 2 asked, 0 free of 0; remedy: `sudo sysctl -w vm.nr_hugepages=2`; \
         RLIMIT_MEMLOCK too low: 4 MiB asked, 64 KiB allowed and 0 B of it in use; \
         remedy: `ulimit -l 4096` as root, or `LimitMEMLOCK=4194304` in the systemd unit"
    );
    let insisting = ArenaOptions {
        require_lock: true,
        ..ArenaOptions::new(4 * MIB)
    };
    let error = allocate_on(insisting, &poor).unwrap_err();
    assert!(
        matches!(
            error,
            ArenaError::Memlock {
                asked: 4_194_304,
                limit: 65536,
                ..
            }
        ),
        "{error}"
    );
}

/// Goal: an unlocked arena is populated if requested, and otherwise stays untouched.
#[test]
fn populating_does_not_depend_on_locking() {
    let poor = facts(Some(0), 0);
    for populate in [true, false] {
        let options = ArenaOptions {
            populate,
            hugepages: HugepagePolicy::Off,
            ..ArenaOptions::new(2 * MIB)
        };
        let (mapping, _) = allocate_on(options, &poor).unwrap();
        let taken = mapping.resident() == mapping.len() / base_page_size();
        assert_eq!((taken, mapping.resident() == 0), (populate, !populate));
    }
}

/// Goal: an arena does not report missing pages of a worse kind; reports are sorted best first.
#[test]
fn only_missing_better_pages_are_reported() {
    let reasons = |got| {
        let lacking = [PageKind::Transparent, PageKind::OneGiB, PageKind::TwoMiB];
        let lacking = lacking.map(|kind| (kind, ArenaError::TooLarge { asked: kind.size() }));
        better_kinds_missing(lacking.into(), got)
            .map(|e| e.to_string())
            .collect::<Vec<_>>()
    };
    let text = |size| ArenaError::TooLarge { asked: size }.to_string();
    assert_eq!(reasons(PageKind::OneGiB), Vec::<String>::new());
    assert_eq!(reasons(PageKind::TwoMiB), [text(GIB)]);
    assert_eq!(reasons(PageKind::Transparent), [text(GIB), text(2 * MIB)]);
}

/// Goal: the report names the node, and whether it was strict or preferred.
#[test]
fn the_line_names_the_node() {
    let report = |pages, node| {
        ArenaReport {
            pages,
            bytes: GIB,
            node,
            locked: true,
            shortages: Vec::new(),
        }
        .to_string()
    };
    assert_eq!(
        report(PageKind::OneGiB, Some(1)),
        "1 GiB on 1 GiB pages, node 1, locked"
    );
    assert_eq!(
        report(PageKind::Transparent, Some(0)),
        "1 GiB on transparent 2 MiB pages, node 0 preferred, locked"
    );
}

/// Goal: slices never overlap or exceed the arena, and the error reports the remainder. Method:
/// carve from several threads.
#[test]
fn carving_is_exclusive() {
    let arena = testing::untouched(64 * SLICE_ALIGN);
    let carve = || {
        let slices: Vec<ArenaSlice> = std::iter::from_fn(|| arena.carve(1).ok()).collect();
        slices
    };
    let mut starts: Vec<usize> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(carve)).collect();
        threads
            .into_iter()
            .flat_map(|t| t.join().unwrap())
            .map(|s| s.base.addr().get())
            .collect()
    });
    starts.sort_unstable();
    assert_eq!(starts.len(), 64);
    assert!(starts.windows(2).all(|w| w[1] - w[0] == SLICE_ALIGN));
    assert_eq!(
        arena.carve(5).unwrap_err(),
        CarveError { asked: 5, there: 0 }
    );
    assert_eq!(arena.carve(usize::MAX).unwrap_err().there, 0);
    assert!(arena.carve(0).unwrap().is_empty());
}

/// A device that records registrations, and refuses one region.
#[derive(Default)]
struct Device {
    known: Mutex<Vec<RegionId>>,
    refuses: Option<RegionId>,
}

impl RegisterHook for Device {
    fn register(&self, region: &RegionInfo) -> Result<u64, HookError> {
        if self.refuses == Some(region.id) {
            return Err("no".into());
        }
        self.known.lock().push(region.id);
        Ok(7)
    }

    fn unregister(&self, region: &RegionInfo, _: u64) {
        self.known.lock().retain(|&id| id != region.id);
    }
}

/// Goal: a device is registered with all arenas under one slot, or with none if one fails. The
/// device unregisters before the memory is unmapped, which happens when the last slice is dropped.
#[test]
fn registration_spans_arenas_and_ends_with_the_memory() {
    let arenas = [testing::untouched(4096), testing::untouched(4096)];
    let first: Arc<Device> = Arc::default();
    let hook = |device: &Arc<Device>| Arc::clone(device) as Arc<dyn RegisterHook>;
    arenas[1].register(0, hook(&first)).unwrap();
    assert_eq!(
        register_all(&arenas, &hook(&first)).unwrap(),
        1,
        "slot 0 is taken on one of them"
    );
    assert_eq!(first.known.lock().len(), 3);

    let refuses = Some(arenas[1].regions()[0].id);
    let picky = Arc::new(Device {
        refuses,
        ..Device::default()
    });
    assert!(matches!(
        register_all(&arenas, &hook(&picky)),
        Err(RegisterError::Device { .. })
    ));
    assert!(picky.known.lock().is_empty());

    for slot in 2..DEVICE_SLOTS {
        arenas[0]
            .register(slot, Arc::new(Device::default()))
            .unwrap();
    }
    assert!(matches!(
        register_all(&arenas, &hook(&picky)),
        Err(RegisterError::NoFreeSlot)
    ));

    let slice = arenas[0].carve(4096).unwrap();
    drop(arenas);
    assert_eq!(first.known.lock().len(), 1, "the slice keeps its arena");
    drop(slice);
    assert!(first.known.lock().is_empty());
}
