//! The parts of the driver between the machines and the engine, without etcd.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use arrayvec::ArrayVec;
use nacre_cluster_core::ids::MAX_REPLICAS;
use nacre_cluster_core::volume::HoldingState;
use nacre_cluster_core::{
    BootTime, ExportId, Holder, Incarnation, Lease, NodeId, ReplicaId, Revision, Timing, VolumeId,
};
use nacre_cluster_etcd::{BehindCause, LeaseKey};
use parking_lot::Mutex;
use serde_json::json;
use uuid::Uuid;

use crate::events::{Decision, Event, Events};
use crate::export::Export;
use crate::keys::NodeKey;
use crate::nodes::{Leases, Nodes, ObservationStep};
use crate::publication::Publication;
use crate::serving::{Answer, Report, Serving, VolumeRole};
use crate::volumes::{Commit, Volumes};

const VOLUME: VolumeId = VolumeId(Uuid::from_u128(100));
const REPLICA: ReplicaId = ReplicaId(Uuid::from_u128(200));
/// A replica of node 2.
const OTHER: ReplicaId = ReplicaId(Uuid::from_u128(201));
const MS: Duration = Duration::from_millis(1);

fn node(number: u128) -> NodeId {
    NodeId(Uuid::from_u128(number))
}

pub(crate) fn at(ms: u32) -> BootTime {
    BootTime(1_000_000_000_000) + MS * ms
}

fn lease(number: u128, incarnation: u64) -> Lease {
    let holder = Holder {
        node: node(number),
        incarnation: Incarnation(incarnation),
    };
    Lease::new(holder, Timing::default(), at(0), at(0))
}

fn key(number: u128, incarnation: u64, revision: u64) -> LeaseKey {
    LeaseKey {
        node: node(number),
        incarnation: Incarnation(incarnation),
        revision: Revision(revision),
        number: revision - incarnation,
        process: Uuid::nil(),
        machine: None,
        in_effect: None,
        features: Vec::new(),
    }
}

type Causes = BTreeMap<VolumeId, BehindCause>;

/// Writes down the calls, has these volumes behind, and does not reach these replicas.
#[derive(Default, Clone)]
pub(crate) struct Engine(
    Arc<Mutex<Vec<String>>>,
    Arc<Mutex<Vec<VolumeId>>>,
    Arc<Mutex<Causes>>,
    Arc<Mutex<BTreeSet<ReplicaId>>>,
);

impl Engine {
    fn note(&self, call: &str) {
        self.0.lock().push(call.to_owned());
    }

    pub(crate) fn set_behind(&self, volumes: &[VolumeId]) {
        *self.1.lock() = volumes.to_vec();
    }

    pub(crate) fn set_causes(&self, causes: &[(VolumeId, BehindCause)]) {
        *self.2.lock() = causes.iter().cloned().collect();
    }

    fn set_away(&self, replicas: &[ReplicaId]) {
        *self.3.lock() = replicas.iter().copied().collect();
    }

    pub(crate) fn all_calls(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock())
    }

    /// The calls that ask for something.
    fn calls(&self) -> Vec<String> {
        let mut calls = self.all_calls();
        calls.retain(|call| call != "show" && call != "publish");
        calls
    }
}

impl Serving for Engine {
    fn reached(&mut self, _: VolumeId) -> ArrayVec<ReplicaId, MAX_REPLICAS> {
        let away = self.3.lock();
        let all = [REPLICA, OTHER].into_iter();
        all.filter(|id| !away.contains(id)).collect()
    }

    fn take(&mut self, _: VolumeId, number: u64) {
        self.note(&format!("take {number}"));
    }

    fn close(&mut self, _: VolumeId, number: u64) {
        self.note(&format!("close {number}"));
    }

    fn abort(&mut self, _: VolumeId) {
        self.note("abort");
    }

    fn drop_all(&mut self, _: VolumeId) {
        self.note("drop");
    }

    fn show(&mut self, _: VolumeId, _: &VolumeRole) {
        self.note("show");
    }

    fn forget(&mut self, _: VolumeId) {
        self.note("forget");
    }

