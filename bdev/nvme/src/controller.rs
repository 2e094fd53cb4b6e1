//! [`Controller`]: the handle of an attached drive for the engine. Its commands run in
//! [`crate::control`], its I/O in [`crate::pair`].

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use nacre_nvmf_wire::Sqe;
use nacre_reactor::{CallError, CoreHandle, PollerId, ReactorHandle};
use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, Notify};

use crate::admin::Admin;
use crate::control::{Facts, Links};
use crate::device::NvmeBdev;
use crate::error::{AttachError, ControlError};
use crate::event::{Event, Observer, ResetReason};
use crate::function::Function;
use crate::info::{
    ControllerInfo, ErrorEntry, FirmwareInfo, Health, State, Status, UnusableNamespace,
};
use crate::link::{Counters, Link, Report};
use crate::options::Options;

/// Most pending reports of queue pair owners. An owner repeats a report that does not fit.
const REPORTS_MAX: usize = 4096;

/// The data transfer of an admin command of [`Controller::admin`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminData {
    None,
    /// The controller fills this many bytes.
    Read(usize),
}

/// The result of a successful admin command of [`Controller::admin`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminReply {
    pub dword0: u32,
    pub data: Vec<u8>,
}

/// An attached controller. Any thread may use it; its commands run on the reactor that attached it
/// (its home). The controller stays attached until [`Controller::detach`].
pub struct Controller {
    this: Weak<Controller>,
    id: u64,
    pub(crate) options: Options,
    pub(crate) observer: Arc<dyn Observer>,
    pub(crate) home: ReactorHandle,
    pub(crate) function: Mutex<Arc<dyn Function>>,
    /// [`Function::slot`] of the function.
    pub(crate) slot: AtomicUsize,
    pub(crate) admin: Admin,
    /// The controller's properties, as read at the last bring-up.
    pub(crate) facts: Mutex<Arc<Facts>>,
    pub(crate) state: Mutex<State>,
    pub(crate) counters: Counters,
    pub(crate) namespaces: Mutex<BTreeMap<u32, Arc<NvmeBdev>>>,
    pub(crate) unusable: Mutex<Vec<UnusableNamespace>>,
    pub(crate) links: Mutex<Links>,
    reports: Mutex<VecDeque<Report>>,
    /// Notified for each report of a queue pair's owner.
    pub(crate) news: Notify,
    /// Notified when the tasks must check whether to end.
    pub(crate) stop: Notify,
    /// Serializes changes of the controller's state.
    pub(crate) lifecycle: AsyncMutex<()>,
    pub(crate) alerts: Mutex<crate::control::Alerts>,
    pub(crate) newest_health: Mutex<Option<Health>>,
    pub(crate) poller: Mutex<Option<PollerId>>,
}

/// The reason why a core gets no queue pair.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoPair {
    #[error(
        "get a queue pair of controller \"{name}\": all {granted} that it granted are in use; use it from fewer \
         cores, or ask for more (io_queues is {wanted})"
    )]
    AllTaken {
        name: String,
        granted: u16,
        wanted: u16,
    },
    #[error("get a queue pair of controller \"{name}\", which is detached")]
    Detached { name: String },
    #[error("get memory for a queue pair: {}", crate::error::chain(.0))]
    Memory(#[source] crate::memory::MemoryError),
    #[error("make an eventfd for a queue pair: {0}")]
    Bell(std::io::Error),
}

impl NoPair {
    /// The system's error, or an equivalent one.
    pub fn cause(self) -> std::io::Error {
        match self {
            NoPair::AllTaken { .. } => std::io::ErrorKind::ResourceBusy.into(),
            NoPair::Detached { .. } => std::io::ErrorKind::NotConnected.into(),
            NoPair::Memory(_) => std::io::ErrorKind::OutOfMemory.into(),
            NoPair::Bell(error) => error,
        }
    }
}

