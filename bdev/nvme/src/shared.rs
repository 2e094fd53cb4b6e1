//! [`Shared`]: the state of a controller that its queue pairs and block devices use, on any core.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use nacre_reactor::CoreHandle;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::function::Function;
use crate::info::{ControllerInfo, State, UnusableNamespace};
use crate::link::{Counters, Link, Report};
use crate::options::DriveOptions;
use crate::phase::QueueState;
use crate::properties::Properties;

/// Most pending reports of queue pair owners. An owner repeats a report that does not fit.
const REPORTS_MAX: usize = 4096;
/// Interval of checks while waiting for the owner of a queue pair to stop writing doorbells.
const QUIET_CHECK: Duration = Duration::from_micros(20);

pub(crate) struct Shared {
    id: u64,
    pub options: DriveOptions,
    function: Mutex<Arc<dyn Function>>,
    /// [`Function::slot`] of the function.
    slot: AtomicUsize,
    /// The controller's properties, as read at the last initialisation.
    properties: Mutex<Arc<Properties>>,
    state: Mutex<State>,
    pub counters: Counters,
    pub unusable: Mutex<Vec<UnusableNamespace>>,
    pub links: Mutex<Links>,
    reports: Mutex<VecDeque<Report>>,
    /// Notified for each report of a queue pair's owner.
    pub reported: Notify,
}

/// The reason why a core gets no queue pair.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QueuePairError {
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

impl QueuePairError {
    /// The system's error, or an equivalent one.
    pub(crate) fn cause(self) -> std::io::Error {
        match self {
            Self::AllTaken { .. } => std::io::ErrorKind::ResourceBusy.into(),
            Self::Detached { .. } => std::io::ErrorKind::NotConnected.into(),
            Self::Memory(_) => std::io::ErrorKind::OutOfMemory.into(),
            Self::Bell(error) => error,
        }
    }
}

