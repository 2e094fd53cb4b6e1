//! The events of a controller, and the observer that gets them: the code that attached it.

use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf_wire::aen::AsyncEvent;

use crate::device::NvmeBdev;
use crate::info::Status;

/// Receives the events of a controller. Called on its home reactor, so it must not block.
pub trait Observer: Send + Sync {
    fn event(&self, event: Event);
}

/// Ignores all events.
impl Observer for () {
    fn event(&self, _event: Event) {}
}

/// A change of a controller or of its namespaces.
#[derive(Clone)]
pub enum Event {
    NamespaceAdded(Arc<NvmeBdev>),
    /// The namespace was removed: all its I/O completes with [`nacre_bdev::Status::Gone`].
    NamespaceRemoved(Arc<NvmeBdev>),
    NamespaceResized(Arc<NvmeBdev>),
    /// The limits of a namespace changed, for example after a firmware activation. Queues opened
    /// before still split I/O by the old limits; I/O that exceeds the new ones completes with
    /// [`nacre_bdev::Status::Unsupported`].
    NamespaceLimits {
        nsid: u32,
        changes: String,
    },
    /// The state of the controller changed.
    State(Status),
    Health(HealthEvent),
    /// A reset starts.
    Reset {
        reason: ResetReason,
    },
    Timeout(Timeout),
    AsyncEvent(AsyncEvent),
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        use nacre_bdev::Bdev;
        let bdev = |name: &str, bdev: &NvmeBdev, f: &mut std::fmt::Formatter<'_>| {
            f.debug_tuple(name).field(&bdev.name()).finish()
        };
        match self {
            Self::NamespaceAdded(added) => bdev("NamespaceAdded", added, f),
            Self::NamespaceRemoved(removed) => bdev("NamespaceRemoved", removed, f),
            Self::NamespaceResized(resized) => bdev("NamespaceResized", resized, f),
            Self::NamespaceLimits { nsid, changes } => f
                .debug_tuple("NamespaceLimits")
                .field(nsid)
                .field(changes)
                .finish(),
            Self::State(status) => f.debug_tuple("State").field(&status.state).finish(),
            Self::Health(health) => f.debug_tuple("Health").field(health).finish(),
            Self::Reset { reason } => f.debug_tuple("Reset").field(reason).finish(),
            Self::Timeout(timeout) => f.debug_tuple("Timeout").field(timeout).finish(),
            Self::AsyncEvent(event) => f.debug_tuple("AsyncEvent").field(event).finish(),
        }
    }
}

/// A health value crossed its threshold (`raised`), or returned to its normal range. Critical
/// warnings and media errors have no threshold: each change is an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HealthEvent {
    pub alert: HealthAlert,
    pub raised: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthAlert {
    Temperature {
        celsius: i32,
        threshold: i32,
    },
    PercentageUsed {
        percent: u8,
        threshold: u8,
    },
    Spare {
        percent: u8,
        threshold: u8,
    },
    /// Critical warnings other than those above, as in the SMART log.
    Critical {
        warnings: u8,
    },
    /// Media errors counted since the controller was attached. Never cleared.
    MediaErrors {
        new: u64,
    },
}

impl HealthAlert {
    /// A name for metrics and for the events stream.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Temperature { .. } => "temperature",
            Self::PercentageUsed { .. } => "percentage_used",
            Self::Spare { .. } => "spare",
            Self::Critical { .. } => "critical_warning",
            Self::MediaErrors { .. } => "media_errors",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ResetReason {
    /// A caller requested the reset, or a firmware update needs it.
    UserRequest,
    /// A command did not complete in time, and the milder reactions failed or are not configured.
    Timeout,
    /// CSTS.CFS is set, or the controller cleared CSTS.RDY itself.
    ControllerFatal,
    /// A completion matches no outstanding command.
    ProtocolError,
    /// A queue pair could not be created or deleted.
    AdminFailed,
}

impl ResetReason {
    pub fn name(self) -> &'static str {
        match self {
            Self::UserRequest => "asked",
            Self::Timeout => "timeout",
            Self::ControllerFatal => "controller_fatal",
            Self::ProtocolError => "protocol_error",
            Self::AdminFailed => "admin_failed",
        }
    }
}

/// A command that timed out, and the reaction to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeout {
    /// 0: the admin queue.
    pub qid: u16,
    pub cid: u16,
    pub opcode: u8,
    /// Lower bound of the time since the submission.
    pub waited: Duration,
    pub action: TimeoutAction,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TimeoutAction {
    None,
    Abort,
    ResetQueue,
    ResetController,
}

impl TimeoutAction {
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Abort => "abort",
            Self::ResetQueue => "reset_queue",
            Self::ResetController => "reset_controller",
        }
    }
}
