//! The state of a queue pair that is shared by its owner (the core that does I/O) and the control
//! (the reactor that manages the controller).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use crate::activity::Activity;
use crate::data::SglSupport;
use crate::function::Function;
use crate::phase::{Phase, QueueState};
use crate::ring::{Doorbell, Rings, Shadows};

/// The resources of a queue pair. They change only when the queue pair is created again.
pub(crate) struct Grant {
    pub function: Arc<dyn Function>,
    pub rings: Arc<Rings>,
    pub sq: Doorbell,
    pub cq: Doorbell,
    pub shadows: Option<Arc<Shadows>>,
    pub sgl: SglSupport,
    /// Interrupt vector of the completion queue; `None`: the queue does not interrupt.
    pub vector: Option<u16>,
    /// Device slot in which a buffer stores its address.
    pub key: usize,
    /// Delays before a command is retried, by CRD.
    pub delays: [Duration; 4],
}

pub(crate) struct Link {
    pub qid: u16,
    /// The name of the owner's thread.
    pub thread: String,
    pub activity: Activity,
    /// Interrupt vector that the queue may use; `None`: the queue can only be polled.
    pub vector: Option<u16>,
    pub phase: Phase,
    /// Whether the completion queue uses interrupts from its next creation on.
    pub interrupts: AtomicBool,
    /// Becomes readable when the phase changes, to wake a sleeping owner. The flag is true while it
    /// is readable.
    bell: OwnedFd,
    rung: AtomicBool,
    grant: Mutex<Arc<Grant>>,
    /// The owner has left: delete the queue once no command is in flight.
    pub deserted: AtomicBool,
    /// The controller received the command to create the queue.
    pub made: AtomicBool,
}

impl Link {
    /// Called by the owner's thread.
    pub(crate) fn new(qid: u16, vector: Option<u16>, grant: Grant) -> std::io::Result<Self> {
        let thread = std::thread::current();
        Ok(Self {
            qid,
            thread: thread.name().unwrap_or_default().to_owned(),
            activity: Activity::default(),
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

    /// Called by the control: sets the phase, and wakes the owner.
    pub(crate) fn set_phase(&self, state: QueueState) {
        self.phase.set(state);
        // A full counter is readable already.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        self.rung.store(true, Ordering::Release);
    }

    /// Called by the owner: clears the bell. A later read of the phase sees the change that rang
    /// it.
    pub(crate) fn clear_bell(&self) {
        if self.rung.load(Ordering::Relaxed) && self.rung.swap(false, Ordering::Acquire) {
            let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
        }
    }

    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    pub(crate) fn grant(&self) -> Arc<Grant> {
        Arc::clone(&self.grant.lock())
    }

    /// Replaces the resources of the queue pair. Call it only while the phase is not live.
    pub(crate) fn set_grant(&self, grant: Grant) {
        *self.grant.lock() = Arc::new(grant);
    }
}

/// Requests of a queue pair's owner to the control.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Report {
    pub qid: u16,
    /// The generation of the queue that the report is about.
    pub generation: u32,
    pub want: Request,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// A queue pair was opened: create it.
    Make,
    /// The owner has left: delete the queue pair.
    Delete,
    /// The queue is empty and stays so until it is recreated, with interrupts (`on`) or without.
    Interrupts { on: bool },
    /// A command did not complete in time. `stage` counts the earlier reports of it.
    Late {
        cid: u16,
        opcode: u8,
        stage: u8,
        waited: Duration,
    },
    /// The user of this command aborts it.
    Abort { cid: u16 },
    /// A completion matches no command.
    UnknownCompletion { cid: u16 },
}

/// Incremented by the owners and the control, read by [`crate::Controller::status`].
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
