//! One core's queue of a file bdev: checks an I/O, converts it to commands for the ring, and
//! chooses the next command at each completion.
//!
//! ```text
//!            submit                 start                 result
//!   Io ──▶ admit ──ok──▶ stage ──▶ Transfer ──short──▶ Transfer …
//!            │             │          │ all                 └─ end of file ──▶ OutOfRange
//!            │ refused     │ no       ▼
//!            ▼             ▼ buffer  done
//!         finished       waiting    Range ──FUA──▶ Sync ──▶ done
//! ```
//!
//! An accepted I/O occupies a slot of the ring until its completion is pushed: in the kernel,
//! `waiting` for a buffer, or `finished`.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nacre_bdev::{Busy, Completion, Done, Extents, Flags, Io, Op, Queue, Status, Token};
use nacre_hugepages::Pool;
use nacre_reactor::{Idle, Nanos};

use crate::command::Command;
use crate::file::OpenFile;
use crate::ring::{Facts, Key, REAP_BATCH, Ring, Staged};

/// Consecutive "try again" errors of the kernel after which the host gets an error.
const MAX_TRIES: u8 = 100;

pub(crate) struct Channel {
    file: Arc<OpenFile>,
    ring: Ring<Task>,
    /// I/Os that ended without a command to the kernel.
    finished: VecDeque<(Key, Status)>,
    /// I/Os that are not aligned for direct I/O and wait for a bounce buffer, in order of arrival.
    waiting: VecDeque<Key>,
}

#[derive(Debug)]
struct Task {
    token: Token,
    op: Op,
    flags: Flags,
    /// Start of the I/O in the file, in bytes; `length` and `done` are in bytes too.
    offset: u64,
    length: u64,
    done: u64,
    step: Step,
    tries: u8,
    aborting: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Read or write the remaining bytes.
    Transfer,
    /// Deallocate or zero.
    Range(Range),
    /// Flush; also the end of a ranged operation with FUA.
    Sync,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Range {
    Discard,
    Punch,
    Zero,
}

/// The next step after a completed command.
enum Next {
    Done(Status),
    /// Executes the task's step, for the first time or again.
    Start,
}

impl Channel {
    pub(crate) fn open(file: Arc<OpenFile>, pool: &Pool) -> Result<Self, (String, io::Error)> {
        let config = &file.config;
        let depth = config.ring.depth as usize;
        let ring = Ring::open(
            &config.name,
            Arc::clone(&file.file),
            file.block.is_some(),
            pool,
            &config.ring,
        )?;
        Ok(Self {
            file,
            ring,
            finished: VecDeque::with_capacity(depth),
            waiting: VecDeque::with_capacity(depth),
        })
    }

    pub(crate) fn facts(&self) -> &Facts {
        self.ring.facts()
    }

    /// Checks an I/O. `Some`: it completes with this status without a command.
    fn admit(&self, task: &Task, lba: u64, blocks: u32, data: &Extents) -> Option<Status> {
        let moves = matches!(task.op, Op::Read | Op::Write);
        if matches!(task.op, Op::Compare | Op::CompareAndWrite | Op::Copy) {
            return Some(Status::Unsupported);
        }
        if task.op.is_write() && self.file.read_only() {
            return Some(Status::WriteProtected);
        }
        if task.flags.contains(Flags::FUA) && task.op.is_write() && self.file.has_lost() {
            return Some(Status::WriteError);
        }
        if task.op == Op::Flush {
            return self.file.has_lost().then_some(Status::WriteError);
        }
        if lba
            .checked_add(u64::from(blocks))
            .is_none_or(|end| end > self.file.blocks())
        {
            return Some(Status::OutOfRange);
        }
        let room: usize = data.iter().map(|b| b.len()).sum();
        if moves && (room as u64) < task.length {
            // The buffers are too short, an error of the layer above; the blocks are not affected.
            return Some(Status::DeviceError);
        }
        (blocks == 0).then_some(Status::Ok)
    }

    fn first_step(&self, op: Op, flags: Flags) -> Result<Step, Status> {
        let is_block = self.file.block.is_some();
        let punch = self.file.punch.load(Ordering::Relaxed);
        if matches!(op, Op::Unmap | Op::WriteZeroes) && !self.file.supports_ranges() {
            return Err(Status::Unsupported);
        }
        match op {
            Op::Read | Op::Write => Ok(Step::Transfer),
            Op::Flush => Ok(Step::Sync),
            Op::Unmap if self.ring.facts().discard => Ok(Step::Range(Range::Discard)),
            Op::Unmap if punch => Ok(Step::Range(Range::Punch)),
            Op::WriteZeroes if flags.contains(Flags::DEALLOCATE) && punch => {
                Ok(Step::Range(Range::Punch))
            }
            Op::WriteZeroes if is_block || self.file.zero_range.load(Ordering::Relaxed) => {
                Ok(Step::Range(Range::Zero))
            }
            Op::WriteZeroes if punch => Ok(Step::Range(Range::Punch)),
            _ => Err(Status::Unsupported),
        }
    }

