//! The text and the kind of a refused placement ([`Unplaced`]).

use nacre_cluster_core::NodeId;
use nacre_cluster_core::ids::MAX_REPLICAS;
use nacre_cluster_core::placement::{Demand, MAX_RESYNCS, Unplaced};

use crate::error::Unmet;

pub(crate) fn text(refused: &Unplaced, name: impl Fn(NodeId) -> String) -> String {
    match refused {
        Unplaced::Count { wanted, nodes } if nodes > wanted => {
            format!("{nodes} nodes are named for {wanted} replicas: name at most one for each")
        }
        Unplaced::Count { wanted, .. } => {
            format!("a volume has 1 to {MAX_REPLICAS} replicas, not {wanted}")
        }
        Unplaced::Unmet {
            demand,
            node: Some(node),
            ..
        } => {
            let name = name(*node);
            match demand {
                Demand::Live => format!("node {name} has no lease"),
                Demand::Admitted => format!("node {name} is cordoned, drained or evicted"),
                Demand::Free => format!("node {name} has a replica of the volume"),
                Demand::Pool => format!("node {name} has no pool that is online"),
                Demand::Class(class) => format!("node {name} has no pool of class \"{class}\""),
                Demand::Room { bytes, .. } => {
                    format!("no pool of node {name} has room for {bytes} bytes")
                }
                Demand::Idle => format!("the pools of node {name} are busy with other replicas"),
                Demand::Spread(label) => format!("node {name} has no label \"{label}\" of its own"),
            }
        }
        Unplaced::Unmet {
            demand,
            nodes,
            wanted,
            node: None,
        } => {
            let lack = match demand {
                Demand::Live => "have a lease".to_owned(),
                Demand::Admitted => "are neither cordoned, drained nor evicted".to_owned(),
                Demand::Free => "have no replica of the volume yet".to_owned(),
                Demand::Pool => "have a pool that is online".to_owned(),
                Demand::Class(class) => format!("have a pool of class \"{class}\""),
                Demand::Room { bytes, most } => format!(
                    "have a pool with room for {bytes} bytes; the most that one has is {most}"
                ),
                Demand::Idle => format!(
                    "have a pool that fills fewer than {MAX_RESYNCS} replicas, and where none \
                     failed a moment ago"
                ),
                Demand::Spread(label) => format!("differ in the label \"{label}\""),
            };
            let are_needed = match wanted {
                1 => "a node is needed for the replica".to_owned(),
                _ => format!("{wanted} nodes are needed for the replicas"),
            };
            format!("{are_needed}, and {nodes} {lack}")
        }
    }
}

pub(crate) fn kind(refused: &Unplaced) -> Unmet {
    let Unplaced::Unmet { demand, .. } = refused else {
        return Unmet::Request;
    };
    match demand {
        Demand::Live | Demand::Admitted | Demand::Free => Unmet::Nodes,
        Demand::Pool | Demand::Class(_) | Demand::Spread(_) => Unmet::Pools,
        Demand::Room { .. } => Unmet::Room,
        Demand::Idle => Unmet::Busy,
    }
}
