//! The daemon's answers as the driver reads them.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Publication, Volume};
use crate::capability::Parameters;

/// Bytes of the largest volume of the cluster, without regard to labels of nodes.
pub(super) fn cluster_room(pools: &[Value], parameters: &Parameters) -> u64 {
    let room = if parameters.is_thin {
        "thin_room_bytes"
    } else {
        "room_bytes"
    };
    let mut nodes: BTreeMap<&str, (bool, u64)> = BTreeMap::new();
    for pool in pools.iter().filter(|pool| pool["state"] == "online") {
        let is_of_class = (parameters.class.as_deref()).is_none_or(|class| pool["class"] == class);
        let (Some(node), Some(room)) = (pool["node"].as_str(), pool[room].as_u64()) else {
            continue;
        };
        if is_of_class {
            let mut named = parameters.nodes.iter();
            let is_named = named.any(|name| name == node || pool["node_name"] == name.as_str());
            let best = nodes.entry(node).or_default();
            *best = (is_named, best.1.max(room));
        }
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

pub(super) fn volume(found: &Value) -> Option<Volume> {
    let block = found["block_size"].as_u64()?;
    let subsystems = found["subsystems"].as_array().into_iter().flatten();
    Some(Volume {
        id: found["uuid"].as_str()?.parse().ok()?,
        name: found["name"].as_str()?.to_owned(),
        bytes: found["num_blocks"].as_u64()?.checked_mul(block)?,
        replicas: found["replicas"].as_array()?.len(),
        description: text(&found["settings"]["description"]),
        subsystems: subsystems.map(text).collect(),
    })
}

pub(super) fn publication(subsystem: &Value) -> Option<Publication> {
    let hosts = subsystem["hosts"].as_array().into_iter().flatten();
    Some(Publication {
        nqn: subsystem["nqn"].as_str()?.to_owned(),
        hosts: hosts.map(|host| text(&host["nqn"])).collect(),
        any_host: subsystem["allow_any_host"] == true,
        others: Vec::new(),
        nodes: Vec::new(),
        addresses: addresses(&subsystem["listen_addresses"]),
    })
}

pub(super) fn cluster_publication(volume: &Value) -> Option<Publication> {
    let found = &volume["publication"];
    let nodes = volume["nodes"].as_array().into_iter().flatten();
    let hosts = found["hosts"].as_array().into_iter().flatten();
    Some(Publication {
        nqn: found["nqn"].as_str()?.to_owned(),
        hosts: hosts.map(text).collect(),
        any_host: found["any_host"] == true,
        others: Vec::new(),
        // A node without a name has left the cluster, and is refused as one that shows the volume.
        nodes: nodes
            .filter(|node| node["name"].is_string())
            .map(|node| text(&node["id"]))
            .collect(),
        addresses: addresses(&found["listen_addresses"]),
    })
}

/// The name of a node, else its id.
pub(super) fn named(node: &Value) -> &str {
    let name = node["name"].as_str().or_else(|| node["id"].as_str());
    name.unwrap_or_default()
}

pub(super) fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn addresses(addresses: &Value) -> Vec<String> {
    let all = addresses.as_array().into_iter().flatten();
    all.filter_map(address).collect()
}

/// `tcp://ADDRESS:PORT` or `rdma://ADDRESS:PORT`; `None`: no host can connect to it.
fn address(address: &Value) -> Option<String> {
    let transport = address["trtype"].as_str()?.to_lowercase();
    let ip: std::net::IpAddr = address["traddr"].as_str()?.parse().ok()?;
    let port: u16 = address["trsvcid"].as_str()?.parse().ok()?;
    let is_usable = !ip.is_unspecified() && matches!(transport.as_str(), "tcp" | "rdma");
    is_usable.then(|| format!("{transport}://{}", std::net::SocketAddr::new(ip, port)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use uuid::Uuid;

    /// Goal: the capacity is that of the volume which the cluster would make.
    #[test]
    fn the_room_of_a_cluster_is_that_of_a_volume() {
        let pool = |node: &str, class: &str, state: &str, room: u64| {
            json!({
                "node": node, "node_name": node.to_uppercase(), "class": class, "state": state,
                "room_bytes": room, "thin_room_bytes": 2 * room,
            })
        };
        let pools = [
            pool("a", "fast", "online", 40),
            pool("a", "slow", "online", 90),
            pool("b", "fast", "online", 30),
            pool("c", "slow", "online", 20),
            pool("d", "slow", "away", 99),
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
            address(&json!({ "trtype": trtype, "traddr": traddr, "trsvcid": trsvcid }))
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