    /// Starts the task's step on the ring. Without a bounce buffer, the task waits behind those
    /// that already wait for one.
    fn start(&mut self, key: Key) {
        self.start_in_turn(key, self.waiting.is_empty());
    }

    fn start_in_turn(&mut self, key: Key, first: bool) {
        let task = self.ring.task(key);
        let (op, length) = (task.op, task.length);
        let (offset, done) = (task.offset, task.done);
        let fua = task.flags.contains(Flags::FUA);
        let command = match task.step {
            Step::Transfer => {
                if let Ok(direct) = &self.file.direct {
                    let (memory, offset) = (direct.memory, direct.offset);
                    let write = op == Op::Write;
                    let length = length as usize;
                    match self.ring.stage(key, length, (memory, offset), write, first) {
                        Staged::InPlace => {}
                        Staged::Copied(bytes) => self.file.count_copied(bytes),
                        Staged::NoBuffer => return self.waiting.push_back(key),
                        Staged::Impossible => {
                            return self.finished.push_back((key, Status::DeviceError));
                        }
                    }
                }
                let (skip, len) = (done as usize, (length - done) as usize);
                match op {
                    Op::Read => Command::Read {
                        offset: offset + done,
                        skip,
                        len,
                    },
                    _ => Command::Write {
                        offset: offset + done,
                        skip,
                        len,
                        dsync: fua,
                    },
                }
            }
            Step::Range(Range::Discard) => Command::Discard {
                offset,
                len: length,
            },
            Step::Range(Range::Punch) => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                Command::Fallocate {
                    mode,
                    offset,
                    len: length,
                }
            }
            Step::Range(Range::Zero) => {
                let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
                Command::Fallocate {
                    mode,
                    offset,
                    len: length,
                }
            }
            // `fdatasync` is for files; a block device needs `fsync`.
            Step::Sync => Command::Sync {
                data_only: self.file.block.is_none(),
            },
        };
        self.ring.start(key, command);
    }

    /// Retries tasks that wait for a bounce buffer, in order.
    fn start_waiting(&mut self) {
        for _ in 0..self.waiting.len() {
            let Some(key) = self.waiting.pop_front() else {
                return;
            };
            self.start_in_turn(key, true);
            if self.waiting.back() == Some(&key) {
                // Still no buffer: back to the front, and the others keep their order.
                self.waiting.rotate_right(1);
                return;
            }
        }
    }

    fn advance(&mut self, key: Key, result: i32) -> Next {
        let task = self.ring.task(key);
        if result < 0 {
            return failed(&self.file, task, -result);
        }
        match task.step {
            Step::Transfer if result == 0 => at_end(&self.file, task),
            Step::Transfer => {
                task.done += result as u64;
                task.tries = 0;
                if task.done < task.length {
                    return Next::Start;
                }
                if task.op == Op::Read {
                    let length = task.length as usize;
                    let copied = self.ring.unstage(key, length);
                    self.file.count_copied(copied);
                }
                Next::Done(Status::Ok)
            }
            Step::Range(_) if task.flags.contains(Flags::FUA) => {
                task.step = Step::Sync;
                Next::Start
            }
            Step::Range(_) | Step::Sync => Next::Done(Status::Ok),
        }
    }

    fn complete(&mut self, key: Key, status: Status, done: &mut Done) {
        let (task, data) = self.ring.remove(key);
        done.push(Completion {
            token: task.token,
            status,
            data,
            zero_copy: None,
        });
    }

    fn push_finished(&mut self, done: &mut Done) {
        while done.has_room() {
            let Some((key, status)) = self.finished.pop_front() else {
                return;
            };
            self.complete(key, status, done);
        }
    }
}

