//! The way in: where the next bytes of a stream belong, and what has arrived but is not understood yet.
//!
//! ```text
//!                    ┌ payload in progress: the rest of its Buf        (no copy)
//!   next bytes go to ┤
//!                    └ then the receive buffer, from `end` on          (headers, small payloads)
//!
//!   receive buffer   [ consumed | start .. unread .. end | free ]
//! ```
//!
//! The receive buffer is lent by the core ([`RxBuffers`]) while there is something in it that could
//! not be handled yet, and given back otherwise: a thousand idle connections hold no buffer, and
//! busy ones take turns with the same few, which the processor's cache likes. What is left then is
//! less than one PDU header; it is carried in the connection until more arrives.

use std::io::IoSliceMut;

use arrayvec::ArrayVec;
use nacre_hugepages::Buf;

/// Largest PDU header with its digest and padding: PDO is one byte.
pub const MAX_HEADER: usize = 256;

/// The receive buffers of one core.
pub struct RxBuffers {
    free: Vec<Box<[u8]>>,
    bytes: usize,
    /// How many may still be made.
    unmade: usize,
}

impl RxBuffers {
    /// At most `count` buffers of `bytes` each. Two are made now; more only when connections have
    /// to wait with input that cannot be handled yet.
    pub fn new(count: usize, bytes: usize) -> RxBuffers {
        assert!(
            count > 0 && bytes >= 4 * MAX_HEADER,
            "receive buffers too few or too small"
        );
        let now = count.min(2);
        let mut free = Vec::with_capacity(count);
        free.resize_with(now, || vec![0; bytes].into_boxed_slice());
        RxBuffers {
            free,
            bytes,
            unmade: count - now,
        }
    }

    fn lease(&mut self) -> Option<Box<[u8]>> {
        if let Some(buffer) = self.free.pop() {
            return Some(buffer);
        }
        self.unmade = self.unmade.checked_sub(1)?;
        Some(vec![0; self.bytes].into_boxed_slice())
    }

    fn give_back(&mut self, buffer: Box<[u8]>) {
        self.free.push(buffer);
    }
}

/// Payload of the PDU in progress.
enum Payload {
    None,
    Into { buf: Buf, at: usize, end: usize },
    Skip { left: usize },
}

/// The receiving half of a connection, below the meaning of PDUs.
pub struct Rx {
    buffer: Option<Box<[u8]>>,
    start: usize,
    end: usize,
    payload: Payload,
    carried: u16,
    carry: [u8; MAX_HEADER],
}

impl Rx {
    pub fn new() -> Rx {
        Rx {
            buffer: None,
            start: 0,
            end: 0,
            payload: Payload::None,
            carried: 0,
            carry: [0; MAX_HEADER],
        }
    }

    /// Where the next bytes go, in this order. `None` when every receive buffer of the core is
    /// taken by connections that wait: try again next turn.
    #[inline]
    pub fn slices(&mut self, buffers: &mut RxBuffers) -> Option<ArrayVec<IoSliceMut<'_>, 2>> {
        if self.buffer.is_none() {
            let mut buffer = buffers.lease()?;
            let carried = usize::from(self.carried);
            buffer[..carried].copy_from_slice(&self.carry[..carried]);
            self.carried = 0;
            self.start = 0;
            self.end = carried;
            self.buffer = Some(buffer);
        } else if self.start > 0 {
            let buffer = self.buffer.as_mut()?;
            buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let mut slices = ArrayVec::new();
        if let Payload::Into { buf, at, end } = &mut self.payload {
            let bytes = buf
                .bytes_mut()
                .expect("a payload buffer has one handle while it is filled");
            if at < end {
                slices.push(IoSliceMut::new(&mut bytes[*at..*end]));
            }
        }
        let free = &mut self.buffer.as_mut()?[self.end..];
        if !free.is_empty() {
            slices.push(IoSliceMut::new(free));
        }
        if slices.is_empty() {
            None
        } else {
            Some(slices)
        }
    }

