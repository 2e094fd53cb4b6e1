//! LLDP frames (IEEE 802.1AB) with the DCBX TLVs of IEEE 802.1Qaz: a switch's own settings.
//!
//! ```text
//!   ┌ to 6 ┬ from 6 ┬ 88-cc ┐ TLV, TLV, …, end TLV
//!   TLV: type 7 bits, length 9 bits, value; type 127: OUI 3, subtype 1, value
//! ```
//!
//! Any machine of the network segment can send such a frame. The parser refuses frames with a TLV
//! that runs past the end, a wrong length or a wrong order. It also refuses frames with no end TLV,
//! or with a repeated ETS or PFC. Settings are compared, never negotiated.

use std::fmt;

use serde::Serialize;

use crate::dcb::{Algorithm, App, Ets, PRIORITIES, Priorities, Selector};

pub const ETHERTYPE: u16 = 0x88cc;
/// The group address of the nearest bridge, which no bridge forwards.
pub const GROUP: [u8; 6] = [0x01, 0x80, 0xc2, 0x00, 0x00, 0x0e];

/// Priority flow control as the switch announces it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct AnnouncedPfc {
    pub willing: bool,
    pub bypass: bool,
    pub capability: u8,
    pub enabled: Priorities,
}

/// A neighbour, usually a port of a switch, as one frame announces it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Neighbour {
    pub chassis: String,
    pub port: String,
    /// Seconds that this is valid; 0: the neighbour is leaving.
    pub ttl: u16,
    pub port_description: Option<String>,
    pub system_name: Option<String>,
    pub system_description: Option<String>,
    pub pfc: Option<AnnouncedPfc>,
    pub ets: Option<Ets>,
    pub recommended_ets: Option<Ets>,
    pub apps: Vec<App>,
    /// The frame also has the older DCBX of Convergence Enhanced Ethernet.
    pub cee: bool,
    /// Maximum frame size in bytes (IEEE 802.3).
    pub max_frame: Option<u16>,
}

impl Neighbour {
    /// True if the frame announces PFC, ETS or application priorities (IEEE 802.1Qaz).
    pub fn has_dcbx(&self) -> bool {
        self.pfc.is_some() || self.ets.is_some() || !self.apps.is_empty()
    }
}

/// The reason why a frame is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadFrame {
    #[error("it is not LLDP")]
    NotLldp,
    #[error("the TLV at byte {at} runs past the frame")]
    Overrun { at: usize },
    #[error("it has no end TLV")]
    NoEnd,
    #[error("it does not begin with chassis, port and time to live")]
    Mandatory,
    #[error("TLV {name} is repeated")]
    Repeated { name: &'static str },
    #[error("TLV {name} has {length} bytes")]
    Length { name: &'static str, length: usize },
}

/// Reads a frame from its first byte, the destination address.
pub fn parse(frame: &[u8]) -> Result<Neighbour, BadFrame> {
    if frame.get(12..14) != Some(&ETHERTYPE.to_be_bytes()) {
        return Err(BadFrame::NotLldp);
    }
    let mut neighbour = Neighbour::default();
    let mut at = 14;
    for index in 0.. {
        let head = frame.get(at..at + 2).ok_or(BadFrame::NoEnd)?;
        let head = u16::from_be_bytes([head[0], head[1]]);
        let (kind, length) = (head >> 9, usize::from(head & 0x1ff));
        let value = frame
            .get(at + 2..at + 2 + length)
            .ok_or(BadFrame::Overrun { at })?;
        // The first three have their places (IEEE 802.1AB, 8.2).
        let in_place = match index {
            0..=2 => kind == index + 1,
            _ => !(1..=3).contains(&kind),
        };
        if !in_place {
            return Err(BadFrame::Mandatory);
        }
        if kind == kind::END {
            return Ok(neighbour);
        }
        read_tlv(&mut neighbour, kind, value)?;
        at += 2 + length;
    }
    Err(BadFrame::NoEnd)
}

mod kind {
    pub(super) const END: u16 = 0;
    pub(super) const CHASSIS: u16 = 1;
    pub(super) const PORT: u16 = 2;
    pub(super) const TTL: u16 = 3;
    pub(super) const PORT_DESCRIPTION: u16 = 4;
    pub(super) const SYSTEM_NAME: u16 = 5;
    pub(super) const SYSTEM_DESCRIPTION: u16 = 6;
    pub(super) const ORGANISATION: u16 = 127;
}

const OUI_8021: [u8; 3] = [0x00, 0x80, 0xc2];
const OUI_8023: [u8; 3] = [0x00, 0x12, 0x0f];
const OUI_CEE: [u8; 3] = [0x00, 0x1b, 0x21];

fn read_tlv(neighbour: &mut Neighbour, kind: u16, value: &[u8]) -> Result<(), BadFrame> {
    match kind {
        kind::CHASSIS => neighbour.chassis = identifier("chassis", value, 4, 5)?,
        kind::PORT => neighbour.port = identifier("port", value, 3, 4)?,
        kind::TTL => neighbour.ttl = number("time to live", value)?,
        kind::PORT_DESCRIPTION => neighbour.port_description = Some(text(value)),
        kind::SYSTEM_NAME => neighbour.system_name = Some(text(value)),
        kind::SYSTEM_DESCRIPTION => neighbour.system_description = Some(text(value)),
        kind::ORGANISATION => {
            let Some((head, value)) = value.split_at_checked(4) else {
                let (name, length) = ("organisation", value.len());
                return Err(BadFrame::Length { name, length });
            };
            let (oui, subtype) = ([head[0], head[1], head[2]], head[3]);
            match (oui, subtype) {
                (OUI_8021, 9) => once("ETS", &mut neighbour.ets, ets("ETS", value)?)?,
                (OUI_8021, 10) => once(
                    "ETS recommendation",
                    &mut neighbour.recommended_ets,
                    ets("ETS recommendation", value)?,
                )?,
                (OUI_8021, 11) => once("PFC", &mut neighbour.pfc, pfc(value)?)?,
                (OUI_8021, 12) => neighbour.apps.extend(apps(value)?),
                (OUI_8023, 4) => neighbour.max_frame = Some(number("maximum frame size", value)?),
                (OUI_CEE, 2) => neighbour.cee = true,
                _ => {}
            }
        }
        _ => {}
    }
    Ok(())
}

fn once<T>(name: &'static str, slot: &mut Option<T>, value: T) -> Result<(), BadFrame> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(BadFrame::Repeated { name }),
    }
}

