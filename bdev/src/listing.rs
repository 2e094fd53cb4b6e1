//! Lists of the ranges of a device that have data: for NVMe's Get LBA Status.
//!
//! A question is answered once, on any thread, now or later. A [`ListAnswer`] that is lost answers
//! with a failure.

use std::ops::Range;

use crate::io::Status;

/// Which ranges are wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListQuery {
    /// Blocks, inside the device.
    pub range: Range<u64>,
    /// Most ranges of the answer.
    pub most: usize,
}

/// Ranges with data inside the wanted one: in order, not empty, neither overlapping nor adjacent.
/// Blocks between them read as zeroes. Not every block of a range needs to have data.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AllocatedRanges {
    pub ranges: Vec<Range<u64>>,
    /// False: there are more, after these.
    pub is_complete: bool,
}

type Receiver = Box<dyn FnOnce(Result<AllocatedRanges, Status>) + Send>;

/// The receiver of one answer.
pub struct ListAnswer(Option<Receiver>);

impl ListAnswer {
    pub fn new(receiver: impl FnOnce(Result<AllocatedRanges, Status>) + Send + 'static) -> Self {
        Self(Some(Box::new(receiver)))
    }

    pub fn give(mut self, answer: Result<AllocatedRanges, Status>) {
        if let Some(receiver) = self.0.take() {
            receiver(answer);
        }
    }

    /// Answers for a device that knows of no block without data.
    pub fn give_all(self, query: &ListQuery) {
        let all = Some(query.range.clone()).filter(|range| !range.is_empty());
        self.give(Ok(AllocatedRanges {
            is_complete: all.is_none() || query.most > 0,
            ranges: all.into_iter().take(query.most).collect(),
        }));
    }

    /// The receiver for a device below, whose block `first` is block 0 of this one.
    pub fn at_offset(self, first: u64) -> Self {
        Self::new(move |answer| {
            self.give(answer.map(|found| {
                let ranges = found.ranges.into_iter();
                AllocatedRanges {
                    ranges: ranges
                        .map(|range| range.start - first..range.end - first)
                        .collect(),
                    ..found
                }
            }));
        })
    }
}

impl Drop for ListAnswer {
    fn drop(&mut self) {
        if let Some(receiver) = self.0.take() {
            receiver(Err(Status::Gone));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    type Outcome = Result<AllocatedRanges, Status>;

    fn asked(ask: impl FnOnce(ListAnswer)) -> Vec<Outcome> {
        let (sender, answers) = mpsc::channel();
        ask(ListAnswer::new(move |answer| sender.send(answer).unwrap()));
        answers.iter().collect()
    }

    /// Goal: every question has one answer, also one whose receiver is lost; an answer of a device
    /// below is in the blocks of the one above.
    #[test]
    fn one_answer() {
        let found = |ranges: &[Range<u64>], is_complete| {
            Ok(AllocatedRanges {
                ranges: ranges.to_vec(),
                is_complete,
            })
        };
        assert_eq!(asked(drop), [Err(Status::Gone)]);
        assert_eq!(asked(|to| drop(to.at_offset(4))), [Err(Status::Gone)]);
        let below = found(&[10..12, 20..21], false);
        assert_eq!(
            asked(|to| to.at_offset(4).give(below)),
            [found(&[6..8, 16..17], false)]
        );
        let all = |range, most| asked(|to| to.give_all(&ListQuery { range, most }));
        assert_eq!(all(3..9, 1), [found(std::slice::from_ref(&(3..9)), true)]);
        assert_eq!(all(3..9, 0), [found(&[], false)]);
        assert_eq!(all(3..3, 0), [found(&[], true)]);
    }
}
