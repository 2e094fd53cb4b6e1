//! Decides when a lost or evicted replica of a volume is replaced by a new one on another pool (its
//! *successor*), and when an unfinished successor is removed. Pure; the volume's holder calls it.
//! At most one replica of a volume is replaced at a time.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::ids::{MAX_REPLICAS, NodeId, PoolId, ReplicaId};
use crate::time::BootTime;

/// How long placements avoid a pool after its first failure. The time doubles with each one.
const FIRST: Duration = Duration::from_secs(60);
/// The longest time for which placements avoid a pool.
const LONGEST: Duration = Duration::from_secs(3600);

/// A replica of a volume that this node serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServedReplica {
    pub id: ReplicaId,
    pub node: NodeId,
    /// True if the cluster chose its pool. A replica on a device that an operator named is not
    /// replaced.
    pub is_placed: bool,
    pub is_in_sync: bool,
    /// The volume uses the device: the replica is in sync, or under resync.
    pub is_attached: bool,
    /// An operator took it out of service.
    pub is_offline: bool,
    /// Its node is evicted: replicas move away from it.
    pub is_evicted: bool,
    /// Its node is drained for maintenance and will return: the replica never counts as lost.
    pub is_drained: bool,
    /// The replica whose successor this one is.
    pub replaces: Option<ReplicaId>,
    /// It is the successor of a lost replica, not of an evicted one.
    pub is_repair: bool,
}

/// A decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepairAct {
    /// Create a successor of this replica on another pool.
    Replace { replica: ReplicaId, cause: Cause },
    /// Remove a successor that is not in sync.
    Drop { replica: ReplicaId, why: Why },
}

/// The reason for a successor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Node or device of the replica were away for too long.
    Lost,
    Evicted,
}

/// The reason to remove a successor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// The replica that it should replace is in sync again.
    Returned,
    /// The successor itself is lost.
    Lost,
}

/// The time since which each replica of one volume has been neither in sync nor under resync.
#[derive(Debug, Default)]
pub struct Absences {
    since: BTreeMap<ReplicaId, BootTime>,
}

impl Absences {
    /// Updates the absences, and returns the next decision. A replica that is absent for `after`
    /// counts as lost, unless it is offline or drained; with `None`, none ever does. Evicted
    /// replicas are replaced without a wait. A volume with [`MAX_REPLICAS`] replicas, or with none
    /// in sync, gets no successor.
    pub fn decide(
        &mut self,
        now: BootTime,
        after: Option<Duration>,
        replicas: &[ServedReplica],
    ) -> Option<RepairAct> {
        let is_out = |one: &ServedReplica| !one.is_in_sync && !one.is_attached;
        self.since
            .retain(|id, _| replicas.iter().any(|one| one.id == *id && is_out(one)));
        for one in replicas.iter().filter(|one| is_out(one)) {
            self.since.entry(one.id).or_insert(now);
        }
        let is_lost = |one: &ServedReplica| {
            let waited = self.since.get(&one.id).map(|at| now.since(*at));
            let is_over = waited.is_some_and(|waited| after.is_some_and(|after| waited >= after));
            is_over && !one.is_offline && !one.is_drained
        };
        if let Some(new) = replicas.iter().find(|one| one.replaces.is_some()) {
            if new.is_in_sync || !new.is_placed {
                return None;
            }
            let replica = new.id;
            let old = replicas.iter().find(|one| Some(one.id) == new.replaces);
            let is_back = old.is_some_and(|old| old.is_in_sync && !old.is_evicted);
            if new.is_repair && is_back {
                let why = Why::Returned;
                return Some(RepairAct::Drop { replica, why });
            }
            let why = Why::Lost;
            return is_lost(new).then_some(RepairAct::Drop { replica, why });
        }
        if replicas.len() >= MAX_REPLICAS || !replicas.iter().any(|one| one.is_in_sync) {
            return None;
        }
        let mut placed = replicas.iter().filter(|one| one.is_placed);
        let lost = placed.clone().find(|one| is_lost(one));
        let act = |one: &ServedReplica, cause| RepairAct::Replace {
            replica: one.id,
            cause,
        };
        // An operator wants an eviction, whether the node is there or not.
        let lost = lost.map(|one| {
            let cause = if one.is_evicted {
                Cause::Evicted
            } else {
                Cause::Lost
            };
            act(one, cause)
        });
        lost.or_else(|| {
            let evicted = placed.find(|one| one.is_evicted);
            evicted.map(|one| act(one, Cause::Evicted))
        })
    }
}

