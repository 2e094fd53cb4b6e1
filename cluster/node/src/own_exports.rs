//! The exports (keys `member/N/R`) of this node in etcd: which ones exist, and whether one was
//! deleted.
//!
//! The absence of a key means a deletion only if etcd has the contents in which the node saw the
//! key. After a restore, keys of devices that are in use may be absent.

use std::collections::BTreeSet;

use nacre_cluster_core::{ExportId, Incarnation, NodeId};
use nacre_cluster_etcd::Txn;
use uuid::Uuid;

use crate::error::Error;
use crate::keys::{Cluster, decode};
use crate::operator::Operator;
use crate::seen_keys::StoreView;

/// The exports of this process's node.
#[derive(Debug, Clone, Copy)]
pub struct OwnExports<'a> {
    pub operator: &'a Operator,
    pub node: NodeId,
}

impl OwnExports<'_> {
    /// The ids of the exports, with the etcd that has them. `None`: the list has not arrived, or
    /// this process is no node.
    pub fn seen(&self) -> Option<(StoreView, BTreeSet<Uuid>)> {
        self.operator.seen_keys()?.exports()
    }

    /// True if the export was deleted: the etcd of `view` still has the cluster and the lease of
    /// this incarnation, and no such key. One transaction compares all three.
    pub async fn is_gone(
        &self,
        incarnation: Incarnation,
        export_id: ExportId,
        view: StoreView,
    ) -> Result<bool, Error> {
        let prefix = &self.operator.prefix;
        let meta = prefix.meta();
        let Some(kv) = self.operator.get(&meta).await? else {
            return Ok(false);
        };
        let cluster: Cluster = decode(&kv)?;
        if cluster.store() != view.store {
            return Ok(false);
        }
        let key = prefix.export(self.node, export_id);
        let txn = Txn::default()
            .if_modified(&meta, kv.mod_revision)
            .if_created(&prefix.lease(self.node), incarnation.0 as i64)
            .if_created(&key, 0);
        Ok(self.operator.transact(&key, txn).await?.is_made)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use nacre_cluster_etcd::Copies;

    use super::*;
    use crate::keys::bytes;
    use crate::testing::on_etcd;

    /// Goal: an export counts as gone only in the etcd that had it, and only for a node with a
    /// lease there. Method: the key is deleted, and each of the other facts is another one.
    #[test]
    fn an_export_is_gone_in_its_own_etcd_only() {
        on_etcd(
            "an_export_is_gone_in_its_own_etcd_only",
            async |client, prefix| {
                let (node, export_id) = (NodeId(Uuid::from_u128(1)), ExportId(Uuid::from_u128(2)));
                let change = async |txn: Txn| {
                    let answer = client.transact(txn, Copies::Several).await;
                    answer.expect("an answer").revision
                };
                let mut cluster = Cluster::new("lab", Duration::from_secs(2)).expect("a lease");
                cluster.init(&client, &prefix).await.expect("created");
                let (key, lease) = (prefix.export(node, export_id), prefix.lease(node));
                let incarnation = change(Txn::default().put(&lease, b"{}".to_vec())).await;
                change(Txn::default().put(&key, b"{}".to_vec())).await;

                let operator = Operator::new(Arc::clone(&client), prefix.clone());
                let own = OwnExports {
                    operator: &operator,
                    node,
                };
                let view = StoreView {
                    store: cluster.store(),
                    changes: 0,
                };
                let is_gone = async |incarnation: i64, view: StoreView| {
                    let incarnation = Incarnation(incarnation as u64);
                    let answer = own.is_gone(incarnation, export_id, view).await;
                    answer.expect("an answer")
                };
                assert!(!is_gone(incarnation, view).await, "it is there");
                change(Txn::default().delete(&key)).await;
                assert!(is_gone(incarnation, view).await);
                assert!(!is_gone(incarnation - 1, view).await, "an earlier lease");
                let store = Uuid::from_u128(9);
                let other = StoreView { store, ..view };
                assert!(!is_gone(incarnation, other).await, "another etcd");
                cluster.restored = Some(store);
                let restored = bytes(&cluster);
                change(Txn::default().put(&prefix.meta(), restored)).await;
                assert!(!is_gone(incarnation, view).await, "a restored etcd");
                assert!(is_gone(incarnation, other).await);
                change(Txn::default().delete(&lease)).await;
                assert!(!is_gone(incarnation, other).await, "no lease");
                change(Txn::default().delete(&prefix.meta())).await;
                assert!(!is_gone(incarnation, other).await, "no cluster");
            },
        );
    }
}
