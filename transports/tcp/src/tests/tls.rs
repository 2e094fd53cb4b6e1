//! Tests of connections over TLS on real sockets: handshakes, their limits and threads, and the
//! close.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use nacre_nvmf::tls::{Alert, Identity, PskKey, PskSource, TlsFailure};
use nacre_nvmf::transport::conformance::Rig;
use nacre_nvmf::transport::{Closed, HostTransport, Plug, TlsPolicy};
use nacre_reactor::{Clock, EventSet, Events, Helper, Idle, Interest};
use nacre_transport_tls::{Handshake, Role, Session};
use parking_lot::Mutex;
use zerocopy::IntoBytes;

use super::conformance::{TcpRig, psk, tls};
use super::sockets::{Server, ic_req, ready};
use super::turns::{R2T_END, write_command};
use crate::{TcpConfig, TcpHostOptions, TcpPlug, connect_host};

const PATIENCE: Duration = Duration::from_secs(20);

/// One PSK for all hosts, and the failures that were reported.
#[derive(Default)]
struct Source {
    failures: Mutex<Vec<TlsFailure>>,
    /// Dropped at the next look for a key.
    plug: Mutex<Option<TcpPlug>>,
}

impl PskSource for Source {
    fn psks(&self, _identity: &Identity) -> Vec<Arc<dyn PskKey>> {
        drop(self.plug.lock().take());
        vec![Arc::new(psk())]
    }

    fn failed(&self, failure: TlsFailure) {
        self.failures.lock().push(failure);
    }
}

fn server(config: TcpConfig, tls: TlsPolicy) -> (Server, Arc<Source>) {
    let source = Arc::new(Source::default());
    let psks = Arc::clone(&source) as _;
    let options = TcpHostOptions::default();
    let rig = TcpRig::with_psks(config, options, "127.0.0.1:0", Some(tls), psks);
    (Server::of(rig), source)
}

fn handshake() -> Handshake {
    let tls = tls();
    let role = Role::Host {
        identity: tls.identity,
        psk: tls.psk,
        derivation: tls.derivation,
    };
    Handshake::new(role).unwrap()
}

