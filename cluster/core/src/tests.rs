//! Tests of single machines, with times and answers by hand. The simulator tests them together.

use std::collections::BTreeMap;

use arrayvec::ArrayVec;
use uuid::Uuid;

use crate::gate::{GateStep, Key};
use crate::ids::{Incarnation, MemberId, NodeId, Revision, VolumeId};
use crate::observer::Role;
use crate::slots::{MAX_SLOTS, Slots, controller_ids};
use crate::transaction::{Condition, Effect};
use crate::volume::{Ana, Intent, State, View};
use crate::*;

const VOLUME: VolumeId = VolumeId(Uuid::from_u128(1));

fn node(number: u128) -> NodeId {
    NodeId(Uuid::from_u128(10 + number))
}

fn member(number: u128) -> MemberId {
    MemberId(Uuid::from_u128(20 + number))
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
    lease.renewed(Incarnation(100), second, ms(1500));
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
    let mut observer = Observer::new(node(0), Role::Observer(1), Timing::default());
    observer.saw(Revision(7), ms(100));
    observer.saw(Revision(6), ms(900));
    assert_eq!(
        observer.due(ms(1000), &own),
        Some(ms(2200)),
        "from 100 ms, rank 1"
    );
    // The observer's own lease had a gap until 3 s.
    let number = renew(&mut own, ms(2900));
    own.renewed(Incarnation(101), number, ms(3000));
    assert_eq!(observer.poll(ms(5099), &own), None);
    let number = renew(&mut own, ms(4500));
    own.renewed(Incarnation(101), number, ms(4510));
    let fence = observer.poll(ms(5100), &own).unwrap();
    let unchanged = Condition::LeaseUnchanged(node(0), Revision(7));
    assert!(fence.conditions.contains(&unchanged), "{fence:?}");
    let stands = Condition::Stands(holder(1).node, holder(1).incarnation);
    assert!(fence.conditions.contains(&stands), "{fence:?}");
}

#[test]
fn other_nodes_wait_for_two_leases_from_a_second_reading() {
    let own = Lease::new(holder(1), Timing::default(), ms(60_000), ms(0));
    let mut observer = Observer::new(node(0), Role::Other, Timing::default());
    observer.saw(Revision(7), ms(1000));
    assert_eq!(observer.due(ms(9000), &own), None);
    observer.saw(Revision(7), ms(2000));
    assert_eq!(observer.due(ms(2000), &own), Some(ms(6000)));
    observer.saw(Revision(8), ms(3000));
    assert_eq!(observer.due(ms(9000), &own), None);
}

