//! Tests of reactors on real threads: pinning, modes, wake-ups, the watchdog, and statistics.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::time::{Duration, Instant};

use nacre_reactor::{
    CoreHandle, CoreSet, Event, EventSet, Events, Idle, Interest, Mode, Nanos, Poller,
    ReactorConfig, ReactorHandle, SpawnError, Watchdog, Work, spawn,
};

mod rig;
use rig::{end, start};

/// Only a failure takes this long.
const LIMIT: Duration = Duration::from_secs(60);

/// Waits for another thread's action.
fn eventually(what: &str, condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < LIMIT, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// True, with a message, if other programs use the reactor's core: the reactor has no patience
/// then.
fn shares_core(reactor: &ReactorHandle, test: &str) -> bool {
    let taken = reactor.stats().core_taken;
    if taken > 0 {
        eprintln!("SKIPPED: {test}: other threads took the core {taken} times");
    }
    taken > 0
}

/// CPU time of a thread of this process.
fn cpu_time(tid: i32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/schedstat")).unwrap();
    Duration::from_nanos(stat.split_whitespace().next().unwrap().parse().unwrap())
}

/// Goal: a pinned reactor runs on its core, and a core that the process may not use is refused by
/// name.
#[test]
fn pins_or_reports_the_core() {
    let allowed = CoreSet::allowed().unwrap();
    let core = allowed.iter().next_back().unwrap();
    let config = ReactorConfig {
        core: Some(core),
        ..Default::default()
    };
    let reactor = spawn(config, |_| {}).unwrap();
    assert_eq!(reactor.core(), Some(core));
    let there = reactor.call(|_| (rustix::thread::sched_getcpu(), CoreSet::allowed().unwrap()));
    assert_eq!(there.unwrap(), (core, CoreSet::from_iter([core])));
    end(&reactor);

    let absent = (0..=CoreSet::MAX_CORE)
        .find(|&core| !allowed.contains(core))
        .unwrap();
    let config = ReactorConfig {
        core: Some(absent),
        ..Default::default()
    };
    let error = spawn(config, |_| {}).unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with(&format!("may use cores {allowed}")),
        "{error}"
    );
    assert!(
        matches!(error, SpawnError::CoreNotAllowed { core, allowed: a, .. } if core == absent && a == allowed)
    );
}

/// Goal: mode poll never sleeps; interrupt and adaptive do. Switching the mode takes effect at
/// once, both ways.
#[test]
fn modes_switch_live() {
    let reactor = start("modes", Mode::Poll, 50);
    let before = reactor.stats().turns;
    eventually("polling", || reactor.stats().turns > before + 1000);
    assert_eq!(reactor.stats().sleeps, 0);
    for mode in [Mode::Interrupt, Mode::Adaptive] {
        reactor.set_mode(mode);
        eventually("sleep", || reactor.stats().sleeping);
        // The reactor announces its sleep before its last poll.
        eventually("the last poll", || {
            let turns = reactor.stats().turns;
            std::thread::sleep(Duration::from_millis(5));
            reactor.stats().turns == turns
        });
        let turns = reactor.stats().turns;
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(reactor.stats().turns, turns, "turned while asleep");
        reactor.set_mode(Mode::Poll);
        eventually("polling again", || reactor.stats().turns > turns + 1000);
    }
    assert_eq!(reactor.mode(), Mode::Poll);
    end(&reactor);
}

/// Goal: an adaptive reactor keeps its patience after a turn that took longer than the patience.
/// Otherwise it would sleep after each large batch under load.
///
/// Method: send a message that takes twice the patience, and count the turns between its end and
/// the sleep. Polling makes very many turns; sleeping immediately makes two.
#[test]
fn long_work_does_not_use_up_patience() {
    let reactor = start("long", Mode::Adaptive, 200_000);
    reactor
        .call(|_| std::thread::sleep(Duration::from_millis(400)))
        .unwrap();
    let before = reactor.stats().turns;
    eventually("sleep", || reactor.stats().sleeping);
    let turns = reactor.stats().turns - before;
    if shares_core(&reactor, "long_work_does_not_use_up_patience") {
        return;
    }
    assert!(turns > 10, "asleep after {turns} turns");
    end(&reactor);
}

