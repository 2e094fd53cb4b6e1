//! The send ring and the receive ring: they number posted work requests and own the buffers of the
//! requests until they complete. [`crate::Lane`] and [`crate::Receiver`] wrap them.

use std::collections::VecDeque;

use nacre_hugepages::{Buf, Pool};

use crate::provider::QueuePair;
use crate::types::*;

/// The error for memory that is not registered with the queue pair's device. `len` in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("memory of {len} bytes is not registered with this device")]
pub struct NotRegistered {
    pub len: usize,
}

/// Memory of a receive ring. Each slot receives one message: its first `header_bytes` bytes into a
/// header buffer, the rest into a data buffer.
pub struct RecvConfig {
    /// `entries` headers of `header_bytes` each.
    pub headers: Buf,
    pub header_bytes: u32,
    pub entries: u32,
    /// Size of the data buffers, which come from the pool that each post gets; 0: headers only.
    pub data_bytes: u32,
}

/// The lkey of a buffer for the device whose keys are in `slot` of [`Buf::key`].
fn lkey(buf: &Buf, slot: usize) -> Result<u32, NotRegistered> {
    match buf.key(slot) {
        Some(key) => Ok(MrKey::from_bits(key).lkey),
        None => Err(NotRegistered { len: buf.len() }),
    }
}

fn sge(buf: &Buf, lkey: u32) -> Sge {
    Sge {
        address: buf.as_ptr().expose_provenance() as u64,
        length: buf.len() as u32,
        lkey,
    }
}

/// A buffer of a request, released when a completion shows that the request is done.
struct RequestBuffer {
    sequence: u32,
    buf: Buf,
    usage: BufferUse,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum BufferUse {
    Write,
    Read,
    Message,
}

/// A signaled request that was posted, and its post time.
struct SignaledRequest {
    sequence: u32,
    timing: Timing,
}

/// The time given to [`crate::Lane::post_at`] for a signaled request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    pub posted: u64,
    /// Unsignaled WRITEs precede this request in its batch; its completion covers them.
    pub wrote: bool,
}

/// The send queue. Requests have sequence numbers. A completion also covers all earlier requests,
/// except with `completes_early`. The numbers between `done` and `next`:
///
/// ```text
///   done ──── posted ──── next - wrs.len() ──── queued, not posted ──── next
/// ```
pub(crate) struct SendRing {
    key_slot: usize,
    tag: u64,
    messages: Buf,
    message_bytes: u32,
    message_lkey: u32,
    inline_max: u32,
    depth: u32,
    places: u32,
    next: u32,
    done: u32,
    /// The number after that of the last signaled request.
    signaled: u32,
    /// As [`DeviceAttributes::completes_early`](crate::DeviceAttributes::completes_early): each
    /// request with data has a completion of its own, and waits for earlier READs.
    completes_early: bool,
    buffers: VecDeque<RequestBuffer>,
    /// Signaled requests in the order of their completions; at most as many as requests.
    signals: VecDeque<SignaledRequest>,
    wrs: Vec<SendWr>,
    sges: Vec<Sge>,
}

/// Scatter/gather entries of a message: the message itself, and optional data.
const MESSAGE_SGES: usize = 2;

impl SendRing {
    pub(crate) fn new(
        mut messages: Buf,
        message_bytes: u32,
        key_slot: usize,
        tag: u64,
        caps: QpCaps,
        completes_early: bool,
    ) -> Result<Self, NotRegistered> {
        assert!(messages.as_mut_ptr().is_some(), "the ring owns its memory");
        // A power of two, so that slots stay distinct when the numbers wrap.
        let places = messages.len() as u32 / message_bytes;
        let places = 1 << places.checked_ilog2().expect("room for a message");
        let depth = caps.max_send_wr.min(places);
        Ok(Self {
            places,
            key_slot,
            tag,
            message_lkey: lkey(&messages, key_slot)?,
            messages,
            message_bytes,
            inline_max: caps.max_inline,
            depth,
            next: 0,
            done: 0,
            signaled: 0,
            completes_early,
            buffers: VecDeque::with_capacity(depth as usize),
            signals: VecDeque::with_capacity(depth as usize),
            wrs: Vec::with_capacity(depth as usize),
            sges: Vec::with_capacity(depth as usize * MESSAGE_SGES),
        })
    }

