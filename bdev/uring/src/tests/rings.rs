//! Tests of the io_uring queue: wake-ups, aborts, its bounds, and I/O in flight when the queue is
//! dropped.

use std::os::fd::OwnedFd;

use super::*;

fn options() -> impl Iterator<Item = RingOptions> {
    [(true, true), (true, false), (false, true), (false, false)]
        .into_iter()
        .map(|(registered_buffers, defer_taskrun)| RingOptions {
            depth: 32,
            registered_buffers,
            defer_taskrun,
        })
}

/// True if a queue's descriptor becomes readable in time.
fn readable(fd: &OwnedFd, timeout: Duration) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    let limit = Timespec::try_from(timeout).expect("short");
    rustix::event::poll(&mut fds, Some(&limit)).expect("poll") > 0
}

/// Goal: every set of ring options executes the same I/O, and the granted options are reported.
#[test]
fn every_ring_works() {
    let temp = Temp::new(MIB);
    for ring in options() {
        let mut rig = Rig::open(Config {
            ring,
            ..temp.config()
        });
        let facts = rig.device.driver_specific()["nacre"].clone();
        let mode = facts["ring"].as_str().expect("a text").to_owned();
        assert_eq!(
            mode.contains("defer"),
            ring.defer_taskrun,
            "{mode} (kernel before 6.1?)"
        );
        if ring.registered_buffers && facts["registered_buffers"] != true {
            eprintln!(
                "SKIPPED registered buffers: {}",
                facts["unregistered_because"]
            );
        }
        assert!(ring.registered_buffers || facts["registered_buffers"] == false);
        assert_eq!(rig.write(0, 8, 0x3c), Status::Ok);
        assert_eq!(rig.fill_of(0, 8), 0x3c);
        // A buffer of another pool is not in the registered regions, and works too.
        let foreign = Pool::heap(&[ClassSpec {
            size: 4096,
            count: 1,
        }]);
        let bs = rig.block_size();
        let buf = foreign.acquire(bs).expect("a buffer");
        let back = rig.run(Io::new(1, Op::Read, 3, 1).with(buf));
        assert!(back.status.is_ok() && back.data[0].iter().all(|b| *b == 0x3c));
    }
}

/// Goal: no lost wake-up. A sleeper that arms, polls once more and finds nothing is always woken
/// through the descriptor, whether the completion comes before, between or after.
#[test]
fn a_sleeper_is_woken() {
    let temp = Temp::new(4 * MIB);
    for ring in options() {
        for direct in [None, Some(false)] {
            let mut rig = Rig::open(Config {
                ring,
                direct,
                ..temp.config()
            });
            let fd = rig.queue.wake_fd().expect("it has one");
            let fd = fd.try_clone_to_owned().expect("a duplicate");
            let mut done = Done::with_capacity(8);
            assert_eq!(rig.queue.arm(Nanos::ZERO), Idle::Quiet, "nothing in flight");
            rig.queue.disarm();
            let mut slept = 0;
            for round in 0..300u64 {
                // Flushes run in a kernel worker; reads complete by interrupt.
                let io = match round % 4 {
                    0 => Io::new(round, Op::Flush, 0, 0),
                    1 => {
                        Io::new(round, Op::Write, round % 64, 1).with(rig.buf(rig.block_size(), 1))
                    }
                    _ => Io::new(round, Op::Read, round * 7 % 900, 1)
                        .with(rig.buf(rig.block_size(), 0)),
                };
                rig.submit(io);
                assert_eq!(
                    rig.queue.arm(Nanos::ZERO),
                    Idle::Busy,
                    "not handed over yet"
                );
                let mut found = rig.queue.poll(Nanos::ZERO, &mut done);
                while found == 0 {
                    for _ in 0..round % 50 {
                        std::hint::spin_loop();
                    }
                    assert_eq!(rig.queue.arm(Nanos::ZERO), Idle::Quiet);
                    found = rig.queue.poll(Nanos::ZERO, &mut done);
                    if found == 0 {
                        slept += 1;
                        assert!(
                            readable(&fd, Duration::from_secs(10)),
                            "never woken, {ring:?}"
                        );
                        found = rig.queue.poll(Nanos::ZERO, &mut done);
                    }
                    rig.queue.disarm();
                }
                assert_eq!(done.len(), 1);
                assert!(done.drain().all(|c| c.token == round && c.status.is_ok()));
                assert!(!readable(&fd, Duration::ZERO), "quiet while disarmed");
            }
            assert!(slept > 0, "the test never slept ({ring:?})");
        }
    }
}

