//! Converts the daemon's answers to the volumes, publications, capacities and error texts of the
//! driver.

use std::collections::BTreeMap;

use nacre_engine::methods::cluster::pools::ClusterPoolState;
use nacre_engine::methods::cluster::unconfirmed::UnconfirmedReason;

use super::calls::{
    AddressAnswer, ClusterPoolAnswer, ClusterVolumeAnswer, SubsystemAnswer, UnconfirmedAnswer,
    VolumeAnswer,
};
use super::{Publication, Volume, VolumeOrigin};
use crate::capability::Parameters;

/// Bytes of the largest volume that the cluster could make, without regard to labels of nodes.
pub(super) fn cluster_room(pools: &[ClusterPoolAnswer], parameters: &Parameters) -> u64 {
    let mut nodes: BTreeMap<&str, (bool, u64)> = BTreeMap::new();
    let online = pools
        .iter()
        .filter(|pool| pool.state == Some(ClusterPoolState::Online));
    for pool in online {
        if parameters.class.is_some() && pool.class != parameters.class {
            continue;
        }
        let room = if parameters.is_thin {
            pool.thin_room_bytes
        } else {
            pool.room_bytes
        };
        let mut named = parameters.nodes.iter();
        let is_named =
            named.any(|name| *name == pool.node || pool.node_name.as_ref() == Some(name));
        let best = nodes.entry(&pool.node).or_default();
        *best = (is_named, best.1.max(room));
    }
    let (mut named, mut rooms) = (0, Vec::new());
    for (is_named, room) in nodes.into_values() {
        if is_named {
            named += 1;
        }
        rooms.push((is_named, room));
    }
    if named < parameters.nodes.len() {
        return 0;
    }
    // Each named node gets a replica; the others have the most room.
    rooms.sort_unstable_by(|a, b| b.cmp(a));
    let count = parameters.replica_count().max(parameters.nodes.len());
    if rooms.len() < count {
        return 0;
    }
    let taken = rooms.iter().take(count).map(|(_, room)| *room);
    taken.min().unwrap_or(0)
}

impl From<VolumeAnswer> for Volume {
    fn from(found: VolumeAnswer) -> Self {
        Self {
            id: found.uuid,
            name: found.name,
            bytes: found.num_blocks.saturating_mul(found.block_size),
            replicas: found.replicas.len(),
            description: found.settings.description,
            subsystems: found.subsystems,
            origin: found.origin.map(VolumeOrigin::of),
        }
    }
}

pub(super) fn publication(subsystem: SubsystemAnswer) -> Publication {
    Publication {
        hosts: hosts(&subsystem),
        nqn: subsystem.nqn,
        any_host: subsystem.allow_any_host,
        others: Vec::new(),
        nodes: Vec::new(),
        addresses: addresses(&subsystem.listen_addresses),
    }
}

/// The NQNs of the hosts that may use a subsystem.
pub(super) fn hosts(subsystem: &SubsystemAnswer) -> Vec<String> {
    let hosts = subsystem.hosts.iter();
    hosts.map(|host| host.nqn.clone()).collect()
}

/// `None`: no host may use the volume.
pub(super) fn cluster_publication(volume: ClusterVolumeAnswer) -> Option<Publication> {
    let found = volume.publication?;
    let nodes = volume.nodes.into_iter();
    Some(Publication {
        nqn: found.nqn,
        hosts: found.hosts,
        any_host: found.any_host,
        others: Vec::new(),
        // A node without a name has left the cluster, and is refused as one that shows the volume.
        nodes: nodes
            .filter(|node| node.name.is_some())
            .map(|node| node.id)
            .collect(),
        addresses: addresses(&found.listen_addresses),
    })
}

/// Why a host without permission may still use a volume on the node.
pub(super) fn doubt(node: &UnconfirmedAnswer) -> String {
    let name = node.name.as_deref().unwrap_or(&node.id);
    match node.reason {
        Some(UnconfirmedReason::NotInEffect) => {
            let since = node.since.iter().map(|since| format!(" since {since}"));
            let why = node.why.iter().map(|why| format!(" ({why})"));
            let more: String = since.chain(why).collect();
            format!(
                "node {name} has not confirmed that the host is disconnected, and is not \
                 fenced{more}"
            )
        }
        Some(UnconfirmedReason::NotKnown) => format!(
            "node {name} does not say whether the host is disconnected: it has just started, or \
             runs an earlier version"
        ),
        Some(UnconfirmedReason::ServesWithoutLease) => format!(
            "node {name} has no lease, and serves the volume as long as its replicas confirm it"
        ),
        Some(UnconfirmedReason::NotOpened) => format!(
            "no node has opened the volume since the one that served it was lost, and that one may \
             return (node {name})"
        ),
        None => format!("node {name} may still let the host use it"),
    }
}

fn addresses(addresses: &[AddressAnswer]) -> Vec<String> {
    addresses.iter().filter_map(address).collect()
}

