//! The paths that a device shares with its queues: which controllers show its namespace, and how
//! its I/O is divided among them.
//!
//! Management changes the list and increments the version. The queue of each core compares the
//! version once per turn, and then adopts the list.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nacre_nvmf::host::{Activity, IoStats};
use parking_lot::Mutex;

use crate::select::Policy;
use crate::shared::Shared;

/// Most paths of an attachment and of its devices.
pub const MAX_PATHS: usize = 8;

/// One path of one device.
pub(crate) struct DevicePath {
    pub shared: Arc<Shared>,
    /// The reason why the namespace on this path is not used.
    refusal: Mutex<Option<String>>,
    is_refused: AtomicBool,
    /// Detached: sends no new I/O.
    is_leaving: AtomicBool,
    pub is_preferred: AtomicBool,
    /// Counters of the queues of all cores.
    counters: Mutex<Vec<Arc<Counters>>>,
}

/// The I/O of one core's queue on a path.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// The name of its thread.
    thread: String,
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    write_bytes: AtomicU64,
    failed: AtomicU64,
    resent: AtomicU64,
    /// New I/O is sent on this path now.
    current: AtomicBool,
    /// The counters of the queue, and the RDMA device of its connection.
    activity: Mutex<(Activity, Option<String>)>,
}

/// An open queue of one thread on a path, as of at most 100 ms ago.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathQueue {
    /// The name of its thread.
    pub thread: String,
    /// It sends new I/O on this path now.
    pub is_current: bool,
    /// The RDMA device of its connection, or of the last one.
    pub device: Option<String>,
    pub activity: Activity,
}

/// The I/O of a device on one path: the sum over the queues of all threads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PathIo {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub write_bytes: u64,
    pub failed: u64,
    /// I/O that was sent again, here or on another path.
    pub resent: u64,
    /// Open queues on this path, connected or not.
    pub queues: u64,
    /// Queues that send new I/O on this path now.
    pub current: u64,
}

impl Counters {
    pub(crate) fn publish(&self, stats: &IoStats, device: Option<&str>, is_current: bool) {
        let mut activity = self.activity.lock();
        activity.0 = stats.activity;
        // A queue that connects again keeps the last device.
        if device.is_some() && activity.1.as_deref() != device {
            activity.1 = device.map(str::to_owned);
        }
        drop(activity);
        let all = [
            (&self.reads, stats.reads),
            (&self.read_bytes, stats.read_bytes),
            (&self.writes, stats.writes),
            (&self.write_bytes, stats.write_bytes),
            (&self.failed, stats.failed),
            (&self.resent, stats.resent),
        ];
        for (counter, value) in all {
            counter.store(value, Ordering::Relaxed);
        }
        self.current.store(is_current, Ordering::Relaxed);
    }

    fn add_to(&self, total: &mut PathIo) {
        total.reads += self.reads.load(Ordering::Relaxed);
        total.read_bytes += self.read_bytes.load(Ordering::Relaxed);
        total.writes += self.writes.load(Ordering::Relaxed);
        total.write_bytes += self.write_bytes.load(Ordering::Relaxed);
        total.failed += self.failed.load(Ordering::Relaxed);
        total.resent += self.resent.load(Ordering::Relaxed);
    }
}