    #[inline]
    pub(crate) fn outstanding(&self) -> u32 {
        self.next.wrapping_sub(self.done)
    }

    /// Number of requests that can still be queued. One entry stays free for [`SendRing::mark`].
    #[inline]
    pub(crate) fn room(&self) -> u32 {
        (self.depth - self.outstanding()).saturating_sub(1)
    }

    /// Queues a signaled request without data, unless the last request is signaled already. Its
    /// completion, or its flush, covers the unsignaled requests before it.
    pub(crate) fn mark(&mut self) {
        if self.signaled != self.next {
            let nowhere = SendOp::Write {
                address: 0,
                rkey: 0,
            };
            self.push(nowhere, 0, true, false);
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.outstanding() == 0
    }

    /// True when the newest buffer belongs to an unsignaled request, or when more than half of the
    /// queue is unsignaled.
    #[inline]
    pub(crate) fn needs_signal(&self) -> bool {
        let unsignaled = self.next.wrapping_sub(self.signaled);
        let last = self.buffers.back().is_some_and(|last| {
            let after = last.sequence.wrapping_sub(self.signaled);
            after < unsignaled
        });
        last || unsignaled > self.depth / 2
    }

    #[inline]
    fn push(&mut self, op: SendOp, sges: u32, signaled: bool, inline: bool) {
        assert!(self.outstanding() < self.depth, "room in the send queue");
        self.wrs.push(SendWr {
            wr_id: self.tag | u64::from(self.next),
            op,
            first_sge: self.sges.len() as u32 - sges,
            sges,
            signaled,
            inline,
            fence: self.completes_early && !matches!(op, SendOp::Read { .. }),
        });
        self.next = self.next.wrapping_add(1);
        if signaled {
            self.signaled = self.next;
        }
    }

    /// Queues a READ into `buf` or a WRITE from it. The ring owns `buf` until the completion.
    #[inline]
    pub(crate) fn with_buf(
        &mut self,
        op: SendOp,
        buf: Buf,
        signaled: bool,
    ) -> Result<(), NotRegistered> {
        let key = lkey(&buf, self.key_slot)?;
        self.sges.push(sge(&buf, key));
        let sequence = self.next;
        let usage = match op {
            SendOp::Read { .. } => BufferUse::Read,
            _ => BufferUse::Write,
        };
        self.push(op, 1, signaled || self.completes_early, false);
        self.buffers.push_back(RequestBuffer {
            sequence,
            buf,
            usage,
        });
        Ok(())
    }

    /// Queues a SEND of a copy of `message`, followed by `data`.
    #[inline]
    pub(crate) fn message(
        &mut self,
        op: SendOp,
        message: &[u8],
        data: Option<Buf>,
    ) -> Result<(), NotRegistered> {
        assert!(
            message.len() <= self.message_bytes as usize,
            "a message's length"
        );
        let data_key = match &data {
            Some(data) => Some(lkey(data, self.key_slot)?),
            None => None,
        };
        let at = (self.next & (self.places - 1)) as usize * self.message_bytes as usize;
        let to = self.messages.as_ptr().cast_mut().wrapping_add(at);
        // SAFETY: the copy is inside the buffer, which has `places` places and no other handle. No
        // posted request uses this place, because at most `places` are outstanding.
        unsafe { std::ptr::copy_nonoverlapping(message.as_ptr(), to, message.len()) };
        let mut length = message.len() as u32;
        self.sges.push(Sge {
            address: to.expose_provenance() as u64,
            length,
            lkey: self.message_lkey,
        });
        let mut sges = 1;
        if let (Some(data), Some(key)) = (&data, data_key) {
            self.sges.push(sge(data, key));
            sges = 2;
            length = length.saturating_add(data.len() as u32);
        }
        let inline = length <= self.inline_max;
        let sequence = self.next;
        let signaled = self.completes_early && data.is_some();
        self.push(op, sges, signaled, inline);
        if let Some(buf) = data {
            self.buffers.push_back(RequestBuffer {
                sequence,
                buf,
                usage: BufferUse::Message,
            });
        }
        Ok(())
    }

    /// Requests a completion for the last queued request.
    #[inline]
    pub(crate) fn signal_last(&mut self) {
        if let Some(last) = self.wrs.last_mut() {
            last.signaled = true;
            self.signaled = self.next;
        }
    }

    /// Posts the queued requests with one doorbell, and returns their number. `now`: the post time
    /// to record for signaled requests.
    #[inline]
    pub(crate) fn post(
        &mut self,
        qp: &dyn QueuePair,
        now: Option<u64>,
    ) -> Result<usize, PostError> {
        let count = self.wrs.len();
        if count == 0 {
            return Ok(0);
        }
        if let Some(posted) = now {
            self.note(posted);
        }
        // SAFETY: `buffers` and `messages` hold the memory of every entry until a completion that
        // frees it, and are dropped after the queue pair. No code writes to it: a shared buffer
        // cannot be written, and a buffer that is read into is not shared.
        let posted = unsafe { qp.post_send(&self.wrs, &self.sges) };
        self.wrs.clear();
        self.sges.clear();
        if let Err(error) = &posted {
            // Requests that the queue did not accept never complete.
            let lost = (count - error.posted) as u32;
            self.next = self.next.wrapping_sub(lost);
            let (next, done) = (self.next, self.done);
            let is_posted = |sequence: u32| sequence.wrapping_sub(done) < next.wrapping_sub(done);
            self.buffers.retain(|buffer| is_posted(buffer.sequence));
            self.signals.retain(|signal| is_posted(signal.sequence));
        }
        posted.map(|()| count)
    }

    /// Records the time of the signaled requests about to be posted.
    #[inline]
    fn note(&mut self, posted: u64) {
        let mut wrote = false;
        for wr in &self.wrs {
            // A request without entries is a marker, which transfers no data.
            let data = wr.sges > 0;
            if wr.signaled {
                if data {
                    let timing = Timing { posted, wrote };
                    let sequence = wr.wr_id as u32;
                    self.signals.push_back(SignaledRequest { sequence, timing });
                }
                wrote = false;
            } else {
                wrote |= data && matches!(wr.op, SendOp::Write { .. });
            }
        }
    }

    /// The post time of a signaled request. Call it once per request, in the order of completions.
    #[inline]
    pub(crate) fn timing(&mut self, sequence: u32) -> Option<Timing> {
        let through = sequence.wrapping_sub(self.done);
        while let Some(first) = self.signals.front() {
            let at = first.sequence.wrapping_sub(self.done);
            if at > through {
                break;
            }
            let timing = first.timing;
            self.signals.pop_front();
            if at == through {
                return Some(timing);
            }
        }
        None
    }

    /// The operation of a pending request; a failed completion does not carry it. Send also for a
    /// marker ([`SendRing::mark`]).
    pub(crate) fn operation(&self, sequence: u32) -> WcOpcode {
        let buffer = self.buffers.iter().find(|b| b.sequence == sequence);
        match buffer.map(|b| b.usage) {
            Some(BufferUse::Write) => WcOpcode::Write,
            Some(BufferUse::Read) => WcOpcode::Read,
            // A message without data keeps no buffer.
            Some(BufferUse::Message) | None => WcOpcode::Send,
        }
    }

    #[inline]
    /// Completes this request and all before it, and drops their buffers. Returns the buffer if
    /// this request is a READ; `None` also for a request that is not outstanding.
    pub(crate) fn complete(&mut self, sequence: u32) -> Option<Buf> {
        let through = sequence.wrapping_sub(self.done);
        if through >= self.outstanding() {
            return None;
        }
        let mut read = None;
        while let Some(oldest) = self.buffers.front() {
            if oldest.sequence.wrapping_sub(self.done) > through {
                break;
            }
            let oldest = self.buffers.pop_front().expect("the list is not empty");
            if oldest.usage == BufferUse::Read && oldest.sequence == sequence {
                read = Some(oldest.buf);
            }
        }
        // Forgets the time if the caller did not read it.
        self.timing(sequence);
        self.done = sequence.wrapping_add(1);
        read
    }
}

/// The receive slots of a queue pair or of a shared receive queue.
pub(crate) struct RecvRing {
    key_slot: usize,
    tag: u64,
    headers: Buf,
    header_bytes: u32,
    header_lkey: u32,
    data_bytes: u32,
    data: Box<[Option<Buf>]>,
    posted_slots: Box<[bool]>,
    idle: Vec<u32>,
    posted: usize,
    wrs: Vec<RecvWr>,
    sges: Vec<Sge>,
}

impl RecvRing {
    pub(crate) fn new(
        mut config: RecvConfig,
        key_slot: usize,
        tag: u64,
    ) -> Result<Self, NotRegistered> {
        assert!(
            config.headers.as_mut_ptr().is_some(),
            "the ring owns its memory"
        );
        let entries = config
            .entries
            .min(config.headers.len() as u32 / config.header_bytes);
        Ok(Self {
            key_slot,
            tag,
            header_lkey: lkey(&config.headers, key_slot)?,
            headers: config.headers,
            header_bytes: config.header_bytes,
            data_bytes: config.data_bytes,
            data: (0..entries).map(|_| None).collect(),
            posted_slots: vec![false; entries as usize].into_boxed_slice(),
            idle: (0..entries).rev().collect(),
            posted: 0,
            wrs: Vec::with_capacity(entries as usize),
            sges: Vec::with_capacity(entries as usize * 2),
        })
    }

