//! The history of numbered writes, and what a read may return.
//!
//! A register is a block with one writer at a time, whose writes are numbered from 1. A read is
//! right if it returns a number between two bounds:
//!
//! - at least the last answered write, and the last number that any read returned, when the read
//!   began, on whatever node;
//! - at most the last write that began, when the read ended.
//!
//! So registers are linearizable across nodes: a stale node and a lost answered write show in the
//! next read. A write without an answer may take effect at any time. Its register gets no further
//! write, and another block replaces it.

use std::time::{Duration, Instant};

/// Registers in use at a time, and all that may be used up.
pub(super) const ACTIVE: usize = 48;
pub(super) const REGISTERS: usize = 4096;

/// Most findings that are described.
const MAX_FINDINGS: usize = 20;

#[derive(Debug, Clone, Copy, Default)]
struct Register {
    started: u64,
    answered: u64,
    seen: u64,
    is_writing: bool,
    /// A write has no answer.
    is_retired: bool,
}

/// A write that has no answer yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Write {
    pub(super) register: usize,
    pub(super) number: u64,
}

/// A read that has no answer yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Read {
    pub(super) register: usize,
    least: u64,
}

#[derive(Debug)]
pub(super) struct History {
    registers: Vec<Register>,
    /// Indices of the registers in use, and the next fresh one.
    active: Vec<usize>,
    fresh: usize,
    turn: usize,
    pub(super) writes: u64,
    pub(super) reads: u64,
    pub(super) unanswered: u64,
    last_write: Instant,
    pub(super) longest_pause: Duration,
    pub(super) findings: Vec<String>,
}

impl History {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            registers: vec![Register::default(); REGISTERS],
            active: (0..ACTIVE).collect(),
            fresh: ACTIVE,
            turn: 0,
            writes: 0,
            reads: 0,
            unanswered: 0,
            last_write: now,
            longest_pause: Duration::ZERO,
            findings: Vec::new(),
        }
    }

    /// The next write. `None`: each register has a writer.
    pub(super) fn begin_write(&mut self) -> Option<Write> {
        for _ in 0..self.active.len() {
            let register = self.next_register();
            let state = &mut self.registers[register];
            if !state.is_writing {
                state.is_writing = true;
                state.started += 1;
                let number = state.started;
                return Some(Write { register, number });
            }
        }
        None
    }

    pub(super) fn wrote(&mut self, write: Write, now: Instant) {
        let register = &mut self.registers[write.register];
        register.answered = write.number;
        register.is_writing = false;
        self.writes += 1;
        self.longest_pause = self.longest_pause.max(now - self.last_write);
        self.last_write = now;
    }

    /// The write failed, or its connection was lost.
    pub(super) fn unanswered(&mut self, write: Write) {
        self.unanswered += 1;
        self.registers[write.register].is_retired = true;
        let place = self.active.iter().position(|one| *one == write.register);
        let Some(place) = place else { return };
        if self.fresh < REGISTERS {
            self.active[place] = self.fresh;
            self.fresh += 1;
        } else {
            self.active.swap_remove(place);
        }
    }

    /// A read of any register that this history has written, also of a retired one.
    pub(super) fn begin_read(&mut self, choice: usize) -> Read {
        let register = if choice.is_multiple_of(4) {
            choice / 4 % self.fresh
        } else {
            self.next_register()
        };
        let state = &self.registers[register];
        let least = state.answered.max(state.seen);
        Read { register, least }
    }

    /// `found`: the number in the block, 0 if it has none of this history.
    pub(super) fn read(&mut self, read: Read, found: u64, node: &str) {
        let register = &mut self.registers[read.register];
        let (least, most) = (read.least, register.started);
        self.reads += 1;
        register.seen = register.seen.max(found);
        if (least..=most).contains(&found) {
            return;
        }
        let state = if register.is_retired {
            ", with a write that has no answer"
        } else {
            ""
        };
        let kind = if found < least {
            "stale or lost"
        } else {
            "never written"
        };
        self.find(format!(
            "{kind}: node {node} answered {found} for block {}{state}; {least} to {most} are right",
            read.register
        ));
    }

    pub(super) fn find(&mut self, finding: String) {
        if self.findings.len() < MAX_FINDINGS {
            self.findings.push(finding);
        }
    }

    /// A pause that has not ended counts too.
    pub(super) fn end(&mut self, now: Instant) {
        self.longest_pause = self.longest_pause.max(now - self.last_write);
    }

    fn next_register(&mut self) -> usize {
        if self.active.is_empty() {
            return 0;
        }
        self.turn = (self.turn + 1) % self.active.len();
        self.active[self.turn]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_register() -> History {
        let mut history = History::new(Instant::now());
        history.active = vec![7];
        history
    }

    fn read_of(history: &mut History, found: u64) -> Result<(), String> {
        let read = history.begin_read(1);
        history.read(read, found, "a");
        match history.findings.pop() {
            Some(finding) => Err(finding),
            None => Ok(()),
        }
    }

    /// Goal: an old number after an answered write is found, whichever node answers. Method: a read
    /// that began before the answer may return both, and a later one only the new number.
    #[test]
    fn stale_reads_and_lost_writes_are_found() {
        let mut history = one_register();
        let first = history.begin_write().unwrap();
        assert_eq!(history.begin_write(), None, "one writer at a time");
        history.wrote(first, Instant::now());
        let second = history.begin_write().unwrap();
        let (early, late) = (history.begin_read(1), history.begin_read(1));
        history.read(early, 1, "a");
        history.wrote(second, Instant::now());
        history.read(late, 2, "b");
        assert!(history.findings.is_empty(), "{:?}", history.findings);
        let stale = read_of(&mut history, 1).unwrap_err();
        assert!(
            stale.starts_with("stale or lost: node a answered 1"),
            "{stale}"
        );
        read_of(&mut history, 0).unwrap_err();
        read_of(&mut history, 3).unwrap_err();
    }

    /// Goal: a write without an answer may be there or not, but no read goes back. Method: a read
    /// of the old number is right until one of the new number.
    #[test]
    fn a_write_without_an_answer_may_take_effect_later() {
        let mut history = one_register();
        let first = history.begin_write().unwrap();
        history.wrote(first, Instant::now());
        let second = history.begin_write().unwrap();
        history.unanswered(second);
        assert_eq!(history.active, [ACTIVE], "another block replaces it");
        history.active = vec![7];
        read_of(&mut history, 1).unwrap();
        read_of(&mut history, 2).unwrap();
        read_of(&mut history, 1).unwrap_err();
    }

    /// Goal: pauses are those between answers of writes, also one at the end.
    #[test]
    fn the_longest_pause_is_that_of_writes() {
        let start = Instant::now();
        let mut history = History::new(start);
        for after in [1, 5, 6] {
            let write = history.begin_write().unwrap();
            history.wrote(write, start + Duration::from_secs(after));
        }
        assert_eq!(history.longest_pause, Duration::from_secs(4));
        history.end(start + Duration::from_secs(20));
        assert_eq!(history.longest_pause, Duration::from_secs(14));
    }
}
