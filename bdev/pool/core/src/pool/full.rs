//! A full pool: writes that need a unit wait for one.
//!
//! ```text
//!   write ──▶ no unit ──▶ waits ──▶ space comes back ──▶ tried again, the oldest first
//!                          └──────▶ give_up           ──▶ tried once more, then refused
//! ```
//!
//! Trims, deletions and removals of snapshots need no unit; trims of lvols on external devices may
//! need room for a map ([`super::room`]). While a write waits, freed units are settled at once, and
//! hidden versions are visited again. The number of waiting writes has a bound, so that other
//! requests find room in the pool.

use std::collections::{HashMap, VecDeque};

use super::Pool;
use super::store::OWN_TOKENS;
use crate::ids::Token;
use crate::interface::{Intent, Refusal, Request};

#[derive(Debug, Default)]
pub(super) struct Full {
    /// Writes that wait, in the order of their arrival.
    writes: VecDeque<(Token, Request)>,
    /// All writes that have waited and have no answer, each with whether its wait has ended.
    waits: HashMap<Token, bool>,
    /// Free units and kept units when the writes were last tried.
    tried_at: (u64, u64),
}

impl Full {
    /// Forgets all writes. Returns the tokens of those that wait.
    pub(super) fn drain(&mut self) -> Vec<Token> {
        self.waits.clear();
        self.writes.drain(..).map(|(token, _)| token).collect()
    }

    /// The write has found a unit.
    pub(super) fn begun(&mut self, token: Token) {
        self.waits.remove(&token);
    }
}

impl Pool {
    /// The number of unanswered writes that wait or have waited for space.
    pub fn full_writes(&self) -> usize {
        self.full.waits.len()
    }

    /// Ends the wait of a write for space: the pool tries it once more, and refuses it if that
    /// finds no space.
    pub fn give_up(&mut self, token: Token) {
        let Some(has_ended) = self.full.waits.get_mut(&token) else {
            return;
        };
        *has_ended = true;
        self.store.has_news = true;
        let at = self.full.writes.iter().position(|(of, _)| *of == token);
        if let Some(write) = at.and_then(|at| self.full.writes.remove(at)) {
            self.waiting.push_front(write);
        }
    }

    /// Refuses a request, or lets it wait for space.
    pub(super) fn refuse(&mut self, token: Token, request: Request, refusal: Refusal) {
        let is_full = matches!(refusal, Refusal::NoSpace { .. });
        let is_write = matches!(request, Request::Write(_)) && token < OWN_TOKENS;
        let may_wait = match self.full.waits.get(&token) {
            Some(has_ended) => !has_ended,
            None => self.full.waits.len() < self.store.limits.full_writes,
        };
        if !is_full || !is_write || !may_wait {
            self.full.waits.remove(&token);
            return self.store.answer(token, Err(refusal));
        }
        if self.full.waits.insert(token, false).is_none() {
            self.store.out.push_back(Intent::Full { token });
            if self.full.waits.len() == 1 {
                // A child may have stopped to use units of a hidden version.
                self.deletion.search();
                self.store.has_news = true;
            }
        }
        self.full.writes.push_back((token, request));
    }

    /// Tries the waiting writes again after the free units changed.
    pub(super) fn wake_full(&mut self) {
        if self.full.writes.is_empty() {
            return;
        }
        if self.store.space.in_limbo() > 0 {
            self.store.settle.want(self.store.log.next_lsn() - 1);
        }
        let now = self.free_units();
        if std::mem::replace(&mut self.full.tried_at, now) == now {
            return;
        }
        while let Some(write) = self.full.writes.pop_back() {
            self.waiting.push_front(write);
        }
    }
}
