//! The fields of a volume's record that the cluster adds: `holder` and `incarnation` name the
//! holder, `closed` says that the holder has closed the volume. This module writes them for changes
//! that the control of an open volume (`bdev/replica`) makes. The take before them, and the release
//! after them, are changes by the state machine of `nacre-cluster-core`.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use nacre_bdev_replica::model::VolumeRecord;
use nacre_bdev_replica::store::StoreError;
use nacre_cluster_core::NodeId;
use serde_json::{Value, json};
use uuid::Uuid;

/// The name of a field: true while the holder has closed the volume, and has not released it.
pub(crate) const CLOSED: &str = "closed";

/// A node of a cluster, with its lease.
pub(crate) struct Lessee {
    pub(crate) node: NodeId,
    /// The revision at which its lease key was created; 0: it has no lease.
    pub(crate) incarnation: Arc<AtomicI64>,
}

/// The holder in a record, with its incarnation; 0: unknown. `None`: there is no holder.
pub(crate) fn holder(value: &Value) -> Option<(NodeId, i64)> {
    let node = value["holder"].as_str()?.parse::<Uuid>().ok()?;
    Some((NodeId(node), value["incarnation"].as_i64().unwrap_or(0)))
}

impl Lessee {
    /// The node's incarnation. Fails if it has no lease.
    pub(crate) fn incarnation(&self) -> Result<i64, StoreError> {
        match self.incarnation.load(Ordering::SeqCst) {
            0 => Err(StoreError::Unavailable {
                why: "this node has no lease in the cluster".to_owned(),
            }),
            incarnation => Ok(incarnation),
        }
    }

    /// The error for a change by an incarnation of this node that has ended.
    pub(crate) fn is_fenced(&self, incarnation: i64) -> StoreError {
        let node = self.node.0;
        StoreError::Fenced {
            why: format!("incarnation {incarnation} of node {node} is over"),
        }
    }

    /// Adds the holder's fields to the `value` of a changed `record`.
    pub(crate) fn complete(
        &self,
        record: &VolumeRecord,
        stored: Option<&Value>,
        value: &mut Value,
    ) {
        let current = self.incarnation.load(Ordering::SeqCst);
        let held = stored.and_then(holder);
        let own = (self.node, current);
        let (holder, is_closed) = match record.holder.map(NodeId) {
            Some(node) if node == self.node => (Some(own), false),
            Some(node) => (
                held.filter(|held| held.0 == node).or(Some((node, 0))),
                false,
            ),
            None if held == Some(own) => (held, true),
            None => (None, false),
        };
        value["holder"] = json!(holder.map(|(node, _)| node.0));
        value["incarnation"] = json!(holder.map(|(_, incarnation)| incarnation));
        if let Some(fields) = value.as_object_mut() {
            fields.remove(CLOSED);
            if is_closed {
                fields.insert(CLOSED.to_owned(), true.into());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use nacre_bdev_replica::store::suite;

    use super::*;

    const ME: NodeId = NodeId(Uuid::from_u128(1));
    const OTHER: NodeId = NodeId(Uuid::from_u128(2));

    /// The value of a change to `by`, of a record with this holder.
    fn change(by: Option<NodeId>, held: Value) -> Value {
        let lessee = Lessee {
            node: ME,
            incarnation: Arc::new(AtomicI64::new(50)),
        };
        let mut record = suite::record("ant");
        record.holder = by.map(|node| node.0);
        let mut value = held.clone();
        lessee.complete(&record, Some(&held), &mut value);
        value
    }

    fn held(node: NodeId, incarnation: i64) -> Value {
        json!({ "holder": node.0, "incarnation": incarnation, "next": 7 })
    }

    #[test]
    fn a_change_keeps_the_holder_until_its_release() {
        let own = held(ME, 50);
        assert_eq!(change(Some(ME), own.clone()), own);
        let closed = change(None, own.clone());
        assert_eq!(
            (&closed["holder"], &closed[CLOSED]),
            (&own["holder"], &json!(true))
        );
        assert_eq!(
            change(None, closed.clone()),
            closed,
            "a change of the closed volume"
        );
        assert_eq!(change(Some(ME), closed), own, "opened again");
    }

    #[test]
    fn a_volume_of_no_present_holder() {
        for former in [held(ME, 40), held(OTHER, 9)] {
            let changed = change(None, former.clone());
            assert_eq!(
                (&changed["holder"], &changed["next"]),
                (&Value::Null, &json!(7))
            );
            assert_eq!(changed.get(CLOSED), None);
            assert_eq!(change(Some(ME), former), held(ME, 50));
        }
        assert_eq!(change(Some(OTHER), held(OTHER, 9)), held(OTHER, 9));
        assert_eq!(change(Some(OTHER), held(ME, 50)), held(OTHER, 0));
    }
}
