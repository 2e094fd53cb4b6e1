//! DCB settings of a network interface (IEEE 802.1Qaz): read and change them over rtnetlink, as
//! dcb(8) of iproute2 does.
//!
//! | type | setting | kernel struct |
//! |---|---|---|
//! | [`Pfc`] | priorities that pause instead of losing frames, and counters | `ieee_pfc` |
//! | [`Ets`] | the class of each priority; scheduling and bandwidth of each class | `ieee_ets` |
//! | [`App`], `trust` | the priority of packets by DSCP, EtherType or port | `dcb_app` |
//! | [`Buffers`] | receive buffer of each priority | `dcbnl_buffer` |
//! | [`DcbxMode`] | the agent that owns these settings: host or firmware | `DCB_ATTR_DCBX` |
//!
//! [`read`] sends `RTM_GETDCB` with `DCB_CMD_IEEE_GET`, whose reply has every IEEE object, and
//! `DCB_CMD_GDCBX`. It needs no privilege. [`apply`] sends `RTM_SETDCB` and needs CAP_NET_ADMIN. A
//! driver without `dcbnl_ops` fails with EOPNOTSUPP ([`DcbError::NotSupported`]). Encoding and
//! parsing are pure functions ([`message`], [`Dcb::parse`]); constants are those of
//! `linux/dcbnl.h`.

mod change;

use std::fmt;
use std::io;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::nlmsg::{
    NLM_F_ACK, NLM_F_REQUEST, Request, attribute_of, attributes, c_string, exchange, read_answer,
    u16_at, u32_at, u64_at,
};

pub use change::{Change, apply, message, parse_status};

/// Number of priorities of an Ethernet frame (PCP, 3 bits), and of traffic classes
/// (IEEE_8021QAZ_MAX_TCS).
pub const PRIORITIES: usize = 8;

/// A set of priorities as a bitmap, like `pfc_en`: bit 3 is priority 3.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Priorities(pub u8);

impl Priorities {
    pub fn contains(self, priority: u8) -> bool {
        priority < 8 && self.0 & (1 << priority) != 0
    }

    pub fn iter(self) -> impl Iterator<Item = u8> {
        (0..8).filter(move |priority| self.contains(*priority))
    }

    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl FromIterator<u8> for Priorities {
    /// Numbers above 7 are no priorities, and are left out.
    fn from_iter<I: IntoIterator<Item = u8>>(all: I) -> Self {
        let bits = all.into_iter().filter(|priority| *priority < 8);
        Self(bits.fold(0, |set, priority| set | 1 << priority))
    }
}

impl fmt::Display for Priorities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<String> = self.iter().map(|priority| priority.to_string()).collect();
        f.write_str(if all.is_empty() { "none" } else { "" })?;
        f.write_str(&all.join(","))
    }
}

/// Transmission selection algorithm of a traffic class (IEEE 802.1Q, table 8-5; `tc_tsa`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Algorithm {
    /// The class is sent before all classes of a lower number, and before all ETS classes.
    Strict,
    CreditShaper,
    /// The class gets its share of the bandwidth.
    Ets,
    Other(u8),
}

impl Algorithm {
    pub fn of(code: u8) -> Self {
        match code {
            0 => Self::Strict,
            1 => Self::CreditShaper,
            2 => Self::Ets,
            other => Self::Other(other),
        }
    }

    pub fn code(self) -> u8 {
        match self {
            Self::Strict => 0,
            Self::CreditShaper => 1,
            Self::Ets => 2,
            Self::Other(other) => other,
        }
    }
}

/// Enhanced transmission selection: `struct ieee_ets`. Arrays are indexed by traffic class, only
/// `class_of` (`prio_tc`) by priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ets {
    /// The port accepts the peer's settings over DCBX.
    pub willing: bool,
    /// Number of traffic classes of the device (`ets_cap`); 0: the driver does not report it.
    pub classes: u8,
    /// The device supports the credit-based shaper (`cbs`).
    pub credit_shaper: bool,
    /// Percent of the bandwidth (`tc_tx_bw`); only of classes whose algorithm is ETS.
    pub share: [u8; PRIORITIES],
    /// `tc_tsa`.
    pub algorithm: [Algorithm; PRIORITIES],
    /// The class of each priority (`prio_tc`).
    pub class_of: [u8; PRIORITIES],
}

