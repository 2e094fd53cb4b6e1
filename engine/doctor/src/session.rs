//! The data of a session between this machine and the responder on a peer. The module
//! [`peer`](crate::peer) runs the session, and computes findings from it.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};

use nacre_transport_rdma_link::dcb::{App, Ets, PRIORITIES, Priorities, Selector};
use serde::{Deserialize, Serialize};

use super::ethernet::Ecn;

/// TCP and UDP port of the responder: the port after that of `nacre rdma perf`.
pub const ANSWER_PORT: u16 = 18516;

/// Version of a session's messages. A session of two different versions ends after the hello.
pub(crate) const VERSION: u32 = 1;

/// The parameters of a session.
#[derive(Debug, Clone)]
pub struct Question {
    /// Address of the responder.
    pub at: SocketAddr,
    /// Address of this end on the route to the responder.
    pub source: IpAddr,
    /// The physical interfaces of this end, whose byte counts are added: those below a VLAN or a
    /// bond.
    pub interfaces: Vec<String>,
    /// The classes to send probes of.
    pub classes: Vec<ProbeClass>,
}

/// A traffic class, of which probes are sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeClass {
    /// `storage` or `replication` (classes of `[qos]`), `rdma` (`[rdma] tos`), or `unmarked`.
    pub name: &'static str,
    /// DSCP of the probes, 0 to 63.
    pub dscp: u8,
    /// The priority that `[qos]` asks for, 0 to 7; also the `SO_PRIORITY` of the probes.
    pub priority: Option<u8>,
    /// `[qos]` asks for PFC on this priority.
    pub is_lossless: bool,
}

/// The results of a session.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    /// The responder's end.
    pub theirs: End,
    /// One per class, in the order of [`Question::classes`].
    pub bursts: Vec<Burst>,
}

/// The settings of one end's interface that are compared.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct End {
    pub interface: String,
    /// `None`: unknown, or a virtual interface.
    pub driver: Option<String>,
    /// In bytes.
    pub mtu: Option<u32>,
    /// The interface is a VLAN: packets have a tag with a priority.
    pub is_vlan: bool,
    /// The reason why the DCB settings below cannot be read; `None`: they were read.
    pub no_dcb: Option<String>,
    /// Priorities with PFC.
    pub pfc: Option<Priorities>,
    pub ets: Option<Ets>,
    /// Packet fields that select the priority, in order. Empty: unknown.
    pub trusted: Vec<Selector>,
    /// The DCB application table.
    pub apps: Vec<App>,
    /// Congestion notification; `None`: unknown.
    pub ecn: Option<Ecn>,
}

impl End {
    /// False if a text is one that no Linux interface has: too long, or with other characters. The
    /// texts come from another machine, and appear in a terminal and as a part of commands.
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

/// The probes of one class, and their arrivals.
#[derive(Debug, Clone)]
pub struct Burst {
    pub class: ProbeClass,
    /// Probes that this end sent.
    pub sent: u64,
    /// The number of probes that arrived at the peer, by their DSCP on arrival.
    pub arrived: BTreeMap<u8, u64>,
    /// The number of the peer's echoes that arrived at this end, by their DSCP on arrival.
    pub returned: BTreeMap<u8, u64>,
    /// Growth of this end's byte counts during the burst.
    pub ours: Bytes,
    /// Growth of the peer's byte counts during the burst.
    pub theirs: Bytes,
}

/// Bytes by priority, received and sent: since the driver was loaded, or their growth in a
/// [`Burst`]. `None`: the driver does not count them.
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

/// The reason why the two ends could not be compared.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    #[error("no responder on TCP port {ANSWER_PORT}: {0}")]
    NoResponder(#[source] io::Error),
    #[error("the responder has version {theirs} of the protocol, this program {VERSION}")]
    Version { theirs: u32 },
    /// The peer broke the protocol.
    #[error("the responder sent a malformed {0}")]
    Malformed(&'static str),
    #[error("the session with the responder ended: {0}")]
    Io(#[from] io::Error),
}
