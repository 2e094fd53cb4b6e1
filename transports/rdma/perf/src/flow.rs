//! One queue pair of the client, the end that measures: posts its work requests, and handles their
//! completions and the server's messages.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nacre_hugepages::{Buf, Pool};
use nacre_transport_rdma_verbs::{CmId, Completion, Lane};

use crate::completion::failed;
use crate::endpoint::HEAD;
use crate::error::{Mismatch, PerfError};
use crate::params::{Measure, Op};
use crate::pattern::Pattern;
use crate::wire::{Accept, MESSAGE_BYTES, Message, SessionParameters, Wrong};

/// State shared by all queue pairs of a run.
pub(crate) struct Load {
    pub terms: SessionParameters,
    pub peer: SocketAddr,
    pub pool: Pool,
    /// Data that is sent or written without comparison.
    pub source: Option<Buf>,
}

/// A request that was posted and has not completed.
struct Outstanding {
    posted: Instant,
    what: RequestKind,
}

#[derive(Clone, Copy)]
enum RequestKind {
    Send,
    Write,
    /// The request to compare the previously written data.
    Check,
    /// RDMA READ of this slot of the server's memory.
    Read(u16),
}

impl RequestKind {
    fn opcode(self) -> &'static str {
        match self {
            Self::Send | Self::Check => "SEND",
            Self::Write => "RDMA WRITE",
            Self::Read(_) => "RDMA READ",
        }
    }
}

pub(crate) struct Flow {
    pub id: CmId,
    pub lane: Lane,
    index: u16,
    remote: Accept,
    /// Most messages in flight. A WRITE with verification is a message of two requests.
    limit: usize,
    under_way: VecDeque<Outstanding>,
    /// Number of the next message. It counts on over all sizes of a session.
    next: u64,
    /// Messages that the server has confirmed, and messages that it allows in total.
    confirmed: u64,
    allowed: u64,
    /// Slots of the server's memory that are not waiting for a comparison.
    free: Vec<u16>,
    /// Send times of the messages whose echo is pending.
    echoes: VecDeque<Instant>,
    /// When the last request completed.
    moved: Instant,
}

/// The result of a completion.
#[derive(Default)]
pub(crate) struct Outcome {
    /// The time from post to completion of a SEND, WRITE or READ; of an echo, half the round trip.
    /// `None`: the completion ends no measured request.
    pub measured: Option<Duration>,
    /// The completion is a message from the server.
    pub from_server: bool,
}

impl Flow {
    pub(crate) fn new(
        id: CmId,
        lane: Lane,
        index: u16,
        remote: Accept,
        reads: u8,
        load: &Load,
    ) -> Result<Self, PerfError> {
        let terms = &load.terms;
        let slots = u64::from(remote.slots);
        let needed = slots * u64::from(terms.message_bytes);
        let enough = match terms.op {
            Op::Send => remote.receives > 0,
            Op::Write if terms.verify => remote.slots >= terms.depth && remote.bytes >= needed,
            Op::Write | Op::Read => remote.slots > 0 && remote.bytes >= needed,
        };
        if !enough {
            let what = "an acceptance with less room than the test needs";
            return Err(PerfError::Confused {
                peer: load.peer,
                what,
            });
        }
        if terms.op == Op::Read && reads == 0 {
            return Err(PerfError::NoReads { peer: load.peer });
        }
        let mut limit = usize::from(terms.depth);
        if terms.op == Op::Read {
            limit = limit.min(reads.into());
        }
        Ok(Self {
            id,
            lane,
            index,
            remote,
            limit,
            under_way: VecDeque::with_capacity(2 * limit),
            next: 0,
            confirmed: 0,
            allowed: remote.receives.into(),
            free: (0..remote.slots).collect(),
            echoes: VecDeque::with_capacity(limit),
            moved: Instant::now(),
        })
    }

