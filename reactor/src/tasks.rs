//! Local futures: they run only on the reactor's thread, and any thread can wake them.
//!
//! A wake on the reactor's thread pushes to a plain queue. A wake on another thread adds the future
//! to a locked list, sets a flag, and wakes the reactor if it sleeps ([`Bell`]). The reactor locks
//! that list only when the flag is set.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use async_task::{Builder, FallibleTask, Runnable};
use parking_lot::Mutex;
use slab::Slab;

use crate::bell::Bell;
use crate::stats::LabelId;

type Run = Runnable<LabelId>;

thread_local! {
    /// The current reactor of this thread, and its ready futures. Thread-local rather than shared:
    /// a waker must be `Send`, and can still reach the queue without a lock.
    static HERE: ReadyQueue = const { ReadyQueue { id: Cell::new(0), ready: RefCell::new(VecDeque::new()) } };
}

struct ReadyQueue {
    id: Cell<u64>,
    ready: RefCell<VecDeque<Run>>,
}

/// True when called inside a turn of any reactor.
pub(crate) fn on_reactor() -> bool {
    HERE.try_with(|here| here.id.get() != 0).unwrap_or(false)
}

/// The futures of one reactor.
pub(crate) struct Tasks {
    remote: Arc<Remote>,
    active: Rc<RefCell<Slab<Waker>>>,
    /// The ready queue while this reactor is not the current one of its thread (a test may step
    /// several reactors on one thread).
    parked: RefCell<VecDeque<Run>>,
}

struct Remote {
    id: u64,
    woken: Mutex<Vec<Run>>,
    any: AtomicBool,
    bell: Arc<Bell>,
}

impl Tasks {
    pub(crate) fn new(bell: Arc<Bell>) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let remote = Remote {
            id,
            woken: Mutex::default(),
            any: AtomicBool::new(false),
            bell,
        };
        Self {
            remote: Arc::new(remote),
            active: Rc::default(),
            parked: RefCell::default(),
        }
    }

    pub(crate) fn spawn<F>(&self, label: LabelId, future: F) -> LocalTask<F::Output>
    where
        F: Future + 'static,
        F::Output: 'static,
    {
        let key = self.active.borrow_mut().insert(Waker::noop().clone());
        let leave = Unregister {
            active: Rc::clone(&self.active),
            key,
        };
        let future = async move {
            let _leave = leave;
            future.await
        };
        let remote = Arc::clone(&self.remote);
        let schedule = move |run| remote.schedule(run);
        let (run, task) = Builder::new()
            .metadata(label)
            .spawn_local(|_| future, schedule);
        self.active.borrow_mut()[key] = run.waker();
        run.schedule();
        LocalTask {
            task: Some(task.fallible()),
        }
    }

    /// Makes this reactor the thread's current one until the guard is dropped.
    pub(crate) fn enter(&self) -> Entered<'_> {
        let before = HERE.with(|here| {
            here.ready.swap(&self.parked);
            here.id.replace(self.remote.id)
        });
        Entered {
            tasks: self,
            before,
        }
    }

    /// Moves futures that other threads woke to the ready queue. Call [`Tasks::enter`] first.
    pub(crate) fn collect_woken(&self) {
        if !self.remote.any.load(Ordering::Acquire) {
            return;
        }
        let mut woken = self.remote.woken.lock();
        self.remote.any.store(false, Ordering::Relaxed);
        HERE.with(|here| here.ready.borrow_mut().extend(woken.drain(..)));
    }

    /// Number of ready futures. Call [`Tasks::enter`] first.
    pub(crate) fn ready_len(&self) -> usize {
        HERE.with(|here| here.ready.borrow().len())
    }

    pub(crate) fn pop_ready(&self) -> Option<Run> {
        HERE.with(|here| here.ready.borrow_mut().pop_front())
    }

    /// True when another thread has woken a future since the last [`Tasks::collect_woken`].
    pub(crate) fn woken_elsewhere(&self) -> bool {
        self.remote.any.load(Ordering::Acquire)
    }

    /// Number of futures that have not ended.
    pub(crate) fn len(&self) -> usize {
        self.active.borrow().len()
    }

    /// Drops all futures synchronously: wakers in other threads must not hold the last reference to
    /// one. Call [`Tasks::enter`] first. Passes a panic of a destructor to `report`.
    pub(crate) fn cancel_all(&self, mut report: impl FnMut(Box<dyn std::any::Any + Send>)) {
        while !self.active.borrow().is_empty() {
            let wakers: Vec<Waker> = self
                .active
                .borrow()
                .iter()
                .map(|(_, w)| w.clone())
                .collect();
            wakers.into_iter().for_each(Waker::wake);
            self.collect_woken();
            while let Some(run) = self.pop_ready() {
                // Dropping the `Run` cancels the task.
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(run))) {
                    report(panic);
                }
            }
            // Another thread may have decided to schedule a task without having added it to the
            // list yet.
            if !self.active.borrow().is_empty() {
                std::thread::yield_now();
            }
        }
    }
}

pub(crate) struct Entered<'a> {
    tasks: &'a Tasks,
    before: u64,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        HERE.with(|here| {
            here.ready.swap(&self.tasks.parked);
            here.id.set(self.before);
        });
    }
}

impl Remote {
    fn schedule(&self, run: Run) {
        let mut run = Some(run);
        let _ = HERE.try_with(|here| {
            if here.id.get() == self.id {
                here.ready.borrow_mut().extend(run.take());
            }
        });
        let Some(run) = run else { return };
        let mut woken = self.woken.lock();
        woken.push(run);
        self.any.store(true, Ordering::Release);
        drop(woken);
        self.bell.ring();
    }
}

/// A guard in each future, which unregisters it when it ends or is dropped.
struct Unregister {
    active: Rc<RefCell<Slab<Waker>>>,
    key: usize,
}

impl Drop for Unregister {
    fn drop(&mut self) {
        let waker = self.active.borrow_mut().remove(self.key);
        // After the borrow ends: dropping the last waker may drop the task.
        drop(waker);
    }
}

/// The error of a task that was cancelled, or whose reactor stopped, before it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the task was cancelled")]
pub struct Cancelled;

/// The handle of a future spawned on a reactor. Await it for the result. Dropping the handle does
/// not cancel the future.
pub struct LocalTask<T> {
    task: Option<FallibleTask<T, LabelId>>,
}

impl<T> LocalTask<T> {
    /// Cancels the future: the reactor drops it when it runs its futures next.
    pub fn cancel(mut self) {
        drop(self.task.take());
    }

    pub fn is_finished(&self) -> bool {
        self.task.as_ref().is_none_or(FallibleTask::is_finished)
    }
}

impl<T> Future for LocalTask<T> {
    type Output = Result<T, Cancelled>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.task {
            Some(task) => Pin::new(task)
                .poll(context)
                .map(|ended| ended.ok_or(Cancelled)),
            None => Poll::Ready(Err(Cancelled)),
        }
    }
}

impl<T> Drop for LocalTask<T> {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.detach();
        }
    }
}

/// Source location of a spawn or a send.
pub(crate) type SourceLocation = &'static Location<'static>;
