//! Plans a listener for the machine's present state: addresses, transports, and the reasons for
//! missing paths. Pure: no system calls.
//!
//! ```text
//!   transports   rdma      capable   result for an address
//!   tcp          off       -         TCP
//!   rdma, tcp    off       -         TCP
//!   rdma, tcp    prefer    yes       RDMA and TCP
//!   rdma, tcp    prefer    no        TCP; RDMA absent with the reason
//!   rdma, tcp    require   no        start fails; later: TCP; RDMA absent with the reason
//!   rdma         prefer    no        no path; RDMA absent with the reason
//!   tcp_fallback = false             TCP listens, is not in the discovery log, and refuses hosts
//! ```

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use nacre_nvmf::address::IpTransport;
use nacre_transport_rdma_link::{CapabilityRequest, Chosen, GidKind};
use serde::Serialize;

use crate::config::listener::{AnaSetting, Listener, RdmaSetting};
use crate::values::address::{ScopedIp, is_link_local};
use crate::values::selector::Selector;

/// A network interface with its addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    pub mac: Option<[u8; 6]>,
    pub addresses: Vec<IpAddr>,
}

/// The reason that a path is not available.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PathProblem {
    /// A fixed identifier: `no_rdma_dev`, `port_down`, ….
    pub reason: &'static str,
    /// The observed facts, as text.
    pub evidence: String,
    /// The command to run, or the change to make, as text.
    pub remedy: String,
}

impl fmt::Display for PathProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.reason, self.evidence, self.remedy)
    }
}

/// The state of the machine that listeners depend on.
pub trait Machine {
    fn interfaces(&self) -> &[Interface];
    /// The interfaces of an RDMA device; `None` if the device does not exist.
    fn interfaces_of(&self, device: &str) -> Option<Vec<String>>;
    fn rdma_devices(&self) -> Vec<String>;
    /// The RDMA device and GID for listening on an address, or the reason that there is none.
    fn rdma(&self, want: &CapabilityRequest) -> Result<Chosen, PathProblem>;
}

/// One address of a listener over one transport.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Path {
    pub listener: String,
    /// Name of the interface. `*`: all interfaces; `-`: no interface of this machine has the
    /// address.
    pub iface: String,
    pub ip: ScopedIp,
    pub port: u16,
    pub transport: IpTransport,
    /// The `rdma` setting, for paths over RDMA; `None` for TCP.
    pub setting: Option<RdmaSetting>,
    pub ana: AnaSetting,
    pub withheld: bool,
    /// The device and GID of an RDMA path; `None` for TCP. The error is the reason that the path is
    /// not available.
    pub verdict: Result<Option<Chosen>, PathProblem>,
}

/// A selector that matches no interface at present.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unmatched {
    #[error("listener \"{listener}\": no interface matches \"{selector}\"; have: {have}")]
    None {
        listener: String,
        selector: String,
        have: String,
    },
    #[error(
        "listener \"{listener}\": {count} interfaces match \"{selector}\": {found}; choose by name: or ip:"
    )]
    Several {
        listener: String,
        selector: String,
        count: usize,
        found: String,
    },
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListenerPlan {
    pub paths: Vec<Path>,
    pub unmatched: Vec<Unmatched>,
}

impl ListenerPlan {
    /// Required RDMA paths that are not available.
    pub fn missing_required(&self) -> impl Iterator<Item = (&Path, &PathProblem)> {
        let required = |p: &&Path| p.setting == Some(RdmaSetting::Require);
        let all = self.paths.iter().filter(required);
        all.filter_map(|path| Some((path, path.verdict.as_ref().err()?)))
    }
}

/// Plans all listeners. If two have the same address, transport and port, the first one gets it.
pub fn plan(listeners: &[Listener], machine: &dyn Machine) -> ListenerPlan {
    let mut plan = ListenerPlan::default();
    let mut seen = BTreeSet::new();
    for listener in listeners {
        for (iface, ip) in places(listener, machine, &mut plan.unmatched) {
            for path in paths(listener, &iface, ip, machine) {
                if seen.insert((path.ip.clone(), path.port, path.transport)) {
                    plan.paths.push(path);
                }
            }
        }
    }
    refuse_shared_ports(&mut plan.paths);
    plan
}

