//! Two parts of ethtool(8): link-level pause (`ethtool -a`, `-A`), and per-priority counters out of
//! a driver's private statistics (`ethtool -S`).
//!
//! - [`pause`] and [`set_pause`] use generic netlink, family "ethtool": `ETHTOOL_MSG_PAUSE_GET`
//!   with statistics, and `ETHTOOL_MSG_PAUSE_SET`. This is pause of the whole port (IEEE 802.3x).
//!   It and PFC, which pauses one priority (see [`crate::dcb`]), exclude each other.
//! - [`PriorityCounters::of`] finds the counters by priority in a list of names and values. Every
//!   driver has names of its own for them. The list comes from `SIOCETHTOOL` in
//!   `nacre_transport_rdma_verbs::netdev`, because an ioctl is unsafe code.

use std::collections::BTreeMap;
use std::io;

use rustix::io::Errno;
use rustix::net::netlink;
use serde::{Deserialize, Serialize};

use crate::dcb::PRIORITIES;
use crate::nlmsg::{
    NLM_F_ACK, NLM_F_REQUEST, NLMSG_ERROR, Request, attribute_of, c_string, exchange, read_answer,
    u16_at, u64_at,
};

/// Link-level pause of the whole port (IEEE 802.3x), as `ethtool -a` shows it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pause {
    pub autoneg: bool,
    pub rx: bool,
    pub tx: bool,
    /// Pause frames received since the driver was loaded; `None`: not counted.
    pub rx_frames: Option<u64>,
    /// Pause frames sent since the driver was loaded; `None`: not counted.
    pub tx_frames: Option<u64>,
}

/// Reads the pause settings and counters of an interface. `None`: the driver has no pause
/// (EOPNOTSUPP), or the kernel has no ethtool netlink (before Linux 5.6).
pub fn pause(interface: &str) -> io::Result<Option<Pause>> {
    let Some(family) = family()? else {
        return Ok(None);
    };
    let mut outcome = Ok(None);
    exchange(
        Some(netlink::GENERIC),
        &pause_request(family, interface),
        |part| match read_answer(part) {
            Some(Ok(())) => true,
            Some(Err(Errno::OPNOTSUPP)) => true,
            Some(Err(errno)) => {
                outcome = Err(errno.into());
                true
            }
            None if part.kind == family => {
                outcome = Ok(parse_pause(part.body));
                true
            }
            None => false,
        },
    )?;
    outcome
}

/// The dynamic message type of the generic netlink family "ethtool". `None`: the kernel has none.
fn family() -> io::Result<Option<u16>> {
    const GENL_ID_CTRL: u16 = 16;
    const CTRL_CMD_GETFAMILY: u8 = 3;
    const CTRL_ATTR_FAMILY_ID: u16 = 1;
    const CTRL_ATTR_FAMILY_NAME: u16 = 2;
    let request = Request::new(
        GENL_ID_CTRL,
        NLM_F_REQUEST | NLM_F_ACK,
        &[CTRL_CMD_GETFAMILY, 1, 0, 0],
    )
    .attribute(CTRL_ATTR_FAMILY_NAME, &c_string("ethtool"))
    .finish();
    let mut family = None;
    exchange(Some(netlink::GENERIC), &request, |part| {
        if part.kind == GENL_ID_CTRL {
            let attributes = part.body.get(GENL_HEADER..).unwrap_or_default();
            family = attribute_of(attributes, CTRL_ATTR_FAMILY_ID).and_then(|id| u16_at(id, 0));
        }
        part.kind == NLMSG_ERROR || family.is_some()
    })?;
    Ok(family)
}

/// Sets pause of the whole port, as `ethtool -A` does. Needs CAP_NET_ADMIN.
pub fn set_pause(interface: &str, pause: &Pause) -> io::Result<()> {
    let family = family()?.ok_or(Errno::OPNOTSUPP)?;
    let mut outcome = Err(io::ErrorKind::UnexpectedEof.into());
    exchange(
        Some(netlink::GENERIC),
        &set_pause_request(family, interface, pause),
        |part| match read_answer(part) {
            Some(answer) => {
                outcome = answer.map_err(io::Error::from);
                true
            }
            None => false,
        },
    )?;
    outcome
}

