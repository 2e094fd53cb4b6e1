//! How an attachment stands, as its core last said.

use nacre_nvmf::host::{HostError, PathCounts};
use nacre_nvmf::transport::TransportType;
use nacre_nvmf_wire::identify::IdentifyController;
use nacre_nvmf_wire::identify::controller::Cmic;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Connects for the first time, or again after a loss.
    Connecting,
    Live,
    /// Waits for the next attempt. `refused`: the target has refused permanently, and is retried
    /// nevertheless.
    Waiting {
        error: HostError,
        refused: bool,
    },
    /// Given up: the limit of time is over, or the target said no for good.
    Failed(HostError),
    /// Detached.
    Closed,
}

impl State {
    /// Returns SPDK's word for the state.
    pub fn word(&self) -> &'static str {
        match self {
            State::Connecting | State::Waiting { .. } => "resetting",
            State::Live => "enabled",
            State::Failed(_) => "failed",
            State::Closed => "deleting",
        }
    }

    pub fn error(&self) -> Option<&HostError> {
        match self {
            State::Waiting { error, .. } | State::Failed(error) => Some(error),
            _ => None,
        }
    }
}

/// A controller's attributes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ControllerInfo {
    pub cntlid: u16,
    pub vendor_id: u16,
    pub model: String,
    pub serial: String,
    pub firmware: String,
    /// Major, minor, tertiary.
    pub version: (u16, u8, u8),
    pub oacs: u16,
    pub multi_controller: bool,
    pub ana_reporting: bool,
}

impl ControllerInfo {
    pub(crate) fn of(identify: &IdentifyController) -> ControllerInfo {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        let (version, cmic) = (identify.ver.get(), Cmic::from_bits_retain(identify.cmic));
        ControllerInfo {
            cntlid: identify.cntlid.get(),
            vendor_id: identify.vid.get(),
            model: text(&identify.mn[..]),
            serial: text(&identify.sn[..]),
            firmware: text(&identify.fr[..]),
            version: ((version >> 16) as u16, (version >> 8) as u8, version as u8),
            oacs: identify.oacs.get(),
            multi_controller: cmic.contains(Cmic::MULTIPLE_CONTROLLERS),
            ana_reporting: cmic.contains(Cmic::ANA_REPORTING),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    pub state: State,
    /// Transport of the connection, or of the present attempt.
    pub transport: TransportType,
    /// Times that it was connected.
    pub connects: u64,
    /// Number of resets begun: later reports are about the last one.
    pub resets: u64,
    /// See [`nacre_bdev::Bdev::losses`].
    pub losses: u64,
    /// I/O ends at once: it has been away for too long.
    pub away: bool,
    /// Every transport has had its attempts since there was a connection.
    pub exhausted: bool,
    /// Why the transports failed, the last time that they did.
    pub causes: String,
    /// Where there is a choice of transports.
    pub paths: Option<PathCounts>,
    /// I/O queues granted.
    pub io_queues: u16,
    /// Controller attributes, set from the first connection on.
    pub info: ControllerInfo,
}

impl Status {
    pub(crate) fn new(transport: TransportType) -> Status {
        Status {
            state: State::Connecting,
            transport,
            connects: 0,
            resets: 0,
            losses: 0,
            away: false,
            exhausted: false,
            causes: String::new(),
            paths: None,
            io_queues: 0,
            info: ControllerInfo::default(),
        }
    }
}
