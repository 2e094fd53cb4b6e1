//! A safe interface to verbs: queues and rings that own the memory of posted work requests.
//!
//! ```text
//!   Queues   completion queue and shared receive queue of one reactor and device   (shared)
//!     └ create_qp ─▶ Endpoint      a queue pair in transit from the management thread
//!                       └ Lane     its send ring, and its receive ring unless that is shared
//!   Receiver                       the ring of the shared receive queue
//! ```
//!
//! A ring releases a [`Buf`] when the completion that frees it arrives, or when the queue pair is
//! destroyed; never earlier, whatever the caller does. A [`Receiver`] that is dropped while queue
//! pairs exist leaks its buffers, because a device may still write to them. Rings live on one core,
//! as their buffers do. An [`Endpoint`] has no rings and may move to another thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_hugepages::{Buf, Pool};
use parking_lot::{Mutex, MutexGuard};

use crate::provider::*;
use crate::ring::{NotRegistered, RecvConfig, RecvRing, SendRing, Timing};
use crate::types::*;

/// Set in the `wr_id` of receives.
pub(crate) const RECV: u64 = 1 << 63;

/// Identifies a ring in completions: below `1 << 31`, with one value for shared receive queues.
const SHARED: u32 = 0x7fff_ffff;

/// The completion queue, and the shared receive queue if there is one, of one reactor on one
/// device. Clones refer to the same queues.
#[derive(Clone)]
pub struct Queues {
    inner: Arc<QueuesInner>,
}

struct QueuesInner {
    /// Unique among all queues of the process. Completions carry this id to name their queues.
    /// Queue pair numbers do not suffice, because every device counts its own.
    id: u64,
    domain: Arc<dyn ProtectionDomain>,
    cq: Arc<dyn CompletionQueue>,
    srq: Option<Arc<dyn SharedReceiveQueue>>,
    srq_entries: Option<u32>,
    users: Mutex<Users>,
}

struct Users {
    /// Number of existing queue pairs.
    endpoints: usize,
    /// The receiver and its buffers are gone: no more queue pairs may be created.
    closed: bool,
}

impl Queues {
    /// Creates the queues in `domain`. `srq`: work requests and scatter entries per request of a
    /// shared receive queue; `None`: each queue pair has its own receive queue.
    pub fn new(
        domain: &Arc<dyn ProtectionDomain>,
        cq_entries: u32,
        srq: Option<(u32, u32)>,
    ) -> Result<Self, VerbsError> {
        let srq_entries = srq.map(|(entries, _)| entries);
        let srq = match srq {
            Some((entries, sges)) => Some(domain.shared_receive_queue(entries, sges, 0)?),
            None => None,
        };
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Ok(Self {
            inner: Arc::new(QueuesInner {
                id: NEXT.fetch_add(1, Ordering::Relaxed),
                domain: Arc::clone(domain),
                cq: domain.completion_queue(cq_entries)?,
                srq,
                srq_entries,
                users: Mutex::new(Users {
                    endpoints: 0,
                    closed: false,
                }),
            }),
        })
    }

    pub fn domain(&self) -> &Arc<dyn ProtectionDomain> {
        &self.inner.domain
    }

    pub fn cq(&self) -> &Arc<dyn CompletionQueue> {
        &self.inner.cq
    }

    pub fn is_shared(&self) -> bool {
        self.inner.srq.is_some()
    }

    /// The id of these queues, unique in the process.
    pub fn id(&self) -> u64 {
        self.inner.id
    }

    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Creates the queue pair of a connection on these queues. Fails after the [`Receiver`] of the
    /// queues was dropped.
    pub fn create_qp(
        &self,
        cm: &mut dyn ConnectionManager,
        id: CmId,
        caps: QpCaps,
    ) -> Result<Endpoint, VerbsError> {
        let mut users = self.users();
        if users.closed {
            return Err(VerbsError::Unavailable {
                what: "the reactor of this queue has ended".into(),
                remedy: "connect again".into(),
            });
        }
        let qp = cm.create_qp(
            id,
            QpInit {
                domain: &self.inner.domain,
                send_cq: &self.inner.cq,
                recv_cq: &self.inner.cq,
                srq: self.inner.srq.as_ref(),
                caps,
            },
        )?;
        users.endpoints += 1;
        Ok(Endpoint {
            qp: Some(qp),
            queues: self.clone(),
        })
    }

