//! The server's side of one test, which one client runs.
//!
//! A session has a control connection and the queue pairs of the test. It posts receives, and hands
//! each message to its [`ServerQueuePair`], which echoes or compares it. It returns credits to the
//! client. It ends when the client is done or silent for too long, or when a connection fails.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_hugepages::{Buf, ClassSpec};
use nacre_transport_rdma_verbs::{
    Access, CmEventKind, CmId, Completion, ConnParams, ConnectionManager, Device, Lane, MrKey,
};

use crate::completion::{Causes, Rank, failed};
use crate::endpoint::{End, HEAD, LaneSizes, Turns, Waiter, longest_buffer};
use crate::error::PerfError;
use crate::params::{Measure, Op};
use crate::pattern::Pattern;
use crate::server_queue_pair::{ServerQueuePair, send_message};
use crate::wire::{Accept, Ending, MESSAGE_BYTES, Message, Refusal, Reject, SessionParameters};

/// Time for the client to close the connection after the last messages.
const CLOSING: Duration = Duration::from_secs(2);
/// Time limit for sending the last message.
const FAREWELL: Duration = Duration::from_millis(200);
/// Interval at which a busy session checks the peer timeout.
const TICK: Duration = Duration::from_millis(5);

/// The session of one client, from its request to its end.
pub(crate) struct Session {
    pub peer: SocketAddr,
    pub number: u32,
    pub terms: SessionParameters,
    // Fields drop in order: lanes before their memory and queues.
    control: (CmId, Lane),
    /// The queue pairs of the test by index; `None`: not connected yet.
    takers: Vec<Option<ServerQueuePair>>,
    sizes: LaneSizes,
    end: End,
    turns: Turns,
    causes: Causes,
    last_message: Instant,
    /// When the peer timeout was checked last.
    looked: Instant,
    /// Both ends have finished: deadline for the client to close the connection.
    closing: Option<Instant>,
    closed: bool,
    served: Served,
}

/// The totals of a finished run, as the client reports them at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Served {
    pub messages: u64,
    pub bytes: u64,
}

/// The parameters of a new session.
pub(crate) struct SessionSetup {
    /// The control connection.
    pub id: CmId,
    pub peer: SocketAddr,
    pub number: u32,
    pub terms: SessionParameters,
    /// Limit for the session's memory, in bytes.
    pub memory: u64,
    /// How long the session polls an empty completion queue before it sleeps.
    pub spin: Duration,
}

/// The refusal of a session: the reject data for the client, and the error of the server.
pub(crate) type Declined = (Reject, Option<PerfError>);

/// Memory that the client reads or writes on one queue pair: bytes, and slots of one message each.
fn exposed(terms: &SessionParameters) -> (u64, u16) {
    let slots = match (terms.op, terms.verify) {
        (Op::Send, _) => 0,
        (Op::Write | Op::Read, true) => terms.depth,
        (Op::Write | Op::Read, false) => 1,
    };
    (u64::from(slots) * u64::from(terms.message_bytes), slots)
}

impl Session {
    /// Creates a session with a queue pair for the control connection, which is still to be
    /// accepted.
    pub(crate) fn new(
        cm: &mut dyn ConnectionManager,
        device: Arc<dyn Device>,
        beginning: SessionSetup,
    ) -> Result<Self, Declined> {
        let SessionSetup {
            id,
            peer,
            number,
            terms,
            memory,
            spin,
        } = beginning;
        let sizes = LaneSizes::server(&terms);
        let count = u32::from(terms.queue_pairs);
        let (bytes, _) = exposed(&terms);
        let mut classes = Vec::new();
        // The memory of one queue pair is one buffer, for which the client has one key.
        let largest = longest_buffer(&*device);
        if bytes > largest {
            return Err((Reject::limit(Refusal::Memory, bytes, largest), None));
        }
        if bytes > 0 {
            classes.push(ClassSpec {
                size: bytes as usize,
                count: count as usize,
            });
        }
        let access = match terms.op {
            // Only this end writes to the memory, so no peer gets a key.
            Op::Send => Access::Local,
            Op::Write | Op::Read => Access::Remote,
        };
        let made = End::new(device, access, sizes, count, classes, memory).and_then(|end| {
            let lane = end.lane(cm, id, 0, LaneSizes::CONTROL, peer)?;
            Ok((end, lane))
        });
        let (end, lane) = made.map_err(|error| match error {
            PerfError::TooMuch { needed, limit } => {
                (Reject::limit(Refusal::Memory, needed, limit), None)
            }
            error => (Reject::new(Refusal::Resources), Some(error)),
        })?;
        let now = Instant::now();
        Ok(Self {
            peer,
            number,
            terms,
            control: (id, lane),
            takers: (0..count).map(|_| None).collect(),
            sizes,
            end,
            turns: Turns::new(spin),
            causes: Causes::default(),
            last_message: now,
            looked: now,
            closing: None,
            closed: false,
            served: Served {
                messages: 0,
                bytes: 0,
            },
        })
    }

