//! Tests of shared memory: copies, release, lending, and concurrent use.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::register::HookError;

struct Device;

impl RegisterHook for Device {
    fn register(&self, _: &RegionInfo) -> Result<u64, HookError> {
        Ok(3)
    }
    fn unregister(&self, _: &RegionInfo, _: u64) {}
}

fn shared(bytes: u64) -> Arc<Shared> {
    Arc::new(Shared::allocate(bytes, HugepagePolicy::Auto).unwrap())
}

fn bytes(shared: &Shared, offset: usize, len: usize) -> Vec<u8> {
    let mut into = vec![0xee; len];
    shared.read(offset, &mut into);
    into
}

/// Goal: each operation changes its range only. Method: a pattern around the range.
#[test]
fn operations_keep_to_their_range() {
    let disk = shared(100_000);
    assert_eq!(disk.len(), 100_000, "not rounded up");
    assert!(bytes(&disk, 0, 100_000).iter().all(|&b| b == 0));

    let pattern: Vec<u8> = (0..100_000u32).map(|i| (i % 251) as u8 + 1).collect();
    disk.write(0, &pattern);
    assert!(disk.compare(0, &pattern));
    assert_eq!(bytes(&disk, 4095, 3), pattern[4095..4098]);

    disk.zero(10, 20);
    assert_eq!(
        bytes(&disk, 9, 22),
        [&pattern[9..10], &[0; 20], &pattern[30..31]].concat()
    );
    assert!(!disk.compare(0, &pattern));

    disk.write(0, &pattern);
    disk.copy_within(0, 5, 100);
    assert_eq!(
        bytes(&disk, 0, 106),
        [&pattern[..5], &pattern[..100], &pattern[105..106]].concat()
    );
}

/// Goal: large writes, through or past the caches, write every byte of the range and no other.
/// Method: lengths and offsets around the limit for bypassing.
#[test]
fn large_writes_keep_to_their_range() {
    let source: Vec<u8> = (0..20_000u32).map(|i| (i % 251) as u8 + 1).collect();
    for past_caches in [false, true] {
        let mut disk = Shared::allocate(64 << 10, HugepagePolicy::Auto).unwrap();
        disk.past_caches = past_caches;
        for offset in [0, 64, 100, 512, 4096, 4096 + 32] {
            for len in [4095, 4096, 4097, 4352, 8192, 12_000, 16 << 10] {
                for from in [0, 1, 72] {
                    disk.zero(0, 64 << 10);
                    disk.write(offset, &source[from..from + len]);
                    assert!(disk.compare(offset, &source[from..from + len]));
                    let after = bytes(&disk, offset + len, 512);
                    let before = bytes(&disk, 0, offset);
                    assert!(
                        before.iter().chain(&after).all(|&b| b == 0),
                        "{len} bytes at {offset}, past the caches: {past_caches}"
                    );
                }
            }
        }
    }
}

/// Goal: memory that fits into the caches is written through them, larger memory is not. Method: a
/// size on each side of this machine's caches.
#[test]
fn memory_that_fits_the_caches_is_written_through_them() {
    let past_caches = |bytes| shared(bytes).past_caches;
    match System::real().last_level_cache() {
        Some(cache) => assert_eq!([cache, cache + 1].map(past_caches), [false, true]),
        // A machine that reports no cache counts as one with smaller caches than any disk.
        None => assert!(past_caches(64 << 10)),
    }
}

/// Goal: discarded bytes read as zero at any alignment, and large ranges are released to the
/// system.
#[test]
fn discarded_memory_reads_zero_and_is_released() {
    let disk = shared(4 << 20);
    let full = vec![0xabu8; 4 << 20];
    for (offset, len) in [
        (0, 4 << 20),
        (1, 100),
        (4095, 300_000),
        (1 << 20, 2 << 20),
        (5, 0),
    ] {
        disk.write(0, &full);
        disk.discard(offset, len);
        assert!(
            bytes(&disk, offset, len).iter().all(|&b| b == 0),
            "{offset}+{len}"
        );
        assert!(
            disk.compare(0, &full[..offset]) && disk.compare(offset + len, &full[offset + len..])
        );
    }
    disk.write(0, &full);
    assert_eq!(disk.mapping.resident(), (4 << 20) / base_page_size());
    disk.discard(0, 4 << 20);
    assert_eq!(disk.mapping.resident(), 0);
}

