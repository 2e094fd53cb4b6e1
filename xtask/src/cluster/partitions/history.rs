//! The history of numbered writes, and what a read may return.
//!
//! A register is a block with one writer at a time, whose writes are numbered from 1. A read is
//! right if it returns a number between two bounds:
//!
//! - at least the last answered write, and the last number that any read returned, when the read
//!   began, on whatever node;
//! - at most the last write that began, when the read ended.
//!
//! So registers are linearizable across nodes, and a stale node shows in its next read. A lost
//! answered write shows too, because no write replaces it unseen. A read of the register comes
//! between two writes to it, and after the last one. A write without an answer may take effect at
//! any time. Its register gets no further write, and another block replaces it.

use std::time::{Duration, Instant};

/// Registers in use at a time.
pub(super) const ACTIVE: usize = 48;
/// Most registers of a history, with those that are retired.
pub(super) const REGISTERS: usize = 4096;

/// Most findings that are described.
const MAX_FINDINGS: usize = 20;

#[derive(Debug, Clone, Copy, Default)]
struct Register {
    started: u64,
    answered: u64,
    seen: u64,
    /// One writer reads it, and writes it after that.
    is_reserved: bool,
    /// No read that began after the last answer has ended.
    is_unread: bool,
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
    /// The last answered write when it began.
    after: u64,
    /// The least number that is right.
    least: u64,
}

#[derive(Debug)]
pub(super) struct History {
    registers: Vec<Register>,
    /// Indices of the registers in use.
    active: Vec<usize>,
    /// Index of the next register that was never in use.
    fresh: usize,
    turn: usize,
    pub(super) writes: u64,
    pub(super) reads: u64,
    pub(super) unanswered: u64,
    pub(super) last_write: Instant,
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

    /// Reserves the register of the next write, and begins the read that comes first. `None`: each
    /// register has a writer.
    pub(super) fn reserve(&mut self) -> Option<Read> {
        for _ in 0..self.active.len() {
            let register = self.next_register();
            if !self.registers[register].is_reserved {
                self.registers[register].is_reserved = true;
                return Some(self.read_of(register));
            }
        }
        None
    }

    /// Ends a reservation without a write.
    pub(super) fn release(&mut self, register: usize) {
        self.registers[register].is_reserved = false;
    }

    /// The write to a reserved register. `None`: no read came after its last answered write. Then
    /// the reservation ends.
    pub(super) fn begin_write(&mut self, register: usize) -> Option<Write> {
        let state = &mut self.registers[register];
        if state.is_unread {
            state.is_reserved = false;
            return None;
        }
        state.started += 1;
        let number = state.started;
        Some(Write { register, number })
    }

    pub(super) fn wrote(&mut self, write: Write, now: Instant) {
        let register = &mut self.registers[write.register];
        register.answered = write.number;
        register.is_unread = true;
        register.is_reserved = false;
        self.writes += 1;
        self.longest_pause = self.longest_pause.max(now - self.last_write);
        self.last_write = now;
    }

    /// The write failed, or its connection was lost.
    pub(super) fn unanswered(&mut self, write: Write) {
        self.unanswered += 1;
        let register = &mut self.registers[write.register];
        register.is_retired = true;
        register.is_reserved = false;
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
        self.read_of(register)
    }

    /// A read of a register whose last answered write no read has seen. `None`: there is none.
    pub(super) fn begin_last_read(&mut self) -> Option<Read> {
        let register = self.unread().next()?;
        Some(self.read_of(register))
    }

    /// True if no writer is left, and a read came after each last write.
    pub(super) fn is_complete(&self) -> bool {
        let is_reserved = self.registers.iter().any(|register| register.is_reserved);
        !is_reserved && self.unread().next().is_none()
    }

    fn unread(&self) -> impl Iterator<Item = usize> {
        let registers = self.registers.iter().enumerate();
        registers
            .filter(|(_, register)| register.is_unread)
            .map(|(index, _)| index)
    }

    fn read_of(&self, register: usize) -> Read {
        let state = &self.registers[register];
        Read {
            register,
            after: state.answered,
            least: state.answered.max(state.seen),
        }
    }

    /// `found`: the number in the block, 0 if it has none of this history.
    pub(super) fn read(&mut self, read: Read, found: u64, node: &str) {
        self.came_back(read);
        let register = &mut self.registers[read.register];
        let (least, most) = (read.least, register.started);
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

    /// The block has contents of no write to it.
    pub(super) fn read_wrong(&mut self, read: Read, what: &str, node: &str) {
        self.came_back(read);
        let register = read.register;
        self.find(format!(
            "{what}: node {node} answered so for block {register}"
        ));
    }

    fn came_back(&mut self, read: Read) {
        self.reads += 1;
        // A read that began before the answer may have the contents before it.
        let register = &mut self.registers[read.register];
        register.is_unread &= read.after < register.answered;
    }

    pub(super) fn find(&mut self, finding: String) {
        if self.findings.len() < MAX_FINDINGS {
            self.findings.push(finding);
        }
    }

    /// After the last reads. A pause that has not ended by `now` counts too.
    pub(super) fn end(&mut self, now: Instant) {
        let pause = now.saturating_duration_since(self.last_write);
        self.longest_pause = self.longest_pause.max(pause);
        let unread = self.unread().count();
        if unread > 0 {
            self.find(format!(
                "unchecked: no read came after the last answered write to {unread} blocks"
            ));
        }
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

    /// The next write, after a read of its register that found this number.
    fn write_after(history: &mut History, found: u64) -> Write {
        let read = history.reserve().unwrap();
        history.read(read, found, "a");
        history.begin_write(read.register).unwrap()
    }

    /// Goal: no write replaces an answered one unseen, and none is unseen at the end. Method: a
    /// read that began before the answer does not count, one that began after it does.
    #[test]
    fn a_read_comes_after_each_answered_write() {
        let mut history = one_register();
        let first = write_after(&mut history, 0);
        let early = history.begin_read(1);
        history.wrote(first, Instant::now());
        history.read(early, 1, "a");
        let read = history.reserve().unwrap();
        assert_eq!(history.begin_write(read.register), None);
        assert!(!history.is_complete());
        history.end(Instant::now());
        let unchecked = history.findings.pop().unwrap();
        assert!(unchecked.ends_with("to 1 blocks"), "{unchecked}");
        let last = history.begin_last_read().unwrap();
        history.read(last, 1, "b");
        assert!(history.begin_last_read().is_none());
        assert!(history.is_complete());
        let read = history.reserve().unwrap();
        assert!(!history.is_complete(), "a writer is left");
        assert!(history.begin_write(read.register).is_some());
        history.end(Instant::now());
        assert!(history.findings.is_empty(), "{:?}", history.findings);
    }

    /// Goal: an old number after an answered write is found, whichever node answers. Method: a read
    /// that began before the answer may return both, and a later one only the new number.
    #[test]
    fn stale_reads_and_lost_writes_are_found() {
        let mut history = one_register();
        let first = write_after(&mut history, 0);
        assert!(history.reserve().is_none(), "one writer at a time");
        history.wrote(first, Instant::now());
        let second = write_after(&mut history, 1);
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
        let first = write_after(&mut history, 0);
        history.wrote(first, Instant::now());
        let second = write_after(&mut history, 1);
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
            let write = write_after(&mut history, 0);
            history.wrote(write, start + Duration::from_secs(after));
        }
        assert_eq!(history.longest_pause, Duration::from_secs(4));
        history.end(start + Duration::from_secs(20));
        assert_eq!(history.longest_pause, Duration::from_secs(14));
    }
}
