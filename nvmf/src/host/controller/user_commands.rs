//! The user's admin commands: a queue of waiting commands, and their results by ticket.

use std::collections::{BTreeMap, VecDeque};

use nacre_hugepages::Buf;
use nacre_nvmf_wire::Sqe;

use super::AdminResult;
use crate::host::error::HostError;

/// Most commands of the user whose results were not taken.
pub(super) const MAX_TICKETS: usize = 256;

/// A command that waits for a free entry of the admin queue.
pub(super) struct UserCommand {
    pub ticket: u64,
    pub sqe: Sqe,
    pub write: Option<Buf>,
    pub read: Option<Buf>,
}

pub(super) struct UserCommands {
    waiting: VecDeque<UserCommand>,
    next_ticket: u64,
    /// Number of commands whose results were not taken.
    tickets: usize,
    results: BTreeMap<u64, Result<AdminResult, HostError>>,
}

impl UserCommands {
    pub(super) fn new() -> Self {
        Self {
            waiting: VecDeque::new(),
            next_ticket: 1,
            tickets: 0,
            results: BTreeMap::new(),
        }
    }

    /// Adds a command and returns its ticket. With `error` the command fails immediately. `None`:
    /// [`MAX_TICKETS`] results are pending.
    pub(super) fn submit(
        &mut self,
        sqe: Sqe,
        write: Option<Buf>,
        read: Option<Buf>,
        error: Option<HostError>,
    ) -> Option<u64> {
        if self.tickets >= MAX_TICKETS {
            return None;
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.tickets += 1;
        match error {
            Some(error) => self.answer(ticket, Err(error)),
            None => self.waiting.push_back(UserCommand {
                ticket,
                sqe,
                write,
                read,
            }),
        }
        Some(ticket)
    }

    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub(super) fn next_waiting(&mut self) -> Option<UserCommand> {
        self.waiting.pop_front()
    }

    pub(super) fn answer(&mut self, ticket: u64, result: Result<AdminResult, HostError>) {
        self.results.insert(ticket, result);
    }

    /// Fails all waiting commands with `error`.
    pub(super) fn fail_waiting(&mut self, error: &HostError) {
        for command in std::mem::take(&mut self.waiting) {
            self.answer(command.ticket, Err(error.clone()));
        }
    }

    /// Removes and returns the result of a command; `None` until it has completed.
    pub(super) fn take_result(&mut self, ticket: u64) -> Option<Result<AdminResult, HostError>> {
        let result = self.results.remove(&ticket)?;
        self.tickets -= 1;
        Some(result)
    }
}