impl DevicePath {
    fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            refusal: Mutex::default(),
            is_refused: AtomicBool::new(false),
            is_leaving: AtomicBool::new(false),
            is_preferred: AtomicBool::new(false),
            // The first entry counts queues that were closed.
            counters: Mutex::new(vec![Arc::default()]),
        }
    }

    /// True if new I/O may use this path.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        !self.is_refused.load(Ordering::Acquire) && !self.is_leaving.load(Ordering::Acquire)
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::Acquire)
    }

    pub(crate) fn is_preferred(&self) -> bool {
        self.is_preferred.load(Ordering::Acquire)
    }

    pub(crate) fn refusal(&self) -> Option<String> {
        self.refusal.lock().clone()
    }

    pub(crate) fn set_refusal(&self, why: Option<String>) {
        let mut refusal = self.refusal.lock();
        self.is_refused.store(why.is_some(), Ordering::Release);
        *refusal = why;
    }

    pub(crate) fn is(&self, shared: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.shared, shared)
    }

    /// Creates the counters of a new queue, and adds those of closed queues to the first entry.
    pub(crate) fn count(&self) -> Arc<Counters> {
        let mut all = self.counters.lock();
        let mut closed = PathIo::default();
        all[0].add_to(&mut closed);
        let mut at = 1;
        while at < all.len() {
            if Arc::strong_count(&all[at]) == 1 {
                all.swap_remove(at).add_to(&mut closed);
            } else {
                at += 1;
            }
        }
        let stats = IoStats {
            reads: closed.reads,
            read_bytes: closed.read_bytes,
            writes: closed.writes,
            write_bytes: closed.write_bytes,
            failed: closed.failed,
            resent: closed.resent,
            ..IoStats::default()
        };
        all[0].publish(&stats, None, false);
        let thread = std::thread::current();
        let new = Arc::new(Counters {
            thread: thread.name().unwrap_or_default().to_owned(),
            ..Counters::default()
        });
        all.push(Arc::clone(&new));
        new
    }

    pub(crate) fn queues(&self) -> Vec<PathQueue> {
        let all = self.counters.lock();
        let open = all.iter().filter(|one| Arc::strong_count(one) > 1);
        open.map(|one| {
            let (activity, device) = one.activity.lock().clone();
            PathQueue {
                thread: one.thread.clone(),
                is_current: one.current.load(Ordering::Relaxed),
                device,
                activity,
            }
        })
        .collect()
    }

    pub(crate) fn io(&self) -> PathIo {
        let mut total = PathIo::default();
        for counters in &*self.counters.lock() {
            counters.add_to(&mut total);
            if Arc::strong_count(counters) > 1 {
                total.queues += 1;
                total.current += u64::from(counters.current.load(Ordering::Relaxed));
            }
        }
        total
    }
}

/// The paths of a device, in the order of their attachment.
#[derive(Default)]
pub(crate) struct DevicePaths {
    list: Mutex<Vec<Arc<DevicePath>>>,
    policy: Mutex<Policy>,
    /// Keep a working path when a path before it returns.
    stays: AtomicBool,
    version: AtomicU64,
    /// All paths are refused.
    is_refused: AtomicBool,
}

impl DevicePaths {
    #[inline]
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    fn changed(&self) {
        self.version.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn list(&self) -> Vec<Arc<DevicePath>> {
        self.list.lock().clone()
    }

    /// True if every path is refused: its namespace with this NSID is another one, has shrunk, or
    /// no longer satisfies the announced limits.
    #[inline]
    pub(crate) fn is_refused(&self) -> bool {
        self.is_refused.load(Ordering::Acquire)
    }

    /// Sets [`DevicePaths::is_refused`] after changes of refusals.
    pub(crate) fn update_refused(&self) {
        let list = self.list.lock();
        let all = !list.is_empty() && list.iter().all(|path| path.refusal().is_some());
        self.is_refused.store(all, Ordering::Release);
    }

    pub(crate) fn find(&self, shared: &Arc<Shared>) -> Option<Arc<DevicePath>> {
        let list = self.list.lock();
        list.iter().find(|path| path.is(shared)).cloned()
    }

    pub(crate) fn add(&self, shared: &Arc<Shared>) {
        let mut list = self.list.lock();
        if list.len() < MAX_PATHS && !list.iter().any(|path| path.is(shared)) {
            list.push(Arc::new(DevicePath::new(Arc::clone(shared))));
            self.changed();
        }
    }

    /// Removes a path. Its queues complete their I/O in flight and close.
    pub(crate) fn remove(&self, shared: &Arc<Shared>) {
        let mut list = self.list.lock();
        list.retain(|path| {
            if path.is(shared) {
                path.is_leaving.store(true, Ordering::Release);
            }
            !path.is(shared)
        });
        self.changed();
    }

    pub(crate) fn policy(&self) -> Policy {
        *self.policy.lock()
    }

    pub(crate) fn set_policy(&self, policy: Policy) {
        *self.policy.lock() = policy;
        self.changed();
    }

    pub(crate) fn stays(&self) -> bool {
        self.stays.load(Ordering::Relaxed)
    }

    pub(crate) fn set_stays(&self, stays: bool) {
        self.stays.store(stays, Ordering::Relaxed);
    }

    /// Prefers one path; `None`: no path.
    pub(crate) fn prefer(&self, preferred: Option<&Arc<Shared>>) {
        for path in &*self.list.lock() {
            let is = preferred.is_some_and(|shared| path.is(shared));
            path.is_preferred.store(is, Ordering::Release);
        }
        self.changed();
    }
}