    fn publish(&mut self, _: VolumeId, _: Option<&Publication>) {
        self.note("publish");
    }

    fn nodes(
        &mut self,
        nodes: &BTreeMap<NodeId, NodeKey>,
        standing: &BTreeMap<NodeId, Incarnation>,
    ) {
        self.note(&format!("nodes {} {}", nodes.len(), standing.len()));
    }

    fn exports(&mut self, exports: &BTreeMap<ExportId, Export>) {
        self.note(&format!("exports {}", exports.len()));
    }

    fn behind(&mut self) -> Vec<VolumeId> {
        self.1.lock().clone()
    }

    fn causes(&mut self) -> Causes {
        self.2.lock().clone()
    }

    fn listed(&mut self) {
        self.note("listed");
    }
}

/// A node with a lease, and a volume that it takes.
pub(crate) struct Rig {
    pub(crate) volumes: Volumes,
    engine: Engine,
    pub(crate) nodes: Nodes,
    lease: Lease,
    events: Events,
    revision: u64,
}

impl Rig {
    fn new() -> Self {
        let engine = Engine::default();
        let events = Events::default();
        let mut nodes = Nodes::new(node(1), Timing::default());
        nodes.put(&key(1, 10, 10), at(0), &events);
        nodes.put(&key(2, 11, 11), at(0), &events);
        let mut volumes = Volumes::new(node(1), Box::new(engine.clone()));
        let record = json!({
            "epoch": 4, "serving": 4, "revision": 7, "holder": node(1).0, "incarnation": 3,
            "members": [{ "id": REPLICA.0, "node": node(1).0, "state": { "state": "in_sync" } }],
        });
        let saw = volumes.update(VOLUME, Revision(20), record.to_string().as_bytes());
        assert_eq!(saw, Ok(()));
        let mut publication = Publication::new(VOLUME);
        for number in [1, 2] {
            publication.slots.assign(node(number));
        }
        volumes.publish(VOLUME, Some(&publication));
        Self {
            volumes,
            engine,
            nodes,
            lease: lease(1, 10),
            events,
            revision: 20,
        }
    }

    fn poll(&mut self, ms: u32, is_turn: bool) -> Vec<Commit> {
        let now = at(ms);
        self.volumes
            .poll(now, &self.lease, &self.nodes, &self.events, is_turn)
    }

    /// Makes the changes that the volume wants, until it wants none.
    fn run(&mut self, ms: u32) {
        loop {
            let commits = self.poll(ms, true);
            if commits.is_empty() {
                return;
            }
            for commit in commits {
                self.revision += 1;
                let at = Revision(self.revision);
                self.volumes
                    .committed(commit.volume, commit.number, at, commit.value);
            }
        }
    }

    /// As [`Rig::run`], with a lease that was renewed now.
    fn run_renewed(&mut self, ms: u32) {
        self.lease = Lease::new(self.lease.holder(), Timing::default(), at(ms), at(ms));
        self.run(ms);
    }

    /// The number of the one call that the engine got since.
    fn asked(&mut self, what: &str) -> u64 {
        let calls = self.engine.calls();
        let [call] = &calls[..] else {
            panic!("{calls:?}");
        };
        let number = call.strip_prefix(what).expect(what).trim();
        number.parse().expect("a number")
    }

    fn report(&mut self, answer: Answer) {
        let volume = VOLUME;
        self.volumes.report(Report { volume, answer });
    }

    pub(crate) fn holding() -> Self {
        let mut bench = Self::new();
        // The other node may have the first rank.
        bench.run(0);
        bench.run(200);
        let number = bench.asked("take");
        bench.report(Answer::Opened { number });
        bench.run(220);
        assert_eq!(bench.volumes.state(VOLUME), Some(HoldingState::Holding));
        bench
    }
}

