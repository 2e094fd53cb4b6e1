//! Lists the places of a volume with data, for hosts: one command of the keeper after the other,
//! each over a few leaves, so that I/O goes on meanwhile.

use std::ops::Range;
use std::sync::Arc;

use nacre_bdev::Status;
use nacre_bdev::listing::{AllocatedRanges, ListAnswer, ListQuery};
use uuid::Uuid;

use crate::model::{Answer, Command, CommandRequest, KeeperCommand, Outcome, PoolError};
use crate::port::{KeeperMessage, Shared};

/// A list that is being made.
pub(crate) struct Listing {
    shared: Arc<Shared>,
    lvol: Uuid,
    /// Blocks of a place.
    unit: u64,
    query: ListQuery,
    found: Vec<Range<u64>>,
    answer: ListAnswer,
    /// Questions to the keeper that are left. Each looks at a few leaves of the map.
    questions: u32,
}

/// Most questions of one listing: so many keep the keeper busy for a moment only.
const QUESTIONS: u32 = 256;

impl Listing {
    pub(crate) fn start(
        (shared, lvol): (Arc<Shared>, Uuid),
        unit: u64,
        query: ListQuery,
        answer: ListAnswer,
    ) {
        let first = query.range.start / unit;
        let listing = Self {
            shared,
            lvol,
            unit,
            query,
            found: Vec::new(),
            answer,
            questions: QUESTIONS,
        };
        listing.go_on(first);
    }

    /// Asks for places from this one on. A closed keeper drops the command, and the answer with it.
    fn go_on(self, from: u64) {
        let shared = Arc::clone(&self.shared);
        let command = Command::Mapped {
            lvol: self.lvol,
            from,
        };
        let request = CommandRequest {
            command: KeeperCommand::Public(command),
            answer: Answer::Call(Box::new(move |outcome| self.take(outcome))),
        };
        shared.inbox.send([KeeperMessage::Command(request)]);
    }

    fn take(mut self, outcome: Result<Outcome, PoolError>) {
        let (places, next) = match outcome {
            Ok(Outcome::Places { places, next }) => (places, next),
            Err(PoolError::Busy) => return self.answer.give(Err(Status::Retry)),
            // The volume or the pool goes.
            Ok(_) | Err(_) => return self.answer.give(Err(Status::Gone)),
        };
        let end = self.query.range.end;
        for place in places {
            let first = place * self.unit;
            if first >= end {
                return self.end(true);
            }
            if !self.add(first.max(self.query.range.start)..end.min(first + self.unit)) {
                return self.end(false);
            }
        }
        match next {
            Some(next) if next * self.unit < end && self.questions > 1 => {
                self.questions -= 1;
                self.go_on(next);
            }
            // Blocks that nothing has looked at count as blocks with data.
            Some(next) if next * self.unit < end => {
                let is_complete = self.add(next * self.unit..end);
                self.end(is_complete);
            }
            _ => self.end(true),
        }
    }

    /// Returns false if the answer has no room for the range.
    fn add(&mut self, range: Range<u64>) -> bool {
        if let Some(last) = self.found.last_mut()
            && last.end == range.start
        {
            last.end = range.end;
            return true;
        }
        let has_room = self.found.len() < self.query.most;
        if has_room {
            self.found.push(range);
        }
        has_room
    }

    fn end(self, is_complete: bool) {
        self.answer.give(Ok(AllocatedRanges {
            ranges: self.found,
            is_complete,
        }));
    }
}
