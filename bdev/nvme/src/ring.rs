//! The submission and completion queue of one queue pair in memory, with the owner's head, tail and
//! phase tag.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use nacre_nvmf_wire::{Cqe, Sqe};
use zerocopy::IntoBytes;

use crate::activity::DoorbellWrites;
use crate::function::Function;
use crate::memory::{DmaMemory, MemoryError};

/// The memory of a queue pair: both rings, with the same number of entries, and a list per command.
pub(crate) struct Rings {
    pub sq: DmaMemory,
    pub cq: DmaMemory,
    /// [`Rings::list_bytes`] per command identifier.
    pub lists: DmaMemory,
    pub list_bytes: usize,
    pub entries: u16,
}

impl Rings {
    pub(crate) fn allocate(
        function: &Arc<dyn Function>,
        entries: u16,
        list_bytes: usize,
    ) -> Result<Self, MemoryError> {
        let count = usize::from(entries);
        Ok(Self {
            sq: DmaMemory::allocate(function, count * Sqe::SIZE)?,
            cq: DmaMemory::allocate(function, count * Cqe::SIZE)?,
            lists: DmaMemory::allocate(function, (count * list_bytes).max(Sqe::SIZE))?,
            list_bytes,
            entries,
        })
    }
}

/// Doorbells in memory (Base 8.2.1, Doorbell Buffer Config): the controller reads `shadow` at any
/// time, and sets in `event` the value from which it wants register writes.
pub(crate) struct Shadows {
    pub shadow: DmaMemory,
    pub event: DmaMemory,
}

impl Shadows {
    pub(crate) fn allocate(function: &Arc<dyn Function>) -> Result<Self, MemoryError> {
        Ok(Self {
            shadow: DmaMemory::allocate(function, crate::data::PAGE)?,
            event: DmaMemory::allocate(function, crate::data::PAGE)?,
        })
    }
}

/// One doorbell: its register, and its offset in the shadow buffers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Doorbell {
    register: u32,
    shadow: usize,
}

impl Doorbell {
    /// The tail doorbell of submission queue `qid`; `stride` in bytes.
    pub(crate) fn submission(qid: u16, stride: u32) -> Self {
        Self::at(2 * u32::from(qid), stride)
    }

    pub(crate) fn completion(qid: u16, stride: u32) -> Self {
        Self::at(2 * u32::from(qid) + 1, stride)
    }

    fn at(index: u32, stride: u32) -> Self {
        Self {
            register: nacre_nvmf_wire::registers::offset::DOORBELLS + index * stride,
            shadow: (index * stride) as usize,
        }
    }

    /// The offset after its register.
    pub(crate) fn end(self) -> u32 {
        self.register + 4
    }

    /// Notifies the controller of `value` by the register.
    #[inline]
    pub(crate) fn write(self, function: &dyn Function, value: u16) {
        function.write32(self.register, u32::from(value));
    }

    /// Notifies the controller of `value`; `before` is the previous value.
    #[inline]
    pub(crate) fn ring(
        self,
        function: &dyn Function,
        shadows: Option<&Shadows>,
        (before, value): (u16, u16),
        writes: &DoorbellWrites,
    ) {
        if let Some(shadows) = shadows {
            writes.shadow.add(1);
            shadows.shadow.store(self.shadow, u32::from(value));
            // The controller stores its event index and then loads the shadow; this side does the
            // reverse.
            fence(Ordering::SeqCst);
            let event = shadows.event.load(self.shadow) as u16;
            if !wants_register(event, value, before) {
                return;
            }
        }
        writes.register.add(1);
        self.write(function, value);
    }

    /// Notifies the controller of `value` by its register, whatever its event index.
    #[cold]
    pub(crate) fn insist(
        self,
        function: &dyn Function,
        shadows: Option<&Shadows>,
        value: u16,
        writes: &DoorbellWrites,
    ) {
        writes.register.add(1);
        if let Some(shadows) = shadows {
            writes.shadow.add(1);
            shadows.shadow.store(self.shadow, u32::from(value));
        }
        self.write(function, value);
    }

    /// Zeroes the shadow doorbell and its event index, as after Doorbell Buffer Config.
    pub(crate) fn clear(self, shadows: &Shadows) {
        shadows.shadow.store(self.shadow, 0);
        shadows.event.store(self.shadow, 0);
    }
}

/// True if the step from `before` to `value` passed `event`, all modulo 2^16.
fn wants_register(event: u16, value: u16, before: u16) -> bool {
    value.wrapping_sub(event).wrapping_sub(1) < value.wrapping_sub(before)
}

/// Owner's position in a submission queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tail {
    entries: u16,
    tail: u16,
    rung: u16,
}

