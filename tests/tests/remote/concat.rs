//! Tests of remote bdevs over TLS whose PSK an authentication in clear has made (secure channel
//! concatenation).

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nacre_bdev::{Bdev, Status};
use nacre_nvmf::auth::{FixedKeys, Hash, KeySource, Keys, Offer, Secret, SystemRandom};
use nacre_nvmf::host::{Connector, GeneratedPsk, HostAuth, HostOptions};
use nacre_nvmf::subsystems::HostSecrets;
use nacre_nvmf::tls::{Derivation, Identity, PskKey, PskSource};
use nacre_nvmf_remote::State;
use nacre_nvmf_wire::tcp::Digests;
use nacre_reactor::Helper;
use nacre_tests::target::{SUBNQN, TestTarget, nqn};
use nacre_transport_connect::{Concatenated, TcpConnector};
use nacre_transport_tls::{Handshake, Role, Session, SessionCounts};

use super::lifecycle::disk;
use super::rig::{AttachedRemote, ENTRIES, PATIENCE, config, options};

/// The first byte of a connection over TLS: the type of a handshake record.
const TLS_RECORD: u8 = 22;
/// Sends of a relay between two KeyUpdates. A session takes 64 KeyUpdates in 1024 records.
const SENDS_PER_UPDATE: u64 = 40;

/// What both ends have of a host with keys in both directions.
struct Host {
    keys: Arc<dyn KeySource>,
    psk: Arc<GeneratedPsk>,
}

impl Host {
    fn new() -> Self {
        let secret = || Secret::generate(Some(Hash::Sha256), &mut SystemRandom).expect("random");
        Self {
            keys: Arc::new(FixedKeys(Keys {
                host: secret(),
                controller: Some(secret()),
            })),
            psk: Arc::new(GeneratedPsk::default()),
        }
    }

    fn options(&self) -> HostOptions {
        let mut options = options();
        options.authentication = Some(HostAuth {
            keys: Arc::clone(&self.keys),
            offer: Offer::default(),
            helper: Arc::new(Helper::at_once()),
        });
        options.concatenation = Some(Arc::clone(&self.psk));
        options
    }

    fn connector(&self, address: SocketAddr) -> Arc<dyn Connector> {
        let concatenated = Concatenated {
            psk: Arc::clone(&self.psk),
            host: options().hostnqn,
            subsystem: nqn(SUBNQN),
            helper: None,
        };
        let connector = TcpConnector::new(address, Digests::NONE, ENTRIES);
        Arc::new(connector.concatenated(Some(concatenated)))
    }

    /// Admits the host to the target, with secure channel concatenation only.
    fn admit(&self, target: &TestTarget) {
        let secrets = HostSecrets {
            keys: Some(Arc::clone(&self.keys)),
            concat: true,
            ..HostSecrets::default()
        };
        let added = target
            .target
            .add_host_with(&nqn(SUBNQN), &options().hostnqn, secrets);
        added.expect("a new host");
    }
}

