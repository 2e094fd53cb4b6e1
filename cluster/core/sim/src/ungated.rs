//! The time that an in-sync replica may lack its gate. Writes wait for the replica meanwhile, and
//! it owes no answer, so no other deadline puts it out.

use std::collections::BTreeMap;
use std::time::Duration;

use arrayvec::ArrayVec;
use nacre_cluster_core::ids::MAX_REPLICAS;
use nacre_cluster_core::{BootTime, Incarnation, NodeId, Record, ReplicaId};

/// The wait for a replica whose node lives.
const PATIENCE: Duration = Duration::from_secs(2);
/// The same, when its node has no lease.
const WITHOUT_LEASE: Duration = Duration::from_millis(500);

/// The in-sync replicas without a granted gate, with the time of the first look at each.
#[derive(Debug, Default)]
pub(crate) struct Ungated(ArrayVec<(ReplicaId, BootTime), MAX_REPLICAS>);

impl Ungated {
    /// The replicas to put out, where `standing` are the nodes that have a lease. None while no
    /// replica has a gate: then the data is on those alone.
    pub(crate) fn late(
        &mut self,
        record: &Record,
        granted: &[ReplicaId],
        now: BootTime,
        standing: &BTreeMap<NodeId, Incarnation>,
    ) -> ArrayVec<ReplicaId, MAX_REPLICAS> {
        let lacks = |id: ReplicaId| record.is_in_sync(id) && !granted.contains(&id);
        self.0.retain(|(id, _)| lacks(*id));
        if !record
            .in_sync()
            .any(|replica| granted.contains(&replica.id))
        {
            return ArrayVec::new();
        }
        let mut late = ArrayVec::new();
        for replica in record.in_sync().filter(|replica| lacks(replica.id)) {
            let known = self.0.iter().find(|(id, _)| *id == replica.id);
            let Some((_, since)) = known else {
                self.0.push((replica.id, now));
                continue;
            };
            let patience = if standing.contains_key(&replica.node) {
                PATIENCE
            } else {
                WITHOUT_LEASE
            };
            if now.since(*since) >= patience {
                late.push(replica.id);
            }
        }
        late
    }
}
