//! The volume store of a node: etcd, with the node of each replica in the records.
//!
//! The control of a volume knows devices only. The node that exports a device is added when the
//! record is written.

use std::collections::BTreeMap;
use std::sync::Arc;

use nacre_bdev_replica::model::{Stamp, VolumeRecord};
use nacre_bdev_replica::store::{StoreFuture, VolumeStore};
use nacre_cluster_core::NodeId;
use parking_lot::Mutex;
use uuid::Uuid;

pub(super) struct NodesOfReplicas {
    inner: Arc<dyn VolumeStore>,
    /// The node of each exported device, by the device's name, until a record has it.
    nodes: Mutex<BTreeMap<String, NodeId>>,
}

impl NodesOfReplicas {
    pub(super) fn new(inner: Arc<dyn VolumeStore>) -> Self {
        Self {
            inner,
            nodes: Mutex::default(),
        }
    }

    /// Notes that `node` exports `device`, before a record names the device.
    pub(super) fn note(&self, device: String, node: NodeId) {
        self.nodes.lock().insert(device, node);
    }

    pub(super) fn forget(&self, device: &str) {
        self.nodes.lock().remove(device);
    }

    fn complete(&self, mut record: VolumeRecord) -> VolumeRecord {
        let nodes = self.nodes.lock();
        for replica in record.replicas.iter_mut().filter(|one| one.node.is_none()) {
            replica.node = nodes.get(&replica.device).map(|node| node.0);
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

    /// The node's lease and the fences take its place.
    fn is_shared(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use nacre_bdev_replica::model::ReplicaState;
    use nacre_bdev_replica::store::MemoryStore;
    use serde_json::json;

    use super::*;

    /// Goal: the record names the node of each replica, and a later change keeps it.
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
        let store = NodesOfReplicas::new(Arc::new(MemoryStore::alone()));
        let node = NodeId(Uuid::from_u128(7));
        store.note("a".to_owned(), node);
        store.create(record.clone()).await.unwrap();
        let stored = store.load(id).await.unwrap();
        assert_eq!(stored.replicas[0].node, Some(node.0));
        assert_eq!(stored.replicas[1].node, None);
        store.forget("a");
        let mut next = stored;
        next.revision = 2;
        store.swap(record.version(), next).await.unwrap();
        let stored = store.load(id).await.unwrap();
        assert_eq!(stored.replicas[0].node, Some(node.0));
    }
}
