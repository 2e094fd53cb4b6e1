//! Tests of a reactor's turn in virtual time: order, budgets, timers, futures, added and removed
//! pollers, and the decision to sleep.

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{join, select_all};
use nacre_reactor::{
    Cancelled, CoreHandle, Elapsed, Idle, Nanos, Poller, PollerId, ReactorConfig, SleepAttempt,
    TestCore, VirtualClock, Work,
};

const MS: Duration = Duration::from_millis(1);

type Log = Rc<RefCell<Vec<String>>>;

/// A poller made of closures.
struct Script<P, A> {
    name: &'static str,
    poll: P,
    arm: A,
    disarmed: Rc<Cell<u32>>,
    fds: Vec<OwnedFd>,
}

impl<P, A> Poller for Script<P, A>
where
    P: FnMut(Nanos, u32) -> Work,
    A: FnMut(Nanos) -> Idle,
{
    fn name(&self) -> &str {
        self.name
    }

    fn poll(&mut self, now: Nanos, budget: u32) -> Work {
        (self.poll)(now, budget)
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        (self.arm)(now)
    }

    fn disarm(&mut self) {
        self.disarmed.set(self.disarmed.get() + 1);
    }

    fn wake_fds(&self) -> std::io::Result<Vec<OwnedFd>> {
        self.fds.iter().map(OwnedFd::try_clone).collect()
    }
}

fn script<P, A>(name: &'static str, poll: P, arm: A) -> Box<Script<P, A>> {
    Box::new(Script {
        name,
        poll,
        arm,
        disarmed: Rc::default(),
        fds: Vec::new(),
    })
}

fn note(log: &Log, entry: impl Into<String>) {
    log.borrow_mut().push(entry.into());
}

/// Goal: the phases of a turn come in the documented order.
#[test]
fn a_turn_has_its_order() {
    let mut core = TestCore::new();
    let log = Log::default();
    for name in ["first", "second"] {
        let ours = Rc::clone(&log);
        let poll = move |_, _| {
            note(&ours, name);
            Work::None
        };
        core.add_poller(script(name, poll, |_| Idle::Quiet))
            .unwrap();
    }
    let (here, ours) = (core.core().clone(), Rc::clone(&log));
    drop(core.spawn_local(async move {
        note(&ours, "future");
        here.after(Duration::ZERO).await;
        here.after(MS).await;
        note(&ours, "timer");
    }));
    // A message must be `Send` and cannot carry this log, so it reaches the log through a
    // thread-local.
    let ours = Rc::clone(&log);
    thread_local!(static LOG: RefCell<Log> = RefCell::default());
    LOG.set(ours);
    core.handle()
        .send(Box::new(|_| LOG.with_borrow(|log| note(log, "message"))))
        .unwrap();
    assert!(core.turn());
    assert_eq!(*log.borrow(), ["message", "first", "second", "future"]);
    core.run_until_idle();
    log.borrow_mut().clear();
    core.clock().advance(MS);
    // The timer fires in this turn; the future it wakes runs in the next.
    assert!(core.turn());
    assert_eq!(*log.borrow(), ["first", "second"]);
    assert!(core.turn());
    assert_eq!(
        *log.borrow(),
        ["first", "second", "first", "second", "timer"]
    );
    assert!(!core.turn());
}

/// Goal: timers fire in order, at their moment and not before, cancelled ones never; in virtual
/// time each at exactly its deadline.
#[test]
fn timers_fire_at_their_moment() {
    let mut core = TestCore::new();
    let log = Log::default();
    for delay in [5u32, 1, 3, 3, 9] {
        let (here, ours) = (core.core().clone(), Rc::clone(&log));
        drop(core.spawn_local(async move {
            here.after(MS * delay).await;
            note(&ours, format!("{delay}@{}", here.now().0 / 1_000_000));
        }));
    }
    let here = core.core().clone();
    let cancelled = core.spawn_local(async move { here.after(MS * 2).await });
    core.run_until_idle();
    assert_eq!(core.handle().stats().timers, 6);
    cancelled.cancel();
    core.advance(MS * 2);
    assert_eq!(*log.borrow(), ["1@1"]);
    assert_eq!(
        core.handle().stats().timers,
        4,
        "a cancelled timer is removed immediately"
    );
    core.clock().advance(MS - Duration::from_nanos(1));
    assert_eq!(core.run_until_idle(), 0, "one nanosecond early");
    core.advance(MS * 7);
    assert_eq!(*log.borrow(), ["1@1", "3@3", "3@3", "5@5", "9@9"]);
    assert_eq!(core.try_sleep(), SleepAttempt::Until(None));
}