/// Goal: an adaptive reactor learns to wait for work that arrives in a steady rhythm slower than
/// `busy_poll_us`.
///
/// Method: send a message every 20 ms to a reactor with an initial patience of 10 ms. After
/// learning it does not sleep between messages. A stalled machine may reset the patience, so the
/// test allows time to learn again.
#[test]
fn patience_grows_with_a_steady_rhythm() {
    let reactor = start("rhythm", Mode::Adaptive, 10_000);
    let mut awake = 0;
    for _ in 0..1000 {
        let sleeps = reactor.stats().sleeps;
        reactor.call(|_| ()).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        let slept = reactor.stats().sleeping || reactor.stats().sleeps > sleeps;
        awake = if slept { 0 } else { awake + 1 };
        if awake == 5 {
            break;
        }
    }
    if shares_core(&reactor, "patience_grows_with_a_steady_rhythm") {
        return;
    }
    assert_eq!(awake, 5, "slept between messages forever");
    eventually("sleep", || reactor.stats().sleeping);
    end(&reactor);
}

/// Goal: no message is lost or delayed while the reactor falls asleep. Method: senders wait for
/// each reply, with a time limit, so that each message meets another phase of falling asleep; with
/// no busy polling, and with a very short one. Every 100 rounds all senders pause together, longer
/// than the maximum patience: on a machine where they are slower than the reactor's patience, it
/// would never sleep otherwise.
#[test]
fn no_wake_up_is_lost_under_stress() {
    for (mode, busy_poll_us) in [
        (Mode::Interrupt, 0),
        (Mode::Adaptive, 1),
        (Mode::Adaptive, 20),
    ] {
        let reactor = start("stress", mode, busy_poll_us);
        const SENDERS: usize = 8;
        const ROUNDS: u64 = 1500;
        let (done, finished) = mpsc::channel();
        let pause = Arc::new(Barrier::new(SENDERS));
        for sender in 0..SENDERS {
            let (reactor, done, pause) = (reactor.clone(), done.clone(), pause.clone());
            std::thread::spawn(move || {
                let mut sum = 0;
                for round in 0..ROUNDS {
                    // Different rhythms meet all phases of falling asleep.
                    for _ in 0..(round * 7 + sender as u64 * 13) % 200 {
                        std::hint::spin_loop();
                    }
                    sum += reactor.call(move |_| round).unwrap();
                    if round % 100 == 99 {
                        pause.wait();
                        std::thread::sleep(Duration::from_millis(2));
                    }
                }
                done.send(sum).unwrap();
            });
        }
        for _ in 0..SENDERS {
            let sum = finished
                .recv_timeout(Duration::from_secs(20))
                .expect("a lost wake-up");
            assert_eq!(sum, ROUNDS * (ROUNDS - 1) / 2);
        }
        // The count is published when the last turn ends, after its replies.
        eventually("the count", || {
            reactor.stats().messages == SENDERS as u64 * ROUNDS
        });
        let stats = reactor.stats();
        assert!(
            stats.sleeps > 0,
            "never slept, so nothing was tested: {stats:?}"
        );
        end(&reactor);
    }
}

/// A poller that consumes items from a shared counter.
struct Taker {
    left: Arc<AtomicU64>,
    taken: Arc<AtomicU64>,
}

impl Poller for Taker {
    fn name(&self) -> &str {
        "taker"
    }

    fn poll(&mut self, _: Nanos, _: u32) -> Work {
        match self.left.swap(0, Ordering::Acquire) {
            0 => Work::None,
            items => {
                self.taken.fetch_add(items, Ordering::Release);
                Work::Did(items as u32)
            }
        }
    }

    fn arm(&mut self, _: Nanos) -> Idle {
        Idle::Quiet
    }
}

/// Goal: a waker always makes a sleeping reactor poll. Method: add an item, wake, wait until it is
/// consumed; repeat.
#[test]
fn waker_reaches_pollers() {
    let reactor = start("waker", Mode::Interrupt, 0);
    let (left, taken) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let poller = Taker {
        left: Arc::clone(&left),
        taken: Arc::clone(&taken),
    };
    reactor
        .call(move |core| core.add_poller(Box::new(poller)).unwrap())
        .unwrap();
    let waker = reactor.waker();
    for round in 1..=2000 {
        left.fetch_add(1, Ordering::Release);
        waker.wake();
        let began = Instant::now();
        while taken.load(Ordering::Acquire) < round {
            assert!(began.elapsed() < LIMIT, "lost wake-up in round {round}");
            std::thread::yield_now();
        }
    }
    let pollers = reactor.pollers();
    assert_eq!((pollers.len(), pollers[0].name.as_str()), (1, "taker"));
    assert_eq!(pollers[0].items, 2000);
    assert!(pollers[0].busy_count <= pollers[0].run_count);
    end(&reactor);
}