    /// `n` bytes were put where [`Rx::slices`] said.
    #[inline]
    pub fn received(&mut self, mut n: usize) {
        if let Payload::Into { at, end, .. } = &mut self.payload {
            let taken = n.min(*end - *at);
            *at += taken;
            n -= taken;
        }
        self.end += n;
        debug_assert!(n == 0 || self.buffer.as_ref().is_some_and(|b| self.end <= b.len()));
    }

    /// What arrived and was not consumed. Empty while nothing is leased, even if part of a header
    /// is carried: that part alone means nothing.
    #[inline]
    pub fn unread(&self) -> &[u8] {
        match &self.buffer {
            Some(buffer) => &buffer[self.start..self.end],
            None => &[],
        }
    }

    #[inline]
    pub fn consume(&mut self, n: usize) {
        debug_assert!(n <= self.end - self.start);
        self.start += n;
    }

    /// The next bytes of the stream are payload for `buf[at..at + len]`.
    pub fn begin(&mut self, buf: Buf, at: usize, len: usize) {
        debug_assert!(
            matches!(self.payload, Payload::None),
            "one payload at a time"
        );
        self.payload = Payload::Into {
            buf,
            at,
            end: at + len,
        };
    }

    /// The next `len` bytes of the stream are of no interest.
    pub fn begin_skip(&mut self, len: usize) {
        self.payload = Payload::Skip { left: len };
    }

    /// Moves what is already here to the payload in progress; whether it is complete now.
    #[inline]
    pub fn advance(&mut self) -> bool {
        let have = self.end - self.start;
        let Some(buffer) = &self.buffer else {
            return self.is_complete();
        };
        match &mut self.payload {
            Payload::None => {}
            Payload::Into { buf, at, end } => {
                let n = have.min(*end - *at);
                if n > 0 {
                    let bytes = buf
                        .bytes_mut()
                        .expect("a payload buffer has one handle while it is filled");
                    bytes[*at..*at + n].copy_from_slice(&buffer[self.start..self.start + n]);
                    *at += n;
                    self.start += n;
                }
            }
            Payload::Skip { left } => {
                let n = have.min(*left);
                *left -= n;
                self.start += n;
            }
        }
        self.is_complete()
    }

    fn is_complete(&self) -> bool {
        match &self.payload {
            Payload::None => true,
            Payload::Into { at, end, .. } => at == end,
            Payload::Skip { left } => *left == 0,
        }
    }

    /// The bytes of the payload in progress, if it is kept. The caller knows which of them count.
    pub fn payload(&self) -> Option<&Buf> {
        match &self.payload {
            Payload::Into { buf, .. } => Some(buf),
            _ => None,
        }
    }

    /// Ends the payload in progress.
    pub fn take_payload(&mut self) -> Option<Buf> {
        match std::mem::replace(&mut self.payload, Payload::None) {
            Payload::Into { buf, .. } => Some(buf),
            _ => None,
        }
    }

    /// Whether the stream stands inside a PDU.
    pub fn is_mid_pdu(&self) -> bool {
        self.carried > 0 || self.start != self.end || !matches!(self.payload, Payload::None)
    }

    /// Gives the receive buffer back if what is left in it can be carried. To be called when no
    /// more can be made of what is here; `keep` says that it is a matter of room, not of bytes.
    #[inline]
    pub fn settle(&mut self, buffers: &mut RxBuffers, keep: bool) {
        let left = self.end - self.start;
        if left > 0 && (keep || left > MAX_HEADER) {
            return;
        }
        if let Some(buffer) = self.buffer.take() {
            self.carry[..left].copy_from_slice(&buffer[self.start..self.end]);
            self.carried = left as u16;
            self.start = 0;
            self.end = 0;
            buffers.give_back(buffer);
        }
    }

    /// Forgets everything that arrived and the payload in progress.
    pub fn drop_unread(&mut self) {
        self.payload = Payload::None;
        self.start = 0;
        self.end = 0;
        self.carried = 0;
    }
}

impl Default for Rx {
    fn default() -> Rx {
        Rx::new()
    }
}
