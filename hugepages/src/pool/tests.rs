//! Tests of pools and buffers: sharing, writing and returning.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::register::{HookError, RegisterHook};
use crate::{ArenaOptions, HugepagePolicy};

fn one_buffer() -> (Pool, Buf) {
    let pool = Pool::heap(&[ClassSpec {
        size: 4096,
        count: 1,
    }]);
    let buf = pool.acquire(4096).expect("the pool is full");
    (pool, buf)
}

fn small_arena(bytes: u64) -> Arena {
    let options = ArenaOptions {
        hugepages: HugepagePolicy::Off,
        populate: false,
        ..ArenaOptions::new(bytes)
    };
    Arena::allocate(options).expect("a few plain pages")
}

/// Goal: parts that share no byte are written independently and can be rejoined.
#[test]
fn split_parts_are_writable_and_rejoin() {
    let (pool, mut head) = one_buffer();
    let mut tail = head.split_off(1024);
    let last = tail.split_off(1024);
    head.bytes_mut().expect("no overlap").fill(1);
    tail.bytes_mut().expect("no overlap").fill(2);
    let last = head.unsplit(last).expect_err("does not adjoin");
    assert_eq!(last.len(), 2048);
    head.unsplit(tail).expect("adjoins");
    head.unsplit(last).expect("adjoins");

    assert_eq!(pool.stats()[0].free, 0);
    assert!(head.bytes_mut().is_some());
    drop(head);
    assert_eq!(pool.stats()[0].free, 1);
}

/// Goal: a clone of a part makes every handle read-only until one handle is left.
#[test]
fn overlap_is_read_only() {
    let (_pool, mut head) = one_buffer();
    let mut tail = head.split_off(512);
    let shared = tail.clone();
    assert!(tail.bytes_mut().is_none() && head.bytes_mut().is_none());
    drop(head);
    assert!(tail.bytes_mut().is_none());
    drop(shared);
    assert!(tail.bytes_mut().is_some());
}

/// Goal: an exchange takes the buffer that was returned last and returns the other, whatever part
/// the handle covers. It does nothing for a shared buffer, or if no buffer is free.
#[test]
fn exchange_takes_the_buffer_returned_last() {
    let spec = |size, count| ClassSpec { size, count };
    let pool = Pool::heap(&[spec(512, 4), spec(4096, 3)]);
    let acquire = || pool.acquire(4000).expect("a buffer");
    let (mut waiting, used) = (acquire(), acquire());
    let (cold, warm) = (waiting.as_ptr(), used.as_ptr());
    drop(used);
    drop(pool.acquire(512));
    waiting.exchange();
    assert_eq!((waiting.as_ptr(), waiting.len()), (warm, 4000));
    assert!(waiting.bytes_mut().is_some());
    assert_eq!(pool.stats()[1].free, 2);

    let clone = waiting.clone();
    waiting.exchange();
    assert_eq!(waiting.as_ptr(), warm, "shared");
    drop(clone);
    let other = waiting.split_off(2048);
    waiting.exchange();
    assert_eq!(waiting.as_ptr(), warm, "split");
    waiting.unsplit(other).expect("adjoins");

    let (second, third) = (acquire(), acquire());
    assert_eq!(second.as_ptr(), cold);
    waiting.exchange();
    assert_eq!(waiting.as_ptr(), warm, "no other is free");
    drop((waiting, second, third));
    assert_eq!(pool.stats()[1].free, 3);
}

/// Goal: exhaustion returns `None` and is counted in the requested class. Method: a larger class
/// serves first, then none is left.
#[test]
fn exhaustion_is_none_and_counted() {
    let pool = Pool::heap(&[
        ClassSpec {
            size: 4096,
            count: 1,
        },
        ClassSpec {
            size: 512,
            count: 2,
        },
    ]);
    let held: Vec<Buf> = (0..3).map_while(|_| pool.acquire(100)).collect();
    let sizes: Vec<(usize, usize)> = held.iter().map(|b| (b.class().size, b.len())).collect();
    assert_eq!(sizes, [(512, 100), (512, 100), (4096, 100)]);
    assert!(
        pool.acquire(1).is_none() && pool.acquire(512).is_none() && pool.acquire(513).is_none()
    );

    let stats = pool.stats();
    assert_eq!(
        stats[0],
        ClassStats {
            size: 512,
            count: 2,
            free: 0,
            low_water: 0,
            acquired: 2,
            exhausted: 2
        }
    );
    assert_eq!(
        stats[1],
        ClassStats {
            size: 4096,
            count: 1,
            free: 0,
            low_water: 0,
            acquired: 1,
            exhausted: 1
        }
    );
    drop(held);
    let free: Vec<usize> = pool.stats().iter().map(|s| s.free).collect();
    assert_eq!(free, [2, 1]);
    assert_eq!(pool.stats()[0].low_water, 0, "the low water mark stays");
    assert!(pool.acquire(pool.max_len() + 1).is_none());
}