/// A poller of sockets in one event set.
struct Echo {
    set: EventSet,
    events: Events,
    sockets: Vec<UnixStream>,
    seen: Arc<AtomicU64>,
}

impl Poller for Echo {
    fn name(&self) -> &str {
        "echo"
    }

    fn poll(&mut self, _: Nanos, _: u32) -> Work {
        if self.set.wait(&mut self.events, Duration::ZERO).unwrap() == 0 {
            return Work::None;
        }
        for Event {
            token, readable, ..
        } in self.events.iter()
        {
            assert!(readable);
            let mut bytes = [0; 64];
            let socket = &self.sockets[token as usize];
            let count = std::io::Read::read(&mut &*socket, &mut bytes).unwrap();
            self.seen.fetch_add(count as u64, Ordering::Release);
        }
        Work::Did(self.events.len() as u32)
    }

    fn arm(&mut self, _: Nanos) -> Idle {
        Idle::Quiet
    }

    fn wake_fds(&self) -> std::io::Result<Vec<OwnedFd>> {
        Ok(vec![self.set.wake_fd()?])
    }
}

/// Goal: readiness of any of many sockets wakes a sleeping reactor through the nested epoll.
#[test]
fn sockets_wake_a_sleeping_reactor() {
    let reactor = start("sockets", Mode::Interrupt, 0);
    let seen = Arc::new(AtomicU64::new(0));
    let (mut far, near): (Vec<_>, Vec<_>) = (0..16).map(|_| UnixStream::pair().unwrap()).unzip();
    let ours = Arc::clone(&seen);
    reactor
        .call(move |core| {
            let set = EventSet::new().unwrap();
            for (token, socket) in near.iter().enumerate() {
                set.add(socket, token as u64, Interest::READ).unwrap();
            }
            let events = Events::with_capacity(4);
            let poller = Echo {
                set,
                events,
                sockets: near,
                seen: ours,
            };
            core.add_poller(Box::new(poller)).unwrap()
        })
        .unwrap();
    for round in 1..=200u64 {
        far[round as usize % 16].write_all(b"x").unwrap();
        let began = Instant::now();
        while seen.load(Ordering::Acquire) < round {
            assert!(began.elapsed() < LIMIT, "lost readiness in round {round}");
            std::thread::yield_now();
        }
    }
    eventually("sleep", || reactor.stats().sleeping);
    assert!(reactor.stats().wakeups > 0);
    end(&reactor);
}

/// Goal: an idle adaptive reactor uses under 1 % of a core, also with a periodic timer and a
/// watchdog, and its time accounting is correct.
#[test]
fn idle_costs_nothing_and_is_accounted() {
    let reactor = start("idle", Mode::Adaptive, 100);
    let watchdog = Watchdog::start(vec![reactor.clone()], Duration::from_millis(100)).unwrap();
    let ticking = reactor.call(|core| {
        let ticker = core.clone();
        drop(core.spawn_local(async move {
            loop {
                ticker.after(Duration::from_millis(50)).await;
            }
        }));
    });
    ticking.unwrap();
    let (before, cpu_before, began) = (reactor.stats(), cpu_time(reactor.tid()), Instant::now());
    std::thread::sleep(Duration::from_secs(1));
    let (after, cpu) = (reactor.stats(), cpu_time(reactor.tid()) - cpu_before);
    let elapsed = began.elapsed().as_nanos() as u64;
    println!("idle reactor with a 50 ms timer: {cpu:?} of CPU time in 1 s");
    assert!(
        cpu < Duration::from_millis(10),
        "{cpu:?} of CPU time in 1 s: {after:?}"
    );
    let accounted = (after.busy_ns + after.idle_ns + after.sleep_ns)
        - (before.busy_ns + before.idle_ns + before.sleep_ns);
    // The scheduler may delay this thread between reading the two clocks.
    assert!(
        accounted.abs_diff(elapsed) < 250_000_000,
        "{accounted} ns of {elapsed} ns"
    );
    assert!(
        after.sleep_ns - before.sleep_ns > elapsed * 8 / 10,
        "{after:?}"
    );
    assert!(after.timers_fired - before.timers_fired >= 10, "{after:?}");
    assert_eq!(after.tasks, 1);
    assert_eq!(
        after.stalls,
        0,
        "sleep is no stall: {:?}",
        reactor.last_stall()
    );
    drop(watchdog);
    end(&reactor);
}

