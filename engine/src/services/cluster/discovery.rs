//! The discovery log of this node: for each published volume, the ports of all nodes that show it.
//! Only the hosts of the volume's publication get these entries.
//!
//! The ports of a node without a lease are listed too: they work again when the node returns. A
//! host that connects to one meanwhile gets no answer. `cluster remove` ends a node's entries.
//!
//! PORTID combines the node's slot and the number of the port in the node's description, so all
//! nodes list a port under the same PORTID.
//!
//! ```text
//!   15      11 10       9         0
//!   ┌─────────┬─────────┬──────────┐
//!   │ slot + 1│ 0       │ position │   a port that the node describes
//!   │ slot + 1│ 1       │ listener │   a later one, which the node lists itself
//!   └─────────┴─────────┴──────────┘
//! ```
//!
//! There are no referrals to the other nodes: each log has the ports of all nodes, and nvme-cli
//! before 2.0 follows referrals in circles.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use nacre_cluster_core::{NodeId, VolumeId};
use nacre_cluster_node::{NodeKey, Portal, Publication};
use nacre_nvmf::address::IpTransport;
use nacre_nvmf::subsystems::{LATER_IDS, SharedPort, SharedSubsystem};
use nacre_nvmf::transport::{Address, TlsPolicy, TransportType};
use nacre_nvmf_wire::Nqn;
use uuid::Uuid;

use super::Running;
use crate::services::Engine;

/// Most ports of one node in the discovery log.
const MAX_PORTS: usize = 8;
/// Number of the PORTID bits below the slot. `slot + 1` (1 to 16) takes the five bits above.
const PORT_BITS: u32 = 11;

/// A port of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    /// The port's position in the description of its node.
    number: u16,
    transport: TransportType,
    address: SocketAddr,
    /// `None`: the description is of a version that did not store the TLS policy.
    tls: Option<TlsPolicy>,
}

#[derive(Debug, Default)]
pub(super) struct ListedVolumes {
    /// The volumes that were given to the target, with the NQNs of their subsystems.
    listed: RefCell<BTreeMap<VolumeId, Nqn>>,
    /// The ports of the nodes that were given to the target.
    places: RefCell<BTreeMap<NodeId, Vec<Place>>>,
}

impl ListedVolumes {
    /// Gives the target the ports of `volumes`. With `are_nodes_changed`, those of all volumes if
    /// the ports of a node differ.
    pub(super) fn update(
        &self,
        engine: &Engine,
        running: &Running,
        volumes: &BTreeSet<VolumeId>,
        are_nodes_changed: bool,
    ) {
        let Ok(plane) = engine.plane() else { return };
        let mut changed = volumes.clone();
        if are_nodes_changed {
            let places = places(&running.inbox.nodes(), running.me);
            let before = self.places.replace(places);
            if before != *self.places.borrow() {
                changed = running.inbox.volumes();
                changed.extend(self.listed.borrow().keys());
            }
        }
        let places = self.places.borrow();
        let mut listed = self.listed.borrow_mut();
        for volume in changed {
            let wanted = running.inbox.wanted(volume);
            let publication = wanted.and_then(|wanted| wanted.publication);
            let now = publication.as_ref().and_then(|publication| {
                let nqn = Nqn::new(&publication.nqn).ok()?;
                Some((nqn, shared(publication, &places, running.me)))
            });
            let nqn = now.as_ref().map(|(nqn, _)| nqn.clone());
            let before = match nqn {
                Some(nqn) => listed.insert(volume, nqn),
                None => listed.remove(&volume),
            };
            if let Some(gone) = before.filter(|gone| now.as_ref().is_none_or(|(n, _)| n != gone)) {
                plane.target.share(&gone, None);
            }
            if let Some((nqn, shared)) = now {
                plane.target.share(&nqn, Some(shared));
            }
        }
    }
}

