//! The phases of the daemon, from its start to its end, and waits for a phase.

use std::cell::{Cell, RefCell};
use std::time::Instant;

use tokio::sync::watch;

use super::sandbox::SandboxProblems;

/// A phase of the daemon; they are in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Waiting for `framework_start_init`.
    Startup,
    /// The start runs: only methods that are allowed in every phase can be called.
    Starting,
    Runtime,
    Stopping,
}

/// The daemon's phase, and its request to stop.
#[derive(Debug)]
pub struct Lifecycle {
    pub started: Instant,
    phase: watch::Sender<Phase>,
    stop: watch::Sender<bool>,
    /// The error if the daemon stops because of a failure.
    failure: RefCell<Option<String>>,
    /// Number of times that connecting hosts were held back.
    pub holds: Cell<u64>,
    /// True while calls of an SPDK file remain after the start; hosts are held until they are done.
    pub more_to_come: watch::Sender<bool>,
    /// Parts of the sandbox that the start could not set up.
    pub sandbox: SandboxProblems,
}

impl Default for Lifecycle {
    fn default() -> Self {
        Self {
            started: Instant::now(),
            phase: watch::channel(Phase::Startup).0,
            stop: watch::channel(false).0,
            failure: RefCell::default(),
            holds: Cell::new(0),
            more_to_come: watch::channel(false).0,
            sandbox: SandboxProblems::default(),
        }
    }
}

impl Lifecycle {
    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    pub fn set_phase(&self, phase: Phase) {
        self.phase.send_replace(phase);
    }

    /// Resolves once the daemon is in `phase` or later.
    pub async fn reached(&self, phase: Phase) {
        let mut phases = self.phase.subscribe();
        // The sender lives as long as the engine.
        let _ = phases.wait_for(|now| *now >= phase).await;
    }

    /// Resolves once the daemon is in [`Phase::Runtime`], and every call of its SPDK file was
    /// tried.
    pub async fn configured(&self) {
        self.reached(Phase::Runtime).await;
        // The sender lives as long as the engine.
        let _ = self.more_to_come.subscribe().wait_for(|more| !more).await;
    }

    /// True if [`Lifecycle::configured`] resolves at once.
    pub fn is_configured(&self) -> bool {
        self.phase() >= Phase::Runtime && !*self.more_to_come.borrow()
    }

    /// Asks the daemon to stop.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// Asks the daemon to stop and exit with a failure.
    pub fn fail(&self, why: String) {
        self.failure.replace(Some(why));
        self.stop();
    }

    pub fn failure(&self) -> Option<String> {
        self.failure.borrow().clone()
    }

    /// Resolves once the daemon was asked to stop.
    pub async fn stopping(&self) {
        let _ = self.stop.subscribe().wait_for(|stop| *stop).await;
    }
}
