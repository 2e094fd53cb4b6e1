//! [`ReactorHandle`]: the interface of a reactor for other threads: sends closures to it, and stops
//! it.

use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::bell::ReactorWaker;
use crate::config::Mode;
use crate::core::{CoreHandle, Message, Shared};
use crate::mailbox::{Envelope, MailboxFull, Refused, SendError};
use crate::oneshot::{Receiver, oneshot};
use crate::shared::ReactorPanicked;
use crate::stats::{Activity, PollerStats, ReactorStats, Stall};
use crate::tasks::{SourceLocation, on_reactor};

/// The handle of a reactor for other threads: sends it work, reads its statistics, stops it. Cheap
/// to clone.
///
/// The reactor runs until [`ReactorHandle::stop`], whether or not handles remain.
#[derive(Clone)]
pub struct ReactorHandle {
    pub(crate) shared: Arc<Shared>,
}

/// The error of a call to a reactor that returned no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    #[error(transparent)]
    NotSent(#[from] SendError),
    #[error("reactor \"{reactor}\" stopped before it answered")]
    Stopped { reactor: String },
    #[error("a blocking call to reactor \"{reactor}\" from a reactor could never return; use run")]
    OnReactor { reactor: String },
}

impl ReactorHandle {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    pub fn name(&self) -> &str {
        &self.shared.name
    }

    pub fn core(&self) -> Option<usize> {
        self.shared.core
    }

    pub fn tid(&self) -> i32 {
        self.shared.tid.load(Ordering::Relaxed)
    }

    /// Queues `message` to run on the reactor, in its next turn unless many messages wait. Fails if
    /// the mailbox is full or the reactor has stopped.
    #[track_caller]
    pub fn send(&self, message: Message) -> Result<(), SendError> {
        self.send_from(Location::caller(), message)
    }

    /// Runs `f` on the reactor and resolves to its result, on any thread or runtime. `f` is sent
    /// immediately, not at the first poll of the future.
    #[track_caller]
    pub fn run<F, R>(&self, f: F) -> impl Future<Output = Result<R, CallError>> + Send + use<F, R>
    where
        F: FnOnce(&CoreHandle) -> R + Send + 'static,
        R: Send + 'static,
    {
        self.answer(self.ask(Location::caller(), f))
    }

    /// Creates and runs a future on the reactor and resolves to its result. Dropping the returned
    /// future does not cancel it.
    #[track_caller]
    pub fn run_future<F, Fut>(
        &self,
        f: F,
    ) -> impl Future<Output = Result<Fut::Output, CallError>> + Send + use<F, Fut>
    where
        F: FnOnce(CoreHandle) -> Fut + Send + 'static,
        Fut: Future + 'static,
        Fut::Output: Send + 'static,
    {
        let place = Location::caller();
        let (sender, receiver) = oneshot();
        let message = move |core: &CoreHandle| {
            let future = f(core.clone());
            drop(core.spawn_from(place, async move { sender.send(future.await) }));
        };
        self.answer(self.send_from(place, Box::new(message)).map(|()| receiver))
    }

    /// Runs `f` on the reactor and blocks until its result arrives. On a reactor it fails with
    /// [`CallError::OnReactor`].
    #[track_caller]
    pub fn call<F, R>(&self, f: F) -> Result<R, CallError>
    where
        F: FnOnce(&CoreHandle) -> R + Send + 'static,
        R: Send + 'static,
    {
        if on_reactor() {
            return Err(CallError::OnReactor {
                reactor: self.shared.name.clone(),
            });
        }
        self.ask(Location::caller(), f)?
            .wait()
            .ok_or_else(|| self.stopped())
    }

    /// A waker for the reactor, usable from any thread.
    pub fn waker(&self) -> ReactorWaker {
        ReactorWaker(Arc::clone(&self.shared.bell))
    }

    pub fn mode(&self) -> Mode {
        Mode::decode(self.shared.tuning.mode.load(Ordering::Relaxed))
    }

    /// Sets the mode, from the next turn on.
    pub fn set_mode(&self, mode: Mode) {
        self.shared
            .tuning
            .mode
            .store(mode.encode(), Ordering::Relaxed);
        self.shared.bell.ring();
    }

    pub fn busy_poll(&self) -> Duration {
        Duration::from_nanos(self.shared.tuning.busy_poll_ns.load(Ordering::Relaxed))
    }

    pub fn set_busy_poll_us(&self, us: u64) {
        self.shared
            .tuning
            .busy_poll_ns
            .store(us.saturating_mul(1000), Ordering::Relaxed);
    }