/// Goal: a timer can be moved to an earlier or later time and awaited again.
#[test]
fn a_timer_can_be_moved() {
    let mut core = TestCore::new();
    let here = core.core().clone();
    let ended = core.block_on(async {
        let start = here.now();
        let mut timer = Box::pin(here.after(MS * 10));
        let (earlier, _, _) = select_all([Box::pin(here.after(MS)), timer]).await;
        let () = earlier;
        timer = Box::pin(here.after(MS * 10));
        assert!(here.timeout(MS, &mut timer).await.is_err());
        timer.as_mut().reset(here.now() + MS);
        timer.as_mut().await;
        here.now().since(start)
    });
    assert_eq!(ended, MS * 3);
}

/// Goal: a timeout drops a future that is late, and no other.
#[test]
fn timeouts_drop_the_future() {
    let mut core = TestCore::new();
    let here = core.core().clone();
    let (late, early) = core.block_on(async {
        join(
            here.timeout(MS, here.after(MS * 2)),
            here.timeout(MS * 2, here.after(MS)),
        )
        .await
    });
    assert_eq!(late, Err(Elapsed { limit: MS }));
    assert_eq!(early, Ok(()));
}

/// Goal: futures return results and can be cancelled. They run on when their handle is dropped, and
/// are dropped with the core.
#[test]
fn futures_complete_or_are_dropped() {
    let mut core = TestCore::new();
    let dropped = Rc::new(Cell::new(0));
    struct DropCounter(Rc<Cell<u32>>);
    impl Drop for DropCounter {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }
    let here = core.core().clone();
    let result = core.spawn_local(async move {
        here.yield_now().await;
        Rc::new(5)
    });
    assert_eq!(core.block_on(result), Ok(Rc::new(5)));

    let alive = DropCounter(Rc::clone(&dropped));
    let task = core.spawn_local(async move {
        let _alive = alive;
        std::future::pending::<()>().await;
    });
    core.run_until_idle();
    assert!(!task.is_finished());
    let waiting = core.core().spawn_local(async move {
        // Awaiting a cancelled task returns an error.
        task.cancel();
    });
    assert_eq!(core.block_on(waiting), Ok(()));
    core.run_until_idle();
    assert_eq!(dropped.get(), 1);

    let (alive, here) = (DropCounter(Rc::clone(&dropped)), core.core().clone());
    let orphan = core.spawn_local(async move {
        let _alive = alive;
        // A nested task that is pending when the core ends.
        here.spawn_local(std::future::pending::<()>()).await
    });
    core.run_until_idle();
    assert_eq!(core.handle().stats().tasks, 2);
    drop(core);
    assert_eq!(dropped.get(), 2);
    let mut other = TestCore::new();
    assert_eq!(other.block_on(orphan), Err(Cancelled), "the core is gone");
}

/// Goal: the budget is passed to the pollers, can be changed at run time, and bounds a turn.
#[test]
fn pollers_get_their_budget() {
    let config = ReactorConfig {
        poll_budget: 8,
        ..ReactorConfig::default()
    };
    let mut core = TestCore::with_clock(config, VirtualClock::new());
    let backlog = Rc::new(Cell::new(100u32));
    let ours = Rc::clone(&backlog);
    let poll = move |_, budget: u32| match ours.get().min(budget) {
        0 => Work::None,
        did => {
            ours.set(ours.get() - did);
            Work::Did(did)
        }
    };
    core.add_poller(script("queue", poll, |_| Idle::Quiet))
        .unwrap();
    core.turn();
    assert_eq!(backlog.get(), 92);
    core.handle().set_poll_budget(32);
    core.turn();
    assert_eq!(backlog.get(), 60);
    assert_eq!(core.run_until_idle(), 2);
    let stats = &core.handle().pollers()[0];
    assert_eq!(
        (stats.run_count, stats.busy_count, stats.items),
        (5, 4, 100)
    );
}

/// Goal: a future that always wakes itself, and a message that always sends itself again, do not
/// block other work.
#[test]
fn self_waking_work_starves_no_other_work() {
    fn again(core: &CoreHandle) {
        core.handle().send(Box::new(again)).unwrap();
    }
    let mut core = TestCore::new();
    let polled = Rc::new(Cell::new(0));
    let ours = Rc::clone(&polled);
    let poll = move |_, _| {
        ours.set(ours.get() + 1);
        Work::None
    };
    core.add_poller(script("modest", poll, |_| Idle::Quiet))
        .unwrap();
    core.handle().send(Box::new(again)).unwrap();
    let here = core.core().clone();
    drop(core.spawn_local(async move {
        loop {
            here.yield_now().await;
        }
    }));
    (0..10).for_each(|_| assert!(core.turn()));
    assert_eq!(polled.get(), 10);
    assert_eq!(core.try_sleep(), SleepAttempt::Refused);
}

