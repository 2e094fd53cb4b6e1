//! The state of a queue pair that its owner (a core) and the control (the home reactor) share.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use crate::data::SglSupport;
use crate::function::Function;
use crate::phase::{Phase, QueueState};
use crate::ring::{Doorbell, Rings, Shadows};

/// The resources of a queue pair: fixed between two creations of it.
pub(crate) struct Grant {
    pub function: Arc<dyn Function>,
    pub rings: Arc<Rings>,
    pub sq: Doorbell,
    pub cq: Doorbell,
    pub shadows: Option<Arc<Shadows>>,
    pub sgl: SglSupport,
    /// Interrupt vector of the completion queue; `None`: the queue does not interrupt.
    pub vector: Option<u16>,
    /// Device slot in which a buffer notes its address.
    pub key: usize,
    /// Delays before a command is sent again, by CRD.
    pub delays: [Duration; 4],
}

pub(crate) struct Link {
    pub qid: u16,
    /// Interrupt vector that the queue may use; `None`: the queue can only be polled.
    pub vector: Option<u16>,
    pub phase: Phase,
    /// The completion queue interrupts from the next time that it is created.
    pub interrupts: AtomicBool,
    /// Turns readable when the phase changed, for an owner that sleeps; and whether it was made so.
    bell: OwnedFd,
    rung: AtomicBool,
    grant: Mutex<Arc<Grant>>,
    /// Its owner is gone: the queue is to be deleted once nothing is in flight.
    pub deserted: AtomicBool,
    /// The controller was asked to create it.
    pub made: AtomicBool,
}

impl Link {
    pub fn new(qid: u16, vector: Option<u16>, grant: Grant) -> std::io::Result<Link> {
        Ok(Link {
            qid,
            vector,
            phase: Phase::new(),
            interrupts: AtomicBool::new(false),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            rung: AtomicBool::new(false),
            grant: Mutex::new(Arc::new(grant)),
            deserted: AtomicBool::new(false),
            made: AtomicBool::new(false),
        })
    }

    /// Control: sets the owner's permission, and wakes it.
    pub fn set_phase(&self, state: QueueState) {
        self.phase.set(state);
        // Full means set.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        self.rung.store(true, Ordering::Release);
    }

    /// Owner: consumes the bell. A later look sees the state it rang for.
    pub fn clear_bell(&self) {
        if self.rung.load(Ordering::Relaxed) && self.rung.swap(false, Ordering::Acquire) {
            let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
        }
    }

    pub fn bell(&self) -> RawFd {
        self.bell.as_raw_fd()
    }

    pub fn grant(&self) -> Arc<Grant> {
        Arc::clone(&self.grant.lock())
    }

    /// Replaces the resources of the queue pair. Call it only while the phase is not live.
    pub fn set_grant(&self, grant: Grant) {
        *self.grant.lock() = Arc::new(grant);
    }
}

/// Requests of a queue pair's owner to the control.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Report {
    pub qid: u16,
    /// The generation that it is about.
    pub generation: u32,
    pub want: Want,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Want {
    /// A queue pair was opened: make it.
    Make,
    /// Its owner is gone: delete it.
    Delete,
    /// The queue is empty and stays so until it is recreated, with interrupts (`on`) or without.
    Interrupts { on: bool },
    /// A command has no completion. `stage` counts the earlier attempts.
    Late {
        cid: u16,
        opcode: u8,
        stage: u8,
        waited: Duration,
    },
    /// Its user gives the command up.
    Abort { cid: u16 },
    /// A completion answers nothing that was asked.
    Liar { cid: u16 },
}

/// Counted by all owners, read by [`crate::Controller::status`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub resets: AtomicU64,
    pub function_resets: AtomicU64,
    pub queue_resets: AtomicU64,
    pub aborts: AtomicU64,
    pub timeouts: AtomicU64,
    pub admin_timeouts: AtomicU64,
    pub resubmitted: AtomicU64,
    pub protocol_errors: AtomicU64,
    pub events: AtomicU64,
    pub losses: AtomicU64,
    pub nudges: AtomicU64,
}

pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
