//! The errors of an RDMA measurement, on its client and its server.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use nacre_hugepages::{ArenaError, CarveError, RegisterError};
use nacre_transport_rdma_verbs::{NotRegistered, PostError, VerbsError, WcStatus};

use crate::params::Invalid;
use crate::wire::{Ending, Message, Reject, WireError};

#[derive(Debug, thiserror::Error)]
pub enum PerfError {
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// An error of the verbs crate, whose text has the remedy.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    #[error(transparent)]
    Memory(#[from] ArenaError),
    #[error(transparent)]
    Carve(#[from] CarveError),
    #[error(
        "the test needs {needed} bytes of memory here, {limit} are allowed (--memory); use smaller messages, less depth \
         or fewer queue pairs"
    )]
    TooMuch { needed: u64, limit: u64 },
    /// Registering memory failed. The text of the cause names the limit and how to raise it.
    #[error("{}", innermost(.0))]
    Register(RegisterError),
    #[error(transparent)]
    NotRegistered(#[from] NotRegistered),
    /// The queue pair refused the posted requests.
    #[error("ibv_post failed on a queue pair to {peer}: {source}")]
    Post { peer: SocketAddr, source: PostError },
    #[error("waiting for RDMA events failed: {0}")]
    Wait(io::Error),
    #[error(
        "RDMA connection timeout after {}ms in {stage} to {peer}; is it there (`ping {}`), does the packet filter \
         admit UDP 4791, has this machine a GID for the address it comes from (`nacre rdma gids`)?",
        .after.as_millis(), .peer.ip()
    )]
    Timeout {
        stage: &'static str,
        peer: SocketAddr,
        after: Duration,
    },
    /// An event of the connection manager reported the failure.
    #[error(
        "cannot connect to {peer} by RDMA: {event}, status {status}{} ({stage}){}",
        in_words(*.status), hint(.event, *.status)
    )]
    Connect {
        stage: &'static str,
        peer: SocketAddr,
        event: &'static str,
        status: i32,
    },
    #[error(
        "{peer} refused the connection (reason {status}): no `nacre rdma perf server` listens there"
    )]
    NobodyListens { peer: SocketAddr, status: i32 },
    #[error("the server at {peer} refused: {reject}")]
    Refused { peer: SocketAddr, reject: Reject },
    #[error("{peer} is not a `nacre rdma perf` of the same version: {source}")]
    Foreign { peer: SocketAddr, source: WireError },
    #[error("this needs {needed} {what}, the RDMA device {device} has {limit}; use {remedy}")]
    Device {
        what: &'static str,
        needed: u64,
        limit: u64,
        device: String,
        remedy: &'static str,
    },
    #[error(
        "another queue pair of the same test went by {other} in place of {device}; name the address to use"
    )]
    TwoDevices { device: String, other: String },
    #[error(
        "the server at {peer} answers no RDMA READ (READ depth 0); measure WRITE, or use another device there"
    )]
    NoReads { peer: SocketAddr },
    #[error(transparent)]
    Completion(Failed),
    #[error("the completion queue ended: {source}")]
    Queue { source: VerbsError },
    #[error(
        "{peer} has said nothing for {}ms ({during}): it is gone, stopped, or the network between is cut",
        .after.as_millis()
    )]
    Silent {
        peer: SocketAddr,
        after: Duration,
        during: &'static str,
    },
    #[error(
        "requests to {peer} have not completed for {}ms, while the other end lives: packets of this size may be lost on \
         the way (MTU), a device does not work, or a message takes longer (--peer-timeout)",
        .after.as_millis()
    )]
    Stuck { peer: SocketAddr, after: Duration },
    #[error("{peer} closed the connection ({during})")]
    Disconnected {
        peer: SocketAddr,
        during: &'static str,
    },
    #[error("the RDMA device {device} was removed ({during})")]
    DeviceRemoved {
        device: String,
        during: &'static str,
    },
    #[error("the address moved to another RDMA device ({during})")]
    AddressMoved { during: &'static str },
    #[error("{peer} ended it: {ending}{}", status_in_words(*.status))]
    PeerEnded {
        peer: SocketAddr,
        ending: Ending,
        status: Option<WcStatus>,
    },
    #[error(transparent)]
    Mismatch(Mismatch),
    #[error("{peer} broke the protocol: {what}")]
    Confused {
        peer: SocketAddr,
        what: &'static str,
    },
    #[error("stopped before anything was measured")]
    Interrupted,
    /// None of the server's listeners is left: their addresses or devices were removed.
    #[error("nothing is left to listen on: the RDMA device was removed")]
    NoListener,
}

