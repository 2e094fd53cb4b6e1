//! One connection on its core: the queue pair, the work requests that wait for room in its send
//! queue, and the RDMA READs in flight.

use std::collections::VecDeque;
use std::net::SocketAddr;

use nacre_hugepages::Buf;
use nacre_nvmf::transport::{Closed, ListenerId, ReqTag, Response, TransportCaps};
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Cqe, Sgl, Sqe, StatusCode};
use nacre_reactor::Nanos;
use nacre_transport_rdma_verbs::{CmId, Lane, PostError};
use zerocopy::IntoBytes;

use crate::sgl::{Remote, Remotes};
use crate::stats::{Stats, add};

/// A READ that waits for the negotiated depth, or for space in the send queue.
struct Read {
    tag: ReqTag,
    remote: Remote,
    into: Buf,
    last: bool,
}

/// Descriptors that came in capsules, by command.
type Lists = Vec<(u16, Result<Buf, StatusCode>)>;

fn list_of(lists: &Lists, cid: u16) -> Option<&Result<Buf, StatusCode>> {
    let found = lists.iter().find(|(of, _)| *of == cid);
    found.map(|(_, list)| list)
}

pub(crate) struct Conn {
    pub names: Names,
    pub limits: Limits,
    pub lane: Lane,
    /// Index of its device in the core's list.
    pub device: usize,
    pub since: Nanos,
    /// The connection manager has established the connection, or a command has arrived.
    pub live: bool,
    /// `Event::Opened` was given to the target.
    pub opened: bool,
    /// The target has accepted the Connect command.
    pub established: bool,
    /// Commands that arrived before `Event::Opened` was given.
    pub early: VecDeque<(Sqe, Option<Buf>)>,
    /// Fetches that failed before any READ.
    pub refused: VecDeque<(ReqTag, StatusCode)>,
    responses: VecDeque<Response>,
    reads: Reads,
    /// Descriptors that came in capsules, by command.
    lists: Lists,
    /// A response has invalidated one of the host's keys (SEND_WITH_INVALIDATE).
    pub invalidated: bool,
    /// The failure has been reported.
    pub failure_reported: bool,
    /// The reason for closing, while the queue pair flushes.
    pub closing: Option<Closed>,
    pub deadline: Nanos,
    /// Close the connection after everything queued was sent.
    pub draining: bool,
    /// The queue pair takes no further shared receive.
    pub last_receive: bool,
    /// Polls, while closing, since the last outstanding request completed.
    pub quiet: u8,
    /// On the transport's list of connections with requests to post.
    pub dirty: bool,
    /// On the transport's list of connections with events to report or an end to complete.
    pub attention: bool,
    /// Some of its own receives are not posted, for lack of buffers.
    pub starved: bool,
}

/// The READs of a connection.
struct Reads {
    /// READs that wait for the negotiated depth, or for space in the send queue.
    waiting: VecDeque<Read>,
    /// Posted READs, in order; the flag marks the last READ of a fetch.
    posted: VecDeque<(ReqTag, bool)>,
    /// The completed parts of the oldest fetch.
    assembled: Option<Buf>,
}

/// Names of both ends of a connection, for logs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Names {
    pub id: CmId,
    pub listener: ListenerId,
    pub local: SocketAddr,
    pub peer: SocketAddr,
}

/// The negotiated limits of a connection.
pub(crate) struct Limits {
    /// Most outstanding commands of the host.
    pub depth: usize,
    /// Most READs posted at the same time.
    pub read_depth: usize,
    /// Responses may invalidate the host's keys.
    pub invalidate: bool,
    /// Capabilities of the connection, if its listener has options of its own.
    pub caps: Option<Box<TransportCaps>>,
    /// Most data in a capsule, in bytes, and most descriptors.
    pub in_capsule: u32,
    pub max_descriptors: u8,
}

impl Conn {
    pub(crate) fn new(lane: Lane, device: usize, names: Names, limits: Limits, now: Nanos) -> Self {
        Self {
            names,
            lane,
            device,
            since: now,
            live: false,
            opened: false,
            established: false,
            early: VecDeque::new(),
            refused: VecDeque::new(),
            responses: VecDeque::with_capacity(limits.depth),
            reads: Reads {
                waiting: VecDeque::with_capacity(limits.depth),
                posted: VecDeque::with_capacity(limits.read_depth),
                assembled: None,
            },
            lists: Vec::new(),
            limits,
            invalidated: false,
            failure_reported: false,
            closing: None,
            deadline: Nanos::MAX,
            draining: false,
            last_receive: false,
            quiet: 0,
            dirty: false,
            attention: false,
            starved: false,
        }
    }