/// The ports of a publication's nodes.
fn shared(
    publication: &Publication,
    places: &BTreeMap<NodeId, Vec<Place>>,
    me: NodeId,
) -> SharedSubsystem {
    let ports = publication.slots.iter().flat_map(|(node, slot)| {
        let of_node = places.get(&node).into_iter().flatten();
        of_node.map(move |place| SharedPort {
            id: first_id(slot) | place.number,
            transport: place.transport,
            address: Address::Ip(place.address),
            tls: place.tls,
            is_here: node == me,
        })
    });
    let own = publication.slots.of(me);
    let hosts = publication.hosts.iter();
    SharedSubsystem {
        hosts: hosts.filter_map(|host| Nqn::foreign(host).ok()).collect(),
        any_host: publication.any_host,
        ports: ports.collect(),
        later_ids: own.map(|slot| first_id(slot) | LATER_IDS),
    }
}

/// The lowest PORTID of a slot.
fn first_id(slot: u8) -> u16 {
    (u16::from(slot) + 1) << PORT_BITS
}

/// The ports of all nodes. Loopback addresses count only for nodes of this machine.
fn places(nodes: &BTreeMap<NodeId, NodeKey>, me: NodeId) -> BTreeMap<NodeId, Vec<Place>> {
    let machine = |node: &NodeKey| node.description.machine;
    let own: Option<Uuid> = nodes.get(&me).and_then(machine);
    let of_node = |(id, key): (&NodeId, &NodeKey)| {
        let is_near = *id == me || (own.is_some() && machine(key) == own);
        let numbered = key.description.portals.iter().zip(1..LATER_IDS);
        let places = numbered.filter_map(|(portal, number)| {
            let place = place(number, portal)?;
            let is_reached = is_near || !place.address.ip().to_canonical().is_loopback();
            is_reached.then_some(place)
        });
        (*id, places.take(MAX_PORTS).collect())
    };
    nodes.iter().map(of_node).collect()
}

fn place(number: u16, portal: &Portal) -> Option<Place> {
    let is = |transport: IpTransport| portal.trtype.eq_ignore_ascii_case(transport.trtype());
    let transport = if is(IpTransport::Tcp) {
        TransportType::Tcp
    } else if is(IpTransport::Rdma) {
        TransportType::Rdma
    } else {
        return None;
    };
    let ip: IpAddr = portal.traddr.parse().ok()?;
    let port = portal.trsvcid.parse().ok()?;
    let tls = portal.tls.as_deref().and_then(|text| {
        let mut known = [TlsPolicy::Off, TlsPolicy::Allow, TlsPolicy::Require].into_iter();
        known.find(|policy| tls_text(*policy) == text)
    });
    Some(Place {
        number,
        transport,
        address: SocketAddr::new(ip, port),
        tls,
    })
}

/// The name of a TLS policy in the description of a node.
pub(super) fn tls_text(policy: TlsPolicy) -> &'static str {
    match policy {
        TlsPolicy::Off => "off",
        TlsPolicy::Allow => "allow",
        TlsPolicy::Require => "require",
    }
}

#[cfg(test)]
mod tests {
    use nacre_cluster_core::slots::MAX_SLOTS;
    use nacre_cluster_node::Description;

    use super::*;

    fn node(number: u128) -> NodeId {
        NodeId(Uuid::from_u128(number))
    }

    fn key(machine: u128, portals: &[(&str, &str)]) -> NodeKey {
        let portals = portals.iter().map(|(trtype, traddr)| Portal {
            trtype: (*trtype).to_owned(),
            traddr: (*traddr).to_owned(),
            trsvcid: "4420".to_owned(),
            tls: None,
        });
        let mut key = NodeKey::default();
        key.description = Description {
            machine: Some(Uuid::from_u128(machine)),
            portals: portals.collect(),
            ..Description::default()
        };
        key
    }