/// Blocks its reactor until released.
struct Named(&'static str, Arc<AtomicBool>);

fn block_while(blocked: &AtomicBool) {
    let began = Instant::now();
    while blocked.load(Ordering::Acquire) && began.elapsed() < LIMIT {
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Poller for Named {
    fn name(&self) -> &str {
        self.0
    }

    fn poll(&mut self, _: Nanos, _: u32) -> Work {
        block_while(&self.1);
        Work::None
    }

    fn arm(&mut self, _: Nanos) -> Idle {
        Idle::Quiet
    }
}

/// Goal: the watchdog names the poller, the message or the future that blocks, and counts it.
/// Method: each blocks until it was named, so a slow machine does not change the result.
#[test]
fn watchdog_names_the_culprit() {
    let reactor = start("slow", Mode::Adaptive, 10);
    let limit = Duration::from_millis(30);
    let _watchdog = Watchdog::start(vec![reactor.clone()], limit).unwrap();
    let blocked = Arc::new(AtomicBool::new(false));
    let blamed = |culprit: &str| {
        eventually(culprit, || {
            reactor.last_stall().is_some_and(|stall| {
                assert_eq!(stall.reactor, "slow");
                assert!(stall.lasted >= limit);
                stall.culprit.starts_with(culprit)
            })
        });
        blocked.store(false, Ordering::Release);
        reactor.call(|_| ()).unwrap();
    };

    let (good, bad) = (
        Named("good", Arc::default()),
        Named("bad", Arc::clone(&blocked)),
    );
    let adding = reactor.call(|core| {
        core.add_poller(Box::new(good)).unwrap();
        core.add_poller(Box::new(bad)).unwrap()
    });
    let bad = adding.unwrap();
    blocked.store(true, Ordering::Release);
    reactor.waker().wake();
    blamed("poller \"bad\"");
    assert!(reactor.stats().stalls > 0);
    reactor.call(move |core| core.remove_poller(bad)).unwrap();

    blocked.store(true, Ordering::Release);
    let ours = Arc::clone(&blocked);
    let message = Box::new(move |_: &CoreHandle| block_while(&ours));
    let line = line!() + 1;
    reactor.send(message).unwrap();
    blamed(&format!("message sent at {}:{line}:", file!()));

    blocked.store(true, Ordering::Release);
    let ours = Arc::clone(&blocked);
    let spawning = reactor.send(Box::new(move |core| {
        drop(core.spawn_local(async move { block_while(&ours) }));
    }));
    spawning.unwrap();
    blamed(&format!("future spawned at {}", file!()));
    end(&reactor);
    assert!(reactor.stats().longest_turn_ns >= limit.as_nanos() as u64);
}

/// Goal: an adaptive reactor sleeps if a busy thread shares its core, because only a thread that
/// wakes up gets the core at once. Its patience is longer than the test, so sharing is the only
/// reason for a sleep.
#[test]
fn sleeps_where_another_thread_takes_the_core() {
    let core = CoreSet::allowed().unwrap().iter().next().unwrap();
    let config = |name: &str, mode| ReactorConfig {
        name: name.into(),
        core: Some(core),
        mode,
        busy_poll_us: 60_000_000,
        ..Default::default()
    };
    let reactor = spawn(config("shares", Mode::Adaptive), |_| {}).unwrap();
    let hog = spawn(config("hog", Mode::Poll), |_| {}).unwrap();
    eventually("a sleep", || reactor.stats().sleeping);
    assert!(reactor.stats().core_taken > 0);
    // A call wakes the reactor, which then sleeps again.
    reactor.call(|_| ()).unwrap();
    eventually("another sleep", || {
        let stats = reactor.stats();
        stats.sleeping && stats.sleeps > 0
    });
    end(&hog);
    end(&reactor);
}