    /// True while queue pairs exist, on any thread: a device may still write to posted receives.
    pub fn has_endpoints(&self) -> bool {
        self.users().endpoints > 0
    }

    /// The device's number of the shared receive queue, see [`SharedReceiveQueue::number`].
    pub fn srq_number(&self) -> Option<u32> {
        self.inner.srq.as_ref().map(|srq| srq.number())
    }

    /// Entries of the shared receive queue.
    pub fn srq_entries(&self) -> Option<u32> {
        self.inner.srq_entries
    }

    /// Polls at most `limit` completions into `batch`, which loses its former contents. Returns
    /// their number.
    #[inline]
    pub fn poll(&self, batch: &mut Batch, limit: usize) -> Result<usize, VerbsError> {
        batch.at = 0;
        batch.len = 0;
        batch.queues = self.inner.id;
        let limit = limit.min(batch.items.len());
        batch.len = self.inner.cq.poll(&mut batch.items[..limit])?;
        Ok(batch.len)
    }

    fn users(&self) -> MutexGuard<'_, Users> {
        self.inner.users.lock()
    }
}

/// A buffer for the completions of one poll of [`Queues`].
pub struct Batch {
    items: Box<[WorkCompletion]>,
    len: usize,
    at: usize,
    queues: u64,
}

impl Batch {
    /// `entries`: most completions per poll, at least one.
    pub fn new(entries: usize) -> Self {
        Self {
            items: vec![WorkCompletion::EMPTY; entries.max(1)].into_boxed_slice(),
            len: 0,
            at: 0,
            queues: u64::MAX,
        }
    }

    /// Returns the next completion of the last poll; `None` at the end.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator would borrow the batch"
    )]
    #[inline]
    pub fn next(&mut self) -> Option<Completion> {
        if self.at == self.len {
            return None;
        }
        self.at += 1;
        Some(Completion {
            wc: self.items[self.at - 1],
            queues: self.queues,
        })
    }
}

/// A completion. Passing it to [`Lane::sent`], [`Lane::received`] or [`Receiver::received`] frees
/// the memory of its request.
pub struct Completion {
    wc: WorkCompletion,
    queues: u64,
}

impl Completion {
    #[inline]
    pub fn wc(&self) -> &WorkCompletion {
        &self.wc
    }

    /// True for the completion of a receive.
    pub fn is_recv(&self) -> bool {
        self.wc.wr_id & RECV != 0
    }

    /// The index of the lane that posted the request ([`LaneConfig::index`]); `None`: the shared
    /// receive queue.
    pub fn lane(&self) -> Option<u32> {
        let lane = (self.wc.wr_id >> 32) as u32 & SHARED;
        (lane != SHARED).then_some(lane)
    }
}

/// A queue pair without buffers, in transit between threads. Dropping it destroys the queue pair.
pub struct Endpoint {
    qp: Option<Arc<dyn QueuePair>>,
    queues: Queues,
}

impl Endpoint {
    fn qp(&self) -> &Arc<dyn QueuePair> {
        self.qp.as_ref().expect("there until it is dropped")
    }

    pub fn number(&self) -> u32 {
        self.qp().number()
    }

    pub fn caps(&self) -> QpCaps {
        self.qp().caps()
    }

    pub fn queues(&self) -> &Queues {
        &self.queues
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.qp = None;
        self.queues.users().endpoints -= 1;
    }
}

/// A queue pair on its core, with a ring of posted send requests and, without a shared receive
/// queue, a ring of receives.
pub struct Lane {
    // Drop the queue pair first: the rings may drop their buffers once no device uses them.
    endpoint: Endpoint,
    pub(crate) send: SendRing,
    pub(crate) recv: Option<RecvRing>,
    number: u32,
}

