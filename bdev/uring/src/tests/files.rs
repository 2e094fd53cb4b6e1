//! Tests of every operation on files and block devices, with direct I/O and through the page cache.

use nacre_random::Random;

use super::*;

/// Goal: each operation changes the file itself, at all offsets, with direct and buffered I/O.
#[test]
fn operations_reach_the_file() {
    for (place, direct) in places().iter().flat_map(|p| [(p, None), (p, Some(false))]) {
        let temp = Temp::under(place, 4 * MIB);
        let mut rig = Rig::open(Config {
            direct,
            ..temp.config()
        });
        let bs = rig.block_size() as u64;
        let at = |file: &File, lba: u64| {
            let mut byte = [0];
            file.read_exact_at(&mut byte, lba * bs)
                .expect("in the file");
            byte[0]
        };
        let file = File::open(&temp.path).expect("readable");
        assert_eq!(rig.fill_of(0, 8), 0);
        assert_eq!(rig.write(8, 8, 0xa5), Status::Ok);
        assert_eq!(rig.fill_of(8, 8), 0xa5);
        assert_eq!(
            (at(&file, 7), at(&file, 8), at(&file, 15), at(&file, 16)),
            (0, 0xa5, 0xa5, 0)
        );
        let fua = rig.buf(bs as usize, 0x11);
        let fua = Io::new(9, Op::Write, 9, 1).with(fua).flags(Flags::FUA);
        assert_eq!(rig.run(fua).status, Status::Ok);
        assert_eq!(rig.fill_of(9, 1), 0x11);
        assert_eq!(rig.status(Op::Flush, 0, 0), Status::Ok);
        assert_eq!(rig.status(Op::WriteZeroes, 10, 2), Status::Ok);
        assert_eq!((rig.fill_of(10, 2), rig.fill_of(12, 4)), (0, 0xa5));
        let fua = Io::new(4, Op::WriteZeroes, 12, 1).flags(Flags::FUA | Flags::DEALLOCATE);
        assert_eq!(rig.run(fua).status, Status::Ok);
        assert_eq!((rig.fill_of(12, 1), rig.fill_of(13, 3)), (0, 0xa5));
        assert_eq!(rig.status(Op::Unmap, 8, 8), Status::Ok);
        assert!(rig.device.limits().unmap_zeroes);
        assert_eq!(rig.fill_of(8, 8), 0);
        assert_eq!(
            file.metadata().expect("stat").len(),
            4 * MIB,
            "the size stays"
        );
    }
}

/// Goal: I/O to the last blocks succeeds, one more block is out of range, and no computation
/// overflows.
#[test]
fn ranges_are_checked() {
    let temp = Temp::new(MIB);
    let mut rig = Rig::open(temp.config());
    let blocks = rig.device.geometry().blocks;
    assert_eq!(blocks * rig.block_size() as u64, MIB);
    assert_eq!(rig.write(blocks - 1, 1, 7), Status::Ok);
    assert_eq!(rig.write(blocks - 1, 2, 7), Status::OutOfRange);
    assert_eq!(rig.write(u64::MAX, 1, 7), Status::OutOfRange);
    for op in [Op::Unmap, Op::WriteZeroes] {
        assert_eq!(rig.status(op, blocks, 1), Status::OutOfRange);
        assert_eq!(rig.status(op, u64::MAX - 1, u32::MAX), Status::OutOfRange);
    }
    assert_eq!(
        rig.status(Op::Read, 0, 1),
        Status::DeviceError,
        "no buffer for it"
    );
    assert_eq!(rig.status(Op::Compare, 0, 1), Status::Unsupported);
    assert_eq!(
        fs::metadata(&temp.path).expect("stat").len(),
        MIB,
        "no write made it grow"
    );
}

