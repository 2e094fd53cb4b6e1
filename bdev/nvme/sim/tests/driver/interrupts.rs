//! Tests of the switch between polling and interrupts, and of the wake sources of a sleeping core.

use std::time::Duration;

use nacre_bdev::{Op, Queue, Status, Token};
use nacre_bdev_nvme::{DriveOptions, ResetReason};
use nacre_bdev_nvme_sim::{Action, Config, Pace, Rule, Target};
use nacre_nvmf_wire::opcode::io;
use nacre_reactor::{EventSet, Events, Idle, Interest};

use super::rig::Rig;

const LATENCY: Duration = Duration::from_micros(300);

fn config() -> Config {
    Config {
        pace: Pace {
            latency: (LATENCY, LATENCY),
            ..Pace::default()
        },
        ..Config::default()
    }
}

/// The wake sources of a core that sleeps whenever it may.
#[derive(Debug, Default, PartialEq, Eq)]
struct WakeSources {
    descriptor: u32,
    time: u32,
    /// It wanted to and could not.
    not: u32,
}

/// As a reactor in interrupt mode: a turn, arm, one more turn, and then nothing before the
/// descriptor is readable, or the deadline. The drive has a core of its own.
fn sleepily(rig: &mut Rig, queue: &mut dyn Queue, token: Token) -> WakeSources {
    let mut slept = WakeSources::default();
    let set = EventSet::new().expect("an epoll");
    let added = set.add(
        queue.wake_fd().expect("a drive with vectors"),
        0,
        Interest::READ,
    );
    added.expect("it can be watched");
    let mut events = Events::with_capacity(4);
    let end = rig.core.now() + Duration::from_secs(5);
    while !rig.ended.contains_key(&token) {
        assert!(rig.core.now() < end, "it does not end: {slept:?}");
        rig.turn(queue);
        let now = rig.core.now();
        let idle = queue.arm(now);
        // I/O that arrived in between.
        if rig.turn(queue) || idle == Idle::Busy {
            queue.disarm();
            slept.not += 1;
            rig.core.advance(Duration::from_micros(10));
            continue;
        }
        let until = match idle {
            Idle::Until(at) => at,
            _ => end,
        };
        loop {
            if set.wait(&mut events, Duration::ZERO).expect("an epoll") > 0 {
                slept.descriptor += 1;
                break;
            }
            if rig.core.now() >= until {
                slept.time += 1;
                break;
            }
            rig.core.advance(Duration::from_micros(50));
            rig.core.turn();
        }
        queue.disarm();
    }
    slept
}

fn interrupts(rig: &Rig) -> u64 {
    rig.drive.stats().interrupts
}

