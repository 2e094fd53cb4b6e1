//! The key `op/V` in etcd: an operator asks the holder of volume V to hand it over. The holder
//! deletes the key after the handover, or writes the reason why it cannot.

use std::time::Duration;

use nacre_cluster_core::volume::HoldingState;
use nacre_cluster_core::{BootTime, NodeId, VolumeId};
use nacre_cluster_etcd::{Client, Copies, KeyValue, Prefix, Txn};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::error::Error;
use crate::keys::{FORMAT, bytes, decode};
use crate::nodes::Nodes;
use crate::volumes::Volumes;

const AGAIN: Duration = Duration::from_millis(400);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OperationKey {
    v: u64,
    kind: OperationKind,
    to: Uuid,
    /// The reason why the holder cannot hand over; `None`: it has not tried yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) why: Option<String>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum OperationKind {
    Move,
}

impl OperationKey {
    pub(crate) fn handover(to: NodeId) -> Self {
        Self {
            v: FORMAT,
            kind: OperationKind::Move,
            to: to.0,
            why: None,
            rest: Map::new(),
        }
    }

    pub(crate) fn decode(kv: &KeyValue) -> Result<Self, Error> {
        decode(kv)
    }
}

/// An operation, and this node's progress with it.
pub(crate) struct Progress {
    operation: OperationKey,
    revision: i64,
    step: OperationStep,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum OperationStep {
    Asked,
    Leaving,
    Finished,
}

/// The end of an operation.
pub(crate) struct Finish {
    revision: i64,
    /// `None`: done, the key is deleted.
    failed: Option<OperationKey>,
}

impl Progress {
    pub(crate) fn new(operation: OperationKey, revision: i64) -> Self {
        let step = match operation.why {
            None => OperationStep::Asked,
            Some(_) => OperationStep::Finished,
        };
        Self {
            operation,
            revision,
            step,
        }
    }

    fn done(&mut self) -> Option<Finish> {
        self.step = OperationStep::Finished;
        let revision = self.revision;
        Some(Finish {
            revision,
            failed: None,
        })
    }

    fn failed(&mut self, why: &str) -> Option<Finish> {
        self.step = OperationStep::Finished;
        let mut failed = self.operation.clone();
        failed.why = Some(why.to_owned());
        Some(Finish {
            revision: self.revision,
            failed: Some(failed),
        })
    }
}

/// Advances the operation of `id`, if this node is the holder.
pub(crate) fn step(
    me: NodeId,
    id: VolumeId,
    progress: &mut Progress,
    volumes: &mut Volumes,
    nodes: &Nodes,
    now: BootTime,
) -> Option<Finish> {
    let to = NodeId(progress.operation.to);
    match (progress.step, volumes.state(id)) {
        (OperationStep::Asked, Some(HoldingState::Holding)) if to == me => {
            volumes.keep(id, now);
            progress.done()
        }
        (OperationStep::Asked, Some(HoldingState::Holding)) => {
            if !nodes.standing.contains_key(&to) {
                return progress.failed("the node has no lease");
            }
            if !volumes.is_shown_by(id, to) {
                return progress.failed("the node does not show the volume");
            }
            if volumes.handover(id, to, now) {
                progress.step = OperationStep::Leaving;
            }
            None
        }
        (OperationStep::Leaving, Some(HoldingState::Holding)) => {
            progress.failed("commands in flight did not end within 5 s")
        }
        (OperationStep::Leaving, Some(HoldingState::Standby)) if volumes.holder(id) != Some(me) => {
            progress.done()
        }
        _ => None,
    }
}

/// Writes the end of the operation, unless the key has changed since.
pub(crate) async fn finish(client: &Client, prefix: &Prefix, id: VolumeId, finish: Finish) {
    let key = prefix.operation(id);
    loop {
        let txn = Txn::default().if_modified(&key, finish.revision);
        let txn = match &finish.failed {
            None => txn.delete(&key),
            Some(operation) => txn.put(&key, bytes(operation)),
        };
        match client.transact(txn, Copies::Several).await {
            Err(error) if error.is_passing() => tokio::time::sleep(AGAIN).await,
            _ => return,
        }
    }
}