/// The index of a lane, and the memory of its rings.
pub struct LaneConfig {
    /// Identifies its completions: below `0x7fff_ffff`, unique among the lanes of its [`Queues`].
    pub index: u32,
    /// The slot of [`Buf::key`] that holds the keys of the queue pair's domain.
    pub key_slot: usize,
    /// Memory for messages: a power of two of places of `message_bytes` each. Fewer places than
    /// `max_send_wr` limit the send queue to their number.
    pub messages: Buf,
    /// Length of the longest message of [`Lane::send`].
    pub message_bytes: u32,
    /// Memory for received messages. `None` with a shared receive queue.
    pub recv: Option<RecvConfig>,
}

impl Lane {
    /// Fails if memory of `config` is not registered with the endpoint's protection domain.
    ///
    /// # Panics
    /// When the index is too large, memory of `config` has other handles, or no message fits into
    /// `messages`.
    pub fn new(endpoint: Endpoint, config: LaneConfig) -> Result<Self, NotRegistered> {
        assert!(config.index < SHARED, "a lane's index");
        let caps = endpoint.caps();
        let tag = u64::from(config.index) << 32;
        let recv = match config.recv {
            Some(recv) => Some(RecvRing::new(recv, config.key_slot, tag | RECV)?),
            None => None,
        };
        let (messages, bytes) = (config.messages, config.message_bytes);
        let early = endpoint.queues.domain().attributes().completes_early();
        let send = SendRing::new(messages, bytes, config.key_slot, tag, caps, early)?;
        Ok(Self {
            number: endpoint.number(),
            endpoint,
            send,
            recv,
        })
    }

    /// The queue pair's number.
    #[inline]
    pub fn number(&self) -> u32 {
        self.number
    }

    pub fn queues(&self) -> &Queues {
        &self.endpoint.queues
    }

    /// Number of send requests that can still be queued.
    #[inline]
    pub fn room(&self) -> u32 {
        self.send.room()
    }

    /// True when no request is posted or queued, and no receive is posted.
    pub fn is_idle(&self) -> bool {
        self.send.is_idle() && self.recv.as_ref().is_none_or(|recv| recv.posted() == 0)
    }

    /// Requests that are posted to the send queue or queued for the next post.
    pub fn sends(&self) -> u32 {
        self.send.outstanding()
    }

    /// Queues an RDMA WRITE of `buf` to the peer's memory. It is not signaled, except on a device
    /// that completes early ([`DeviceAttributes::completes_early`]).
    ///
    /// # Panics
    /// If the send queue is full, as `read` and `send` do: check [`Lane::room`] first.
    #[inline]
    pub fn write(&mut self, address: u64, rkey: u32, buf: Buf) -> Result<(), NotRegistered> {
        self.send
            .with_buf(SendOp::Write { address, rkey }, buf, false)
    }

    /// Queues a signaled RDMA READ from the peer's memory. Fails also for a buffer with other
    /// users.
    #[inline]
    pub fn read(&mut self, address: u64, rkey: u32, mut into: Buf) -> Result<(), NotRegistered> {
        // A shared buffer must not change while other holders read it.
        if into.as_mut_ptr().is_none() {
            return Err(NotRegistered { len: into.len() });
        }
        self.send
            .with_buf(SendOp::Read { address, rkey }, into, true)
    }

    /// Queues a SEND of `message`, which is copied: at most [`LaneConfig::message_bytes`].
    /// `invalidate`: an rkey of the peer to invalidate (SEND_WITH_INVALIDATE).
    #[inline]
    pub fn send(&mut self, message: &[u8], invalidate: Option<u32>) {
        self.send_with(message, invalidate, None)
            .expect("a message needs no memory of others");
    }

