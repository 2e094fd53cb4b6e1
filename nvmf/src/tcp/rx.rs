//! The receive path of a connection: where the socket's next bytes are received to, and the
//! received bytes that are not parsed yet.
//!
//! ```text
//!                    ┌ payload in progress: the rest of its Buf        (no copy)
//!   next bytes go to ┤
//!                    └ then the receive buffer, from `end` on          (headers, small payloads)
//!
//!   receive buffer   [ consumed | start .. unread .. end | free ]
//! ```
//!
//! A connection has a receive buffer of the core ([`RxBuffers`]) only during a receive, and while
//! the buffer holds bytes that cannot be handled yet. So idle connections hold none, and busy ones
//! share a few, which stay in the processor's cache. A rest shorter than a PDU header is stored in
//! the connection until more arrives.
//!
//! The layer above may get parts of the buffer ([`Rx::part`]) instead of copies. While a part is in
//! use, another buffer replaces this one for receiving.
//!
//! # Guesses
//!
//! A host that reads knows the probable next PDUs: the data of its oldest read, then that of the
//! one after it. [`Rx::guess`] takes these guesses, and the next receive is scattered accordingly:
//!
//! ```text
//!   receive buffer [ hdr 0 | hdr 1 | hdr 2 | ...       ]   data 0, data 1, data 2: each to its Buf
//! ```
//!
//! Each header is then parsed as usual. If the guess was right, its payload is in place already
//! ([`Rx::hit`]). If not, the received bytes are put back into one piece ([`Rx::miss`]), which
//! costs only a copy. Guesses without data stay for the next receive, behind the rest of the
//! payload in progress: receives rarely end where a PDU does.
//!
//! A vector costs the kernel time even if there is nothing to receive. So after a receive without
//! data ([`Rx::found_nothing`]) the next ones are short, until one gets data.

use std::collections::VecDeque;
use std::io::IoSliceMut;

use arrayvec::ArrayVec;
use nacre_hugepages::{Buf, ClassSpec, Pool};

/// Most guesses per receive.
pub const MAX_GUESSES: usize = 64;
/// Most guesses after a receive without data: enough for the completions of a few commands.
const FEW_GUESSES: usize = 4;

/// The I/O vector of one receive: the rest of a payload, then guesses.
pub type RecvSlices<'a> = ArrayVec<IoSliceMut<'a>, { 1 + 2 * MAX_GUESSES }>;

/// Largest PDU header with its digest and padding: the field PDO has one byte.
pub const MAX_HEADER: usize = 256;

/// Bytes of a receive buffer beyond the count of [`RxBuffers`], enough for commands and a little
/// data.
const SMALL: usize = 4 << 10;

/// The receive buffers of one core.
pub struct RxBuffers {
    /// The last returned buffer is used first, so that few buffers are in turn and the cache holds
    /// them. Parts of a buffer in this list may still be in use.
    free: Vec<Buf>,
    /// More than a quarter of the buffers have parts in use: see [`Rx::may_part`].
    crowded: bool,
    count: usize,
    bytes: usize,
    /// Number of buffers that may still be allocated.
    unmade: usize,
}

impl RxBuffers {
    /// Creates a set of at most `count` buffers of `bytes` each. Allocates up to two now, and more
    /// only when connections hold buffers with input that cannot be handled yet, or parts.
    pub fn new(count: usize, bytes: usize) -> Self {
        assert!(
            count > 0 && bytes >= 4 * MAX_HEADER,
            "receive buffers too few or too small"
        );
        let now = count.min(2);
        let mut free = Vec::with_capacity(count);
        free.extend((0..now).filter_map(|_| one_buffer(bytes)));
        Self {
            free,
            crowded: false,
            count,
            bytes,
            unmade: count - now,
        }
    }

    #[inline]
    fn lease(&mut self) -> Option<Buf> {
        let last = self.free.pop();
        match &last {
            Some(buffer) if !self.crowded && buffer.is_unshared() => last,
            _ => self.lease_another(last),
        }
    }

    #[cold]
    fn lease_another(&mut self, kept: Option<Buf>) -> Option<Buf> {
        self.free.extend(kept);
        let kept = self.free.iter().filter(|buf| !buf.is_unshared()).count();
        self.crowded = kept > self.count / 4;
        if let Some(at) = self.free.iter().rposition(Buf::is_unshared) {
            return Some(self.free.remove(at));
        }
        self.unmade = self.unmade.checked_sub(1)?;
        one_buffer(self.bytes)
    }

