//! A reactor without a thread and without real time, stepped by a test.
//!
//! The same turn, mailbox, futures, timers and sleep handshake as a real one; only the loop around
//! it is the test's. Several may be stepped on one thread, for example a host's and a target's.

use std::ops::Deref;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use crate::Nanos;
use crate::clock::VirtualClock;
use crate::config::ReactorConfig;
use crate::core::Shared;
use crate::core::{Core, CoreHandle};
use crate::turn::Rest;

/// Turns that [`TestCore::run_until_idle`] takes before it says that there is no end to it.
const MAX_TURNS: usize = 1_000_000;

pub struct TestCore {
    core: Core,
    clock: VirtualClock,
}

/// How an attempt to sleep went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slept {
    /// There was work, or a poller is busy.
    Refused,
    /// It would have slept until this moment, or until something wakes it.
    Until(Option<Nanos>),
}

impl TestCore {
    #[allow(clippy::new_without_default)]
    pub fn new() -> TestCore {
        TestCore::with_clock(ReactorConfig::default(), VirtualClock::new())
    }

    /// Makes a core on the given clock, which several cores can share.
    ///
    /// # Panics
    /// When there is no descriptor left for an eventfd or an epoll.
    pub fn with_clock(config: ReactorConfig, clock: VirtualClock) -> TestCore {
        let shared = Shared::new(config, clock.clock()).expect("eventfd for a test core");
        let core = Core::new(Arc::new(shared)).expect("epoll for a test core");
        TestCore { core, clock }
    }

    pub fn core(&self) -> &CoreHandle {
        &self.core
    }

    pub fn clock(&self) -> &VirtualClock {
        &self.clock
    }

    /// One turn. Says whether it found work.
    pub fn turn(&mut self) -> bool {
        self.entered(Core::turn)
    }

    /// Turns until one finds nothing to do. Says how many found something.
    ///
    /// # Panics
    /// When there is no end to it.
    pub fn run_until_idle(&mut self) -> usize {
        for turns in 0..MAX_TURNS {
            if !self.turn() {
                return turns;
            }
        }
        panic!(
            "still work after {MAX_TURNS} turns at {:?}",
            self.clock.now()
        );
    }

    /// Lets time pass from timer to timer, running everything that comes due at its moment.
    pub fn advance(&mut self, by: Duration) {
        let end = self.clock.now() + by;
        self.run_until_idle();
        let step = (by / 1000).max(Duration::from_micros(1));
        while let Some(next) = self.next_wake(step).filter(|&next| next <= end) {
            // A poller that asks for a moment already passed is polled at the next nanosecond.
            self.clock.set(
                next.max(self.clock.now() + Duration::from_nanos(1))
                    .min(end),
            );
            self.run_until_idle();
            if self.clock.now() >= end {
                break;
            }
        }
        self.clock.set(end);
        self.run_until_idle();
    }

    /// Runs a future to its end, letting time pass when only time can help.
    ///
    /// # Panics
    /// When nothing is left that could ever wake it.
    pub fn block_on<F: Future>(&mut self, future: F) -> F::Output {
        let mut future = pin!(future);
        let woken = Arc::new(Flag(AtomicBool::new(true)));
        let waker = Waker::from(Arc::clone(&woken));
        loop {
            if woken.0.swap(false, Ordering::AcqRel)
                && let Poll::Ready(output) =
                    self.entered(|_| future.as_mut().poll(&mut Context::from_waker(&waker)))
            {
                return output;
            }
            let worked = self.turn();
            if worked || woken.0.load(Ordering::Acquire) {
                continue;
            }
            match self.next_wake(Duration::from_micros(1)) {
                Some(next) => self
                    .clock
                    .set(next.max(self.clock.now() + Duration::from_nanos(1))),
                None => panic!("future waits for nothing that could happen"),
            }
        }
    }

    /// Arms all pollers, announces, polls once more, and returns what a real reactor would do next.
    /// The core is awake again afterwards.
    pub fn try_sleep(&mut self) -> Slept {
        self.entered(|core| match core.prepare_to_sleep() {
            Rest::No => Slept::Refused,
            Rest::Until(until) => {
                core.wake_up();
                Slept::Until(until)
            }
        })
    }

    /// Sleeps like [`TestCore::try_sleep`], but really looks at the wake sources, for at most
    /// `limit` of real time. True if one of them was ready.
    ///
    /// # Panics
    /// When the epoll fails.
    pub fn sleep_for_real(&mut self, limit: Duration) -> bool {
        let until = self.clock.now() + limit;
        self.entered(|core| match core.prepare_to_sleep() {
            Rest::No => true,
            Rest::Until(_) => {
                let began = std::time::Instant::now();
                core.sleep(Some(until)).expect("epoll of a test core");
                began.elapsed() < limit
            }
        })
    }

    /// The next timer, or the earliest moment that a poller asks for. While a poller is busy, one
    /// `step` from now, because only polling shows whether it has work.
    fn next_wake(&mut self, step: Duration) -> Option<Nanos> {
        match self.try_sleep() {
            Slept::Until(until) => until,
            Slept::Refused => Some(self.clock.now() + step),
        }
    }

    fn entered<R>(&mut self, f: impl FnOnce(&mut Core) -> R) -> R {
        let inner = Rc::clone(&self.core.handle.inner);
        let _entered = inner.tasks.enter();
        f(&mut self.core)
    }
}

impl Deref for TestCore {
    type Target = CoreHandle;

    fn deref(&self) -> &CoreHandle {
        &self.core
    }
}

impl Drop for TestCore {
    fn drop(&mut self) {
        let outcome = self.entered(|core| core.end(Ok(())));
        self.core.inner.shared.end(outcome);
    }
}

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Flag>) {
        self.0.store(true, Ordering::Release);
    }
}
