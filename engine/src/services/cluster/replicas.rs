//! New replicas of a volume: their nodes export the devices, the volume's control uses them, and
//! the record names them.
//!
//! ```text
//!   export   member/N/R, by this daemon ▸ the nodes export the devices ▸ this node reaches them
//!   work     the control writes labels and the record
//!   conclude made: the exports end with their replicas; not made: they end now
//! ```
//!
//! If this daemon dies in between, its incarnation ends, and each node ends its export by itself
//! ([`super::exports`]).

use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_cluster_core::{ExportId, Holder, Incarnation, NodeId, VolumeId};
use nacre_cluster_node::export::Is;
use nacre_cluster_node::{Error, NodeKey};
use tracing::warn;
use uuid::Uuid;

use super::Running;
use super::inbox::Exported;
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;

/// Time limit for all nodes to export the devices, and for this node to reach them.
const EXPORTED: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(100);
/// Pause after a failure to conclude an export.
const AGAIN: Duration = Duration::from_secs(1);

/// A device of a node, as the place of a new replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewReplica {
    /// Id or name of the node.
    pub node: String,
    pub device: String,
}

impl NewReplica {
    /// Parses `NODE:DEVICE`.
    pub fn parse(text: &str) -> Result<Self, RpcError> {
        match text.split_once(':') {
            Some((node, device)) if !node.is_empty() && !device.is_empty() => Ok(Self {
                node: node.to_owned(),
                device: device.to_owned(),
            }),
            _ => {
                let cause = format!("\"{text}\" is not NODE:DEVICE");
                Err(RpcError::errno(Errno::EINVAL, cause)
                    .remedy("in a cluster, a device is named with its node, as in a:disk0"))
            }
        }
    }
}

impl Running {
    /// The node with this id or name.
    pub(super) fn find(&self, name: &str) -> Result<NodeId, RpcError> {
        let nodes = self.inbox.nodes();
        let id = Uuid::parse_str(name).ok().map(NodeId);
        if let Some(id) = id.filter(|id| nodes.contains_key(id)) {
            return Ok(id);
        }
        let is_it = |(id, key): (&NodeId, &NodeKey)| (key.description.name == name).then_some(*id);
        let mut found = nodes.iter().filter_map(is_it);
        let refuse = |cause: String| {
            let names: Vec<&str> = nodes.values().map(|key| &*key.description.name).collect();
            let remedy = format!("the nodes are {}", names.join(", "));
            RpcError::errno(Errno::ENODEV, cause).remedy(remedy)
        };
        match (found.next(), found.next()) {
            (Some(id), None) => Ok(id),
            (Some(_), Some(_)) => Err(refuse(format!("several nodes have the name \"{name}\""))
                .remedy("use the node's id; cluster_get_nodes lists them")),
            _ => Err(refuse(format!("the cluster has no node \"{name}\""))),
        }
    }

    /// Refuses a node that is cordoned, drained or evicted.
    fn must_get_replicas(&self, node: NodeId) -> Result<NodeId, RpcError> {
        let nodes = self.inbox.nodes();
        let Some(key) = nodes.get(&node).filter(|key| key.is_avoided()) else {
            return Ok(node);
        };
        let name = &key.description.name;
        let (state, undo) = if key.evict {
            ("evicted", "evict --undo")
        } else if key.drain {
            ("drained", "undrain")
        } else {
            ("cordoned", "uncordon")
        };
        let cause = format!("node {name} is {state}: it gets no new replicas");
        let remedy = format!("name another node, or: nacre cluster {undo} {name}");
        Err(RpcError::errno(Errno::EPERM, cause).remedy(remedy))
    }

    /// Records the device of a replica in the inbox, before a record of the volume names it.
    pub(super) fn note(&self, export_id: ExportId, node: NodeId, device: &str) {
        self.inbox.note(Exported {
            device: export_id.0.to_string(),
            node,
            node_device: Some(device.to_owned()),
        });
    }

    /// This node with its present incarnation; `EAGAIN` without a lease.
    pub(super) fn myself(&self) -> Result<Holder, RpcError> {
        match self.link.incarnation.load(Ordering::Acquire) {
            0 => {
                let cause = "this node has no lease";
                Err(RpcError::errno(Errno::EAGAIN, cause)
                    .remedy("see cluster_get_status; run the command on another node"))
            }
            incarnation => Ok(Holder {
                node: self.me,
                incarnation: Incarnation(incarnation as u64),
            }),
        }
    }
}

/// Exports the devices for `work`, which makes replicas on them. `field` names the parameter of
/// each device.
pub(super) async fn with_exports<T, Work>(
    engine: &Rc<Engine>,
    running: &Rc<Running>,
    volume: VolumeId,
    replicas: &[NewReplica],
    field: impl Fn(usize) -> String,
    work: impl FnOnce(Vec<String>) -> Work,
) -> Result<T, RpcError>
where
    Work: Future<Output = Result<T, RpcError>>,
{
    let by = running.myself()?;
    let mut made = Vec::new();
    for (at, replica) in replicas.iter().enumerate() {
        let node = running.find(&replica.node);
        let node = node.and_then(|node| running.must_get_replicas(node));
        let node = node.map_err(|error| error.field(field(at)))?;
        made.push((ExportId(Uuid::new_v4()), node));
    }
    let exported = async {
        for ((id, node), wanted) in made.iter().zip(replicas) {
            running.note(*id, *node, &wanted.device);
            let operator = &running.operator;
            let exported = operator.export(*node, *id, volume, &wanted.device, Some(by));
            exported.await.or_refuse()?;
        }
        Ok(())
    };
    let field = |at| Some(field(at));
    with_devices(engine, running, volume, &made, field, exported, work).await
}

