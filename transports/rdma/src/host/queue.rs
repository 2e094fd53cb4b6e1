//! [`RdmaHost`]: the host's end of one NVMe/RDMA queue, on one reactor. It sends command capsules
//! with the keys of their data buffers, and receives responses. The management thread connects the
//! queue pair.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nacre_hugepages::Buf;
use nacre_nvmf::transport::{Closed, HostCommand, HostEvent, HostTransport, HostWorkRequests};
use nacre_nvmf_wire::{Cqe, Sgl, Sqe, StatusCode};
use nacre_reactor::{EventSet, Idle, Interest, Nanos};
use nacre_transport_rdma_verbs::{
    Batch, CmId, Completion, Endpoint, Lane, LaneConfig, MrKey, RecvConfig, WcStatus,
};
use zerocopy::{FromBytes, IntoBytes};

use super::{HostShared, Link, ManagerRequest, QueueMessage, RdmaHostOptions, RingMemory};

/// Most completions taken from the completion queue at once.
const BATCH: usize = 64;

/// Entries of the send queue for a queue of `entries` commands: at least twice as many, because a
/// response may arrive before the completion of the command's SEND, and the next command follows.
pub(super) fn send_entries(entries: u16) -> u32 {
    (2 * u32::from(entries)).next_power_of_two()
}

/// The host's end of one NVMe/RDMA queue.
pub struct RdmaHost {
    shared: Arc<HostShared>,
    link: Arc<Link>,
    wakes: EventSet,
    options: RdmaHostOptions,
    // The queue pair is dropped before the memory of its rings, whose keys the controller has.
    lane: Option<(Lane, CmId)>,
    memory: Rc<RingMemory>,
    key_slot: usize,
    batch: Batch,
    /// Commands submitted and not completed, indexed by command identifier.
    commands: Vec<Option<HostCommand>>,
    /// Identifiers of commands that wait for room in the send queue.
    waiting: VecDeque<u16>,
    /// Completions of commands that cannot be sent, because their memory is not registered with the
    /// device.
    local: VecDeque<HostEvent>,
    in_capsule_bytes: u32,
    established: bool,
    /// The receives were flushed before the connection was established. The connection manager's
    /// event has the reason, and follows.
    flushed: bool,
    ready_reported: bool,
    closing: Option<Closed>,
    deadline: Option<Nanos>,
    end_reported: bool,
    /// The last poll left completions, because `events` was full.
    more: bool,
    work_requests: HostWorkRequests,
}

impl RdmaHost {
    pub(super) fn new(
        shared: Arc<HostShared>,
        link: Arc<Link>,
        wakes: EventSet,
        memory: Rc<RingMemory>,
        options: RdmaHostOptions,
    ) -> Self {
        Self {
            shared,
            link,
            wakes,
            options,
            lane: None,
            memory,
            key_slot: 0,
            batch: Batch::new(BATCH),
            commands: Vec::new(),
            waiting: VecDeque::new(),
            local: VecDeque::new(),
            in_capsule_bytes: 0,
            established: false,
            flushed: false,
            ready_reported: false,
            closing: None,
            deadline: None,
            end_reported: false,
            more: false,
            work_requests: HostWorkRequests::default(),
        }
    }

    /// The queue pair number (QPN), while there is a queue pair.
    pub fn qp(&self) -> Option<u32> {
        self.lane.as_ref().map(|(lane, _)| lane.number())
    }

    fn news(&mut self, now: Nanos) {
        while let Some(news) = self.link.take() {
            match news {
                QueueMessage::Endpoint(made) => {
                    let (endpoint, key_slot, id) = *made;
                    if self.closing.is_some() {
                        self.shared
                            .mailbox
                            .send(ManagerRequest::Done(id, Some(endpoint)));
                        continue;
                    }
                    self.key_slot = key_slot;
                    match self.adopt(endpoint, id) {
                        Ok(()) => self.shared.mailbox.send(ManagerRequest::Ready(id)),
                        Err(why) => {
                            self.shared.mailbox.send(ManagerRequest::Done(id, None));
                            self.end(Closed::Broken(why), now);
                        }
                    }
                }
                QueueMessage::Established => {
                    self.established = true;
                    // It was connected for a moment.
                    if self.flushed {
                        self.end(broken(WcStatus::WorkRequestFlushed), now);
                    }
                }
                QueueMessage::Again => self.destroy(),
                QueueMessage::Ended(why) => self.end(why, now),
            }
        }
    }

