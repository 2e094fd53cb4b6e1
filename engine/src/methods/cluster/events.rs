//! `cluster_get_events`: the last decisions of this node about nodes and volumes.

use std::rc::Rc;
use std::time::Duration;

use nacre_cluster_node::events::{Decision, Event, KEPT};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::values::time::moment;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<GetClusterEvents>();
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct ClusterEvents {
    events: Vec<ClusterEvent>,
    /// The number of the last event: `after` of the next call. It starts again with the daemon.
    last: u64,
}

#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ClusterEvent {
    number: u64,
    /// RFC 3339, in UTC.
    time: String,
    event: &'static str,
    text: String,
    /// The node that the event is about, unless it is this one.
    #[schemars(with = "Option<String>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<Uuid>,
    #[schemars(with = "Option<String>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    volume: Option<Uuid>,
    /// The number of the volume's holder: each new holder increments it.
    #[serde(skip_serializing_if = "Option::is_none")]
    epoch: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    duration_ms: Option<u64>,
}

impl From<Event> for ClusterEvent {
    fn from(event: Event) -> Self {
        let (kind, text) = words(&event.what);
        let (node, volume, epoch, duration) = facts(&event.what);
        Self {
            number: event.number,
            time: moment(event.at),
            event: kind,
            text,
            node,
            volume,
            epoch,
            duration_ms: duration.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
        }
    }
}

fn words(what: &Decision) -> (&'static str, String) {
    match what {
        Decision::NodeJoined { incarnation } => (
            "node_joined",
            format!("this node has a lease, incarnation {}", incarnation.0),
        ),
        Decision::NodeLost { incarnation } => (
            "node_lost",
            format!(
                "another node fenced this one, incarnation {}",
                incarnation.0
            ),
        ),
        Decision::NodeFenced { node, silent } => (
            "node_fenced",
            format!(
                "fenced node {}, which was silent for {} ms",
                node.0,
                silent.as_millis()
            ),
        ),
        Decision::NodeGone { node } => {
            ("node_gone", format!("the lease of node {} is over", node.0))
        }
        Decision::NodeBack { node } => ("node_back", format!("node {} has a lease", node.0)),
        Decision::NodeExcluded { why } => ("node_excluded", format!("this node stays out: {why}")),
        Decision::VolumeTaken {
            volume, from, took, ..
        } => {
            let from = match from {
                Some(node) => format!(" from node {}", node.0),
                None => String::new(),
            };
            let took = took.as_millis();
            let text = format!("took volume {}{from} in {took} ms", volume.0);
            ("volume_taken", text)
        }
        Decision::VolumeHandedOver { volume, to, .. } => {
            let to = match to {
                Some(node) => format!(" to node {}", node.0),
                None => String::new(),
            };
            let text = format!("handed volume {} over{to}", volume.0);
            ("volume_handed_over", text)
        }
        Decision::VolumeNotOpened { volume, .. } => (
            "volume_not_opened",
            format!("could not open volume {}: another node may try", volume.0),
        ),
        Decision::VolumeKept { volume } => (
            "volume_kept",
            format!(
                "keeps volume {}: commands in flight did not end within 5 s",
                volume.0
            ),
        ),
        Decision::VolumeFenced { volume, .. } => (
            "volume_fenced",
            format!("no longer serves volume {}: this node was fenced", volume.0),
        ),
        Decision::VolumeWithoutHolder { volume, missing } if missing.is_empty() => (
            "volume_without_holder",
            format!(
                "no node serves volume {}, and this one reaches no replica in sync",
                volume.0
            ),
        ),
        Decision::VolumeWithoutHolder { volume, missing } => {
            let missing: Vec<String> = missing.iter().map(|node| node.0.to_string()).collect();
            let text = format!(
                "no node serves volume {}: it was restored from a backup, and this node does not \
                 reach its replicas on {}",
                volume.0,
                missing.join(", ")
            );
            ("volume_without_holder", text)
        }
        Decision::StoreAway { why } => ("store_away", format!("etcd is away: {why}")),
        Decision::StoreBack { away } => (
            "store_back",
            format!("etcd answers again after {} ms", away.as_millis()),
        ),
        Decision::KeyIgnored { key, why } => (
            "key_ignored",
            format!("cannot read the key {key} in etcd: {why}"),
        ),
    }
}

type Facts = (Option<Uuid>, Option<Uuid>, Option<u64>, Option<Duration>);