impl Ets {
    /// Sum of the shares of the ETS classes, which must be 100 if there are any.
    pub fn sum(&self) -> u32 {
        let classes = self.share.iter().zip(self.algorithm);
        let shares = classes.filter(|(_, algorithm)| *algorithm == Algorithm::Ets);
        shares.map(|(share, _)| u32::from(*share)).sum()
    }

    pub fn has_shares(&self) -> bool {
        self.algorithm.contains(&Algorithm::Ets)
    }

    /// The class of a priority.
    pub fn class(&self, priority: u8) -> u8 {
        self.class_of[usize::from(priority & 7)]
    }

    /// The priorities of a class.
    pub fn priorities(&self, class: u8) -> Priorities {
        (0..8)
            .filter(|priority| self.class(*priority) == class)
            .collect()
    }

    /// struct ieee_ets.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let array = |at: usize| -> Option<[u8; PRIORITIES]> {
            bytes
                .get(3 + at * PRIORITIES..3 + (at + 1) * PRIORITIES)?
                .try_into()
                .ok()
        };
        array(6)?;
        Some(Self {
            willing: bytes[0] != 0,
            classes: bytes[1],
            credit_shaper: bytes[2] != 0,
            share: array(0)?,
            algorithm: array(2)?.map(Algorithm::of),
            class_of: array(3)?,
        })
    }

    /// Merges these settings into the `struct ieee_ets` that the driver reported: the shares of
    /// received traffic and the recommendation to the switch stay, as with dcb(8).
    fn over(self, mut found: [u8; 59]) -> [u8; 59] {
        let bytes = self.to_bytes();
        // Willing; shares; algorithms and classes, which are neighbours.
        for range in [0..1_usize, 3..11, 19..35] {
            found[range.clone()].copy_from_slice(&bytes[range]);
        }
        found
    }

    /// Encodes `struct ieee_ets`, with the configuration as the recommendation to the switch.
    fn to_bytes(self) -> [u8; 59] {
        let mut bytes = [0; 59];
        bytes[..3].copy_from_slice(&[
            u8::from(self.willing),
            self.classes,
            u8::from(self.credit_shaper),
        ]);
        let algorithm = self.algorithm.map(Algorithm::code);
        let arrays = [
            self.share,
            self.share,
            algorithm,
            self.class_of,
            self.share,
            algorithm,
            self.class_of,
        ];
        for (array, at) in arrays.iter().zip((3..59).step_by(PRIORITIES)) {
            bytes[at..at + PRIORITIES].copy_from_slice(array);
        }
        bytes
    }
}

/// Priority-based flow control (IEEE 802.1Qbb): `struct ieee_pfc`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pfc {
    /// Number of priorities that may have PFC at once (`pfc_cap`); 0: not reported.
    pub capability: u8,
    /// Priorities with PFC (`pfc_en`).
    pub enabled: Priorities,
    /// MACsec bypass capability (`mbc`).
    pub bypass: bool,
    /// Allowance for the round-trip delay of the link, in bit times.
    pub delay: u16,
    /// PFC frames sent, by priority (`requests`).
    pub sent: [u64; PRIORITIES],
    /// PFC frames received, by priority (`indications`).
    pub received: [u64; PRIORITIES],
}

impl Pfc {
    /// struct ieee_pfc.
    fn parse(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            capability: *bytes.first()?,
            enabled: Priorities(*bytes.get(1)?),
            bypass: *bytes.get(2)? != 0,
            delay: u16_at(bytes, 4)?,
            sent: numbers(bytes, 8)?,
            received: numbers(bytes, 72)?,
        })
    }

    /// Encodes `struct ieee_pfc`, without counters.
    fn to_bytes(self) -> [u8; 136] {
        let mut bytes = [0; 136];
        bytes[0] = self.capability;
        bytes[1] = self.enabled.0;
        bytes[2] = u8::from(self.bypass);
        bytes[4..6].copy_from_slice(&self.delay.to_ne_bytes());
        bytes
    }
}

fn numbers(bytes: &[u8], at: usize) -> Option<[u64; PRIORITIES]> {
    let mut numbers = [0; PRIORITIES];
    for (index, number) in numbers.iter_mut().enumerate() {
        *number = u64_at(bytes, at + 8 * index)?;
    }
    Some(numbers)
}

/// The packet field that an [`App`] entry matches: IEEE_8021QAZ_APP_SEL_*, and the kernel's
/// DCB_APP_SEL_PCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Selector {
    Ethertype,
    /// Port of TCP or SCTP.
    Stream,
    /// Port of UDP or DCCP.
    Datagram,
    /// Port of any of these.
    Port,
    Dscp,
    /// The priority in a VLAN tag.
    Pcp,
    Other(u8),
}