impl PerfError {
    /// Creates the error of an end whose test was ended by a message of the peer.
    pub(crate) fn peer_ended(peer: SocketAddr, ending: Ending, status: u8) -> Self {
        let status = match ending {
            Ending::Completion => Some(WcStatus::from_raw(status.into())),
            _ => None,
        };
        Self::PeerEnded {
            peer,
            ending,
            status,
        }
    }

    /// The message that reports this error to the peer.
    pub(crate) fn final_message(&self) -> Message {
        let (ending, status) = match self {
            Self::Completion(failed) => (Ending::Completion, failed.status as u8),
            Self::Interrupted => (Ending::Interrupted, 0),
            Self::Mismatch(_) => (Ending::Mismatch, 0),
            Self::Silent { .. } => (Ending::Silence, 0),
            Self::Confused { .. } | Self::Foreign { .. } => (Ending::Confused, 0),
            _ => (Ending::Resources, 0),
        };
        Message::End {
            ending,
            status,
            messages: 0,
            bytes: 0,
        }
    }
}

/// A work request that completed with an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "Work completion error: {status} of a {opcode} on queue pair {qp} with {peer} (vendor error {vendor_error:#x}): {}; {}",
    .status.meaning(), .status.remedy()
)]
pub struct Failed {
    pub status: WcStatus,
    pub vendor_error: u32,
    pub opcode: &'static str,
    pub qp: u32,
    pub peer: SocketAddr,
}

/// A byte that differs from the sent one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "wrong data of {peer}: message {number} of queue pair {index}, byte {offset} is {found:#04x} and should be \
     {expected:#04x} (found by the {by})"
)]
pub struct Mismatch {
    pub peer: SocketAddr,
    /// Index of the queue pair in the test.
    pub index: u16,
    pub number: u64,
    pub offset: u64,
    pub expected: u8,
    pub found: u8,
    /// `client` or `server`.
    pub by: &'static str,
}

impl From<RegisterError> for PerfError {
    fn from(error: RegisterError) -> Self {
        Self::Register(error)
    }
}

/// The innermost cause has the best text: the refusal of the device or the kernel.
fn innermost(error: &RegisterError) -> String {
    match error {
        RegisterError::Device { source, .. } => source.to_string(),
        other => other.to_string(),
    }
}

/// A negative status is an errno.
fn in_words(status: i32) -> String {
    match status {
        ..0 => format!(
            " ({})",
            io::Error::from_raw_os_error(status.saturating_neg())
        ),
        _ => String::new(),
    }
}

/// The usual cause when no device is found for an address.
fn hint(event: &str, status: i32) -> &'static str {
    const ENODEV: i32 = -19;
    match (event, status) {
        ("RDMA_CM_EVENT_ADDR_ERROR", ENODEV) => {
            "; the way there leads over an interface without an RDMA device or GID: `nacre rdma gids`, or choose with \
             --source"
        }
        ("RDMA_CM_EVENT_UNREACHABLE", _) => {
            "; is UDP 4791 (RoCE v2) admitted by the packet filters of both machines?"
        }
        _ => "",
    }
}

fn status_in_words(status: Option<WcStatus>) -> String {
    match status {
        Some(status) => format!(": {status}: {}; {}", status.meaning(), status.remedy()),
        None => String::new(),
    }
}