/// The end of a first handover, reported late, does not end a second one.
#[test]
fn a_late_report_of_an_earlier_close() {
    let mut bench = Rig::holding();
    assert!(bench.volumes.handover(VOLUME, node(2), at(300)));
    bench.run(300);
    let first = bench.asked("close");
    // Commands hang: aborted after 2 s, opened again after 5 s.
    bench.run(2400);
    assert_eq!(bench.engine.calls(), ["abort"]);
    bench.run(5400);
    let number = bench.asked("take");
    bench.report(Answer::Drained { number: first });
    bench.report(Answer::Opened { number });
    bench.run(5410);
    assert_eq!(bench.volumes.state(VOLUME), Some(HoldingState::Holding));
    let events = bench.events.after(0).into_iter().map(|event| event.what);
    let [Decision::VolumeTaken { .. }, kept] = &events.collect::<Vec<_>>()[..] else {
        panic!("{:?}", bench.events);
    };
    assert_eq!(*kept, Decision::VolumeKept { volume: VOLUME });
    assert!(
        !bench.volumes.handover(VOLUME, node(2), at(5500)),
        "not at once again"
    );
    assert!(bench.volumes.handover(VOLUME, node(2), at(16_000)));
    bench.run(16_000);
    let number = bench.asked("close");
    bench.report(Answer::Drained { number: first });
    bench.run(16_010);
    assert_eq!(bench.volumes.state(VOLUME), Some(HoldingState::Leaving));
    bench.report(Answer::Drained { number });
    bench.run(16_020);
    assert_eq!(bench.volumes.state(VOLUME), Some(HoldingState::Standby));
    assert_eq!(bench.volumes.holder(VOLUME), None);
}

/// Another node takes its turn. The event is noted once, however often the engine fails.
#[test]
fn a_volume_that_does_not_open() {
    let mut bench = Rig::new();
    bench.run(0);
    for ms in [200, 1400] {
        bench.run(ms);
        let number = bench.asked("take");
        bench.report(Answer::NotOpened { number });
        bench.run(ms + 10);
        assert_eq!(bench.volumes.state(VOLUME), Some(HoldingState::Standby));
        assert_eq!(bench.volumes.holder(VOLUME), None);
        bench.run(ms + 400);
        assert!(bench.engine.calls().is_empty(), "a pause");
    }
    let events = bench.events.after(0);
    let [Event { what, .. }] = &events[..] else {
        panic!("{events:?}");
    };
    assert!(matches!(what, Decision::VolumeNotOpened { .. }), "{what:?}");
}

/// Goal: a volume that no node can take is one event, a second after it lost its holder, and
/// another one only after it had a holder again. A restored volume names the nodes that it waits
/// for. Method: the engine reaches no replica, then all, then none again; a restored record.
#[test]
fn a_volume_without_a_holder_is_one_event() {
    let mut bench = Rig::new();
    let without = |bench: &Rig| -> Vec<Vec<NodeId>> {
        let events = bench.events.after(0).into_iter();
        let missing = events.filter_map(|event| match event.what {
            Decision::VolumeWithoutHolder { volume, missing } if volume == VOLUME => Some(missing),
            _ => None,
        });
        missing.collect()
    };
    let waits = |bench: &mut Rig, from: u32| {
        for ms in (from..=from + 900).step_by(100) {
            bench.run_renewed(ms);
        }
        let early = without(bench).len();
        for ms in (from + 1000..=from + 4000).step_by(100) {
            bench.run_renewed(ms);
        }
        assert!(bench.engine.calls().is_empty(), "it takes nothing");
        early
    };
    bench.engine.set_away(&[REPLICA, OTHER]);
    assert_eq!(waits(&mut bench, 0), 0, "after a second");
    assert_eq!(without(&bench), [vec![]], "once");
    bench.engine.set_away(&[]);
    bench.run_renewed(5100);
    let number = bench.asked("take");
    bench.report(Answer::Opened { number });
    bench.run_renewed(5110);
    assert_eq!(bench.volumes.state(VOLUME), Some(HoldingState::Holding));

    // Restored: node 1 may take it only with the replica of node 2, unless that one is lost.
    bench.volumes.restart(&bench.events);
    assert_eq!(bench.engine.calls(), ["drop"]);
    bench.lease = lease(1, 50);
    bench.nodes.put(&key(1, 50, 50), at(6000), &bench.events);
    let restored = |lost: &[ReplicaId]| {
        let lost: Vec<Uuid> = lost.iter().map(|one| one.0).collect();
        let record = json!({
            "epoch": 9, "serving": 9, "revision": 9, "holder": null,
            "restored": { "lost": lost },
            "members": [
                { "id": REPLICA.0, "node": node(1).0, "state": { "state": "in_sync" } },
                { "id": OTHER.0, "node": node(2).0, "state": { "state": "in_sync" } },
            ],
        });
        record.to_string()
    };
    let update = |bench: &mut Rig, record: String| {
        bench.revision += 1;
        let revision = Revision(bench.revision);
        let saw = bench.volumes.update(VOLUME, revision, record.as_bytes());
        assert_eq!(saw, Ok(()));
    };
    update(&mut bench, restored(&[]));
    bench.engine.set_away(&[OTHER]);
    assert_eq!(waits(&mut bench, 6000), 1, "after a second");
    assert_eq!(without(&bench), [vec![], vec![node(2)]], "once");
    update(&mut bench, restored(&[OTHER]));
    bench.run_renewed(11_100);
    bench.asked("take");
    assert_eq!(without(&bench).len(), 2);
}