/// A dead node sends no renewal that its new observers could see.
#[test]
fn a_change_of_role_keeps_the_last_renewal() {
    let own = Lease::new(holder(1), Timing::default(), ms(60_000), ms(0));
    let mut observer = Observer::new(node(0), Role::Observer(1), Timing::default());
    assert!(observer.must_read(), "it has seen nothing yet");
    observer.saw(Revision(7), ms(1000));
    assert!(!observer.must_read());
    observer.set_role(Role::Observer(0), ms(2000));
    assert_eq!(observer.due(ms(2000), &own), Some(ms(3000)));
    observer.set_role(Role::Other, ms(2100));
    assert!(observer.must_read());
    assert_eq!(observer.due(ms(2100), &own), Some(ms(5000)));
    // One that has read the renewal once counts from the change.
    let mut observer = Observer::new(node(0), Role::Other, Timing::default());
    observer.saw(Revision(7), ms(1000));
    observer.set_role(Role::Observer(0), ms(2000));
    assert_eq!(observer.due(ms(2000), &own), Some(ms(4000)));
    assert!(observer.must_read(), "it may have missed a later one");
    observer.saw(Revision(8), ms(2100));
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

fn key(epoch: u64, number: u128) -> Key {
    Key {
        epoch,
        holder: holder(number),
    }
}

#[test]
fn a_gate_answers_after_older_io_and_the_disk() {
    let mut gate = Gate::default();
    let acquire = |gate: &mut Gate, key, session| {
        gate.acquire(key, session).unwrap();
        if let Some(GateStep::Store(key)) = gate.poll() {
            assert_eq!(gate.poll(), None, "not stored yet");
            gate.stored(key);
        }
    };
    acquire(&mut gate, key(1, 0), 1);
    assert!(gate.admit(key(1, 0), 1).is_err(), "not granted yet");
    assert!(matches!(gate.poll(), Some(GateStep::Grant { .. })));
    let old = gate.admit(key(1, 0), 1).unwrap();
    acquire(&mut gate, key(2, 1), 1);
    assert_eq!(gate.poll(), None, "older I/O is in flight");
    let refused = gate.admit(key(1, 0), 1).unwrap_err();
    assert_eq!(refused.current, Some(key(2, 1)));
    gate.ended(old);
    assert!(matches!(gate.poll(), Some(GateStep::Grant { .. })));
    assert!(gate.acquire(key(1, 0), 9).is_err(), "a lower key");
    // A restart keeps the key, and a new session of the same holder.
    let mut gate = Gate::restore(Some(key(2, 1)));
    assert!(gate.admit(key(2, 1), 0).is_err(), "not acquired again");
    assert!(gate.acquire(key(1, 0), 9).is_err());
    acquire(&mut gate, key(2, 1), 2);
    assert!(gate.acquire(key(2, 1), 1).is_err(), "an older session");
}

#[test]
fn a_slot_rests_until_all_others_were_assigned() {
    let mut slots = Slots::default();
    assert_eq!(slots.assign(node(0)), Some(0));
    assert_eq!(slots.assign(node(1)), Some(1));
    slots.remove(node(0));
    let later = (2..MAX_SLOTS as u128).map(|n| slots.assign(node(n)));
    assert!(later.eq((2..MAX_SLOTS as u8).map(Some)));
    assert_eq!(slots.assign(node(99)), Some(0));
    assert_eq!(slots.assign(node(100)), None);
    assert_eq!(controller_ids(0), 1..=4094);
    assert_eq!(*controller_ids(15).end(), 65_504);
}

#[test]
fn assent_needs_every_member_after_the_question() {
    let mut assent = Assent::default();
    let members = ArrayVec::from_iter([member(0), member(1)]);
    let first = assent.start(5, members.clone()).unwrap();
    assert_eq!(assent.start(6, members.clone()), None, "one at a time");
    assert_eq!(assent.confirmed(first, member(0)), None);
    assert_eq!(assent.confirmed(first, member(0)), None);
    assent.abandon();
    let second = assent.start(6, members).unwrap();
    assert_eq!(assent.confirmed(first, member(1)), None, "of an old round");
    assert_eq!(assent.confirmed(second, member(1)), None);
    assert_eq!(assent.confirmed(second, member(0)), Some(6));
}

/// A node with its view of the cluster.
struct Rig {
    lease: Lease,
    standing: BTreeMap<NodeId, Incarnation>,
    reached: Vec<MemberId>,
    volume: Volume,
}

impl Rig {
    fn new(number: u128) -> Self {
        let of = |number| (holder(number).node, holder(number).incarnation);
        Self {
            lease: Lease::new(holder(number), Timing::default(), ms(60_000), ms(0)),
            standing: BTreeMap::from([of(0), of(1)]),
            reached: vec![member(0), member(1)],
            volume: Volume::new(VOLUME, node(number)),
        }
    }

    fn poll(&mut self, now: BootTime) -> Option<Intent> {
        let view = View {
            now,
            lease: &self.lease,
            standing: &self.standing,
            reached: &self.reached,
            candidates: &[node(0), node(1)],
            cordoned: &[node(0)],
        };
        self.volume.poll(&view)
    }

    /// The number of the merge that starts.
    fn merge(&mut self, now: BootTime) -> u64 {
        match self.poll(now) {
            Some(Intent::Merge { number }) => number,
            other => panic!("{other:?}"),
        }
    }

    /// Takes the volume, with a gate of every member, up to the merge.
    fn serve(&mut self, now: BootTime) {
        self.commit(now, 2);
        for number in 0..2 {
            assert!(matches!(self.poll(now), Some(Intent::Acquire { .. })));
            let key = self.volume.key().unwrap();
            self.volume.granted(member(number), key);
        }
        self.commit(now, 3);
    }

    /// Serves the volume.
    fn hold(&mut self, now: BootTime) {
        self.serve(now);
        let number = self.merge(now);
        self.volume.merged(number);
        assert_eq!(self.poll(now), Some(Intent::Open));
    }

    /// The next change of the record, as the store makes it.
    fn commit(&mut self, now: BootTime, at: u64) -> Record {
        let Some(Intent::Commit {
            number,
            transaction,
        }) = self.poll(now)
        else {
            panic!("no commit");
        };
        let Effect::Commit { record, .. } = transaction.effect else {
            panic!("{transaction:?}");
        };
        self.volume.committed(number, Revision(at));
        *record
    }
}

fn record(of: Option<Holder>) -> Record {
    let member = |number| Member {
        id: member(number),
        node: node(number),
        state: MemberState::InSync,
    };
    Record {
        epoch: 4,
        serving: 4,
        holder: of,
        next: None,
        members: ArrayVec::from_iter([member(0), member(1)]),
    }
}

#[test]
fn a_standby_takes_after_the_fence_and_serves_with_the_members_it_gated() {
    let mut rig = Rig::new(1);
    rig.volume.saw(Revision(1), record(Some(holder(0))));
    assert_eq!(rig.poll(ms(9000)), None, "the holder stands");
    rig.standing.remove(&node(0));
    rig.reached = vec![member(1)];
    let taken = rig.commit(ms(9100), 2);
    assert_eq!((taken.epoch, taken.holder), (5, Some(holder(1))));
    let asked = Intent::Acquire {
        member: member(1),
        key: rig.volume.key().unwrap(),
    };
    assert_eq!(rig.poll(ms(9110)), Some(asked));
    rig.volume.granted(member(1), rig.volume.key().unwrap());
    // The other member's node has no lease: nothing waits for it.
    let served = rig.commit(ms(9120), 3);
    assert_eq!(served.serving, 5);
    assert!(!served.is_in_sync(member(0)) && served.is_in_sync(member(1)));
    let number = rig.merge(ms(9130));
    assert_eq!(rig.volume.ana(ms(9130)), Ana::Change);
    rig.volume.merged(number);
    assert_eq!(rig.poll(ms(9140)), Some(Intent::Open));
    assert_eq!(rig.volume.ana(ms(9140)), Ana::Optimized);
    // The record of another holder fences.
    rig.volume.saw(Revision(9), record(Some(holder(0))));
    assert_eq!(rig.poll(ms(9150)), Some(Intent::Drop));
    assert_eq!(rig.volume.state(), State::Fenced);
}

/// The pause after an attempt without a member ends with the holder that it concerned.
#[test]
fn a_pause_ends_with_the_next_holder() {
    let mut rig = Rig::new(1);
    rig.volume.saw(Revision(1), record(None));
    rig.reached.clear();
    assert_eq!(rig.poll(ms(9000)), None, "no member is reached");
    rig.volume.saw(Revision(2), record(Some(holder(0))));
    assert_eq!(rig.poll(ms(9100)), None, "the holder stands");
    rig.standing.remove(&node(0));
    rig.reached = vec![member(1)];
    rig.commit(ms(9200), 3);
}

#[test]
fn an_answer_to_an_earlier_change_is_not_that_of_a_later_one() {
    let mut rig = Rig::new(1);
    rig.volume.saw(Revision(1), record(None));
    let Some(Intent::Commit {
        number: first,
        transaction,
    }) = rig.poll(ms(100))
    else {
        panic!("no take");
    };
    let Effect::Commit { record: taken, .. } = transaction.effect else {
        panic!("no record");
    };
    // The watch is faster than the answer.
    rig.volume.saw(Revision(2), (*taken).clone());
    for number in 0..2 {
        assert!(matches!(rig.poll(ms(110)), Some(Intent::Acquire { .. })));
        rig.volume
            .granted(member(number), rig.volume.key().unwrap());
    }
    assert!(matches!(rig.poll(ms(120)), Some(Intent::Commit { .. })));
    rig.volume.refused(first, Revision(2), *taken);
    assert_eq!(rig.volume.state(), State::Taking);
}

#[test]
fn a_promotion_without_an_answer_may_be_in_the_store() {
    let mut rig = Rig::new(1);
    let mut outdated = record(None);
    outdated.set(member(0), MemberState::Out);
    rig.volume.saw(Revision(1), outdated);
    rig.commit(ms(1000), 2);
    for (number, now) in [(1, 1001), (0, 1003)] {
        let Some(Intent::Acquire { member: asked, key }) = rig.poll(ms(now)) else {
            panic!("no question");
        };
        assert_eq!(asked, member(number));
        rig.volume.granted(asked, key);
        if number == 1 {
            rig.commit(ms(now + 1), 3);
            let number = rig.merge(ms(now + 1));
            rig.volume.merged(number);
            assert_eq!(rig.poll(ms(now + 1)), Some(Intent::Open));
        }
    }
    rig.volume.promote(member(0));
    let both = [member(1), member(0)];
    assert_eq!(
        rig.volume.may_be_in_sync().unwrap().as_slice(),
        both,
        "wanted"
    );
    let Some(Intent::Commit { number, .. }) = rig.poll(ms(1010)) else {
        panic!("no promotion");
    };
    assert_eq!(
        rig.volume.may_be_in_sync().unwrap().as_slice(),
        both,
        "sent"
    );
    rig.volume.unanswered(number);
    assert!(
        matches!(rig.poll(ms(1020)), Some(Intent::Commit { .. })),
        "again"
    );
    // A hand-over waits for the end of the change, and then for the lanes.
    assert!(!rig.volume.hand_over(node(0), ms(1030)));
    rig.volume.committed(number, Revision(4));
    assert!(rig.volume.hand_over(node(0), ms(1040)));
    assert_eq!(rig.poll(ms(1040)), Some(Intent::Close));
    assert_eq!(rig.poll(ms(1041)), None);
    rig.volume.drained();
    let released = rig.commit(ms(1050), 5);
    assert_eq!((released.holder, released.next), (None, Some(node(0))));
    assert_eq!(rig.volume.state(), State::Standby);
}

/// A member that loses its session while its promotion waits may lack a write.
#[test]
fn a_lost_gate_ends_a_promotion_that_waits() {
    let mut rig = Rig::new(1);
    rig.volume.saw(Revision(1), record(None));
    rig.hold(ms(1000));
    rig.volume.put_out(member(0));
    rig.commit(ms(1010), 4);
    let key = rig.volume.key().unwrap();
    assert!(matches!(rig.poll(ms(1020)), Some(Intent::Acquire { .. })));
    rig.volume.granted(member(0), key);
    rig.volume.promote(member(0));
    rig.volume.lost_gate(member(0));
    assert_eq!(rig.volume.may_be_in_sync().unwrap().as_slice(), [member(1)]);
    assert!(matches!(rig.poll(ms(1030)), Some(Intent::Acquire { .. })));
    rig.volume.granted(member(0), key);
    assert_eq!(rig.poll(ms(1040)), None, "no promotion");
}

#[test]
fn a_merge_counts_with_its_number_and_all_gates() {
    let mut rig = Rig::new(1);
    rig.volume.saw(Revision(1), record(None));
    rig.serve(ms(1000));
    let first = rig.merge(ms(1000));
    rig.volume.lost_gate(member(0));
    let served = rig.commit(ms(1010), 4);
    assert!(!served.is_in_sync(member(0)));
    let second = rig.merge(ms(1020));
    rig.volume.merged(first);
    assert_eq!(rig.volume.state(), State::Taking, "a late answer");
    rig.volume.merged(second);
    assert_eq!(rig.volume.state(), State::Holding);
}

/// The gate is lost while the change that makes the epoch a served one is under way.
#[test]
fn no_merge_starts_without_all_gates() {
    let mut rig = Rig::new(1);
    rig.volume.saw(Revision(1), record(None));
    rig.commit(ms(1000), 2);
    for number in 0..2 {
        assert!(matches!(rig.poll(ms(1000)), Some(Intent::Acquire { .. })));
        let key = rig.volume.key().unwrap();
        rig.volume.granted(member(number), key);
    }
    let Some(Intent::Commit { number, .. }) = rig.poll(ms(1000)) else {
        panic!("no commit");
    };
    rig.volume.lost_gate(member(0));
    rig.volume.committed(number, Revision(3));
    let served = rig.commit(ms(1010), 4);
    assert!(!served.is_in_sync(member(0)));
    rig.merge(ms(1020));
}

/// The gate with a later key may be found by a lane, and the management core may stall before it
/// drops the lanes. A write that the promoted member lacks must not be acknowledged then.
#[test]
fn no_member_suffices_for_an_answer_of_a_fenced_holder() {
    let mut rig = Rig::new(1);
    rig.volume.saw(Revision(1), record(None));
    rig.hold(ms(1000));
    rig.volume.put_out(member(0));
    rig.commit(ms(1010), 4);
    let key = rig.volume.key().unwrap();
    assert!(matches!(rig.poll(ms(1020)), Some(Intent::Acquire { .. })));
    rig.volume.granted(member(0), key);
    rig.volume.promote(member(0));
    let promotion = rig.poll(ms(1030));
    assert!(matches!(promotion, Some(Intent::Commit { .. })));
    rig.volume.gate_refused(key);
    assert_eq!(rig.volume.state(), State::Fenced);
    assert_eq!(rig.volume.may_be_in_sync(), None);
    assert_eq!(rig.poll(ms(1040)), Some(Intent::Drop));
    assert_eq!(rig.volume.may_be_in_sync(), None);
}

/// A member whose session ended owes no answer, and its gate cannot be asked: its node is down.
#[test]
fn a_member_without_a_gate_leaves_in_time() {
    for (lives, patience) in [(true, 2000), (false, 500)] {
        let mut rig = Rig::new(1);
        rig.volume.saw(Revision(1), record(None));
        rig.hold(ms(1000));
        rig.volume.lost_gate(member(0));
        rig.reached = vec![member(1)];
        if !lives {
            rig.standing.remove(&node(0));
        }
        assert_eq!(rig.poll(ms(1100)), None);
        assert_eq!(rig.poll(ms(1099 + patience)), None);
        let changed = rig.commit(ms(1100 + patience), 4);
        assert!(!changed.is_in_sync(member(0)));
        // The last member stays.
        rig.volume.lost_gate(member(1));
        rig.reached = Vec::new();
        assert_eq!(rig.poll(ms(5000)), None);
        assert_eq!(rig.poll(ms(9000)), None);
    }
}

/// Hosts are not left without a path while the store is away.
#[test]
fn a_hand_over_ends_in_time_although_a_change_is_unanswered() {
    let mut rig = Rig::new(1);
    rig.volume.saw(Revision(1), record(None));
    rig.hold(ms(1000));
    assert!(rig.volume.hand_over(node(0), ms(2000)));
    assert_eq!(rig.poll(ms(2000)), Some(Intent::Close));
    rig.volume.put_out(member(0));
    let sent = rig.poll(ms(2010));
    assert!(matches!(sent, Some(Intent::Commit { .. })), "{sent:?}");
    assert_eq!(rig.poll(ms(3990)), None);
    assert_eq!(rig.poll(ms(4000)), Some(Intent::Abort));
    assert_eq!(rig.poll(ms(6990)), None);
    assert_eq!(rig.poll(ms(7000)), Some(Intent::Open));
    assert_eq!(rig.volume.state(), State::Holding);
}