impl Controller {
    /// Initialises the controller on the calling reactor, which becomes its home. Reports each
    /// namespace to the observer.
    pub async fn attach(
        core: &CoreHandle,
        function: Arc<dyn Function>,
        options: Options,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<Controller>, AttachError> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let controller = Arc::new_cyclic(|this| Controller {
            this: this.clone(),
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            options,
            observer,
            home: core.handle(),
            slot: AtomicUsize::new(function.slot()),
            function: Mutex::new(function),
            admin: Admin::new(),
            facts: Mutex::default(),
            state: Mutex::default(),
            counters: Counters::default(),
            namespaces: Mutex::default(),
            unusable: Mutex::default(),
            links: Mutex::default(),
            reports: Mutex::default(),
            news: Notify::new(),
            stop: Notify::new(),
            lifecycle: AsyncMutex::new(()),
            alerts: Mutex::default(),
            newest_health: Mutex::default(),
            poller: Mutex::new(None),
        });
        controller.start(core).await?;
        Ok(controller)
    }

    pub fn name(&self) -> &str {
        &self.options.name
    }

    pub fn options(&self) -> &Options {
        &self.options
    }

    pub fn info(&self) -> ControllerInfo {
        let mut info = self.facts.lock().info.clone();
        info.unusable = self.unusable.lock().clone();
        info
    }

    pub fn status(&self) -> Status {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        Status {
            state: self.state.lock().clone(),
            resets: read(&counters.resets),
            function_resets: read(&counters.function_resets),
            queue_resets: read(&counters.queue_resets),
            aborts: read(&counters.aborts),
            timeouts: read(&counters.timeouts),
            admin_timeouts: read(&counters.admin_timeouts),
            resubmitted: read(&counters.resubmitted),
            protocol_errors: read(&counters.protocol_errors) + self.admin.unmatched(),
            events: read(&counters.events),
            losses: read(&counters.losses),
            nudges: read(&counters.nudges),
            queues: self.links.lock().count(),
        }
    }

    /// Returns the namespaces in the order of their NSIDs.
    pub fn namespaces(&self) -> Vec<Arc<NvmeBdev>> {
        self.namespaces.lock().values().cloned().collect()
    }

    /// Resets the controller (CC.EN) and then sends the commands in flight again.
    pub async fn reset(&self) -> Result<(), ControlError> {
        self.at_home(
            |this, core| async move { this.reset_for(&core, ResetReason::UserRequest).await },
        )
        .await
    }

    /// The last SMART / Health log, as read every [`Options::health_period`] or by
    /// [`Controller::health`]. Does not access the drive. `None` before the first reading.
    pub fn last_health(&self) -> Option<Health> {
        self.newest_health.lock().clone()
    }

    /// Reads the SMART log now.
    pub async fn health(&self) -> Result<Health, ControlError> {
        self.at_home(|this, core| async move { this.read_health(&core).await })
            .await
    }

    /// Reads at most `entries` entries of the Error Information log, the newest first.
    pub async fn error_log(&self, entries: usize) -> Result<Vec<ErrorEntry>, ControlError> {
        self.at_home(move |this, core| async move { this.read_errors(&core, entries).await })
            .await
    }

    pub async fn firmware_slots(&self) -> Result<FirmwareInfo, ControlError> {
        self.at_home(|this, core| async move { this.read_firmware(&core).await })
            .await
    }

    /// Executes a read-only admin command: Identify, Get Log Page or Get Features. The driver sets
    /// the command identifier and the data pointer. At most 128 KiB of data, or MDTS if that is
    /// less; read longer data in parts (Get Log Page has an offset).
    pub async fn admin(&self, sqe: Sqe, data: AdminData) -> Result<AdminReply, ControlError> {
        self.at_home(move |this, core| async move { this.pass_through(&core, sqe, data).await })
            .await
    }

    /// Detaches the controller: its queues are deleted, and it is shut down and disabled. I/O in
    /// flight, and later I/O, completes with [`nacre_bdev::Status::Gone`].
    pub async fn detach(&self) {
        let ended = self.at_home(|this, core| async move {
            this.shut_down(&core).await;
            Ok(())
        });
        if let Err(error) = ended.await {
            tracing::warn!(controller = self.name(), %error, "NVMe controller was not shut down");
        }
    }

