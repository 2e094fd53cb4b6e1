//! A list of commands that wait, for a buffer of their core or for room in a full device.

use std::collections::VecDeque;

use crate::subsystems::core_handle::ReqRef;

/// Initial capacity of a list.
const ROOM: usize = 128;

/// The commands, oldest first. The entry of a command that is aborted, or whose queue pair is
/// removed, stays until it is first or [`WaitingList::tidy`] removes it.
pub(crate) struct WaitingList {
    list: VecDeque<ReqRef>,
    /// The list length above which [`WaitingList::tidy`] searches for such entries.
    tidy_from: usize,
}

impl WaitingList {
    pub(crate) fn new() -> Self {
        Self {
            list: VecDeque::with_capacity(ROOM),
            tidy_from: ROOM / 2,
        }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    pub(crate) fn first(&self) -> Option<ReqRef> {
        self.list.front().copied()
    }

    pub(crate) fn pop(&mut self) -> Option<ReqRef> {
        self.list.pop_front()
    }

    pub(crate) fn push(&mut self, command: ReqRef) {
        self.list.push_back(command);
    }

    /// Puts a command back to the head of the list.
    pub(crate) fn push_first(&mut self, command: ReqRef) {
        self.list.push_front(command);
    }

    /// Removes entries that do not wait any more, if the list is long. Called once per turn. So the
    /// list has at most 64 entries, or twice as many as commands wait, plus those of one turn.
    #[inline]
    pub(crate) fn tidy(&mut self, waits: impl Fn(&ReqRef) -> bool) {
        if self.list.len() >= self.tidy_from {
            self.list.retain(waits);
            // Search again only after the list has doubled.
            self.tidy_from = (ROOM / 2).max(2 * self.list.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn command(begun: u32) -> ReqRef {
        ReqRef {
            queue: 0,
            generation: 1,
            request: 0,
            begun,
        }
    }

    fn all(list: &mut WaitingList) -> Vec<u32> {
        std::iter::from_fn(|| list.pop())
            .map(|command| command.begun)
            .collect()
    }

    /// Goal: commands leave in the order in which they came; one that is put back is the next.
    #[test]
    fn the_oldest_is_first() {
        let mut list = WaitingList::new();
        assert!(list.is_empty() && list.first().is_none() && list.pop().is_none());
        (1..=3).for_each(|begun| list.push(command(begun)));
        let first = list.pop().unwrap();
        assert_eq!((first.begun, list.len()), (1, 2));
        list.push_first(first);
        assert_eq!(list.first(), Some(command(1)));
        assert_eq!(all(&mut list), [1, 2, 3]);
    }

    /// Goal: a short list is not searched. A long one keeps the waiting commands in their order,
    /// and is searched again only when it has twice their number.
    #[test]
    fn a_long_list_is_tidied() {
        let looks = Cell::new(0);
        let waits = |command: &ReqRef| {
            looks.set(looks.get() + 1);
            command.begun.is_multiple_of(2)
        };
        let mut list = WaitingList::new();
        let most = ROOM as u32 / 2;
        (1..most).for_each(|begun| list.push(command(begun)));
        list.tidy(waits);
        assert_eq!((looks.get(), list.len()), (0, ROOM / 2 - 1));
        list.push(command(most));
        list.tidy(waits);
        assert_eq!((looks.get(), list.len()), (most, ROOM / 4));
        list.tidy(waits);
        assert_eq!(looks.get(), most, "it is short again");
        let even: Vec<u32> = (1..=most).filter(|begun| begun.is_multiple_of(2)).collect();
        assert_eq!(all(&mut list), even);
    }

    /// Goal: the list stays in proportion to the commands that wait, whatever hosts give up.
    /// Method: in each turn some commands come, and one of ten waits until the end.
    #[test]
    fn entries_are_bounded() {
        let mut list = WaitingList::new();
        let (mut begun, mut waiting) = (0, 0);
        for turn in 0..1_000 {
            for _ in 0..turn % 50 {
                begun += 1;
                waiting += usize::from(begun % 10 == 0);
                list.push(command(begun));
            }
            list.tidy(|command| command.begun.is_multiple_of(10));
            let most = (ROOM / 2).max(2 * waiting);
            assert!(list.len() <= most, "{} entries, {waiting} wait", list.len());
        }
        assert!(waiting > ROOM);
    }
}