/// Goal: two extents, and extents that direct I/O does not accept, transfer their bytes.
#[test]
fn any_buffer_will_do() {
    let temp = Temp::new(MIB);
    for direct in [None, Some(false)] {
        let mut rig = Rig::open(Config {
            direct,
            ..temp.config()
        });
        let bs = rig.block_size();
        let mut copied = 0;
        // (misalignment of the buffers, bytes in the first of the two)
        for (skew, first) in [(0, bs), (1, bs), (8, 2 * bs), (0, 100), (3, 4 * bs - 1)] {
            let mut whole = rig.buf(4 * bs + skew, 0);
            for (i, byte) in whole.bytes_mut().expect("unique").iter_mut().enumerate() {
                *byte = (i % 251) as u8;
            }
            let a = whole.slice(skew, first);
            let b = whole.slice(skew + first, 4 * bs - first);
            let io = Io::new(5, Op::Write, 16, 4).with(a).with(b);
            assert_eq!(rig.run(io).status, Status::Ok);

            let into = rig.buf(4 * bs + skew, 0xff);
            let (a, b) = (
                into.slice(skew, first),
                into.slice(skew + first, 4 * bs - first),
            );
            drop(into);
            let back = rig.run(Io::new(6, Op::Read, 16, 4).with(a).with(b));
            assert_eq!(back.status, Status::Ok);
            let got = [&back.data[0][..], &back.data[1][..]].concat();
            assert!(
                got == whole[skew..],
                "skew {skew}, first {first}, direct {direct:?}"
            );
            // Copied bytes are counted in both directions; aligned I/O copies nothing.
            let as_it_is = rig.device.file.direct.as_ref().map_or(true, |direct| {
                let (memory, offset) = (direct.memory as usize, direct.offset as usize);
                skew % memory == 0 && (skew + first) % memory == 0 && first % offset == 0
            });
            copied += if as_it_is { 0 } else { 2 * 4 * bs as u64 };
            let counted = rig.device.copied_bytes();
            assert_eq!(counted, copied, "skew {skew}, first {first}");
        }
        let free: usize = rig.pool.stats().iter().map(|s| s.count - s.free).sum();
        assert_eq!(free, 0, "every buffer came back");
    }
}

/// Goal: without a free bounce buffer, an unaligned I/O waits for one, is not lost, keeps the
/// reactor awake, and can be aborted.
#[test]
fn unaligned_waits_for_a_buffer() {
    let temp = Temp::new(MIB);
    let mut rig = Rig::open(temp.config());
    if rig.device.file.direct.is_err() {
        eprintln!("SKIPPED: no O_DIRECT in {}", temp.path.display());
        return;
    }
    let bs = rig.block_size();
    let mine = rig.buf(bs + 1, 0x42).slice(1, bs);
    let other = rig.buf(bs + 1, 0x43).slice(1, bs);
    let mut hoard = Vec::new();
    while let Some(buf) = rig.pool.acquire(1) {
        hoard.push(buf);
    }
    rig.submit(Io::new(1, Op::Write, 0, 1).with(mine));
    rig.submit(Io::new(2, Op::Write, 1, 1).with(other));
    let mut done = Done::with_capacity(4);
    for _ in 0..10 {
        assert_eq!(rig.queue.poll(Nanos::ZERO, &mut done), 0);
    }
    assert_eq!(
        (rig.queue.inflight(), rig.queue.arm(Nanos::ZERO)),
        (2, Idle::Busy)
    );
    assert!(rig.queue.abort(2));
    assert!(!rig.queue.abort(2), "too late now");
    assert!(!rig.queue.abort(77), "no such I/O");
    let aborted = rig.collect(1);
    assert_eq!((aborted[0].token, aborted[0].status), (2, Status::Aborted));
    hoard.clear();
    let written = rig.collect(1);
    assert_eq!((written[0].token, written[0].status), (1, Status::Ok));
    assert_eq!((rig.fill_of(0, 1), rig.fill_of(1, 1)), (0x42, 0));
}

/// Goal: later tasks do not overtake a task that waits for a buffer; under steady load it would
/// wait forever otherwise. Method: whenever a buffer becomes free, the next task is submitted
/// before the queue is polled.
#[test]
fn buffer_waiters_are_not_overtaken() {
    let temp = Temp::new(MIB);
    let mut rig = Rig::open(temp.config());
    if rig.device.file.direct.is_err() {
        eprintln!("SKIPPED: no O_DIRECT in {}", temp.path.display());
        return;
    }
    let bs = rig.block_size();
    let mut odd: Vec<Buf> = (0..8)
        .map(|fill| rig.buf(bs + 1, fill).slice(1, bs))
        .collect();
    let mut hoard: Vec<Buf> = std::iter::from_fn(|| rig.pool.acquire(1)).collect();
    drop(hoard.pop());
    let mut write = |rig: &mut Rig, token| {
        let data = odd.pop().expect("enough");
        rig.submit(Io::new(token, Op::Write, token, 1).with(data));
    };
    write(&mut rig, 0);
    write(&mut rig, 1);
    // Completed I/O keeps its data, so that only the bounce buffer becomes free.
    let mut ended = Vec::new();
    for token in 2..8 {
        ended.extend(rig.collect(1));
        write(&mut rig, token);
    }
    ended.extend(rig.collect(2));
    let order: Vec<u64> = ended.iter().map(|c| c.token).collect();
    assert_eq!(order, [0, 1, 2, 3, 4, 5, 6, 7]);
    drop(hoard);
}