/// Decrypts and encrypts the connections between hosts and a target, and sends KeyUpdates both
/// ways. Connections in clear pass unchanged.
struct Relay {
    address: SocketAddr,
    counts: Arc<RelayCounts>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Counts of the relay's connections over TLS. Of the arrays, 0 is the host, 1 the target.
#[derive(Default)]
struct RelayCounts {
    secured: AtomicU64,
    /// KeyUpdates that were sent to each.
    sent: [AtomicU64; 2],
    /// KeyUpdates that came from each, as answers.
    answered: [AtomicU64; 2],
}

impl RelayCounts {
    fn answered(&self) -> [u64; 2] {
        [0, 1].map(|of| self.answered[of].load(Ordering::Acquire))
    }
}

impl Relay {
    fn to(target: SocketAddr, psk: &Arc<GeneratedPsk>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        listener.set_nonblocking(true).expect("a listener");
        let address = listener.local_addr().expect("an address");
        let (counts, stop) = (Arc::new(RelayCounts::default()), Arc::default());
        let shared = (Arc::clone(&counts), Arc::clone(&stop), Arc::clone(psk));
        let accept = move || {
            let mut served = Vec::new();
            while !is_set(&shared.1) {
                let Ok((host, _)) = listener.accept() else {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                };
                let (counts, stop, psk) = shared.clone();
                served.push(std::thread::spawn(move || {
                    // The end of a connection is no failure of the relay.
                    let _ = relay(host, target, &psk, &counts, &stop);
                }));
            }
            for thread in served {
                thread.join().expect("a relay");
            }
        };
        Self {
            address,
            counts,
            stop,
            thread: Some(std::thread::spawn(accept)),
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(matches!(ended, Some(Ok(()))) || std::thread::panicking());
    }
}

fn is_set(flag: &AtomicBool) -> bool {
    flag.load(Ordering::Acquire)
}

/// The PSK of the host, whatever the identity.
struct Known(Arc<GeneratedPsk>);

impl PskSource for Known {
    fn psks(&self, _identity: &Identity) -> Vec<Arc<dyn PskKey>> {
        let psk = self.0.get().into_iter();
        psk.map(|psk| Arc::new(psk) as _).collect()
    }
}

/// Relays one connection until it ends, or `stop` is set.
fn relay(
    host: TcpStream,
    target: SocketAddr,
    psk: &Arc<GeneratedPsk>,
    counts: &RelayCounts,
    stop: &AtomicBool,
) -> std::io::Result<()> {
    host.set_nonblocking(false)?;
    let target = TcpStream::connect(target)?;
    let mut first = [0];
    host.peek(&mut first)?;
    let sessions = if first == [TLS_RECORD] {
        let psk_now = psk.get().expect("authentication has made it");
        let as_host = Role::Host {
            identity: psk_now.offer(&options().hostnqn, &nqn(SUBNQN)),
            psk: psk_now,
            derivation: Derivation::Standard,
        };
        let of_target = shake_hands(&target, as_host)?;
        let as_target = Role::Target(Arc::new(Known(Arc::clone(psk))));
        let of_host = shake_hands(&host, as_target)?;
        counts.secured.fetch_add(1, Ordering::AcqRel);
        [Some(of_host), Some(of_target)]
    } else {
        [None, None]
    };
    let [of_host, of_target] = sessions;
    let mut ends = [End::new(host, of_host)?, End::new(target, of_target)?];
    while !is_set(stop) {
        let mut has_moved = false;
        for from in [0, 1] {
            let data = ends[from].receive()?;
            if !data.is_empty() {
                ends[1 - from].send(&data)?;
                has_moved = true;
            }
            let [sent, answered] = ends[from].new_updates();
            counts.sent[from].fetch_add(sent, Ordering::AcqRel);
            counts.answered[from].fetch_add(answered, Ordering::AcqRel);
        }
        if !has_moved {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
    Ok(())
}

fn shake_hands(mut socket: &TcpStream, role: Role) -> std::io::Result<Session> {
    let mut handshake = Handshake::new(role).map_err(std::io::Error::other)?;
    let mut bytes = [0; 4096];
    loop {
        socket.write_all(&handshake.take_output())?;
        let count = socket.read(&mut bytes)?;
        let outcome = handshake.received(&bytes[..count]);
        socket.write_all(&handshake.take_output())?;
        if let Some(outcome) = outcome.map_err(std::io::Error::other)? {
            return Ok(outcome.session);
        }
    }
}

/// The relay's connection with the host or the target.
struct End {
    socket: TcpStream,
    /// `None`: in clear.
    session: Option<Session>,
    counted: SessionCounts,
    /// Number of sends over TLS.
    sends: u64,
}

impl End {
    fn new(socket: TcpStream, session: Option<Session>) -> std::io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket,
            session,
            counted: SessionCounts::default(),
            sends: 0,
        })
    }

