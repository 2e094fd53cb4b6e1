//! [`CoreHandle`]: the interface of a reactor for the code that runs on it: the time, pollers,
//! futures and timers.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::Deref;
use std::panic::Location;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::patience::Patience;
use crate::shared;
use crate::stats::{LabelId, PollerCounters, PollerId};
use crate::tasks::{LocalTask, SourceLocation, Tasks};
use crate::timers::Timers;
use crate::wake_set::{WakeFdError, WakeSet};
use crate::{Nanos, Poller};

/// A closure to run on a reactor.
pub type Message = Box<dyn FnOnce(&CoreHandle) + Send>;

pub(crate) type Shared = shared::SharedState<Message>;

/// The reactor's state on its own thread. The `init` function of [`crate::spawn`] gets it; code
/// that needs the reactor later keeps a [`CoreHandle`].
pub struct Core {
    pub(crate) handle: CoreHandle,
    pub(crate) slots: Vec<Slot>,
    pub(crate) last_turn_worked: bool,
    pub(crate) patience: Patience,
    /// The time up to which the time accounting is complete.
    pub(crate) accounted: Nanos,
}

impl Deref for Core {
    type Target = CoreHandle;

    fn deref(&self) -> &CoreHandle {
        &self.handle
    }
}

/// The handle of a reactor for code on its thread: pollers, messages, futures. Cheap to clone.
#[derive(Clone)]
pub struct CoreHandle {
    pub(crate) inner: Rc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) shared: Arc<Shared>,
    pub(crate) now: Cell<Nanos>,
    pub(crate) tasks: Tasks,
    pub(crate) timers: RefCell<Timers>,
    pub(crate) wake_set: RefCell<WakeSet>,
    next_poller: Cell<u64>,
    current_poller: Cell<Option<PollerId>>,
    /// Additions and removals of pollers, applied between two calls of pollers.
    changes: RefCell<Vec<Change>>,
    changed: Cell<bool>,
    labels: RefCell<HashMap<usize, LabelId>>,
}

pub(crate) struct Slot {
    pub(crate) id: PollerId,
    pub(crate) poller: Box<dyn Poller>,
    pub(crate) counters: Arc<PollerCounters>,
    pub(crate) armed: bool,
    /// The poller's wake descriptors could not be watched, so the reactor must not sleep.
    pub(crate) unwatched: bool,
}

enum Change {
    Add(Slot),
    Remove(PollerId),
    RefreshWakeFds(PollerId),
}

impl CoreHandle {
    /// The time of this turn.
    pub fn now(&self) -> Nanos {
        self.inner.now.get()
    }

    /// Calls `poller` in every turn, from this turn on, or from the next one if this turn's pollers
    /// have run already. Its wake descriptors are watched immediately.
    pub fn add_poller(&self, poller: Box<dyn Poller>) -> Result<PollerId, WakeFdError> {
        let inner = &self.inner;
        let id = PollerId(inner.next_poller.get());
        inner.wake_set.borrow_mut().watch(id, &*poller)?;
        inner.next_poller.set(id.0 + 1);
        let counters = Arc::new(PollerCounters::default());
        inner
            .shared
            .directory
            .add_poller(id, poller.name(), &counters);
        self.change(Change::Add(Slot {
            id,
            poller,
            counters,
            armed: false,
            unwatched: false,
        }));
        Ok(id)
    }

    /// Drops a poller before any poller is called again; a poller may remove itself.
    pub fn remove_poller(&self, id: PollerId) {
        self.change(Change::Remove(id));
    }

    /// Reads a poller's wake descriptors again, after they changed.
    pub fn refresh_wake_fds(&self, id: PollerId) {
        self.change(Change::RefreshWakeFds(id));
    }

    /// The poller that is being called, if any.
    pub fn current_poller(&self) -> Option<PollerId> {
        self.inner.current_poller.get()
    }

    /// Runs a future on this reactor. The future does not need to be `Send`.
    #[track_caller]
    pub fn spawn_local<F>(&self, future: F) -> LocalTask<F::Output>
    where
        F: Future + 'static,
        F::Output: 'static,
    {
        self.spawn_from(Location::caller(), future)
    }

    pub(crate) fn spawn_from<F>(&self, place: SourceLocation, future: F) -> LocalTask<F::Output>
    where
        F: Future + 'static,
        F::Output: 'static,
    {
        self.inner.tasks.spawn(self.inner.label(place), future)
    }

    /// A future that resolves at or after `deadline`. The timer fires in the first turn that begins
    /// then, and wakes the future for the next turn.
    pub fn timer_at(&self, deadline: Nanos) -> Timer {
        Timer {
            core: self.clone(),
            deadline,
            waiting: None,
        }
    }

    /// A future that resolves when `delay` has passed since the start of this turn, as
    /// [`CoreHandle::timer_at`].
    pub fn after(&self, delay: Duration) -> Timer {
        self.timer_at(self.now() + delay)
    }

    /// Runs `future` for at most `limit`. Then it drops the future and fails with [`Elapsed`].
    pub async fn timeout<F: Future>(
        &self,
        limit: Duration,
        future: F,
    ) -> Result<F::Output, Elapsed> {
        let mut timer = pin!(self.after(limit));
        let mut future = pin!(future);
        std::future::poll_fn(|context| {
            if let Poll::Ready(output) = future.as_mut().poll(context) {
                return Poll::Ready(Ok(output));
            }
            timer
                .as_mut()
                .poll(context)
                .map(|()| Err(Elapsed { limit }))
        })
        .await
    }