/// Goal: random reads and writes without overlap, at full depth, match an image in memory.
#[test]
fn deep_and_mixed_matches_a_model() {
    for place in places() {
        let temp = Temp::under(&place, MIB);
        let ring = RingOptions {
            depth: 48,
            ..RingOptions::default()
        };
        let mut rig = Rig::open(Config {
            block_size: Some(4096),
            ring,
            ..temp.config()
        });
        let mut model = vec![0u8; 256];
        let mut random = Random::new(1);
        for _round in 0..40 {
            // Distinct blocks within a round: overlapping I/O in flight has no defined result.
            let start = random.index(256);
            for i in 0..48u64 {
                let lba = (start + i as usize * 5) % 256;
                let write = random.one_in(2);
                let fill = random.draw() as u8;
                let op = if write { Op::Write } else { Op::Read };
                let data = rig.buf(4096, if write { fill } else { 0xee });
                if write {
                    model[lba] = fill;
                }
                rig.submit(Io::new(i << 32 | lba as u64, op, lba as u64, 1).with(data));
            }
            let data = rig.buf(4096, 0);
            let (_busy, io) = rig
                .queue
                .submit(Io::new(1, Op::Read, 0, 1).with(data))
                .unwrap_err();
            drop(io);
            let all = rig.collect(48);
            for c in all {
                let lba = c.token as u32 as usize;
                assert_eq!(c.status, Status::Ok);
                assert!(c.data[0].iter().all(|b| *b == model[lba]), "block {lba}");
            }
        }
        for (lba, fill) in model.iter().enumerate() {
            assert_eq!(rig.fill_of(lba as u64, 1), *fill);
        }
    }
}

/// Goal: rescan detects growth; shrinking is also detected by an I/O past the new end. I/O to the
/// lost range completes with OutOfRange.
#[test]
fn size_changes_are_detected() {
    for direct in [None, Some(false)] {
        let temp = Temp::new(MIB);
        let mut rig = Rig::open(Config {
            direct,
            ..temp.config()
        });
        let bs = rig.block_size() as u64;
        let file = File::options()
            .write(true)
            .open(&temp.path)
            .expect("writable");
        file.set_len(2 * MIB).expect("grown");
        assert_eq!(
            rig.write(MIB / bs, 1, 1),
            Status::OutOfRange,
            "not before the rescan"
        );
        let seen = rig.device.rescan(None).expect("rescanned");
        assert_eq!((seen.before, seen.after), (MIB / bs, 2 * MIB / bs));
        assert_eq!(rig.write(MIB / bs, 1, 1), Status::Ok);

        file.set_len(MIB / 2 + 100)
            .expect("shrunk, into the middle of a block");
        let data = rig.buf(2 * bs as usize, 0);
        let across = Io::new(1, Op::Read, MIB / 2 / bs, 2).with(data);
        assert_eq!(
            rig.run(across).status,
            Status::OutOfRange,
            "direct {direct:?}"
        );
        assert_eq!(rig.device.geometry().blocks, MIB / 2 / bs);
        assert_eq!(rig.fill_of(MIB / 2 / bs - 1, 1), 0);
        let same = rig.device.rescan(None).expect("rescanned");
        assert_eq!(same.before, same.after);

        // Rescan adopts at most the requested size. `check_size` detects a smaller size before a
        // write enlarges the file again.
        let less = rig.device.rescan(Some(MIB / 4)).expect("rescanned");
        assert_eq!(less.after, MIB / 4 / bs);
        rig.device.check_size();
        assert_eq!(rig.device.geometry().blocks, MIB / 4 / bs);
        file.set_len(MIB / 8).expect("shrunk");
        rig.device.check_size();
        assert_eq!(rig.write(MIB / 8 / bs, 1, 1), Status::OutOfRange);
        assert_eq!(fs::metadata(&temp.path).expect("stat").len(), MIB / 8);
    }
}

/// Goal: a full file system below a sparse file gives NoSpace, and the queue continues. Method: a
/// tmpfs of 1 MiB. Skipped where mounting is not permitted, because a file size limit has another
/// effect.
#[test]
fn a_full_file_system_reports_no_space() {
    let dir = tempfile::tempdir().expect("a directory");
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
        .arg(dir.path())
        .output()
        .is_ok_and(|o| o.status.success());
    if !mounted {
        eprintln!("SKIPPED: mounting a tmpfs is not allowed");
        return;
    }
    let result = std::panic::catch_unwind(|| {
        let path = dir.path().join("thin");
        let config = Config {
            size: Some(8 * MIB),
            ..Config::new("thin", &path)
        };
        let mut rig = Rig::open(Config {
            block_size: Some(4096),
            ..config
        });
        let statuses: Vec<Status> = (0..8).map(|i| rig.write(i * 64, 64, 9)).collect();
        assert_eq!(statuses[0], Status::Ok);
        assert_eq!(statuses[7], Status::NoSpace);
        assert_eq!(rig.fill_of(0, 64), 9);
        assert_eq!(rig.status(Op::Unmap, 0, 128), Status::Ok);
        assert_eq!(
            rig.write(8 * 64, 32, 9),
            Status::Ok,
            "unmap gave space back"
        );
        drop(rig);

        let full = Config {
            size: Some(8 * MIB),
            preallocate: true,
            ..Config::new("f", path.with_extension("f"))
        };
        assert!(matches!(
            create(full).unwrap_err(),
            CreateError::NoSpace { .. }
        ));
        assert!(
            !path.with_extension("f").exists(),
            "what could not be made is not left behind"
        );
    });
    let _ = Command::new("umount").arg(dir.path()).status();
    result.unwrap_or_else(|e| std::panic::resume_unwind(e));
}

