//! The send path of a connection: sends queued headers and data with as few vectored sends as
//! possible, and releases each buffer when its bytes are sent.
//!
//! ```text
//! inline   a byte ring: PDU headers, padding and digests, one after the other
//! parts    the order of sending:  28 + Data(buf)   28 + Data(buf)   24 + 24 + 24 + nothing   ...
//! ```
//!
//! A part is a run of ring bytes followed by at most one data buffer, like most PDUs. Consecutive
//! headers without data between them (a run of responses) form one part, and so one entry of the
//! I/O vector. This module does not interpret PDUs.

use std::collections::VecDeque;
use std::io::IoSlice;

use arrayvec::ArrayVec;
use nacre_hugepages::{Buf, MemoryView};

/// Most entries of one vectored send. Linux accepts 1024; more than a few hundred gain nothing
/// measurable, and the list is on the stack.
pub const MAX_SLICES: usize = 512;

/// The I/O vector of one send.
pub type Slices<'a> = ArrayVec<IoSlice<'a>, MAX_SLICES>;

struct Part {
    /// The next bytes of the ring.
    inline: u32,
    /// Number of marks (responses) that end with this part or within its ring bytes.
    marks: u32,
    data: Data,
}

enum Data {
    None,
    Buf(Buf),
    View(MemoryView),
}

impl Part {
    #[inline]
    fn len(&self) -> usize {
        self.inline as usize
            + match &self.data {
                Data::None => 0,
                Data::Buf(buf) => buf.len(),
                Data::View(zero_copy) => zero_copy.len(),
            }
    }
}

/// The queue of bytes to send.
pub struct Tx {
    ring: Box<[u8]>,
    /// Bytes ever removed from and added to the ring; the position in it is the remainder by its
    /// size.
    head: usize,
    tail: usize,
    parts: VecDeque<Part>,
    /// Number of sent bytes of the first part.
    front_sent: usize,
    pending: usize,
    marks: u32,
    /// Number of bytes ever sent.
    left: u64,
}

impl Tx {
    /// Creates a queue with room for `entries` responses; it grows beyond that.
    pub fn new(entries: usize) -> Self {
        Self {
            ring: vec![0; (entries * 64).next_power_of_two().max(512)].into_boxed_slice(),
            head: 0,
            tail: 0,
            parts: VecDeque::with_capacity(entries * 2 + 8),
            front_sent: 0,
            pending: 0,
            marks: 0,
            left: 0,
        }
    }

    /// Makes room for `entries` responses, so that the queue need not grow later.
    pub fn reserve(&mut self, entries: usize) {
        self.make_room((entries * 64).saturating_sub(self.tail - self.head));
        self.parts
            .reserve((entries * 2 + 8).saturating_sub(self.parts.len()));
    }

    /// Queues a copy of `bytes`. Inlined, so that a copy of constant size is a few instructions.
    #[inline(always)]
    pub fn push(&mut self, bytes: &[u8]) {
        let len = bytes.len();
        self.make_room(len);
        let mask = self.ring.len() - 1;
        let at = self.tail & mask;
        if let Some(place) = self.ring.get_mut(at..at + len) {
            place.copy_from_slice(bytes);
        } else {
            self.wrap(at, bytes);
        }
        self.tail += len;
        self.pending += len;
        match self.parts.back_mut() {
            Some(Part {
                inline,
                data: Data::None,
                ..
            }) => *inline += len as u32,
            _ => self.parts.push_back(Part {
                inline: len as u32,
                marks: 0,
                data: Data::None,
            }),
        }
    }

    /// The first of `bytes` go to the end of the ring, the others to its beginning.
    #[cold]
    fn wrap(&mut self, at: usize, bytes: &[u8]) {
        let (first, second) = bytes.split_at(self.ring.len() - at);
        self.ring[at..].copy_from_slice(first);
        self.ring[..second.len()].copy_from_slice(second);
    }

    /// Queues the bytes of `buf`, which is dropped when the last of them is sent.
    #[inline]
    pub fn push_data(&mut self, buf: Buf) {
        if !buf.is_empty() {
            self.pending += buf.len();
            self.put(Data::Buf(buf));
        }
    }