    /// Like [`Lane::send`]; the bytes of `data` follow the message.
    #[inline]
    pub fn send_with(
        &mut self,
        message: &[u8],
        invalidate: Option<u32>,
        data: Option<Buf>,
    ) -> Result<(), NotRegistered> {
        let op = match invalidate {
            Some(rkey) => SendOp::SendWithInvalidate { rkey },
            None => SendOp::Send,
        };
        self.send.message(op, message, data)
    }

    /// Requests a completion for the last queued request. That completion also covers all earlier
    /// ones.
    #[inline]
    pub fn signal_last(&mut self) {
        self.send.signal_last();
    }

    /// True if the ring holds buffers that no requested completion will free, or if more than half
    /// of the send queue is unsignaled. Either is a reason to call `signal_last`.
    #[inline]
    pub fn needs_signal(&self) -> bool {
        self.send.needs_signal()
    }

    /// Posts the queued requests in one batch, and returns their number. Requests that an error
    /// leaves unposted are lost: end the queue pair.
    #[inline]
    pub fn post(&mut self) -> Result<usize, PostError> {
        self.send.post(&**self.endpoint.qp(), None)
    }

    /// Like [`Lane::post`], and records `now`, a time of the caller's clock, for [`Lane::timing`].
    #[inline]
    pub fn post_at(&mut self, now: u64) -> Result<usize, PostError> {
        self.send.post(&**self.endpoint.qp(), Some(now))
    }

    /// The time at which [`Lane::post_at`] posted this completion's request. Call it before
    /// [`Lane::sent`], which forgets the time. Unsignaled requests and those of [`Lane::mark`] have
    /// none.
    #[inline]
    pub fn timing(&mut self, done: &Completion) -> Option<Timing> {
        if self.is_mine(done) && !done.is_recv() {
            self.send.timing(done.wc.wr_id as u32)
        } else {
            None
        }
    }

    /// The operation of the completion's request. A failed completion does not carry it
    /// ([`WorkCompletion::opcode`]). Call this before [`Lane::sent`], which forgets the operation.
    /// `Send` for a request without a buffer, also for one of [`Lane::mark`].
    pub fn operation(&self, done: &Completion) -> WcOpcode {
        if done.is_recv() {
            WcOpcode::Recv
        } else {
            self.send.operation(done.wc.wr_id as u32)
        }
    }

    /// Posts free receive slots of a lane with its own receive ring. Returns their number. `data`:
    /// the pool of the data buffers; slots without one stay free.
    pub fn post_recv(&mut self, data: Option<&Pool>) -> Result<usize, PostError> {
        let qp = &**self.endpoint.qp();
        match &mut self.recv {
            // SAFETY: the ring keeps the memory until its completion, and drops it only after
            // the queue pair (the order of the fields).
            Some(recv) => recv.post(data, |wrs, sges| unsafe { qp.post_recv(wrs, sges) }),
            None => Ok(0),
        }
    }

    /// Free receive slots that wait to be posted, for a lane with its own receive ring.
    #[inline]
    pub fn idle_receives(&self) -> usize {
        self.recv.as_ref().map_or(0, RecvRing::idle)
    }

    /// Completes a request of the send queue and all before it, and releases their buffers. Returns
    /// the buffer of an RDMA READ. Ignores completions of receives and of other lanes.
    #[inline]
    pub fn sent(&mut self, done: &Completion) -> Option<Buf> {
        if self.is_mine(done) && !done.is_recv() {
            self.send.complete(done.wc.wr_id as u32)
        } else {
            None
        }
    }