/// All work for the volume ends with the incarnation, and the node takes it in a later epoch.
#[test]
fn a_lost_incarnation() {
    let mut bench = Rig::holding();
    bench.volumes.restart(&bench.events);
    assert_eq!(bench.engine.calls(), ["drop"]);
    let events = bench.events.after(0);
    assert_eq!(events.len(), 2, "taken and fenced: {events:?}");
    bench.lease = lease(1, 50);
    bench.nodes.put(&key(1, 50, 50), at(400), &bench.events);
    bench.run(400);
    bench.run(600);
    bench.asked("take");
}

/// A node that ends takes nothing any more.
#[test]
fn a_node_that_leaves_takes_nothing() {
    let mut bench = Rig::new();
    bench.volumes.is_leaving = true;
    bench.run(0);
    bench.run(2000);
    assert_eq!(bench.volumes.state(VOLUME), Some(HoldingState::Standby));
}

/// A silent node is fenced after a lease. A late deletion does not end a later incarnation.
#[test]
fn fences_and_old_news() {
    let events = Events::default();
    let mut nodes = Nodes::new(node(1), Timing::default());
    let mut own = lease(1, 10);
    nodes.put(&key(1, 10, 10), at(0), &events);
    nodes.put(&key(2, 11, 11), at(0), &events);
    nodes.put(&key(2, 11, 15), at(400), &events);
    let fences = |nodes: &mut Nodes, own: &mut Lease, ms: u32| {
        if let Some(nacre_cluster_core::Effect::Renew { number, .. }) =
            own.poll(at(ms)).map(|renewal| renewal.effect)
        {
            own.renewed(Incarnation(10), number, at(ms));
        }
        let steps = nodes.poll(at(ms), own).into_iter();
        let fences = steps.filter(|step| matches!(step, ObservationStep::Fence(..)));
        fences.count()
    };
    for ms in (0..2400).step_by(100) {
        assert_eq!(fences(&mut nodes, &mut own, ms), 0, "{ms}");
    }
    assert_eq!(fences(&mut nodes, &mut own, 2400), 1);
    // The deletion of an earlier incarnation arrives late.
    assert!(!nodes.deleted(node(2), 9, at(2500), &events));
    assert!(nodes.deleted(node(2), 16, at(2500), &events));
    assert!(!nodes.standing.contains_key(&node(2)));
}