/// Goal: a core that polls is never interrupted. When it first wants to sleep it gets interrupts,
/// and each completion wakes it; when it polls again it loses them. No I/O is sent twice or fails
/// for it.
#[test]
fn only_sleeping_cores_get_interrupts() {
    let mut rig = Rig::new(config());
    let (controller, _bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    for at in 0..50 {
        let write = rig.write(at, 1, at as u8);
        assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    }
    assert_eq!(rig.drive.queue_vectors(), [None]);
    let by_admin = interrupts(&rig);
    for at in 0..50 {
        let write = rig.write(at, 1, at as u8);
        assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    }
    assert_eq!(
        interrupts(&rig),
        by_admin,
        "a core that polls is interrupted"
    );

    for round in 0..20u8 {
        // None of the I/O in flight is repeated or abandoned by a reset.
        let (old, new) = (rig.buf(512, round), rig.buf(512, round + 1));
        let (lba, before) = (60, rig.write(60, 1, round));
        rig.submit(&mut *queue, before);
        rig.run_until_idle(&mut *queue);
        let swap = rig.io(Op::CompareAndWrite, lba, 1).with(old).with(new);
        let token = rig.submit(&mut *queue, swap);
        let before = interrupts(&rig);
        let slept = sleepily(&mut rig, &mut *queue, token);
        assert_eq!(rig.ended.remove(&token).unwrap().status, Status::Ok);
        // A second one, which the queue has interrupts for.
        let read = rig.read(60, 1);
        let token = rig.submit(&mut *queue, read);
        let again = sleepily(&mut rig, &mut *queue, token);
        assert_eq!(rig.ended.remove(&token).unwrap().status, Status::Ok);
        assert_eq!(rig.drive.queue_vectors(), [Some(1)], "round {round}");
        assert!(interrupts(&rig) > before);
        if round > 0 {
            assert!(slept.descriptor >= 1 && slept.time == 0, "{slept:?}");
        }
        assert!(again.descriptor >= 1 && again.time == 0, "{again:?}");
    }

    // It polls again, with I/O under way all the time.
    let end = rig.core.now() + Duration::from_secs(30);
    while rig.core.now() < end {
        for at in 0..4 {
            let write = rig.write(at, 1, 1);
            rig.submit(&mut *queue, write);
        }
        let statuses = rig.run_until_idle(&mut *queue);
        assert_eq!(statuses, [Status::Ok; 4]);
        rig.pass(&mut *queue, Duration::from_millis(100));
    }
    assert_eq!(rig.drive.queue_vectors(), [None]);
    let status = controller.status();
    assert_eq!(
        (
            status.resubmitted,
            status.resets,
            status.queue_resets,
            status.timeouts
        ),
        (0, 0, 0, 0)
    );
    rig.end(&controller, queue);
}

/// Goal: I/O submitted while the queue drains waits, in order, and a command that does not end
/// meanwhile still times out.
#[test]
fn io_during_a_queue_drain() {
    let mut rig = Rig::new(config());
    let options = DriveOptions {
        timeout: Duration::from_secs(2),
        ..DriveOptions::new("nvme0")
    };
    let (controller, _bdev, mut queue) = rig.one(options);
    let warm = rig.read(0, 1);
    rig.run(&mut *queue, warm);
    let deaf = Action::Never {
        done: false,
        deaf: true,
    };
    rig.drive.inject(Rule::next(Target::IoOp(io::READ), deaf));
    let read = rig.read(0, 1);
    rig.submit(&mut *queue, read);
    rig.turn(&mut *queue);
    let now = rig.core.now();
    assert_eq!(queue.arm(now), Idle::Busy);
    queue.disarm();
    let before = rig.drive.stats().io[usize::from(io::WRITE)];
    for value in 1..=9u8 {
        let write = rig.write(u64::from(value), 1, value);
        rig.submit(&mut *queue, write);
    }
    rig.pass(&mut *queue, Duration::from_millis(50));
    let sent = rig.drive.stats().io[usize::from(io::WRITE)] - before;
    assert_eq!(
        sent, 0,
        "nothing goes into a queue that is to be made again"
    );
    assert_eq!(rig.run_until_idle(&mut *queue), [Status::Ok; 10]);
    let status = controller.status();
    assert_eq!(
        (status.timeouts, status.aborts, status.queue_resets),
        (1, 1, 1)
    );
    assert_eq!(rig.values(&mut *queue, 1, 9), [1, 2, 3, 4, 5, 6, 7, 8, 9]);
    rig.end(&controller, queue);
}

/// Goal: a core that sleeps during a reset is woken by its end, and does not find out later by
/// itself.
#[test]
fn woken_by_the_control() {
    let mut rig = Rig::new(config());
    let (controller, _bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    let warm = rig.read(0, 1);
    let token = rig.submit(&mut *queue, warm);
    sleepily(&mut rig, &mut *queue, token);
    rig.ended.clear();
    for _ in 0..5 {
        rig.drive.inject(Rule::next(Target::Io, Action::Hold));
        let write = rig.write(3, 1, 7);
        let token = rig.submit(&mut *queue, write);
        rig.turn(&mut *queue);
        let asked = controller.clone();
        let reset = rig
            .core
            .core()
            .spawn_local(async move { asked.reset().await });
        let began = rig.core.now();
        let slept = sleepily(&mut rig, &mut *queue, token);
        assert_eq!(rig.ended.remove(&token).unwrap().status, Status::Ok);
        assert!(slept.time == 0, "{slept:?}");
        let took = rig.core.now().since(began);
        assert!(took < Duration::from_millis(20), "{took:?}");
        rig.core.block_on(reset).unwrap().unwrap();
    }
    assert_eq!(controller.status().resets, 5);
    let told = rig.events.take();
    let asked = |event: &nacre_bdev_nvme::Event| matches!(event, nacre_bdev_nvme::Event::Reset { reason } if *reason == ResetReason::UserRequest);
    assert_eq!(told.iter().filter(|event| asked(event)).count(), 5);
    rig.end(&controller, queue);
}
