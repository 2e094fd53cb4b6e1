//! One io_uring with its table of slots, one per I/O in the kernel. The only file of this crate
//! with `unsafe` code.
//!
//! ```text
//!   channel.rs ──Command──▶ Ring::start ──SQE──▶ kernel
//!        ▲                     │ slots[i]: buffers, iovecs, owned until the CQE is there
//!        └────(Key, result)── Ring::reap ◀──CQE──┘
//! ```
//!
//! All `unsafe` code relies on one invariant: **a slot owns all memory that its SQE points to until
//! the kernel has posted that SQE's CQE.** Two functions empty a slot. [`Ring::remove`] panics
//! while the kernel uses it. `Drop` waits for the kernel, and after a time limit leaks the slots.
//!
//! Sleep: an eventfd is registered with the ring. With deferred task work, the kernel signals it as
//! soon as such work is queued, before it posts the CQE. While the reactor polls, the ring's flag
//! `IORING_CQ_EVENTFD_DISABLED` disables the signal. [`Ring::arm`] clears the flag with a full
//! fence, and the poll after it enters the kernel unconditionally. So each completion is found by
//! that poll or signals the eventfd.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use io_uring::squeue::{Entry, Flags as SqeFlags};
use io_uring::types::Fd;
use io_uring::{IoUring, Probe, opcode};
use nacre_bdev::Extents;
use nacre_hugepages::{Buf, Pool};
use rustix::event::EventfdFlags;

use crate::RingOptions;
use crate::command::{Command, Parts, discard};
use crate::setup::set_up;

/// Longest time that dropping a ring waits for the kernel. A healthy device completes in
/// milliseconds, a failing one after its driver's timeout, often 30 s: too long to block a reactor.
const DROP_PATIENCE: Duration = Duration::from_secs(5);
/// Completions taken from the ring per call, in an array on the stack.
pub(crate) const REAP_BATCH: usize = 32;
/// Marks the completion of a cancel request; the rest of the word names the cancelled operation.
const CANCEL: u64 = 1 << 63;
/// `IORING_ENTER_GETEVENTS`, which also runs deferred task work.
const ENTER_GETEVENTS: u32 = 1;
/// The most regions that `IORING_REGISTER_BUFFERS` takes, and the size of one.
const MAX_FIXED_BUFFERS: usize = 1 << 14;
const MAX_FIXED_BUFFER_LEN: usize = 1 << 30;

/// Index of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key(u32);

impl Key {
    /// No slot. Fills the result array before it is written.
    pub(crate) const NONE: Self = Self(u32::MAX);
}

/// Features of the ring that the kernel granted.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    /// The set-up flags that were accepted.
    pub mode: &'static str,
    pub fixed_file: bool,
    /// Number of registered regions, or the reason why none is registered.
    pub fixed_buffers: Result<usize, String>,
    pub discard: bool,
}

/// Result of checking an I/O's buffers for direct I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Staged {
    InPlace,
    /// The I/O uses an aligned buffer of the pool. This number of bytes was copied into it.
    Copied(usize),
    /// The pool has no free buffer at the moment.
    NoBuffer,
    /// The pool has no buffers of the required size.
    Impossible,
}

struct Slot<T> {
    data: Extents,
    /// The aligned buffer in place of `data`, if `data` are not aligned for direct I/O.
    bounce: Option<Buf>,
    /// The kernel reads this array while it imports a vectored request.
    iov: [libc::iovec; 2],
    task: Option<T>,
    /// Differs between uses of the slot, so that a late cancel request matches no operation.
    generation: u32,
    in_kernel: bool,
}

pub(crate) struct Ring<T> {
    uring: ManuallyDrop<IoUring>,
    slots: ManuallyDrop<Box<[Slot<T>]>>,
    free: Vec<u32>,
    in_kernel: usize,
    wake: OwnedFd,
    armed: bool,
    enter_failed: bool,
    facts: Facts,
    pool: Pool,
    /// The open file that the entries refer to.
    file: Arc<File>,
    name: String,
}