/// Goal: once the page cache has lost data, FLUSH and FUA fail until a rescan (the kernel itself
/// reports the loss once and then succeeds). Plain writes and direct I/O are unaffected.
#[test]
fn lost_data_stays_reported() {
    let temp = Temp::new(MIB);
    let mut rig = Rig::open(Config {
        direct: Some(false),
        ..temp.config()
    });
    rig.device.file.note_lost();
    assert_eq!(rig.device.driver_specific()["nacre"]["data_lost"], true);
    for _ in 0..2 {
        assert_eq!(rig.status(Op::Flush, 0, 0), Status::WriteError);
    }
    let fua = Io::new(1, Op::WriteZeroes, 0, 1).flags(Flags::FUA);
    assert_eq!(rig.run(fua).status, Status::WriteError);
    assert_eq!(rig.write(0, 1, 1), Status::Ok);
    rig.device.rescan(None).expect("rescanned");
    assert_eq!(rig.status(Op::Flush, 0, 0), Status::Ok);
    drop(rig);
    let mut rig = Rig::open(temp.config());
    if rig.device.file.direct.is_ok() {
        rig.device.file.note_lost();
        assert_eq!(rig.status(Op::Flush, 0, 0), Status::Ok);
    }
}

/// Goal: a block device works like a file, with its own sector size, its real write cache and
/// discards, and refuses a second user.
#[test]
fn block_device() {
    for sector in [512u32, 4096] {
        let Some(disk) = Loop::attach(8 * MIB, sector) else {
            return;
        };
        let mut rig = Rig::open(Config::new("loop", &disk.path));
        let geometry = rig.device.geometry();
        assert_eq!((geometry.block_size, geometry.bytes()), (sector, 8 * MIB));
        assert!(
            rig.device.limits().volatile_cache,
            "a loop device says write back"
        );
        assert_eq!(rig.write(0, 16, 0x77), Status::Ok);
        let fua = rig.buf(sector as usize, 0x78);
        let fua = Io::new(1, Op::Write, 16, 1).with(fua).flags(Flags::FUA);
        assert_eq!(rig.run(fua).status, Status::Ok);
        assert_eq!(rig.status(Op::Flush, 0, 0), Status::Ok);
        assert_eq!((rig.fill_of(0, 16), rig.fill_of(16, 1)), (0x77, 0x78));
        assert_eq!(rig.status(Op::WriteZeroes, 4, 4), Status::Ok);
        let zero = Io::new(4, Op::WriteZeroes, 8, 4).flags(Flags::DEALLOCATE | Flags::FUA);
        assert_eq!(rig.run(zero).status, Status::Ok);
        assert_eq!(
            (rig.fill_of(0, 4), rig.fill_of(4, 8), rig.fill_of(12, 4)),
            (0x77, 0, 0x77)
        );
        if rig.device.supports(Op::Unmap) == Support::Native {
            assert_eq!(rig.status(Op::Unmap, 0, 16), Status::Ok);
            let discards = rig.device.driver_specific()["nacre"]["discard"] == true;
            assert_eq!(rig.device.limits().unmap_zeroes, !discards);
            if !discards {
                eprintln!("SKIPPED discard (no such command before Linux 6.12): zeroed instead");
                assert_eq!(rig.fill_of(0, 16), 0);
            }
        } else {
            eprintln!("SKIPPED unmap: this loop device does not discard");
        }
        let second = create(Config::new("again", &disk.path)).unwrap_err();
        assert!(matches!(second, CreateError::InUse { .. }), "{second}");
        let small = Config {
            block_size: Some(512),
            ..Config::new("small", &disk.path)
        };
        drop(rig);
        match (sector, create(small)) {
            (512, Ok(device)) => assert_eq!(device.geometry().block_size, 512),
            (4096, Err(CreateError::BelowSector { .. })) => {}
            (sector, other) => panic!("sector {sector}: {other:?}"),
        }
    }
}