/// Refuses iWARP paths on the address and port of a TCP path: both use TCP port numbers, so one of
/// them would get no connections. Every host can use TCP.
fn refuse_shared_ports(paths: &mut [Path]) {
    let tcp: Vec<_> = paths
        .iter()
        .filter(|path| path.transport == IpTransport::Tcp)
        .map(|path| (path.ip.ip, path.port))
        .collect();
    for path in paths {
        let is_iwarp =
            matches!(&path.verdict, Ok(Some(chosen)) if chosen.gid_kind == GidKind::Iwarp);
        let ip = path.ip.ip;
        let is_taken = |(tcp, port): &(IpAddr, u16)| {
            let same = *tcp == ip || tcp.is_unspecified() && (tcp.is_ipv6() || ip.is_ipv4());
            same && *port == path.port
        };
        if is_iwarp && tcp.iter().any(is_taken) {
            let port = path.port;
            path.verdict = Err(PathProblem {
                reason: "iwarp_port",
                evidence: format!("iWARP uses the ports of TCP, and TCP listens on port {port}"),
                remedy: "give each transport a listener of its own, with different ports: \
                         transports = [\"rdma\"] and transports = [\"tcp\"]"
                    .into(),
            });
        }
    }
}

/// The interfaces and addresses that a listener selects. Adds selectors without a match to
/// `unmatched`.
fn places(
    listener: &Listener,
    machine: &dyn Machine,
    unmatched: &mut Vec<Unmatched>,
) -> Vec<(String, ScopedIp)> {
    if listener.iface.is_empty() {
        let of = interface_of(&listener.address, machine);
        let iface = match of {
            _ if listener.address.ip.is_unspecified() => "*",
            Some(interface) => &interface.name,
            None => "-",
        };
        return vec![(iface.to_owned(), listener.address.clone())];
    }
    let mut found = Vec::new();
    for text in &listener.iface {
        let Ok(selector) = text.parse::<Selector>() else {
            // Already refused when the configuration was read.
            continue;
        };
        let here = matches(&selector, machine);
        let interfaces: BTreeSet<&str> = here.iter().map(|(i, _)| i.as_str()).collect();
        // Members of a bond share the bond's MAC address, so the selector is ambiguous.
        if matches!(selector, Selector::Mac(_)) && interfaces.len() > 1 {
            unmatched.push(Unmatched::Several {
                listener: listener.name.clone(),
                selector: text.clone(),
                count: interfaces.len(),
                found: listed(here.iter().map(|(i, ip)| (i.as_str(), Some(*ip)))),
            });
        } else if here.is_empty() {
            unmatched.push(Unmatched::None {
                listener: listener.name.clone(),
                selector: text.clone(),
                have: have(&selector, machine),
            });
        } else {
            found.extend(here.into_iter().map(|(interface, ip)| {
                let scoped = ScopedIp::of_interface(ip, &interface);
                (interface, scoped)
            }));
        }
    }
    found
}

/// The interface that has an address.
pub fn interface_of<'a>(address: &ScopedIp, machine: &'a dyn Machine) -> Option<&'a Interface> {
    let has = |i: &&Interface| {
        let mut theirs = i.addresses.iter();
        theirs.any(|ip| ScopedIp::of_interface(*ip, &i.name) == *address)
    };
    machine.interfaces().iter().find(has)
}

/// The addresses that a selector matches, with their interfaces.
pub fn matches(selector: &Selector, machine: &dyn Machine) -> Vec<(String, IpAddr)> {
    let of_device = match selector {
        Selector::Rdma(device) => machine.interfaces_of(device).unwrap_or_default(),
        _ => Vec::new(),
    };
    let mut found = Vec::new();
    for interface in machine.interfaces() {
        for &ip in &interface.addresses {
            let matched = match selector {
                Selector::Name(name) => *name == interface.name,
                Selector::Mac(mac) => interface.mac == Some(*mac),
                Selector::Ip(wanted) => wanted.to_canonical() == ip.to_canonical(),
                Selector::Link(wanted, of) => *wanted == ip && *of == interface.name,
                Selector::Subnet(net, length) => in_subnet(ip, *net, *length),
                Selector::Rdma(_) => of_device.contains(&interface.name),
            };
            // Use link-local addresses only if they are selected explicitly, because few hosts can
            // reach them.
            let meant = match selector {
                Selector::Ip(_) | Selector::Link(..) => true,
                Selector::Subnet(net, _) => is_link_local(*net),
                Selector::Name(_) | Selector::Mac(_) | Selector::Rdma(_) => false,
            };
            if matched && (meant || !is_link_local(ip)) {
                found.push((interface.name.clone(), ip));
            }
        }
    }
    found
}

