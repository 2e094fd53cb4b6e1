//! Asynchronous events (Base 5.2): sends the request, queues events for the user, and marks the
//! namespace list or the ANA log for reading.

use std::collections::VecDeque;

use nacre_nvmf_wire::Cqe;
use nacre_nvmf_wire::aen::AsyncEvent;
use nacre_nvmf_wire::log::lid;

use super::user_commands::MAX_TICKETS;

pub(super) struct AsyncEventRequests {
    /// An Asynchronous Event Request is in flight.
    is_requested: bool,
    /// False after the controller has refused a request.
    are_supported: bool,
    /// Events for the user, oldest first.
    unread: VecDeque<AsyncEvent>,
    /// The Changed Namespace List must be read.
    pub rescan: bool,
    /// The ANA log must be read.
    pub access_changed: bool,
}

impl AsyncEventRequests {
    pub(super) fn new() -> Self {
        Self {
            is_requested: false,
            are_supported: true,
            unread: VecDeque::new(),
            rescan: false,
            access_changed: false,
        }
    }

    /// True if a request must be sent.
    pub(super) fn wants_request(&self) -> bool {
        self.are_supported && !self.is_requested
    }

    pub(super) fn requested(&mut self) {
        self.is_requested = true;
    }

    /// Handles the completion of a request.
    pub(super) fn completed(&mut self, cqe: &Cqe) {
        self.is_requested = false;
        if !cqe.status().is_success() {
            // Another request would fail in the same way.
            self.are_supported = false;
            return;
        }
        let event = AsyncEvent::from_dword0(cqe.dword0());
        self.rescan |= event.log_page == lid::CHANGED_NAMESPACE_LIST;
        self.access_changed |= event.log_page == lid::ASYMMETRIC_NAMESPACE_ACCESS;
        if self.unread.len() < MAX_TICKETS {
            self.unread.push_back(event);
        }
    }

    /// Clears the request and the pending reads after the end of a connection.
    pub(super) fn connection_lost(&mut self) {
        self.is_requested = false;
        self.are_supported = true;
        self.rescan = false;
        self.access_changed = false;
    }

    pub(super) fn take(&mut self) -> Option<AsyncEvent> {
        self.unread.pop_front()
    }
}