impl<T> Ring<T> {
    /// Sets up a ring for `file`. Only the calling thread may use it afterwards. The error names
    /// the failed call.
    pub(crate) fn open(
        name: &str,
        file: Arc<File>,
        block_device: bool,
        pool: &Pool,
        options: &RingOptions,
    ) -> Result<Self, (String, io::Error)> {
        let depth = options.depth;
        let (uring, mode) = set_up(depth, options.defer_taskrun)?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| ("eventfd()".to_owned(), e.into()))?;
        let submitter = uring.submitter();
        submitter
            .register_eventfd(wake.as_raw_fd())
            .map_err(|e| ("io_uring_register(IORING_REGISTER_EVENTFD)".to_owned(), e))?;
        let fixed_file = submitter.register_files(&[file.as_raw_fd()]).is_ok();
        let fixed_buffers = if options.registered_buffers {
            register_regions(&uring, pool)
        } else {
            Err("switched off by configuration".to_owned())
        };
        if let Err(why) = &fixed_buffers {
            tracing::debug!(
                bdev = name,
                why,
                "I/O buffers are not registered with io_uring"
            );
        }
        let blank = || Slot {
            data: Extents::new(),
            bounce: None,
            iov: [libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: 0,
            }; 2],
            task: None,
            generation: 0,
            in_kernel: false,
        };
        let mut ring = Self {
            uring: ManuallyDrop::new(uring),
            slots: ManuallyDrop::new((0..depth).map(|_| blank()).collect()),
            free: (0..depth).rev().collect(),
            in_kernel: 0,
            wake,
            armed: false,
            enter_failed: false,
            facts: Facts {
                mode,
                fixed_file,
                fixed_buffers,
                discard: false,
            },
            pool: pool.clone(),
            file,
            name: name.to_owned(),
        };
        ring.uring.completion().disable_eventfd();
        ring.facts.discard = block_device && ring.probe_discard();
        Ok(ring)
    }

    pub(crate) fn facts(&self) -> &Facts {
        &self.facts
    }

    pub(crate) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Takes a free slot.
    ///
    /// # Panics
    /// When no slot is free: check [`Ring::is_full`] first.
    pub(crate) fn insert(&mut self, task: T, data: Extents) -> Key {
        let index = self
            .free
            .pop()
            .expect("a ring that is not full has a free slot");
        let slot = &mut self.slots[index as usize];
        slot.data = data;
        slot.task = Some(task);
        Key(index)
    }

    pub(crate) fn task(&mut self, key: Key) -> &mut T {
        self.slots[key.0 as usize]
            .task
            .as_mut()
            .expect("a key names a slot in use")
    }

    /// Finds a used slot whose task matches.
    pub(crate) fn find(&self, fits: impl Fn(&T) -> bool) -> Option<Key> {
        let at = self
            .slots
            .iter()
            .position(|s| s.task.as_ref().is_some_and(&fits))?;
        Some(Key(at as u32))
    }

    /// Empties a slot and returns its task and buffers.
    ///
    /// # Panics
    ///
    /// If the kernel still uses the slot's buffers.
    pub(crate) fn remove(&mut self, key: Key) -> (T, Extents) {
        let slot = &mut self.slots[key.0 as usize];
        assert!(
            !slot.in_kernel,
            "a buffer the kernel may still touch cannot be taken back"
        );
        slot.bounce = None;
        let task = slot.task.take().expect("a key names a slot in use");
        self.free.push(key.0);
        (task, std::mem::take(&mut slot.data))
    }

    /// Makes the slot's buffers usable for direct I/O: addresses are multiples of `memory`, lengths
    /// multiples of `offset` (both powers of two). Copies data of a write now. Allocates a bounce
    /// buffer only if the parameter `may` is true.
    pub(crate) fn stage(
        &mut self,
        key: Key,
        len: usize,
        (memory, offset): (u32, u32),
        write: bool,
        may: bool,
    ) -> Staged {
        let slot = &mut self.slots[key.0 as usize];
        assert!(!slot.in_kernel, "staged before it is started");
        let fit = |b: &Buf| {
            b.as_ptr().addr() & (memory as usize - 1) == 0 && b.len() & (offset as usize - 1) == 0
        };
        if slot.bounce.is_some() {
            return Staged::Copied(0);
        }
        if slot.data.iter().all(fit) {
            return Staged::InPlace;
        }
        // Buffers of every pool class start on a multiple of 512. Only a larger alignment needs
        // slack.
        let slack = if memory > 512 { memory as usize } else { 0 };
        if len + slack > self.pool.max_len() {
            return Staged::Impossible;
        }
        let whole = may.then(|| self.pool.acquire(len + slack)).flatten();
        let Some(whole) = whole else {
            return Staged::NoBuffer;
        };
        let skew = whole.as_ptr().addr().next_multiple_of(memory as usize) - whole.as_ptr().addr();
        if skew > slack {
            return Staged::Impossible;
        }
        let mut bounce = if slack == 0 {
            whole
        } else {
            whole.slice(skew, len)
        };
        bounce.truncate(len);
        if write {
            let mut at = 0;
            for buf in &slot.data {
                let n = buf.len().min(len - at);
                copy_bytes(&buf[..n], bounce.as_ptr().wrapping_add(at).cast_mut());
                at += n;
            }
        }
        slot.bounce = Some(bounce);
        Staged::Copied(if write { len } else { 0 })
    }

    /// Copies data of a read from the bounce buffer, if one was used, to the I/O's own buffers.
    /// Returns the number of copied bytes.
    pub(crate) fn unstage(&mut self, key: Key, len: usize) -> usize {
        let slot = &mut self.slots[key.0 as usize];
        assert!(!slot.in_kernel, "unstaged after its completion");
        let Some(bounce) = slot.bounce.take() else {
            return 0;
        };
        let mut at = 0;
        for buf in &slot.data {
            let n = buf.len().min(len - at);
            copy_bytes(&bounce[at..at + n], buf.as_ptr().cast_mut());
            at += n;
        }
        at
    }

    /// Queues `command` for the slot. [`Ring::enter`] submits it.
    pub(crate) fn start(&mut self, key: Key, command: Command) {
        let entry = self.entry(key, command);
        let slot = &mut self.slots[key.0 as usize];
        assert!(!slot.in_kernel, "one command at a time per slot");
        slot.in_kernel = true;
        slot.generation = slot.generation.wrapping_add(1) & 0x7fff_ffff;
        let entry = entry.user_data(u64::from(slot.generation) << 32 | u64::from(key.0));
        self.in_kernel += 1;
        // SAFETY: the entry points at nothing, or into buffers and iovecs that the slot owns. The
        // slots are on the heap and do not move; `remove`, `stage` and `unstage` refuse while
        // `in_kernel`, which is set here and cleared by `reap` when the kernel is done; `Drop`
        // waits or leaks. The buffers' memory is written by the kernel although the handle may be
        // shared: that is what `Buf::as_ptr` is for.
        let pushed = unsafe { self.uring.submission().push(&entry) };
        // One command and one cancel per slot, and the ring has two entries per slot.
        pushed.expect("the submission queue has room for every slot");
    }

    /// Requests the kernel to cancel the slot's command. Returns false if the kernel has no command
    /// of the slot, or if the submission queue is full.
    pub(crate) fn cancel(&mut self, key: Key) -> bool {
        let slot = &self.slots[key.0 as usize];
        if !slot.in_kernel {
            return false;
        }
        let target = u64::from(slot.generation) << 32 | u64::from(key.0);
        let entry = opcode::AsyncCancel::new(target)
            .build()
            .user_data(CANCEL | target);
        // SAFETY: a cancel request points at nothing.
        unsafe { self.uring.submission().push(&entry) }.is_ok()
    }

    /// Submits all queued entries and runs pending task work, in one system call. Skips the call if
    /// neither exists.
    pub(crate) fn enter(&mut self) {
        let submission = self.uring.submission();
        let (queued, taskrun) = (submission.len(), submission.taskrun());
        let overflow = submission.cq_overflow();
        drop(submission);
        // After `arm` enter unconditionally: a weakly ordered machine may show the flag late.
        let events = taskrun || overflow || self.armed && self.in_kernel > 0;
        if queued == 0 && !events {
            return;
        }
        if let Err(error) = self.enter_kernel(queued, events) {
            self.note_enter_failure(error);
        }
    }

    /// Stores available completions in `out` and returns their number.
    pub(crate) fn reap(&mut self, out: &mut [(Key, i32)]) -> usize {
        let mut found = 0;
        let mut completion = self.uring.completion();
        while found < out.len() {
            let Some(cqe) = completion.next() else { break };
            let name = cqe.user_data();
            if name & CANCEL != 0 {
                continue;
            }
            let index = name as u32;
            let slot = &mut self.slots[index as usize];
            assert!(
                slot.in_kernel && u64::from(slot.generation) == name >> 32,
                "the kernel completes a command once"
            );
            slot.in_kernel = false;
            self.in_kernel -= 1;
            out[found] = (Key(index), cqe.result());
            found += 1;
        }
        found
    }

    /// Entries that are queued and not yet submitted to the kernel.
    pub(crate) fn queued(&mut self) -> usize {
        self.uring.submission().len()
    }

    /// Makes completions signal the wake descriptor, until [`Ring::disarm`].
    pub(crate) fn arm(&mut self) {
        self.uring.completion().enable_eventfd();
        // The kernel queues the completion and then reads the flag. `arm` clears the flag and then
        // looks for completions. The fences make one of the two see the other.
        fence(Ordering::SeqCst);
        self.armed = true;
    }

    pub(crate) fn disarm(&mut self) {
        if std::mem::take(&mut self.armed) {
            self.uring.completion().disable_eventfd();
            // Usually the eventfd is already empty; the error is ignored.
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
    }

    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    fn entry(&mut self, key: Key, command: Command) -> Entry {
        let (fd, flags) = if self.facts.fixed_file {
            (Fd(0), SqeFlags::FIXED_FILE)
        } else {
            (Fd(self.file.as_raw_fd()), SqeFlags::empty())
        };
        let slot = &mut self.slots[key.0 as usize];
        let mut parts = Parts::default();
        if let Command::Read { skip, len, .. } | Command::Write { skip, len, .. } = command {
            let (count, region) = slot.gather(&self.pool, skip, len);
            let fixed = self.facts.fixed_buffers.is_ok();
            let region = region.filter(|_| fixed).map(|at| at as u16);
            parts = Parts {
                list: &slot.iov[..count],
                region,
            };
        }
        command.entry(fd, parts).flags(flags)
    }

    fn enter_kernel(&mut self, queued: usize, events: bool) -> io::Result<usize> {
        let flags = if events { ENTER_GETEVENTS } else { 0 };
        // SAFETY: no argument is passed, and `start` and `cancel` justified each queued entry.
        unsafe {
            self.uring
                .submitter()
                .enter::<libc::sigset_t>(queued as u32, 0, flags, None)
        }
    }

    /// Notes an error of `io_uring_enter`. After a signal, or on a shortage of memory or completion
    /// space, the entries stay queued, and the next turn tries again. Any other error is a bug
    /// here, and the first one of the ring is logged.
    fn note_enter_failure(&mut self, error: io::Error) {
        let passing = [libc::EINTR, libc::EAGAIN, libc::EBUSY];
        let known = error.raw_os_error().is_some_and(|e| passing.contains(&e));
        if !known && !std::mem::replace(&mut self.enter_failed, true) {
            tracing::error!(bdev = self.name, %error, "io_uring_enter failed; retrying");
        }
    }

    /// Returns whether the block device supports the discard command. A kernel before 6.12 reports
    /// the command as unknown. A later one refuses an empty range.
    fn probe_discard(&mut self) -> bool {
        let mut probe = Probe::new();
        let known = self.uring.submitter().register_probe(&mut probe).is_ok()
            && probe.is_supported(opcode::UringCmd16::CODE);
        if !known {
            return false;
        }
        let entry = discard(Fd(self.file.as_raw_fd()), 0, 0).user_data(CANCEL);
        // SAFETY: a discard request points at nothing.
        if unsafe { self.uring.submission().push(&entry) }.is_err() {
            return false;
        }
        if self.uring.submit_and_wait(1).is_err() {
            return false;
        }
        let answer = self.uring.completion().next().map(|cqe| cqe.result());
        answer == Some(-libc::EINVAL)
    }
}