    /// Yields to the other work of the reactor until the next turn.
    pub async fn yield_now(&self) {
        let mut yielded = false;
        std::future::poll_fn(|context| {
            if yielded {
                return Poll::Ready(());
            }
            yielded = true;
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    fn change(&self, change: Change) {
        self.inner.changes.borrow_mut().push(change);
        self.inner.changed.set(true);
    }
}

impl std::fmt::Debug for CoreHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CoreHandle({:?})", self.inner.shared.name)
    }
}

impl Inner {
    /// The watchdog's label of the source location `place`.
    pub(crate) fn label(&self, place: SourceLocation) -> LabelId {
        // Source locations are static, so their address is a cheap and unique key.
        let key = std::ptr::from_ref(place).addr();
        let mut labels = self.labels.borrow_mut();
        *labels
            .entry(key)
            .or_insert_with(|| self.shared.directory.add_label(place))
    }

    pub(crate) fn set_current_poller(&self, id: Option<PollerId>) {
        self.current_poller.set(id);
    }

    pub(crate) fn changes_pending(&self) -> bool {
        self.changed.get()
    }
}

impl Core {
    pub(crate) fn new(shared: Arc<Shared>) -> std::io::Result<Self> {
        let now = shared.clock.now();
        let inner = Inner {
            now: Cell::new(now),
            tasks: Tasks::new(Arc::clone(&shared.bell)),
            timers: RefCell::new(Timers::new()),
            wake_set: RefCell::new(WakeSet::new(Arc::clone(&shared.bell))?),
            next_poller: Cell::new(1),
            current_poller: Cell::new(None),
            changes: RefCell::default(),
            changed: Cell::new(false),
            labels: RefCell::default(),
            shared,
        };
        let handle = CoreHandle {
            inner: Rc::new(inner),
        };
        Ok(Self {
            handle,
            slots: Vec::new(),
            last_turn_worked: false,
            patience: Patience::new(),
            accounted: now,
        })
    }

    /// Applies the pending additions and removals of pollers. Returns the index of the first entry
    /// that a removal changed, so that a loop over the list can continue there.
    pub(crate) fn apply_changes(&mut self, mut at: usize) -> usize {
        let inner = Rc::clone(&self.handle.inner);
        while inner.changed.replace(false) {
            // Apply batch after batch: dropping a poller may request more changes.
            let changes = std::mem::take(&mut *inner.changes.borrow_mut());
            for change in changes {
                match change {
                    Change::Add(slot) => self.slots.push(slot),
                    Change::Remove(id) => at = self.remove(id, at),
                    Change::RefreshWakeFds(id) => self.refresh(id),
                }
            }
        }
        at
    }

    fn remove(&mut self, id: PollerId, at: usize) -> usize {
        let Some(index) = self.slots.iter().position(|slot| slot.id == id) else {
            return at;
        };
        self.handle.inner.wake_set.borrow_mut().forget(id);
        drop(self.slots.remove(index));
        self.handle.inner.shared.directory.remove_poller(id);
        if index < at { at - 1 } else { at }
    }

    fn refresh(&mut self, id: PollerId) {
        let Some(slot) = self.slots.iter_mut().find(|slot| slot.id == id) else {
            return;
        };
        let mut wake_set = self.handle.inner.wake_set.borrow_mut();
        let watched = wake_set.watch(id, &*slot.poller);
        slot.unwatched = watched.is_err();
        if let Err(error) = watched {
            let reactor = &self.handle.inner.shared.name;
            tracing::error!(%reactor, %error, "reactor stays awake: a poller cannot wake it");
        }
    }
}

/// The time limit of [`CoreHandle::timeout`] has passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no result within {limit:?}")]
pub struct Elapsed {
    pub limit: Duration,
}

/// A timer to await; see [`CoreHandle::timer_at`].
pub struct Timer {
    core: CoreHandle,
    deadline: Nanos,
    /// Key and age of the entry in the reactor's timers.
    waiting: Option<(usize, u64)>,
}

impl Timer {
    pub fn deadline(&self) -> Nanos {
        self.deadline
    }

    /// Changes the deadline. Nothing wakes a waiting future until the timer is polled again.
    pub fn reset(&mut self, deadline: Nanos) {
        self.leave();
        self.deadline = deadline;
    }

    fn leave(&mut self) {
        if let Some((key, age)) = self.waiting.take() {
            let waker = self.core.inner.timers.borrow_mut().cancel(key, age);
            drop(waker);
        }
    }
}

impl Future for Timer {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.core.now() >= self.deadline {
            self.leave();
            return Poll::Ready(());
        }
        let inner = Rc::clone(&self.core.inner);
        let mut timers = inner.timers.borrow_mut();
        let mut outdated = None;
        match self
            .waiting
            .and_then(|(key, age)| timers.waker_mut(key, age))
        {
            Some(waker) if waker.will_wake(context.waker()) => {}
            Some(waker) => outdated = Some(std::mem::replace(waker, context.waker().clone())),
            None => {
                let key = timers.insert(self.deadline, context.waker().clone());
                self.waiting = Some((key, timers.age(key)));
            }
        }
        drop(timers);
        drop(outdated);
        Poll::Pending
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.leave();
    }
}
