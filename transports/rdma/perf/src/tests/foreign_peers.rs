//! Tests of peers that are other programs, have other versions, or are silent.

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use nacre_transport_rdma_verbs::sim::attributes;
use nacre_transport_rdma_verbs::{
    Access, CmEvent, CmEventKind, CmId, CmOptions, ConnParams, ConnectionManager, QpCaps, Queues,
};

use super::rig::{CLIENT, PATIENCE, Rig, SERVER, network};
use crate::wire::{Refusal, Reject, Request};
use crate::*;

/// A peer implemented by the test.
struct Raw {
    cm: Box<dyn ConnectionManager>,
    queues: Queues,
}

impl Raw {
    fn new(
        rig: &nacre_transport_rdma_verbs::sim::Fabric,
        device: nacre_transport_rdma_verbs::DeviceId,
    ) -> Self {
        let provider = rig.provider();
        let domain = provider
            .device(device)
            .unwrap()
            .protection_domain(Access::Local)
            .unwrap();
        Self {
            cm: provider.connection_manager().unwrap(),
            queues: Queues::new(&domain, 64, None).unwrap(),
        }
    }

    fn next(&mut self) -> CmEvent {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(event) = self.cm.next_event().unwrap() {
                return event;
            }
            assert!(Instant::now() < until, "an event comes in time");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn caps() -> QpCaps {
        QpCaps {
            max_send_wr: 4,
            max_recv_wr: 4,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
        }
    }

    /// Sends a request with this private data; returns the answer.
    fn ask(&mut self, to: SocketAddr, private_data: &[u8]) -> (CmId, CmEventKind) {
        let options = CmOptions::default();
        let id = self
            .cm
            .resolve_address(Some(CLIENT), to, PATIENCE, options)
            .unwrap();
        assert!(matches!(
            self.next().kind,
            CmEventKind::AddressResolved { .. }
        ));
        self.cm.resolve_route(id, PATIENCE).unwrap();
        assert_eq!(self.next().kind, CmEventKind::RouteResolved);
        let endpoint = self
            .queues
            .create_qp(&mut *self.cm, id, Self::caps())
            .unwrap();
        // The queue pair must live until the end of the test.
        std::mem::forget(endpoint);
        let params = ConnParams {
            private_data: private_data.iter().copied().collect(),
            rnr_retry_count: 7,
            ..ConnParams::default()
        };
        self.cm.connect(id, &params).unwrap();
        (id, self.next().kind)
    }

    fn refused(&mut self, to: SocketAddr, private_data: &[u8]) -> Reject {
        match self.ask(to, private_data).1 {
            CmEventKind::Rejected { private_data, .. } => Reject::parse(&private_data).unwrap(),
            kind => panic!("{kind:?}"),
        }
    }
}

fn request(peer_timeout_ms: u32) -> Vec<u8> {
    let terms = wire::SessionParameters {
        op: Op::Read,
        measure: Measure::Bandwidth,
        verify: false,
        queue_pairs: 1,
        depth: 1,
        message_bytes: 64,
        seed: 0,
        peer_timeout_ms,
    };
    Request::Control(terms).to_bytes()
}

/// Goal: a server answers every request (of other programs, other versions, too short, of unknown
/// sessions), and continues.
#[test]
fn foreign_clients_get_an_answer() {
    let rig = Rig::new();
    let mut raw = Raw::new(&rig.fabric, rig.client_device);
    let mut newer = request(1000);
    newer[4] = 2;
    assert_eq!(
        raw.refused(rig.address, &newer),
        Reject::limit(Refusal::Version, 2, 1)
    );
    let (_, why) = rig.refused();
    assert!(
        why.unwrap()
            .to_string()
            .contains("it is of version 2, this program speaks version 1")
    );
    for bytes in [
        &b""[..],
        b"GET / HTTP/1.1",
        &request(1000)[..20],
        &request(0),
    ] {
        assert_eq!(
            raw.refused(rig.address, bytes),
            Reject::new(Refusal::Malformed)
        );
    }
    let data = Request::Data {
        session: 1,
        index: 0,
    }
    .to_bytes();
    assert_eq!(
        raw.refused(rig.address, &data),
        Reject::new(Refusal::NoSession)
    );
    rig.run(Test::default()).unwrap();
}

/// Goal: queue pairs with an invalid or used index are refused. A client that is silent afterwards
/// is disconnected after its own timeout, and the next one is served.
#[test]
fn a_silent_client() {
    let rig = Rig::new();
    let mut raw = Raw::new(&rig.fabric, rig.client_device);
    let began = Instant::now();
    let (_, kind) = raw.ask(rig.address, &request(5000));
    let CmEventKind::Established { params } = kind else {
        panic!("{kind:?}")
    };
    let session = wire::Accept::parse(&params.private_data).unwrap().session;
    let data = |index| Request::Data { session, index }.to_bytes();
    assert_eq!(
        raw.refused(rig.address, &data(1)),
        Reject::new(Refusal::Index)
    );
    assert!(matches!(
        raw.ask(rig.address, &data(0)).1,
        CmEventKind::Established { .. }
    ));
    assert_eq!(
        raw.refused(rig.address, &data(0)),
        Reject::new(Refusal::Index)
    );
    assert_eq!(
        raw.refused(rig.address, &request(5000)),
        Reject::new(Refusal::Busy)
    );
    let error = rig.ended().unwrap_err();
    assert!(matches!(error, PerfError::Silent { .. }), "{error}");
    assert!(
        error
            .to_string()
            .contains("has said nothing for 5000ms (measuring)"),
        "{error}"
    );
    assert!(began.elapsed() >= Duration::from_millis(5000) && began.elapsed() < PATIENCE);
    rig.run(Test::default()).unwrap();
}

/// Goal: a client that disconnects between its connections ends its session immediately.
#[test]
fn a_client_disconnects_while_connecting() {
    let rig = Rig::new();
    let mut raw = Raw::new(&rig.fabric, rig.client_device);
    let (id, _) = raw.ask(rig.address, &request(60_000));
    raw.cm.destroy(id);
    let error = rig.ended().unwrap_err();
    assert!(
        matches!(
            error,
            PerfError::Disconnected {
                during: "connecting",
                ..
            }
        ),
        "{error}"
    );
    rig.run(Test::default()).unwrap();
}

/// Runs a client against a server of the test, which answers a request with `answer`.
fn against(answer: impl FnOnce(&mut Raw, CmId) + Send + 'static, timeout: Duration) -> PerfError {
    let (fabric, [server, _]) = network(attributes("sim_server"), attributes("sim_client"));
    let mut raw = Raw::new(&fabric, server);
    let address = SocketAddr::new(SERVER, 77);
    raw.cm.listen(address, 4, CmOptions::default()).unwrap();
    let (done, until) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        let id = raw.next().id;
        answer(&mut raw, id);
        // Keeps the connection, and sends nothing.
        let _ = until.recv();
    });
    let options = ClientOptions {
        source: Some(CLIENT),
        cm_timeout: timeout,
        peer_timeout: timeout,
        ..ClientOptions::new(address, Test::default())
    };
    let outcome = measure(
        &*fabric.provider(),
        &options,
        &AtomicBool::new(false),
        &mut |_| (),
    );
    drop(done);
    thread.join().unwrap();
    outcome.unwrap_err()
}

