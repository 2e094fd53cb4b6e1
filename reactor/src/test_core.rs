//! A reactor for tests, without a thread and in virtual time: the test runs its turns.
//!
//! The turn, mailbox, futures, timers and sleep handshake are those of a real reactor. Only the
//! loop around them belongs to the test. One thread can step several cores, for example a host's
//! and a target's.

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
use crate::turn::SleepDecision;

/// Turns after which [`TestCore::run_until_idle`] panics.
const MAX_TURNS: usize = 1_000_000;

/// A reactor without a thread, in virtual time. It dereferences to its [`CoreHandle`].
pub struct TestCore {
    core: Core,
    clock: VirtualClock,
}

/// The result of [`TestCore::try_sleep`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SleepAttempt {
    /// The core has work, or a poller is [`crate::Idle::Busy`].
    Refused,
    /// A real reactor would sleep until this time, or until a wake-up.
    Until(Option<Nanos>),
}

impl TestCore {
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Self::with_clock(ReactorConfig::default(), VirtualClock::new())
    }

    /// Creates a core on `clock`, which several cores can share.
    ///
    /// # Panics
    /// When the process has no free descriptor for an eventfd or an epoll.
    pub fn with_clock(config: ReactorConfig, clock: VirtualClock) -> Self {
        let shared = Shared::new(config, clock.clock()).expect("eventfd for a test core");
        let core = Core::new(Arc::new(shared)).expect("epoll for a test core");
        Self { core, clock }
    }

    pub fn core(&self) -> &CoreHandle {
        &self.core
    }

    pub fn clock(&self) -> &VirtualClock {
        &self.clock
    }

    /// Runs one turn. Returns true if it found work.
    pub fn turn(&mut self) -> bool {
        self.entered(Core::turn)
    }

    /// Runs turns until one finds no work. Returns the number of turns with work.
    ///
    /// # Panics
    /// When `MAX_TURNS` turns in a row found work.
    pub fn run_until_idle(&mut self) -> usize {
        for turns in 0..MAX_TURNS {
            if !self.turn() {
                return turns;
            }
        }
        panic!(
            "each of {MAX_TURNS} turns found work, at {:?}",
            self.clock.now()
        );
    }

    /// Advances the clock from timer to timer, and runs everything due at each step.
    pub fn advance(&mut self, by: Duration) {
        let end = self.clock.now() + by;
        self.run_until_idle();
        let step = (by / 1000).max(Duration::from_micros(1));
        while let Some(next) = self.next_wake(step).filter(|&next| next <= end) {
            // A poller whose wake-up time has passed is polled one nanosecond later.
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

    /// Runs a future to completion. Advances the clock when no turn has work.
    ///
    /// # Panics
    /// When the future is pending and no timer or poller can wake it.
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
                None => panic!("no timer or poller can wake the pending future"),
            }
        }
    }

    /// Arms all pollers, announces the sleep, polls once more, and returns what a real reactor
    /// would do next. The core is awake again afterwards.
    pub fn try_sleep(&mut self) -> SleepAttempt {
        self.entered(|core| match core.prepare_to_sleep() {
            SleepDecision::No => SleepAttempt::Refused,
            SleepDecision::Until(until) => {
                core.wake_up();
                SleepAttempt::Until(until)
            }
        })
    }

    /// Like [`TestCore::try_sleep`], but waits on the real wake descriptors for at most `limit` of
    /// real time. Returns true if one of them was ready.
    ///
    /// # Panics
    /// When the epoll fails.
    pub fn sleep_for_real(&mut self, limit: Duration) -> bool {
        let until = self.clock.now() + limit;
        self.entered(|core| match core.prepare_to_sleep() {
            SleepDecision::No => true,
            SleepDecision::Until(_) => {
                let began = std::time::Instant::now();
                core.sleep(Some(until)).expect("epoll of a test core");
                began.elapsed() < limit
            }
        })
    }

    /// The next timer, or the earliest wake-up time of a poller. While a poller is busy, one `step`
    /// from now, because only polling shows whether it has work.
    fn next_wake(&mut self, step: Duration) -> Option<Nanos> {
        match self.try_sleep() {
            SleepAttempt::Until(until) => until,
            SleepAttempt::Refused => Some(self.clock.now() + step),
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
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}
