//! The thread of a reactor: starts it, runs turns, sleeps, and stops.

use std::any::Any;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::clock::Clock;
use crate::config::{Mode, ReactorConfig};
use crate::core::{Core, Shared};
use crate::cores::{CoreSet, pin_to};
use crate::handle::ReactorHandle;
use crate::oneshot::{Sender, oneshot};
use crate::shared::ReactorPanicked;
use crate::stats::Activity;
use crate::turn::SleepDecision;

/// Idle polling after which an adaptive reactor yields its core between turns. The work it waits
/// for may depend on a kernel worker that needs the same core, such as the packet workers of
/// soft-RoCE. Without such a competitor, a yield costs one look at the run queue.
const POLITE_AFTER: Duration = Duration::from_micros(20);

/// The error of starting a reactor.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    #[error("reactor \"{reactor}\" cannot have core {core}: this process may use cores {allowed}")]
    CoreNotAllowed {
        reactor: String,
        core: usize,
        allowed: CoreSet,
    },
    #[error("reactor \"{reactor}\": {what}: {source}")]
    System {
        reactor: String,
        what: &'static str,
        source: std::io::Error,
    },
    #[error(transparent)]
    Init(ReactorPanicked),
}

/// The reactor polls for deadlines nearer than this: falling asleep and waking takes about as long.
const SHORTEST_SLEEP: Duration = Duration::from_micros(10);

/// Starts a reactor, and runs `init` on its thread before its first turn. Returns when `init` has
/// returned.
pub fn spawn<F>(config: ReactorConfig, init: F) -> Result<ReactorHandle, SpawnError>
where
    F: FnOnce(&mut Core) + Send + 'static,
{
    let reactor = config.name.clone();
    let system = |what| {
        let reactor = reactor.clone();
        move |source| SpawnError::System {
            reactor,
            what,
            source,
        }
    };
    if let Some(core) = config.core {
        let allowed = CoreSet::allowed().map_err(system("sched_getaffinity"))?;
        if !allowed.contains(core) {
            return Err(SpawnError::CoreNotAllowed {
                reactor,
                core,
                allowed,
            });
        }
    }
    let shared = Shared::new(config, Clock::real()).map_err(system("eventfd"))?;
    let shared = Arc::new(shared);
    let (started, starting) = oneshot();
    let theirs = Arc::clone(&shared);
    let thread = std::thread::Builder::new()
        .name(shared.name.clone())
        .spawn(move || live(theirs, init, started))
        .map_err(system("thread"))?;
    *shared.thread.lock() = Some(thread);
    let handle = ReactorHandle::new(shared);
    match starting.wait() {
        Some(Ok(())) => Ok(handle),
        Some(Err(error)) => {
            // Wait for the thread's end, so that nothing remains after the error.
            let _ = handle.join();
            Err(error)
        }
        None => Err(match handle.join() {
            Err(panicked) => SpawnError::Init(panicked),
            Ok(()) => system("thread")(std::io::ErrorKind::Interrupted.into()),
        }),
    }
}

/// The thread's main function.
fn live<F>(shared: Arc<Shared>, init: F, started: Sender<Result<(), SpawnError>>)
where
    F: FnOnce(&mut Core),
{
    let mut core = match set_up(&shared) {
        Ok(core) => core,
        Err((what, source)) => {
            shared.close();
            shared.end(Ok(()));
            let reactor = shared.name.clone();
            return started.send(Err(SpawnError::System {
                reactor,
                what,
                source,
            }));
        }
    };
    let inner = Rc::clone(&core.handle.inner);
    let entered = inner.tasks.enter();
    let lived = catch_unwind(AssertUnwindSafe(|| {
        init(&mut core);
        core.apply_changes(0);
        started.send(Ok(()));
        core.run();
    }));
    let outcome = lived.map_err(|panic| core.panicked(panic));
    let outcome = core.end(outcome);
    drop(entered);
    shared.end(outcome);
}

fn set_up(shared: &Arc<Shared>) -> Result<Core, (&'static str, std::io::Error)> {
    if let Some(core) = shared.core {
        pin_to(core).map_err(|error| ("sched_setaffinity", error))?;
    }
    // The default slack lets the kernel end a sleep 50 µs late. Ignore an error.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
    shared.tid.store(
        rustix::thread::gettid().as_raw_nonzero().get(),
        Ordering::Relaxed,
    );
    Core::new(Arc::clone(shared)).map_err(|error| ("epoll", error))
}