impl Queue for Channel {
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        if self.ring.is_full() {
            return Err((Busy, io));
        }
        let shift = self.file.block_shift;
        let mut task = Task {
            token: io.token,
            op: io.op,
            flags: io.flags,
            // A range that does not fit in 64 bits is refused before this value is used.
            offset: io.lba.wrapping_shl(shift),
            length: u64::from(io.blocks) << shift,
            done: 0,
            step: Step::Transfer,
            tries: 0,
            aborting: false,
        };
        let verdict = match self.admit(&task, io.lba, io.blocks, &io.data) {
            Some(status) => Err(status),
            None => self.first_step(io.op, io.flags),
        };
        if let Ok(step) = verdict {
            task.step = step;
        }
        let key = self.ring.insert(task, io.data);
        match verdict {
            Ok(_) => self.start(key),
            Err(status) => self.finished.push_back((key, status)),
        }
        Ok(())
    }

    fn poll(&mut self, _now: Nanos, done: &mut Done) -> usize {
        let before = done.len();
        if !self.waiting.is_empty() {
            self.start_waiting();
        }
        self.ring.enter();
        let mut results = [(Key::NONE, 0); REAP_BATCH];
        while done.has_room() {
            // Every result may be a completion, so reap only as many as fit.
            let want = REAP_BATCH.min(done.room());
            let found = self.ring.reap(&mut results[..want]);
            for &(key, result) in &results[..found] {
                match self.advance(key, result) {
                    Next::Done(status) => self.complete(key, status, done),
                    Next::Start => self.start(key),
                }
            }
            if found < want {
                break;
            }
        }
        self.push_finished(done);
        done.len() - before
    }

    fn abort(&mut self, token: Token) -> bool {
        let Some(key) = self.ring.find(|t| t.token == token) else {
            return false;
        };
        if self.finished.iter().any(|(k, _)| *k == key) {
            return false;
        }
        if let Some(at) = self.waiting.iter().position(|k| *k == key) {
            self.waiting.remove(at);
            self.finished.push_back((key, Status::Aborted));
            return true;
        }
        let task = self.ring.task(key);
        if std::mem::replace(&mut task.aborting, true) {
            return true;
        }
        self.ring.cancel(key)
    }

    fn inflight(&self) -> usize {
        self.ring.len()
    }

    fn arm(&mut self, _now: Nanos) -> Idle {
        if self.ring.len() == 0 {
            return Idle::Quiet;
        }
        if !self.finished.is_empty() || !self.waiting.is_empty() || self.ring.queued() > 0 {
            return Idle::Busy;
        }
        self.ring.arm();
        Idle::Quiet
    }

    fn disarm(&mut self) {
        self.ring.disarm();
    }

    /// Signals only between [`Queue::arm`] and [`Queue::disarm`].
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.ring.wake_fd())
    }
}

/// Handles a transfer of no bytes: the file ends here.
fn at_end(file: &OpenFile, task: &mut Task) -> Next {
    if !file.still_has(task.offset + task.length) {
        return Next::Done(Status::OutOfRange);
    }
    again(task, medium_error(task.op))
}

/// Retries the task, unless it is being aborted or has no retry left.
fn again(task: &mut Task, otherwise: Status) -> Next {
    if task.aborting {
        return Next::Done(Status::Aborted);
    }
    task.tries += 1;
    if task.tries < MAX_TRIES {
        Next::Start
    } else {
        Next::Done(otherwise)
    }
}

fn failed(file: &OpenFile, task: &mut Task, errno: i32) -> Next {
    match errno {
        libc::EAGAIN | libc::EINTR => return again(task, Status::Retry),
        libc::ECANCELED if task.aborting => return Next::Done(Status::Aborted),
        libc::EOPNOTSUPP => {
            if let Some(next) = other_way(file, task) {
                return next;
            }
        }
        // A block device also returns this past its end, and direct I/O across the end of a file.
        libc::EINVAL | libc::ENOSPC | libc::EIO | libc::ENXIO | libc::EFBIG
            if task.step != Step::Sync && !file.still_has(task.offset + task.length) =>
        {
            return Next::Done(Status::OutOfRange);
        }
        _ => {}
    }
    // A write with FUA writes and syncs at once and does not report which of the two failed; a
    // range is synced separately.
    let forced = task.step == Step::Transfer && task.flags.contains(Flags::FUA);
    let synced = task.step == Step::Sync || forced;
    let status = status_of(errno, task.op);
    let lost = matches!(status, Status::WriteError | Status::NoSpace | Status::Gone)
        // ENOLINK does not affect earlier writes, which the device still has.
        && errno != libc::ENOLINK;
    if synced && lost && task.op != Op::Read {
        file.note_lost();
    }
    Next::Done(status)
}

