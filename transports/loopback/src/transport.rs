//! The target side of the loopback transport: all connections of one core.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;

use nacre_hugepages::Buf;
use nacre_nvmf::transport::{
    Address, CloseWhy, Closed, ConnId, Event, Events, HostEvent, ListenerId, Pools, QueueParams,
    ReqTag, Response, Transport, TransportCaps,
};
use nacre_nvmf_wire::Sqe;
use nacre_nvmf_wire::sqe::Sgl;
use nacre_reactor::{Idle, Nanos};

use crate::error::ConnectError;
use crate::link::{End, Link};

/// Most events of one connection in one poll.
const EVENTS_PER_TURN: usize = 256;

struct Conn {
    link: Rc<RefCell<Link>>,
    listener: ListenerId,
    name: String,
    opened: bool,
    /// True while the connection is on the list of those to poll.
    ready: bool,
    /// The queue is an I/O queue: its data takes the I/O pool's buffers.
    is_io: bool,
}

#[derive(Default)]
struct Slot {
    generation: u32,
    conn: Option<Conn>,
}

/// The connections that the hosts and the transport of one thread share.
pub(crate) struct Core {
    slots: Vec<Slot>,
    free: Vec<u32>,
    count: usize,
    limit: usize,
    ready: VecDeque<u32>,
    wake: Arc<dyn Fn() + Send + Sync>,
}

impl Core {
    pub(crate) fn new(limit: usize, wake: Arc<dyn Fn() + Send + Sync>) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            count: 0,
            limit,
            ready: VecDeque::new(),
            wake,
        }
    }

    pub(crate) fn connections(&self) -> usize {
        self.count
    }

    pub(crate) fn add(
        &mut self,
        link: Rc<RefCell<Link>>,
        listener: ListenerId,
        name: &str,
    ) -> Result<(u32, u32), ConnectError> {
        if self.count >= self.limit {
            return Err(ConnectError::TooMany { limit: self.limit });
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        let name = name.to_owned();
        slot.conn = Some(Conn {
            link,
            listener,
            name,
            opened: false,
            ready: false,
            is_io: false,
        });
        let generation = slot.generation;
        self.count += 1;
        self.notify(index, generation);
        Ok((index, generation))
    }

    /// Puts the connection on the list of those to poll, and wakes the core if the list was empty.
    pub(crate) fn notify(&mut self, index: u32, generation: u32) {
        let slot = &mut self.slots[index as usize];
        if slot.generation != generation {
            return;
        }
        if let Some(conn) = slot.conn.as_mut().filter(|conn| !conn.ready) {
            conn.ready = true;
            if self.ready.is_empty() {
                (self.wake)();
            }
            self.ready.push_back(index);
        }
    }

    fn conn(&mut self, id: ConnId) -> Option<&mut Conn> {
        let slot = self.slots.get_mut(id.index as usize)?;
        if slot.generation == id.generation {
            slot.conn.as_mut()
        } else {
            None
        }
    }

    fn remove(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        if slot.conn.take().is_some() {
            slot.generation = slot.generation.wrapping_add(1);
            self.free.push(index);
            self.count -= 1;
        }
    }
}

/// The result of serving one connection for one turn.
enum Served {
    Idle,
    /// Work may remain: room for events or buffers ran out, or [`EVENTS_PER_TURN`] was reached.
    Again,
    Gone,
}

/// All loopback connections of one core.
pub struct LoopbackTransport {
    caps: TransportCaps,
    core: Rc<RefCell<Core>>,
}

impl LoopbackTransport {
    pub(crate) fn new(caps: TransportCaps, core: Rc<RefCell<Core>>) -> Self {
        Self { caps, core }
    }
}

fn serve(
    caps: &TransportCaps,
    conn: &mut Conn,
    id: ConnId,
    pools: &Pools,
    events: &mut Events,
) -> Served {
    let mut link = conn.link.borrow_mut();
    if !conn.opened {
        if !events.has_room() {
            return Served::Again;
        }
        conn.opened = true;
        let address = Address::Loopback(conn.name.clone());
        events.push(Event::Opened {
            conn: id,
            listener: conn.listener,
            local: address.clone(),
            peer: address,
        });
    }
    // The target can end a connection without the network.
    if link.stalled && link.target != End::Due(Closed::Local) {
        return Served::Idle;
    }
    for _ in 0..EVENTS_PER_TURN {
        if !events.has_room() {
            return Served::Again;
        }
        if let End::Due(_) = &link.target {
            if let End::Due(why) = std::mem::replace(&mut link.target, End::Reported) {
                events.push(Event::Closed { conn: id, why });
            }
            return Served::Gone;
        }
        if let Some((tag, data)) = link.fetched.pop_front() {
            events.push(Event::Fetched {
                conn: id,
                tag,
                data,
            });
            continue;
        }
        let Some(&(cid, sqe)) = link.capsules.front() else {
            return Served::Idle;
        };
        if link.outstanding >= link.entries {
            let why = Closed::Protocol(format!(
                "SQ: a command beyond the {} that the queue has room for",
                link.entries
            ));
            link.end(Closed::Peer, why, false);
            continue;
        }
        let mut data = None;
        if let Ok(Sgl::InCapsule { length, .. }) = sqe.sgl() {
            let limit = if conn.is_io {
                caps.in_capsule_bytes
            } else {
                caps.admin_in_capsule_bytes
            };
            if length > limit {
                let why = Closed::Protocol(format!(
                    "in-capsule data: {length} bytes, more than the {limit} allowed"
                ));
                link.end(Closed::Peer, why, false);
                continue;
            }
            let into = if conn.is_io {
                pools.io.acquire(length as usize)
            } else {
                pools.for_admin(length as usize)
            };
            let Some(mut into) = into else {
                return Served::Again;
            };
            let command = link.commands[usize::from(cid)].as_mut();
            copy(
                command
                    .and_then(|command| command.write.as_deref())
                    .unwrap_or_default(),
                0,
                &mut into,
            );
            data = Some(into);
        }
        link.capsules.pop_front();
        link.outstanding += 1;
        events.push(Event::Capsule {
            conn: id,
            sqe,
            data,
        });
    }
    Served::Again
}