    /// The data that is here; an error at the end of the connection.
    fn receive(&mut self) -> std::io::Result<Vec<u8>> {
        let mut data = vec![0; 64 << 10];
        let Some(session) = &mut self.session else {
            let count = available(self.socket.read(&mut data))?;
            data.truncate(count);
            return Ok(data);
        };
        let room = session.room();
        if !room.is_empty() {
            let count = available(self.socket.read(room))?;
            session.received(count);
        }
        let count = session.read(&mut [IoSliceMut::new(&mut data)]);
        data.truncate(count.map_err(std::io::Error::other)?);
        Ok(data)
    }

    /// Sends data, and now and then a KeyUpdate before it. Every second one asks for an answer.
    fn send(&mut self, mut data: &[u8]) -> std::io::Result<()> {
        let Self {
            socket, session, ..
        } = self;
        let Some(session) = session else {
            return write_all(socket, data);
        };
        self.sends += 1;
        if self.sends.is_multiple_of(SENDS_PER_UPDATE) {
            let asks = self.sends.is_multiple_of(2 * SENDS_PER_UPDATE);
            session.update_keys(asks).map_err(std::io::Error::other)?;
        }
        while !data.is_empty() {
            let sealed = session.seal(&[IoSlice::new(data)]);
            data = &data[sealed.map_err(std::io::Error::other)?..];
            write_all(socket, session.ciphertext())?;
            session.discard_ciphertext();
        }
        Ok(())
    }

    /// Numbers of KeyUpdates sent and received since the last call.
    fn new_updates(&mut self) -> [u64; 2] {
        let Some(session) = &self.session else {
            return [0, 0];
        };
        let (now, before) = (session.counts(), self.counted);
        self.counted = now;
        [
            now.key_updates_sent - before.key_updates_sent,
            now.key_updates_received - before.key_updates_received,
        ]
    }
}

/// The result of a read that does not wait; 0: there is nothing.
fn available(read: std::io::Result<usize>) -> std::io::Result<usize> {
    match read {
        Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        other => other,
    }
}

fn write_all(mut socket: &TcpStream, mut data: &[u8]) -> std::io::Result<()> {
    while !data.is_empty() {
        match socket.write(data) {
            Ok(count) => data = &data[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Goal: host and target take KeyUpdates, and answer them, on connections whose PSK authentication
/// in both directions has made. No I/O and no connection is lost. Method: a relay that knows the
/// PSK, terminates TLS on both sides, and changes the keys all the time under I/O.
#[test]
fn key_updates_with_a_generated_psk() {
    const ANSWERS: u64 = 3;
    let ram = disk("ram", 1, 8192);
    let target = TestTarget::start();
    target.add_namespace(ram as Arc<dyn Bdev>);
    let host = Host::new();
    host.admit(&target);
    let relay = Relay::to(target.listen_with_tls(), &host.psk);
    let attached = AttachedRemote::to(config(host.options()), host.connector(relay.address));
    let mut user = attached.user(1);
    let deadline = Instant::now() + PATIENCE;
    let mut round = 0;
    while relay.counts.answered().iter().any(|count| *count < ANSWERS) {
        assert!(Instant::now() < deadline, "{:?}", relay.counts.answered());
        let (lba, fill) = (round % 512 * 8, round as u8);
        assert_eq!(user.write(lba, fill), Status::Ok);
        assert_eq!(user.read(lba), Ok(fill));
        round += 1;
    }
    // The admin queue and the user's I/O queue, once each.
    assert_eq!(relay.counts.secured.load(Ordering::Acquire), 2);
    assert_eq!(user.device.losses(), 0);
    assert_eq!(attached.attachment.status().state, State::Live);
    attached.until("the target has counted them", |_| {
        let counts = target.tls_counts().expect("TLS is on");
        let sent = relay.counts.sent[1].load(Ordering::Acquire);
        let updates = (counts.key_updates_received, counts.key_updates_sent);
        counts.connections == 2 && updates == (sent, relay.counts.answered()[1])
    });
    let associations = target.target.subsystem(&nqn(SUBNQN)).expect("it exists");
    let associations = associations.controllers();
    assert_eq!(associations.len(), 1, "the one in clear is gone");
}
