//! One I/O queue of a controller, as a bdev queue: its device is a remote namespace.
//!
//! ```text
//!   Down ─▶ Dialling ─▶ Connecting ─▶ Live
//!    ▲                                  │ connection lost, command too slow, new association
//!    └──────────────────────────────────┘
//! ```
//!
//! An I/O that was taken stays here until the target has answered it for good: what was under way
//! when a connection was lost is sent again, in the order of submission, on the next one. It ends
//! with [`Status::Gone`] when the controller has given up.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Busy, Completion, Done, Extents, Flags, Io, Op, Queue, Status, Token};
use nacre_hugepages::{Buf, Pool};
use nacre_nvmf_wire::commands::io::{
    CopyCommand, CopyFormat, CopyRange0, DatasetManagement, DsmRange, ReadWrite, WriteZeroes,
};
use nacre_nvmf_wire::fabrics::{Connect, ConnectAttributes};
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Fuse, Sgl, Sqe, StatusCode};
use nacre_reactor::{EventSet, Idle, Nanos};
use slab::Slab;
use zerocopy::IntoBytes;

use super::controller::{Link, connect_data};
use super::options::{Dial, HostOptions};
use super::queue::{CommandQueue, Finished};
use crate::transport::Closed;

/// Delay before a lost I/O queue is connected again while its controller lives.
const RECONNECT_DELAY: Duration = Duration::from_millis(100);
/// How often an I/O is sent again because of a transient transport error.
const MAX_RESENDS: u8 = 3;
/// How often the queue looks for commands that take too long.
const TIMEOUT_CHECK: Duration = Duration::from_millis(250);

const CONNECT: u64 = u64::MAX;

/// What happened to a queue since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IoStats {
    pub connections: u64,
    pub losses: u64,
    pub resent: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Down { retry_at: Nanos },
    Dialling { since: Nanos },
    Connecting { since: Nanos },
    Live,
}

/// An I/O that was taken and not completed.
struct Pending {
    token: Token,
    op: Op,
    sqe: Sqe,
    /// Data for the target, kept for sending again.
    write: Option<Buf>,
    /// The new data of a compare-and-write; `write` holds the expected.
    second: Option<Buf>,
    /// Where read data goes, while it is not with the transport.
    read: Option<Buf>,
    /// The caller's buffers, where they are not the command's data.
    extents: Extents,
    /// Commands outstanding for it: two for a compare-and-write.
    parts: u8,
    status: StatusCode,
    resends: u8,
    /// In the transport's hands.
    sent: bool,
    aborted: bool,
    order: u64,
}

/// One I/O queue on one core, connected to one namespace.
pub struct IoQueue {
    options: HostOptions,
    link: Arc<Link>,
    dial: Box<dyn Dial>,
    pool: Pool,
    qid: u16,
    nsid: u32,
    block_size: u32,
    queue: Option<CommandQueue>,
    phase: Phase,
    generation: u64,
    depth: usize,
    pending: Slab<Pending>,
    /// Waiting for the connection or for room in it, in order.
    unsent: VecDeque<usize>,
    completed: VecDeque<Completion>,
    next_order: u64,
    now: Nanos,
    check_at: Nanos,
    stats: IoStats,
    sleepers: EventSet,
    watched: Option<RawFd>,
}

impl IoQueue {
    /// Queue `qid` (from 1) of the controller behind `link`, for namespace `nsid`.
    pub fn new(
        options: HostOptions,
        link: Arc<Link>,
        dial: Box<dyn Dial>,
        pool: Pool,
        (qid, nsid): (u16, u32),
        now: Nanos,
    ) -> std::io::Result<IoQueue> {
        let entries = options.queue_entries.max(2);
        let depth = usize::from(entries) - 1;
        Ok(IoQueue {
            options,
            link,
            dial,
            pool,
            qid,
            nsid,
            block_size: 0,
            queue: None,
            phase: Phase::Down { retry_at: now },
            generation: 0,
            depth,
            pending: Slab::with_capacity(depth),
            unsent: VecDeque::with_capacity(depth),
            completed: VecDeque::with_capacity(depth),
            next_order: 0,
            now,
            check_at: now,
            stats: IoStats::default(),
            sleepers: EventSet::new()?,
            watched: None,
        })
    }

