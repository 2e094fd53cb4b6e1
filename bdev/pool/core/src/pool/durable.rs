//! Answers that wait until a record is logged or settled, and the steps of settling. A record is
//! logged once its page and all pages before are written. It is settled once a flush made it
//! durable.
//!
//! | request | answered when |
//! |---|---|
//! | unmap, clear | its record is logged; without one, all records before it |
//! | create, clone, resize, rename, restore, delete | its record is settled |
//! | inflate, decouple, set parent | the last record of the job is settled |
//! | snapshot, read-only | record logged, writes in place from before ended, then a flush |

use std::collections::HashMap;

use super::{Pool, Purpose};
use crate::ids::{Lsn, Token, VersionId};
use crate::interface::Answer;
use crate::mutation::Mutation;
use crate::settle::SettleStep;

#[derive(Debug, Default)]
pub(super) struct Durable {
    waiting: Vec<Waiting>,
    /// Answers that a flush in flight makes durable.
    flushing: HashMap<Token, Answer>,
    /// Volumes that a snapshot is about to cut: new records of theirs wait. With the snapshot's
    /// token.
    frozen: HashMap<VersionId, Token>,
    /// Volumes that were cut while writes in place may have been in flight, with the grace period
    /// that awaits those.
    cut: HashMap<VersionId, u64>,
}

#[derive(Debug)]
struct Waiting {
    token: Token,
    lsn: Lsn,
    until: Until,
    answer: Answer,
}

/// The moment of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    Logged,
    Settled,
    /// Logged, this grace period has ended, and a flush after both.
    Cut {
        epoch: u64,
    },
}

impl Durable {
    pub(super) fn drain(&mut self) -> Vec<Token> {
        self.frozen.clear();
        let waiting = std::mem::take(&mut self.waiting).into_iter();
        let mut tokens: Vec<Token> = waiting.map(|waiting| waiting.token).collect();
        tokens.extend(self.flushing.drain().map(|(token, _)| token));
        tokens
    }

    pub(super) fn wait(&mut self, token: Token, lsn: Lsn, until: Until, answer: Answer) {
        self.waiting.push(Waiting {
            token,
            lsn,
            until,
            answer,
        });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.flushing.is_empty()
    }

    pub(super) fn is_frozen(&self, version: VersionId) -> bool {
        self.frozen.contains_key(&version)
    }

    /// Freezes a volume for a snapshot. Returns false if another snapshot has it.
    pub(super) fn freeze(&mut self, version: VersionId, by: Token) -> bool {
        *self.frozen.entry(version).or_insert(by) == by
    }

    pub(super) fn thaw(&mut self, by: Token) {
        self.frozen.retain(|_, token| *token != by);
    }

    pub(super) fn note_cut(&mut self, version: VersionId, epoch: u64) {
        self.cut.insert(version, epoch);
    }

    pub(super) fn grace_ended(&mut self, ended: u64) {
        self.cut.retain(|_, epoch| *epoch > ended);
    }

    /// True when writes in place from before the volume's last cut may still be in flight.
    pub(super) fn is_cut(&self, version: VersionId) -> bool {
        self.cut.contains_key(&version)
    }

    /// True when the creation of this snapshot is not answered yet.
    pub(super) fn is_creating(&self, version: VersionId) -> bool {
        let answers = self.waiting.iter().map(|waiting| &waiting.answer);
        let mut answers = answers.chain(self.flushing.values());
        answers.any(|answer| match answer {
            Answer::Snapshots(snapshots) => snapshots.contains(&version),
            _ => false,
        })
    }
}

impl Pool {
    pub(super) fn answer_durable(&mut self) {
        let (logged, settled) = (self.store.log.complete(), self.store.settle.settled());
        let ended = self.store.grace.ended();
        let graceless = Mutation::SnapshotWithoutGrace.is_active();
        let is_due = |waiting: &mut Waiting| match waiting.until {
            Until::Logged => waiting.lsn <= logged,
            Until::Settled => waiting.lsn <= settled,
            Until::Cut { epoch } => waiting.lsn <= logged && (epoch <= ended || graceless),
        };
        let due: Vec<Waiting> = self.durable.waiting.extract_if(.., is_due).collect();
        for waiting in due {
            self.store.has_news = true;
            let (token, answer) = (waiting.token, waiting.answer);
            if let Until::Cut { .. } = waiting.until {
                self.durable.flushing.insert(token, answer);
                let skip = Mutation::SnapshotWithoutFlush.is_active();
                self.store.flush(Purpose::AnswerFlush(token), skip);
            } else {
                self.store.answer(token, Ok(answer));
            }
        }
    }

    pub(super) fn answer_flushed(&mut self, token: Token) {
        if let Some(answer) = self.durable.flushing.remove(&token) {
            self.store.answer(token, Ok(answer));
        }
    }

    /// Takes the next step of settling that is possible.
    pub(super) fn advance_settling(&mut self) {
        let bound = self.store.log.complete().min(self.writes.before_first());
        if self.store.settle.begin(bound) {
            self.settle_flush();
        }
        if self
            .store
            .settle
            .pages_completed(self.store.log.complete_sequence())
        {
            self.settle_flush();
        }
    }

    fn settle_flush(&mut self) {
        let skip = self.store.settle.skips_flush();
        self.store.flush_to_settle(skip);
    }

    pub(super) fn settle_flushed(&mut self) {
        match self.store.settle.step {
            SettleStep::Flush { .. } => self.store.settle.data_flushed(),
            _ => self.store.settle.mark_flushed(),
        }
        self.store.has_news = true;
    }
}