    /// Goal: each node lists the same ports with the same PORTID, by slot; loopback addresses only
    /// on their machine. Unreadable portals are left out.
    #[test]
    fn ports_by_slot() {
        let [a, b] = [node(1), node(2)];
        let nodes = BTreeMap::from([
            (a, key(7, &[("RDMA", "192.0.2.1"), ("TCP", "127.0.0.1")])),
            (
                b,
                key(8, &[("FC", "x"), ("TCP", "2001:db8::2"), ("tcp", "::1")]),
            ),
        ]);
        let mut publication = Publication::new(VolumeId(Uuid::from_u128(9)));
        for node in [b, a, node(3)] {
            publication.slots.assign(node);
        }
        publication.hosts = vec!["nqn.2025-01.io.nacre:h".to_owned()];
        let listed = |me| {
            let shared = shared(&publication, &places(&nodes, me), me);
            let port = |port: SharedPort| (port.id, port.address.to_string(), port.is_here);
            shared.ports.into_iter().map(port).collect::<BTreeSet<_>>()
        };
        let slot = |node| publication.slots.of(node).expect("assigned");
        let id = |node, number| (u16::from(slot(node)) + 1) << 11 | number;
        let port =
            |node, number, at: &str, me| (id(node, number), format!("{at}:4420"), node == me);
        let of =
            |me| BTreeSet::from([port(a, 1, "192.0.2.1", me), port(b, 2, "[2001:db8::2]", me)]);
        let mut on_a = of(a);
        on_a.insert(port(a, 2, "127.0.0.1", a));
        assert_eq!(listed(a), on_a);
        let mut on_b = of(b);
        on_b.insert(port(b, 3, "[::1]", b));
        assert_eq!(listed(b), on_b);
        assert_eq!(listed(node(4)), of(node(4)), "a node that does not show it");
        let shared = shared(&publication, &BTreeMap::new(), a);
        assert_eq!((shared.hosts.len(), shared.any_host), (1, false));
        assert!(shared.ports.is_empty(), "no node is described");
    }

    /// Goal: no two ports of a publication have one PORTID: neither ports of two nodes, nor a port
    /// that its node describes and a later one.
    #[test]
    fn port_ids_are_of_one_port() {
        let addresses: Vec<String> = (1..=8).map(|at| format!("192.0.2.{at}")).collect();
        let portals: Vec<_> = addresses.iter().map(|at| ("TCP", at.as_str())).collect();
        let all = (1..=MAX_SLOTS as u128).map(node);
        let nodes: BTreeMap<_, _> = all.map(|node| (node, key(7, &portals))).collect();
        let mut publication = Publication::new(VolumeId(Uuid::from_u128(9)));
        for node in nodes.keys() {
            publication.slots.assign(*node).expect("a free slot");
        }
        let places = places(&nodes, node(1));
        let mut ids = BTreeSet::new();
        for me in nodes.keys() {
            let shared = shared(&publication, &places, *me);
            let own = shared.ports.iter().filter(|port| port.is_here);
            let own: Vec<u16> = own.map(|port| port.id).collect();
            let first = shared.later_ids.expect("it has a slot");
            let later = first..first + LATER_IDS;
            let before = ids.len();
            ids.extend(own.iter().copied().chain(later));
            let added = own.len() + usize::from(LATER_IDS);
            assert_eq!((own.len(), ids.len() - before), (8, added));
        }
        // Ports of subsystems on one target only have the numbers of their listeners.
        assert!(ids.first().is_some_and(|first| *first > 1 << PORT_BITS));
        let elsewhere = shared(&publication, &places, node(99));
        assert_eq!(elsewhere.later_ids, None);
    }

    /// Goal: the log knows whether a port of another node uses TLS, if its node describes it in
    /// words of this version.
    #[test]
    fn tls_of_ports() {
        let texts = [
            (None, None),
            (Some("off"), Some(TlsPolicy::Off)),
            (Some("allow"), Some(TlsPolicy::Allow)),
            (Some("require"), Some(TlsPolicy::Require)),
            (Some("later"), None),
        ];
        for (text, expected) in texts {
            let mut key = key(7, &[("TCP", "192.0.2.1")]);
            key.description.portals[0].tls = text.map(str::to_owned);
            let places = places(&BTreeMap::from([(node(1), key)]), node(2));
            assert_eq!(places[&node(1)][0].tls, expected);
        }
    }
}
