//! Tests of a refused connection: its receives are flushed before the event arrives, and the reason
//! is still reported.

use std::time::{Duration, Instant};

use nacre_nvmf::transport::{Closed, HostEvent, HostTransport};
use nacre_nvmf_wire::rdma::AcceptData;
use nacre_transport_rdma_verbs::{CmEventKind, ConnParams};
use zerocopy::IntoBytes;

use super::rig::{ENTRIES, Options, TestRig};
use crate::{RdmaHost, RdmaHostOptions};

/// A host whose connection request is still unanswered.
struct Dialling {
    host: RdmaHost,
    rig: TestRig,
    started: Instant,
    events: Vec<HostEvent>,
}

impl Dialling {
    fn new(connection_retries: u32) -> Self {
        let rig = TestRig::new(Options::default());
        let host = rig.dial(RdmaHostOptions {
            connection_retries,
            ..TestRig::host_options()
        });
        let mut dialling = Self {
            host,
            rig,
            started: Instant::now(),
            events: Vec::new(),
        };
        (0..6).for_each(|_| dialling.turn());
        assert!(dialling.host.qp().is_some() && dialling.events.is_empty());
        dialling
    }

    /// The target has none.
    fn turn(&mut self) {
        let passed = self.rig.clock.now().since(nacre_reactor::Nanos::ZERO);
        self.rig.hosts.turn(self.started + passed);
        self.poll();
    }

    fn poll(&mut self) {
        let now = self.rig.clock.now();
        self.host.poll(now, &mut self.events, 64);
    }

    /// The receives come back, and the host sees that, before the event arrives.
    fn flushed_then(&mut self, event: CmEventKind) {
        let qp = self.host.qp().expect("a queue pair");
        let id = self.rig.fabric.id_of(qp).expect("its connection");
        self.rig.fabric.flush(qp);
        (0..3).for_each(|_| self.poll());
        assert!(self.events.is_empty(), "too early: {:?}", self.events);
        self.rig.fabric.inject_event(id, event);
        (0..6).for_each(|_| self.turn());
    }

    fn why(&self) -> &str {
        match &self.events[..] {
            [HostEvent::Closed(Closed::Broken(why))] => why,
            [HostEvent::Ready, HostEvent::Closed(Closed::Broken(why))] => why,
            other => panic!("{other:?}"),
        }
    }
}

fn rejected() -> CmEventKind {
    CmEventKind::Rejected {
        status: 8,
        private_data: Default::default(),
    }
}

/// Goal: the caller learns that the connection was refused, not that its receives were flushed.
#[test]
fn a_refusal_is_reported_as_such() {
    let mut dialling = Dialling::new(0);
    dialling.flushed_then(rejected());
    let why = dialling.why();
    assert!(why.contains("refused: nothing listens there"), "{why}");
}

/// Goal: the attempts that were asked for are made.
#[test]
fn another_attempt_follows() {
    let mut dialling = Dialling::new(1);
    dialling.flushed_then(rejected());
    assert!(dialling.events.is_empty(), "{:?}", dialling.events);
    dialling.rig.clock.advance(Duration::from_secs(1));
    (0..6).for_each(|_| dialling.turn());
    let qp = dialling.host.qp();
    assert!(qp.is_some(), "another queue pair");
    dialling.flushed_then(rejected());
    let why = dialling.why();
    assert!(why.contains("refused: nothing listens there"), "{why}");
}

/// Goal: a connection that ended in the moment in which it was made is not waited for.
#[test]
fn connected_for_a_moment() {
    let mut dialling = Dialling::new(0);
    let mut params = ConnParams::default();
    let accept = AcceptData::new(ENTRIES);
    let bytes = accept.as_bytes().iter().copied();
    params.private_data.extend(bytes);
    dialling.flushed_then(CmEventKind::Established { params });
    let why = dialling.why();
    assert!(why.contains("IBV_WC_WR_FLUSH_ERR"), "{why}");
}

/// Goal: dialers come and go, as controllers do that fail and are recreated, and leave nothing
/// behind. Method: many dialers, whose queue pairs reach different stages, and are closed or just
/// dropped, before or after their dialer.
#[test]
fn closed_dialers_leave_nothing_behind() {
    let rig = Dialling::new(0).rig;
    let known = || {
        let domains = rig.hosts.domains();
        let registered = domains.iter().map(|domain| domain.registrations().regions);
        (rig.hosts.arenas().len(), registered.sum::<u64>())
    };
    let turn = || rig.hosts.turn(Instant::now());
    turn();
    let before = known();
    assert_eq!(before, (1, 1), "that of the rig's own dialer");
    for round in 0..60 {
        let dialer = rig.hosts.dialer(2, ENTRIES).unwrap();
        let mut host = dialer
            .connect(rig.address, TestRig::host_options())
            .unwrap();
        let mut dialer = Some(dialer);
        if round % 3 == 0 {
            dialer = None;
        }
        for _ in 0..round % 7 {
            turn();
            host.poll(rig.clock.now(), &mut Vec::new(), 64);
        }
        assert_eq!(known(), (2, 2), "round {round}");
        if round % 2 == 0 {
            host.close();
        }
        drop(host);
        drop(dialer);
        turn();
        assert_eq!(known(), before, "round {round}");
    }
    assert_eq!(rig.fabric.queue_pairs(), [] as [u32; 0]);
}