    fn adopt(&mut self, endpoint: Endpoint, id: CmId) -> Result<(), String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let entries = u32::from(self.options.entries);
        let messages = self
            .memory
            .messages
            .acquire(send_entries(self.options.entries) as usize * Sqe::SIZE);
        let headers = self.memory.headers.acquire(entries as usize * Cqe::SIZE);
        let none = "no memory for another queue is left: make the dialer for more";
        let config = LaneConfig {
            index: 0,
            key_slot: self.key_slot,
            messages: messages.ok_or(none)?,
            message_bytes: Sqe::SIZE as u32,
            recv: Some(RecvConfig {
                headers: headers.ok_or(none)?,
                header_bytes: Cqe::SIZE as u32,
                entries,
                data_bytes: 0,
            }),
        };
        let mut lane = Lane::new(endpoint, config).map_err(|error| text(&error))?;
        let receives = lane.post_recv(None).map_err(|error| text(&error))?;
        self.work_requests.receives += receives as u64;
        self.work_requests.receive_doorbells += 1;
        let completions = lane.queues().cq().fd();
        self.wakes
            .add(completions, 1, Interest::READ)
            .map_err(|error| text(&error))?;
        self.lane = Some((lane, id));
        Ok(())
    }

    fn end(&mut self, why: Closed, now: Nanos) {
        if self.closing.is_some() {
            return;
        }
        self.closing = Some(why);
        self.deadline = Some(now + self.options.drain_timeout);
        if let Some((lane, _)) = &mut self.lane
            && let Err(error) = lane.drain()
        {
            tracing::debug!(%error, "cannot flush a queue pair; destroying it");
        }
    }

    /// Gives an idle queue pair to the management thread, which destroys it, and destroys any other
    /// here.
    fn destroy(&mut self) {
        self.flushed = false;
        let Some((lane, id)) = self.lane.take() else {
            return;
        };
        let _ = self.wakes.delete(lane.queues().cq().fd());
        let endpoint = match lane.retire() {
            Ok(endpoint) => Some(endpoint),
            Err(lane) => {
                drop(lane);
                None
            }
        };
        self.shared.mailbox.send(ManagerRequest::Done(id, endpoint));
    }

    /// Posts the SEND of a command capsule. Returns false if the send queue has no room.
    fn start(&mut self, cid: u16) -> bool {
        let Some((lane, _)) = &mut self.lane else {
            return false;
        };
        if lane.room() == 0 {
            return false;
        }
        let Some(Some(command)) = self.commands.get_mut(usize::from(cid)) else {
            return true;
        };
        let in_capsule = command
            .write
            .as_ref()
            .filter(|data| !data.is_empty() && data.len() <= self.in_capsule_bytes as usize);
        let sent = match in_capsule {
            Some(data) => {
                let length = data.len() as u32;
                command.sqe.set_sgl(Sgl::InCapsule { offset: 0, length });
                lane.send_with(command.sqe.as_bytes(), None, Some(data.clone()))
            }
            None => {
                let data = command.write.as_ref().or(command.read.as_ref());
                match keyed(data, self.key_slot) {
                    Some(sgl) => {
                        command.sqe.set_sgl(sgl);
                        lane.send(command.sqe.as_bytes(), None);
                        Ok(())
                    }
                    None => Err(nacre_transport_rdma_verbs::NotRegistered {
                        len: data.map_or(0, |data| data.len()),
                    }),
                }
            }
        };
        if sent.is_err()
            && let Some(command) = self.commands[usize::from(cid)].take()
        {
            // Memory that this device does not know.
            self.local.push_back(HostEvent::Completion {
                cqe: Cqe::new(cid, StatusCode::DATA_TRANSFER_ERROR),
                read: command.read,
                transferred: 0,
            });
        }
        true
    }

    fn completed(&mut self, done: Completion, events: &mut Vec<HostEvent>, now: Nanos) {
        let Some((lane, _)) = &mut self.lane else {
            return;
        };
        let wc = *done.wc();
        let mut answer = None;
        if done.is_recv() {
            if let Some(message) = lane.received(&done)
                && wc.byte_len as usize == Cqe::SIZE
            {
                answer = Cqe::read_from_bytes(message.header()).ok();
            }
        } else {
            lane.sent(&done);
        }
        if !wc.status.is_success() {
            if self.closing.is_none() && wc.status != WcStatus::WorkRequestFlushed {
                tracing::warn!(
                    status = wc.status.name(),
                    vendor_error = wc.vendor_error,
                    qp = wc.qp,
                    "RDMA request failed: {}; {}",
                    wc.status.meaning(),
                    wc.status.remedy()
                );
            }
            // The receives of a refused connection come back before the refusal event, which has
            // the reason and decides about another attempt. The event always follows: an attempt
            // has a time limit.
            if !self.established && wc.status == WcStatus::WorkRequestFlushed {
                self.flushed = true;
                return;
            }
            return self.end(broken(wc.status), now);
        }
        if !done.is_recv() {
            return;
        }
        let Some(cqe) = answer else {
            let why = format!("completion of {} bytes; one has 16", wc.byte_len);
            return self.end(Closed::Protocol(why), now);
        };
        let place = self.commands.get_mut(usize::from(cqe.cid()));
        let Some(command) = place.and_then(Option::take) else {
            let why = format!(
                "completion of command {}, which is not outstanding",
                cqe.cid()
            );
            return self.end(Closed::Protocol(why), now);
        };
        let success = cqe.status().is_success();
        let read = command.read;
        let transferred = read
            .as_ref()
            .filter(|_| success)
            .map_or(0, |read| read.len() as u32);
        events.push(HostEvent::Completion {
            cqe,
            read,
            transferred,
        });
    }

    fn post(&mut self, now: Nanos) {
        // A queue pair that has ended returns new requests at once.
        if self.flushed {
            return;
        }
        while let Some(&cid) = self.waiting.front() {
            if !self.start(cid) {
                break;
            }
            self.waiting.pop_front();
        }
        let Some((lane, _)) = &mut self.lane else {
            return;
        };
        if !self.waiting.is_empty() || lane.needs_signal() {
            lane.signal_last();
        }
        let posted = lane
            .post_recv(None)
            .and_then(|receives| Ok((receives, lane.post()?)));
        match posted {
            Ok((receives, sends)) => {
                let counts = &mut self.work_requests;
                counts.receives += receives as u64;
                counts.receive_doorbells += u64::from(receives > 0);
                counts.sends += sends as u64;
                counts.send_doorbells += u64::from(sends > 0);
            }
            Err(error) => self.end(Closed::Broken(error.to_string()), now),
        }
    }
}

