//! One queue pair of the server in a session of the RDMA performance test. It compares received
//! messages with the test's pattern, echoes them, or compares its memory on request.

use std::net::SocketAddr;

use nacre_hugepages::Buf;
use nacre_transport_rdma_verbs::{CmId, Lane};

use crate::endpoint::HEAD;
use crate::error::{Mismatch, PerfError};
use crate::params::Measure;
use crate::pattern::Pattern;
use crate::wire::{Message, SessionParameters, Wrong};

/// A queue pair of the test.
pub(crate) struct ServerQueuePair {
    pub id: CmId,
    pub lane: Lane,
    pub index: u16,
    /// The memory that the client accesses by RDMA WRITE or READ.
    pub memory: Option<Buf>,
    /// Messages received.
    pub received: u64,
    /// Receives posted in total.
    pub posted: u64,
    /// Messages that the client may send in total, as of the last credit.
    pub allowed: u64,
    /// Received messages that the last credit ([`Message::Credit`]) reported.
    pub confirmed: u64,
    /// A credit is in flight.
    pub credit_pending: bool,
}

impl ServerQueuePair {
    /// Handles a SEND of the test, of `length` bytes. `head`: the first 64 bytes; `tail`: the
    /// buffer of the rest, if it is needed. Compares the message if the session verifies, and
    /// reports a difference to the client of a bandwidth test. A latency test gets the message
    /// back.
    pub(crate) fn arrived(
        &mut self,
        terms: &SessionParameters,
        head: &[u8],
        tail: Option<Buf>,
        length: u32,
        peer: SocketAddr,
    ) -> Result<(), PerfError> {
        let number = self.received;
        self.received += 1;
        let rest = length as usize - head.len();
        let tail = tail.map(|mut tail| {
            tail.truncate(rest);
            tail
        });
        if terms.verify {
            let pattern = Pattern::new(terms.seed, self.index, number);
            let in_tail = || pattern.differs(tail.as_deref()?, HEAD as usize);
            if let Some((offset, expected, found)) = pattern.differs(head, 0).or_else(in_tail) {
                let wrong = Wrong {
                    number,
                    offset: offset as u64,
                    expected,
                    found,
                };
                if terms.measure == Measure::Bandwidth {
                    let credit = Message::Credit {
                        received: 0,
                        allowed: 0,
                        wrong: Some(wrong),
                    };
                    send_message(&mut self.lane, credit, peer)?;
                }
                return Err(self.mismatch(wrong, peer));
            }
        }
        if terms.measure == Measure::Bandwidth {
            return Ok(());
        }
        if self.lane.room() == 0 {
            let what = "more messages than may be under way";
            return Err(PerfError::Confused { peer, what });
        }
        self.lane.send_with(head, None, tail)?;
        self.lane.signal_last();
        let posted = self.lane.post();
        posted
            .map(drop)
            .map_err(|source| PerfError::Post { peer, source })
    }

    /// Handles [`Message::Check`], which `bytes` should have: compares the written data of a slot,
    /// and replies with the result. A difference is also an error.
    pub(crate) fn check(
        &mut self,
        terms: &SessionParameters,
        bytes: &[u8],
        peer: SocketAddr,
    ) -> Result<(), PerfError> {
        let confused = |what| PerfError::Confused { peer, what };
        let message = Message::parse(bytes);
        let message = message.map_err(|source| PerfError::Foreign { peer, source })?;
        let (
            Message::Check {
                slot,
                number,
                bytes,
            },
            Some(memory),
        ) = (message, &self.memory)
        else {
            return Err(confused(
                "another message than a question about the written data",
            ));
        };
        let size = u64::from(terms.message_bytes);
        if bytes > size || u64::from(slot) >= memory.len() as u64 / size {
            return Err(confused("a question about memory that is not there"));
        }
        // Slice only these bytes: the client may be writing to others.
        let written = memory.slice((u64::from(slot) * size) as usize, bytes as usize);
        let differs = Pattern::new(terms.seed, self.index, number).differs(&written, 0);
        let wrong = differs.map(|(offset, expected, found)| Wrong {
            number,
            offset: offset as u64,
            expected,
            found,
        });
        self.received += 1;
        send_message(&mut self.lane, Message::Checked { slot, wrong }, peer)?;
        match wrong {
            None => Ok(()),
            Some(wrong) => Err(self.mismatch(wrong, peer)),
        }
    }

    fn mismatch(&self, wrong: Wrong, peer: SocketAddr) -> PerfError {
        PerfError::Mismatch(Mismatch {
            peer,
            index: self.index,
            number: wrong.number,
            offset: wrong.offset,
            expected: wrong.expected,
            found: wrong.found,
            by: "server",
        })
    }
}

/// Sends one message of 64 bytes with a signaled completion. The send queue has room for all
/// replies that a client may request, so without room the client broke the rules.
pub(crate) fn send_message(
    lane: &mut Lane,
    message: Message,
    peer: SocketAddr,
) -> Result<(), PerfError> {
    if lane.room() == 0 {
        let what = "more messages than answers can be under way";
        return Err(PerfError::Confused { peer, what });
    }
    lane.send(&message.to_bytes(), None);
    lane.signal_last();
    let posted = lane.post();
    posted
        .map(drop)
        .map_err(|source| PerfError::Post { peer, source })
}