    /// Queues a view of a device's memory, whose contents at the time of sending are sent.
    #[inline]
    pub fn push_view(&mut self, zero_copy: MemoryView) {
        if !zero_copy.is_empty() {
            self.pending += zero_copy.len();
            self.put(Data::View(zero_copy));
        }
    }

    #[inline]
    fn put(&mut self, data: Data) {
        match self.parts.back_mut() {
            Some(Part {
                data: place @ Data::None,
                ..
            }) => *place = data,
            _ => self.parts.push_back(Part {
                inline: 0,
                marks: 0,
                data,
            }),
        }
    }

    /// Counts one more response, which ends with the bytes pushed last.
    #[inline]
    pub fn mark(&mut self) {
        self.marks += 1;
        match self.parts.back_mut() {
            Some(part) => part.marks += 1,
            None => self.parts.push_back(Part {
                inline: 0,
                marks: 1,
                data: Data::None,
            }),
        }
    }

    /// Number of marked responses that are not completely sent. A part that a partial send has cut
    /// counts as a whole until its last byte is sent.
    pub fn marks(&self) -> usize {
        self.marks as usize
    }

    pub fn is_empty(&self) -> bool {
        self.pending == 0
    }

    /// Number of queued bytes.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// The end of the queued data, for [`Tx::has_left`].
    #[inline]
    pub fn position(&self) -> u64 {
        self.left + self.pending as u64
    }

    /// True if all data queued before `position` is sent, and its buffers are released.
    #[inline]
    pub fn has_left(&self, position: u64) -> bool {
        self.left >= position
    }

    /// Number of queued parts, which bounds the memory that is held.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Adds the next bytes to send to `out`. Bytes beyond [`MAX_SLICES`] entries are left for the
    /// next call.
    #[inline]
    pub fn slices<'a>(&'a self, out: &mut Slices<'a>) {
        let mask = self.ring.len() - 1;
        let mut at = self.head;
        let mut skip = self.front_sent;
        for part in &self.parts {
            let inline = part.inline as usize;
            // The ring's head stands where sending stopped, so nothing is skipped here.
            let sent = skip.min(inline);
            let end = at + inline - sent;
            if at != end && !push_ring(&self.ring, mask, at, end, out) {
                return;
            }
            at = end;
            skip -= sent;
            let slice = match &part.data {
                Data::None => continue,
                Data::Buf(buf) => IoSlice::new(&buf[skip..]),
                Data::View(zero_copy) => {
                    let mut slice = zero_copy.as_io_slice();
                    slice.advance(skip);
                    slice
                }
            };
            if out.try_push(slice).is_err() {
                return;
            }
            skip = 0;
        }
    }

    /// Records that `n` bytes of [`Tx::slices`] were sent.
    #[inline]
    pub fn sent(&mut self, mut n: usize) {
        debug_assert!(n <= self.pending, "more sent than queued");
        self.left += n as u64;
        if n == self.pending {
            // All of it, as nearly always.
            return self.clear();
        }
        self.pending -= n;
        while let Some(part) = self.parts.front() {
            let inline = part.inline as usize;
            let (left, before) = (part.len() - self.front_sent, self.front_sent.min(inline));
            if n < left {
                self.front_sent += n;
                self.head += self.front_sent.min(inline) - before;
                return;
            }
            n -= left;
            self.head += inline - before;
            self.front_sent = 0;
            self.marks -= part.marks;
            self.parts.pop_front();
        }
    }

    /// Drops all queued data and releases its buffers.
    #[inline]
    pub fn clear(&mut self) {
        self.parts.clear();
        // From the beginning again: later headers lie in one piece, which the cache holds.
        (self.head, self.tail) = (0, 0);
        self.front_sent = 0;
        self.pending = 0;
        self.marks = 0;
    }

    #[inline]
    fn make_room(&mut self, len: usize) {
        if self.tail - self.head + len > self.ring.len() {
            self.grow(len);
        }
    }

    #[cold]
    fn grow(&mut self, len: usize) {
        let used = self.tail - self.head;
        let mask = self.ring.len() - 1;
        let mut grown = vec![0; (used + len).next_power_of_two()].into_boxed_slice();
        for (to, at) in (self.head..self.tail).enumerate() {
            grown[to] = self.ring[at & mask];
        }
        self.ring = grown;
        self.head = 0;
        self.tail = used;
    }
}