fn accept(raw: &mut Raw, id: CmId, private_data: &[u8]) {
    let endpoint = raw.queues.create_qp(&mut *raw.cm, id, Raw::caps()).unwrap();
    std::mem::forget(endpoint);
    let params = ConnParams {
        private_data: private_data.iter().copied().collect(),
        ..ConnParams::default()
    };
    raw.cm.accept(id, &params).unwrap();
}

/// Goal: a server that is another program, or has another version, is distinguished from a failed
/// one.
#[test]
fn foreign_servers_are_recognized() {
    let patience = Duration::from_secs(20);
    let error = against(|raw, id| accept(raw, id, b"NVMe"), patience);
    assert!(
        error
            .to_string()
            .contains("is not a `nacre rdma perf` of the same version: it does not begin"),
        "{error}"
    );
    let mut newer = wire::Accept::default().to_bytes();
    newer[4] = 9;
    let error = against(move |raw, id| accept(raw, id, &newer), patience);
    assert!(error.to_string().contains("it is of version 9"), "{error}");
    let error = against(|raw, id| raw.cm.reject(id, b"no").unwrap(), patience);
    assert!(matches!(error, PerfError::Foreign { .. }), "{error}");
    let error = against(|raw, id| raw.cm.destroy(id), patience);
    assert!(
        matches!(error, PerfError::NobodyListens { status: 28, .. }),
        "{error}"
    );
}

/// Goal: the client gives up a server that does not answer, or stops answering, in time.
#[test]
fn silent_servers() {
    let timeout = Duration::from_millis(3000);
    let error = against(|_, _| (), timeout).to_string();
    assert!(
        error.starts_with("RDMA connection timeout after 3000ms in CONNECT"),
        "{error}"
    );
    let good = wire::Accept::default().to_bytes();
    // The second connection gets no answer.
    let error = against(move |raw, id| accept(raw, id, &good), timeout).to_string();
    assert!(
        error.starts_with("RDMA connection timeout after 3000ms in CONNECT"),
        "{error}"
    );
}

/// Goal: an acceptance with smaller resources than the test needs is refused.
#[test]
fn invalid_acceptances() {
    let error = against(
        |raw, id| {
            accept(raw, id, &wire::Accept::default().to_bytes());
            let next = loop {
                let event = raw.next();
                if matches!(event.kind, CmEventKind::ConnectRequest { .. }) {
                    break event.id;
                }
            };
            accept(raw, next, &wire::Accept::default().to_bytes());
        },
        Duration::from_secs(20),
    );
    assert!(
        error
            .to_string()
            .contains("an acceptance with less room than the test needs"),
        "{error}"
    );
}