/// Goal: a full list of completions delays the others and loses none.
#[test]
fn completions_are_bounded_by_done() {
    let temp = Temp::new(MIB);
    let mut rig = Rig::open(temp.config());
    for i in 0..40 {
        let data = rig.buf(rig.block_size(), 0);
        rig.submit(Io::new(i, Op::Read, i, 1).with(data));
        rig.submit(Io::new(100 + i, Op::Read, u64::MAX, 1));
    }
    let mut done = Done::with_capacity(3);
    let mut seen = Vec::new();
    let start = Instant::now();
    while rig.queue.inflight() > 0 {
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "{} left",
            rig.queue.inflight()
        );
        assert!(rig.queue.poll(Nanos::ZERO, &mut done) <= 3);
        seen.extend(done.drain().map(|c| (c.token, c.status)));
    }
    seen.sort_by_key(|(token, _)| *token);
    let ok = (0..40).map(|i| (i, Status::Ok));
    let refused = (100..140).map(|i| (i, Status::OutOfRange));
    assert_eq!(seen, ok.chain(refused).collect::<Vec<_>>());
}

/// Goal: each token completes once, whether the abort or the completion comes first, and a late
/// cancel does not affect later users of the same slots.
#[test]
fn aborts_lose_no_token() {
    let temp = Temp::new(4 * MIB);
    let mut rig = Rig::open(Config {
        direct: Some(false),
        ..temp.config()
    });
    for round in 0..50u64 {
        let mut expected = Vec::new();
        for i in 0..32u64 {
            let token = round * 100 + i;
            let io = match i % 4 {
                0 => Io::new(token, Op::Flush, 0, 0),
                1 => Io::new(token, Op::WriteZeroes, i * 8, 8),
                2 => Io::new(token, Op::Write, i * 8, 1).with(rig.buf(rig.block_size(), 1)),
                _ => Io::new(token, Op::Read, i * 8, 1).with(rig.buf(rig.block_size(), 1)),
            };
            rig.submit(io);
            expected.push(token);
        }
        let mut done = Done::with_capacity(64);
        if round % 2 == 0 {
            rig.queue.poll(Nanos::ZERO, &mut done);
        }
        let mut seen: Vec<_> = done.drain().collect();
        for token in expected.iter().step_by(3) {
            rig.queue.abort(*token);
        }
        seen.extend(rig.collect(32 - seen.len()));
        for c in &seen {
            let aborted = (c.token % 100) % 3 == 0;
            assert!(
                c.status.is_ok() || aborted && c.status == Status::Aborted,
                "{c:?}"
            );
        }
        let mut tokens: Vec<_> = seen.iter().map(|c| c.token).collect();
        tokens.sort();
        assert_eq!(tokens, expected);
    }
}

/// Goal: dropping a queue with I/O in flight waits for the kernel, so that every buffer is
/// returned, the file is closed and its lock released.
#[test]
fn dropping_waits_for_the_kernel() {
    let temp = Temp::new(4 * MIB);
    for polled in [false, true] {
        let mut rig = Rig::open(temp.config());
        for i in 0..32 {
            let data = rig.buf(rig.block_size(), 3);
            rig.submit(Io::new(i, Op::Write, i, 1).with(data));
        }
        if polled {
            rig.queue.poll(Nanos::ZERO, &mut Done::with_capacity(1));
        }
        let Rig {
            queue,
            pool,
            device,
        } = rig;
        drop(queue);
        let out: usize = pool.stats().iter().map(|s| s.count - s.free).sum();
        assert_eq!(out, 0, "all buffers are back");
        drop(device);
    }
    let open = fs::read_dir("/proc/self/fd").expect("fds").flatten();
    let ours = open
        .filter(|e| fs::read_link(e.path()).is_ok_and(|p| p == temp.path))
        .count();
    assert_eq!(ours, 0, "descriptors left open");
    create(temp.config()).expect("the lock is free at once");
}

/// Goal: every descriptor of a queue is close-on-exec.
#[test]
fn descriptors_are_close_on_exec() {
    let temp = Temp::new(MIB);
    let rig = Rig::open(temp.config());
    let ours = fs::canonicalize(&temp.path).expect("a path");
    let listed = Command::new("ls")
        .args(["-l", "/proc/self/fd"])
        .output()
        .expect("ls runs");
    let listed = String::from_utf8_lossy(&listed.stdout);
    assert!(!listed.contains(&*ours.to_string_lossy()), "{listed}");
    assert!(
        !listed.contains("io_uring") && !listed.contains("eventfd"),
        "{listed}"
    );
    drop(rig);
}

/// Goal: several cores use one device concurrently, each with its own queue.
#[test]
fn cores_share_a_device() {
    let temp = Temp::new(4 * MIB);
    let device = create(Config {
        block_size: Some(4096),
        ..temp.config()
    })
    .expect("opened");
    std::thread::scope(|scope| {
        for core in 0..4u64 {
            let device = Arc::clone(&device);
            scope.spawn(move || {
                let mut rig = Rig::on(device);
                for lba in core * 256..core * 256 + 64 {
                    assert_eq!(rig.write(lba, 1, core as u8 + 1), Status::Ok);
                }
                assert_eq!(rig.fill_of(core * 256, 2), core as u8 + 1);
            });
        }
    });
    let mut rig = Rig::on(device);
    for core in 0..4u64 {
        assert_eq!(rig.fill_of(core * 256, 64), core as u8 + 1);
    }
}