impl Tail {
    pub(crate) fn new(entries: u16) -> Self {
        Self {
            entries,
            tail: 0,
            rung: 0,
        }
    }

    /// Writes the next entry. There is always room: fewer commands are in flight than there are
    /// entries.
    #[inline]
    pub(crate) fn push(&mut self, memory: &DmaMemory, sqe: &Sqe) {
        memory.write(usize::from(self.tail) * Sqe::SIZE, sqe.as_bytes());
        self.tail += 1;
        if self.tail == self.entries {
            self.tail = 0;
        }
    }

    #[inline]
    pub(crate) fn is_rung(&self) -> bool {
        self.tail == self.rung
    }

    /// The value of the last notification, and the value of the next.
    #[inline]
    pub(crate) fn ring(&mut self) -> (u16, u16) {
        let before = self.rung;
        self.rung = self.tail;
        (before, self.tail)
    }
}

/// A completion, as much of it as all commands have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Answer {
    pub cid: u16,
    /// The status field, above the phase tag.
    pub status: u16,
}

/// Owner's position in a completion queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    entries: u16,
    head: u16,
    rung: u16,
    phase: u32,
    /// Entries taken since the last notification, and the number of urgent ones.
    unrung: u16,
    pressing: u16,
}

impl Head {
    pub(crate) fn new(entries: u16) -> Self {
        Self {
            entries,
            head: 0,
            rung: 0,
            phase: 1 << 16,
            unrung: 0,
            pressing: entries / 4,
        }
    }

    /// The next completion, if the controller has written it: the dword with the phase tag is the
    /// last that it writes.
    #[inline]
    pub(crate) fn peek(&self, memory: &DmaMemory) -> Option<Answer> {
        let last = memory.load(usize::from(self.head) * Cqe::SIZE + 12);
        (last & 1 << 16 == self.phase).then_some(Answer {
            cid: last as u16,
            status: (last >> 17) as u16,
        })
    }

    /// The position of the next completion, which differs after each completion until the head has
    /// passed the queue twice.
    pub(crate) fn place(&self) -> u32 {
        u32::from(self.head) | self.phase
    }

    /// Dword 0 of the completion that [`Head::peek`] found.
    pub(crate) fn dword0(&self, memory: &DmaMemory) -> u32 {
        memory.load(usize::from(self.head) * Cqe::SIZE)
    }

    #[inline]
    pub(crate) fn advance(&mut self) {
        self.unrung += 1;
        self.head += 1;
        if self.head == self.entries {
            self.head = 0;
            self.phase ^= 1 << 16;
        }
    }

    /// True if so many entries were consumed that the head doorbell must be written soon.
    #[inline]
    pub(crate) fn is_pressing(&self) -> bool {
        self.unrung >= self.pressing
    }

    pub(crate) fn is_rung(&self) -> bool {
        self.unrung == 0
    }

    #[inline]
    pub(crate) fn ring(&mut self) -> (u16, u16) {
        let before = self.rung;
        self.rung = self.head;
        self.unrung = 0;
        (before, self.head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the register is written exactly when the step passes the event index. Method: every
    /// step in a window around the wrap, against counting.
    #[test]
    fn event_index_rule() {
        for before in (65_530..=65_535).chain(0..6u16) {
            for step in 1..12u16 {
                let value = before.wrapping_add(step);
                for event in (65_520..=65_535).chain(0..20u16) {
                    let passed = (0..step).any(|at| before.wrapping_add(at) == event);
                    assert_eq!(
                        wants_register(event, value, before),
                        passed,
                        "{before} {value} {event}"
                    );
                }
            }
        }
    }

    /// Places of doorbells with both strides, as the specification's formula has them.
    #[test]
    fn doorbell_offsets() {
        assert_eq!(Doorbell::submission(0, 4).register, 0x1000);
        assert_eq!(Doorbell::completion(0, 4).register, 0x1004);
        assert_eq!(Doorbell::submission(3, 4).register, 0x1018);
        assert_eq!(Doorbell::completion(3, 8).register, 0x1038);
        assert_eq!(Doorbell::completion(3, 8).shadow, 0x38);
    }

    /// The head turns its phase when it wraps, and presses when a quarter was taken.
    #[test]
    fn phase_flips_at_the_wrap() {
        let mut head = Head::new(4);
        for round in 0..10u32 {
            for at in 0..4u16 {
                assert_eq!((head.head, head.phase >> 16), (at, (round + 1) & 1));
                head.advance();
                assert!(head.is_pressing());
                let before = head.rung;
                assert_eq!(head.ring(), (before, (at + 1) % 4));
                assert!(head.is_rung() && !head.is_pressing());
            }
        }
    }
}
