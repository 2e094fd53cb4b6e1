//! The changes of the map and the progress of the log, for callers that keep a copy of the map.

use super::leaving::MOVE_TOKENS;
use super::store::OWN_TOKENS;
use super::store::Store;
use crate::ids::{Lsn, Token};
use crate::interface::Change;

#[derive(Debug)]
pub struct Follow<'a>(pub(super) &'a mut Store);

impl Follow<'_> {
    /// Moves the changes of the map since the last call to `into`. The first call returns none:
    /// changes are kept from then on. Call it before [`Pool::poll`](super::Pool::poll), so that a
    /// grace period that begins then covers every reader of the old copy.
    pub fn take_changes(&mut self, into: &mut Vec<Change>) {
        into.append(self.0.changes.get_or_insert_default());
    }

    /// The last record: the map includes no later one.
    pub fn last_lsn(&self) -> Lsn {
        self.0.log.next_lsn() - 1
    }

    /// Every record up to here is settled: the granules that it is about may be overwritten.
    pub fn settled_lsn(&self) -> Lsn {
        self.0.settle.settled()
    }
}

/// True for a token of the pool's own requests. Such a request is a step of a request of many
/// steps, or the move of a unit to another disk.
pub fn is_own(token: Token) -> bool {
    token >= OWN_TOKENS
}

/// True for the copy of a unit to another disk. The pool flushes such a copy before its record, so
/// no flush of a host concerns it.
pub fn is_move(token: Token) -> bool {
    token >= MOVE_TOKENS
}