    /// The receive slot of this completion, for a lane with its own receive ring.
    #[inline]
    pub fn received(&mut self, done: &Completion) -> Option<Received<'_>> {
        if !self.is_mine(done) || !done.is_recv() {
            return None;
        }
        Received::new(self.recv.as_mut()?, done)
    }

    fn is_mine(&self, done: &Completion) -> bool {
        done.wc.qp == self.number && done.queues == self.endpoint.queues.inner.id
    }

    /// Queues a signaled WRITE without data, whose completion shows that all earlier requests are
    /// done. Does nothing if the last queued request is signaled.
    pub fn mark(&mut self) {
        self.send.mark();
    }

    /// Moves the queue pair to the error state: all posted requests flush. The lane is idle after
    /// all their completions were passed to it. After an error, only dropping the lane ends the
    /// queue pair.
    pub fn drain(&mut self) -> Result<(), VerbsError> {
        self.endpoint.qp().set_error()?;
        self.send.mark();
        self.post().map_err(|error| VerbsError::Call {
            call: "ibv_post_send",
            source: error.source,
        })?;
        Ok(())
    }

    /// Returns the queue pair, to be destroyed on a thread that may block. Fails for a lane that is
    /// not idle ([`Lane::is_idle`]), which must be dropped instead.
    pub fn retire(self) -> Result<Endpoint, Box<Self>> {
        if self.is_idle() {
            Ok(self.endpoint)
        } else {
            Err(Box::new(self))
        }
    }
}

/// The ring of a shared receive queue. If queue pairs of its [`Queues`] exist at its drop, the drop
/// leaks the memory of the ring. A device may still write to that memory.
pub struct Receiver {
    queues: Queues,
    ring: Option<RecvRing>,
}

impl Receiver {
    /// `None`: `queues` has no shared receive queue. `key_slot`: see [`LaneConfig::key_slot`].
    pub fn new(
        queues: &Queues,
        key_slot: usize,
        config: RecvConfig,
    ) -> Result<Option<Self>, NotRegistered> {
        if !queues.is_shared() {
            return Ok(None);
        }
        let ring = RecvRing::new(config, key_slot, RECV | u64::from(SHARED) << 32)?;
        Ok(Some(Self {
            queues: queues.clone(),
            ring: Some(ring),
        }))
    }

    /// Posts free slots, as [`Lane::post_recv`]. Returns their number.
    #[inline]
    pub fn post(&mut self, data: Option<&Pool>) -> Result<usize, PostError> {
        let (Some(ring), Some(srq)) = (&mut self.ring, &self.queues.inner.srq) else {
            return Ok(0);
        };
        // SAFETY: the ring keeps the memory until its completion. `drop` handles a ring with posted
        // receives.
        ring.post(data, |wrs, sges| unsafe { srq.post_recv(wrs, sges) })
    }

    /// Free slots that wait to be posted.
    #[inline]
    pub fn idle(&self) -> usize {
        self.ring.as_ref().map_or(0, RecvRing::idle)
    }

    /// The receive slot of this completion; `None` for a completion of another ring.
    #[inline]
    pub fn received(&mut self, done: &Completion) -> Option<Received<'_>> {
        let mine = done.queues == self.queues.inner.id;
        if !mine || done.lane().is_some() || !done.is_recv() {
            return None;
        }
        Received::new(self.ring.as_mut()?, done)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let mut users = self.queues.users();
        users.closed = true;
        if users.endpoints > 0 {
            // A device may still write to the posted buffers, so their memory is leaked.
            std::mem::forget(self.ring.take());
        }
    }
}

/// A received message. Dropping it frees its slot.
pub struct Received<'a> {
    ring: &'a mut RecvRing,
    slot: u32,
}

impl<'a> Received<'a> {
    fn new(ring: &'a mut RecvRing, done: &Completion) -> Option<Self> {
        let slot = done.wc.wr_id as u32;
        ring.complete(slot).then_some(Received { ring, slot })
    }

    /// The bytes of the slot's header buffer, [`RecvConfig::header_bytes`] long.
    #[inline]
    pub fn header(&self) -> &[u8] {
        self.ring.header(self.slot)
    }

    /// Takes the buffer with the data after the header; `None` without data buffers. The ring posts
    /// another buffer in its place.
    #[inline]
    pub fn take_data(&mut self) -> Option<Buf> {
        self.ring.take_data(self.slot)
    }
}

impl Drop for Received<'_> {
    fn drop(&mut self) {
        self.ring.release(self.slot);
    }
}