impl Selector {
    pub fn of(code: u8) -> Self {
        match code {
            1 => Self::Ethertype,
            2 => Self::Stream,
            3 => Self::Datagram,
            4 => Self::Port,
            5 => Self::Dscp,
            255 => Self::Pcp,
            other => Self::Other(other),
        }
    }

    pub fn code(self) -> u8 {
        match self {
            Self::Ethertype => 1,
            Self::Stream => 2,
            Self::Datagram => 3,
            Self::Port => 4,
            Self::Dscp => 5,
            Self::Pcp => 255,
            Self::Other(other) => other,
        }
    }

    /// The attribute of an entry: DCB_ATTR_IEEE_APP for IEEE's selectors, DCB_ATTR_DCB_APP for the
    /// kernel's own (PCP).
    fn attribute(self) -> u16 {
        if self.code() <= 5 {
            ieee::APP
        } else {
            ieee::DCB_APP
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // The words of dcb-apptrust(8).
            Self::Ethertype => f.write_str("ethtype"),
            Self::Stream => f.write_str("stream-port"),
            Self::Datagram => f.write_str("dgram-port"),
            Self::Port => f.write_str("port"),
            Self::Dscp => f.write_str("dscp"),
            Self::Pcp => f.write_str("pcp"),
            Self::Other(code) => write!(f, "selector {code}"),
        }
    }
}

/// An entry of the application table (`struct dcb_app`): packets whose field `selector` has this
/// value get this priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct App {
    pub selector: Selector,
    pub value: u16,
    pub priority: u8,
}

impl App {
    pub fn dscp(dscp: u8, priority: u8) -> Self {
        Self {
            selector: Selector::Dscp,
            value: dscp.into(),
            priority,
        }
    }

    /// struct dcb_app.
    fn parse(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            selector: Selector::of(*bytes.first()?),
            priority: *bytes.get(1)?,
            value: u16_at(bytes, 2)?,
        })
    }

    fn to_bytes(self) -> [u8; 4] {
        let [low, high] = self.value.to_ne_bytes();
        [self.selector.code(), self.priority, low, high]
    }
}

/// Receive buffers of a port (`struct dcbnl_buffer`): the buffer of each priority, the size of each
/// buffer, and the total size, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buffers {
    pub buffer_of: [u8; PRIORITIES],
    pub bytes: [u32; PRIORITIES],
    pub total: u32,
}

impl Buffers {
    /// struct dcbnl_buffer.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let mut sizes = [0; PRIORITIES];
        for (index, size) in sizes.iter_mut().enumerate() {
            *size = u32_at(bytes, 8 + 4 * index)?;
        }
        Some(Self {
            buffer_of: bytes.get(..8)?.try_into().ok()?,
            bytes: sizes,
            total: u32_at(bytes, 40)?,
        })
    }

    fn to_bytes(self) -> Vec<u8> {
        let sizes = self.bytes.iter().chain([&self.total]);
        let sizes = sizes.flat_map(|size| size.to_ne_bytes());
        self.buffer_of.into_iter().chain(sizes).collect()
    }
}

/// DCBX mode: the agent that owns the settings and negotiates them with the switch, and the version
/// of the protocol. DCB_CAP_DCBX_* bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DcbxMode(pub u8);

impl DcbxMode {
    /// DCB_CAP_DCBX_HOST and DCB_CAP_DCBX_VER_IEEE: this host decides.
    pub const HOST_IEEE: Self = Self(0x09);

    pub fn is_host(self) -> bool {
        self.0 & 0x01 != 0
    }

    /// DCB_CAP_DCBX_LLD_MANAGED: an agent in the card's firmware decides.
    pub fn is_firmware(self) -> bool {
        self.0 & 0x02 != 0
    }

    pub fn is_cee(self) -> bool {
        self.0 & 0x04 != 0
    }

    pub fn is_ieee(self) -> bool {
        self.0 & 0x08 != 0
    }

    pub fn is_static(self) -> bool {
        self.0 & 0x10 != 0
    }
}

impl fmt::Display for DcbxMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The words of dcb-dcbx(8).
        let words = [
            (self.is_host(), "host"),
            (self.is_firmware(), "lld-managed"),
            (self.is_cee(), "cee"),
            (self.is_ieee(), "ieee"),
            (self.is_static(), "static"),
        ];
        let words = words
            .into_iter()
            .filter(|(is, _)| *is)
            .map(|(_, word)| word);
        let words: Vec<&str> = words.collect();
        f.write_str(if words.is_empty() { "none" } else { "" })?;
        f.write_str(&words.join(" "))
    }
}