fn copy(from: &[u8], at: usize, into: &mut Buf) {
    let bytes = into
        .bytes_mut()
        .expect("a buffer to be filled has one handle");
    bytes[at..at + from.len()].copy_from_slice(from);
}

impl Transport for LoopbackTransport {
    fn caps(&self) -> &TransportCaps {
        &self.caps
    }

    fn poll(&mut self, _now: Nanos, pools: &Pools, events: &mut Events) -> usize {
        let before = events.len();
        let mut core = self.core.borrow_mut();
        // Each connection once: those that are not done stand at the end of the list again.
        for _ in 0..core.ready.len() {
            let Some(index) = core.ready.pop_front() else {
                break;
            };
            let slot = &mut core.slots[index as usize];
            let id = ConnId {
                index,
                generation: slot.generation,
            };
            let Some(conn) = &mut slot.conn else { continue };
            match serve(&self.caps, conn, id, pools, events) {
                Served::Idle => conn.ready = false,
                Served::Again => core.ready.push_back(index),
                Served::Gone => core.remove(index),
            }
        }
        events.len() - before
    }

    fn fetch(&mut self, conn: ConnId, tag: ReqTag, _sqe: &Sqe, mut into: Buf) {
        let mut core = self.core.borrow_mut();
        let Some(open) = core.conn(conn) else { return };
        let mut link = open.link.borrow_mut();
        if !link.is_open() {
            return;
        }
        let write = link.commands[usize::from(tag.cid)]
            .as_ref()
            .and_then(|command| command.write.as_ref());
        let write = write.filter(|data| data.len() == into.len());
        let Some(write) = write else {
            let why = Closed::Protocol(format!(
                "command {} has no {} bytes to fetch",
                tag.cid,
                into.len()
            ));
            link.end(Closed::Peer, why, false);
            drop(link);
            return core.notify(conn.index, conn.generation);
        };
        copy(write, 0, &mut into);
        link.fetched.push_back((tag, into));
        drop(link);
        core.notify(conn.index, conn.generation);
    }

    fn respond(&mut self, conn: ConnId, response: Response) {
        let mut core = self.core.borrow_mut();
        let Some(open) = core.conn(conn) else { return };
        let mut link = open.link.borrow_mut();
        if !link.is_open() {
            return;
        }
        let Response {
            tag,
            cqe,
            data,
            zero_copy,
            ..
        } = response;
        link.outstanding = link.outstanding.saturating_sub(1);
        let Some(command) = link
            .commands
            .get_mut(usize::from(tag.cid))
            .and_then(Option::take)
        else {
            panic!(
                "a response to command {}, which is not outstanding",
                tag.cid
            );
        };
        let (mut read, mut transferred) = (command.read, 0);
        if let Some(read) = read.as_mut().filter(|_| cqe.status().is_success()) {
            for piece in &data {
                // More than was asked for is cut off, as a host would refuse it.
                let room = read.len() - transferred;
                let piece = &piece[..piece.len().min(room)];
                copy(piece, transferred, read);
                transferred += piece.len();
            }
        }
        if let (Some(read), Some(zero_copy)) = (&mut read, &zero_copy)
            && cqe.status().is_success()
            && let Some(into) = read.bytes_mut()
        {
            let n = zero_copy.len().min(into.len());
            zero_copy.read(0, &mut into[..n]);
            transferred = n;
        }
        link.to_host.push_back(HostEvent::Completion {
            cqe,
            read,
            transferred: transferred as u32,
        });
    }

    fn takes_zero_copy(&self, _conn: ConnId) -> bool {
        true
    }

    fn established(&mut self, conn: ConnId, params: QueueParams) {
        if let Some(open) = self.core.borrow_mut().conn(conn) {
            open.is_io = params.qid != 0;
            let entries = usize::from(params.entries).max(1);
            let mut link = open.link.borrow_mut();
            link.entries = entries;
            link.capsules.reserve(entries);
            link.fetched.reserve(entries);
            link.to_host.reserve(entries + 1);
        }
    }

    fn close(&mut self, conn: ConnId, why: CloseWhy) {
        let mut core = self.core.borrow_mut();
        let Some(open) = core.conn(conn) else { return };
        let drained = why == CloseWhy::Drained;
        let mut link = open.link.borrow_mut();
        link.end(Closed::Peer, Closed::Local, drained);
        if link.stalled && matches!(link.target, End::Due(_)) {
            // The host's end of it, which did not get through, is not waited for.
            link.target = End::Due(Closed::Local);
        }
        drop(link);
        core.notify(conn.index, conn.generation);
    }

    fn flush(&mut self, _now: Nanos) {}

    fn arm(&mut self, _now: Nanos) -> Idle {
        if self.core.borrow().ready.is_empty() {
            Idle::Quiet
        } else {
            Idle::Busy
        }
    }

    fn wake_fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn connections(&self) -> usize {
        self.core.borrow().connections()
    }
}

impl Drop for LoopbackTransport {
    fn drop(&mut self) {
        let core = self.core.borrow();
        for conn in core.slots.iter().filter_map(|slot| slot.conn.as_ref()) {
            let why = Closed::Broken("the target is gone".into());
            conn.link.borrow_mut().end(why, Closed::Local, false);
        }
    }
}
