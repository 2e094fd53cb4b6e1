//! The state of one path (an association with a controller of another target), shared by the poller
//! of its admin queue, the remote bdevs that use it, and management threads.
//!
//! Management threads only set flags (reset, close, enable), and wake the poller, which acts on
//! them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nacre_nvmf::address::Select;
use nacre_nvmf::host::{Connector, HostOptions, Link};
use nacre_nvmf::transport::TransportType;
use parking_lot::Mutex;

use crate::qids::Qids;
use crate::status::Status;

/// The parameters of one path to a subsystem.
#[derive(Debug, Clone)]
pub struct Config {
    /// The controller's name in this process. The name of a bdev is this with `n` and the NSID
    /// appended: `nvme0n1`.
    pub name: String,
    /// The address as shown to users: `traddr` and `trsvcid`.
    pub address: (String, String),
    /// The namespaces that become bdevs.
    pub select: Select,
    /// Most bdevs of the attachment.
    pub max_devices: usize,
    /// The transport, unless `options.paths` selects it.
    pub transport: TransportType,
    pub options: HostOptions,
}

/// Called on a core with each change of a status; must not block.
pub(crate) type OnChange = Arc<dyn Fn() + Send + Sync>;

/// The shared state of one path.
pub(crate) struct Shared {
    pub config: Config,
    pub connector: Arc<dyn Connector>,
    pub link: Arc<Link>,
    pub qids: Arc<Qids>,
    status: Mutex<Status>,
    on_change: OnChange,
    /// A request below is new: the poller must look at the flags.
    asked: AtomicBool,
    /// Requested: disconnect for good.
    closing: AtomicBool,
    /// Requested: end the association and connect again.
    reset: AtomicBool,
    /// Requested: no association until the path is enabled again.
    disabled: AtomicBool,
    waker: Mutex<Option<Box<dyn Fn() + Send + Sync>>>,
}

impl Shared {
    pub(crate) fn new(
        config: Config,
        connector: Arc<dyn Connector>,
        on_change: OnChange,
        all_losses: Arc<AtomicU64>,
    ) -> Self {
        let transport = match &config.options.paths {
            Some(paths) => paths.preferred,
            None => config.transport,
        };
        Self {
            config,
            connector,
            link: Arc::new(Link::counting(all_losses)),
            qids: Arc::default(),
            status: Mutex::new(Status::new(transport)),
            on_change,
            asked: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            reset: AtomicBool::new(false),
            disabled: AtomicBool::new(false),
            waker: Mutex::default(),
        }
    }

    /// A copy of the status.
    pub(crate) fn status(&self) -> Status {
        self.status.lock().clone()
    }

    /// Changes the status, and calls `on_change`.
    pub(crate) fn change(&self, with: impl FnOnce(&mut Status)) {
        with(&mut self.status.lock());
        (self.on_change)();
    }

    /// True when a management thread has made a request since the last [`Shared::is_closing`].
    pub(crate) fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Acquire)
    }

    /// True when the path must close. Clears [`Shared::is_asked`], so call it before the flags are
    /// read.
    pub(crate) fn is_closing(&self) -> bool {
        self.asked.store(false, Ordering::Release);
        self.closing.load(Ordering::Acquire)
    }

    /// True once for each requested reset.
    pub(crate) fn take_reset(&self) -> bool {
        self.reset.swap(false, Ordering::AcqRel)
    }

    /// Sets the function that wakes the poller's reactor after a request.
    pub(crate) fn set_waker(&self, wake: Box<dyn Fn() + Send + Sync>) {
        *self.waker.lock() = Some(wake);
    }

    pub(crate) fn ask_reset(&self) {
        self.ask(&self.reset);
    }

    pub(crate) fn ask_close(&self) {
        self.ask(&self.closing);
    }

    pub(crate) fn set_enabled(&self, enabled: bool) {
        self.disabled.store(!enabled, Ordering::Release);
        self.notify();
    }

    pub(crate) fn is_enabled(&self) -> bool {
        !self.disabled.load(Ordering::Acquire)
    }

    fn ask(&self, flag: &AtomicBool) {
        flag.store(true, Ordering::Release);
        self.notify();
    }

    fn notify(&self) {
        self.asked.store(true, Ordering::Release);
        if let Some(wake) = &*self.waker.lock() {
            wake();
        }
    }
}