    pub fn set_poll_budget(&self, items: u32) {
        self.shared
            .tuning
            .poll_budget
            .store(items.max(1), Ordering::Relaxed);
    }

    pub fn stats(&self) -> ReactorStats {
        let shared = &*self.shared;
        let counters = &shared.counters;
        let (doing, since) = counters.pulse.read();
        let sleeping = doing == Activity::Asleep;
        // The reactor publishes a sleep when it ends, so add the present one here.
        let napped = if sleeping {
            shared.clock.now().since(since).as_nanos() as u64
        } else {
            0
        };
        ReactorStats {
            name: shared.name.clone(),
            core: shared.core,
            tid: self.tid(),
            mode: self.mode(),
            alive: self.is_alive(),
            sleeping,
            busy_ns: counters.busy_ns.read(),
            idle_ns: counters.idle_ns.read(),
            sleep_ns: counters.sleep_ns.read() + napped,
            turns: counters.turns.read(),
            sleeps: counters.sleeps.read(),
            wakeups: counters.wakeups.read(),
            core_taken: counters.core_taken.read(),
            messages: counters.messages.read(),
            futures_run: counters.futures_run.read(),
            timers_fired: counters.timers_fired.read(),
            tasks: counters.tasks.load(Ordering::Relaxed),
            timers: counters.timers.load(Ordering::Relaxed),
            mailbox_len: shared.mailbox.len(),
            longest_turn_ns: counters.longest_turn_ns.read(),
            stalls: shared.stalls.load(Ordering::Relaxed),
        }
    }

    /// Statistics of the pollers, in the order in which they run.
    pub fn pollers(&self) -> Vec<PollerStats> {
        self.shared.directory.pollers()
    }

    /// The latest turn that the watchdog found too long.
    pub fn last_stall(&self) -> Option<Stall> {
        self.shared.last_stall.lock().clone()
    }

    /// False once the reactor has stopped or panicked.
    pub fn is_alive(&self) -> bool {
        self.shared.alive.load(Ordering::Acquire)
    }

    /// Requests the reactor to stop after its turn and to drop its futures and pollers on its own
    /// thread. Does not wait; see [`ReactorHandle::join`].
    pub fn stop(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.bell.ring();
    }

    /// Waits until the reactor has stopped. The error means that it panicked. Several threads may
    /// call this.
    ///
    /// # Panics
    /// On a reactor, which must never block.
    pub fn join(&self) -> Result<(), ReactorPanicked> {
        assert!(!on_reactor(), "a reactor must not wait for another");
        let outcome = {
            let mut outcome = self.shared.outcome.lock();
            let runs = |outcome: &mut Option<_>| outcome.is_none();
            self.shared.ended.wait_while(&mut outcome, runs);
            outcome.clone()
        };
        let thread = self.shared.thread.lock().take();
        if let Some(thread) = thread {
            // The reactor catches its panics and stores them in `outcome`.
            let _ = thread.join();
        }
        outcome.unwrap_or(Ok(()))
    }

    fn send_from(&self, from: SourceLocation, message: Message) -> Result<(), SendError> {
        self.shared
            .mailbox
            .push(Envelope { message, from })
            .map_err(|refused| match refused {
                Refused::Full => SendError::Full(MailboxFull {
                    reactor: self.shared.name.clone(),
                    capacity: self.shared.mailbox.capacity(),
                }),
                Refused::Closed => SendError::Stopped {
                    reactor: self.shared.name.clone(),
                },
            })
    }

    fn ask<F, R>(&self, from: SourceLocation, f: F) -> Result<Receiver<R>, SendError>
    where
        F: FnOnce(&CoreHandle) -> R + Send + 'static,
        R: Send + 'static,
    {
        let (sender, receiver) = oneshot();
        self.send_from(
            from,
            Box::new(move |core: &CoreHandle| sender.send(f(core))),
        )?;
        Ok(receiver)
    }

    fn answer<R: Send>(
        &self,
        reply: Result<Receiver<R>, SendError>,
    ) -> impl Future<Output = Result<R, CallError>> + Send + use<R> {
        let stopped = self.stopped();
        async move { reply?.await.ok_or(stopped) }
    }

    fn stopped(&self) -> CallError {
        CallError::Stopped {
            reactor: self.shared.name.clone(),
        }
    }
}

impl std::fmt::Debug for ReactorHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ReactorHandle({:?})", self.shared.name)
    }
}

impl CoreHandle {
    /// The reactor's handle for other threads.
    pub fn handle(&self) -> ReactorHandle {
        ReactorHandle::new(Arc::clone(&self.inner.shared))
    }
}