impl<T> Slot<T> {
    /// Describes `len` bytes of the buffers after the first `skip` in `iov`. Returns the number of
    /// parts, and the registered region if a single part lies in one.
    fn gather(&mut self, pool: &Pool, mut skip: usize, len: usize) -> (usize, Option<usize>) {
        let (mut parts, mut left, mut region) = (0, len, None);
        let bufs = match &self.bounce {
            Some(bounce) => std::slice::from_ref(bounce),
            None => self.data.as_slice(),
        };
        for buf in bufs {
            if skip >= buf.len() {
                skip -= buf.len();
                continue;
            }
            let n = left.min(buf.len() - skip);
            let base = buf.as_ptr().wrapping_add(skip).cast_mut().cast();
            self.iov[parts] = libc::iovec {
                iov_base: base,
                iov_len: n,
            };
            region = pool.region_index(buf);
            (parts, left, skip) = (parts + 1, left - n, 0);
            if left == 0 {
                break;
            }
        }
        assert!(
            left == 0,
            "an I/O's length is checked against its buffers when it is taken"
        );
        (parts, region)
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        let start = Instant::now();
        let mut scratch = [(Key(0), 0); REAP_BATCH];
        let mut cancelled = false;
        loop {
            let queued = self.queued();
            if let Err(error) = self.enter_kernel(queued, true) {
                self.note_enter_failure(error);
            }
            while self.reap(&mut scratch) > 0 {}
            if self.in_kernel == 0 || start.elapsed() > DROP_PATIENCE {
                break;
            }
            if !std::mem::replace(&mut cancelled, true) {
                for index in 0..self.slots.len() as u32 {
                    self.cancel(Key(index));
                }
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        // The kernel destroys a closed ring asynchronously. Release the file now, so that the next
        // open or unmount does not fail with EBUSY.
        let _ = self.uring.submitter().unregister_files();
        let _ = self.uring.submitter().unregister_buffers();
        // SAFETY: neither field is used again. Closing the ring makes the kernel cancel I/O without
        // waiting for its end, so the slots are kept until their completions arrive.
        let slots = unsafe {
            ManuallyDrop::drop(&mut self.uring);
            ManuallyDrop::take(&mut self.slots)
        };
        if self.in_kernel > 0 {
            abandon(slots, &self.name, self.in_kernel);
        }
    }
}

/// Leaks buffers that the kernel may still write to.
fn abandon<T>(slots: Box<[Slot<T>]>, bdev: &str, count: usize) {
    let held = slots
        .iter()
        .filter(|s| s.in_kernel)
        .flat_map(|s| s.data.iter().chain(&s.bounce));
    let bytes: usize = held.map(|b| b.len()).sum();
    tracing::error!(
        bdev,
        count,
        bytes,
        waited_s = DROP_PATIENCE.as_secs(),
        "the kernel did not finish these I/Os: their buffers are lost until the process ends"
    );
    std::mem::forget(slots);
}

/// Registers the memory of the core's pool, so that the kernel need not look up and pin its pages
/// for every I/O.
fn register_regions(uring: &IoUring, pool: &Pool) -> Result<usize, String> {
    let regions: Vec<libc::iovec> = pool
        .regions()
        .iter()
        .map(|r| libc::iovec {
            iov_base: r.as_ptr().cast(),
            iov_len: r.len(),
        })
        .collect();
    if regions.is_empty() {
        return Err("the pool has no region to register".to_owned());
    }
    if regions.len() > MAX_FIXED_BUFFERS {
        return Err(format!(
            "{} regions, {MAX_FIXED_BUFFERS} at most",
            regions.len()
        ));
    }
    if let Some(large) = regions.iter().find(|r| r.iov_len > MAX_FIXED_BUFFER_LEN) {
        return Err(format!(
            "a region of {} bytes, 1 GiB at most",
            large.iov_len
        ));
    }
    // SAFETY: the regions are the memory of `pool`, which the ring holds a handle on.
    unsafe { uring.submitter().register_buffers(&regions) }.map_err(|e| {
        let hint = match e.raw_os_error() {
            Some(libc::ENOMEM) => "; raise the locked-memory limit (`ulimit -l`, LimitMEMLOCK=)",
            _ => "",
        };
        format!("IORING_REGISTER_BUFFERS: {e}{hint}")
    })?;
    Ok(regions.len())
}

/// Copies into the memory of a buffer that this slot owns, in place of the kernel.
fn copy_bytes(from: &[u8], to: *mut u8) {
    // SAFETY: both callers pass the start of at least `from.len()` bytes inside a live `Buf` of the
    // slot, which is not in the kernel. The two are different buffers: one was just acquired. No
    // reference to the target exists: one core owns the pool, and its other handles do not look at
    // the bytes of a read before it completes.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) }
}