impl Shared {
    pub(crate) fn new(function: Arc<dyn Function>, options: DriveOptions) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            options,
            slot: AtomicUsize::new(function.slot()),
            function: Mutex::new(function),
            properties: Mutex::default(),
            state: Mutex::default(),
            counters: Counters::default(),
            unusable: Mutex::default(),
            links: Mutex::default(),
            reports: Mutex::default(),
            reported: Notify::new(),
        }
    }

    /// Identifies the controller among those of the process.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn name(&self) -> &str {
        &self.options.name
    }

    pub(crate) fn info(&self) -> ControllerInfo {
        let mut info = self.properties().info.clone();
        info.unusable = self.unusable.lock().clone();
        info
    }

    /// Returns the device slot in which buffers store their addresses for this drive.
    pub(crate) fn memory_slot(&self) -> usize {
        self.slot.load(Ordering::Relaxed)
    }

    pub(crate) fn function(&self) -> Arc<dyn Function> {
        Arc::clone(&self.function.lock())
    }

    /// Replaces the function, after the drive was removed and has returned.
    pub(crate) fn set_function(&self, function: Arc<dyn Function>) {
        self.slot.store(function.slot(), Ordering::Relaxed);
        *self.function.lock() = function;
    }

    pub(crate) fn properties(&self) -> Arc<Properties> {
        Arc::clone(&self.properties.lock())
    }

    pub(crate) fn set_properties(&self, properties: Properties) {
        *self.properties.lock() = Arc::new(properties);
    }

    pub(crate) fn state(&self) -> State {
        self.state.lock().clone()
    }

    /// Sets the state, and returns the previous one.
    pub(crate) fn set_state(&self, state: State) -> State {
        std::mem::replace(&mut *self.state.lock(), state)
    }

    pub(crate) fn is_live(&self) -> bool {
        *self.state.lock() == State::Live
    }

    pub(crate) fn is_detached(&self) -> bool {
        *self.state.lock() == State::Detached
    }

    /// Queues a report of a queue pair's owner for the controller's tasks. Callable from any core.
    pub(crate) fn report(&self, report: Report) {
        let mut reports = self.reports.lock();
        if reports.len() < REPORTS_MAX {
            reports.push_back(report);
        }
        drop(reports);
        self.reported.notify_one();
    }

    pub(crate) fn next_report(&self) -> Option<Report> {
        self.reports.lock().pop_front()
    }

    /// Reserves a queue pair for another core.
    pub(crate) fn grant_link(&self) -> Result<Arc<Link>, QueuePairError> {
        let properties = self.properties();
        let function = self.function();
        if self.is_detached() {
            let name = self.name().to_owned();
            return Err(QueuePairError::Detached { name });
        }
        let qid = self.links.lock().take(properties.queues);
        let qid = qid.ok_or_else(|| QueuePairError::AllTaken {
            name: self.name().to_owned(),
            granted: properties.queues,
            wanted: self.options.io_queues,
        })?;
        let grant = properties.grant(&function, qid);
        let grant = grant.map_err(|error| {
            self.links.lock().give_back(qid);
            QueuePairError::Memory(error)
        })?;
        let vector = (qid < properties.vectors).then_some(qid);
        let link = Link::new(qid, vector, grant).map_err(|error| {
            self.links.lock().give_back(qid);
            QueuePairError::Bell(error)
        })?;
        let link = Arc::new(link);
        self.links.lock().add(Arc::clone(&link));
        if matches!(*self.state.lock(), State::Removed | State::Failed { .. }) {
            link.set_phase(QueueState::Gone);
        }
        Ok(link)
    }

    pub(crate) fn all_links(&self) -> Vec<Arc<Link>> {
        self.links.lock().all()
    }

    /// Waits until no owner of a queue pair writes doorbells, and prevents further writes.
    pub(crate) async fn quiesce_all(&self, core: &CoreHandle) {
        let links = self.all_links();
        for link in &links {
            link.set_phase(QueueState::Quiescing);
        }
        for link in &links {
            until_quiet(core, link).await;
        }
    }

    /// Ends all I/O in flight and waiting. The controller must be unable to access memory.
    pub(crate) fn end_queues(&self) {
        for link in self.all_links() {
            link.made.store(false, Ordering::Relaxed);
            link.set_phase(QueueState::Gone);
        }
    }
}

/// Waits until the owner of a queue pair does not write doorbells, and prevents further writes.
pub(crate) async fn quiesce(core: &CoreHandle, link: &Link) {
    link.set_phase(QueueState::Quiescing);
    until_quiet(core, link).await;
}

async fn until_quiet(core: &CoreHandle, link: &Link) {
    while link.phase.is_busy() {
        core.after(QUIET_CHECK).await;
    }
}

/// The existing queue pairs.
#[derive(Default)]
pub(crate) struct Links {
    list: Vec<Arc<Link>>,
    taken: BTreeSet<u16>,
    /// Number of queue creations so far.
    generation: u32,
}

impl Links {
    /// The lowest free identifier from 1 to `most`.
    pub(crate) fn take(&mut self, most: u16) -> Option<u16> {
        let qid = (1..=most).find(|qid| !self.taken.contains(qid))?;
        self.taken.insert(qid);
        Some(qid)
    }

    pub(crate) fn give_back(&mut self, qid: u16) {
        self.taken.remove(&qid);
    }

    pub(crate) fn add(&mut self, link: Arc<Link>) {
        self.list.push(link);
    }

    pub(crate) fn remove(&mut self, qid: u16) {
        self.list.retain(|link| link.qid != qid);
        self.taken.remove(&qid);
    }

    pub(crate) fn get(&self, qid: u16) -> Option<Arc<Link>> {
        self.list.iter().find(|link| link.qid == qid).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Link>> {
        self.list.clone()
    }

    pub(crate) fn count(&self) -> u16 {
        self.list.len() as u16
    }

    pub(crate) fn next_generation(&mut self) -> u32 {
        self.generation = self.generation.wrapping_add(1) & 0x7fff_ffff;
        self.generation
    }
}