/// Runs `work` once the nodes export the devices, as `exported` asks for, and concludes the
/// exports. `field` names the parameter of each device, if there is one.
pub(super) async fn with_devices<T, Work>(
    engine: &Rc<Engine>,
    running: &Rc<Running>,
    volume: VolumeId,
    made: &[(ExportId, NodeId)],
    field: impl Fn(usize) -> Option<String>,
    exported: impl Future<Output = Result<(), RpcError>>,
    work: impl FnOnce(Vec<String>) -> Work,
) -> Result<T, RpcError>
where
    Work: Future<Output = Result<T, RpcError>>,
{
    let names: Vec<String> = made.iter().map(|(id, _)| id.0.to_string()).collect();
    let outcome = async {
        exported.await?;
        reached(engine, running, volume, made)
            .await
            .map_err(|(at, error)| match field(at) {
                Some(field) => error.field(field),
                None => error,
            })?;
        work(names).await
    };
    let outcome = outcome.await;
    let is_made = outcome.is_ok();
    for (export_id, node) in made.iter().copied() {
        if conclude(running, node, export_id, is_made).await.is_err() {
            // The daemon's end ends the exports, too.
            let running = Rc::clone(running);
            tokio::task::spawn_local(async move {
                while !running.is_ending.get()
                    && conclude(&running, node, export_id, is_made).await.is_err()
                {
                    tokio::time::sleep(AGAIN).await;
                }
            });
        }
    }
    outcome
}

/// Ends the export of a replica that was not made. The export of one that was made ends with its
/// replica.
async fn conclude(
    running: &Running,
    node: NodeId,
    export_id: ExportId,
    is_made: bool,
) -> Result<(), Error> {
    let concluded = if is_made {
        running.operator.export_is_made(node, export_id).await
    } else {
        running.inbox.forget_noted(&export_id.0.to_string());
        let ended = running
            .operator
            .unexport_unused(node, export_id, true)
            .await;
        ended.map(drop)
    };
    concluded.inspect_err(|error| warn!(%error, "cannot conclude the export of a replica"))
}

/// Waits until the nodes export the devices and this node has them. The error has the index of the
/// device.
async fn reached(
    engine: &Engine,
    running: &Running,
    volume: VolumeId,
    made: &[(ExportId, NodeId)],
) -> Result<(), (usize, RpcError)> {
    let end = tokio::time::Instant::now() + EXPORTED;
    let name = |node: NodeId| engine.cluster.name_of(node.0).unwrap_or_default();
    loop {
        let exports = running.operator.exports(Some(volume)).await;
        let exports = exports.or_refuse().map_err(|error| (0, error))?;
        let plane = engine.plane().map_err(|error| (0, error))?;
        let mut waits_for = None;
        for (at, (export_id, node)) in made.iter().enumerate() {
            let export = exports.iter().find(|(_, id, _)| id == export_id);
            let Some((_, _, export)) = export else {
                let cause = "the export was ended meanwhile";
                return Err((at, RpcError::errno(Errno::EAGAIN, cause)));
            };
            let device = format!("{}:{}", name(*node), export.device);
            if export.is == Is::Failed {
                let why = export.why.as_deref().unwrap_or("no reason");
                let cause = format!("{device} cannot be a replica: {why}");
                return Err((at, RpcError::errno(Errno::ENODEV, cause)));
            }
            let is_here = plane.bdevs.lookup(&export_id.0.to_string()).is_some();
            if export.is != Is::There {
                let cause = format!("{device} is not exported within {EXPORTED:?}");
                waits_for = waits_for.or(Some((at, cause)));
            } else if !is_here {
                let cause = format!("this node does not reach {device} within {EXPORTED:?}");
                waits_for = waits_for.or(Some((at, cause)));
            }
        }
        let Some((at, cause)) = waits_for else {
            return Ok(());
        };
        if tokio::time::Instant::now() >= end {
            let refused = RpcError::errno(Errno::ETIMEDOUT, cause)
                .remedy("see whether the node runs and is reached: cluster_get_nodes");
            return Err((at, refused));
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Runs `work` with the name of a new replica's device, `NODE:DEVICE` in the parameter `field`.
pub async fn change_replicas<T, Work>(
    engine: &Rc<Engine>,
    volume: Uuid,
    device: &str,
    field: &str,
    work: impl FnOnce(String) -> Work,
) -> Result<T, RpcError>
where
    Work: Future<Output = Result<T, RpcError>>,
{
    let running = engine.cluster.joined()?;
    let replica = NewReplica::parse(device).map_err(|error| error.field(field))?;
    let of_one = async |mut names: Vec<String>| work(names.remove(0)).await;
    let replicas = [replica];
    let field = |_| field.to_owned();
    with_exports(engine, &running, VolumeId(volume), &replicas, field, of_one).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_their_nodes() {
        let found = NewReplica::parse("a:b:c").unwrap();
        assert_eq!((&*found.node, &*found.device), ("a", "b:c"));
        for text in ["", "disk", ":disk", "a:"] {
            let refused = NewReplica::parse(text).unwrap_err().to_string();
            assert!(refused.contains("NODE:DEVICE"), "{refused}");
        }
    }
}