/// Goal: memory that was read first is still populated with huge pages, if there are any. Method:
/// count the faults of writes to every page, with and without reading first.
#[test]
fn a_write_after_a_read_still_uses_huge_pages() {
    const LEN: usize = 16 << 20;
    let page = base_page_size();
    // Reads minflt of this thread (proc_pid_stat(5)).
    let faults = || {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let after_name = stat.rsplit(')').next().unwrap();
        after_name
            .split_whitespace()
            .nth(7)
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    let write_all = |disk: &Shared| {
        let before = faults();
        for at in (0..LEN).step_by(page) {
            disk.write(at, &[7; 16]);
        }
        faults() - before
    };
    let fresh = write_all(&shared(LEN as u64));
    let disk = shared(LEN as u64);
    assert!(bytes(&disk, 0, LEN).iter().all(|&b| b == 0));
    let read_first = write_all(&disk);
    assert!(
        read_first <= fresh + 16,
        "{read_first} faults after reading, {fresh} without"
    );
    for at in (0..LEN).step_by(page) {
        assert!(disk.compare(at, &[7; 16]) && disk.compare(at + 16, &[0; 16]));
    }
}

/// Goal: populating never replaces a page that another core has just written. Method: threads write
/// to different parts of the same untouched memory at once, while another reads all over it.
#[test]
fn first_writes_of_several_cores_are_all_kept() {
    const LEN: usize = 32 << 20;
    const WRITERS: usize = 4;
    for _ in 0..4 {
        let disk = shared(LEN as u64);
        let start = std::sync::Barrier::new(WRITERS + 1);
        std::thread::scope(|scope| {
            for writer in 0..WRITERS {
                let (disk, start) = (&disk, &start);
                scope.spawn(move || {
                    start.wait();
                    for at in (0..LEN).step_by(64 << 10) {
                        disk.write(at + writer * 4096, &[writer as u8 + 1; 4096]);
                    }
                });
            }
            start.wait();
            for at in (0..LEN).step_by(4096) {
                disk.read(at, &mut [0; 8]);
            }
        });
        for at in (0..LEN).step_by(64 << 10) {
            for writer in 0..WRITERS {
                assert!(disk.compare(at + writer * 4096, &[writer as u8 + 1; 4096]));
            }
        }
    }
}

/// Goal: zeroing leaves unwritten parts unpopulated and clears written parts.
#[test]
fn zeroing_populates_no_memory() {
    let disk = shared(8 << 20);
    if disk.taken.is_none() {
        eprintln!("skipped: no transparent huge pages here");
        return;
    }
    disk.zero(0, 8 << 20);
    assert_eq!(disk.mapping.resident(), 0);
    disk.write(3 << 20, &[1; 100]);
    disk.zero(0, 8 << 20);
    assert!(disk.mapping.resident() <= (2 << 20) / base_page_size());
    assert!(bytes(&disk, 0, 8 << 20).iter().all(|&b| b == 0));

    // A device may have written anywhere.
    let disk = shared(8 << 20);
    disk.register(0, Arc::new(Device)).unwrap();
    assert_eq!(disk.taken.as_ref().unwrap().written(0..8 << 20).count(), 4);
}

/// Goal: a device and the CPU keep seeing the same memory. Method: after a registration, discarding
/// leaves the pages resident.
#[test]
fn registered_memory_stays_resident() {
    let disk = Shared::allocate(1 << 20, HugepagePolicy::Off).unwrap();
    let disk = Arc::new(disk);
    disk.write(0, &[1; 1 << 20]);
    assert_eq!(disk.on_core().view(512, 512).key(0), None);
    disk.register(0, Arc::new(Device)).unwrap();
    assert_eq!(disk.on_core().view(512, 512).key(0), Some((3, 512)));
    disk.unregister(0);
    assert_eq!(disk.on_core().view(512, 512).key(0), None);

    disk.discard(0, 1 << 20);
    assert!(bytes(&disk, 0, 1 << 20).iter().all(|&b| b == 0));
    assert_eq!(disk.mapping.resident(), (1 << 20) / base_page_size());
}

/// Goal: every operation catches a range outside the memory, without wrap-around. Method: just past
/// the end, and at usize::MAX.
#[test]
fn ranges_outside_panic() {
    let disk = shared(4096);
    let whole = disk.on_core().view(0, 4096);
    let caught = |f: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err();
    for offset in [4096, usize::MAX] {
        assert!(caught(&|| disk.read(offset, &mut [0; 1])));
        assert!(caught(&|| disk.write(offset, &[0; 1])));
        assert!(caught(&|| disk.zero(offset, 1)));
        assert!(caught(&|| disk.discard(offset, 1)));
        assert!(caught(&|| disk.copy_within(0, offset, 1)));
        assert!(caught(&|| disk.copy_within(offset, 0, 1)));
        assert!(caught(&|| assert!(disk.compare(offset, &[0]))));
        assert!(caught(&|| drop(disk.on_core().view(offset, 1))));
        assert!(caught(&|| drop(whole.slice(offset, 1))));
        assert!(caught(&|| whole.read(offset, &mut [0; 1])));
    }
    let part = disk.on_core().view(0, 100);
    assert!(
        caught(&|| drop(part.slice(50, 51))),
        "a slice cannot exceed its part"
    );
    disk.zero(4096, 0);
}

/// Goal: a vectored write sends the bytes of a view, which keeps the memory after the disk is
/// dropped.
#[test]
fn a_view_is_sent_without_a_copy() {
    let disk = shared(8192);
    disk.write(4000, b"from where they are");
    let zero_copy = disk.on_core().view(4000, 19).slice(5, 10);
    drop(disk);
    let mut file = tempfile::tempfile().unwrap();
    let sent = file
        .write_vectored(&[
            IoSlice::new(b"<"),
            zero_copy.as_io_slice(),
            IoSlice::new(b">"),
        ])
        .unwrap();
    assert_eq!(sent, 12);
    let mut back = [0; 12];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut back, 0).unwrap();
    assert_eq!(&back, b"<where they>");
    let mut copy = [0; 4];
    zero_copy.read(6, &mut copy);
    assert_eq!(&copy, b"they");
}