    /// Handles the system's report that the drive was removed.
    pub fn removed(&self) {
        if let Some(this) = self.this.upgrade() {
            drop(self.home.run_future(move |core| async move {
                this.lose(&core).await;
            }));
        }
    }

    /// Handles the return of the removed drive, which the caller has identified by its serial
    /// number. Its namespaces become usable again.
    pub async fn returned(&self, function: Arc<dyn Function>) -> Result<(), AttachError> {
        let Some(this) = self.this.upgrade() else {
            return Err(ControlError::Stopped.into());
        };
        let answer = self
            .home
            .run_future(move |core| async move { this.take_back(&core, function).await });
        answer.await.unwrap_or(Err(ControlError::Stopped.into()))
    }

    async fn at_home<R, F>(
        &self,
        work: impl FnOnce(Arc<Controller>, CoreHandle) -> F + Send + 'static,
    ) -> Result<R, ControlError>
    where
        R: Send + 'static,
        F: Future<Output = Result<R, ControlError>> + 'static,
    {
        let this = self.this.upgrade().ok_or(ControlError::Stopped)?;
        let answer = self.home.run_future(move |core| work(this, core));
        match answer.await {
            Ok(answer) => answer,
            Err(CallError::NotSent(nacre_reactor::SendError::Full(_))) => Err(ControlError::Busy),
            Err(_) => Err(ControlError::Stopped),
        }
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Returns the device slot in which buffers store their addresses for this drive.
    pub(crate) fn memory_slot(&self) -> usize {
        self.slot.load(Ordering::Relaxed)
    }

    pub(crate) fn function(&self) -> Arc<dyn Function> {
        Arc::clone(&self.function.lock())
    }

    pub(crate) fn facts(&self) -> Arc<Facts> {
        Arc::clone(&self.facts.lock())
    }

    pub(crate) fn is_live(&self) -> bool {
        *self.state.lock() == State::Live
    }

    pub(crate) fn all_links(&self) -> Vec<Arc<Link>> {
        self.links.lock().all()
    }

    pub(crate) fn send_event(&self, event: Event) {
        self.observer.event(event);
    }

    /// Queues a report of a queue pair's owner for the control. Callable from any core.
    pub(crate) fn report(&self, report: Report) {
        let mut reports = self.reports.lock();
        if reports.len() < REPORTS_MAX {
            reports.push_back(report);
        }
        drop(reports);
        self.news.notify_one();
    }

    pub(crate) fn next_report(&self) -> Option<Report> {
        self.reports.lock().pop_front()
    }

    /// Reserves a queue pair for another core.
    pub(crate) fn grant_link(&self) -> Result<Arc<Link>, NoPair> {
        let facts = self.facts();
        let function = self.function();
        if *self.state.lock() == State::Detached {
            let name = self.name().to_owned();
            return Err(NoPair::Detached { name });
        }
        let qid = self.links.lock().take(facts.queues);
        let qid = qid.ok_or_else(|| NoPair::AllTaken {
            name: self.name().to_owned(),
            granted: facts.queues,
            wanted: self.options.io_queues,
        })?;
        let grant = facts.grant(&function, qid);
        let grant = grant.map_err(|error| {
            self.links.lock().give_back(qid);
            NoPair::Memory(error)
        })?;
        let vector = (qid < facts.vectors).then_some(qid);
        let link = Link::new(qid, vector, grant).map_err(|error| {
            self.links.lock().give_back(qid);
            NoPair::Bell(error)
        })?;
        let link = Arc::new(link);
        self.links.lock().add(Arc::clone(&link));
        if matches!(*self.state.lock(), State::Removed | State::Failed { .. }) {
            link.set_phase(crate::phase::QueueState::Gone);
        }
        Ok(link)
    }
}