    pub fn is_live(&self) -> bool {
        self.phase == Phase::Live
    }

    pub fn qid(&self) -> u16 {
        self.qid
    }

    pub fn stats(&self) -> IoStats {
        self.stats
    }

    // Life of the connection.

    fn drive(&mut self, now: Nanos) {
        if self.link.has_failed() {
            self.disconnect(now);
            return self.fail_all();
        }
        let generation = self.link.generation();
        if self.queue.is_some() && generation != Some(self.generation) {
            self.disconnect(now);
        }
        match self.phase {
            Phase::Down { retry_at } if now >= retry_at && generation.is_some() => self.start(now),
            Phase::Dialling { since } => {
                if self.queue.as_ref().is_some_and(CommandQueue::is_ready) {
                    self.send_connect(now);
                } else if now.since(since) > self.options.connect_timeout {
                    self.disconnect(now);
                }
            }
            Phase::Connecting { since } if now.since(since) > self.options.connect_timeout => {
                self.disconnect(now);
            }
            Phase::Live if now >= self.check_at => {
                self.check_at = now + TIMEOUT_CHECK;
                let oldest = self.queue.as_ref().and_then(CommandQueue::oldest);
                if oldest.is_some_and(|since| now.since(since) > self.options.io_timeout) {
                    tracing::warn!(qid = self.qid, limit = ?self.options.io_timeout, "a command took too long: resetting the controller");
                    // Only the end of the whole association makes sure that what is stuck there
                    // will not land after what is sent again.
                    self.link.request_reset();
                    self.disconnect(now);
                }
            }
            _ => {}
        }
    }

    fn start(&mut self, now: Nanos) {
        let Some(generation) = self.link.generation() else {
            return;
        };
        let link = self.link.state();
        let Some(namespace) = link.namespaces.get(&self.nsid) else {
            self.phase = Phase::Down {
                retry_at: now + RECONNECT_DELAY,
            };
            return;
        };
        self.block_size = namespace.block_size;
        self.generation = generation;
        match self.dial.dial(self.qid) {
            Ok(transport) => {
                let entries = link.queue_entries.min(self.options.queue_entries);
                let mut queue = CommandQueue::new(transport, entries);
                queue
                    .transport()
                    .set_in_capsule_bytes(link.in_capsule_bytes);
                self.watched = queue.transport().wake_fd();
                if let Some(fd) = self.watched
                    && let Err(error) = self.sleepers.add_raw(fd, 0)
                {
                    tracing::error!(%error, "cannot watch a connection");
                    self.watched = None;
                }
                self.queue = Some(queue);
                self.phase = Phase::Dialling { since: now };
            }
            Err(error) => {
                tracing::warn!(qid = self.qid, %error, "cannot connect an I/O queue");
                self.phase = Phase::Down {
                    retry_at: now + RECONNECT_DELAY,
                };
            }
        }
    }

    fn send_connect(&mut self, now: Nanos) {
        let link = self.link.state();
        let Some(data) = connect_data(&self.pool, &self.options, link.cntlid) else {
            return;
        };
        let mut attributes = ConnectAttributes::empty();
        attributes.set(
            ConnectAttributes::DISABLE_SQ_FLOW_CONTROL,
            self.options.disable_sq_flow_control,
        );
        let connect = Connect {
            qid: self.qid,
            sqsize: link.queue_entries.min(self.options.queue_entries) - 1,
            attributes,
            priority_class: 0,
            kato_ms: 0,
        };
        let sqe = connect.to_sqe(
            0,
            Sgl::Transport {
                length: data.len() as u32,
            },
        );
        let queue = self.queue.as_mut().expect("dialling");
        queue.submit(sqe, Some(data), None, CONNECT, now);
        self.phase = Phase::Connecting { since: now };
    }