/// A connection of a host after its handshake.
fn secure(address: SocketAddr) -> (TcpStream, Session) {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut handshake = handshake();
    loop {
        socket.write_all(&handshake.take_output()).unwrap();
        let mut bytes = [0; 4096];
        let count = socket.read(&mut bytes).unwrap();
        let outcome = handshake.received(&bytes[..count]).unwrap();
        socket.write_all(&handshake.take_output()).unwrap();
        if let Some(outcome) = outcome {
            return (socket, outcome.session);
        }
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "never happens: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Goal: a host that closes its direction of TLS, and not the socket, is gone at once. Method: the
/// close_notify comes alone, and behind data in the same segment.
#[test]
fn close_notify_ends_a_connection() {
    for with_data in [false, true] {
        let (mut server, _) = server(TcpConfig::default(), TlsPolicy::Require);
        let (mut socket, mut session) = secure(server.rig.address);
        server.until("it is open", |server| server.opened == 1);
        let counts = server.rig.plug.counts().tls.unwrap();
        assert_eq!(counts.connections, 1);
        assert_eq!(counts.handshakes[0], ("succeeded", 1));
        if with_data {
            session.seal(&[IoSlice::new(ic_req().as_bytes())]).unwrap();
        }
        session.close(Alert::CLOSE_NOTIFY);
        socket.write_all(session.ciphertext()).unwrap();
        server.until("it is closed", |server| server.closed.len() == 1);
        assert_eq!(server.closed, [Closed::Peer]);
        let counts = server.rig.plug.counts().tls.unwrap();
        assert_eq!(counts.connections, 0);
    }
}

/// Goal: a host that ignores an R2T over TLS is closed after one `stall_timeout`, and not sooner.
/// Method: the time after the R2T is virtual.
#[test]
fn an_ignored_r2t_over_tls() {
    const STALL: Duration = Duration::from_secs(30);
    let config = TcpConfig {
        stall_timeout: STALL,
        ..TcpConfig::default()
    };
    let (mut server, _) = server(config, TlsPolicy::Require);
    let (mut socket, mut session) = secure(server.rig.address);
    socket
        .set_read_timeout(Some(Duration::from_millis(1)))
        .unwrap();
    let before = server.rig.now();
    let bytes = [ic_req().as_bytes(), &write_command()].concat();
    session.seal(&[IoSlice::new(&bytes)]).unwrap();
    socket.write_all(session.ciphertext()).unwrap();
    let (mut place, mut count) = ([0; R2T_END], 0);
    server.until("ICResp and R2T", |_| {
        if let Ok(received) = socket.read(session.room()) {
            session.received(received);
        }
        let mut rest = [IoSliceMut::new(&mut place[count..])];
        count += session.read(&mut rest).unwrap();
        count == R2T_END
    });
    server.assert_stalls(before, STALL);
}

/// Goal: a host that begins a handshake and falls silent is closed in time, with its reason; so is
/// one that sends nothing. Method: the first byte of a ClientHello, then more of it, and nothing.
#[test]
fn a_silent_handshake_is_closed_in_time() {
    let config = TcpConfig {
        icreq_timeout: Duration::from_millis(200),
        ..TcpConfig::default()
    };
    let (server, source) = server(config, TlsPolicy::Require);
    let hello = handshake().take_output();
    for (nth, sent) in [0, 1, 40, hello.len() - 1].into_iter().enumerate() {
        let mut socket = server.raw();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.write_all(&hello[..sent]).unwrap();
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer);
        assert!(
            answer.is_empty(),
            "closed without a word after {sent} bytes"
        );
        let counts = || server.rig.plug.counts().tls.unwrap();
        until("it is counted", || {
            counts().handshakes[1].1 == nth as u64 + 1
        });
        let late = counts()
            .failures
            .into_iter()
            .find(|(kind, _)| *kind == "late");
        assert_eq!(late, Some(("late", nth as u64 + 1)));
    }
    let failures = source.failures.lock();
    assert_eq!(failures.len(), 1, "one line a minute: {failures:?}");
    assert_eq!(failures[0].reason, "no TLS handshake in time");
}

/// Goal: an address whose handshakes fail has ten a second, and the log and the events one line for
/// each reason.
#[test]
fn failures_are_limited_and_reported() {
    let (server, source) = server(TcpConfig::default(), TlsPolicy::Require);
    let refused = |cause: &str| {
        let counts = server.rig.plug.counts().refused;
        counts.iter().find(|(name, _)| *name == cause).unwrap().1
    };
    for tried in 1..=30 {
        let mut socket = server.raw();
        // A record of a handshake, whose message is no ClientHello.
        let _ = socket.write_all(&[22, 3, 1, 0, 5, 2, 0, 0, 1, 0]);
        until("it is refused", || {
            refused("tls") + refused("tls_limit") == tried
        });
    }
    // The machine may take more than a second for it.
    assert!(refused("tls_limit") > 0 && refused("tls") >= 10);
    let mut socket = server.raw();
    socket.write_all(ic_req().as_bytes()).unwrap();
    until("it is refused", || source.failures.lock().len() == 3);
    let failures = source.failures.lock();
    let reasons: Vec<&str> = failures.iter().map(|one| one.reason.as_str()).collect();
    assert!(
        reasons[0].contains("ClientHello (alert unexpected_message)"),
        "{reasons:?}"
    );
    assert!(reasons[1].contains("within a second"), "{reasons:?}");
    assert!(reasons[2].contains("does not use TLS"), "{reasons:?}");
    let kinds = server.rig.plug.counts().tls.unwrap().failures;
    let count = |kind: &str| kinds.iter().find(|(name, _)| *name == kind).unwrap().1;
    assert_eq!(count("malformed") + count("clear"), refused("tls"));
    assert_eq!(count("clear"), 1);
    assert!(
        failures
            .iter()
            .all(|one| one.times == 1 && one.names.is_none())
    );
}

/// Goal: more handshakes of one address than may be in flight wait, and are served. Method: as many
/// as may be in flight begin and do not go on; others wait until these leave.
#[test]
fn handshakes_wait_for_their_turn() {
    const IN_FLIGHT: usize = 2;
    let config = TcpConfig {
        max_pending_connections: 4 * IN_FLIGHT,
        ..TcpConfig::default()
    };
    let (server, _) = server(config, TlsPolicy::Require);
    let address = server.rig.address;
    let slow: Vec<TcpStream> = (0..IN_FLIGHT)
        .map(|_| {
            let mut socket = TcpStream::connect(address).unwrap();
            socket.write_all(&[22]).unwrap();
            socket
        })
        .collect();
    std::thread::sleep(Duration::from_millis(50));
    let waiting: Vec<_> = (0..2 * IN_FLIGHT)
        .map(|_| std::thread::spawn(move || secure(address)))
        .collect();
    std::thread::sleep(Duration::from_millis(50));
    let handshakes = || server.rig.plug.counts().tls.unwrap().handshakes;
    assert_eq!(handshakes()[0], ("succeeded", 0));
    drop(slow);
    let _served: Vec<_> = waiting.into_iter().map(|one| one.join().unwrap()).collect();
    let count = |name| {
        handshakes()
            .into_iter()
            .find(|(one, _)| *one == name)
            .unwrap()
            .1
    };
    // A host is done before the target has read its last message.
    until("all are served", || {
        count("succeeded") == 2 * IN_FLIGHT as u64
    });
    assert_eq!(count("limited"), 0);
}

/// Goal: the report of a failure names the host that the identity names.
#[test]
fn a_failure_names_the_host() {
    struct NoKey(Mutex<Vec<TlsFailure>>);
    impl PskSource for NoKey {
        fn psks(&self, _identity: &Identity) -> Vec<Arc<dyn PskKey>> {
            Vec::new()
        }
        fn failed(&self, failure: TlsFailure) {
            self.0.lock().push(failure);
        }
    }
    let source = Arc::new(NoKey(Mutex::default()));
    let psks = Arc::clone(&source) as _;
    let (config, options) = (TcpConfig::default(), TcpHostOptions::default());
    let policy = Some(TlsPolicy::Allow);
    let rig = TcpRig::with_psks(config, options, "127.0.0.1:0", policy, psks);
    let mut socket = TcpStream::connect(rig.address).unwrap();
    socket.write_all(&handshake().take_output()).unwrap();
    until("it is reported", || !source.0.lock().is_empty());
    let (host, subsystem) = source.0.lock()[0].names.clone().unwrap();
    let identity = tls().identity;
    assert_eq!((host, subsystem), (identity.host, identity.subsystem));
}

/// Goal: the last owner of a plug may be its accepting thread. Method: the plug goes while the
/// thread looks for a key, as with a target that ends meanwhile.
#[test]
fn the_accepting_thread_drops_the_plug() {
    struct Last(Mutex<Option<TcpPlug>>, mpsc::Sender<()>);
    impl PskSource for Last {
        fn psks(&self, _identity: &Identity) -> Vec<Arc<dyn PskKey>> {
            drop(self.0.lock().take());
            // Not reached if the thread waits for itself.
            let _ = self.1.send(());
            Vec::new()
        }
    }
    let (sender, dropped) = mpsc::channel();
    let source = Arc::new(Last(Mutex::new(None), sender));
    let psks = Arc::clone(&source) as _;
    let (config, options) = (TcpConfig::default(), TcpHostOptions::default());
    let policy = Some(TlsPolicy::Allow);
    let rig = TcpRig::with_psks(config, options, "127.0.0.1:0", policy, psks);
    let address = rig.address;
    *source.0.lock() = Some(rig.plug);
    let mut socket = TcpStream::connect(address).unwrap();
    socket.write_all(&handshake().take_output()).unwrap();
    dropped.recv_timeout(PATIENCE).expect("the plug is gone");
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut rest = Vec::new();
    // An alert or a reset: in any case the end.
    let _ = socket.read_to_end(&mut rest);
    until("no listener is left", || {
        TcpStream::connect(address).is_err()
    });
}

/// Goal: a connection in its handshake is evicted no sooner than others. Method: an address with
/// three connections in clear, and one with a handshake that is the oldest of all.
#[test]
fn eviction_is_fair_to_handshakes() {
    let config = TcpConfig {
        max_pending_connections: 4,
        ..TcpConfig::default()
    };
    let (mut server, _) = server(config, TlsPolicy::Allow);
    server.accepts_connect = false;
    let address = server.rig.address;
    let connect = |from: &str| {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
        let socket = socket.unwrap();
        let from: SocketAddr = format!("{from}:0").parse().unwrap();
        socket.bind(&from.into()).unwrap();
        socket.connect(&address.into()).unwrap();
        TcpStream::from(socket)
    };
    let mut slow = connect("127.0.0.1");
    let mut hello = handshake();
    let bytes = hello.take_output();
    slow.write_all(&bytes[..1]).unwrap();
    let mut many: Vec<TcpStream> = (0..3).map(|_| connect("127.0.0.2")).collect();
    for socket in &mut many {
        socket.write_all(&ic_req().as_bytes()[..1]).unwrap();
    }
    server.until("they have a core", |server| server.opened == 3);
    std::thread::sleep(Duration::from_millis(1100));
    let mut late = connect("127.0.0.3");
    late.write_all(&ic_req().as_bytes()[..1]).unwrap();
    server.until("one made room", |server| server.opened == 4);
    assert_eq!(server.closed, [Closed::Local]);
    assert_eq!(server.rig.plug.counts().refused[3], ("tls", 0));
    // The handshake goes on.
    slow.write_all(&bytes[1..]).unwrap();
    slow.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut answer = [0; 1];
    slow.read_exact(&mut answer).unwrap();
    assert_eq!(answer, [22], "ServerHello");
}

/// Goal: the thread that polls a host computes nothing for its handshake, and is woken for each
/// step of it. Method: a helper that does not run yet.
#[test]
fn a_host_shakes_hands_on_the_helper() {
    let (mut server, _) = server(TcpConfig::default(), TlsPolicy::Require);
    let helper = Arc::new(Helper::new("test-tls", 8));
    let mut options = TcpHostOptions {
        tls: Some(tls()),
        ..TcpHostOptions::default()
    };
    options.tls.as_mut().unwrap().helper = Some(Arc::clone(&helper));
    let clock = Clock::real();
    let mut host = connect_host(server.rig.address, options).unwrap();
    until("a job waits", || {
        assert!(!ready(&mut host, &clock));
        helper.waiting() == 1
    });
    for _ in 0..20 {
        assert!(!ready(&mut host, &clock));
        server.turn();
    }
    assert_eq!((helper.waiting(), server.opened), (1, 0));
    helper.start().unwrap();
    // An epoll in an epoll is readable when it has something.
    let outer = EventSet::new().unwrap();
    outer
        .add(host.wake_fd().unwrap(), 1, Interest::READ)
        .unwrap();
    let mut list = Events::with_capacity(1);
    let succeeded = || server.rig.plug.counts().tls.unwrap().handshakes[0].1 == 1;
    until("the handshake", || {
        // Polled only when it asks for that or is woken: a lost wake-up is the end of it.
        let is_busy = host.arm(clock.now()) == Idle::Busy;
        let patience = Duration::from_millis(if is_busy { 0 } else { 50 });
        let is_woken = outer.wait(&mut list, patience).unwrap() == 1;
        if is_busy || is_woken {
            assert!(!ready(&mut host, &clock));
        }
        succeeded()
    });
    server.until("it is ready", |_| ready(&mut host, &clock));
}
