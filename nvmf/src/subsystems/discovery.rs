//! Builds the discovery log of a host: the subsystems that it may use, and their addresses (Base
//! 3.1.3.3, 5.16.1.23).
//!
//! ```text
//!   Target ──snapshot──▶ records(snapshot, asker) ──▶ write_page(generation, records, offset)
//! ```
//!
//! Pure functions. The contents depend on the host (the snapshot has only the subsystems that it
//! may use) and on its connection. A listener on the unspecified address is listed under the local
//! address of the connection. Loopback addresses are listed only for hosts on this machine, and
//! link-local ones only for hosts on the same link.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};

use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::log::discovery::{
    DiscoveryEntry, DiscoveryHeader, DiscoveryRecord, RdmaSubtype, adrfam, eflags, sectype,
    subtype, treq, trtype,
};

use crate::subsystems::ana::AnaStates;
use crate::subsystems::shared_ports::{LATER_IDS, SharedPort, SharedPorts};
use crate::subsystems::subsystem::SubsystemListener;
use crate::subsystems::subsystem_config::ControllerModel;
use crate::transport::{Address, ListenerId, RdmaProviderType, TlsPolicy, TransportType};

/// The input for one host's log.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub generation: u64,
    /// Subsystems that the host may connect to.
    pub subsystems: Vec<Reachable>,
    /// Listeners that were added to the discovery subsystem, which serves hosts on all other
    /// listeners too.
    pub discovery: Vec<SubsystemListener>,
    pub discovery_nqn: Nqn,
    pub referrals: Vec<Referral>,
    /// Entries of admin queues (ASQSZ).
    pub admin_entries: u16,
    /// Report only listeners of the asking connection's transport type.
    pub same_transport: bool,
    /// Report only listeners on the local address of the asking connection.
    pub same_address: bool,
    /// Report only listeners on the local port of the asking connection.
    pub same_service: bool,
}

/// Another discovery or NVM subsystem that the discovery log points to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Referral {
    pub transport: TransportType,
    pub address: Address,
    pub subnqn: Nqn,
    /// `subnqn` names a discovery subsystem. Ignored for the well-known discovery NQN.
    pub discovery: bool,
    pub secure_channel: bool,
}

#[derive(Debug, Clone)]
pub struct Reachable {
    pub nqn: Nqn,
    pub model: ControllerModel,
    pub listeners: Vec<SubsystemListener>,
    pub shared: SharedPorts,
    /// The host must use TLS.
    pub has_psk: bool,
    /// The host must use secure channel concatenation: it begins in clear, and then uses TLS.
    pub must_concat: bool,
    /// False: only other targets serve the subsystem, so it is not known whether the host has a
    /// PSK.
    pub knows_host: bool,
}

impl Reachable {
    /// A subsystem without ports.
    pub fn new(nqn: Nqn) -> Self {
        Self {
            nqn,
            model: ControllerModel::Dynamic,
            listeners: Vec::new(),
            shared: SharedPorts::default(),
            has_psk: false,
            must_concat: false,
            knows_host: true,
        }
    }

    /// PORTID of a listener of this target.
    fn port_id(&self, listener: &SubsystemListener) -> u16 {
        let is_it = |port: &&SharedPort| {
            port.is_here
                && (port.transport, &port.address) == (listener.transport, &listener.address)
        };
        let shared = self.shared.listed.iter().find(is_it);
        match (shared, self.shared.later_ids) {
            (Some(port), _) => port.id,
            (None, Some(first)) => first + port_id(listener.id) % LATER_IDS,
            (None, None) => port_id(listener.id),
        }
    }