/// Node, volume, epoch and duration.
fn facts(what: &Decision) -> Facts {
    match what {
        Decision::NodeFenced { node, silent } => (Some(node.0), None, None, Some(*silent)),
        Decision::NodeGone { node } | Decision::NodeBack { node } => {
            (Some(node.0), None, None, None)
        }
        Decision::VolumeTaken {
            volume,
            epoch,
            from,
            took,
        } => {
            let from = from.map(|node| node.0);
            (from, Some(volume.0), Some(*epoch), Some(*took))
        }
        Decision::VolumeHandedOver { volume, epoch, to } => {
            (to.map(|node| node.0), Some(volume.0), Some(*epoch), None)
        }
        Decision::VolumeFenced { volume, epoch } | Decision::VolumeNotOpened { volume, epoch } => {
            (None, Some(volume.0), Some(*epoch), None)
        }
        Decision::VolumeKept { volume } | Decision::VolumeWithoutHolder { volume, .. } => {
            (None, Some(volume.0), None, None)
        }
        Decision::StoreBack { away } => (None, None, None, Some(*away)),
        Decision::NodeJoined { .. }
        | Decision::NodeLost { .. }
        | Decision::NodeExcluded { .. }
        | Decision::StoreAway { .. }
        | Decision::KeyIgnored { .. } => (None, None, None, None),
    }
}

pub struct GetClusterEvents;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GetClusterEventsParams {
    /// Only events after the one of this number. Default: all that are kept, at most 1,024.
    #[serde(default)]
    pub after: u64,
}

const _: () = assert!(KEPT == 1024, "the documentation of `after` has the number");

impl Method<Engine> for GetClusterEvents {
    const NAME: &'static str = "cluster_get_events";
    const ABOUT: &'static str = "Returns the last decisions of this node about nodes and volumes \
         of the cluster, oldest first. Each node has its own ones.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = GetClusterEventsParams;
    type Reply = ClusterEvents;

    async fn apply(
        params: GetClusterEventsParams,
        engine: Rc<Engine>,
    ) -> Result<ClusterEvents, RpcError> {
        let operator = engine.cluster.operator()?;
        let all = operator.events_after(0);
        let last = all.last().map_or(0, |event| event.number);
        let later = all.into_iter().filter(|event| event.number > params.after);
        Ok(ClusterEvents {
            events: later.map(Into::into).collect(),
            last,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use nacre_cluster_core::{Incarnation, NodeId, VolumeId};

    use super::*;

    #[test]
    fn events_have_words_and_facts() {
        let (node, volume) = (NodeId(Uuid::from_u128(1)), VolumeId(Uuid::from_u128(2)));
        let (n, v) = (node.0, volume.0);
        let took = Duration::from_millis(31);
        for (what, kind, text, facts) in [
            (
                Decision::VolumeTaken {
                    volume,
                    epoch: 4,
                    from: Some(node),
                    took,
                },
                "volume_taken",
                format!("took volume {v} from node {n} in 31 ms"),
                (Some(n), Some(v), Some(4), Some(31)),
            ),
            (
                Decision::NodeJoined {
                    incarnation: Incarnation(9),
                },
                "node_joined",
                "this node has a lease, incarnation 9".to_owned(),
                (None, None, None, None),
            ),
            (
                Decision::VolumeHandedOver {
                    volume,
                    epoch: 5,
                    to: None,
                },
                "volume_handed_over",
                format!("handed volume {v} over"),
                (None, Some(v), Some(5), None),
            ),
            (
                Decision::VolumeWithoutHolder {
                    volume,
                    missing: Vec::new(),
                },
                "volume_without_holder",
                format!("no node serves volume {v}, and this one reaches no replica in sync"),
                (None, Some(v), None, None),
            ),
            (
                Decision::VolumeWithoutHolder {
                    volume,
                    missing: vec![node, NodeId(v)],
                },
                "volume_without_holder",
                format!(
                    "no node serves volume {v}: it was restored from a backup, and this node does \
                     not reach its replicas on {n}, {v}"
                ),
                (None, Some(v), None, None),
            ),
            (
                Decision::VolumeKept { volume },
                "volume_kept",
                format!("keeps volume {v}: commands in flight did not end within 5 s"),
                (None, Some(v), None, None),
            ),
            (
                Decision::StoreBack { away: took },
                "store_back",
                "etcd answers again after 31 ms".to_owned(),
                (None, None, None, Some(31)),
            ),
        ] {
            let event = ClusterEvent::from(Event {
                number: 3,
                at: SystemTime::UNIX_EPOCH,
                what,
            });
            assert_eq!((event.event, &event.text), (kind, &text));
            let found = (event.node, event.volume, event.epoch, event.duration_ms);
            assert_eq!(found, facts, "{kind}");
            assert_eq!(event.time, "1970-01-01T00:00:00Z");
        }
    }
}