/// A read may be older than an end of the lease that the watch has shown, and newer than one that
/// is still to come.
#[test]
fn reads_and_watches_overtake_each_other() {
    let events = Events::default();
    let mut nodes = Nodes::new(node(1), Timing::default());
    nodes.put(&key(1, 10, 10), at(0), &events);
    nodes.describe(node(2), Some(NodeKey::default()));
    nodes.looked(&leases(11, &[key(2, 11, 11)]), at(0), &events);
    assert!(nodes.standing.contains_key(&node(2)), "a read shows it");
    assert!(nodes.deleted(node(2), 20, at(100), &events));
    nodes.looked(&leases(19, &[key(2, 11, 19)]), at(200), &events);
    nodes.put(&key(2, 11, 19), at(200), &events);
    assert!(!nodes.standing.contains_key(&node(2)), "it is over");
    nodes.looked(&leases(30, &[key(2, 30, 30)]), at(300), &events);
    assert!(!nodes.deleted(node(2), 20, at(400), &events));
    assert!(nodes.standing.contains_key(&node(2)), "a later one stands");
}

/// A read at `revision` that shows these leases beside that of node 1.
fn leases(revision: i64, keys: &[LeaseKey]) -> Leases {
    let keys = [&[key(1, 10, 10)], keys].concat();
    Leases {
        revision,
        present: keys.iter().map(|key| key.node).collect(),
        keys,
    }
}

/// Goal: no lease outlives its end for this node, whichever news is lost. Method: the end shows in
/// no watch, only in a read, or in the next incarnation.
#[test]
fn a_lease_ends_although_its_events_are_lost() {
    let events = Events::default();
    let mut nodes = Nodes::new(node(1), Timing::default());
    nodes.put(&key(1, 10, 10), at(0), &events);
    nodes.put(&key(2, 21, 21), at(0), &events);
    let older = leases(20, &[]);
    assert!(!nodes.looked(&older, at(100), &events), "from before it");
    assert!(nodes.standing.contains_key(&node(2)));
    assert!(nodes.looked(&leases(25, &[]), at(200), &events));
    assert!(!nodes.standing.contains_key(&node(2)));
    assert!(!nodes.put(&key(2, 31, 31), at(300), &events));
    assert!(nodes.put(&key(2, 41, 41), at(400), &events), "31 is over");
    assert!(!nodes.put(&key(2, 41, 45), at(500), &events), "renewed");
    // A lease of a later format is there, although this node cannot read it.
    let unreadable = Leases {
        keys: Vec::new(),
        ..leases(50, &[key(2, 41, 50)])
    };
    assert!(!nodes.looked(&unreadable, at(600), &events));
    // Only a renewal makes a node younger, however often it is read.
    nodes.looked(&leases(60, &[key(2, 41, 45)]), at(900), &events);
    assert_eq!(nodes.seen()[&node(2)], at(500));
}

/// Each node watches the renewals of the nodes that it observes, and each node has three observers.
#[test]
fn few_watch_a_node() {
    const NODES: u128 = 12;
    let events = Events::default();
    let mut watches = BTreeMap::<NodeId, usize>::new();
    for me in 1..=NODES {
        let mut nodes = Nodes::new(node(me), Timing::default());
        for of in 1..=NODES {
            nodes.put(&key(of, of as u64, of as u64), at(0), &events);
        }
        let watched = nodes.watched().expect("they have changed");
        assert!(watched.contains(&node(me)), "its own answers may be lost");
        for of in watched {
            *watches.entry(of).or_default() += 1;
        }
        assert_eq!(nodes.watched(), None);
        nodes.deleted(node(me % NODES + 1), 99, at(0), &events);
        assert!(nodes.watched().is_some());
    }
    assert!(watches.values().all(|count| *count == 4), "{watches:?}");
}