/// Goal: buffers outlive their pool and keep its memory. Method: write after the pool is dropped.
#[test]
fn a_buffer_outlives_its_pool_and_arena() {
    let arena = small_arena(1 << 16);
    let pool = Pool::on_arena(
        &arena,
        &[ClassSpec {
            size: 4096,
            count: 2,
        }],
    )
    .unwrap();
    let mut buf = pool.acquire(4096).unwrap();
    drop((pool, arena));
    buf.bytes_mut().unwrap().fill(9);
    assert!(buf.iter().all(|&b| b == 9));
}

/// Goal: `bytes_for` is always enough. No buffer crosses a region boundary, no small buffer crosses
/// a grain boundary, and power-of-two sizes waste nothing. Method: layouts at every distance from
/// the end of a region, mostly of sizes that do not divide it.
#[test]
fn layouts_fit_and_never_cross_regions() {
    let classes = [
        ClassSpec {
            size: 512,
            count: 3,
        },
        ClassSpec {
            size: 135_168,
            count: 300,
        },
        ClassSpec {
            size: 5000,
            count: 7,
        },
        ClassSpec {
            size: 100 << 20,
            count: 23,
        },
        ClassSpec {
            size: 128 << 10,
            count: 400,
        },
        ClassSpec {
            size: 8 << 20,
            count: 9,
        },
    ];
    let enough = Pool::bytes_for(&classes);
    let mut gaps = 0;
    for start in (0..REGION_MAX).step_by(77 * SLICE_ALIGN * 13) {
        let layout = Layout::new(start, &classes);
        assert!(
            layout.end <= enough,
            "start {start}: {} > {enough}",
            layout.end
        );
        let mut before = 0;
        for placed in &layout.classes {
            assert!(placed.offset >= before && placed.offset.is_multiple_of(SLICE_ALIGN));
            before = placed.offset + placed.slots * placed.size;
            gaps += placed.slots - placed.usable.len();
            if placed.size.is_power_of_two() {
                assert_eq!(placed.slots, placed.usable.len());
            }
            let unit = match placed.size {
                0..=0x80_0000 => GRAIN,
                _ => REGION_MAX,
            };
            for &slot in &placed.usable {
                let first = start + placed.offset + slot as usize * placed.size;
                assert_eq!(first / unit, (first + placed.size - 1) / unit);
            }
        }
        assert!(before <= layout.end);
        let counts: Vec<usize> = layout.classes.iter().map(|p| p.usable.len()).collect();
        assert_eq!(counts, [3, 7, 400, 300, 9, 23]);
    }
    assert!(gaps > 0, "no region end was met: the test tests nothing");
}

/// Goal: boundaries waste little: less than two buffers per class plus a hundredth of it.
#[test]
fn grain_ends_waste_little() {
    for size in [4096, 16 << 10, 128 << 10, 135_168, 1 << 20, 8 << 20] {
        for count in [1, 64, 10_000] {
            let (bytes, own) = (Pool::bytes_for(&[ClassSpec { size, count }]), size * count);
            let most = own + own / 100 + 2 * size + SLICE_ALIGN;
            assert!(bytes <= most, "{count} of {size}: {bytes}");
        }
    }
}