    /// Forgets the connection; what was under way waits for the next.
    fn disconnect(&mut self, now: Nanos) {
        let Some(mut queue) = self.queue.take() else {
            return;
        };
        if self.phase == Phase::Live {
            self.stats.losses += 1;
        }
        if let Some(fd) = self.watched.take() {
            // The transport may have closed it already, which took it out of the set.
            let _ = self.sleepers.delete_raw(fd);
        }
        let mut tokens: Vec<(u16, u64)> = queue.outstanding_by_cid().collect();
        queue.transport().close();
        while let Some(command) = queue.transport().reclaim() {
            let cid = command.sqe.cid();
            let Some((_, token)) = tokens.iter().find(|(c, _)| *c == cid) else {
                continue;
            };
            if let Some(pending) = self.pending.get_mut(*token as usize)
                && command.read.is_some()
            {
                pending.read = command.read;
            }
        }
        drop(queue);
        tokens.retain(|(_, token)| *token != CONNECT);
        for (_, token) in tokens {
            let pending = &mut self.pending[token as usize];
            if pending.sent {
                pending.sent = false;
                self.unsent.push_back(token as usize);
                self.stats.resent += 1;
            }
            pending.parts = 0;
            pending.status = StatusCode::SUCCESS;
        }
        let pending = &self.pending;
        self.unsent
            .make_contiguous()
            .sort_unstable_by_key(|i| pending[*i].order);
        self.phase = Phase::Down {
            retry_at: now + RECONNECT_DELAY,
        };
    }

    fn fail_all(&mut self) {
        while let Some(index) = self.unsent.pop_front() {
            self.complete(index, Status::Gone);
        }
    }

    // I/O.

    fn send_unsent(&mut self, now: Nanos) {
        while self.phase == Phase::Live
            && let Some(&index) = self.unsent.front()
        {
            let Some(queue) = &mut self.queue else { return };
            let pending = &mut self.pending[index];
            let needs = if pending.second.is_some() { 2 } else { 1 };
            if queue.room() < needs {
                return;
            }
            self.unsent.pop_front();
            if pending.aborted {
                self.complete(index, Status::Aborted);
                continue;
            }
            if pending.op == Op::Read && pending.read.is_none() {
                // The transport lost it together with the connection: the caller's buffer is gone.
                self.complete(index, Status::DeviceError);
                continue;
            }
            pending.sent = true;
            send(queue, pending, index, now);
        }
    }

    fn finished(&mut self, one: Finished, now: Nanos) {
        let status = one.cqe.status();
        if one.token == CONNECT {
            self.phase = Phase::Live;
            self.stats.connections += 1;
            self.check_at = now + TIMEOUT_CHECK;
            return;
        }
        let index = one.token as usize;
        let pending = &mut self.pending[index];
        pending.parts -= 1;
        if pending.op == Op::Read {
            let wanted = one.read.as_ref().map_or(0, Buf::len);
            pending.read = one.read;
            if status.is_success() && one.transferred as usize != wanted {
                tracing::error!(
                    wanted,
                    got = one.transferred,
                    "the target answered a read with too little data"
                );
                pending.status = StatusCode::DATA_TRANSFER_ERROR;
            }
        }
        // Of a fused pair the half that failed by itself says why.
        if !status.is_success()
            && (pending.status.is_success() || pending.status == StatusCode::ABORTED_FAILED_FUSED)
        {
            pending.status = status;
        }
        if pending.parts > 0 {
            return;
        }
        let transient = pending.status.code() == StatusCode::TRANSIENT_TRANSPORT_ERROR;
        if transient && pending.resends < MAX_RESENDS {
            pending.resends += 1;
            pending.sent = false;
            pending.status = StatusCode::SUCCESS;
            self.stats.resent += 1;
            self.unsent.push_back(index);
            return;
        }
        let status = bdev_status(pending.status);
        self.complete(index, status);
    }

    fn complete(&mut self, index: usize, status: Status) {
        let mut pending = self.pending.remove(index);
        let mut data = std::mem::take(&mut pending.extents);
        match pending.op {
            Op::Read => data.extend(pending.read),
            Op::Write | Op::Compare => data.extend(pending.write),
            Op::CompareAndWrite => data.extend(pending.write.into_iter().chain(pending.second)),
            _ => {}
        }
        self.completed.push_back(Completion {
            token: pending.token,
            status,
            data,
        });
    }