/// Goal: pollers may add and remove pollers, themselves included, in the middle of a turn. Each
/// poller is called exactly once, and none after its removal.
#[test]
fn pollers_add_and_remove_pollers() {
    let mut core = TestCore::new();
    let log = Log::default();
    let plain = |name: &'static str| {
        let ours = Rc::clone(&log);
        let poll = move |_, _| {
            note(&ours, name);
            Work::None
        };
        script(name, poll, |_| Idle::Quiet)
    };
    let early = core.add_poller(plain("early")).unwrap();
    let (here, ours) = (core.core().clone(), Rc::clone(&log));
    let late = Rc::new(Cell::new(None::<PollerId>));
    let (victim, newcomer) = (Rc::clone(&late), RefCell::new(Some(plain("newcomer"))));
    let poll = move |_, _| {
        note(&ours, "chief");
        here.remove_poller(early);
        here.remove_poller(victim.get().unwrap());
        here.remove_poller(here.current_poller().unwrap());
        if let Some(poller) = newcomer.take() {
            here.add_poller(poller).unwrap();
        }
        Work::None
    };
    core.add_poller(script("chief", poll, |_| Idle::Quiet))
        .unwrap();
    core.add_poller(plain("between")).unwrap();
    late.set(Some(core.add_poller(plain("late")).unwrap()));
    core.turn();
    assert_eq!(*log.borrow(), ["early", "chief", "between", "newcomer"]);
    log.borrow_mut().clear();
    core.turn();
    assert_eq!(*log.borrow(), ["between", "newcomer"]);
    assert_eq!(core.current_poller(), None);
    let names: Vec<String> = core
        .handle()
        .pollers()
        .into_iter()
        .map(|p| p.name)
        .collect();
    assert_eq!(names, ["between", "newcomer"]);
}

/// Goal: the results of the pollers' `arm` decide the sleep. One busy poller prevents it; otherwise
/// the earliest wake-up time of pollers and timers counts. Every armed poller is disarmed.
#[test]
fn arming_decides_the_sleep() {
    let mut core = TestCore::new();
    let answer = Rc::new(Cell::new(Idle::Quiet));
    let disarmed = Rc::new(Cell::new(0));
    let ours = Rc::clone(&answer);
    let poller = Script {
        name: "moody",
        poll: |_, _| Work::None,
        arm: move |_| ours.get(),
        disarmed: Rc::clone(&disarmed),
        fds: Vec::new(),
    };
    core.add_poller(Box::new(poller)).unwrap();
    assert_eq!(
        core.try_sleep(),
        SleepAttempt::Refused,
        "the poller was added in this turn"
    );
    assert_eq!(core.try_sleep(), SleepAttempt::Until(None));
    answer.set(Idle::Until(Nanos(7_000)));
    assert_eq!(core.try_sleep(), SleepAttempt::Until(Some(Nanos(7_000))));
    let here = core.core().clone();
    drop(core.spawn_local(async move { here.timer_at(Nanos(5_000)).await }));
    core.run_until_idle();
    assert_eq!(core.try_sleep(), SleepAttempt::Until(Some(Nanos(5_000))));
    answer.set(Idle::Busy);
    let before = disarmed.get();
    assert_eq!(core.try_sleep(), SleepAttempt::Refused);
    assert_eq!(disarmed.get(), before + 1);
    // The second poll, after arming, finds work: no sleep.
    answer.set(Idle::Quiet);
    let armed = Rc::new(Cell::new(false));
    let (on, seen) = (Rc::clone(&armed), Rc::clone(&armed));
    let poll = move |_, _| {
        if seen.take() {
            Work::Did(1)
        } else {
            Work::None
        }
    };
    let arm = move |_| {
        on.set(true);
        Idle::Quiet
    };
    core.add_poller(script("raced", poll, arm)).unwrap();
    core.run_until_idle();
    assert_eq!(core.try_sleep(), SleepAttempt::Refused);
    core.handle().waker().wake();
}

fn eventfd() -> OwnedFd {
    let flags = rustix::event::EventfdFlags::NONBLOCK | rustix::event::EventfdFlags::CLOEXEC;
    rustix::event::eventfd(0, flags).unwrap()
}

fn quiet(fds: Vec<OwnedFd>) -> Box<dyn Poller> {
    let (poll, arm) = (|_: Nanos, _: u32| Work::None, |_: Nanos| Idle::Quiet);
    Box::new(Script {
        name: "quiet",
        poll,
        arm,
        disarmed: Rc::default(),
        fds,
    })
}