/// Goal: a pool across the end of a region has no buffer across it, and each buffer finds its key
/// and its region in the pool. Method: an unpopulated arena of just over 1 GiB.
#[test]
fn buffers_find_their_region_and_key() {
    struct Keys;
    impl RegisterHook for Keys {
        fn register(&self, region: &RegionInfo) -> Result<u64, HookError> {
            Ok(region.as_ptr().addr() as u64 + 1)
        }
        fn unregister(&self, _: &RegionInfo, _: u64) {}
    }

    let arena = crate::arena::testing::untouched(REGION_MAX + (1 << 20));
    let before = arena.carve(REGION_MAX - 8192 - 512).unwrap();
    let classes = [ClassSpec {
        size: 3072,
        count: 8,
    }];
    let pool = Pool::on_arena(&arena, &classes).unwrap();
    arena.register(2, Arc::new(Keys)).unwrap();

    let bufs: Vec<Buf> = std::iter::from_fn(|| pool.acquire(3072)).collect();
    assert_eq!(bufs.len(), 8);
    let parts = pool.regions();
    assert_eq!(parts.len(), 2);
    for buf in &bufs {
        let region = buf.region();
        let addr = buf.as_ptr().addr();
        assert_eq!(addr, region.as_ptr().addr() + buf.region_offset());
        assert!(buf.region_offset() + 3072 <= region.len());
        assert_eq!(buf.key(2), Some(region.as_ptr().addr() as u64 + 1));
        assert_eq!(buf.key(1), None);
        assert_eq!(buf.address(2), Some(addr as u64 + 1));
        assert_eq!(buf.address(1), None);

        let part = parts[pool.region_index(buf).unwrap()];
        assert_eq!(part.id, buf.region_id());
        let start = part.as_ptr().addr();
        assert!(start <= addr && addr + 3072 <= start + part.len());
    }
    assert_eq!(bufs.iter().filter(|b| b.region_index() == 0).count(), 2);
    assert!(
        Pool::heap(&classes).region_index(&bufs[0]).is_none(),
        "another pool's"
    );
    assert_eq!(before.len(), REGION_MAX - 8192);
}

/// Goal: heap pools have one region too, so code for fixed buffers needs no special case.
#[test]
fn heap_pools_have_a_region() {
    let (pool, buf) = one_buffer();
    let [region] = pool.regions()[..] else {
        panic!("one region")
    };
    assert_eq!(pool.region_index(&buf), Some(0));
    assert_eq!(
        region.as_ptr().addr() + buf.region_offset(),
        buf.as_ptr().addr()
    );
    assert!(buf.as_ptr().addr().is_multiple_of(4096));
}

/// Goal: a slice that is too small is an error with the number of available bytes.
#[test]
fn a_slice_too_small_is_an_error() {
    let arena = small_arena(1 << 16);
    let slice = arena.carve(4096).unwrap();
    let error = Pool::on_slice(
        slice,
        &[ClassSpec {
            size: 4096,
            count: 2,
        }],
    )
    .err()
    .unwrap();
    assert_eq!((error.asked, error.there), (8192, 4096));
    let error = Pool::on_arena(
        &arena,
        &[ClassSpec {
            size: 4096,
            count: 1 << 20,
        }],
    )
    .err()
    .unwrap();
    assert_eq!(error.there, (1 << 16) - 4096);
}

/// The oracle's view of a handle: its buffer (by the oracle's own number) and its range.
#[derive(Debug, Clone)]
struct OracleHandle {
    buffer: u64,
    range: std::ops::Range<usize>,
}

#[derive(Debug, Clone)]
enum Op {
    Acquire(usize),
    Clone(usize),
    Slice(usize, usize, usize),
    Split(usize, usize),
    Unsplit(usize, usize),
    Truncate(usize, usize),
    Drop(usize),
    Write(usize, u8),
}