/// All DCB settings of an interface. `None`: the driver does not implement the setting.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Dcb {
    pub mode: Option<DcbxMode>,
    pub ets: Option<Ets>,
    pub pfc: Option<Pfc>,
    pub apps: Vec<App>,
    pub buffers: Option<Buffers>,
    /// Rate limit by traffic class in kbit/s (`ieee_maxrate`); 0: no limit.
    pub rates: Option<[u64; PRIORITIES]>,
    /// Selectors in the order of trust (dcb-apptrust(8)). `None`: before Linux 6.2, or a driver
    /// without it.
    pub trust: Option<Vec<Selector>>,
    /// The switch's settings, from a DCBX agent in the card's firmware.
    pub peer_ets: Option<Ets>,
    pub peer_pfc: Option<Pfc>,
    pub peer_apps: Vec<App>,
}

impl Dcb {
    /// Parses a reply to `DCB_CMD_IEEE_GET`. `bytes` begins after the netlink header, at
    /// `struct dcbmsg`.
    pub fn parse(bytes: &[u8]) -> Result<Self, DcbError> {
        let malformed = |field| DcbError::Malformed { field };
        let all = bytes.get(DCBMSG..).ok_or_else(|| malformed("dcbmsg"))?;
        let ieee = attribute_of(all, attribute::IEEE).ok_or_else(|| malformed("ieee"))?;
        let mut dcb = Self::default();
        for (kind, value) in attributes(ieee) {
            match kind {
                ieee::ETS => dcb.ets = Some(Ets::parse(value).ok_or_else(|| malformed("ets"))?),
                ieee::PFC => dcb.pfc = Some(Pfc::parse(value).ok_or_else(|| malformed("pfc"))?),
                ieee::APP_TABLE => dcb.apps = apps(value).ok_or_else(|| malformed("app"))?,
                ieee::PEER_ETS => {
                    dcb.peer_ets = Some(Ets::parse(value).ok_or_else(|| malformed("peer_ets"))?);
                }
                ieee::PEER_PFC => {
                    dcb.peer_pfc = Some(Pfc::parse(value).ok_or_else(|| malformed("peer_pfc"))?);
                }
                ieee::PEER_APP => {
                    dcb.peer_apps = apps(value).ok_or_else(|| malformed("peer_app"))?
                }
                ieee::MAXRATE => {
                    dcb.rates = Some(numbers(value, 0).ok_or_else(|| malformed("maxrate"))?);
                }
                ieee::BUFFER => {
                    dcb.buffers = Some(Buffers::parse(value).ok_or_else(|| malformed("buffer"))?);
                }
                ieee::APP_TRUST_TABLE => {
                    let selectors = attributes(value).filter_map(|(_, value)| value.first());
                    dcb.trust = Some(selectors.map(|code| Selector::of(*code)).collect());
                }
                _ => {}
            }
        }
        dcb.apps.sort_unstable();
        dcb.peer_apps.sort_unstable();
        Ok(dcb)
    }

    /// The selectors that decide a packet's priority, in order. Without a trust table, the port
    /// trusts DSCP if the application table has DSCP entries, else PCP.
    pub fn trusted(&self) -> Vec<Selector> {
        match &self.trust {
            Some(trust) => trust.clone(),
            None if self.apps.iter().any(|app| app.selector == Selector::Dscp) => {
                vec![Selector::Dscp]
            }
            None => vec![Selector::Pcp],
        }
    }

    /// The priority that the application table gives this DSCP. The highest of several entries
    /// counts (IEEE 802.1Qaz).
    pub fn priority_of_dscp(&self, dscp: u8) -> Option<u8> {
        let of = self
            .apps
            .iter()
            .filter(|app| app.selector == Selector::Dscp && app.value == u16::from(dscp));
        of.map(|app| app.priority).max()
    }
}

fn apps(bytes: &[u8]) -> Option<Vec<App>> {
    attributes(bytes)
        .filter(|(kind, _)| [ieee::APP, ieee::DCB_APP].contains(kind))
        .map(|(_, value)| App::parse(value))
        .collect()
}

