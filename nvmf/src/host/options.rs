//! The options of a host, and the traits through which it opens connections.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::fabrics::ConnectData;
use nacre_reactor::Helper;

use super::concatenation::GeneratedPsk;
use super::error::HostError;
use super::paths::PathOptions;
use crate::auth::{KeySource, Offer};
use crate::transport::{HostTransport, TransportType};

/// The queue for which [`Dial`] opens a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WantedQueue {
    /// Queue identifier; 0: the admin queue.
    pub qid: u16,
    pub entries: u16,
    /// The controller of an I/O queue; 0 for the admin queue.
    pub cntlid: u16,
    /// The transport to use; `None`: there is only one.
    pub transport: Option<TransportType>,
}

/// Opens transport connections to one controller.
pub trait Dial {
    /// Starts a connection for queue `qid`. The event [`crate::transport::HostEvent::Ready`]
    /// reports its success.
    fn dial(&mut self, qid: u16) -> std::io::Result<Box<dyn HostTransport>>;

    /// Like [`Dial::dial`], with all parameters of the queue.
    fn dial_wanted(&mut self, wanted: &WantedQueue) -> std::io::Result<Box<dyn HostTransport>> {
        self.dial(wanted.qid)
    }
}

impl<F: FnMut(u16) -> std::io::Result<Box<dyn HostTransport>>> Dial for F {
    fn dial(&mut self, qid: u16) -> std::io::Result<Box<dyn HostTransport>> {
        self(qid)
    }
}

/// Creates [`Dial`]s for one controller. Shared by all threads that connect queues to it.
pub trait Connector: Send + Sync {
    /// Creates the [`Dial`] of one [`crate::host::HostController`] or [`crate::host::IoQueue`] on
    /// this thread.
    fn dialer(&self) -> Box<dyn Dial>;

    /// Creates buffers for this thread that all its connections can use (registered for RDMA).
    fn memory(&self, classes: &[ClassSpec]) -> std::io::Result<Pool> {
        Ok(Pool::heap(classes))
    }
}

/// The controller that a host requests in Connect (Base 6.3). A subsystem has dynamic or static
/// controllers, as the CNTLID of its discovery log entries shows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ControllerId {
    /// A new controller, which exists as long as the association.
    #[default]
    Dynamic,
    /// Any free static controller. After a loss, the same one if it is still free.
    AnyStatic,
    /// This static controller.
    Static(u16),
}

impl ControllerId {
    /// The CNTLID of the Connect command.
    pub fn asked(self) -> u16 {
        match self {
            Self::Dynamic => ConnectData::CNTLID_DYNAMIC,
            Self::AnyStatic => ConnectData::CNTLID_STATIC_ANY,
            Self::Static(id) => id,
        }
    }
}

/// Options of a host for one controller.
#[derive(Debug, Clone)]
pub struct HostOptions {
    pub hostnqn: Nqn,
    pub hostid: [u8; 16],
    pub subnqn: Nqn,
    /// The controller to request. With `paths` and [`ControllerId::Static`], the host returns to
    /// the preferred transport only after a loss.
    pub controller: ControllerId,
    /// Entries of each I/O queue; clamped to the controller's maximum.
    pub queue_entries: u16,
    /// Requested number of I/O queues; the controller may grant fewer.
    pub io_queues: u16,
    /// Keep-alive timeout (KATO); zero: disabled.
    pub keep_alive: Duration,
    /// Disable submission queue flow control (Base 6.3), so that the target can complete reads
    /// without a response capsule.
    pub disable_sq_flow_control: bool,
    /// Longest time to connect, enable and identify the controller, and then to read each
    /// namespace.
    pub connect_timeout: Duration,
    /// Longest time for an admin command.
    pub admin_timeout: Duration,
    /// Longest time for an I/O command; then its connection is closed.
    pub io_timeout: Duration,
    /// Delay before the first reconnect; doubles with each failure up to `reconnect_delay_max`.
    pub reconnect_delay: Duration,
    pub reconnect_delay_max: Duration,
    /// How long to reconnect after a loss before the controller fails; zero: no reconnect, `None`:
    /// no limit.
    pub loss_timeout: Option<Duration>,
    /// How long I/O waits for a connection. Then it fails with [`nacre_bdev::Status::Gone`], and
    /// new I/O fails immediately. `None`: I/O waits until the controller fails.
    pub fast_io_fail: Option<Duration>,
    /// I/O to a namespace that is inaccessible on this path (ANA) waits for access, at most
    /// `fast_io_fail`. If false, it fails with [`nacre_bdev::Status::Gone`].
    pub wait_for_access: bool,
    /// The two transports and their delays, which replace `reconnect_delay`. `None`: one transport.
    pub paths: Option<PathOptions>,
    /// Keys for DH-HMAC-CHAP: of this host, and of the controller for bidirectional authentication.
    /// `None`: the host does not authenticate itself.
    pub authentication: Option<HostAuth>,
    /// Secure channel concatenation: authentication generates the PSK of TLS, which the transport
    /// reads here. `None`: without it.
    pub concatenation: Option<Arc<GeneratedPsk>>,
}

impl HostOptions {
    pub fn new(hostnqn: Nqn, hostid: [u8; 16], subnqn: Nqn) -> Self {
        Self {
            hostnqn,
            hostid,
            subnqn,
            controller: ControllerId::default(),
            queue_entries: 128,
            io_queues: 1,
            keep_alive: Duration::from_secs(15),
            disable_sq_flow_control: true,
            connect_timeout: Duration::from_secs(5),
            admin_timeout: Duration::from_secs(30),
            io_timeout: Duration::from_secs(30),
            reconnect_delay: Duration::from_millis(500),
            reconnect_delay_max: Duration::from_secs(10),
            loss_timeout: Some(Duration::from_secs(600)),
            fast_io_fail: None,
            wait_for_access: false,
            paths: None,
            authentication: None,
            concatenation: None,
        }
    }

    /// Forgets the PSK of a lost association, if authentication had generated it.
    pub(super) fn lost(&self, error: &HostError) {
        if let Some(psk) = &self.concatenation {
            psk.lost(error);
        }
    }
}

/// The keys and settings of a host's authentication.
#[derive(Clone)]
pub struct HostAuth {
    pub keys: Arc<dyn KeySource>,
    /// Hash functions and Diffie-Hellman groups that the host offers and accepts.
    pub offer: Offer,
    /// The thread that reads the keys and computes the exponentiations.
    pub helper: Arc<Helper>,
}

impl fmt::Debug for HostAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostAuth")
            .field("keys", &self.keys)
            .field("offer", &self.offer)
            .finish_non_exhaustive()
    }
}
