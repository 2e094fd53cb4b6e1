//! Incidents: failures that operators are notified of. At most [`KEPT`] are stored until the daemon
//! takes them; further ones are dropped.

use std::fmt;
use std::net::SocketAddr;
use std::sync::OnceLock;

use crossbeam_queue::ArrayQueue;
use nacre_nvmf_wire::rdma::RejectStatus;
use nacre_transport_rdma_verbs::{WcOpcode, WcStatus};

const KEPT: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Incident {
    /// A request failed, which ended its queue pair.
    QueuePairFailed {
        device: String,
        /// Queue pair number.
        number: u32,
        local: SocketAddr,
        peer: SocketAddr,
        status: WcStatus,
        vendor_error: u32,
        opcode: WcOpcode,
    },
    /// A host's connection request was refused.
    Refused {
        local: SocketAddr,
        peer: SocketAddr,
        status: RejectStatus,
        why: String,
    },
    /// A device in use failed, was removed, or lost its address.
    DeviceLost { device: String, why: &'static str },
}

/// The name of an operation, as `nacre rdma perf` writes it.
fn name(opcode: WcOpcode) -> &'static str {
    match opcode {
        WcOpcode::Send => "SEND",
        WcOpcode::Write => "RDMA WRITE",
        WcOpcode::Read => "RDMA READ",
        WcOpcode::Recv => "RECV",
        WcOpcode::Other(_) => "request",
    }
}

impl Incident {
    /// Advice for the operator.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::QueuePairFailed { status, .. } => status.remedy(),
            Self::Refused {
                status: RejectStatus::NoResources,
                ..
            } => {
                "`nacre rdma size` prints the need, `nacre rdma devices -v` the limits of the device"
            }
            Self::Refused { .. } => {
                "the host asks for what this target does not do: look at its driver and at the size of its queues"
            }
            Self::DeviceLost { .. } => "listeners are back when the device is",
        }
    }

    /// The cause as text. Incidents of the same peer or device with the same cause are repeats.
    pub fn cause(&self) -> String {
        match self {
            Self::QueuePairFailed { status, .. } => status.name().to_owned(),
            Self::Refused { status, why, .. } => format!("{status}: {why}"),
            Self::DeviceLost { why, .. } => (*why).to_owned(),
        }
    }

    /// The operation of a failed request, such as `RDMA WRITE`; `None` for other incidents.
    pub fn operation(&self) -> Option<&'static str> {
        match self {
            Self::QueuePairFailed { opcode, .. } => Some(name(*opcode)),
            _ => None,
        }
    }
}

/// The text contains the words that operators search for.
impl fmt::Display for Incident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::QueuePairFailed {
                device,
                number,
                peer,
                status,
                vendor_error,
                opcode,
                ..
            } => write!(
                f,
                "Work completion error: {status} of a {} on queue pair {number} of {device} with {peer} (vendor error \
                 {vendor_error:#x}): {}; {}",
                name(*opcode),
                status.meaning(),
                status.remedy()
            ),
            Self::Refused {
                local,
                peer,
                status,
                why,
            } => write!(
                f,
                "RDMA connection of {peer} to {local} refused, {status} (code {:02x}h): {why}",
                *status as u16
            ),
            Self::DeviceLost { device, why } => {
                write!(
                    f,
                    "RDMA device {device} is lost, {why}: its connections end"
                )
            }
        }
    }
}

/// Passes incidents from the threads that see them to the thread that reports them.
pub(crate) struct Incidents {
    all: ArrayQueue<Incident>,
    callback: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl Incidents {
    pub(crate) fn new() -> Self {
        Self {
            all: ArrayQueue::new(KEPT),
            callback: OnceLock::new(),
        }
    }

    /// Calls `callback` for each new incident. The first callback counts.
    pub(crate) fn on(&self, callback: impl Fn() + Send + Sync + 'static) {
        let _ = self.callback.set(Box::new(callback));
    }

    pub(crate) fn add(&self, incident: Incident) {
        if self.all.push(incident).is_ok()
            && let Some(callback) = self.callback.get()
        {
            callback();
        }
    }

    pub(crate) fn take(&self) -> Vec<Incident> {
        std::iter::from_fn(|| self.all.pop()).take(KEPT).collect()
    }
}