    /// Keeps the descriptors of a command. Returns false if the host exceeds its number of
    /// commands.
    pub(crate) fn keep_list(&mut self, cid: u16, list: Result<Buf, StatusCode>) -> bool {
        let room = self.lists.len() < self.limits.depth;
        if room {
            self.lists.push((cid, list));
        }
        room
    }

    /// The host's memory regions for a transfer.
    fn remotes<'a>(
        lists: Option<&'a Result<Buf, StatusCode>>,
        pointer: &nacre_nvmf_wire::SglDescriptor,
        bytes: usize,
        exact: bool,
    ) -> Result<Remotes<'a>, StatusCode> {
        let list = match lists {
            Some(Ok(list)) => Some(&list[..]),
            Some(Err(status)) => return Err(*status),
            None => None,
        };
        Remotes::new(pointer, list, bytes, exact)
    }

    /// Queues the READs of a command's data.
    pub(crate) fn fetch(
        &mut self,
        tag: ReqTag,
        sqe: &Sqe,
        mut into: Buf,
    ) -> Result<(), StatusCode> {
        let pointer = sqe.sgl_descriptor();
        let several = matches!(pointer.parse(), Ok(Sgl::InCapsuleDescriptors { .. }));
        let list = several.then(|| list_of(&self.lists, tag.cid)).flatten();
        // A host may round up the memory of a list or a structure, but not that of blocks.
        let exact = matches!(sqe.opcode, opcode::WRITE | opcode::COMPARE);
        let remotes = Self::remotes(list, &pointer, into.len(), exact)?;
        if into.as_mut_ptr().is_none() {
            return Err(StatusCode::INTERNAL_ERROR);
        }
        let mut parts = VecDeque::new();
        for mut remote in remotes.iter().filter(|remote| remote.length > 0) {
            remote.length = remote.length.min(into.len() as u32);
            let rest = into.split_off(remote.length as usize);
            let part = std::mem::replace(&mut into, rest);
            let last = into.is_empty();
            if last && parts.is_empty() {
                // The usual case: one descriptor and no list.
                self.reads.waiting.push_back(Read {
                    tag,
                    remote,
                    into: part,
                    last,
                });
                return Ok(());
            }
            parts.push_back(Read {
                tag,
                remote,
                into: part,
                last,
            });
            if last {
                break;
            }
        }
        self.reads.waiting.append(&mut parts);
        Ok(())
    }

    /// Completes a READ. Returns the data of the fetch with its last part.
    pub(crate) fn read_done(&mut self, part: Buf) -> Option<(ReqTag, Buf)> {
        let (tag, last) = self.reads.posted.pop_front()?;
        let whole = match self.reads.assembled.take() {
            None => part,
            Some(mut whole) => {
                // Parts were split from each other in this order.
                whole.unsplit(part).expect("parts of one buffer");
                whole
            }
        };
        if last {
            return Some((tag, whole));
        }
        self.reads.assembled = Some(whole);
        None
    }

    pub(crate) fn respond(&mut self, response: Response, stats: &Stats) {
        if let Some(waits) = self.try_respond(response, stats) {
            add(&stats.responses_waited, 1);
            self.responses.push_back(waits);
        }
    }

    fn try_respond(&mut self, response: Response, stats: &Stats) -> Option<Response> {
        if self.responses.is_empty() {
            self.start(response, stats)
        } else {
            Some(response)
        }
    }

    /// Queues the writes of a response, and the response. Hands it back when the queue has no space
    /// now.
    fn start(&mut self, response: Response, stats: &Stats) -> Option<Response> {
        let cid = response.tag.cid;
        let pointer = response.sgl;
        let parsed = pointer.parse();
        let several = matches!(parsed, Ok(Sgl::InCapsuleDescriptors { .. }));
        let list = several.then(|| list_of(&self.lists, cid)).flatten();
        let mut cqe = response.cqe;
        let data = if cqe.status().is_success() {
            response.data.as_slice()
        } else {
            &[]
        };
        let bytes: usize = data.iter().map(|buf| buf.len()).sum();
        if bytes > 0 {
            match Self::remotes(list, &pointer, bytes, false) {
                Ok(remotes) => {
                    // Each write but the last ends at the end of a buffer or of a descriptor.
                    let most = match &remotes {
                        Remotes::One(_) => data.len(),
                        Remotes::List(list) => data.len() + (list.len() / 16).saturating_sub(1),
                    };
                    let fits = self.lane.room() as usize > most;
                    if !fits && self.lane.sends() > 0 {
                        return Some(response);
                    }
                    // No queue of the device is deep enough for this response.
                    if !fits {
                        add(&stats.sgl_refused, 1);
                        cqe = failed(&cqe, StatusCode::INTERNAL_ERROR);
                    } else if write_all(&mut self.lane, data, &remotes, stats).is_err() {
                        cqe = failed(&cqe, StatusCode::INTERNAL_ERROR);
                    }
                }
                Err(status) => {
                    add(&stats.sgl_refused, 1);
                    cqe = failed(&cqe, status);
                }
            }
        }
        if self.lane.room() == 0 {
            return Some(response);
        }
        let invalidate = match parsed {
            Ok(Sgl::Keyed {
                key,
                invalidate: true,
                ..
            }) if self.limits.invalidate => Some(key),
            _ => None,
        };
        self.invalidated |= invalidate.is_some();
        self.lane.send(cqe.as_bytes(), invalidate);
        add(&stats.send_ops, 1);
        add(&stats.send_bytes, Cqe::SIZE as u64);
        if several && let Some(at) = self.lists.iter().position(|(of, _)| *of == cid) {
            drop(self.lists.swap_remove(at));
        }
        None
    }

    /// Queues waiting requests while there is space, and rings the doorbell.
    pub(crate) fn flush(&mut self, now: Nanos, stats: &Stats) -> Result<(), PostError> {
        while let Some(response) = self.responses.pop_front() {
            if let Some(waits) = self.start(response, stats) {
                self.responses.push_front(waits);
                break;
            }
        }
        while self.reads.posted.len() < self.limits.read_depth
            && self.lane.room() > 0
            && let Some(read) = self.reads.waiting.pop_front()
        {
            let Read {
                tag,
                remote,
                into,
                last,
            } = read;
            add(&stats.read_ops, 1);
            add(&stats.read_bytes, u64::from(remote.length));
            if self.lane.read(remote.address, remote.key, into).is_err() {
                self.refused.push_back((tag, StatusCode::INTERNAL_ERROR));
                self.reads.waiting.retain(|read| read.tag != tag);
                continue;
            }
            self.reads.posted.push_back((tag, last));
        }
        if !self.reads.waiting.is_empty() {
            add(&stats.reads_waited, 1);
        }
        // Signaled completions cost time, but free buffers. Requests that wait for space need one.
        let waits = !self.responses.is_empty() || self.draining;
        if waits || self.lane.needs_signal() {
            self.lane.signal_last();
        }
        // Possibly no queued request can be signaled now, and no earlier one has a completion due.
        if waits {
            self.lane.mark();
        }
        if self.lane.post_at(now.0)? > 0 {
            add(&stats.doorbells, 1);
        }
        Ok(())
    }

    /// True when nothing is left to send, and every send has completed.
    pub(crate) fn has_drained(&self) -> bool {
        self.responses.is_empty() && self.reads.waiting.is_empty() && self.lane.sends() == 0
    }

    /// Drops all queued work, which the target no longer needs.
    pub(crate) fn forget(&mut self) {
        self.responses.clear();
        self.reads.waiting.clear();
        self.early.clear();
        self.refused.clear();
        self.reads.assembled = None;
        self.lists.clear();
    }
}

fn failed(cqe: &Cqe, status: StatusCode) -> Cqe {
    Cqe::new(cqe.cid(), status).with_sqhd(cqe.sqhd.get())
}

/// Writes the data to the host's memory regions.
fn write_all(
    lane: &mut Lane,
    data: &[Buf],
    remotes: &Remotes<'_>,
    stats: &Stats,
) -> Result<(), nacre_transport_rdma_verbs::NotRegistered> {
    let mut targets = remotes.iter();
    let mut room = 0u32;
    let (mut address, mut key) = (0, 0);
    for buf in data {
        let mut done = 0;
        while done < buf.len() {
            while room == 0 {
                let Some(next) = targets.next() else {
                    return Ok(());
                };
                (address, key, room) = (next.address, next.key, next.length);
            }
            let now = (buf.len() - done).min(room as usize);
            lane.write(address, key, buf.slice(done, now))?;
            add(&stats.write_ops, 1);
            add(&stats.write_bytes, now as u64);
            done += now;
            address += now as u64;
            room -= now as u32;
        }
    }
    Ok(())
}
