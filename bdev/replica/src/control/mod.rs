//! The control of an open volume: tasks of one reactor that share one [`Control`].
//!
//! ```text
//!   lanes ── news ──▶ listen ─┬─ wanted regions ──▶ log       page on the media, then dirty
//!                             ├─ failures ────────▶ judge     out of sync durably, then a view
//!                             └─ repairs ─────────▶ repair
//!   time ──▶ clean   clears idle regions            ▶ watch   losses of remote devices
//!        ──▶ probe   attaches absent replicas       ▶ resync  copies missing data, promotes
//!   handle ─▶ commands
//! ```
//!
//! [`Control::commit`] is the only access to the store. A membership change is decided,
//! compared-and-swapped, written into the labels of the present replicas, and only then published
//! to the lanes, which have held the I/O that depends on it. Changes are made one at a time, under
//! `membership`. The log's pages are written under `log`, one writer at a time, so that a page
//! never goes back in time.

mod attach;
mod buffers;
mod chunk;
mod clean;
mod commands;
mod commit;
mod create;
mod cut;
mod disk;
mod failures;
mod fence;
mod frozen;
mod label_poll;
mod labels;
mod lease;
mod log;
mod open;
mod resync;
mod salvage;
mod state;
#[cfg(test)]
mod tests;
mod verify;

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nacre_hugepages::Pool;
use nacre_reactor::{CoreHandle, LocalTask, Nanos, PollerId};
use tokio::sync::{Mutex as AsyncMutex, Notify};
use uuid::Uuid;

pub use self::create::{create, delete, force_in_sync};
pub use self::open::{open, open_prepared};

use self::buffers::Reserve;
use self::disk::Disks;
use self::state::State;
use crate::handle::{Devices, Happened, Observer, VolumeEvent, VolumeStatus};
use crate::shared::{REPAIRS, Shared, lock};
use crate::store::VolumeStore;

/// Waits for a buffer, a stripe, a place: short, and only while something is short.
const MOMENT: Duration = Duration::from_micros(200);

pub(crate) struct Control {
    core: CoreHandle,
    pool: Pool,
    reserve: Reserve,
    store: Arc<dyn VolumeStore>,
    devices: Arc<dyn Devices>,
    observer: Arc<dyn Observer>,
    id: Uuid,
    holder: Uuid,
    shared: Arc<Shared>,
    status: Arc<Mutex<VolumeStatus>>,
    disks: Rc<Disks>,
    poller: Cell<Option<PollerId>>,
    state: RefCell<State>,
    membership: AsyncMutex<()>,
    log: AsyncMutex<()>,
    /// One chunk at a time is being acquired.
    chunks: AsyncMutex<()>,
    /// When the next bytes may be copied.
    copy_at: Cell<Nanos>,
    began: Nanos,
    /// [`Shared::abandoned`] when devices last got time to finish such writes; `None`: not yet
    /// since the volume was opened.
    settled: Cell<Option<u64>>,
    bells: Bells,
    tasks: RefCell<Vec<LocalTask<()>>>,
}

/// What wakes the tasks. Each remembers one ring.
#[derive(Default)]
struct Bells {
    /// Rung from other cores.
    news: Arc<Notify>,
    log: Notify,
    judge: Notify,
    repair: Notify,
    clean: Notify,
    probe: Notify,
    resync: Notify,
    /// Wakes the resting resync; remembered by `State::urgent`.
    urgent: Notify,
    verify: Notify,
    watch: Notify,
    fence: Notify,
}

impl Control {
    fn say(&self, what: Happened) {
        let name = self.state.borrow().record.name.clone();
        tracing::debug!(volume = name, ?what, "volume");
        self.observer.event(VolumeEvent {
            volume: self.id,
            name,
            what,
        });
    }

    /// The view and the status, from the state as it is now.
    fn publish(&self) {
        let view = self.state.borrow().view();
        self.shared.publish(view);
        self.bells.watch.notify_one();
        self.refresh_status();
    }

    fn refresh_status(&self) {
        *lock(&self.status) = self.state.borrow().status(&self.shared);
    }

    fn spawn(self: &Rc<Control>, task: impl Future<Output = ()> + 'static) {
        let task = self.core.spawn_local(task);
        let mut tasks = self.tasks.borrow_mut();
        tasks.retain(|task| !task.is_finished());
        tasks.push(task);
    }

    fn start(self: &Rc<Control>) {
        let bell = Arc::clone(&self.bells.news);
        self.shared
            .on_news(Some(Box::new(move || bell.notify_one())));
        self.spawn(Rc::clone(self).listen());
        self.spawn(Rc::clone(self).keep_log());
        self.spawn(Rc::clone(self).judge_failures());
        self.spawn(Rc::clone(self).repair_reads());
        self.spawn(Rc::clone(self).clean_log());
        self.spawn(Rc::clone(self).watch_losses());
        self.spawn(Rc::clone(self).stay_holder());
        self.spawn(Rc::clone(self).take_back());
        self.spawn(Rc::clone(self).copy_regions());
        self.spawn(Rc::clone(self).verify_in_time());
        if self.store.is_shared() {
            self.spawn(Rc::clone(self).keep_lease());
        }
    }

    /// Ends all tasks and lets go of the devices.
    fn stop(&self) {
        self.shared.on_news(None);
        for task in self.tasks.borrow_mut().drain(..) {
            task.cancel();
        }
        let mut state = self.state.borrow_mut();
        for live in state.live.iter_mut().filter_map(Option::take) {
            self.disks.forget(&live.disk);
        }
        drop(state);
        self.disks.close();
        if let Some(poller) = self.poller.take() {
            self.core.remove_poller(poller);
        }
    }

    /// Hands on what lanes have to say.
    async fn listen(self: Rc<Control>) {
        loop {
            self.bells.news.notified().await;
            let (news, counts) = self.shared.take_news();
            let mut state = self.state.borrow_mut();
            if !news.wanted.is_empty() {
                state.wanted.extend(news.wanted);
                self.bells.log.notify_one();
            }
            if counts != state.heard {
                state.heard = counts;
                state.hear(news.reports);
                self.bells.judge.notify_one();
            }
            if self.shared.unequal() != state.unequal {
                state.unequal = self.shared.unequal();
                self.bells.resync.notify_one();
                drop(state);
                self.refresh_status();
                state = self.state.borrow_mut();
            }
            if !news.urgent.is_empty() {
                state.urgent.extend(news.urgent);
                self.bells.urgent.notify_waiters();
                self.bells.resync.notify_one();
            }
            if !news.repairs.is_empty() {
                let room = REPAIRS.saturating_sub(state.repairs.len());
                state.repairs.extend(news.repairs.into_iter().take(room));
                self.bells.repair.notify_one();
            }
        }
    }

    fn deadline(&self) -> Duration {
        Duration::from_millis(self.state.borrow().record.settings.deadline_ms.max(1))
    }
}
