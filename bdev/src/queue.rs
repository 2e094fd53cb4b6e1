//! The trait [`Queue`]: the I/O queue of one core to a device.

use std::os::fd::BorrowedFd;

use nacre_hugepages::MemoryView;
use nacre_reactor::{Idle, Nanos};

use crate::io::{Completion, Io, Status, Token};
use crate::reservation::Reserve;

/// The error of a full queue. Submit the returned I/O again after the next completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Busy;

/// One core's access to a device. Never blocks, never allocates in steady state.
///
/// Dropping a queue abandons its I/O in flight. The buffers return to their pool once the device
/// and the kernel are done with them, and no completion follows.
pub trait Queue {
    /// Accepts the I/O, or hands it back unchanged. An accepted I/O completes exactly once through
    /// [`Queue::poll`], whatever happens to the device. A read may complete with other buffers than
    /// its own: they have the same sizes and belong to the pool that the queue was opened with.
    // The error carries the I/O back by value: boxing it would allocate on the data path.
    #[allow(clippy::result_large_err)]
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)>;

    /// Hands submitted I/O to the device (one system call or doorbell for all of it) and collects
    /// completions while `done` has room. Returns the number of completions.
    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize;

    /// Executes the I/O synchronously and leaves nothing for [`Queue::poll`] to collect; its
    /// buffers stay in `io`. Returns `None` without side effects if the device cannot: submit the
    /// I/O then. Poll the queue in the same turn, as after a submission, because some statistics
    /// update once per turn. `zero_copy` is set like [`Completion::zero_copy`] and valid only with
    /// a status; as a parameter it is not moved by each layer. Use this for devices that finish an
    /// I/O at its submission ([`crate::Limits::is_sync`]): it halves the cost for them and their
    /// callers.
    fn run_sync(&mut self, io: &mut Io, zero_copy: &mut Option<MemoryView>) -> Option<Status> {
        let _ = (io, zero_copy);
        None
    }

    /// Tries to end an I/O early. Returns true if the abort was requested: the I/O then completes
    /// through `poll`, with [`Status::Aborted`], or with its own result if that came first. Returns
    /// false when the I/O is unknown or can no longer be aborted.
    fn abort(&mut self, token: Token) -> bool;

    /// Number of I/Os accepted and not yet completed.
    fn inflight(&self) -> usize;

    /// True when `poll` has no work: no I/O in flight and no cleanup pending after a device change.
    /// Callers that skip idle queues must check this periodically and before sleeping.
    fn is_settled(&self) -> bool {
        self.inflight() == 0
    }

    /// Accepts a request about the device's reservations; a later `poll` calls [`Reserve::answer`].
    /// Hands the request back if the device has no reservations, or while another request is in
    /// flight.
    fn reserve(&mut self, request: Reserve) -> Result<(), Reserve> {
        Err(request)
    }

    /// Prepares for the reactor's sleep; see [`nacre_reactor::Poller::arm`].
    fn arm(&mut self, now: Nanos) -> Idle {
        let _ = now;
        if self.inflight() == 0 {
            Idle::Quiet
        } else {
            Idle::Busy
        }
    }

    fn disarm(&mut self) {}

    /// A descriptor that becomes readable when `poll` would find a completion, if the device has
    /// one.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A bounded list of completions, allocated once and reused every turn.
pub struct Done {
    items: Vec<Completion>,
}

impl Done {
    pub fn with_capacity(capacity: usize) -> Self {
        Self {
            items: Vec::with_capacity(capacity),
        }
    }

    #[inline]
    pub fn has_room(&self) -> bool {
        self.items.len() < self.items.capacity()
    }

    /// # Panics
    /// When the list is full: check [`Done::has_room`] first.
    #[inline]
    pub fn push(&mut self, completion: Completion) {
        assert!(self.has_room(), "completion list overrun");
        self.items.push(completion);
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Moves items from the front of `list` while there is room. Returns their number.
    #[inline]
    pub fn take_from(&mut self, list: &mut Vec<Completion>) -> usize {
        let count = list.len().min(self.room());
        if count == list.len() {
            // The usual case: the whole list fits.
            self.items.append(list);
        } else {
            self.items.extend(list.drain(..count));
        }
        count
    }

    /// Number of free entries.
    pub fn room(&self) -> usize {
        self.items.capacity() - self.items.len()
    }

    /// The completion at `index`. A layer whose lower queue writes directly into the caller's list
    /// translates tokens in place.
    pub fn get_mut(&mut self, index: usize) -> Option<&mut Completion> {
        self.items.get_mut(index)
    }

    /// Removes the completion at `index`; the last one moves to its position.
    ///
    /// # Panics
    /// When `index` is out of range.
    pub fn swap_remove(&mut self, index: usize) -> Completion {
        self.items.swap_remove(index)
    }

    pub fn drain(&mut self) -> std::vec::Drain<'_, Completion> {
        self.items.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{Op, Status};

    /// Items that do not fit stay in the list, in order.
    #[test]
    fn accepts_as_many_as_fit() {
        let ended = |token| Io::new(token, Op::Flush, 0, 0).complete(Status::Ok);
        let mut list: Vec<Completion> = (0..5).map(ended).collect();
        let mut done = Done::with_capacity(3);
        done.push(ended(9));
        assert_eq!(done.take_from(&mut list), 2);
        assert_eq!(done.take_from(&mut list), 0);
        let tokens = |done: &mut Done| done.drain().map(|c| c.token).collect::<Vec<_>>();
        assert_eq!(tokens(&mut done), [9, 0, 1]);
        assert_eq!(done.take_from(&mut list), 3);
        assert!(list.is_empty() && !done.has_room());
        assert_eq!(tokens(&mut done), [2, 3, 4]);
    }
}