fn set_pause_request(family: u16, interface: &str, pause: &Pause) -> Vec<u8> {
    const PAUSE_SET: u8 = 22;
    Request::new(family, NLM_F_REQUEST | NLM_F_ACK, &[PAUSE_SET, 1, 0, 0])
        .nested(PAUSE_HEADER | NESTED, |header| {
            header.attribute(HEADER_DEV_NAME, &c_string(interface))
        })
        .attribute(PAUSE_AUTONEG, &[u8::from(pause.autoneg)])
        .attribute(PAUSE_RX, &[u8::from(pause.rx)])
        .attribute(PAUSE_TX, &[u8::from(pause.tx)])
        .finish()
}

// Attributes ETHTOOL_A_PAUSE_* and ETHTOOL_A_HEADER_* of `linux/ethtool_netlink.h`, and
// NLA_F_NESTED of `linux/netlink.h`.
const PAUSE_HEADER: u16 = 1;
const PAUSE_AUTONEG: u16 = 2;
const PAUSE_RX: u16 = 3;
const PAUSE_TX: u16 = 4;
const HEADER_DEV_NAME: u16 = 2;
const NESTED: u16 = 0x8000;

/// Size of `struct genlmsghdr`: command, version, reserved.
const GENL_HEADER: usize = 4;

fn pause_request(family: u16, interface: &str) -> Vec<u8> {
    const PAUSE_GET: u8 = 21;
    const HEADER_FLAGS: u16 = 3;
    const FLAG_STATS: u32 = 4;
    Request::new(family, NLM_F_REQUEST | NLM_F_ACK, &[PAUSE_GET, 1, 0, 0])
        .nested(PAUSE_HEADER | NESTED, |header| {
            header
                .attribute(HEADER_DEV_NAME, &c_string(interface))
                .attribute(HEADER_FLAGS, &FLAG_STATS.to_ne_bytes())
        })
        .finish()
}

/// Parses a reply to `ETHTOOL_MSG_PAUSE_GET`. `body` begins at `struct genlmsghdr`. `None`: the
/// reply has not all settings.
pub fn parse_pause(body: &[u8]) -> Option<Pause> {
    const STATS: u16 = 5;
    const TX_FRAMES: u16 = 2;
    const RX_FRAMES: u16 = 3;
    let attributes = body.get(GENL_HEADER..)?;
    let is_on = |kind| attribute_of(attributes, kind).and_then(|value| value.first().copied());
    let stats = attribute_of(attributes, STATS).unwrap_or_default();
    // ETHTOOL_STAT_NOT_SET, all ones: the driver does not have this counter.
    let count = |kind| {
        attribute_of(stats, kind)
            .and_then(|value| u64_at(value, 0))
            .filter(|count| *count != u64::MAX)
    };
    Some(Pause {
        autoneg: is_on(PAUSE_AUTONEG)? != 0,
        rx: is_on(PAUSE_RX)? != 0,
        tx: is_on(PAUSE_TX)? != 0,
        rx_frames: count(RX_FRAMES),
        tx_frames: count(TX_FRAMES),
    })
}

/// Counters of one priority in one direction, since the driver was loaded. `None`: the driver does
/// not count it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PriorityCount {
    pub bytes: Option<u64>,
    pub packets: Option<u64>,
    /// PFC frames that stop the end that receives them (xoff).
    pub pauses: Option<u64>,
    /// Time spent paused, in microseconds.
    pub pause_us: Option<u64>,
    /// Packets dropped because the receive buffer was full.
    pub discards: Option<u64>,
}

/// A driver's counters by priority, and its counters of losses and their causes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct PriorityCounters {
    pub rx: [PriorityCount; PRIORITIES],
    pub tx: [PriorityCount; PRIORITIES],
    /// Dropped packets, pause storms and PCIe back-pressure, by the driver's own names.
    pub loss: BTreeMap<String, u64>,
}

