//! A list of commands that wait: for a buffer of their core, or for room in a device.

use std::collections::VecDeque;

use crate::subsystems::core_handle::ReqRef;

/// Entries that a new list has room for.
const ROOM: usize = 128;

/// The commands, oldest first. An entry stays when its command is aborted or its queue pair goes,
/// until its turn comes or [`WaitingList::tidy`] finds it.
pub(crate) struct WaitingList {
    list: VecDeque<ReqRef>,
    /// The length from which on the list is searched for such entries.
    tidy_from: usize,
}

impl WaitingList {
    pub fn new() -> WaitingList {
        WaitingList {
            list: VecDeque::with_capacity(ROOM),
            tidy_from: ROOM / 2,
        }
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.list.len()
    }

    pub fn first(&self) -> Option<ReqRef> {
        self.list.front().copied()
    }

    pub fn pop(&mut self) -> Option<ReqRef> {
        self.list.pop_front()
    }

    pub fn push(&mut self, command: ReqRef) {
        self.list.push_back(command);
    }

    /// Puts a command back to the head of the list.
    pub fn push_first(&mut self, command: ReqRef) {
        self.list.push_front(command);
    }

    /// Drops entries that no longer wait, if the list is long. Called once a turn, so that the
    /// list has at most twice as many entries as commands wait, and those of one turn, however
    /// often a host gives up and comes again.
    #[inline]
    pub fn tidy(&mut self, waits: impl Fn(&ReqRef) -> bool) {
        if self.list.len() >= self.tidy_from {
            self.list.retain(waits);
            // Not again for a while.
            self.tidy_from = (ROOM / 2).max(2 * self.list.len());
        }
    }
}
