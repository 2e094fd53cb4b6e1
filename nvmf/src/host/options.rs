//! The options of a host, and its errors.

use std::time::Duration;

use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf_wire::fabrics::{ConnectData, InvalidParameter};
use nacre_nvmf_wire::{Nqn, StatusCode};

use super::authentication::HostAuth;
use super::paths::PathOptions;
use crate::auth::Reason;
use crate::transport::{Closed, HostTransport, TransportType};

/// A queue that is to be connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// 0: the admin queue.
    pub qid: u16,
    pub entries: u16,
    /// The controller that an I/O queue is for; 0 for the admin queue.
    pub cntlid: u16,
    /// `None`: the host has no choice of transports.
    pub transport: Option<TransportType>,
}

/// Makes transport connections for one controller.
pub trait Dial {
    /// Starts a connection for queue `qid`; it announces itself with
    /// [`crate::transport::HostEvent::Ready`].
    fn dial(&mut self, qid: u16) -> std::io::Result<Box<dyn HostTransport>>;

    /// The same, for transports that need to know more or where there are several.
    fn dial_wanted(&mut self, wanted: &Wanted) -> std::io::Result<Box<dyn HostTransport>> {
        self.dial(wanted.qid)
    }
}

impl<F: FnMut(u16) -> std::io::Result<Box<dyn HostTransport>>> Dial for F {
    fn dial(&mut self, qid: u16) -> std::io::Result<Box<dyn HostTransport>> {
        self(qid)
    }
}

/// Makes transport connections to one controller, from any thread. Shared by all threads that
/// connect queues to it.
pub trait Connector: Send + Sync {
    /// Makes a dialer for one [`crate::host::Controller`] or [`crate::host::IoQueue`] of this
    /// thread.
    fn dialer(&self) -> Box<dyn Dial>;

    /// Buffers for this thread that every connection made here can use.
    fn memory(&self, classes: &[ClassSpec]) -> std::io::Result<Pool> {
        Ok(Pool::heap(classes))
    }
}

/// The controller of a subsystem that a host requests (Base 6.3). A subsystem has dynamic
/// controllers or static ones; the CNTLID of its discovery log entries says which.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ControllerId {
    /// One that is made for the association.
    #[default]
    Dynamic,
    /// Any static one that is free, and after a loss the same again, if that still is.
    AnyStatic,
    /// This static one.
    Static(u16),
}

impl ControllerId {
    /// CNTLID of the Connect.
    pub fn asked(self) -> u16 {
        match self {
            ControllerId::Dynamic => ConnectData::CNTLID_DYNAMIC,
            ControllerId::AnyStatic => ConnectData::CNTLID_STATIC_ANY,
            ControllerId::Static(id) => id,
        }
    }
}

/// How a host connects. The defaults are those of Linux, but for a quicker first reconnect.
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
    /// I/O queues wanted; the controller may grant fewer.
    pub io_queues: u16,
    /// Keep-alive timeout; zero for none.
    pub keep_alive: Duration,
    /// Turn submission queue flow control off, so that reads can end without a response capsule.
    pub disable_sq_flow_control: bool,
    /// Longest time to connect and enable, and then to read each namespace.
    pub connect_timeout: Duration,
    /// Longest time for an admin command.
    pub admin_timeout: Duration,
    /// Longest time for an I/O command before its connection is given up.
    pub io_timeout: Duration,
    /// First delay before connecting again; doubles with each failure up to `reconnect_delay_max`.
    pub reconnect_delay: Duration,
    pub reconnect_delay_max: Duration,
    /// How long to retry; `None`: without end. Zero: not at all.
    pub loss_timeout: Option<Duration>,
    /// While the association, or an I/O queue, has been away for longer, I/O ends with
    /// [`nacre_bdev::Status::Gone`] at once; `None`: it waits as long as it is tried to connect.
    pub fast_io_fail: Option<Duration>,
    /// I/O that a target refuses because its namespace is inaccessible by this path (ANA) waits for
    /// access, at most `fast_io_fail`. Otherwise it ends with [`nacre_bdev::Status::Gone`].
    pub wait_for_access: bool,
    /// The transports to choose from, and how; `None`: one, and `reconnect_delay`. With paths their
    /// own delays count instead.
    pub paths: Option<PathOptions>,
    /// Keys of this host, and of the controller if that must prove itself, too.
    pub authentication: Option<HostAuth>,
}

impl HostOptions {
    pub fn new(hostnqn: Nqn, hostid: [u8; 16], subnqn: Nqn) -> HostOptions {
        HostOptions {
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
        }
    }
}

/// Why a connection was not made, or was lost.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    #[error("cannot connect: {0}")]
    Dial(String),
    #[error("{}", lost(.0))]
    Lost(Closed),
    /// Over RDMA, Linux targets disconnect before their report of a wrong key arrives.
    #[error("{}, during authentication", lost(.0))]
    LostInAuthentication(Closed),
    #[error("{step} was refused: {}", shown(*status, *fabrics))]
    Refused {
        step: &'static str,
        status: StatusCode,
        /// A fabrics command, whose codes share numbers with those of other commands.
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
    #[error("the target requires a secure channel, which this host does not support")]
    SecureChannelRequired,
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
    pub(super) fn closed(why: Closed, authenticating: bool) -> HostError {
        if authenticating {
            HostError::LostInAuthentication(why)
        } else {
            HostError::Lost(why)
        }
    }

    /// Whether trying again is pointless: the target refused for good (DNR).
    pub fn is_final(&self) -> bool {
        match self {
            HostError::Refused { status, .. } => status.dnr(),
            HostError::InvalidParameter { dnr, .. } => *dnr,
            HostError::KeyRequired | HostError::SecureChannelRequired => true,
            // The same keys fail again.
            HostError::Authentication(reason) => reason.is_final(),
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