/// Pools on which a new replica failed before it was in sync: a placement avoids them for a time.
#[derive(Debug, Default)]
pub struct FailedPools {
    pools: BTreeMap<PoolId, (u32, BootTime)>,
}

impl FailedPools {
    /// Notes a failure: placements avoid the pool for 1, 2, 4 … 60 minutes.
    pub fn failed(&mut self, pool: PoolId, now: BootTime) {
        let (failures, until) = self.pools.entry(pool).or_insert((0, now));
        let wait = FIRST.saturating_mul(1 << (*failures).min(10)).min(LONGEST);
        *failures += 1;
        *until = now + wait;
    }

    /// Notes a success: the pool counts as never failed.
    pub fn succeeded(&mut self, pool: PoolId) {
        self.pools.remove(&pool);
    }

    /// True while placements avoid the pool.
    pub fn is_left_out(&self, pool: PoolId, now: BootTime) -> bool {
        let known = self.pools.get(&pool);
        known.is_some_and(|(_, until)| now < *until)
    }

    /// Forgets pools that no longer exist.
    pub fn retain(&mut self, exists: impl Fn(PoolId) -> bool) {
        self.pools.retain(|pool, _| exists(*pool));
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    const AFTER: Option<Duration> = Some(Duration::from_secs(600));

    fn at(seconds: u64) -> BootTime {
        BootTime(seconds * 1_000_000_000)
    }

    fn id(id: u128) -> ReplicaId {
        ReplicaId(Uuid::from_u128(id))
    }

    fn three() -> [ServedReplica; 3] {
        [1, 2, 3].map(|number| ServedReplica {
            id: id(number),
            node: NodeId(Uuid::from_u128(number)),
            is_placed: true,
            is_in_sync: true,
            is_attached: true,
            is_offline: false,
            is_evicted: false,
            is_drained: false,
            replaces: None,
            is_repair: false,
        })
    }

    fn lose(one: &mut ServedReplica) {
        one.is_in_sync = false;
        one.is_attached = false;
    }

    fn lost(number: u128) -> Option<RepairAct> {
        Some(RepairAct::Replace {
            replica: id(number),
            cause: Cause::Lost,
        })
    }

    #[test]
    fn a_replica_is_replaced_after_a_while() {
        let (mut absences, mut all) = (Absences::default(), three());
        assert_eq!(absences.decide(at(0), AFTER, &all), None);
        lose(&mut all[1]);
        assert_eq!(absences.decide(at(1), AFTER, &all), None);
        assert_eq!(absences.decide(at(600), AFTER, &all), None);
        assert_eq!(absences.decide(at(601), AFTER, &all), lost(2));
        // Each of these keeps it.
        type Change = fn(&mut ServedReplica);
        let exceptions: [(&str, Change); 4] = [
            ("offline", |one| one.is_offline = true),
            ("drained", |one| one.is_drained = true),
            ("named by an operator", |one| one.is_placed = false),
            ("being filled", |one| one.is_attached = true),
        ];
        for (what, change) in exceptions {
            let mut absences = Absences::default();
            let mut other = all;
            change(&mut other[1]);
            assert_eq!(absences.decide(at(1), AFTER, &other), None);
            assert_eq!(absences.decide(at(9000), AFTER, &other), None, "{what}");
        }
        assert_eq!(absences.decide(at(9000), None, &all), None, "off");
        // A moment in use starts the time again.
        all[1].is_attached = true;
        assert_eq!(absences.decide(at(9001), AFTER, &all), None);
        all[1].is_attached = false;
        assert_eq!(absences.decide(at(9002), AFTER, &all), None);
    }

    #[test]
    fn nothing_is_replaced_without_a_source_or_a_slot() {
        let (mut absences, mut all) = (Absences::default(), three());
        all.iter_mut().for_each(lose);
        absences.decide(at(0), AFTER, &all);
        assert_eq!(absences.decide(at(601), AFTER, &all), None);
        let mut five = [three().as_slice(), &three()[..2]].concat();
        (five[3].id, five[4].id) = (id(4), id(5));
        five[0].is_evicted = true;
        assert_eq!(Absences::default().decide(at(0), AFTER, &five), None);
    }

    #[test]
    fn an_evicted_node_is_left_one_replica_at_a_time() {
        let (mut absences, mut all) = (Absences::default(), three());
        all[2].is_evicted = true;
        let evicted = Some(RepairAct::Replace {
            replica: id(3),
            cause: Cause::Evicted,
        });
        assert_eq!(absences.decide(at(0), AFTER, &all), evicted);
        // Also if nothing lost is replaced, or the node is lost as well.
        assert_eq!(absences.decide(at(0), None, &all), evicted);
        let mut away = all;
        lose(&mut away[2]);
        let mut other = Absences::default();
        other.decide(at(0), AFTER, &away);
        assert_eq!(other.decide(at(700), AFTER, &away), evicted);
        let mut successor = all[0];
        successor.id = id(4);
        successor.is_in_sync = false;
        successor.replaces = Some(id(3));
        all[1].is_evicted = true;
        let running = [all.as_slice(), &[successor]].concat();
        assert_eq!(absences.decide(at(1), AFTER, &running), None);
    }

    #[test]
    fn the_first_of_both_that_is_in_sync_stays() {
        let (mut absences, mut all) = (Absences::default(), three());
        lose(&mut all[1]);
        let mut new = all[0];
        new.id = id(4);
        new.is_in_sync = false;
        new.replaces = Some(id(2));
        new.is_repair = true;
        let with = |old: ServedReplica, new: ServedReplica| [all[0], old, all[2], new];
        assert_eq!(absences.decide(at(0), AFTER, &with(all[1], new)), None);
        let back = three()[1];
        let dropped = |why| {
            let replica = id(4);
            Some(RepairAct::Drop { replica, why })
        };
        let returned = dropped(Why::Returned);
        assert_eq!(absences.decide(at(1), AFTER, &with(back, new)), returned);
        // An operator's move, and an eviction, go on.
        let moved = ServedReplica {
            is_repair: false,
            ..new
        };
        assert_eq!(absences.decide(at(1), AFTER, &with(back, moved)), None);
        let evicted = ServedReplica {
            is_evicted: true,
            ..back
        };
        assert_eq!(absences.decide(at(1), AFTER, &with(evicted, new)), None);
        let done = ServedReplica {
            is_in_sync: true,
            ..new
        };
        assert_eq!(absences.decide(at(1), AFTER, &with(back, done)), None);
        // A successor that is lost itself.
        let gone = ServedReplica {
            is_attached: false,
            ..new
        };
        assert_eq!(absences.decide(at(2), AFTER, &with(all[1], gone)), None);
        let found = absences.decide(at(602), AFTER, &with(all[1], gone));
        assert_eq!(found, dropped(Why::Lost));
    }

    #[test]
    fn a_pool_that_failed_is_left_out_for_longer_each_time() {
        let (mut failed, pool) = (FailedPools::default(), PoolId(Uuid::from_u128(1)));
        let mut now = at(0);
        for minutes in [1, 2, 4, 8, 16, 32, 60, 60] {
            failed.failed(pool, now);
            let wait = Duration::from_secs(minutes * 60);
            assert!(failed.is_left_out(pool, now + (wait - Duration::from_secs(1))));
            assert!(!failed.is_left_out(pool, now + wait), "{minutes}");
            now = now + wait;
        }
        failed.failed(pool, now);
        failed.succeeded(pool);
        assert!(!failed.is_left_out(pool, now));
        failed.failed(pool, now);
        let minute = now + Duration::from_secs(60);
        assert!(!failed.is_left_out(pool, minute), "from the start");
        failed.retain(|_| false);
        assert!(!failed.is_left_out(pool, now));
    }
}