/// `tcp://ADDRESS:PORT` or `rdma://ADDRESS:PORT`; `None`: no host can connect to it.
fn address(address: &AddressAnswer) -> Option<String> {
    let transport = address.trtype.to_lowercase();
    let ip: std::net::IpAddr = address.traddr.parse().ok()?;
    let port: u16 = address.trsvcid.parse().ok()?;
    let is_usable = !ip.is_unspecified() && matches!(transport.as_str(), "tcp" | "rdma");
    is_usable.then(|| format!("{transport}://{}", std::net::SocketAddr::new(ip, port)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    /// Goal: the capacity is that of the volume which the cluster would make.
    #[test]
    fn the_room_of_a_cluster_is_that_of_a_volume() {
        let pool = |node: &str, class: &str, state, room| ClusterPoolAnswer {
            node: node.to_owned(),
            node_name: Some(node.to_uppercase()),
            class: Some(class.to_owned()),
            state: Some(state),
            room_bytes: room,
            thin_room_bytes: 2 * room,
        };
        let online = ClusterPoolState::Online;
        let pools = [
            pool("a", "fast", online, 40),
            pool("a", "slow", online, 90),
            pool("b", "fast", online, 30),
            pool("c", "slow", online, 20),
            pool("d", "slow", ClusterPoolState::Away, 99),
        ];
        let room = |pairs: &[(&str, &str)]| {
            let pairs = pairs.iter();
            let texts = pairs.map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
            let parameters = Parameters::read(&texts.collect()).expect("they are good");
            cluster_room(&pools, &parameters)
        };
        assert_eq!(room(&[]), 90);
        assert_eq!(room(&[("replicas", "2")]), 30, "a node has one replica");
        assert_eq!(room(&[("replicas", "2"), ("thin", "true")]), 60);
        assert_eq!(room(&[("replicas", "3")]), 20);
        assert_eq!(room(&[("replicas", "4")]), 0);
        assert_eq!(room(&[("class", "fast")]), 40);
        assert_eq!(room(&[("nodes", "C")]), 20);
        assert_eq!(room(&[("nodes", "c"), ("replicas", "2")]), 20);
        assert_eq!(room(&[("nodes", "d")]), 0);
    }

    /// Goal: the text has the node's own cause and its time, as far as its daemon says them.
    #[test]
    fn a_doubt_has_its_cause() {
        let mut node = UnconfirmedAnswer {
            id: "1".to_owned(),
            name: Some("ant".to_owned()),
            reason: Some(UnconfirmedReason::NotInEffect),
            why: None,
            since: None,
        };
        let expected =
            "node ant has not confirmed that the host is disconnected, and is not fenced";
        assert_eq!(doubt(&node), expected);
        node.why = Some("I/O is in flight".to_owned());
        node.since = Some("2026-01-31T12:00:00Z".to_owned());
        let more = " since 2026-01-31T12:00:00Z (I/O is in flight)";
        assert_eq!(doubt(&node), format!("{expected}{more}"));
    }

    /// Goal: a volume that an operator also shows by another subsystem is published by its own.
    #[test]
    fn a_volume_has_one_subsystem_of_the_driver() {
        let volume = |subsystems: &[&str]| Volume {
            id: Uuid::from_u128(1),
            name: "v".to_owned(),
            bytes: 1,
            replicas: 1,
            description: String::new(),
            subsystems: subsystems.iter().map(|one| (*one).to_owned()).collect(),
            origin: None,
        };
        let own = "nqn.2025-01.io.nacre:v";
        for (subsystems, expected) in [
            (&[][..], Some(None)),
            (&["nqn.a"], Some(Some("nqn.a"))),
            (&["nqn.a", own], Some(Some(own))),
            (&["nqn.a", "nqn.b"], None),
        ] {
            let volume = volume(subsystems);
            let found = volume.subsystem().map(|nqn| nqn.map(String::as_str));
            assert_eq!(found.ok(), expected, "{subsystems:?}");
        }
    }

    #[test]
    fn addresses_become_uris() {
        let address = |trtype: &str, traddr: &str, trsvcid: &str| {
            address(&AddressAnswer {
                trtype: trtype.to_owned(),
                traddr: traddr.to_owned(),
                trsvcid: trsvcid.to_owned(),
            })
        };
        let tcp = address("TCP", "192.0.2.1", "4420");
        assert_eq!(tcp.as_deref(), Some("tcp://192.0.2.1:4420"));
        let six = address("RDMA", "2001:db8::1", "4420");
        assert_eq!(six.as_deref(), Some("rdma://[2001:db8::1]:4420"));
        for (trtype, traddr, trsvcid) in [
            ("TCP", "0.0.0.0", "4420"),
            ("TCP", "host", "4420"),
            ("TCP", "192.0.2.1", "none"),
            ("FC", "192.0.2.1", "4420"),
        ] {
            assert_eq!(
                address(trtype, traddr, trsvcid),
                None,
                "{trtype} {traddr} {trsvcid}"
            );
        }
    }
}
