//! Asynchronous events of the controller, and the work that they cause.

use std::collections::VecDeque;

use nacre_nvmf_wire::Cqe;
use nacre_nvmf_wire::aen::AsyncEvent;
use nacre_nvmf_wire::log::lid;

use super::user_commands::MAX_TICKETS;

pub(super) struct Events {
    /// An event request is in flight.
    is_requested: bool,
    /// The controller takes event requests.
    are_supported: bool,
    /// Events that arrived and that the user has not taken.
    unread: VecDeque<AsyncEvent>,
    /// The list of changed namespaces is to be read.
    pub rescan: bool,
    /// The ANA log is to be read.
    pub access_changed: bool,
}

impl Events {
    pub fn new() -> Events {
        Events {
            is_requested: false,
            are_supported: true,
            unread: VecDeque::new(),
            rescan: false,
            access_changed: false,
        }
    }

    /// True if an event request is to be sent.
    pub fn wants_request(&self) -> bool {
        self.are_supported && !self.is_requested
    }

    pub fn requested(&mut self) {
        self.is_requested = true;
    }

    /// Handles the answer to an event request.
    pub fn completed(&mut self, cqe: &Cqe) {
        self.is_requested = false;
        if !cqe.status().is_success() {
            // Asked again at once it would say the same.
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

    /// The connection ended: its request and the work for its controller end with it.
    pub fn connection_lost(&mut self) {
        self.is_requested = false;
        self.are_supported = true;
        self.rescan = false;
        self.access_changed = false;
    }

    pub fn take(&mut self) -> Option<AsyncEvent> {
        self.unread.pop_front()
    }
}
