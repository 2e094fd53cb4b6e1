//! The data of a session between this machine and the responder on a peer, which
//! [`peer`](crate::peer) runs and judges.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};

use nacre_transport_rdma_link::dcb::{App, Ets, PRIORITIES, Priorities, Selector};
use serde::{Deserialize, Serialize};

use super::ethernet::Ecn;

/// TCP and UDP port of the responder; the next one after `nacre rdma perf`'s.
pub const ANSWER_PORT: u16 = 18516;

/// Version of the messages. Ends of different versions do not compare.
pub(crate) const VERSION: u32 = 1;

/// The questions of a session: the responder, this end, and the classes of probes.
#[derive(Debug, Clone)]
pub struct Question {
    pub at: SocketAddr,
    pub source: IpAddr,
    /// The physical interfaces of this end.
    pub interfaces: Vec<String>,
    pub classes: Vec<ProbeClass>,
}

/// A class of traffic to send probes of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeClass {
    /// `storage`, `replication`, or `unmarked`.
    pub name: &'static str,
    pub dscp: u8,
    /// The priority that `[qos]` asks for.
    pub priority: Option<u8>,
    pub is_lossless: bool,
}

/// Everything learned in a session.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    pub theirs: End,
    pub bursts: Vec<Burst>,
}

/// The settings of one end's interface, as far as they are to be compared.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct End {
    pub interface: String,
    pub driver: Option<String>,
    pub mtu: Option<u32>,
    /// The interface is a VLAN: packets have a tag with a priority.
    pub is_vlan: bool,
    /// Why the settings below cannot be read.
    pub no_dcb: Option<String>,
    /// Priorities with PFC.
    pub pfc: Option<Priorities>,
    pub ets: Option<Ets>,
    /// Fields that select a packet's priority, in order.
    pub trusted: Vec<Selector>,
    pub apps: Vec<App>,
    pub ecn: Option<Ecn>,
}

impl End {
    /// False for text that no interface of Linux has. It comes from another machine, and is shown
    /// in a terminal and as a part of commands.
    pub(crate) fn is_printable(&self) -> bool {
        let of_name = |c: char| c.is_ascii_alphanumeric() || "._@:-".contains(c);
        let short = |text: &Option<String>| {
            let mut text = text.iter();
            text.all(|text| text.len() <= 256 && !text.contains(char::is_control))
        };
        (1..=15).contains(&self.interface.len())
            && self.interface.chars().all(of_name)
            && short(&self.driver)
            && short(&self.no_dcb)
    }

    /// The priority of packets with this DSCP. `None`: unknown, or the VLAN tag decides.
    pub(crate) fn priority_of(&self, dscp: u8) -> Option<u8> {
        if self.trusted.is_empty() {
            return None;
        }
        for selector in &self.trusted {
            match selector {
                Selector::Dscp => {
                    let entries = self.apps.iter().filter(|app| {
                        app.selector == Selector::Dscp && app.value == u16::from(dscp)
                    });
                    // Without an entry the class selector decides (RFC 2474).
                    return Some(entries.map(|app| app.priority).max().unwrap_or(dscp >> 3));
                }
                Selector::Pcp if self.is_vlan => return None,
                _ => {}
            }
        }
        Some(0)
    }

    pub(crate) fn driver(&self) -> &str {
        self.driver.as_deref().unwrap_or("unknown")
    }
}

/// The probes of one class: their number, and by DSCP the number of those that arrived.
#[derive(Debug, Clone)]
pub struct Burst {
    pub class: ProbeClass,
    pub sent: u64,
    /// At the peer.
    pub arrived: BTreeMap<u8, u64>,
    /// The peer's echoes, here.
    pub returned: BTreeMap<u8, u64>,
    /// Growth of the byte counts of both ends during the burst.
    pub ours: Bytes,
    pub theirs: Bytes,
}

/// Bytes by priority since the driver was loaded; `None`: the driver does not count them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bytes {
    pub rx: [Option<u64>; PRIORITIES],
    pub tx: [Option<u64>; PRIORITIES],
}

impl Bytes {
    /// The growth since `before`.
    pub(crate) fn since(&self, before: &Self) -> Self {
        let grown = |now: &[Option<u64>; PRIORITIES], then: &[Option<u64>; PRIORITIES]| {
            std::array::from_fn(|at| Some(now[at]?.saturating_sub(then[at]?)))
        };
        Self {
            rx: grown(&self.rx, &before.rx),
            tx: grown(&self.tx, &before.tx),
        }
    }
}

/// Why the two ends could not be compared.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    #[error("no responder on TCP port {ANSWER_PORT}: {0}")]
    NoResponder(#[source] io::Error),
    #[error("the responder has version {theirs} of the protocol, this program {VERSION}")]
    Version { theirs: u32 },
    /// The peer broke the rules of the protocol.
    #[error("the responder sent a malformed {0}")]
    Malformed(&'static str),
    #[error("the session with the responder ended: {0}")]
    Io(#[from] io::Error),
}