/// Goal: a descriptor is watched while one of its pollers exists, and no longer.
#[test]
fn wake_descriptors_follow_their_pollers() {
    let mut core = TestCore::new();
    let ring = |fd: &OwnedFd| rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
    let woken = |core: &mut TestCore| {
        core.run_until_idle();
        core.sleep_for_real(5 * MS)
    };
    let shared = eventfd();
    let copy = || vec![shared.try_clone().unwrap()];
    let a = core.add_poller(quiet(copy())).unwrap();
    let b = core.add_poller(quiet(copy())).unwrap();
    assert!(!woken(&mut core));
    ring(&shared);
    assert!(woken(&mut core));
    core.remove_poller(a);
    assert!(woken(&mut core), "b still needs it");
    core.remove_poller(b);
    assert!(!woken(&mut core), "no poller needs it");

    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let error = core.add_poller(quiet(vec![file.into()])).unwrap_err();
    assert_eq!(error.poller, "quiet");
    assert_eq!(
        error.source.raw_os_error(),
        Some(rustix::io::Errno::PERM.raw_os_error())
    );
}

/// Goal: a poller may change its descriptors. If they cannot be watched, the reactor stays awake so
/// that it misses no event.
#[test]
fn wake_descriptors_can_change() {
    struct ChangingWakeFd(Rc<RefCell<Vec<OwnedFd>>>);
    impl Poller for ChangingWakeFd {
        fn name(&self) -> &str {
            "changing"
        }
        fn poll(&mut self, _: Nanos, _: u32) -> Work {
            Work::None
        }
        fn arm(&mut self, _: Nanos) -> Idle {
            Idle::Quiet
        }
        fn wake_fds(&self) -> std::io::Result<Vec<OwnedFd>> {
            self.0.borrow().iter().map(OwnedFd::try_clone).collect()
        }
    }
    let mut core = TestCore::new();
    let fds = Rc::new(RefCell::new(Vec::new()));
    let id = core
        .add_poller(Box::new(ChangingWakeFd(Rc::clone(&fds))))
        .unwrap();
    let fd = eventfd();
    rustix::io::write(&fd, &1u64.to_ne_bytes()).unwrap();
    core.run_until_idle();
    assert!(!core.sleep_for_real(MS));
    fds.borrow_mut().push(fd.try_clone().unwrap());
    core.refresh_wake_fds(id);
    core.run_until_idle();
    assert!(core.sleep_for_real(MS * 5));
    // The next descriptor may have the number of one that was closed.
    fds.borrow_mut().clear();
    drop(fd);
    fds.borrow_mut().push(eventfd());
    core.refresh_wake_fds(id);
    core.run_until_idle();
    assert!(
        !core.sleep_for_real(MS),
        "the closed one is watched no longer"
    );
    rustix::io::write(&fds.borrow()[0], &1u64.to_ne_bytes()).unwrap();
    assert!(core.sleep_for_real(MS * 5));
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    fds.replace(vec![file.into()]);
    core.refresh_wake_fds(id);
    core.run_until_idle();
    assert_eq!(
        core.try_sleep(),
        SleepAttempt::Refused,
        "a plain file wakes no reactor"
    );
    fds.borrow_mut().clear();
    core.refresh_wake_fds(id);
    core.run_until_idle();
    assert_eq!(core.try_sleep(), SleepAttempt::Until(None));
}

/// Goal: busy, idle and sleeping time add up, each counted for the right activity.
#[test]
fn time_is_accounted() {
    let clock = VirtualClock::new();
    let mut core = TestCore::with_clock(ReactorConfig::default(), clock.clone());
    let busy = Rc::new(Cell::new(true));
    let (ours, passing) = (Rc::clone(&busy), clock.clone());
    let poll = move |_, _| {
        passing.advance(MS);
        if ours.get() { Work::Did(1) } else { Work::None }
    };
    core.add_poller(script("clockwork", poll, |_| Idle::Quiet))
        .unwrap();
    (0..3).for_each(|_| assert!(core.turn()));
    busy.set(false);
    (0..5).for_each(|_| assert!(!core.turn()));
    // The next turn adds the time of the turn before.
    core.turn();
    let stats = core.handle().stats();
    assert_eq!(
        (stats.turns, stats.busy_ns, stats.idle_ns),
        (9, 3_000_000, 5_000_000)
    );
    assert_eq!((stats.sleep_ns, stats.longest_turn_ns), (0, 1_000_000));
}

/// Goal: two cores on one thread wake each other's futures, with a common clock.
#[test]
fn two_cores_on_one_thread() {
    let clock = VirtualClock::new();
    let mut host = TestCore::with_clock(ReactorConfig::default(), clock.clone());
    let mut target = TestCore::with_clock(ReactorConfig::default(), clock);
    let there = target.handle();
    let task = host.spawn_local(async move {
        there
            .run_future(|core| async move { core.after(MS).await })
            .await
            .unwrap();
        there.run(|core| core.now()).await.unwrap()
    });
    for _ in 0..4 {
        host.run_until_idle();
        target.advance(MS);
    }
    assert!(task.is_finished());
    // The other core slept one millisecond, and both cores share the clock.
    assert_eq!(host.block_on(task), Ok(Nanos(1_000_000)));
}
