//! The volume store of a node in a cluster: etcd, plus the node of each replica in every record.
//!
//! The control of a volume knows only devices. So each record that is written is completed with the
//! node that exports a replica's device, and with the device's name there.

use std::sync::Arc;

use nacre_bdev_replica::model::{Stamp, VolumeRecord};
use nacre_bdev_replica::store::{StoreFuture, VolumeStore};
use nacre_cluster_core::VolumeId;
use uuid::Uuid;

use super::inbox::Inbox;

pub(super) struct NodesOfReplicas {
    inner: Arc<dyn VolumeStore>,
    inbox: Arc<Inbox>,
}

impl NodesOfReplicas {
    pub(super) fn new(inner: Arc<dyn VolumeStore>, inbox: Arc<Inbox>) -> Self {
        Self { inner, inbox }
    }

    fn complete(&self, mut record: VolumeRecord) -> VolumeRecord {
        let volume = VolumeId(record.id);
        for replica in record.replicas.iter_mut().filter(|one| one.node.is_none()) {
            if let Some(exported) = self.inbox.exported(volume, &replica.device) {
                replica.node = Some(exported.node.0);
                replica.node_device = exported.node_device;
            }
        }
        record
    }
}

impl VolumeStore for NodesOfReplicas {
    fn list(&self) -> StoreFuture<Vec<VolumeRecord>> {
        self.inner.list()
    }

    fn load(&self, id: Uuid) -> StoreFuture<VolumeRecord> {
        self.inner.load(id)
    }

    fn create(&self, record: VolumeRecord) -> StoreFuture<()> {
        self.inner.create(self.complete(record))
    }

    fn swap(&self, expected: Stamp, next: VolumeRecord) -> StoreFuture<()> {
        self.inner.swap(expected, self.complete(next))
    }

    fn delete(&self, id: Uuid, expected: Stamp) -> StoreFuture<()> {
        self.inner.delete(id, expected)
    }

    /// False: in a cluster the node's lease and the fences exclude other writers.
    fn is_shared(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use nacre_bdev_replica::model::ReplicaState;
    use nacre_bdev_replica::store::MemoryStore;
    use nacre_cluster_core::NodeId;
    use serde_json::json;

    use super::super::inbox::Exported;
    use super::*;

    /// Goal: the record names the node of each replica, and a later change keeps it, also one by a
    /// control that does not know the node.
    #[tokio::test]
    async fn records_name_the_nodes() {
        let id = Uuid::from_u128(1);
        let replica = |device: &str, slot: u8| {
            json!({
                "id": Uuid::from_u128(10 + u128::from(slot)), "slot": slot, "device": device,
                "state": ReplicaState::InSync,
            })
        };
        let record: VolumeRecord = serde_json::from_value(json!({
            "id": id, "name": "v", "block_size": 512, "blocks": 8, "region_shift": 20, "epoch": 1,
            "serving": 1, "revision": 1, "holder": null,
            "members": [replica("a", 0), replica("b", 1)],
        }))
        .unwrap();
        let inbox = Arc::new(Inbox::default());
        let store = NodesOfReplicas::new(Arc::new(MemoryStore::alone()), Arc::clone(&inbox));
        let exported = Exported {
            device: "a".to_owned(),
            node: NodeId(Uuid::from_u128(7)),
            node_device: Some("disk".to_owned()),
        };
        inbox.note(exported.clone());
        store.create(record.clone()).await.unwrap();
        let stored = store.load(id).await.unwrap();
        let found = &stored.replicas[0];
        assert_eq!(found.node, Some(exported.node.0));
        assert_eq!(found.node_device.as_deref(), Some("disk"));
        assert_eq!(stored.replicas[1].node, None);
        // The record has arrived here. The control still has the record without the node.
        inbox.set_devices(VolumeId(id), vec![exported.clone()]);
        let mut next = record.clone();
        next.revision = 2;
        store.swap(record.version(), next).await.unwrap();
        let stored = store.load(id).await.unwrap();
        assert_eq!(stored.replicas[0].node, Some(exported.node.0));
    }
}