fn number(name: &'static str, value: &[u8]) -> Result<u16, BadFrame> {
    match value {
        [high, low, ..] => Ok(u16::from_be_bytes([*high, *low])),
        _ => Err(BadFrame::Length {
            name,
            length: value.len(),
        }),
    }
}

/// Text of a neighbour, without anything that a terminal would obey.
fn text(value: &[u8]) -> String {
    let text = String::from_utf8_lossy(value);
    let plain = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    plain.collect::<String>().trim().to_owned()
}

/// A chassis or port: a subtype, then an address or text.
fn identifier(name: &'static str, value: &[u8], mac: u8, net: u8) -> Result<String, BadFrame> {
    match value {
        [] | [_] => Err(BadFrame::Length {
            name,
            length: value.len(),
        }),
        [subtype, address @ ..] if *subtype == mac && address.len() == 6 => {
            let bytes: Vec<String> = address.iter().map(|byte| format!("{byte:02x}")).collect();
            Ok(bytes.join(":"))
        }
        [subtype, 1, address @ ..] if *subtype == net && address.len() == 4 => {
            let bytes: Vec<String> = address.iter().map(u8::to_string).collect();
            Ok(bytes.join("."))
        }
        [_, rest @ ..] => Ok(text(rest)),
    }
}

/// Flags, four bytes of nibbles that give each priority its class, shares, algorithms.
fn ets(name: &'static str, value: &[u8]) -> Result<Ets, BadFrame> {
    let value: &[u8; 21] = value.try_into().map_err(|_| BadFrame::Length {
        name,
        length: value.len(),
    })?;
    let mut ets = Ets {
        willing: value[0] & 0x80 != 0,
        credit_shaper: value[0] & 0x40 != 0,
        // 0 stands for 8.
        classes: match value[0] & 0x07 {
            0 => 8,
            classes => classes,
        },
        share: [0; PRIORITIES],
        algorithm: [Algorithm::Strict; PRIORITIES],
        class_of: [0; PRIORITIES],
    };
    for index in 0..PRIORITIES {
        let pair = value[1 + index / 2];
        // The lower priority is in the upper half.
        ets.class_of[index] = if index % 2 == 0 {
            pair >> 4
        } else {
            pair & 0xf
        };
        ets.share[index] = value[5 + index];
        ets.algorithm[index] = Algorithm::of(value[13 + index]);
    }
    Ok(ets)
}

fn pfc(value: &[u8]) -> Result<AnnouncedPfc, BadFrame> {
    match value {
        [flags, enabled] => Ok(AnnouncedPfc {
            willing: flags & 0x80 != 0,
            bypass: flags & 0x40 != 0,
            capability: flags & 0x0f,
            enabled: Priorities(*enabled),
        }),
        _ => Err(BadFrame::Length {
            name: "PFC",
            length: value.len(),
        }),
    }
}

/// A reserved byte, then entries of three bytes.
fn apps(value: &[u8]) -> Result<Vec<App>, BadFrame> {
    match value {
        [_, entries @ ..] if entries.len().is_multiple_of(3) => {
            let entries = entries.chunks_exact(3).map(|entry| App {
                priority: entry[0] >> 5,
                selector: Selector::of(entry[0] & 0x07),
                value: u16::from_be_bytes([entry[1], entry[2]]),
            });
            Ok(entries.collect())
        }
        _ => Err(BadFrame::Length {
            name: "application",
            length: value.len(),
        }),
    }
}

impl fmt::Display for Neighbour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.system_name.as_ref().unwrap_or(&self.chassis);
        write!(f, "{name} port {}", self.port)
    }
}

#[cfg(test)]
mod tests;
