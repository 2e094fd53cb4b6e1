//! The time that an in-sync member may lack its gate. Writes wait for the member meanwhile, and it
//! owes no answer, so no other deadline puts it out.

use std::collections::BTreeMap;
use std::time::Duration;

use arrayvec::ArrayVec;
use nacre_cluster_core::ids::MAX_MEMBERS;
use nacre_cluster_core::{BootTime, Incarnation, MemberId, NodeId, Record};

/// The wait for a member whose node lives.
const PATIENCE: Duration = Duration::from_secs(2);
/// The same, when its node has no lease.
const WITHOUT_LEASE: Duration = Duration::from_millis(500);

/// The in-sync members without a granted gate, with the time of the first look at each.
#[derive(Debug, Default)]
pub(crate) struct Ungated(ArrayVec<(MemberId, BootTime), MAX_MEMBERS>);

impl Ungated {
    /// The members to put out, where `standing` are the nodes that have a lease. None while no
    /// member has a gate: then the data is on those alone.
    pub(crate) fn late(
        &mut self,
        record: &Record,
        granted: &[MemberId],
        now: BootTime,
        standing: &BTreeMap<NodeId, Incarnation>,
    ) -> ArrayVec<MemberId, MAX_MEMBERS> {
        let lacks = |id: MemberId| record.is_in_sync(id) && !granted.contains(&id);
        self.0.retain(|(id, _)| lacks(*id));
        if !record.in_sync().any(|member| granted.contains(&member.id)) {
            return ArrayVec::new();
        }
        let mut late = ArrayVec::new();
        for member in record.in_sync().filter(|member| lacks(member.id)) {
            let known = self.0.iter().find(|(id, _)| *id == member.id);
            let Some((_, since)) = known else {
                self.0.push((member.id, now));
                continue;
            };
            let patience = if standing.contains_key(&member.node) {
                PATIENCE
            } else {
                WITHOUT_LEASE
            };
            if now.since(*since) >= patience {
                late.push(member.id);
            }
        }
        late
    }
}
