//! The state of a reactor that its handles on other threads access.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::bell::Bell;
use crate::clock::Clock;
use crate::config::ReactorConfig;
use crate::mailbox::Mailbox;
use crate::stats::{Activity, Counters, Directory, Stall};

/// The shared state; `M` is the type of messages.
pub(crate) struct SharedState<M> {
    pub(crate) name: String,
    pub(crate) core: Option<usize>,
    pub(crate) tid: AtomicI32,
    pub(crate) clock: Clock,
    pub(crate) bell: Arc<Bell>,
    pub(crate) mailbox: Mailbox<M>,
    pub(crate) tuning: Tuning,
    pub(crate) watchdog_limit: Option<Duration>,
    pub(crate) stop: AtomicBool,
    pub(crate) alive: AtomicBool,
    pub(crate) counters: Counters,
    pub(crate) directory: Directory,
    pub(crate) stalls: AtomicU64,
    pub(crate) last_stall: Mutex<Option<Stall>>,
    pub(crate) thread: Mutex<Option<JoinHandle<()>>>,
    pub(crate) outcome: Mutex<Option<Result<(), ReactorPanicked>>>,
    pub(crate) ended: Condvar,
}

/// The settings that can change while the reactor runs.
pub(crate) struct Tuning {
    pub(crate) mode: AtomicU8,
    pub(crate) busy_poll_ns: AtomicU64,
    pub(crate) poll_budget: AtomicU32,
}

/// The error of a reactor that ended because its code panicked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("reactor \"{reactor}\" panicked in {during}: {message}")]
pub struct ReactorPanicked {
    pub reactor: String,
    /// The code that panicked: a poller by name, a message or future by its source location.
    pub during: String,
    pub message: String,
}

impl<M> SharedState<M> {
    pub(crate) fn new(config: ReactorConfig, clock: Clock) -> std::io::Result<Self> {
        let bell = Arc::new(Bell::new()?);
        Ok(Self {
            mailbox: Mailbox::new(config.mailbox_capacity, Arc::clone(&bell)),
            bell,
            name: config.name,
            core: config.core,
            tid: AtomicI32::new(0),
            clock,
            tuning: Tuning {
                mode: AtomicU8::new(config.mode.encode()),
                busy_poll_ns: AtomicU64::new(config.busy_poll_us.saturating_mul(1000)),
                poll_budget: AtomicU32::new(config.poll_budget.max(1)),
            },
            watchdog_limit: config.watchdog_limit,
            stop: AtomicBool::new(false),
            alive: AtomicBool::new(true),
            counters: Counters::default(),
            directory: Directory::default(),
            stalls: AtomicU64::new(0),
            last_stall: Mutex::default(),
            thread: Mutex::default(),
            outcome: Mutex::default(),
            ended: Condvar::new(),
        })
    }

    /// Closes the mailbox and drops the waiting messages.
    pub(crate) fn close(&self) {
        self.alive.store(false, Ordering::Release);
        fence(Ordering::SeqCst);
        self.mailbox.close();
    }

    pub(crate) fn end(&self, outcome: Result<(), ReactorPanicked>) {
        self.counters.pulse.now_doing(Activity::Ended);
        *self.outcome.lock() = Some(outcome);
        self.ended.notify_all();
    }
}
