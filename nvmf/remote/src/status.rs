//! The status of an attached controller, as its poller last published it.

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
    /// because there is no time limit.
    Waiting {
        error: HostError,
        refused: bool,
    },
    /// Given up after `loss_timeout`, or because the target refused permanently.
    Failed(HostError),
    /// Disconnected by [`crate::Path::set_enabled`].
    Disabled,
    /// Closed by [`crate::Path::close`].
    Closed,
}

impl State {
    /// Returns SPDK's word for the state.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Connecting | Self::Waiting { .. } => "resetting",
            Self::Live => "enabled",
            Self::Failed(_) => "failed",
            Self::Disabled => "disabled",
            Self::Closed => "deleting",
        }
    }

    pub fn error(&self) -> Option<&HostError> {
        match self {
            Self::Waiting { error, .. } | Self::Failed(error) => Some(error),
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
    pub(crate) fn of(identify: &IdentifyController) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        let (version, cmic) = (identify.ver.get(), Cmic::from_bits_retain(identify.cmic));
        Self {
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
    /// Transport of the connection, or of the current attempt to connect.
    pub transport: TransportType,
    /// Number of successful connects.
    pub connects: u64,
    /// Number of resets started. Failures that follow a change of this number belong to the latest
    /// one.
    pub resets: u64,
    /// Losses of this path; see [`nacre_bdev::Bdev::losses`].
    pub losses: u64,
    /// True if there has been no connection for longer than `fast_io_fail`: I/O fails at once.
    pub away: bool,
    /// True if no transport works: with two, both have used up their attempts since the last
    /// connection; with one, the latest attempt failed.
    pub exhausted: bool,
    /// The latest error; if `exhausted`, the latest failure of each transport.
    pub causes: String,
    /// Counters of the transports; `None` if the controller has only one.
    pub paths: Option<PathCounts>,
    /// I/O queues that the controller granted at the latest connection.
    pub io_queues: u16,
    /// Controller attributes, set from the first connection on.
    pub info: ControllerInfo,
}

impl Status {
    pub(crate) fn new(transport: TransportType) -> Self {
        Self {
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