    pub(crate) fn accept_control(&self, cm: &mut dyn ConnectionManager) -> Result<(), PerfError> {
        let accept = Accept {
            session: self.number,
            ..Accept::default()
        };
        Ok(cm.accept(self.control.0, &answer(accept, 0))?)
    }

    /// Accepts the connection of the test's queue pair `index`. Refuses an index out of range or
    /// already in use.
    pub(crate) fn join(
        &mut self,
        cm: &mut dyn ConnectionManager,
        id: CmId,
        index: u16,
        params_of_client: &ConnParams,
    ) -> Result<(), Declined> {
        let resources = |error| (Reject::new(Refusal::Resources), Some(error));
        match self.takers.get(usize::from(index)) {
            Some(None) => {}
            _ => return Err((Reject::new(Refusal::Index), None)),
        }
        self.last_message = Instant::now();
        let lane = self
            .end
            .lane(cm, id, u32::from(index) + 1, self.sizes, self.peer);
        let lane = lane.map_err(resources)?;
        let (bytes, slots) = exposed(&self.terms);
        let mut memory = match bytes {
            0 => None,
            bytes => self.end.pool.acquire(bytes as usize),
        };
        let mut accept = Accept {
            session: self.number,
            receives: self.sizes.recvs as u16,
            ..Accept::default()
        };
        if let Some(memory) = &mut memory {
            self.prepare(memory, index);
            let key = memory
                .key(self.end.key_slot)
                .map_or(0, |key| MrKey::from_bits(key).rkey);
            accept.rkey = key;
            accept.address = memory.as_ptr().expose_provenance() as u64;
            (accept.bytes, accept.slots) = (bytes, slots);
        }
        let limit = self.end.device.attributes().max_responder_resources;
        let reads = match self.terms.op {
            Op::Read => params_of_client.responder_resources.min(limit),
            Op::Send | Op::Write => 0,
        };
        cm.accept(id, &answer(accept, reads))
            .map_err(|error| resources(error.into()))?;
        self.takers[usize::from(index)] = Some(ServerQueuePair {
            id,
            lane,
            index,
            memory,
            received: 0,
            posted: self.sizes.recvs.into(),
            allowed: self.sizes.recvs.into(),
            confirmed: 0,
            credit_pending: false,
        });
        Ok(())
    }

    /// Fills the memory before the client gets a key to it.
    fn prepare(&self, memory: &mut Buf, index: u16) {
        let bytes = memory.bytes_mut().expect("it is not shared");
        if self.terms.op != Op::Read || !self.terms.verify {
            return bytes.fill(0);
        }
        let slots = bytes.chunks_mut(self.terms.message_bytes as usize);
        for (slot, bytes) in slots.enumerate() {
            Pattern::new(self.terms.seed, index, slot as u64).fill(bytes, 0);
        }
    }

    pub(crate) fn has(&self, id: CmId) -> bool {
        self.control.0 == id || self.takers.iter().flatten().any(|taker| taker.id == id)
    }

    pub(crate) fn watch(&self, waiter: &Waiter) -> Result<(), PerfError> {
        waiter.add(self.end.queues.cq().fd())
    }