/// Goal: the node that holds too many hands one over a minute later, which has a replica in sync
/// elsewhere; one that comes back stays. Method: three volumes, of which one has no other replica
/// in sync, and another lacks one.
#[test]
fn a_node_that_holds_too_many() {
    let other = ReplicaId(Uuid::from_u128(201));
    let volume = |number: u128| VolumeId(Uuid::from_u128(number));
    let record = |holder: u128, incarnation: u64, others: &str| {
        json!({
            "epoch": 4, "serving": 4, "revision": 7, "holder": node(holder).0,
            "incarnation": incarnation,
            "members": [
                { "id": REPLICA.0, "node": node(1).0, "state": { "state": "in_sync" } },
                { "id": other.0, "node": node(if others == "here" { 1 } else { 2 }).0,
                  "state": { "state": if others == "out" { "out" } else { "in_sync" } } },
            ],
        })
        .to_string()
    };
    let new = |elsewhere: u128| {
        let mut bench = Rig::new();
        let engine = Box::new(bench.engine.clone());
        bench.volumes = Volumes::new(node(1), engine).with_balance(true);
        for (id, others) in [(100, "here"), (101, "out"), (102, "there"), (103, "there")] {
            let (holder, incarnation) = if id == elsewhere { (2, 11) } else { (1, 3) };
            let record = record(holder, incarnation, others);
            let update = bench
                .volumes
                .update(volume(id), Revision(20), record.as_bytes());
            assert_eq!(update, Ok(()));
            let mut publication = Publication::new(volume(id));
            for number in [1, 2] {
                publication.slots.assign(node(number));
            }
            bench.volumes.publish(volume(id), Some(&publication));
        }
        bench.run(0);
        bench.run(200);
        let held = (100..=103).filter(|id| *id != elsewhere);
        for (id, call) in held.zip(bench.engine.calls()) {
            let number = call
                .strip_prefix("take ")
                .expect("taken")
                .parse()
                .expect("a number");
            let (volume, answer) = (volume(id), Answer::Opened { number });
            bench.volumes.report(Report { volume, answer });
        }
        bench.run(220);
        bench
    };
    let turns = |bench: &mut Rig, from: u32, to: u32| {
        for ms in (from..to).step_by(500) {
            bench.volumes.balance(at(ms), &bench.nodes);
        }
        bench.volumes.in_state(HoldingState::Leaving)
    };
    let mut bench = new(0);
    assert_eq!(bench.volumes.in_state(HoldingState::Holding).len(), 4);
    assert_eq!(turns(&mut bench, 500, 60_000), []);
    let leaving = turns(&mut bench, 60_000, 64_000);
    assert_eq!(
        leaving,
        [volume(102)],
        "both replicas are in sync, at two nodes"
    );
    assert_eq!(turns(&mut bench, 64_000, 200_000), leaving, "one at a time");

    // Nothing is looked at while etcd is away. The minute begins anew.
    let mut away = new(0);
    assert_eq!(turns(&mut away, 500, 50_000), []);
    assert_eq!(turns(&mut away, 200_000, 259_000), []);
    assert_eq!(turns(&mut away, 259_000, 264_000), [volume(102)]);

    // A volume that an operator moved here stays.
    let mut kept = new(0);
    kept.volumes.keep(volume(102), at(400));
    assert_eq!(turns(&mut kept, 500, 64_000), [volume(103)]);

    // The other node does not become the holder: it gets no other volume, unless that one is gone.
    let mut failed = new(0);
    assert_eq!(turns(&mut failed, 500, 64_000), [volume(102)]);
    for ms in [64_000, 66_500, 69_500] {
        failed.run(ms);
    }
    let calls = failed.engine.calls();
    let [close, abort, take] = &calls[..] else {
        panic!("{calls:?}");
    };
    assert!(close.starts_with("close") && abort == "abort");
    let number = take.strip_prefix("take ").expect("taken");
    let number = number.parse().expect("a number");
    failed.volumes.report(Report {
        volume: volume(102),
        answer: Answer::Opened { number },
    });
    failed.run(69_510);
    assert_eq!(turns(&mut failed, 70_000, 200_000), []);
    failed.volumes.deleted(volume(102), Revision(9999));
    assert_eq!(turns(&mut failed, 200_000, 264_000), [volume(103)]);

    let mut few = new(103);
    assert_eq!(few.volumes.in_state(HoldingState::Holding).len(), 3);
    assert_eq!(turns(&mut few, 500, 64_000), [volume(102)]);
    // A lone node has no other one; a drained one is none.
    let mut alone = new(0);
    let mut drained = NodeKey::default();
    drained.drain = true;
    alone.nodes.describe(node(2), Some(drained));
    assert_eq!(turns(&mut alone, 500, 200_000), []);
}