impl Core {
    fn run(&mut self) {
        let shared = Arc::clone(&self.inner.shared);
        // Count from the start of the first idle turn: the turn before it may have worked for
        // longer than the whole patience.
        let mut idle_since = None;
        while !shared.stop.load(Ordering::Relaxed) {
            let worked = self.turn();
            if self.patience.runs(self.now()) {
                shared.counters.core_taken.add(1);
            }
            if worked {
                idle_since = None;
                continue;
            }
            let since = *idle_since.get_or_insert_with(|| self.now());
            let patience = match Mode::decode(shared.tuning.mode.load(Ordering::Relaxed)) {
                Mode::Poll => continue,
                Mode::Adaptive => self.patience.with_least(self.busy_poll()),
                Mode::Interrupt => Duration::ZERO,
            };
            let now = self.now();
            let idle = now.since(since);
            let yields = idle >= POLITE_AFTER;
            if idle < patience && !(yields && self.patience.shares_core(now)) {
                if yields {
                    self.patience.yields(now);
                    rustix::thread::sched_yield();
                }
                continue;
            }
            match self.prepare_to_sleep() {
                SleepDecision::No => {}
                SleepDecision::Until(Some(until)) if until.since(self.now()) < SHORTEST_SLEEP => {
                    self.wake_up();
                }
                SleepDecision::Until(until) => {
                    // A failing epoll is a bug of this crate. Polling instead would hide it.
                    self.sleep(until).expect("reactor cannot sleep");
                    let now = self.now();
                    let woken = until.is_none_or(|until| now < until);
                    let least = self.busy_poll();
                    self.patience.slept(least, now.since(since), woken);
                }
            }
            idle_since = None;
        }
    }

    /// Drops the reactor's objects, futures first, because futures may use objects that pollers
    /// hold.
    pub(crate) fn end(
        &mut self,
        mut outcome: Result<(), ReactorPanicked>,
    ) -> Result<(), ReactorPanicked> {
        let shared = Arc::clone(&self.inner.shared);
        let inner = Rc::clone(&self.handle.inner);
        let attempt =
            |core: &mut Self, outcome: &mut Result<(), _>, drop: &mut dyn FnMut(&mut Self)| {
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(core))) {
                    let panicked = core.panicked(panic);
                    // Report the first panic, the cause. Later ones are only logged.
                    if outcome.is_ok() {
                        *outcome = Err(panicked);
                    }
                }
            };
        shared.counters.pulse.now_doing(Activity::Housekeeping);
        attempt(self, &mut outcome, &mut |_| shared.close());
        let mut panics = Vec::new();
        inner.tasks.cancel_all(|panic| panics.push(panic));
        for panic in panics {
            let mut panic = Some(panic);
            attempt(self, &mut outcome, &mut |_| {
                if let Some(panic) = panic.take() {
                    std::panic::resume_unwind(panic)
                }
            });
        }
        loop {
            attempt(self, &mut outcome, &mut |core| {
                core.apply_changes(0);
            });
            let Some(id) = self.slots.last().map(|slot| slot.id) else {
                break;
            };
            shared.counters.pulse.now_doing(Activity::Poller(id));
            self.handle.remove_poller(id);
        }
        // Futures that the drops spawned, and messages that they sent.
        inner.tasks.cancel_all(|_| {});
        outcome
    }

    fn panicked(&self, panic: Box<dyn Any + Send>) -> ReactorPanicked {
        let shared = &self.inner.shared;
        let message = match panic.downcast_ref::<&str>() {
            Some(text) => (*text).to_owned(),
            None => panic.downcast_ref::<String>().cloned().unwrap_or_default(),
        };
        let (doing, _) = shared.counters.pulse.read();
        let during = shared.directory.describe(doing);
        tracing::error!(reactor = %shared.name, %during, %message, "reactor panicked and ends");
        ReactorPanicked {
            reactor: shared.name.clone(),
            during,
            message,
        }
    }
}
