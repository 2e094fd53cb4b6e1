//! [`QueueAuth`]: the authentication of one queue pair. `authentication.rs` executes its commands.

use std::sync::Arc;

use nacre_reactor::Nanos;

use crate::auth::ControllerEnd;
use crate::subsystems::authentication::QueueAuthState;
use crate::subsystems::core_handle::ReqIndex;

/// The authentication of a queue pair.
pub(crate) struct QueueAuth {
    /// The current transaction.
    pub end: Option<ControllerEnd>,
    /// Number of the current transaction. Results for earlier ones are dropped.
    pub transaction: u64,
    /// A Receive that waits for the result of a job, or for the end of a delay.
    pub waiting: Option<ReqIndex>,
    /// Earliest time to report the failure to the host.
    pub report_at: Nanos,
    /// Time to close the connection, unless the host has closed it.
    pub close_at: Option<Nanos>,
    pub state: Arc<QueueAuthState>,
}

impl QueueAuth {
    pub(crate) fn new(state: Arc<QueueAuthState>) -> Self {
        Self {
            end: None,
            transaction: 0,
            waiting: None,
            report_at: Nanos::ZERO,
            close_at: None,
            state,
        }
    }
}