/// The values that a selector of this kind could have here, as text for an error.
fn have(selector: &Selector, machine: &dyn Machine) -> String {
    let interfaces = machine.interfaces().iter();
    match selector {
        Selector::Rdma(device) => match machine.interfaces_of(device) {
            None => match machine.rdma_devices() {
                devices if devices.is_empty() => "no RDMA devices".into(),
                devices => devices.join(", "),
            },
            Some(of) => format!("{device} on {}, without an address", of.join(", ")),
        },
        Selector::Mac(_) => {
            let text = |i: &Interface| match i.mac {
                Some(mac) => format!("{} {}", i.name, mac_text(mac)),
                None => i.name.clone(),
            };
            interfaces.map(text).collect::<Vec<_>>().join(", ")
        }
        _ => listed(interfaces.flat_map(|i| {
            let shown = i.addresses.iter().filter(|ip| !is_link_local(**ip));
            let addresses: Vec<_> = shown.map(|ip| (i.name.as_str(), Some(*ip))).collect();
            if addresses.is_empty() {
                vec![(i.name.as_str(), None)]
            } else {
                addresses
            }
        })),
    }
}

fn listed<'a>(all: impl Iterator<Item = (&'a str, Option<IpAddr>)>) -> String {
    let text = |(name, ip): (&str, Option<IpAddr>)| match ip {
        Some(ip) => format!("{name} {ip}"),
        None => format!("{name} without an address"),
    };
    all.map(text).collect::<Vec<_>>().join(", ")
}

fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// The paths of one address: one for each transport of the listener.
fn paths(listener: &Listener, iface: &str, ip: ScopedIp, machine: &dyn Machine) -> Vec<Path> {
    let path = |iface: &str, ip: ScopedIp, transport, verdict| Path {
        listener: listener.name.clone(),
        iface: iface.to_owned(),
        ip,
        port: listener.port,
        transport,
        setting: (transport == IpTransport::Rdma).then_some(listener.rdma),
        ana: listener.ana_of(transport),
        withheld: transport == IpTransport::Tcp && !listener.tcp_fallback && listener.wants_rdma(),
        verdict,
    };
    let mut all = Vec::new();
    if listener.wants_rdma() {
        if ip.ip.is_unspecified() {
            all.extend(
                capable(listener, ip.ip, machine).map(|(iface, ip, chosen)| {
                    path(&iface, ip.into(), IpTransport::Rdma, Ok(Some(chosen)))
                }),
            );
            if all.is_empty() {
                let lack = PathProblem {
                    reason: "no_rdma_dev",
                    evidence: format!("no address that {ip} stands for can be listened on"),
                    remedy: "`nacre doctor --rdma` says why of each".into(),
                };
                all.push(path(iface, ip.clone(), IpTransport::Rdma, Err(lack)));
            }
        } else {
            let verdict = machine.rdma(&want(listener, iface, ip.ip)).map(Some);
            all.push(path(iface, ip.clone(), IpTransport::Rdma, verdict));
        }
    }
    if listener.uses(IpTransport::Tcp) {
        all.push(path(iface, ip, IpTransport::Tcp, Ok(None)));
    }
    all
}

/// Usable RDMA addresses for a wildcard address, because RDMA binds each address separately; both
/// families for `::`.
fn capable<'a>(
    listener: &'a Listener,
    any: IpAddr,
    machine: &'a dyn Machine,
) -> impl Iterator<Item = (String, IpAddr, Chosen)> + 'a {
    let all = machine
        .interfaces()
        .iter()
        .flat_map(|i| i.addresses.iter().map(|ip| (&i.name, *ip)));
    all.filter(move |(_, ip)| {
        (any.is_ipv6() || ip.is_ipv4()) && !is_link_local(*ip) && !ip.is_loopback()
    })
    .filter_map(move |(iface, ip)| {
        let chosen = machine.rdma(&want(listener, iface, ip)).ok()?;
        Some((iface.clone(), ip, chosen))
    })
}

fn want(listener: &Listener, iface: &str, ip: IpAddr) -> CapabilityRequest {
    CapabilityRequest {
        device: listener.rdma_device.clone(),
        port: listener.rdma_port,
        gid_index: listener.rdma_gid_index,
        allow_software: listener.allow_software,
        ..CapabilityRequest::new(iface, ip)
    }
}

fn in_subnet(ip: IpAddr, net: IpAddr, length: u8) -> bool {
    let same = |a: u128, b: u128, width: u8| {
        let drop = u32::from(width.saturating_sub(length));
        a.checked_shr(drop).unwrap_or(0) == b.checked_shr(drop).unwrap_or(0)
    };
    match (ip, net) {
        (IpAddr::V4(ip), IpAddr::V4(net)) => same(ip.to_bits().into(), net.to_bits().into(), 32),
        (IpAddr::V6(ip), IpAddr::V6(net)) => same(ip.to_bits(), net.to_bits(), 128),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
