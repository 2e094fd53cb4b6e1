//! A new name of the pool: the next root has it.

use super::Attempt;
use super::store::Store;
use crate::format::superblock::MAX_NAME;
use crate::ids::Token;
use crate::interface::{Answer, Refusal};

impl Store {
    pub(super) fn attempt_name(&mut self, token: Token, name: &str) -> Result<Attempt, Refusal> {
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(Refusal::OutOfRange);
        }
        if self.next_root.naming.is_some() {
            return Ok(Attempt::Wait);
        }
        self.next_root.naming = Some((token, name.to_owned()));
        self.want_root();
        Ok(Attempt::Begun)
    }

    /// A root is durable: answers if it has the new name.
    pub(super) fn advance_naming(&mut self) {
        let Some((token, name)) = self.next_root.naming.take() else {
            return;
        };
        if name == self.superblock.name {
            return self.answer(token, Ok(Answer::Done));
        }
        self.next_root.naming = Some((token, name));
        self.want_root();
    }
}
