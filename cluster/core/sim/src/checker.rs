//! Checks the history of all reads and writes: each block must behave as a linearizable register.
//! So every operation takes effect at one moment between its start and its end, and a read returns
//! the last write before that moment.
//!
//! Every write has a value of its own, so a read shows which write it saw. The operations of a
//! value are its write and the reads that returned it. Two times of a value decide (Gibbons and
//! Korach, "Testing Shared Memories", 1997), the earliest end and the latest start of its
//! operations:
//!
//! - If the earliest end comes first, the block has this value from then until the latest start. No
//!   two such intervals may overlap.
//! - Else one moment from the latest start to the earliest end is enough for all operations of the
//!   value. This interval must not lie within an interval of the first kind.
//!
//! In addition, no read may return a value that was never written, or end before the write of its
//! value starts. A write without a response counts only if a read returned its value. All blocks
//! begin with the value 0.

use std::collections::BTreeMap;

/// One read or write of a host.
#[derive(Debug, Clone, Copy)]
struct CheckedOperation {
    block: usize,
    /// The value written, or the value read. `None`: a read without a response.
    value: Option<u64>,
    is_write: bool,
    /// Virtual time in nanoseconds, as all times here.
    start: u64,
    /// `None`: no response.
    end: Option<u64>,
}

/// The history of all operations, in the order of their starts.
#[derive(Debug, Default)]
pub(crate) struct Checker {
    operations: Vec<CheckedOperation>,
}

/// The earliest end and the latest start of the operations of one value.
#[derive(Debug, Clone, Copy)]
struct Zone {
    value: u64,
    first_end: u64,
    last_start: u64,
}

impl Checker {
    /// Notes the start of a write of `value`, or of a read (`None`). Returns the number of the
    /// operation.
    pub(crate) fn start(&mut self, block: usize, value: Option<u64>, now: u64) -> usize {
        self.operations.push(CheckedOperation {
            block,
            value,
            is_write: value.is_some(),
            start: now,
            end: None,
        });
        self.operations.len() - 1
    }

    /// Notes the response to an operation; `value` is the value that a read returned.
    pub(crate) fn end(&mut self, number: usize, value: u64, now: u64) {
        let operation = &mut self.operations[number];
        operation.end = Some(now);
        if !operation.is_write {
            operation.value = Some(value);
        }
    }

    /// Checks the first `blocks` blocks. The error describes the first fault.
    pub(crate) fn check(&self, blocks: usize) -> Result<(), String> {
        (0..blocks).try_for_each(|block| self.check_block(block))
    }

    fn check_block(&self, block: usize) -> Result<(), String> {
        // Value 0 was written before everything else.
        let mut writes: BTreeMap<u64, (u64, Option<u64>)> = BTreeMap::from([(0, (0, Some(0)))]);
        let of_block = || self.operations.iter().filter(|o| o.block == block);
        for write in of_block().filter(|o| o.is_write) {
            let value = write.value.unwrap_or_default();
            writes.insert(value, (write.start, write.end));
        }
        let mut zones: BTreeMap<u64, Zone> = BTreeMap::new();
        for (value, (start, end)) in &writes {
            if let Some(end) = end {
                zones.insert(*value, Zone::new(*value, *end, *start));
            }
        }
        for read in of_block().filter(|o| !o.is_write) {
            let (Some(value), Some(end)) = (read.value, read.end) else {
                continue;
            };
            let Some((start, _)) = writes.get(&value) else {
                return Err(format!(
                    "block {block}: a read returned {value}, never written"
                ));
            };
            if end < *start {
                return Err(format!("block {block}: {value} was read before its write"));
            }
            let zone = zones
                .entry(value)
                .or_insert_with(|| Zone::new(value, end, *start));
            zone.first_end = zone.first_end.min(end);
            zone.last_start = zone.last_start.max(read.start);
        }
        let (mut alone, others): (Vec<Zone>, Vec<Zone>) = zones
            .into_values()
            .partition(|zone| zone.first_end < zone.last_start);
        alone.sort_by_key(|zone| zone.first_end);
        for pair in alone.windows(2) {
            if pair[1].first_end < pair[0].last_start {
                return Err(format!("block {block}: {} and {}", pair[0], pair[1]));
            }
        }
        for other in others {
            let before = alone.partition_point(|zone| zone.first_end < other.last_start);
            let around = alone[..before]
                .iter()
                .find(|zone| other.first_end < zone.last_start);
            if let Some(zone) = around {
                return Err(format!("block {block}: {other} within {zone}"));
            }
        }
        Ok(())
    }
}

impl Zone {
    fn new(value: u64, first_end: u64, last_start: u64) -> Self {
        Self {
            value,
            first_end,
            last_start,
        }
    }
}

impl std::fmt::Display for Zone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ms = |nanos: u64| nanos as f64 / 1e6;
        let (end, start) = (ms(self.first_end), ms(self.last_start));
        write!(
            f,
            "value {} (ended at {end:.3} ms, started at {start:.3} ms)",
            self.value
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Operations `(value, is_write, start, end)` of one block.
    fn check(operations: &[(u64, bool, u64, Option<u64>)]) -> Result<(), String> {
        let mut checker = Checker::default();
        for (value, is_write, start, end) in operations {
            let number = checker.start(0, is_write.then_some(*value), *start);
            if let Some(end) = end {
                checker.end(number, *value, *end);
            }
        }
        checker.check(1)
    }

    #[test]
    fn registers_are_accepted() {
        // Overlapping writes in either order, and an unanswered write that is read later.
        check(&[
            (1, true, 10, Some(30)),
            (2, true, 10, Some(30)),
            (1, false, 40, Some(50)),
            (3, true, 60, None),
            (1, false, 70, Some(80)),
            (3, false, 90, Some(99)),
        ])
        .unwrap();
    }

    #[test]
    fn other_histories_are_refused() {
        let write = (1, true, 10, Some(20));
        let stale = check(&[write, (0, false, 30, Some(40))]);
        assert!(stale.is_err(), "a read of the former value");
        let lost = check(&[write, (2, true, 30, Some(40)), (1, false, 50, Some(60))]);
        assert!(lost.is_err(), "a lost write");
        let unknown = check(&[(7, false, 1, Some(2))]);
        assert!(unknown.is_err(), "an unknown value");
        let back = [(1, false, 30, Some(40)), (0, false, 50, Some(60))];
        let back = check(&[(1, true, 10, None), back[0], back[1]]);
        assert!(back.is_err(), "a value that disappears");
        let early = check(&[(1, false, 1, Some(5)), write]);
        assert!(early.is_err(), "a value before its write");
    }
}