#[inline]
fn push_ring<'a>(
    ring: &'a [u8],
    mask: usize,
    from: usize,
    to: usize,
    out: &mut Slices<'a>,
) -> bool {
    let (at, len) = (from & mask, to - from);
    if at + len <= ring.len() {
        return out.try_push(IoSlice::new(&ring[at..at + len])).is_ok();
    }
    if out.remaining_capacity() < 2 {
        return false;
    }
    out.push(IoSlice::new(&ring[at..]));
    out.push(IoSlice::new(&ring[..at + len - ring.len()]));
    true
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nacre_hugepages::{ClassSpec, HugepagePolicy, Pool, Shared};
    use proptest::prelude::*;

    use super::*;

    /// Headers queued after everything has left lie in one piece, however much was queued before.
    #[test]
    fn an_empty_ring_begins_anew() {
        let mut tx = Tx::new(1);
        for _ in 0..10 {
            tx.push(&[7; 300]);
            let mut slices = Slices::new();
            tx.slices(&mut slices);
            assert_eq!(slices.iter().map(|s| s.len()).collect::<Vec<_>>(), [300]);
            drop(slices);
            tx.sent(300);
        }
    }

    /// Whatever is queued and however it is cut, the bytes come out in order, once, and buffers go
    /// back exactly when their last byte has left.
    #[derive(Debug, Clone)]
    enum Step {
        Push(usize),
        Data(usize),
        View(usize),
        Mark,
        Send(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (1usize..200).prop_map(Step::Push),
            2 => (0usize..512).prop_map(Step::Data),
            1 => (0usize..512).prop_map(Step::View),
            2 => Just(Step::Mark),
            3 => (0usize..700).prop_map(Step::Send),
        ]
    }

    proptest! {
        #[test]
        fn bytes_come_out_in_order(steps in proptest::collection::vec(step(), 0..200)) {
            let pool = Pool::heap(&[ClassSpec { size: 512, count: 256 }]);
            let disk = Arc::new(Shared::allocate(4096, HugepagePolicy::Off).expect("a page"));
            let on_core = disk.on_core();
            let mut tx = Tx::new(1);
            let (mut expected, mut got) = (Vec::new(), Vec::new());
            let mut next = 0u8;
            let mut lent_to = 0;
            let mut bytes = |n: usize| -> Vec<u8> {
                (0..n).map(|_| { next = next.wrapping_add(1); next }).collect()
            };
            let drain = |tx: &mut Tx, limit: usize, got: &mut Vec<u8>| {
                let mut slices = Slices::new();
                tx.slices(&mut slices);
                let all: Vec<u8> = slices.iter().flat_map(|s| s.iter().copied()).collect();
                let n = all.len().min(limit);
                got.extend_from_slice(&all[..n]);
                drop(slices);
                tx.sent(n);
            };
            for step in steps {
                match step {
                    Step::Push(n) => {
                        let b = bytes(n);
                        tx.push(&b);
                        expected.extend_from_slice(&b);
                    }
                    Step::Data(n) => {
                        let Some(mut buf) = pool.acquire(n) else { continue };
                        let b = bytes(n);
                        buf.bytes_mut().unwrap().copy_from_slice(&b);
                        tx.push_data(buf);
                        expected.extend_from_slice(&b);
                    }
                    Step::View(n) => {
                        // Each in a place of its own, or it would change what still waits.
                        let at = lent_to;
                        if at + n > disk.len() { continue }
                        lent_to += n;
                        let b = bytes(n);
                        disk.write(at, &b);
                        tx.push_view(on_core.view(at, n));
                        expected.extend_from_slice(&b);
                    }
                    Step::Mark => tx.mark(),
                    Step::Send(n) => drain(&mut tx, n, &mut got),
                }
                prop_assert_eq!(tx.pending(), expected.len() - got.len());
            }
            while !tx.is_empty() {
                drain(&mut tx, usize::MAX, &mut got);
            }
            tx.sent(0);
            prop_assert_eq!(got, expected);
            prop_assert_eq!(tx.marks(), 0);
            prop_assert_eq!(pool.stats()[0].free, 256);
        }
    }
}