    /// Number of posted slots.
    pub(crate) fn posted(&self) -> usize {
        self.posted
    }

    /// Number of free slots that are not posted.
    #[inline]
    pub(crate) fn idle(&self) -> usize {
        self.idle.len()
    }

    /// Posts the free slots through `post`, with data buffers from `pool`. Returns their number.
    #[inline]
    pub(crate) fn post(
        &mut self,
        pool: Option<&Pool>,
        post: impl FnOnce(&[RecvWr], &[Sge]) -> Result<(), PostError>,
    ) -> Result<usize, PostError> {
        while let Some(&slot) = self.idle.last() {
            let at = slot as usize;
            let first_sge = self.sges.len() as u32;
            if self.data_bytes > 0 && self.data[at].is_none() {
                // If the pool is empty, the next call posts the slot. A buffer that is not
                // registered with this device cannot be used.
                let fresh = pool.and_then(|pool| pool.acquire(self.data_bytes as usize));
                let Some(fresh) = fresh.filter(|buf| buf.key(self.key_slot).is_some()) else {
                    break;
                };
                self.data[at] = Some(fresh);
            }
            let address = self
                .headers
                .as_ptr()
                .wrapping_add(at * self.header_bytes as usize);
            self.sges.push(Sge {
                address: address.expose_provenance() as u64,
                length: self.header_bytes,
                lkey: self.header_lkey,
            });
            if let Some(data) = &self.data[at]
                && let Ok(key) = lkey(data, self.key_slot)
            {
                self.sges.push(sge(data, key));
            }
            self.wrs.push(RecvWr {
                wr_id: self.tag | u64::from(slot),
                first_sge,
                sges: self.sges.len() as u32 - first_sge,
            });
            self.posted_slots[at] = true;
            self.idle.pop();
        }
        let count = self.wrs.len();
        if count == 0 {
            return Ok(0);
        }
        let result = post(&self.wrs, &self.sges);
        let taken = result.as_ref().err().map_or(count, |error| error.posted);
        for wr in self.wrs.drain(taken..) {
            let slot = wr.wr_id as u32;
            self.posted_slots[slot as usize] = false;
            self.idle.push(slot);
        }
        self.posted += taken;
        self.wrs.clear();
        self.sges.clear();
        result.map(|()| taken)
    }

    /// Marks a posted slot as completed. False if the slot is not posted.
    #[inline]
    pub(crate) fn complete(&mut self, slot: u32) -> bool {
        match self.posted_slots.get_mut(slot as usize) {
            Some(posted) if *posted => {
                *posted = false;
                self.posted -= 1;
                true
            }
            _ => false,
        }
    }

    #[inline]
    pub(crate) fn header(&self, slot: u32) -> &[u8] {
        let len = self.header_bytes as usize;
        let at = self.headers.as_ptr().wrapping_add(slot as usize * len);
        // SAFETY: the slot is inside the buffer; it is not posted (`Received` exists), so no device
        // writes to it. Made from a pointer, as a reference to all of the buffer would say
        // something about slots that devices write to.
        unsafe { std::slice::from_raw_parts(at, len) }
    }

    #[inline]
    pub(crate) fn take_data(&mut self, slot: u32) -> Option<Buf> {
        self.data[slot as usize].take()
    }

    #[inline]
    pub(crate) fn release(&mut self, slot: u32) {
        self.idle.push(slot);
    }
}