fn broken(status: WcStatus) -> Closed {
    let (meaning, remedy) = (status.meaning(), status.remedy());
    Closed::Broken(format!(
        "Work completion error: {status}: {meaning}; {remedy}"
    ))
}

/// The keyed SGL descriptor of a command's data; `None` if the buffer is not registered with the
/// device.
fn keyed(data: Option<&Buf>, key_slot: usize) -> Option<Sgl> {
    let Some(data) = data else {
        return Some(Sgl::Keyed {
            address: 0,
            length: 0,
            key: 0,
            invalidate: false,
        });
    };
    Some(Sgl::Keyed {
        address: data.as_ptr().addr() as u64,
        length: data.len() as u32,
        key: MrKey::from_bits(data.key(key_slot)?).rkey,
        invalidate: false,
    })
}

impl HostTransport for RdmaHost {
    fn submit(&mut self, command: HostCommand) {
        let cid = command.sqe.cid();
        let at = usize::from(cid);
        if at >= self.commands.len() {
            self.commands.resize_with(at + 1, || None);
        }
        assert!(
            self.commands[at].is_none(),
            "command identifier {cid} is in use"
        );
        self.commands[at] = Some(command);
        // One that came too late waits to be reclaimed.
        if self.closing.is_some() || !self.established {
            return;
        }
        if !self.waiting.is_empty() || !self.start(cid) {
            self.waiting.push_back(cid);
        }
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<HostEvent>, limit: usize) {
        let end = events.len() + limit;
        self.more = false;
        self.news(now);
        if self.established && !self.ready_reported && self.closing.is_none() && events.len() < end
        {
            self.ready_reported = true;
            events.push(HostEvent::Ready);
        }
        if self.closing.is_none() {
            self.post(now);
        }
        let mut drained = true;
        while let Some((lane, _)) = &self.lane {
            let room = end - events.len();
            if room == 0 {
                (self.more, drained) = (true, false);
                break;
            }
            match lane.queues().clone().poll(&mut self.batch, room) {
                Ok(0) => break,
                Ok(_) => {
                    while let Some(done) = self.batch.next() {
                        self.completed(done, events, now);
                    }
                }
                Err(error) => {
                    self.end(Closed::Broken(error.to_string()), now);
                    self.deadline = Some(now);
                    break;
                }
            }
        }
        while events.len() < end
            && let Some(event) = self.local.pop_front()
        {
            events.push(event);
        }
        if self.closing.is_none() {
            return self.post(now);
        }
        let idle = self.lane.as_ref().is_none_or(|(lane, _)| lane.is_idle());
        let late = self.deadline.is_some_and(|deadline| now >= deadline);
        if (idle && drained) || late {
            self.destroy();
            self.link.abandoned.store(true, Ordering::Release);
            if !self.end_reported && events.len() < end {
                self.end_reported = true;
                let why = self.closing.clone().unwrap_or(Closed::Local);
                events.push(HostEvent::Closed(why));
            }
        }
    }