    /// How the host connects to a port with this TLS policy. A host that has a PSK connects with
    /// TLS. Without one, a host that must use concatenation connects in clear and then with TLS.
    /// Any other host connects in clear. If it is unknown whether the host has a PSK, a port that
    /// requires TLS is listed with TLS.
    fn channel(&self, policy: TlsPolicy) -> PortChannel {
        // Hosts take TREQ "not required" with TLS for concatenation (nvme-cli 3.0).
        let of_host = match (self.has_psk, self.must_concat) {
            (true, _) => PortChannel::Tls(treq::SECURE_CHANNEL_REQUIRED),
            (false, true) => PortChannel::Tls(treq::SECURE_CHANNEL_NOT_REQUIRED),
            (false, false) => PortChannel::Clear,
        };
        match policy {
            TlsPolicy::Off if of_host != PortChannel::Clear => PortChannel::Refused,
            TlsPolicy::Require if !self.has_psk && self.knows_host => PortChannel::Refused,
            TlsPolicy::Require => PortChannel::Tls(treq::SECURE_CHANNEL_REQUIRED),
            TlsPolicy::Off | TlsPolicy::Allow => of_host,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PortChannel {
    /// The port does not serve the host.
    Refused,
    Clear,
    /// With this TREQ.
    Tls(u8),
}

/// The connection of the requesting host.
#[derive(Debug, Clone, Copy)]
pub struct Asker<'a> {
    pub transport: TransportType,
    pub listener: ListenerId,
    pub local: &'a Address,
    /// The connection uses TLS.
    pub secure: bool,
}

/// One log entry, with the fields of its transport type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    pub record: DiscoveryRecord,
    pub secure_channel: bool,
    pub fabric: RdmaProviderType,
}

/// The entries of a log: the discovery subsystem itself, then subsystems, then referrals. Of
/// entries with the same NQN, transport and address, except referrals, only the first is listed.
pub fn records(snapshot: &Snapshot, asker: &Asker) -> Vec<Record> {
    let mut records = Vec::new();
    let own = SubsystemListener {
        id: asker.listener,
        transport: asker.transport,
        address: asker.local.clone(),
        ana: AnaStates::default(),
        withheld: None,
        options: Default::default(),
    };
    // A host with a PSK can ask over TLS; a host that does is not sent to a place in clear.
    let has_psk = snapshot.subsystems.iter().any(|s| s.has_psk);
    let serves = |listener: &&SubsystemListener| match listener.options.tls() {
        TlsPolicy::Off => !asker.secure,
        TlsPolicy::Allow => true,
        TlsPolicy::Require => has_psk,
    };
    let explicit = snapshot.discovery.iter().filter(|l| l.id != own.id);
    for listener in [&own].into_iter().chain(explicit.filter(serves)) {
        // DUPRETINFO: unless the log is filtered, all discovery listeners return the same records.
        let filtered = snapshot.same_transport || snapshot.same_address || snapshot.same_service;
        let duplicate = !filtered || listener.id == own.id;
        let kind = EntryKind {
            subtype: subtype::CURRENT_DISCOVERY,
            model: ControllerModel::Dynamic,
            eflags: eflags::EPCSD | if duplicate { eflags::DUPRETINFO } else { 0 },
        };
        let record = entry(snapshot, asker, listener, &snapshot.discovery_nqn, kind);
        let is_secure = asker.secure || listener.options.tls() == TlsPolicy::Require;
        let treq = is_secure.then_some(treq::SECURE_CHANNEL_REQUIRED);
        records.extend(record.map(|record| record.secured(treq)));
    }
    for subsystem in &snapshot.subsystems {
        let kind = EntryKind {
            subtype: subtype::NVM,
            model: subsystem.model,
            eflags: 0,
        };
        for listener in subsystem.listeners.iter().filter(|l| l.withheld.is_none()) {
            let record = entry(snapshot, asker, listener, &subsystem.nqn, kind);
            let record = record.map(|record| with_port(record, subsystem.port_id(listener)));
            let channel = subsystem.channel(listener.options.tls());
            records.extend(record.and_then(|record| record.over(channel)));
        }
        let others = subsystem.shared.listed.iter().filter(|port| !port.is_here);
        records.extend(others.filter_map(|port| {
            // An older version does not describe it: then it is as for this target.
            let channel = subsystem.channel(port.tls.unwrap_or(TlsPolicy::Allow));
            let record = elsewhere(snapshot, asker, port, &subsystem.nqn, kind)?;
            record.over(channel)
        }));
    }
    // Remove duplicates: a listener on one address and one on all addresses may have the same
    // entry.
    let mut places = HashSet::new();
    records.retain(|r| {
        let of = &r.record;
        places.insert((
            of.subnqn.clone(),
            of.trtype,
            of.traddr.clone(),
            of.trsvcid.clone(),
        ))
    });
    records.extend(snapshot.referrals.iter().filter_map(|r| {
        let same = r.transport == asker.transport;
        (same || !snapshot.same_transport).then(|| referral(r))?
    }));
    records
}

#[derive(Clone, Copy)]
struct EntryKind {
    subtype: u8,
    model: ControllerModel,
    eflags: u16,
}

/// The entry of a listener. `None`: it is not reported, or the host cannot reach it.
fn entry(
    snapshot: &Snapshot,
    asker: &Asker,
    listener: &SubsystemListener,
    nqn: &Nqn,
    kind: EntryKind,
) -> Option<Record> {
    let address = reached(&listener.address, asker)?;
    if snapshot.same_address && !same_host(&address, asker.local) {
        return None;
    }
    let fabric = listener.options.fabric.unwrap_or_default();
    let place = (listener.transport, address, fabric);
    let record = described_at(snapshot, asker, place, nqn, kind)?;
    checked(with_port(record, port_id(listener.id)))
}

/// The entry of another target's port. [`Snapshot::same_address`] does not apply to it.
fn elsewhere(
    snapshot: &Snapshot,
    asker: &Asker,
    port: &SharedPort,
    nqn: &Nqn,
    kind: EntryKind,
) -> Option<Record> {
    let address = reached(&port.address, asker)?;
    let place = (port.transport, address, RdmaProviderType::default());
    let record = described_at(snapshot, asker, place, nqn, kind)?;
    checked(with_port(record, port.id))
}

fn with_port(mut record: Record, port: u16) -> Record {
    record.record.portid = port;
    record
}

/// `None`: a filter excludes the address.
fn described_at(
    snapshot: &Snapshot,
    asker: &Asker,
    (transport, address, fabric): (TransportType, Address, RdmaProviderType),
    nqn: &Nqn,
    kind: EntryKind,
) -> Option<Record> {
    if snapshot.same_transport && transport != asker.transport {
        return None;
    }
    if snapshot.same_service && port_of(&address) != port_of(asker.local) {
        return None;
    }
    let record = DiscoveryRecord {
        subtype: kind.subtype,
        treq: treq::SECURE_CHANNEL_NOT_SPECIFIED | treq::SQ_FLOW_CONTROL_DISABLE,
        cntlid: kind.model.discovery_cntlid(),
        eflags: kind.eflags,
        asqsz: snapshot.admin_entries,
        ..described(transport, &address, nqn)
    };
    Some(Record {
        record,
        secure_channel: false,
        fabric,
    })
}

fn referral(referral: &Referral) -> Option<Record> {
    let record = DiscoveryRecord {
        subtype: if referral.discovery || referral.subnqn.is_discovery() {
            subtype::REFERRAL
        } else {
            subtype::NVM
        },
        treq: if referral.secure_channel {
            treq::SECURE_CHANNEL_REQUIRED
        } else {
            treq::SECURE_CHANNEL_NOT_SPECIFIED
        },
        ..described(referral.transport, &referral.address, &referral.subnqn)
    };
    checked(Record {
        record,
        secure_channel: referral.secure_channel,
        fabric: RdmaProviderType::default(),
    })
}

/// A record with the fields that follow from the address, and defaults for an unknown controller.
fn described(transport: TransportType, address: &Address, nqn: &Nqn) -> DiscoveryRecord {
    let (adrfam, traddr, trsvcid) = match address {
        Address::Ip(address) => {
            let ip = address.ip().to_canonical();
            let family = match ip {
                IpAddr::V4(_) => adrfam::IPV4,
                IpAddr::V6(_) => adrfam::IPV6,
            };
            (family, ip.to_string(), address.port().to_string())
        }
        Address::Loopback(name) => (adrfam::INTRA_HOST, name.clone(), String::new()),
    };
    DiscoveryRecord {
        trtype: trtype_of(transport),
        adrfam,
        subtype: subtype::NVM,
        treq: 0,
        portid: 0,
        cntlid: DiscoveryEntry::CNTLID_DYNAMIC,
        // The minimum for any controller (Base figure 294).
        asqsz: 32,
        eflags: 0,
        subnqn: nqn.clone(),
        traddr,
        trsvcid,
    }
}

/// Returns `None` for a record that does not fit an entry: a loopback endpoint may have any name.
fn checked(record: Record) -> Option<Record> {
    match DiscoveryEntry::new(&record.record) {
        Ok(_) => Some(record),
        Err(error) => {
            tracing::debug!(subnqn = %record.record.subnqn, %error, "not in the discovery log");
            None
        }
    }
}

/// The address of a listener for the requesting host; `None`: the host cannot reach it.
fn reached(address: &Address, asker: &Asker) -> Option<Address> {
    let Address::Ip(bound) = address else {
        return Some(address.clone());
    };
    let local = match asker.local {
        Address::Ip(local) => Some(local),
        Address::Loopback(_) => None,
    };
    let ip = bound.ip().to_canonical();
    if ip.is_unspecified() {
        let local = local?;
        let ip = local.ip().to_canonical();
        // A listener on [::] accepts IPv4 hosts as well.
        let reachable = bound.is_ipv6() || ip.is_ipv4();
        return reachable.then(|| {
            let mut address = *local;
            address.set_ip(ip);
            address.set_port(bound.port());
            Address::Ip(address)
        });
    }
    // Only programs on this machine can reach loopback addresses.
    let is_near = |local: &SocketAddr| match (bound, local) {
        _ if ip.is_loopback() => local.ip().to_canonical().is_loopback(),
        // The log has no interface names, so the host must be on the same link.
        (SocketAddr::V6(of), SocketAddr::V6(local)) if of.ip().is_unicast_link_local() => {
            local.ip().is_unicast_link_local() && local.scope_id() == of.scope_id()
        }
        (SocketAddr::V6(of), SocketAddr::V4(_)) => !of.ip().is_unicast_link_local(),
        _ => true,
    };
    local.is_none_or(is_near).then(|| address.clone())
}

/// True if two addresses differ at most in their ports.
fn same_host(a: &Address, b: &Address) -> bool {
    match (a, b) {
        (Address::Ip(a), Address::Ip(b)) => a.ip().to_canonical() == b.ip().to_canonical(),
        _ => a == b,
    }
}

fn port_of(address: &Address) -> Option<u16> {
    match address {
        Address::Ip(address) => Some(address.port()),
        Address::Loopback(_) => None,
    }
}

/// PORTID of a listener: the same for all subsystems and for the listener's life (the ID modulo
/// 65536).
fn port_id(listener: ListenerId) -> u16 {
    listener.0 as u16
}

pub(crate) fn trtype_of(transport: TransportType) -> u8 {
    match transport {
        TransportType::Rdma => trtype::RDMA,
        TransportType::Tcp => trtype::TCP,
        TransportType::Loopback => trtype::INTRA_HOST,
    }
}

/// The host asked for bytes beyond the end of the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("offset {offset} is beyond the {length} bytes of the discovery log")]
pub struct BeyondEnd {
    pub offset: u64,
    pub length: u64,
}

/// Bytes of the header, and of each entry.
const PIECE: u64 = DiscoveryEntry::SIZE as u64;

/// Bytes of the whole page.
pub fn page_bytes(records: usize) -> u64 {
    PIECE * (records as u64 + 1)
}

/// Writes the part of the page that begins at `offset`, up to the end of `out` or of the page.
/// Further bytes of `out` stay unchanged. Only the entries in that part are built, so reading a
/// long log in pieces costs no more than reading it at once.
pub fn write_page(
    generation: u64,
    records: &[Record],
    offset: u64,
    out: &mut [u8],
) -> Result<(), BeyondEnd> {
    let length = page_bytes(records.len());
    if offset > length {
        return Err(BeyondEnd { offset, length });
    }
    let mut at = offset;
    let mut rest = out;
    while at < length && !rest.is_empty() {
        let (piece, skip) = (at / PIECE, (at % PIECE) as usize);
        let bytes: [u8; DiscoveryEntry::SIZE] = match piece.checked_sub(1) {
            None => zerocopy::transmute!(DiscoveryHeader::new(generation, records.len() as u64)),
            Some(index) => zerocopy::transmute!(records[index as usize].entry()),
        };
        let count = rest.len().min(bytes.len() - skip);
        let (now, later) = rest.split_at_mut(count);
        now.copy_from_slice(&bytes[skip..skip + count]);
        rest = later;
        at += count as u64;
    }
    Ok(())
}

impl Record {
    /// The record of a port that the host reaches over this channel; `None`: refused.
    fn over(self, channel: PortChannel) -> Option<Self> {
        match channel {
            PortChannel::Refused => None,
            PortChannel::Clear => Some(self),
            PortChannel::Tls(requirement) => Some(self.secured(Some(requirement))),
        }
    }