    /// The command of an I/O. `None`: not possible here, or (data of its own) no buffer.
    fn command(&self, io: &Io) -> Result<(Sqe, Option<Buf>), Status> {
        let fua = io.flags.contains(Flags::FUA);
        let rw = |opcode| {
            ReadWrite {
                fua,
                ..ReadWrite::new(io.lba, io.blocks)
            }
            .to_sqe(opcode, 0, self.nsid)
        };
        let small = |bytes: &[u8]| {
            let mut buf = self.pool.acquire(bytes.len()).ok_or(Status::Retry)?;
            buf.bytes_mut().ok_or(Status::Retry)?.copy_from_slice(bytes);
            Ok(Some(buf))
        };
        Ok(match io.op {
            Op::Read => (rw(opcode::READ), None),
            Op::Write => (rw(opcode::WRITE), None),
            Op::Compare | Op::CompareAndWrite => {
                let mut sqe =
                    ReadWrite::new(io.lba, io.blocks).to_sqe(opcode::COMPARE, 0, self.nsid);
                if io.op == Op::CompareAndWrite {
                    sqe.set_fuse(Fuse::First);
                }
                (sqe, None)
            }
            Op::Flush => (Sqe::for_namespace(opcode::FLUSH, 0, self.nsid), None),
            Op::WriteZeroes => {
                let command = WriteZeroes {
                    slba: io.lba,
                    blocks: io.blocks,
                    deallocate: io.flags.contains(Flags::DEALLOCATE),
                    fua,
                    ..WriteZeroes::default()
                };
                (command.to_sqe(0, self.nsid), None)
            }
            Op::Unmap => {
                let command = DatasetManagement {
                    ranges: 1,
                    deallocate: true,
                    ..Default::default()
                };
                (
                    command.to_sqe(0, self.nsid),
                    small(DsmRange::new(io.lba, io.blocks).as_bytes())?,
                )
            }
            Op::Copy => {
                let blocks = u16::try_from(io.blocks - 1).map_err(|_| Status::Unsupported)?;
                let command = CopyCommand {
                    sdlba: io.lba,
                    ranges: 1,
                    format: CopyFormat::Format0,
                    fua,
                    lr: false,
                    read_protection: 0,
                    protection: Default::default(),
                    directive: Default::default(),
                };
                let range = CopyRange0::new(io.source_lba, u32::from(blocks) + 1);
                (command.to_sqe(0, self.nsid), small(range.as_bytes())?)
            }
        })
    }
}

/// Hands an I/O's commands to the queue, which has room for them.
fn send(queue: &mut CommandQueue, pending: &mut Pending, index: usize, now: Nanos) {
    let read = pending.read.take();
    queue.submit(pending.sqe, pending.write.clone(), read, index as u64, now);
    pending.parts = 1;
    if let Some(second) = &pending.second {
        let mut sqe = pending.sqe;
        sqe.opcode = opcode::WRITE;
        sqe.set_fuse(Fuse::Second);
        queue.submit(sqe, Some(second.clone()), None, index as u64, now);
        pending.parts = 2;
    }
}

