//! The options and errors of a host, and the traits through which it opens connections.

use std::sync::Arc;
use std::time::Duration;

use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf_wire::fabrics::{ConnectData, InvalidParameter};
use nacre_nvmf_wire::{Nqn, StatusCode};

use super::authentication::HostAuth;
use super::concatenation::GeneratedPsk;
use super::paths::PathOptions;
use crate::auth::Reason;
use crate::transport::{Closed, HostTransport, TransportType};

/// The queue for which [`Dial`] opens a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
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
    fn dial_wanted(&mut self, wanted: &Wanted) -> std::io::Result<Box<dyn HostTransport>> {
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
    /// Creates the [`Dial`] of one [`crate::host::Controller`] or [`crate::host::IoQueue`] on this
    /// thread.
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

/// Options of a host. The defaults are those of Linux, except for a shorter first reconnect delay.
#[derive(Debug, Clone)]
pub struct HostOptions {
    pub hostnqn: Nqn,
    pub hostid: [u8; 16],
    pub subnqn: Nqn,
    /// The controller to request. With `paths` and [`ControllerId::Static`], the host changes to
    /// a better path only after a loss.
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
    /// Longest time to connect and enable, and then to read each namespace.
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
    pub authentication: Option<HostAuth>,
    /// Secure channel concatenation: authentication makes the PSK of TLS. The transport reads it
    /// here. `None`: without it.
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

/// The reason why a connection failed or was lost.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    #[error("cannot connect: {0}")]
    Dial(String),
    #[error("{}", lost(.0))]
    Lost(Closed),
    /// Lost during authentication. Over RDMA, Linux targets report a wrong key in this way, because
    /// they disconnect before their message arrives.
    #[error("{}, during authentication", lost(.0))]
    LostInAuthentication(Closed),
    #[error("{step} was refused: {}", shown(*status, *fabrics))]
    Refused {
        step: &'static str,
        status: StatusCode,
        /// The status belongs to a fabrics command, which gives some codes another meaning.
        fabrics: bool,
    },
    #[error("connect was refused: invalid {parameter}")]
    InvalidParameter {
        parameter: InvalidParameter,
        dnr: bool,
    },
    #[error("{step} took longer than {limit:?}")]
    TimedOut { step: &'static str, limit: Duration },
    #[error("reset by this host")]
    Reset,
    #[error("no I/O queue comes up: {why}")]
    IoQueues { why: String },
    #[error("I/O under way was not answered within {limit:?}")]
    NotDrained { limit: Duration },
    #[error("the target requires authentication, and this host has no key for it (dhchap_key)")]
    KeyRequired,
    #[error("the target requires secure channel concatenation, which is not on for it (concat)")]
    SecureChannelRequired,
    #[error("secure channel concatenation (concat) needs a key of this host (dhchap_key)")]
    ConcatenationKey,
    #[error("authentication failed: {0}")]
    Authentication(Reason),
    #[error("the target misbehaved: {what}")]
    Misbehaved { what: String },
}

fn shown(status: StatusCode, fabrics: bool) -> String {
    if fabrics {
        status.of_fabrics().to_string()
    } else {
        status.to_string()
    }
}

fn lost(why: &Closed) -> String {
    match why {
        Closed::Broken(why) | Closed::Refused(why) => why.clone(),
        Closed::Protocol(what) => format!("connection lost: {what}"),
        Closed::Peer => "connection lost: closed by the target".into(),
        Closed::TimedOut => "no answer in time".into(),
        Closed::Local => "connection lost: closed by this host".into(),
    }
}

impl HostError {
    pub(super) fn closed(why: Closed, authenticating: bool) -> Self {
        if authenticating {
            Self::LostInAuthentication(why)
        } else {
            Self::Lost(why)
        }
    }

    /// True if retries are useless: the target refused permanently (DNR).
    pub fn is_final(&self) -> bool {
        match self {
            Self::Refused { status, .. } => status.dnr(),
            Self::InvalidParameter { dnr, .. } => *dnr,
            Self::KeyRequired | Self::SecureChannelRequired | Self::ConcatenationKey => true,
            // The same keys would fail again.
            Self::Authentication(reason) => reason.is_final(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host that never answered was not connected.
    #[test]
    fn silence_is_no_lost_connection() {
        let silent = HostError::Lost(Closed::TimedOut);
        assert_eq!(silent.to_string(), "no answer in time");
    }

    /// 181h is "busy" as the answer to Connect, and something about data as the answer to a read.
    #[test]
    fn a_status_is_named_by_its_command() {
        let refused = |step, fabrics| HostError::Refused {
            step,
            status: StatusCode::CONNECT_CONTROLLER_BUSY,
            fabrics,
        };
        assert_eq!(
            refused("connect", true).to_string(),
            "connect was refused: Connect Controller Busy (sct 0x1, sc 0x81)"
        );
        assert_eq!(
            refused("list namespaces", false).to_string(),
            "list namespaces was refused: Invalid Protection Information (sct 0x1, sc 0x81)"
        );
    }
}