    fn during(&self) -> &'static str {
        if self.takers.iter().all(Option::is_some) {
            "measuring"
        } else {
            "connecting"
        }
    }

    /// Handles an event of one of the session's connections.
    pub(crate) fn event(&mut self, id: CmId, kind: &CmEventKind) {
        let (now, peer, during) = (Instant::now(), self.peer, self.during());
        let mut add = |rank, error| self.causes.add(rank, error, now);
        match kind {
            CmEventKind::Disconnected if self.closing.is_some() => {
                self.closed |= id == self.control.0;
            }
            CmEventKind::Disconnected => {
                add(Rank::Ended, PerfError::Disconnected { peer, during });
            }
            CmEventKind::DeviceRemoval => {
                let device = self.end.device_name();
                add(Rank::Seen, PerfError::DeviceRemoved { device, during });
            }
            CmEventKind::AddressChange => add(Rank::Seen, PerfError::AddressMoved { during }),
            CmEventKind::ConnectError { status } | CmEventKind::Unreachable { status } => {
                // The client did not confirm the acceptance.
                let (stage, status) = ("CONNECT", *status);
                let event = match kind {
                    CmEventKind::Unreachable { .. } => "RDMA_CM_EVENT_UNREACHABLE",
                    _ => "RDMA_CM_EVENT_CONNECT_ERROR",
                };
                add(
                    Rank::Seen,
                    PerfError::Connect {
                        stage,
                        peer,
                        event,
                        status,
                    },
                );
            }
            CmEventKind::Rejected { status, .. } => {
                let (stage, status) = ("CONNECT", *status);
                let event = "RDMA_CM_EVENT_REJECTED";
                add(
                    Rank::Ended,
                    PerfError::Connect {
                        stage,
                        peer,
                        event,
                        status,
                    },
                );
            }
            _ => {}
        }
    }

    /// Processes a batch of completions; returns the totals when the session is over, or its first
    /// cause of failure. The flag is true after a sleep and once per [`TICK`]: the caller then
    /// checks connection events.
    pub(crate) fn turn(
        &mut self,
        waiter: &mut Waiter,
    ) -> Result<(bool, Option<Served>), PerfError> {
        let queues = self.end.queues.clone();
        let taken = self.turns.take(&queues, waiter);
        let now = Instant::now();
        let slept = match taken {
            Ok(slept) => slept,
            Err(error @ PerfError::Queue { .. }) => {
                // The connection manager reports a device that disappears.
                self.causes.add(Rank::Ended, error, now);
                waiter.wait(TICK)?;
                true
            }
            Err(error) => return Err(error),
        };
        let mut any = false;
        while let Some(done) = self.turns.batch.next() {
            any = true;
            let outcome = match done.lane() {
                Some(0) => self.controlled(&done, now),
                Some(lane) => self.completed(lane as usize - 1, &done, now),
                None => Ok(()),
            };
            match outcome {
                Ok(()) => {}
                Err(PerfError::Completion(failed)) => self.causes.failed(failed, now),
                Err(error) => self.causes.add(Rank::Seen, error, now),
            }
        }
        self.give_credit(!any, now);
        let looking = slept || now >= self.looked + TICK;
        if looking {
            self.looked = now;
            let after = Duration::from_millis(self.terms.peer_timeout_ms.into());
            if self.closing.is_none() && now >= self.last_message + after {
                let (peer, during) = (self.peer, self.during());
                let silent = PerfError::Silent {
                    peer,
                    after,
                    during,
                };
                self.causes.add(Rank::Seen, silent, now);
            }
        }
        if let Some(until) = self.closing {
            let over = self.closed || now >= until;
            return Ok((looking, over.then_some(self.served)));
        }
        match self.causes.due(now) {
            Some(error) => Err(error),
            None => Ok((looking, None)),
        }
    }

    /// Handles a completion of the control connection.
    fn controlled(&mut self, done: &Completion, now: Instant) -> Result<(), PerfError> {
        let peer = self.peer;
        let wc = done.wc();
        if wc.qp != self.control.1.number() {
            return Ok(());
        }
        if !wc.status.is_success() {
            // After the last messages the client closes the connection.
            if self.closing.is_some() {
                return Ok(());
            }
            let opcode = if done.is_recv() { "RECV" } else { "SEND" };
            return Err(PerfError::Completion(failed(wc, opcode, peer)));
        }
        let lane = &mut self.control.1;
        if !done.is_recv() {
            lane.sent(done);
            return Ok(());
        }
        self.last_message = now;
        let Some(received) = lane.received(done) else {
            return Ok(());
        };
        let length = MESSAGE_BYTES.min(wc.byte_len as usize);
        let message = Message::parse(&received.header()[..length]);
        drop(received);
        let posted = lane.post_recv(None);
        posted.map_err(|source| PerfError::Post { peer, source })?;
        match message {
            Ok(Message::Alive) => self.send_control(Message::StillAlive),
            Ok(Message::End {
                ending: Ending::Done,
                messages,
                bytes,
                ..
            }) => {
                self.served = Served { messages, bytes };
                self.closing = Some(now + CLOSING);
                let done = Ending::Done;
                self.send_control(Message::End {
                    ending: done,
                    status: 0,
                    messages,
                    bytes,
                })
            }
            Ok(Message::End { ending, status, .. }) => {
                let error = PerfError::peer_ended(peer, ending, status);
                self.causes.add(Rank::Seen, error, now);
                Ok(())
            }
            Ok(_) => Err(PerfError::Confused {
                peer,
                what: "a message that the control connection does not have",
            }),
            Err(source) => Err(PerfError::Foreign { peer, source }),
        }
    }

    fn send_control(&mut self, message: Message) -> Result<(), PerfError> {
        send_message(&mut self.control.1, message, self.peer)
    }

    fn completed(&mut self, at: usize, done: &Completion, now: Instant) -> Result<(), PerfError> {
        let peer = self.peer;
        let terms = self.terms;
        let Some(taker) = self.takers.get_mut(at).and_then(Option::as_mut) else {
            return Ok(());
        };
        let wc = done.wc();
        if wc.qp != taker.lane.number() {
            return Ok(());
        }
        if !wc.status.is_success() {
            if self.closing.is_some() {
                return Ok(());
            }
            let opcode = if done.is_recv() { "RECV" } else { "SEND" };
            return Err(PerfError::Completion(failed(wc, opcode, peer)));
        }
        if !done.is_recv() {
            taker.lane.sent(done);
            taker.credit_pending = false;
            return Ok(());
        }
        self.last_message = now;
        let Some(mut received) = taker.lane.received(done) else {
            return Ok(());
        };
        let mut head = [0; MESSAGE_BYTES];
        head.copy_from_slice(received.header());
        let length = wc.byte_len;
        let wanted = terms.op == Op::Send
            && length > HEAD
            && (terms.verify || terms.measure == Measure::Latency);
        let tail = if wanted { received.take_data() } else { None };
        drop(received);
        let head = &head[..length.min(HEAD) as usize];
        let outcome = match terms.op {
            Op::Send => taker.arrived(&terms, head, tail, length, peer),
            Op::Write if terms.verify => taker.check(&terms, head, peer),
            Op::Write | Op::Read => Err(PerfError::Confused {
                peer,
                what: "a message where there are none",
            }),
        };
        let posted = taker.lane.post_recv(Some(&self.end.pool));
        let posted = posted.map_err(|source| PerfError::Post { peer, source })?;
        taker.posted += posted as u64;
        outcome
    }

    /// Reports the number of received messages, when half of the client's credit is used or no
    /// other message is pending.
    fn give_credit(&mut self, idle: bool, now: Instant) {
        if self.terms.op != Op::Send || self.terms.measure != Measure::Bandwidth {
            return;
        }
        let half = u64::from(self.sizes.recvs / 2);
        for taker in self.takers.iter_mut().flatten() {
            let news =
                taker.posted - taker.allowed >= half || taker.confirmed != taker.received && idle;
            if !news || taker.credit_pending {
                continue;
            }
            taker.credit_pending = true;
            (taker.allowed, taker.confirmed) = (taker.posted, taker.received);
            let (received, allowed) = (taker.received, taker.posted);
            let credit = Message::Credit {
                received,
                allowed,
                wrong: None,
            };
            if let Err(error) = send_message(&mut taker.lane, credit, self.peer) {
                self.causes.add(Rank::Ended, error, now);
            }
        }
    }

    /// Sends the client the reason for the end, if the connection still works. Waits at most
    /// [`FAREWELL`] for the completion.
    pub(crate) fn farewell(&mut self, error: &PerfError, waiter: &mut Waiter) {
        let last = error.final_message();
        if self.send_control(last).is_err() {
            return;
        }
        let until = Instant::now() + FAREWELL;
        while self.control.1.sends() > 0 && Instant::now() < until {
            if self.turn(waiter).is_err() {
                // The cause is already known. New failures here only show whether the last message
                // was sent.
                self.causes = Causes::default();
            }
        }
    }

    /// Closes every queue pair and connection.
    pub(crate) fn close(self, cm: &mut dyn ConnectionManager, waiter: &Waiter) {
        waiter.remove(self.end.queues.cq().fd());
        cm.destroy(self.control.0);
        self.takers
            .iter()
            .flatten()
            .for_each(|taker| cm.destroy(taker.id));
    }
}

fn answer(accept: Accept, reads: u8) -> ConnParams {
    ConnParams {
        private_data: accept.to_bytes().into_iter().collect(),
        responder_resources: reads,
        initiator_depth: 0,
        retry_count: 7,
        rnr_retry_count: 7,
    }
}