/// Handles an unsupported command: remembers that, and selects another command with the same
/// effect. `None`: there is none.
fn other_way(file: &OpenFile, task: &mut Task) -> Option<Next> {
    let Step::Range(range) = task.step else {
        return None;
    };
    let punch = file.punch.load(Ordering::Relaxed);
    task.step = Step::Range(match (range, task.op) {
        (Range::Zero, _) if punch && file.block.is_none() => {
            file.zero_range.store(false, Ordering::Relaxed);
            Range::Punch
        }
        // A block device that cannot zero by unmapping can zero by writing.
        (Range::Punch, Op::WriteZeroes) if file.block.is_some() => {
            file.punch.store(false, Ordering::Relaxed);
            Range::Zero
        }
        (Range::Discard, _) if punch => Range::Punch,
        (Range::Punch, _) => {
            file.punch.store(false, Ordering::Relaxed);
            return None;
        }
        _ => return None,
    });
    Some(Next::Start)
}

fn medium_error(op: Op) -> Status {
    if op == Op::Read {
        Status::ReadError
    } else {
        Status::WriteError
    }
}

/// The status for an errno of the kernel.
fn status_of(errno: i32, op: Op) -> Status {
    match errno {
        libc::EIO | libc::ENODATA | libc::EUCLEAN | libc::EREMOTEIO => medium_error(op),
        libc::EILSEQ => Status::Integrity,
        libc::ENOSPC | libc::EDQUOT => Status::NoSpace,
        libc::EFBIG => Status::OutOfRange,
        libc::EROFS | libc::EPERM | libc::EBADF if op.is_write() => Status::WriteProtected,
        libc::ENODEV | libc::ENXIO | libc::ESTALE | libc::ESHUTDOWN => Status::Gone,
        // The kernel's transport to the device failed, and the kernel gave up its retries.
        libc::ENOLINK => Status::Gone,
        libc::EOPNOTSUPP | libc::ENOSYS => Status::Unsupported,
        libc::ECANCELED => Status::Retry,
        libc::EAGAIN | libc::EINTR | libc::ENOMEM | libc::ENOBUFS => Status::Retry,
        libc::EBUSY | libc::ETIMEDOUT => Status::Retry,
        _ => Status::DeviceError,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: every errno of the block layer and of file systems has its status.
    #[test]
    fn errnos_have_their_status() {
        let table = [
            (libc::EIO, Op::Read, Status::ReadError),
            (libc::EIO, Op::Flush, Status::WriteError),
            (libc::ENODATA, Op::Read, Status::ReadError),
            (libc::EILSEQ, Op::Read, Status::Integrity),
            (libc::ENOSPC, Op::Write, Status::NoSpace),
            (libc::EDQUOT, Op::WriteZeroes, Status::NoSpace),
            (libc::EROFS, Op::Write, Status::WriteProtected),
            (libc::EBADF, Op::Read, Status::DeviceError),
            (libc::ENODEV, Op::Write, Status::Gone),
            (libc::ENOLINK, Op::Write, Status::Gone),
            (libc::EOPNOTSUPP, Op::Unmap, Status::Unsupported),
            (libc::ENOMEM, Op::Read, Status::Retry),
            (libc::ETIMEDOUT, Op::Read, Status::Retry),
            (libc::EINVAL, Op::Write, Status::DeviceError),
        ];
        for (errno, op, status) in table {
            assert_eq!(status_of(errno, op), status, "errno {errno} of {op:?}");
        }
    }

    /// Goal: a failure counts as lost data only if the data failed to reach the media, not if the
    /// page cache refused it. (A write with FUA does not report which of the two failed.) Method:
    /// the answer of a full file system to each step.
    #[test]
    fn refused_writes_are_not_lost_data() {
        let table = [
            (Step::Range(Range::Zero), Op::WriteZeroes, Flags::FUA, false),
            (Step::Transfer, Op::Write, Flags::empty(), false),
            (Step::Transfer, Op::Write, Flags::FUA, true),
            (Step::Sync, Op::WriteZeroes, Flags::FUA, true),
            (Step::Sync, Op::Flush, Flags::empty(), true),
        ];
        for (step, op, flags, lost) in table {
            let dir = tempfile::tempdir().expect("a directory");
            let device = crate::create(crate::Config {
                size: Some(1 << 20),
                direct: Some(false),
                ..crate::Config::new("full", dir.path().join("disk"))
            });
            let device = device.expect("a file");
            let mut task = Task {
                token: 0,
                op,
                flags,
                offset: 0,
                length: 512,
                done: 0,
                step,
                tries: 0,
                aborting: false,
            };
            let next = failed(&device.file, &mut task, libc::ENOSPC);
            assert!(matches!(next, Next::Done(Status::NoSpace)));
            assert_eq!(device.file.has_lost(), lost, "{op:?} at {step:?}");
        }
    }
}