/// The reason why DCB settings could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum DcbError {
    #[error("the driver of {interface} has no DCB")]
    NotSupported { interface: String },
    #[error("there is no network interface \"{interface}\"")]
    NoInterface { interface: String },
    #[error("not permitted: changing DCB takes CAP_NET_ADMIN")]
    Permission,
    #[error("the driver of {interface} refused it")]
    Refused {
        interface: String,
        source: io::Error,
    },
    #[error("the kernel's answer has a malformed {field}")]
    Malformed { field: &'static str },
    #[error("netlink does not answer")]
    Socket(#[source] io::Error),
}

/// Reads all DCB settings of an interface. Needs no privilege.
pub fn read(interface: &str) -> Result<Dcb, DcbError> {
    let body = answer(interface, RTM_GETDCB, request(command::IEEE_GET, interface))?;
    let mut dcb = Dcb::parse(&body)?;
    // Drivers without `getdcbx` refuse this request.
    if let Ok(body) = answer(interface, RTM_GETDCB, request(command::GDCBX, interface)) {
        dcb.mode = parse_mode(&body);
    }
    Ok(dcb)
}

/// Parses a reply to `DCB_CMD_GDCBX`. `body` begins at `struct dcbmsg`.
pub fn parse_mode(body: &[u8]) -> Option<DcbxMode> {
    let value = attribute_of(body.get(DCBMSG..)?, attribute::DCBX)?;
    value.first().copied().map(DcbxMode)
}

fn request(command: u8, interface: &str) -> Vec<u8> {
    Request::new(RTM_GETDCB, NLM_F_REQUEST | NLM_F_ACK, &[0, command, 0, 0])
        .attribute(attribute::IFNAME, &c_string(interface))
        .finish()
}

/// Sends a request and returns the body of its reply. The message type identifies the reply: its
/// flags are copies of the request's.
fn answer(interface: &str, kind: u16, message: Vec<u8>) -> Result<Vec<u8>, DcbError> {
    let mut body = None;
    let mut refused = None;
    exchange(None, &message, |part| {
        if part.kind == kind {
            body = Some(part.body.to_vec());
        } else if let Some(Err(errno)) = read_answer(part) {
            refused = Some(errno);
        }
        body.is_some() || refused.is_some()
    })
    .map_err(DcbError::Socket)?;
    match (body, refused) {
        (Some(body), _) => Ok(body),
        (None, Some(errno)) => Err(error_of(interface, errno)),
        (None, None) => Err(DcbError::Socket(io::ErrorKind::UnexpectedEof.into())),
    }
}

fn error_of(interface: &str, errno: Errno) -> DcbError {
    let interface = interface.to_owned();
    match errno {
        Errno::OPNOTSUPP => DcbError::NotSupported { interface },
        Errno::NODEV => DcbError::NoInterface { interface },
        Errno::PERM | Errno::ACCESS => DcbError::Permission,
        errno => DcbError::Refused {
            interface,
            source: errno.into(),
        },
    }
}

const RTM_GETDCB: u16 = 78;
const RTM_SETDCB: u16 = 79;
/// Size of `struct dcbmsg`: address family, command, padding.
const DCBMSG: usize = 4;

/// enum dcbnl_commands; `attribute` and `ieee` below are enum dcbnl_attrs and enum
/// ieee_attrs of `linux/dcbnl.h`.
mod command {
    pub(super) const IEEE_SET: u8 = 20;
    pub(super) const IEEE_GET: u8 = 21;
    pub(super) const GDCBX: u8 = 22;
    pub(super) const SDCBX: u8 = 23;
    pub(super) const IEEE_DEL: u8 = 27;
}

mod attribute {
    pub(super) const IFNAME: u16 = 1;
    pub(super) const IEEE: u16 = 13;
    pub(super) const DCBX: u16 = 14;
}

mod ieee {
    pub(super) const ETS: u16 = 1;
    pub(super) const PFC: u16 = 2;
    pub(super) const APP_TABLE: u16 = 3;
    pub(super) const PEER_ETS: u16 = 4;
    pub(super) const PEER_PFC: u16 = 5;
    pub(super) const PEER_APP: u16 = 6;
    pub(super) const MAXRATE: u16 = 7;
    pub(super) const BUFFER: u16 = 10;
    pub(super) const APP_TRUST_TABLE: u16 = 11;
    /// Entries inside APP_TABLE and APP_TRUST_TABLE.
    pub(super) const APP: u16 = 1;
    pub(super) const DCB_APP: u16 = 2;
}

#[cfg(test)]
mod tests;