    /// Most messages in flight.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    fn is_free(&self, terms: &SessionParameters) -> bool {
        let needed = match terms.op {
            Op::Write if terms.verify => 2,
            Op::Send | Op::Write | Op::Read => 1,
        };
        self.lane.room() >= needed
            && match terms.op {
                Op::Send if terms.measure == Measure::Latency => self.echoes.len() < self.limit,
                Op::Send => self.under_way.len() < self.limit && self.next < self.allowed,
                Op::Write if terms.verify => {
                    // Use at most as many slots as requests may be in flight.
                    usize::from(self.remote.slots) - self.free.len() < self.limit
                }
                Op::Write | Op::Read => self.under_way.len() < self.limit,
            }
    }

    /// True if every request has completed, and every answer of the server that the test awaits
    /// (echo, credit, comparison) has arrived.
    pub(crate) fn is_idle(&self, terms: &SessionParameters) -> bool {
        self.under_way.is_empty()
            && match terms.op {
                Op::Send if terms.measure == Measure::Latency => self.echoes.is_empty(),
                Op::Send => self.confirmed == self.next,
                Op::Write if terms.verify => self.free.len() == usize::from(self.remote.slots),
                Op::Write | Op::Read => true,
            }
    }

    /// True if requests or answers are pending, and none has completed for the time `after`.
    pub(crate) fn is_stuck(
        &self,
        terms: &SessionParameters,
        now: Instant,
        after: Duration,
    ) -> bool {
        !self.is_idle(terms) && now >= self.moved + after
    }

    fn pattern(&self, terms: &SessionParameters, number: u64) -> Pattern {
        Pattern::new(terms.seed, self.index, number)
    }

    /// Queues the next message of `size` bytes. Returns false if no further message may be in
    /// flight now, or no buffer is free.
    pub(crate) fn queue(
        &mut self,
        load: &Load,
        size: u32,
        now: Instant,
    ) -> Result<bool, PerfError> {
        let terms = &load.terms;
        if !self.is_free(terms) {
            return Ok(false);
        }
        let number = self.next;
        if self.is_idle(terms) {
            self.moved = now;
        }
        match terms.op {
            Op::Send => {
                let mut head = [0; MESSAGE_BYTES];
                let head = &mut head[..size.min(HEAD) as usize];
                let tail = (size - head.len() as u32) as usize;
                let pattern = self.pattern(terms, number);
                let data = match (tail, terms.verify) {
                    (0, _) => None,
                    (tail, false) => load.source.as_ref().map(|source| source.slice(0, tail)),
                    (tail, true) => {
                        let Some(mut buf) = load.pool.acquire(tail) else {
                            return Ok(false);
                        };
                        let bytes = buf.bytes_mut().expect("it is not shared");
                        pattern.fill(bytes, HEAD as usize);
                        Some(buf)
                    }
                };
                if terms.verify {
                    pattern.fill(head, 0);
                }
                self.lane.send_with(head, None, data)?;
                self.sent(RequestKind::Send, now);
                if terms.measure == Measure::Latency {
                    self.echoes.push_back(now);
                }
            }
            Op::Write => {
                let buf = if !terms.verify {
                    load.source
                        .as_ref()
                        .map(|source| source.slice(0, size as usize))
                } else {
                    load.pool.acquire(size as usize)
                };
                let Some(mut buf) = buf else { return Ok(false) };
                let slot = if terms.verify {
                    self.free.pop().expect("one is free")
                } else {
                    (number % u64::from(self.remote.slots)) as u16
                };
                if terms.verify {
                    let bytes = buf.bytes_mut().expect("it is not shared");
                    self.pattern(terms, number).fill(bytes, 0);
                }
                let address = self.address_of(terms, slot);
                self.lane.write(address, self.remote.rkey, buf)?;
                self.sent(RequestKind::Write, now);
                if terms.verify {
                    let check = Message::Check {
                        slot,
                        number,
                        bytes: size.into(),
                    };
                    self.lane.send(&check.to_bytes(), None);
                    self.sent(RequestKind::Check, now);
                }
            }
            Op::Read => {
                let Some(mut buf) = load.pool.acquire(size as usize) else {
                    return Ok(false);
                };
                if terms.verify {
                    // Clear the data of an earlier READ, so that the comparison detects a missing
                    // transfer.
                    buf.bytes_mut().expect("it is not shared").fill(0);
                }
                let slot = (number % u64::from(self.remote.slots)) as u16;
                let address = self.address_of(terms, slot);
                self.lane.read(address, self.remote.rkey, buf)?;
                self.sent(RequestKind::Read(slot), now);
            }
        }
        self.next += 1;
        Ok(true)
    }

    fn address_of(&self, terms: &SessionParameters, slot: u16) -> u64 {
        self.remote.address + u64::from(slot) * u64::from(terms.message_bytes)
    }

    fn sent(&mut self, what: RequestKind, posted: Instant) {
        self.lane.signal_last();
        self.under_way.push_back(Outstanding { posted, what });
    }

    /// Posts the queued requests.
    pub(crate) fn post(&mut self, peer: SocketAddr) -> Result<(), PerfError> {
        let posted = self.lane.post();
        posted
            .map(drop)
            .map_err(|source| PerfError::Post { peer, source })
    }

    pub(crate) fn completed(
        &mut self,
        load: &Load,
        done: &Completion,
        size: u32,
        now: Instant,
    ) -> Result<Outcome, PerfError> {
        let wc = done.wc();
        // A completion of an earlier connection: soft-RoCE leaves flushed completions in the
        // completion queue when a queue pair is destroyed.
        if wc.qp != self.lane.number() {
            return Ok(Outcome::default());
        }
        if !wc.status.is_success() {
            let opcode = match (done.is_recv(), self.under_way.front()) {
                (true, _) => "RECV",
                (false, Some(first)) => first.what.opcode(),
                (false, None) => "request",
            };
            return Err(PerfError::Completion(failed(wc, opcode, load.peer)));
        }
        self.moved = now;
        if done.is_recv() {
            let measured = self.received(load, done, size, now)?;
            return Ok(Outcome {
                measured,
                from_server: true,
            });
        }
        let read = self.lane.sent(done);
        let Some(Outstanding { posted, what }) = self.under_way.pop_front() else {
            return Ok(Outcome::default());
        };
        if let RequestKind::Read(slot) = what
            && load.terms.verify
            && let Some(buf) = read
        {
            // The server's memory is filled once, by slot.
            let differs = self.pattern(&load.terms, slot.into()).differs(&buf, 0);
            if let Some((offset, expected, found)) = differs {
                let wrong = Wrong {
                    number: self.next - 1 - self.under_way.len() as u64,
                    offset: offset as u64,
                    expected,
                    found,
                };
                return Err(self.mismatch(load, wrong, "client"));
            }
        }
        let counts = match what {
            RequestKind::Check => false,
            RequestKind::Send => load.terms.measure == Measure::Bandwidth,
            RequestKind::Write | RequestKind::Read(_) => true,
        };
        let measured = counts.then(|| now.saturating_duration_since(posted));
        Ok(Outcome {
            measured,
            from_server: false,
        })
    }

    fn mismatch(&self, load: &Load, wrong: Wrong, by: &'static str) -> PerfError {
        PerfError::Mismatch(Mismatch {
            peer: load.peer,
            index: self.index,
            number: wrong.number,
            offset: wrong.offset,
            expected: wrong.expected,
            found: wrong.found,
            by,
        })
    }

    /// Handles a message of the server: an echo, a credit, or the result of a comparison.
    fn received(
        &mut self,
        load: &Load,
        done: &Completion,
        size: u32,
        now: Instant,
    ) -> Result<Option<Duration>, PerfError> {
        let peer = load.peer;
        let confused = |what| PerfError::Confused { peer, what };
        let length = done.wc().byte_len;
        let Some(mut received) = self.lane.received(done) else {
            return Err(confused("an unexpected message"));
        };
        let mut head = [0; MESSAGE_BYTES];
        head.copy_from_slice(received.header());
        let echo = load.terms.op == Op::Send && load.terms.measure == Measure::Latency;
        let tail = if echo && load.terms.verify {
            received.take_data()
        } else {
            None
        };
        drop(received);
        let measured = if echo {
            Some(self.echoed(load, &head, tail, length, size, now)?)
        } else {
            self.handle_message(load, &head[..head.len().min(length as usize)])?;
            None
        };
        let posted = self.lane.post_recv(Some(&load.pool));
        posted.map_err(|source| PerfError::Post { peer, source })?;
        Ok(measured)
    }

    fn echoed(
        &mut self,
        load: &Load,
        head: &[u8],
        tail: Option<Buf>,
        length: u32,
        size: u32,
        now: Instant,
    ) -> Result<Duration, PerfError> {
        let Some(sent) = self.echoes.pop_front() else {
            return Err(PerfError::Confused {
                peer: load.peer,
                what: "an echo without a message",
            });
        };
        if length != size {
            return Err(PerfError::Confused {
                peer: load.peer,
                what: "an echo of another length than the message",
            });
        }
        if load.terms.verify {
            let number = self.next - 1 - self.echoes.len() as u64;
            let pattern = self.pattern(&load.terms, number);
            let head = &head[..size.min(HEAD) as usize];
            let rest = (size - head.len() as u32) as usize;
            let in_tail = || {
                let tail = tail.as_ref()?;
                pattern.differs(&tail[..rest], HEAD as usize)
            };
            if let Some((offset, expected, found)) = pattern.differs(head, 0).or_else(in_tail) {
                let wrong = Wrong {
                    number,
                    offset: offset as u64,
                    expected,
                    found,
                };
                return Err(self.mismatch(load, wrong, "client"));
            }
        }
        Ok(now.saturating_duration_since(sent) / 2)
    }

    fn handle_message(&mut self, load: &Load, bytes: &[u8]) -> Result<(), PerfError> {
        let peer = load.peer;
        let message =
            Message::parse(bytes).map_err(|source| PerfError::Foreign { peer, source })?;
        match message {
            Message::Credit {
                wrong: Some(wrong), ..
            }
            | Message::Checked {
                wrong: Some(wrong), ..
            } => Err(self.mismatch(load, wrong, "server")),
            Message::Credit {
                received,
                allowed,
                wrong: None,
            } => {
                if received > self.next || received < self.confirmed || allowed < self.allowed {
                    let what = "an invalid credit";
                    return Err(PerfError::Confused { peer, what });
                }
                (self.confirmed, self.allowed) = (received, allowed);
                Ok(())
            }
            Message::Checked { slot, wrong: None } => {
                if slot >= self.remote.slots || self.free.contains(&slot) {
                    let what = "a comparison result that was not requested";
                    return Err(PerfError::Confused { peer, what });
                }
                self.free.push(slot);
                Ok(())
            }
            _ => Err(PerfError::Confused {
                peer,
                what: "a message of the control connection on another",
            }),
        }
    }
}