impl PriorityCounters {
    /// Finds the counters in a driver's statistics (`ethtool -S`), by the names that mlx5, mlx4,
    /// ice, i40e, bnxt and hns3 use. Ignores all other names.
    pub fn of(statistics: &[(String, u64)]) -> Self {
        let mut counters = Self::default();
        for (name, value) in statistics {
            if let Some((direction, priority, field)) = by_priority(name) {
                let counts = match direction {
                    Direction::Rx => &mut counters.rx,
                    Direction::Tx => &mut counters.tx,
                };
                let count = &mut counts[usize::from(priority)];
                let slot = match field {
                    Field::Bytes => &mut count.bytes,
                    Field::Packets => &mut count.packets,
                    Field::Pauses => &mut count.pauses,
                    Field::PauseTime => &mut count.pause_us,
                    Field::Discards => &mut count.discards,
                };
                *slot = Some(*value);
            }
            if is_loss(name) {
                counters.loss.insert(name.clone(), *value);
            }
        }
        counters
    }

    /// True if the driver counts pause frames by priority.
    pub fn has_pauses(&self) -> bool {
        self.rx.iter().any(|count| count.pauses.is_some())
    }

    pub fn has_bytes(&self) -> bool {
        self.rx.iter().any(|count| count.bytes.is_some())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Rx,
    Tx,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    Bytes,
    Packets,
    Pauses,
    PauseTime,
    Discards,
}

/// A pattern: the text before the priority, and the endings with their fields.
type Pattern = (&'static str, &'static [(&'static str, Field)]);

/// `{dir}` is rx or tx.
const PATTERNS: &[Pattern] = &[
    // mlx5
    (
        "{dir}_prio",
        &[
            ("_bytes", Field::Bytes),
            ("_packets", Field::Packets),
            ("_pause", Field::Pauses),
            ("_pause_duration", Field::PauseTime),
            ("_discards", Field::Discards),
            ("_buf_discard", Field::Discards),
        ],
    ),
    // mlx4
    ("{dir}_pause_prio_", &[("", Field::Pauses)]),
    ("{dir}_pause_duration_prio_", &[("", Field::PauseTime)]),
    (
        "{dir}_prio_",
        &[("_bytes", Field::Bytes), ("_packets", Field::Packets)],
    ),
    // ice; i40e with "port." before it
    (
        "{dir}_priority_",
        &[("_xoff.nic", Field::Pauses), ("_xoff", Field::Pauses)],
    ),
    ("port.{dir}_priority_", &[("_xoff", Field::Pauses)]),
    // Intel's own ice driver
    ("port-{dir}-xoff_prio-", &[("_events", Field::Pauses)]),
    // bnxt
    ("{dir}_pfc_ena_frames_pri", &[("", Field::Pauses)]),
    ("{dir}_bytes_pri", &[("", Field::Bytes)]),
    ("{dir}_packets_pri", &[("", Field::Packets)]),
    ("pfc_pri", &[]),
    // hns3
    ("mac_{dir}_pfc_pri", &[("_pkt_num", Field::Pauses)]),
];

fn by_priority(name: &str) -> Option<(Direction, u8, Field)> {
    for (pattern, endings) in PATTERNS {
        for (direction, word) in [(Direction::Rx, "rx"), (Direction::Tx, "tx")] {
            let before = pattern.replace("{dir}", word);
            let Some(rest) = name.strip_prefix(&before) else {
                continue;
            };
            let Some(priority) = rest.bytes().next().filter(|c| (b'0'..=b'7').contains(c)) else {
                continue;
            };
            let ending = &rest[1..];
            if let Some((_, field)) = endings.iter().find(|(text, _)| *text == ending) {
                return Some((direction, priority - b'0', *field));
            }
        }
    }
    None
}

/// True for counters of packets dropped between the wire and memory, of pause storms, and of the
/// back-pressure of PCIe that can cause both.
fn is_loss(name: &str) -> bool {
    const NAMES: [&str; 11] = [
        // mlx5
        "rx_discards_phy",
        "tx_discards_phy",
        "rx_out_of_buffer",
        "outbound_pci_stalled_wr",
        "tx_pause_storm_warning_events",
        "tx_pause_storm_error_events",
        "rx_steer_missed_packets",
        // bnxt
        "rx_total_discard_pkts",
        "rx_stat_discard",
        // ice, i40e
        "rx_dropped.nic",
        "port.rx_dropped",
    ];
    NAMES.contains(&name)
}

#[cfg(test)]
mod tests;