    /// The record with TLS and this TREQ; unchanged for `None`.
    fn secured(mut self, secure_channel: Option<u8>) -> Self {
        if let Some(requirement) = secure_channel {
            self.secure_channel = true;
            self.record.treq = requirement | treq::SQ_FLOW_CONTROL_DISABLE;
        }
        self
    }

    fn entry(&self) -> DiscoveryEntry {
        let mut entry = DiscoveryEntry::new(&self.record).expect("checked when it was made");
        match self.record.trtype {
            trtype::TCP => entry.set_tcp_subtype(if self.secure_channel {
                sectype::TLS13
            } else {
                sectype::NONE
            }),
            trtype::RDMA => entry.set_rdma_subtype(RdmaSubtype {
                qptype: RdmaSubtype::QPTYPE_CONNECTED,
                prtype: match self.fabric {
                    RdmaProviderType::InfiniBand => RdmaSubtype::PRTYPE_INFINIBAND,
                    RdmaProviderType::RoceV1 => RdmaSubtype::PRTYPE_ROCE,
                    RdmaProviderType::RoceV2 => RdmaSubtype::PRTYPE_ROCE_V2,
                    RdmaProviderType::Iwarp => RdmaSubtype::PRTYPE_IWARP,
                },
                cms: RdmaSubtype::CMS_RDMA_CM,
                pkey: 0,
            }),
            _ => {}
        }
        entry
    }
}