    fn set_in_capsule_bytes(&mut self, bytes: u32) {
        self.in_capsule_bytes = bytes;
    }

    fn reclaim(&mut self) -> Option<HostCommand> {
        // As long as there is a queue pair the controller may still use the memory.
        if self.closing.is_none() || self.lane.is_some() {
            return None;
        }
        while let Some(place) = self.commands.pop() {
            if place.is_some() {
                return place;
            }
        }
        None
    }

    fn close(&mut self) {
        if self.closing.is_none() {
            self.closing = Some(Closed::Local);
        }
        self.link.abandoned.store(true, Ordering::Release);
        self.destroy();
    }

    fn arm(&mut self, _now: Nanos) -> Idle {
        if self.end_reported {
            return Idle::Quiet;
        }
        let unposted =
            !self.waiting.is_empty() && self.lane.as_ref().is_some_and(|(l, _)| l.room() > 0);
        if self.more || unposted || !self.local.is_empty() || !self.link.news().is_empty() {
            return Idle::Busy;
        }
        if let Some((lane, _)) = &self.lane {
            lane.queues().cq().disarm();
            if lane.queues().cq().arm().is_err() {
                return Idle::Busy;
            }
        }
        match (&self.closing, self.deadline) {
            (Some(_), Some(deadline)) if self.lane.is_some() => Idle::Until(deadline),
            (Some(_), _) => Idle::Busy,
            (None, _) => Idle::Quiet,
        }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wakes.as_fd())
    }

    fn device(&self) -> Option<&str> {
        let (lane, _) = self.lane.as_ref()?;
        Some(&lane.queues().domain().attributes().name)
    }

    fn work_requests(&self) -> HostWorkRequests {
        self.work_requests
    }

    fn watch_in(&mut self, set: &EventSet) -> std::io::Result<()> {
        set.add(&self.link.wake, 0, Interest::READ)?;
        self.wakes = set.share()?;
        Ok(())
    }

    fn leave(&mut self, set: &EventSet) {
        // The manager's thread may hold it for longer.
        let _ = set.delete(&self.link.wake);
        if let Some((lane, _)) = &self.lane {
            let _ = set.delete(lane.queues().cq().fd());
        }
    }
}

impl Drop for RdmaHost {
    fn drop(&mut self) {
        self.close();
        // Queue pairs that were on their way.
        while let Some(news) = self.link.take() {
            if let QueueMessage::Endpoint(made) = news {
                let (endpoint, _, id) = *made;
                self.shared
                    .mailbox
                    .send(ManagerRequest::Done(id, Some(endpoint)));
            }
        }
    }
}