fn op() -> impl Strategy<Value = Op> {
    let n = any::<usize>;
    prop_oneof![
        3 => (0..5000usize).prop_map(Op::Acquire),
        2 => n().prop_map(Op::Clone),
        2 => (n(), n(), n()).prop_map(|(h, a, b)| Op::Slice(h, a, b)),
        2 => (n(), n()).prop_map(|(h, a)| Op::Split(h, a)),
        1 => (n(), n()).prop_map(|(h, o)| Op::Unsplit(h, o)),
        1 => (n(), n()).prop_map(|(h, a)| Op::Truncate(h, a)),
        4 => n().prop_map(Op::Drop),
        4 => (n(), any::<u8>()).prop_map(|(h, v)| Op::Write(h, v)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Goal: no two writable handles share a byte, no handle's bytes change through another, and
    /// dropped buffers return to the pool. Method: random operations against an oracle that tracks
    /// the handles and the expected bytes of each buffer.
    #[test]
    fn pool_against_oracle(ops in proptest::collection::vec(op(), 1..200)) {
        let specs = [ClassSpec { size: 512, count: 3 }, ClassSpec { size: 4096, count: 2 }];
        let pool = Pool::heap(&specs);
        let mut handles: Vec<(Buf, OracleHandle)> = Vec::new();
        let mut contents = std::collections::HashMap::<u64, Vec<u8>>::new();
        let mut next = 0;
        let mut refused = 0;
        for op in ops {
            let live = handles.len();
            match op {
                Op::Acquire(len) => {
                    let used = |class: u32| {
                        let mut ids: Vec<u64> =
                            handles.iter().filter(|(b, _)| b.class == class).map(|(_, k)| k.buffer).collect();
                        ids.sort_unstable();
                        ids.dedup();
                        ids.len()
                    };
                    let class = (0..2).find(|&c| specs[c].size >= len && used(c as u32) < specs[c].count);
                    let got = pool.acquire(len);
                    prop_assert_eq!(got.as_ref().map(|b| b.class as usize), class);
                    let Some(mut buf) = got else {
                        refused += u64::from(len <= 4096);
                        continue;
                    };
                    buf.bytes_mut().expect("a new buffer is not shared").fill(0);
                    contents.insert(next, vec![0; len]);
                    handles.push((buf, OracleHandle { buffer: next, range: 0..len }));
                    next += 1;
                }
                _ if live == 0 => {}
                Op::Clone(h) => {
                    let (buf, known) = &handles[h % live];
                    let pair = (buf.clone(), known.clone());
                    handles.push(pair);
                }
                Op::Slice(h, a, b) => {
                    let (buf, known) = &handles[h % live];
                    let from = a % (buf.len() + 1);
                    let len = b % (buf.len() - from + 1);
                    let start = known.range.start + from;
                    let pair = (buf.slice(from, len), OracleHandle { range: start..start + len, ..known.clone() });
                    handles.push(pair);
                }
                Op::Split(h, a) => {
                    let (buf, known) = &mut handles[h % live];
                    let at = a % (buf.len() + 1);
                    let rest = buf.split_off(at);
                    let middle = known.range.start + at;
                    let other = OracleHandle { range: middle..known.range.end, ..known.clone() };
                    known.range.end = middle;
                    handles.push((rest, other));
                }
                Op::Unsplit(h, o) => {
                    let (other, theirs) = handles.swap_remove(o % live);
                    if live == 1 {
                        handles.push((other, theirs));
                        continue;
                    }
                    let (buf, ours) = &mut handles[h % (live - 1)];
                    let adjoins = ours.buffer == theirs.buffer && ours.range.end == theirs.range.start;
                    match buf.unsplit(other) {
                        Ok(()) => {
                            prop_assert!(adjoins);
                            ours.range.end = theirs.range.end;
                        }
                        Err(other) => {
                            prop_assert!(!adjoins);
                            handles.push((other, theirs));
                        }
                    }
                }
                Op::Truncate(h, a) => {
                    let (buf, known) = &mut handles[h % live];
                    let len = a % 5000;
                    buf.truncate(len);
                    known.range.end = known.range.end.min(known.range.start + len);
                }
                Op::Drop(h) => drop(handles.swap_remove(h % live)),
                Op::Write(h, value) => {
                    let known = handles[h % live].1.clone();
                    let on_it: Vec<&OracleHandle> =
                        handles.iter().map(|(_, k)| k).filter(|k| k.buffer == known.buffer).collect();
                    let overlapping = on_it.iter().enumerate().any(|(i, a)| {
                        on_it[..i].iter().any(|b| {
                            a.range.start.max(b.range.start) < a.range.end.min(b.range.end)
                        })
                    });
                    let alone = on_it.len() == 1;
                    let bytes = handles[h % live].0.bytes_mut();
                    // Overlapping handles must be refused and a sole handle granted; other cases
                    // may be refused.
                    prop_assert!(!(overlapping && bytes.is_some()), "wrote to shared bytes");
                    prop_assert!(!(alone && bytes.is_none()), "refused the only handle");
                    if let Some(bytes) = bytes {
                        bytes.fill(value);
                        contents.get_mut(&known.buffer).unwrap()[known.range].fill(value);
                    }
                }
            }
            for (buf, known) in &handles {
                prop_assert_eq!(&buf[..], &contents[&known.buffer][known.range.clone()]);
            }
        }
        drop(handles);
        let stats = pool.stats();
        prop_assert_eq!(stats.iter().map(|s| s.free).collect::<Vec<_>>(), vec![3, 2]);
        prop_assert_eq!(stats.iter().map(|s| s.exhausted).sum::<u64>(), refused);
    }
}
