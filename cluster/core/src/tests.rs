//! Tests of single machines, with times and answers by hand. The simulator tests them together.

use std::collections::BTreeMap;

use arrayvec::ArrayVec;
use uuid::Uuid;

use crate::ids::{Incarnation, NodeId, ReplicaId, Revision, VolumeId};
use crate::observer::ObserverRole;
use crate::transaction::{Condition, Effect};
use crate::volume::{Ana, HoldingState, Intent, View};
use crate::*;

const VOLUME: VolumeId = VolumeId(Uuid::from_u128(1));

fn node(number: u128) -> NodeId {
    NodeId(Uuid::from_u128(10 + number))
}

fn replica(number: u128) -> ReplicaId {
    ReplicaId(Uuid::from_u128(20 + number))
}

fn holder(number: u128) -> Holder {
    Holder {
        node: node(number),
        incarnation: Incarnation(100 + number as u64),
    }
}

fn ms(millis: u64) -> BootTime {
    BootTime(millis * 1_000_000)
}

fn lease_of(number: u128) -> Lease {
    Lease::new(holder(number), Timing::default(), ms(0), ms(1))
}

/// Sends the renewal that is due, and returns its number.
fn renew(lease: &mut Lease, now: BootTime) -> u64 {
    match lease.poll(now).map(|renewal| renewal.effect) {
        Some(Effect::Renew { number, .. }) => number,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_lease_counts_from_the_start_of_its_renewal() {
    let mut lease = lease_of(0);
    assert_eq!(lease.poll(ms(399)), None);
    let first = renew(&mut lease, ms(400));
    let second = renew(&mut lease, ms(800));
    assert_eq!(lease.until(), ms(1900));
    lease.renewed(Incarnation(100), second, ms(1200));
    assert_eq!(lease.until(), ms(2700));
    // An earlier attempt's answer changes nothing any more.
    lease.renewed(Incarnation(100), first, ms(1600));
    assert_eq!(lease.until(), ms(2700));
    assert_eq!(lease.good_since(ms(2000)), Some(ms(1)));
    assert_eq!(lease.good_since(ms(2700)), None);
}

#[test]
fn a_renewal_revives_a_lease_that_ran_out() {
    let mut lease = lease_of(0);
    let number = renew(&mut lease, ms(1800));
    lease.renewed(Incarnation(100), number, ms(2500));
    assert_eq!(lease.good_since(ms(2600)), Some(ms(2500)), "with a gap");
    lease.end(Incarnation(99));
    assert!(lease.is_good(ms(2600)), "an earlier incarnation ended");
    lease.end(Incarnation(100));
    assert!(!lease.is_good(ms(2600)) && lease.poll(ms(9000)).is_none());
}

#[test]
fn a_late_answer_does_not_renew_a_later_incarnation() {
    let mut lease = lease_of(0);
    let number = renew(&mut lease, ms(1000));
    lease.renewed(Incarnation(99), number, ms(1100));
    assert_eq!(lease.until(), ms(1900), "the number is that of both");
}

#[test]
fn an_observer_waits_for_a_lease_of_the_node_and_of_its_own() {
    let mut own = lease_of(1);
    let mut observer = Observer::new(node(0), ObserverRole::Observer(1), Timing::default());
    observer.observe(Revision(7), ms(100));
    observer.observe(Revision(6), ms(900));
    assert_eq!(
        observer.due(ms(1000), &own),
        Some(ms(2200)),
        "from 100 ms, rank 1"
    );
    // The observer's own lease had a gap until 3 s.
    let number = renew(&mut own, ms(2900));
    own.renewed(Incarnation(101), number, ms(3000));
    for sent in [3700, 4500] {
        let number = renew(&mut own, ms(sent));
        own.renewed(Incarnation(101), number, ms(sent + 10));
    }
    assert_eq!(observer.poll(ms(5099), &own), None);
    let fence = observer.poll(ms(5100), &own).unwrap();
    let unchanged = Condition::LeaseUnchanged(node(0), Revision(7));
    assert!(fence.conditions.contains(&unchanged), "{fence:?}");
    let stands = Condition::Stands(holder(1).node, holder(1).incarnation);
    assert!(fence.conditions.contains(&stands), "{fence:?}");
}

/// Goal: a store that was away ends no lease. Method: two nodes renew in turn; the store is away
/// from each time of their turns on, for each time up to more than a lease. It loses the renewals
/// that are sent meanwhile, or makes them once it is back. No fence is sent: it would be the first
/// change that the store makes afterwards.
#[test]
fn a_store_that_was_away_ends_no_lease() {
    for phase in (0..400).step_by(40) {
        for from in (2000..2400).step_by(39) {
            for to in (from..from + 2600).step_by(50) {
                away(phase, from, to, false);
                away(phase, from, to, true);
            }
        }
    }
}

fn away(phase: u64, from: u64, to: u64, are_kept: bool) {
    let mut own = lease_of(0);
    let mut observer = Observer::new(node(1), ObserverRole::Observer(0), Timing::default());
    let mut revision = 1;
    let mut waiting = Vec::new();
    observer.observe(Revision(revision), ms(phase));
    for now in (0..6000).step_by(5) {
        let is_there = now < from || now >= to;
        if is_there {
            for number in waiting.drain(..) {
                own.renewed(Incarnation(100), number, ms(now));
            }
        }
        if let Some(Effect::Renew { number, .. }) = own.poll(ms(now)).map(|renewal| renewal.effect)
        {
            if is_there {
                own.renewed(Incarnation(100), number, ms(now + 1));
            } else if are_kept {
                waiting.push(number);
            }
        }
        if now % 400 == phase && is_there {
            revision += 1;
            observer.observe(Revision(revision), ms(now));
        }
        let fence = observer.poll(ms(now), &own);
        let is_kept = if are_kept { "kept" } else { "lost" };
        assert_eq!(
            fence, None,
            "phase {phase}, away {from} to {to}, renewals {is_kept}, at {now}"
        );
    }
}

/// A lease whose renewals were answered until `to`.
fn renewed_until(to: u64) -> Lease {
    let mut lease = lease_of(1);
    for now in (400..=to).step_by(400) {
        let number = renew(&mut lease, ms(now));
        lease.renewed(Incarnation(101), number, ms(now));
    }
    lease
}

#[test]
fn other_nodes_wait_for_two_leases_from_a_second_reading() {
    let own = renewed_until(9000);
    let mut observer = Observer::new(node(0), ObserverRole::Other, Timing::default());
    observer.observe(Revision(7), ms(1000));
    assert_eq!(observer.due(ms(9000), &own), None);
    observer.observe(Revision(7), ms(2000));
    assert_eq!(observer.due(ms(9000), &own), Some(ms(6000)));
    observer.observe(Revision(8), ms(3000));
    assert_eq!(observer.due(ms(9000), &own), None);
}

/// A dead node sends no renewal that its new observers could see.
#[test]
fn a_change_of_role_keeps_the_last_renewal() {
    let own = renewed_until(4000);
    let mut observer = Observer::new(node(0), ObserverRole::Observer(1), Timing::default());
    assert!(observer.must_read(), "it has seen nothing yet");
    observer.observe(Revision(7), ms(1000));
    assert!(!observer.must_read());
    observer.set_role(ObserverRole::Observer(0), ms(2000));
    assert_eq!(observer.due(ms(2000), &own), Some(ms(3000)));
    observer.set_role(ObserverRole::Other, ms(2100));
    assert!(observer.must_read());
    assert_eq!(observer.due(ms(2100), &own), Some(ms(5000)));
    // One that has read the renewal once counts from the change.
    let mut observer = Observer::new(node(0), ObserverRole::Other, Timing::default());
    observer.observe(Revision(7), ms(1000));
    observer.set_role(ObserverRole::Observer(0), ms(2000));
    assert_eq!(observer.due(ms(2000), &own), Some(ms(4000)));
    assert!(observer.must_read(), "it may have missed a later one");
    observer.observe(Revision(8), ms(2100));
    assert!(!observer.must_read());
    assert!(observer.poll(ms(4100), &own).is_some() && observer.must_read());
}

#[test]
fn all_nodes_agree_on_observers() {
    let mut live: Vec<NodeId> = (0..9).map(node).collect();
    let found = ranks::observers(node(4), &live);
    assert!(found.len() == 3 && !found.contains(&node(4)));
    live.reverse();
    assert_eq!(ranks::observers(node(4), &live), found);
    let third = found[2];
    live.retain(|n| *n != found[0]);
    assert_eq!(ranks::observers(node(4), &live)[1], third, "ranks move up");
}

/// A node with its view of the cluster.
struct Rig {
    lease: Lease,
    standing: BTreeMap<NodeId, Incarnation>,
    reached: Vec<ReplicaId>,
    cordoned: Vec<NodeId>,
    volume: Volume,
}

impl Rig {
    fn new(number: u128) -> Self {
        let of = |number| (holder(number).node, holder(number).incarnation);
        Self {
            lease: Lease::new(holder(number), Timing::default(), ms(60_000), ms(0)),
            standing: BTreeMap::from([of(0), of(1)]),
            reached: vec![replica(0), replica(1)],
            cordoned: Vec::new(),
            volume: Volume::new(VOLUME, node(number)),
        }
    }

    /// Node 1, which sees a volume without a holder.
    fn alone() -> Self {
        let mut rig = Self::new(1);
        rig.volume.update(Revision(1), record(None));
        rig
    }

    fn poll(&mut self, now: BootTime) -> Option<Intent> {
        let view = View {
            now,
            lease: &self.lease,
            standing: &self.standing,
            reached: &self.reached,
            candidates: &[node(0), node(1)],
            cordoned: &self.cordoned,
        };
        self.volume.poll(&view)
    }

    /// The number of the opening that starts.
    fn take(&mut self, now: BootTime) -> u64 {
        match self.poll(now) {
            Some(Intent::Take { number }) => number,
            other => panic!("{other:?}"),
        }
    }

    /// Claims the volume at revision 2, and opens it.
    fn hold(&mut self, now: BootTime) -> u64 {
        self.commit(now, 2);
        let number = self.take(now);
        self.volume.opened(number);
        assert_eq!(self.poll(now), None);
        assert_eq!(self.volume.state(), HoldingState::Holding);
        number
    }

    /// Starts a handover to node 0; returns the number of the close.
    fn leave(&mut self, now: BootTime) -> u64 {
        assert!(self.volume.handover(node(0), now));
        assert_eq!(self.volume.state(), HoldingState::Leaving);
        match self.poll(now) {
            Some(Intent::Close { number }) => number,
            other => panic!("{other:?}"),
        }
    }

    /// The next change of the record, with its number.
    fn change(&mut self, now: BootTime) -> (u64, Record) {
        match self.poll(now) {
            Some(Intent::Commit {
                number,
                transaction,
            }) => match transaction.effect {
                Effect::Commit { record, .. } => (number, *record),
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    }

    /// The next change of the record, as the store makes it.
    fn commit(&mut self, now: BootTime, at: u64) -> Record {
        let (number, record) = self.change(now);
        self.volume.committed(number, Revision(at));
        record
    }

    /// The record after a change by this node's control: a later epoch, and a replica is out.
    fn controlled(&self) -> Record {
        let mut record = self.volume.record().expect("seen").clone();
        record.epoch += 1;
        record.serving = record.epoch;
        record.set(replica(0), ReplicaState::Out);
        record
    }
}

fn record(of: Option<Holder>) -> Record {
    let in_sync = |number| Replica {
        id: replica(number),
        node: node(number),
        state: ReplicaState::InSync,
    };
    Record {
        epoch: 4,
        serving: 4,
        holder: of,
        next: None,
        replicas: ArrayVec::from_iter([in_sync(0), in_sync(1)]),
    }
}

#[test]
fn a_standby_takes_after_the_fence_and_holds_when_the_control_has_opened() {
    let mut rig = Rig::new(1);
    rig.volume.update(Revision(1), record(Some(holder(0))));
    assert_eq!(rig.poll(ms(9000)), None, "the holder stands");
    rig.standing.remove(&node(0));
    let Some(Intent::Commit {
        number,
        transaction,
    }) = rig.poll(ms(9100))
    else {
        panic!("no claim");
    };
    let ended = Condition::Ended(holder(0).node, holder(0).incarnation);
    assert!(transaction.conditions.contains(&ended), "{transaction:?}");
    assert_eq!(rig.volume.state(), HoldingState::Taking);
    assert_eq!(rig.volume.ana(ms(9100)), Ana::Inaccessible);
    rig.volume.committed(number, Revision(2));
    let claimed = rig.volume.record().expect("seen");
    assert_eq!((claimed.epoch, claimed.holder), (5, Some(holder(1))));
    let number = rig.take(ms(9110));
    assert_eq!(rig.poll(ms(9120)), None, "one request");
    assert_eq!(rig.volume.ana(ms(9130)), Ana::Change);
    assert_eq!(rig.volume.ana(ms(17_100)), Ana::Inaccessible, "in time");
    rig.volume.opened(number);
    assert_eq!(rig.volume.state(), HoldingState::Holding);
    assert_eq!(rig.volume.ana(ms(9140)), Ana::Optimized);
    assert_eq!(rig.poll(ms(9140)), None);
}

/// The pause after an attempt without a replica ends with the holder that it concerned.
#[test]
fn a_pause_ends_with_the_next_holder() {
    let mut rig = Rig::alone();
    rig.reached.clear();
    assert_eq!(rig.poll(ms(9000)), None, "no replica is reached");
    rig.volume.update(Revision(2), record(Some(holder(0))));
    assert_eq!(rig.poll(ms(9100)), None, "the holder stands");
    rig.standing.remove(&node(0));
    rig.reached = vec![replica(1)];
    rig.commit(ms(9200), 3);
}

/// Goal: a volume that no node can take is reported after a second without a holder, and each
/// second after that, until a replica is reached. Method: a node that reaches none.
#[test]
fn a_volume_without_a_candidate_is_reported() {
    let mut rig = Rig::alone();
    rig.reached.clear();
    for (at, intent) in [
        (9000, None),
        (9999, None),
        (10_000, Some(Intent::NoHolder)),
        (10_999, None),
        (11_000, Some(Intent::NoHolder)),
    ] {
        assert_eq!(rig.poll(ms(at)), intent, "{at}");
    }
    rig.reached = vec![replica(1)];
    assert_eq!(rig.poll(ms(11_999)), None, "a pause");
    rig.commit(ms(12_000), 2);
    // The time without a holder starts anew.
    let mut rig = Rig::alone();
    rig.reached.clear();
    assert_eq!(rig.poll(ms(9000)), None);
    rig.volume.update(Revision(2), record(Some(holder(0))));
    assert_eq!(rig.poll(ms(10_000)), None, "a node holds it");
    rig.standing.remove(&node(0));
    assert_eq!(rig.poll(ms(10_500)), None);
    assert_eq!(rig.poll(ms(11_499)), None);
    assert_eq!(rig.poll(ms(11_500)), Some(Intent::NoHolder));
}

/// Goal: a cordoned node takes a volume only if no other node does, whatever its hash and its
/// replicas. Method: the node that is first without a cordon gets one.
#[test]
fn a_cordoned_node_takes_last() {
    let mut others = record(None);
    others.replicas.retain(|one| one.node == node(1));
    for record in [record(None), others] {
        let order = |cordoned: &[NodeId]| {
            let mut order = [node(0), node(1)];
            ranks::order(VOLUME, &record, &mut order, cordoned);
            order
        };
        assert_eq!(order(&[]), [node(1), node(0)], "by hash, or by replicas");
        assert_eq!(order(&[node(1)]), [node(0), node(1)]);
        let rig = |number, cordoned: &[NodeId]| {
            let mut rig = Rig::new(number);
            rig.cordoned = cordoned.to_vec();
            rig.volume.update(Revision(1), record.clone());
            rig
        };
        assert_eq!(rig(0, &[]).poll(ms(1000)), None, "its turn comes later");
        rig(0, &[node(1)]).commit(ms(1000), 2);
        let mut cordoned = rig(1, &[node(1)]);
        assert_eq!(cordoned.poll(ms(1000)), None);
        assert_eq!(cordoned.poll(ms(1149)), None, "the turn of node 0");
        cordoned.commit(ms(1150), 2);
    }
}

/// The control swaps epochs and replicas while it opens, serves and closes.
#[test]
fn changes_of_the_own_control_are_news() {
    let mut rig = Rig::alone();
    rig.commit(ms(1000), 2);
    let number = rig.take(ms(1000));
    for (at, state) in [
        (3, HoldingState::Taking),
        (4, HoldingState::Holding),
        (5, HoldingState::Leaving),
    ] {
        rig.volume.update(Revision(at), rig.controlled());
        assert_eq!(rig.poll(ms(1010)), None);
        assert_eq!(rig.volume.state(), state);
        match state {
            HoldingState::Taking => rig.volume.opened(number),
            HoldingState::Holding => drop(rig.leave(ms(1010))),
            _ => {}
        }
    }
    let known = rig.volume.record().expect("seen");
    assert_eq!((known.epoch, known.is_in_sync(replica(0))), (8, false));
}

/// In each step, another holder or another incarnation in the record ends the service.
#[test]
fn another_holder_fences() {
    let later = Holder {
        incarnation: Incarnation(999),
        ..holder(1)
    };
    for other in [Some(holder(0)), Some(later), None] {
        for step in 0..4 {
            let mut rig = Rig::alone();
            rig.commit(ms(1000), 2);
            if step > 0 {
                let number = rig.take(ms(1000));
                if step > 1 {
                    rig.volume.opened(number);
                }
                if step > 2 {
                    rig.leave(ms(1000));
                }
            }
            rig.volume.update(Revision(9), record(other));
            assert_eq!(rig.volume.state(), HoldingState::Fenced, "{step}");
            assert_eq!(rig.volume.ana(ms(1010)), Ana::Inaccessible);
            assert_eq!(rig.poll(ms(1010)), Some(Intent::Drop), "{step}");
            assert_eq!(rig.poll(ms(1010)), None);
            assert_eq!(rig.volume.state(), HoldingState::Standby);
            assert_eq!(rig.poll(ms(2009)), None, "a pause");
        }
    }
}

/// In each step, the end of the incarnation ends the service until the node has a new one.
#[test]
fn the_end_of_the_incarnation_fences() {
    for step in 0..5 {
        let mut rig = Rig::alone();
        let (claim, claimed) = rig.change(ms(1000));
        if step > 0 {
            rig.volume.committed(claim, Revision(2));
        }
        if step > 1 {
            let number = rig.take(ms(1000));
            rig.volume.opened(number);
        }
        if step > 2 {
            let close = rig.leave(ms(1000));
            if step > 3 {
                rig.volume.drained(close);
                rig.change(ms(1000));
            }
        }
        rig.lease.end(Incarnation(101));
        assert_eq!(rig.poll(ms(1010)), Some(Intent::Drop), "{step}");
        assert_eq!(rig.poll(ms(9000)), None);
        assert_eq!(rig.volume.state(), HoldingState::Fenced);
        // The claim's answer is late.
        rig.volume.committed(claim, Revision(2));
        rig.volume.update(Revision(3), claimed);
        assert_eq!(rig.volume.state(), HoldingState::Fenced);
        rig.volume.restart();
        assert_eq!(rig.volume.state(), HoldingState::Standby);
    }
}

#[test]
fn answers_with_old_numbers_do_not_count() {
    let mut rig = Rig::alone();
    let first = rig.hold(ms(1000));
    let close = rig.leave(ms(2000));
    rig.volume.opened(first);
    rig.volume.not_opened(first);
    assert_eq!(
        rig.volume.state(),
        HoldingState::Leaving,
        "the close has begun"
    );
    rig.volume.drained(close + 1);
    assert_eq!(rig.poll(ms(2010)), None);
    assert_eq!(rig.poll(ms(4000)), Some(Intent::Abort));
    assert_eq!(rig.poll(ms(4010)), None, "once");
    // After 5 s the control opens the volume again.
    let second = rig.take(ms(7000));
    assert_eq!(rig.volume.state(), HoldingState::Taking);
    assert_eq!(rig.volume.ana(ms(7000)), Ana::Change);
    assert_eq!(
        rig.volume.ana(ms(10_000)),
        Ana::Inaccessible,
        "8 s after the close"
    );
    rig.volume.drained(close);
    rig.volume.opened(first);
    rig.volume.not_opened(first);
    assert_eq!(
        (rig.poll(ms(7010)), rig.volume.state()),
        (None, HoldingState::Taking)
    );
    rig.volume.opened(second);
    assert_eq!(rig.volume.state(), HoldingState::Holding);
    rig.volume.not_opened(first);
    assert_eq!(rig.volume.state(), HoldingState::Holding);
    // The first close, reported again, does not end a second one.
    rig.leave(ms(8000));
    rig.volume.drained(close);
    assert_eq!(rig.poll(ms(8010)), None);
}

/// Also after the volume closed by itself.
#[test]
fn a_volume_that_does_not_open_is_left_to_others() {
    for closes_later in [false, true] {
        let mut rig = Rig::alone();
        rig.commit(ms(1000), 2);
        let number = rig.take(ms(1000));
        if closes_later {
            rig.volume.opened(number);
        }
        rig.volume.not_opened(number);
        let released = rig.commit(ms(1100), 3);
        assert_eq!((released.holder, released.next), (None, None));
        assert_eq!(rig.volume.state(), HoldingState::Standby);
        assert_eq!(rig.poll(ms(2099)), None, "another node's turn");
        rig.volume.opened(number);
        let (_, again) = rig.change(ms(2100));
        assert_eq!((again.epoch, again.holder), (6, Some(holder(1))));
    }
}

#[test]
fn a_handover_names_the_next_holder() {
    let mut rig = Rig::alone();
    rig.hold(ms(1000));
    assert!(!rig.volume.handover(node(1), ms(2000)), "to itself");
    let close = rig.leave(ms(2000));
    assert!(!rig.volume.handover(node(0), ms(2000)), "twice");
    rig.volume.drained(close);
    let released = rig.commit(ms(2010), 3);
    assert_eq!((released.holder, released.next), (None, Some(node(0))));
    assert_eq!(rig.volume.state(), HoldingState::Standby);
}

/// The control's last change and the release meet at the store.
#[test]
fn a_release_is_made_from_the_last_change_of_the_control() {
    let mut rig = Rig::alone();
    rig.hold(ms(1000));
    let close = rig.leave(ms(2000));
    rig.volume.drained(close);
    let (number, _) = rig.change(ms(2010));
    // The watch, or the answer, shows the control's change first.
    let changed = rig.controlled();
    rig.volume.update(Revision(3), changed.clone());
    assert_eq!(rig.poll(ms(2020)), None, "the answer is missing");
    rig.volume.refused(number, Revision(3), changed.clone());
    let (second, released) = rig.change(ms(2030));
    assert_eq!(
        (released.epoch, released.next),
        (changed.epoch, Some(node(0)))
    );
    assert!(!released.is_in_sync(replica(0)));
    // An answer to the first one is not that of the second one.
    rig.volume.refused(number, Revision(3), changed);
    rig.volume.committed(number, Revision(3));
    assert_eq!(rig.volume.state(), HoldingState::Leaving);
    rig.volume.unanswered(second);
    let (again, _) = rig.change(ms(3000));
    assert_eq!(again, second);
    // It was made, and the next holder was faster than its answer.
    rig.volume.update(Revision(5), record(Some(holder(0))));
    assert_eq!(rig.poll(ms(3010)), None, "nothing to drop");
    assert_eq!(rig.volume.state(), HoldingState::Standby);
    rig.volume.committed(second, Revision(4));
    assert_eq!(rig.volume.record(), Some(&record(Some(holder(0)))));
}

#[test]
fn a_claim_without_an_answer_is_sent_again() {
    let mut rig = Rig::alone();
    let (number, claimed) = rig.change(ms(1000));
    assert_eq!(rig.poll(ms(1010)), None);
    rig.volume.unanswered(number);
    assert_eq!(rig.change(ms(2000)), (number, claimed.clone()));
    // The first copy was made: the second is refused, and its answer shows the claim.
    rig.volume.refused(number, Revision(2), claimed);
    rig.take(ms(2010));
}

/// The watch is faster than the answer, or the answer shows another node's claim.
#[test]
fn a_claim_is_won_or_lost() {
    let mut rig = Rig::alone();
    let (number, claimed) = rig.change(ms(1000));
    rig.volume.update(Revision(2), claimed.clone());
    let opening = rig.take(ms(1010));
    rig.volume.refused(number, Revision(2), claimed);
    assert_eq!(rig.volume.state(), HoldingState::Taking);
    rig.volume.opened(opening);
    assert_eq!(rig.volume.state(), HoldingState::Holding);

    let mut rig = Rig::alone();
    let (number, _) = rig.change(ms(1000));
    rig.volume.update(Revision(2), record(Some(holder(0))));
    assert_eq!(
        rig.volume.state(),
        HoldingState::Taking,
        "its own answer is missing"
    );
    rig.volume
        .refused(number, Revision(2), record(Some(holder(0))));
    assert_eq!(rig.volume.state(), HoldingState::Standby);

    // Made, and lost again before its answer.
    let mut rig = Rig::alone();
    let (number, _) = rig.change(ms(1000));
    rig.volume.update(Revision(3), record(Some(holder(0))));
    rig.volume.committed(number, Revision(2));
    assert_eq!(rig.poll(ms(1010)), Some(Intent::Drop));
    assert_eq!(rig.volume.record(), Some(&record(Some(holder(0)))));
}

/// A copy of a take arrives after the machine gave it up.
#[test]
fn a_late_claim_opens_the_volume() {
    let mut rig = Rig::new(1);
    rig.volume.update(Revision(2), record(Some(holder(1))));
    let number = rig.take(ms(1000));
    rig.volume.opened(number);
    assert_eq!(rig.volume.state(), HoldingState::Holding);
}
