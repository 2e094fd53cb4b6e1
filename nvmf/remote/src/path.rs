//! [`Path`]: one controller of an attachment, for the management thread.

use std::fmt;
use std::sync::Arc;

use nacre_bdev::injection::Injection;
use nacre_hugepages::Pool;
use nacre_nvmf::host::{InjectionQueues, LinkState};
use nacre_reactor::{CoreHandle, Nanos};

use crate::poller::ControllerPoller;
use crate::shared::{Config, Shared};
use crate::status::Status;

/// A path to the attachment's subsystem: one controller, with one address (or, with a fallback,
/// one address over two transports).
#[derive(Clone)]
pub struct Path(pub(crate) Arc<Shared>);

impl fmt::Debug for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (host, port) = &self.0.config.address;
        write!(f, "Path({host} {port})")
    }
}

impl PartialEq for Path {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Path {
    /// Creates the controller's poller, for a reactor (`core` is its handle) or for a thread of its
    /// own (`None`). `wake` wakes the reactor or thread; `pool` is its memory.
    pub fn poller(
        &self,
        pool: Pool,
        core: Option<CoreHandle>,
        wake: impl Fn() + Send + Sync + 'static,
        now: Nanos,
    ) -> std::io::Result<ControllerPoller> {
        let wake = Arc::new(wake);
        let theirs = Arc::clone(&wake);
        self.0.link.set_waker(move || theirs());
        self.0.set_waker(Box::new(move || wake()));
        ControllerPoller::new(&self.0, pool, core, now)
    }

    pub fn config(&self) -> &Config {
        &self.0.config
    }

    pub fn status(&self) -> Status {
        self.0.status()
    }

    /// The controller's attributes and its namespaces.
    pub fn link(&self) -> LinkState {
        self.0.link.state()
    }

    /// True while I/O queues have a connection on it or try to connect.
    pub fn is_in_use(&self) -> bool {
        self.0.link.connected() > 0
    }

    /// Requests a reset and returns. The poller ends the association and connects again, also from
    /// [`crate::State::Failed`]. No effect on a path that is disabled or closed.
    pub fn reset(&self) {
        self.0.ask_reset();
    }

    /// Sets the rule of error injection for an opcode, in the connected queues; `None` removes it.
    pub fn inject(&self, queues: InjectionQueues, opcode: u8, injection: Option<Injection>) {
        self.0.link.inject(queues, opcode, injection);
    }

    /// Requests a shutdown of the controller and returns. The state becomes
    /// [`crate::State::Closed`]. Then I/O uses the other paths, or completes with status `Gone`.
    pub fn close(&self) {
        self.0.ask_close();
    }

    /// Disconnects the controller until it is enabled again, or connects it.
    pub fn set_enabled(&self, enabled: bool) {
        self.0.set_enabled(enabled);
    }

    pub fn is_enabled(&self) -> bool {
        self.0.is_enabled()
    }
}