    /// A small buffer beyond the count, for a connection that must be served although all others
    /// are taken.
    #[cold]
    fn lease_small(&self) -> Option<Buf> {
        // Smaller than the others in any case: it must not become one of them.
        one_buffer(SMALL.min(self.bytes / 2))
    }

    #[inline]
    fn give_back(&mut self, buffer: Buf) {
        if buffer.len() == self.bytes {
            self.free.push(buffer);
        }
    }
}

/// Each buffer has memory of its own, so that only buffers that were needed exist.
fn one_buffer(bytes: usize) -> Option<Buf> {
    let size = bytes.next_multiple_of(512);
    Pool::heap(&[ClassSpec { size, count: 1 }]).acquire(bytes)
}

/// Payload of the PDU in progress.
enum Payload {
    None,
    Into { buf: Buf, at: usize, end: usize },
    Skip { left: usize },
}

/// Expected payload: `len` bytes for the beginning of `buf`, behind a header of the usual length.
pub struct Guess {
    pub id: u16,
    pub buf: Buf,
    pub len: usize,
}

/// The receiving half of a connection. It does not interpret PDUs.
pub struct Rx {
    buffer: Option<Buf>,
    start: usize,
    end: usize,
    payload: Payload,
    guesses: VecDeque<Guess>,
    /// Bytes of the header before each guessed payload.
    guess_header: usize,
    /// Room for the headers of the last receive at the beginning of the receive buffer, and the
    /// part of it that was checked.
    guess_area: usize,
    guess_at: usize,
    /// Bytes of receive buffer that the guesses need if they are put back into one piece.
    guess_room: usize,
    /// Bytes received by guess and not checked yet.
    guessed: usize,
    /// Guesses that the next receive may use.
    guess_limit: usize,
    may_part: bool,
    urgent: bool,
    carried: u16,
    carry: [u8; MAX_HEADER],
}

impl Rx {
    pub fn new() -> Self {
        Self {
            buffer: None,
            start: 0,
            end: 0,
            payload: Payload::None,
            guesses: VecDeque::new(),
            guess_header: 0,
            guess_area: 0,
            guess_at: 0,
            guess_room: 0,
            guessed: 0,
            guess_limit: MAX_GUESSES,
            may_part: false,
            urgent: false,
            carried: 0,
            carry: [0; MAX_HEADER],
        }
    }

    /// Sets whether this connection gets a small buffer of its own when other connections hold all
    /// receive buffers. Only for a few connections, such as admin queues: memory plans do not
    /// include it.
    pub fn set_urgent(&mut self, urgent: bool) {
        self.urgent = urgent;
    }