/// Goal: with several cores, each sees its own ranges exactly, and a contended range contains only
/// bytes that a writer wrote. Method: two writers on disjoint blocks and on one common block, while
/// a third discards and reads.
#[test]
fn concurrent_access_from_several_cores() {
    const BLOCK: usize = 4096;
    let disk = shared(256 * BLOCK as u64);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = [1u8, 2]
            .into_iter()
            .map(|id| {
                let disk = &disk;
                scope.spawn(move || {
                    let mut into = [0; BLOCK];
                    for round in 0..2000usize {
                        let value = id + 2 * (round % 100) as u8;
                        // Even blocks from 2 belong to one thread, odd blocks to the other, block 0
                        // to both.
                        let own = round % 100 * 2 + id as usize;
                        disk.write(own * BLOCK, &[value; BLOCK]);
                        disk.write(0, &[value; BLOCK]);
                        disk.read(own * BLOCK, &mut into);
                        assert_eq!(into, [value; BLOCK]);
                        assert!(disk.compare(own * BLOCK, &[value; BLOCK]));
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            let mut into = [0; BLOCK];
            while !stop.load(Ordering::Relaxed) {
                disk.discard(220 * BLOCK, 32 * BLOCK);
                disk.read(0, &mut into);
                assert!(
                    into.iter().all(|&b| b <= 200),
                    "a byte that no thread wrote"
                );
            }
        });
        // The third thread ends also if a writer panicked.
        let ended: Vec<_> = writers.into_iter().map(|w| w.join()).collect();
        stop.store(true, Ordering::Relaxed);
        ended.into_iter().for_each(|result| result.unwrap());
    });
}

/// Goal: a policy that requires hugetlb pages gets them or the named error, nothing else.
#[test]
fn requiring_hugetlb_pages() {
    match Shared::allocate(2 << 20, HugepagePolicy::TwoMiB) {
        Ok(disk) => {
            assert_eq!(disk.report().pages, PageKind::TwoMiB);
            disk.write(0, &[1; 1 << 20]);
            disk.discard(0, 1 << 20);
            assert!(bytes(&disk, 0, 1 << 20).iter().all(|&b| b == 0));
        }
        Err(error) => assert!(error.to_string().contains("2 MiB"), "{error}"),
    }
}

/// Goal: a thread that reads a dword sees everything that was written before the dword was stored.
/// Method: a second thread checks the data that belongs to each number.
#[test]
fn a_dword_publishes_earlier_writes() {
    let shared = Arc::new(Shared::allocate(8192, HugepagePolicy::Off).unwrap());
    let writer = Arc::clone(&shared);
    let writing = std::thread::spawn(move || {
        for number in 1..=20_000_u32 {
            writer.write(
                4096 + (number as usize % 256) * 8,
                &u64::from(number).to_le_bytes(),
            );
            writer.store(64, number);
        }
    });
    let mut seen = 0;
    while seen < 20_000 {
        let number = shared.load(64);
        assert!(number >= seen, "{number} after {seen}");
        if number > 0 {
            let mut of = [0; 8];
            shared.read(4096 + (number as usize % 256) * 8, &mut of);
            // The writer may be ahead by some rounds, never behind.
            assert!(u64::from_le_bytes(of) >= u64::from(number));
        }
        seen = number;
    }
    writing.join().unwrap();
}

#[test]
#[should_panic(expected = "is not aligned")]
fn a_dword_is_aligned() {
    Shared::allocate(4096, HugepagePolicy::Off).unwrap().load(2);
}