impl Queue for IoQueue {
    fn submit(&mut self, mut io: Io) -> Result<(), (Busy, Io)> {
        if self.pending.len() >= self.depth {
            return Err((Busy, io));
        }
        let (sqe, own) = match self.command(&io) {
            Ok(command) => command,
            Err(Status::Retry) => return Err((Busy, io)),
            Err(status) => {
                self.completed.push_back(io.complete(status));
                return Ok(());
            }
        };
        let mut data = std::mem::take(&mut io.data).into_iter();
        let (mut write, mut second, mut read) = (own, None, None);
        match io.op {
            Op::Read => read = data.next(),
            Op::Write | Op::Compare => write = data.next(),
            Op::CompareAndWrite => (write, second) = (data.next(), data.next()),
            _ => {}
        }
        let order = self.next_order;
        self.next_order += 1;
        let pending = Pending {
            token: io.token,
            op: io.op,
            sqe,
            write,
            second,
            read,
            extents: data.collect(),
            parts: 0,
            status: StatusCode::SUCCESS,
            resends: 0,
            sent: false,
            aborted: false,
            order,
        };
        let index = self.pending.insert(pending);
        let needs = if self.pending[index].second.is_some() {
            2
        } else {
            1
        };
        match &mut self.queue {
            Some(queue)
                if self.phase == Phase::Live && self.unsent.is_empty() && queue.room() >= needs =>
            {
                let pending = &mut self.pending[index];
                pending.sent = true;
                send(queue, pending, index, self.now);
            }
            _ => self.unsent.push_back(index),
        }
        Ok(())
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        self.now = now;
        self.drive(now);
        self.send_unsent(now);
        if let Some(mut queue) = self.queue.take() {
            let mut lost = None;
            queue.poll(now, |one| {
                if one.token == CONNECT && !one.cqe.status().is_success() {
                    lost = Some(one.cqe.status());
                } else {
                    self.finished(one, now);
                }
            });
            let closed = queue.closed().cloned();
            self.queue = Some(queue);
            if let Some(status) = lost {
                tracing::warn!(qid = self.qid, %status, "an I/O queue was refused");
                self.disconnect(now);
            } else if let Some(why) = closed {
                if why != Closed::Local {
                    tracing::warn!(qid = self.qid, ?why, "an I/O queue was lost");
                }
                self.disconnect(now);
            }
        }
        let mut count = 0;
        while done.has_room()
            && let Some(completion) = self.completed.pop_front()
        {
            done.push(completion);
            count += 1;
        }
        count
    }

    /// An I/O that has not left yet ends at once; one that has is in the target's hands, and is
    /// ended by the loss of its connection at the latest.
    fn abort(&mut self, token: Token) -> bool {
        let Some((index, pending)) = self.pending.iter_mut().find(|(_, p)| p.token == token) else {
            return false;
        };
        if pending.sent {
            return false;
        }
        pending.aborted = true;
        self.unsent.retain(|i| *i != index);
        self.complete(index, Status::Aborted);
        true
    }

    fn inflight(&self) -> usize {
        self.pending.len() + self.completed.len()
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        if !self.completed.is_empty() {
            return Idle::Busy;
        }
        match (&mut self.queue, self.phase) {
            (_, Phase::Down { .. }) => Idle::Until(now + RECONNECT_DELAY),
            (Some(queue), Phase::Live) => {
                let idle = queue.transport().arm(now);
                if self.pending.is_empty() {
                    idle
                } else {
                    idle.and(Idle::Until(self.check_at))
                }
            }
            (Some(queue), _) => queue
                .transport()
                .arm(now)
                .and(Idle::Until(now + RECONNECT_DELAY)),
            (None, _) => Idle::Busy,
        }
    }

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.sleepers.as_raw_fd())
    }
}

/// What a target's status means to whoever uses the namespace as a device.
fn bdev_status(status: StatusCode) -> Status {
    let code = status.code();
    match code {
        StatusCode::SUCCESS => Status::Ok,
        StatusCode::COMPARE_FAILURE => Status::Miscompare,
        StatusCode::UNRECOVERED_READ_ERROR => Status::ReadError,
        StatusCode::WRITE_FAULT => Status::WriteError,
        StatusCode::LBA_OUT_OF_RANGE => Status::OutOfRange,
        StatusCode::CAPACITY_EXCEEDED => Status::NoSpace,
        StatusCode::NAMESPACE_IS_WRITE_PROTECTED => Status::WriteProtected,
        StatusCode::INVALID_OPCODE => Status::Unsupported,
        StatusCode::ABORT_REQUESTED => Status::Aborted,
        StatusCode::COMMAND_INTERRUPTED | StatusCode::NAMESPACE_NOT_READY => Status::Retry,
        StatusCode::INVALID_NAMESPACE_OR_FORMAT => Status::Gone,
        StatusCode::INTERNAL_ERROR | StatusCode::DATA_TRANSFER_ERROR => Status::DeviceError,
        StatusCode::GUARD_CHECK_ERROR => Status::Integrity,
        _ if status.is_path_related() => Status::Gone,
        _ => Status::Nvme {
            sct: status.sct(),
            sc: status.sc(),
            dnr: status.dnr(),
        },
    }
}