    /// Fills `out` with the memory for the next bytes, in this order; at most `window` bytes of it
    /// are in the receive buffer. Returns false if other connections hold every receive buffer of
    /// the core: try again in the next turn.
    #[inline]
    pub fn slices<'a>(
        &'a mut self,
        buffers: &mut RxBuffers,
        window: usize,
        out: &mut RecvSlices<'a>,
    ) -> bool {
        if !self.make_room(buffers) {
            return false;
        }
        let Some(buffer) = self.buffer.as_mut().and_then(Buf::bytes_mut) else {
            return false;
        };
        if let Payload::Into { buf, at, end } = &mut self.payload {
            let bytes = buf
                .bytes_mut()
                .expect("a payload buffer has one handle while it is filled");
            if at < end {
                out.push(IoSliceMut::new(&mut bytes[*at..*end]));
            }
        }
        if !self.guesses.is_empty() {
            let count = self.guesses.len().min(self.guess_limit);
            self.guess_area = count * self.guess_header;
            self.guess_at = 0;
            let headers = buffer[..self.guess_area].chunks_exact_mut(self.guess_header);
            for (header, guess) in headers.zip(&mut self.guesses) {
                let bytes = guess
                    .buf
                    .bytes_mut()
                    .expect("a payload buffer has one handle while it is filled");
                out.push(IoSliceMut::new(header));
                out.push(IoSliceMut::new(&mut bytes[..guess.len]));
            }
            return true;
        }
        let free = &mut buffer[self.end..];
        if !free.is_empty() {
            let len = free.len().min(window);
            out.push(IoSliceMut::new(&mut free[..len]));
        }
        !out.is_empty()
    }

    /// Ensures a writable receive buffer with the unread bytes at its beginning.
    #[inline]
    fn make_room(&mut self, buffers: &mut RxBuffers) -> bool {
        if let Some(bytes) = self.buffer.as_mut().and_then(Buf::bytes_mut) {
            if self.start > 0 {
                bytes.copy_within(self.start..self.end, 0);
                self.end -= self.start;
                self.start = 0;
            }
            return true;
        }
        let small = self.urgent && self.buffer.is_none();
        let leased = buffers
            .lease()
            .or_else(|| if small { buffers.lease_small() } else { None });
        let Some(mut buffer) = leased else {
            return false;
        };
        let bytes = buffer.bytes_mut().expect("just leased");
        if let Some(before) = self.buffer.take() {
            // A part of it still has a user.
            let left = &before[self.start..self.end];
            bytes[..left.len()].copy_from_slice(left);
            (self.start, self.end) = (0, left.len());
            buffers.give_back(before);
        } else {
            let carried = usize::from(std::mem::take(&mut self.carried));
            if carried > 0 {
                bytes[..carried].copy_from_slice(&self.carry[..carried]);
            }
            (self.start, self.end) = (0, carried);
        }
        self.buffer = Some(buffer);
        self.may_part = !buffers.crowded;
        true
    }

    /// Records that `n` bytes were received into [`Rx::slices`].
    #[inline]
    pub fn received(&mut self, mut n: usize) {
        if let Payload::Into { at, end, .. } = &mut self.payload {
            let taken = n.min(*end - *at);
            *at += taken;
            n -= taken;
        }
        if !self.guesses.is_empty() {
            self.guess_limit = MAX_GUESSES;
            self.guessed = n;
            return;
        }
        self.end += n;
        debug_assert!(n == 0 || self.buffer.as_ref().is_some_and(|b| self.end <= b.len()));
    }

    /// Records that a receive got no data.
    #[inline]
    pub fn found_nothing(&mut self) {
        self.guess_limit = FEW_GUESSES;
    }

    /// True if a PDU comes next, or follows the rest of a payload, so that guesses make sense.
    #[inline]
    pub fn may_guess(&self) -> bool {
        self.carried == 0
            && self.start == self.end
            && self.guessed == 0
            && !matches!(self.payload, Payload::Skip { .. })
    }

    /// Guesses that the next PDU after the guessed ones has a header of `header` bytes and this
    /// payload. Returns the guess as the error if there is no room, or if earlier guesses have
    /// another header length.
    #[inline]
    pub fn guess(&mut self, buffers: &RxBuffers, header: usize, guess: Guess) -> Result<(), Guess> {
        debug_assert!(self.may_guess());
        if self.guesses.is_empty() {
            self.guess_header = header;
            self.guess_room = 0;
        }
        // After a miss all of it lies in one piece behind the area of the headers.
        let needed = 2 * header + guess.len;
        let full = self.guesses.len() == MAX_GUESSES || self.guess_room + needed > buffers.bytes;
        if full || header != self.guess_header {
            return Err(guess);
        }
        self.guess_room += needed;
        self.guesses.push_back(guess);
        Ok(())
    }

    /// Identifier, header bytes and payload bytes of the guess for the received bytes. Handle it
    /// before any other bytes.
    #[inline]
    pub fn guessed(&self) -> Option<(u16, usize, usize)> {
        if self.guessed == 0 {
            return None;
        }
        let guess = self.guesses.front()?;
        Some((guess.id, self.guess_header, guess.len))
    }

    /// Removes and returns the last guess. Call it until it returns `None`, after [`Rx::miss`] or
    /// at the end of the connection.
    #[inline]
    pub fn take_guess(&mut self) -> Option<Guess> {
        self.guesses.pop_back()
    }

    /// The guess is right: its payload is in progress, or complete.
    #[inline]
    pub fn hit(&mut self) {
        let Some(Guess { buf, len, .. }) = self.guesses.pop_front() else {
            return;
        };
        debug_assert!(self.guessed >= self.guess_header);
        let here = (self.guessed - self.guess_header).min(len);
        self.guessed -= self.guess_header + here;
        self.guess_at += self.guess_header;
        self.guess_room -= 2 * self.guess_header + len;
        self.payload = Payload::Into {
            buf,
            at: here,
            end: len,
        };
    }

    /// The guess is wrong: all received and unchecked bytes are unread now, in one piece. Take the
    /// guesses back ([`Rx::take_guess`]).
    #[cold]
    pub fn miss(&mut self) {
        let Some(buffer) = self.buffer.as_mut().and_then(Buf::bytes_mut) else {
            return;
        };
        let mut left = std::mem::take(&mut self.guessed);
        self.start = self.guess_area;
        self.end = self.guess_area;
        let mut header = self.guess_at;
        for guess in &self.guesses {
            let n = left.min(self.guess_header);
            buffer.copy_within(header..header + n, self.end);
            header += self.guess_header;
            self.end += n;
            left -= n;
            let n = left.min(guess.len);
            buffer[self.end..self.end + n].copy_from_slice(&guess.buf[..n]);
            self.end += n;
            left -= n;
        }
    }

    /// The received bytes that were not consumed. Empty without a receive buffer, even if a part of
    /// a header is stored.
    #[inline]
    pub fn unread(&self) -> &[u8] {
        match &self.buffer {
            Some(buffer) if self.guessed > 0 => {
                &buffer[self.guess_at..self.guess_at + self.guessed.min(self.guess_header)]
            }
            Some(buffer) => &buffer[self.start..self.end],
            None => &[],
        }
    }

    /// True if [`Rx::part`] may be used: false if a slow device holds so many parts that
    /// connections could lack receive buffers.
    #[inline]
    pub fn may_part(&self) -> bool {
        self.may_part
    }

    /// A handle on `len` unread bytes, `offset` from the first of them.
    ///
    /// # Panics
    /// If they have not arrived.
    #[inline]
    pub fn part(&self, offset: usize, len: usize) -> Buf {
        let at = self.start + offset;
        let buffer = self.buffer.as_ref();
        let buffer = buffer.filter(|_| self.guessed == 0 && at + len <= self.end);
        buffer.expect("a part of the unread bytes").slice(at, len)
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

    /// The next `len` bytes of the stream are dropped.
    pub fn begin_skip(&mut self, len: usize) {
        self.payload = Payload::Skip { left: len };
    }

    /// Moves received bytes to the payload in progress; true if it is complete now.
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

    /// The buffer of the payload in progress; `None` if there is none or it is dropped.
    pub fn payload(&self) -> Option<&Buf> {
        match &self.payload {
            Payload::Into { buf, .. } => Some(buf),
            _ => None,
        }
    }

    /// Ends the payload in progress and returns its buffer.
    pub fn take_payload(&mut self) -> Option<Buf> {
        match std::mem::replace(&mut self.payload, Payload::None) {
            Payload::Into { buf, .. } => Some(buf),
            _ => None,
        }
    }

    /// True if a PDU is incomplete.
    pub fn is_mid_pdu(&self) -> bool {
        self.carried > 0
            || self.guessed > 0
            || self.start != self.end
            || !matches!(self.payload, Payload::None)
    }

    /// Returns the receive buffer to the core if the unread bytes can be stored in the connection.
    /// Call it when the received bytes contain no further event. `keep`: they do, and handling them
    /// lacks room.
    #[inline]
    pub fn return_buffer(&mut self, buffers: &mut RxBuffers, keep: bool) {
        let left = self.end - self.start;
        if self.guessed > 0 || (left > 0 && (keep || left > MAX_HEADER)) {
            return;
        }
        if let Some(buffer) = self.buffer.take() {
            if left > 0 {
                self.carry[..left].copy_from_slice(&buffer[self.start..self.end]);
            }
            self.carried = left as u16;
            self.start = 0;
            self.end = 0;
            buffers.give_back(buffer);
        }
    }

    /// Drops the unread bytes, the payload in progress and the guesses.
    pub fn drop_unread(&mut self) {
        self.payload = Payload::None;
        self.guesses.clear();
        self.guessed = 0;
        self.start = 0;
        self.end = 0;
        self.carried = 0;
    }
}

impl Default for Rx {
    fn default() -> Self {
        Self::new()
    }
}
