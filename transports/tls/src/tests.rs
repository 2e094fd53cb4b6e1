//! Tests of both ends of TLS against each other in memory, and against OpenSSL.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf::tls::{Alert, Derivation, Identity, Psk, PskKey, PskSource, Refused, Version};
use nacre_nvmf_wire::Nqn;
use nacre_random_ports::local_port;
use proptest::prelude::*;

use crate::records::{HEADER, MOST_DATA, MOST_PROTECTED, MOST_RECORDS};
use crate::{Failure, Handshake, MOST_BUFFER_BYTES, Outcome, Role, Session};

const SHORT: &str = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
const LONG: &str =
    "NVMeTLSkey-1:02:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vcSEgBQ==:";
const OTHER: &str = "NVMeTLSkey-1:01:BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwfLJNij:";

struct Keys(Vec<Psk>);

impl PskSource for Keys {
    fn psks(&self, _identity: &Identity) -> Vec<Arc<dyn PskKey>> {
        let shared = |psk: &Psk| Arc::new(psk.clone()) as _;
        self.0.iter().map(shared).collect()
    }
}

fn psk(text: &str) -> Psk {
    Psk::parse(text).expect("a PSK")
}

fn target(keys: &[&str]) -> Handshake {
    let keys = Keys(keys.iter().map(|text| psk(text)).collect());
    Handshake::new(Role::Target(Arc::new(keys))).expect("a target's end")
}

fn identity(text: &str, version: Version, derivation: Derivation) -> Identity {
    let host = Nqn::new("nqn.2026-01.io.nacre:host").expect("a name");
    let subsystem = Nqn::new("nqn.2026-01.io.nacre:s1").expect("a name");
    psk(text).identity(version, &host, &subsystem, derivation)
}

fn host(text: &str, version: Version, derivation: Derivation) -> Handshake {
    let role = Role::Host {
        identity: identity(text, version, derivation),
        psk: psk(text),
        derivation,
    };
    Handshake::new(role).expect("a host's end")
}

/// Passes bytes in pieces until both ends have a result.
fn shake(
    target: &mut Handshake,
    host: &mut Handshake,
    piece: usize,
) -> [Result<Option<Outcome>, Failure>; 2] {
    let mut results = [Ok(None), Ok(None)];
    loop {
        let (ends, mut moved) = ([&mut *target, &mut *host], false);
        for from in [1, 0] {
            let bytes = ends[from].take_output();
            for bytes in bytes.chunks(piece) {
                moved = true;
                let to = 1 - from;
                let over = !matches!(results[to], Ok(None));
                if !over {
                    results[to] = ends[to].received(bytes);
                }
            }
        }
        if !moved {
            return results;
        }
    }
}

fn pair(text: &str) -> (Session, Session) {
    let mut ends = (
        target(&[text]),
        host(text, Version::One, Derivation::Standard),
    );
    let [target, host] = shake(&mut ends.0, &mut ends.1, usize::MAX);
    let session = |result: Result<Option<Outcome>, Failure>| {
        result.expect("a handshake").expect("its end").session
    };
    (session(target), session(host))
}

/// Moves sealed bytes, at most `most`, and returns the opened data.
fn carry(from: &mut Session, to: &mut Session, most: usize) -> Result<Vec<u8>, Failure> {
    let mut data = Vec::new();
    loop {
        let mut place = [0; 5000];
        let count = to.read(&mut [IoSliceMut::new(&mut place[..1000])])?;
        data.extend_from_slice(&place[..count]);
        if count > 0 {
            continue;
        }
        let room = to.room();
        let count = from.ciphertext().len().min(most).min(room.len());
        if count == 0 {
            return Ok(data);
        }
        room[..count].copy_from_slice(&from.ciphertext()[..count]);
        to.received(count);
        from.sent(count);
    }
}

#[test]
fn handshakes() {
    let both = [OTHER, SHORT, LONG];
    for text in [SHORT, LONG] {
        for version in [Version::Zero, Version::One] {
            for derivation in Derivation::ALL {
                let identity = identity(text, version, derivation);
                if psk(text).tls_psk(&identity, derivation).is_none() {
                    continue;
                }
                for piece in [1, 7, usize::MAX] {
                    let mut ends = (target(&both), host(text, version, derivation));
                    let [target, host] = shake(&mut ends.0, &mut ends.1, piece);
                    let outcome = target.expect("a handshake").expect("its end");
                    assert_eq!(outcome.identity, identity);
                    assert_eq!(outcome.psk.psk(), Ok(psk(text)));
                    assert_eq!(outcome.suite.hash(), psk(text).hash());
                    assert_eq!(outcome.derivation, derivation);
                    let (mut target, host) = (outcome.session, host.expect("a handshake"));
                    let mut host = host.expect("its end").session;
                    target.seal(&[IoSlice::new(b"to the host")]).unwrap();
                    host.seal(&[IoSlice::new(b"to the target")]).unwrap();
                    let to_host = carry(&mut target, &mut host, 3).unwrap();
                    let to_target = carry(&mut host, &mut target, 3).unwrap();
                    assert_eq!(
                        (&to_host[..], &to_target[..]),
                        (&b"to the host"[..], &b"to the target"[..])
                    );
                }
            }
        }
    }
}

#[test]
fn handshakes_that_fail() {
    let mut ends = (
        target(&[OTHER]),
        host(SHORT, Version::Zero, Derivation::Standard),
    );
    let [target_end, host_end] = shake(&mut ends.0, &mut ends.1, usize::MAX);
    assert!(matches!(
        target_end,
        Err(Failure::Refused(Refused::Binder { .. }))
    ));
    assert_eq!(host_end.err(), Some(Failure::Alert(Alert::DECRYPT_ERROR)));

    let mut ends = (target(&[]), host(SHORT, Version::One, Derivation::Standard));
    let [target_end, host_end] = shake(&mut ends.0, &mut ends.1, usize::MAX);
    assert!(matches!(
        target_end,
        Err(Failure::Refused(Refused::Unknown { .. }))
    ));
    let expected = Failure::Alert(Alert::UNKNOWN_PSK_IDENTITY);
    assert_eq!(host_end.err(), Some(expected));

    for (bytes, alert) in [
        (&b"GET / HTTP/1.0\r\n"[..], Alert::UNEXPECTED_MESSAGE),
        (&[22, 3, 1, 0, 0], Alert::RECORD_OVERFLOW),
        (&[22, 3, 1, 0xff, 0xff], Alert::RECORD_OVERFLOW),
        (&[22, 3, 1, 0, 5, 2, 0, 0, 1, 0], Alert::UNEXPECTED_MESSAGE),
        (&[22, 3, 1, 0, 5, 1, 0, 0, 1, 0], Alert::DECODE_ERROR),
        (&[22, 3, 1, 0, 6, 1, 0, 0, 1, 0, 0], Alert::DECODE_ERROR),
    ] {
        let mut end = target(&[SHORT]);
        let failure = end.received(bytes).err().expect("a failure");
        assert_eq!(failure.alert(), Some(alert), "{failure}");
        assert_eq!(end.take_output(), [21, 3, 3, 0, 2, 2, alert.0]);
        assert!(end.received(b"x").is_err(), "it is over");
    }
    // A ClientHello without end.
    let mut end = target(&[SHORT]);
    let record = [&[22, 3, 1, 64, 0, 1, 0, 255, 255][..], &[0; 16384 - 4]].concat();
    let failure = end.received(&record).err();
    assert!(
        matches!(failure, Some(Failure::LongHandshake(_))),
        "{failure:?}"
    );
}

#[test]
fn the_target_reads_data_that_came_with_the_handshake() {
    let mut ends = (
        target(&[SHORT]),
        host(SHORT, Version::Zero, Derivation::Standard),
    );
    assert!(ends.0.received(&ends.1.take_output()).unwrap().is_none());
    let host = ends.1.received(&ends.0.take_output()).unwrap();
    let mut host = host.expect("its end").session;
    host.seal(&[IoSlice::new(b"ICReq")]).unwrap();
    let bytes = [&ends.1.take_output()[..], host.ciphertext()].concat();
    let target = ends.0.received(&bytes).unwrap();
    let mut target = target.expect("its end").session;
    assert!(target.has_input());
    let mut data = [0; 9];
    let count = target.read(&mut [IoSliceMut::new(&mut data)]).unwrap();
    assert_eq!(&data[..count], b"ICReq");
    assert!(!target.has_input());
}

#[test]
fn key_updates() {
    let (mut target, mut host) = pair(LONG);
    for turn in 0..5u8 {
        // Our host sends none by itself.
        host.update_keys(turn % 2 == 0).unwrap();
        host.seal(&[IoSlice::new(&[turn; 40])]).unwrap();
        assert_eq!(carry(&mut host, &mut target, 11).unwrap(), [turn; 40]);
        target.seal(&[IoSlice::new(&[turn + 100; 40])]).unwrap();
        assert_eq!(carry(&mut target, &mut host, 11).unwrap(), [turn + 100; 40]);
    }
    // One answer serves several requests, so a peer that reads nothing makes no output grow.
    for _ in 0..20 {
        host.update_keys(true).unwrap();
    }
    let nothing = carry(&mut host, &mut target, usize::MAX).unwrap();
    assert!(nothing.is_empty() && target.ciphertext().is_empty());
    target.seal(&[IoSlice::new(b"answer")]).unwrap();
    assert!(target.ciphertext().len() < 60);
    assert_eq!(
        carry(&mut target, &mut host, usize::MAX).unwrap(),
        b"answer"
    );
    // Data between them does not make room for any number of updates.
    let (mut target, mut host) = pair(LONG);
    let mut failure = None;
    for _ in 0..100 {
        host.update_keys(true).unwrap();
        host.seal(&[IoSlice::new(&[1])]).unwrap();
        let carried = carry(&mut host, &mut target, usize::MAX);
        failure = failure.or_else(|| carried.err());
    }
    assert_eq!(failure, Some(Failure::Flood(64)));
    let (mut target, mut host) = pair(LONG);
    // Updates without end are not taken.
    let mut failure = None;
    for _ in 0..100 {
        host.update_keys(false).unwrap();
        let carried = carry(&mut host, &mut target, usize::MAX);
        failure = failure.or_else(|| carried.err());
    }
    assert_eq!(failure, Some(Failure::Flood(64)));
}

/// Goal: no key seals more records than AES-GCM allows, between ends that take KeyUpdates. Method:
/// both ends begin a few records before the limit of one direction.
#[test]
fn key_updates_at_the_limit() {
    // Data of both directions goes on until each key is a new one.
    let exchange = |target: &mut Session, host: &mut Session| {
        for turn in 0..8u8 {
            target.seal(&[IoSlice::new(&[turn; 9])])?;
            assert_eq!(carry(target, host, usize::MAX)?, [turn; 9]);
            host.seal(&[IoSlice::new(&[turn; 5])])?;
            assert_eq!(carry(host, target, usize::MAX)?, [turn; 5]);
        }
        Ok::<_, Failure>((target.counts(), host.counts()))
    };
    let near = MOST_RECORDS - 3;
    // Its own key, and the key of a host that only writes.
    for (received, sent) in [(0, near), (near, 0)] {
        let (mut target, mut host) = pair(SHORT);
        target.use_key_updates();
        target.skip_to(received, sent);
        host.skip_to(sent, received);
        let (of_target, of_host) = exchange(&mut target, &mut host).unwrap();
        assert_eq!(of_target.key_updates_sent, 1, "{received} {sent}");
        // The host answers when it is asked for its key.
        assert_eq!(of_host.key_updates_sent, u64::from(received == near));
        assert_eq!((of_target.keys_past_limit, of_host.keys_past_limit), (0, 0));
    }
    // A peer that does not answer.
    let (mut target, mut host) = pair(SHORT);
    target.use_key_updates();
    target.skip_to(MOST_RECORDS, 0);
    host.skip_to(0, MOST_RECORDS);
    host.seal(&[IoSlice::new(b"one more")]).unwrap();
    let failure = carry(&mut host, &mut target, usize::MAX).unwrap_err();
    assert_eq!(failure, Failure::KeyLimit(MOST_RECORDS));
    assert_eq!(failure.alert(), Some(Alert::UNEXPECTED_MESSAGE));
    // Ends that may not take KeyUpdates get none: their keys are counted.
    let (mut target, mut host) = pair(SHORT);
    target.skip_to(near, near);
    host.skip_to(near, near);
    let (of_target, of_host) = exchange(&mut target, &mut host).unwrap();
    assert_eq!(of_target, of_host);
    assert_eq!(
        (of_target.key_updates_sent, of_target.keys_past_limit),
        (0, 2)
    );
    // One that has sent a KeyUpdate takes them.
    let (mut target, mut host) = pair(SHORT);
    host.update_keys(false).unwrap();
    let nothing = carry(&mut host, &mut target, usize::MAX).unwrap();
    assert!(nothing.is_empty());
    target.skip_to(0, near);
    host.skip_to(near, 0);
    let (of_target, of_host) = exchange(&mut target, &mut host).unwrap();
    let received = (of_target.key_updates_received, of_host.key_updates_received);
    assert_eq!(received, (1, 1));
}

/// Goal: the memory of an idle session is small, and that of a busy one has a bound.
#[test]
fn idle_sessions_have_no_buffers() {
    let (mut target, mut host) = pair(SHORT);
    assert_eq!((target.buffer_bytes(), host.buffer_bytes()), (0, 0));
    host.seal(&[IoSlice::new(&vec![1; 1 << 20])]).unwrap();
    target.room();
    for session in [&target, &host] {
        let bytes = session.buffer_bytes();
        assert!((1..=MOST_BUFFER_BYTES).contains(&bytes), "{bytes}");
    }
    // Half of a record stays where it is.
    let half = host.ciphertext()[..1000].to_vec();
    target.room()[..1000].copy_from_slice(&half);
    target.received(1000);
    host.sent(1000);
    target.return_input();
    assert!(target.buffer_bytes() > 0);
    let data = carry(&mut host, &mut target, usize::MAX).unwrap();
    assert!(data.iter().all(|byte| *byte == 1) && data.len() >= 256 << 10);
    target.return_input();
    assert_eq!((target.buffer_bytes(), host.buffer_bytes()), (0, 0));
    println!(
        "a session: {} bytes, its buffers: {MOST_BUFFER_BYTES}",
        size_of::<Session>()
    );
    assert!(size_of::<Session>() < 4096);
}

#[test]
fn warm_up() {
    assert_eq!(crate::warm_up(), Ok(()));
    assert_eq!(crate::warm_up(), Ok(()));
}

#[test]
fn closing() {
    let (mut target, mut host) = pair(SHORT);
    host.seal(&[IoSlice::new(b"last")]).unwrap();
    host.close(Alert::CLOSE_NOTIFY);
    assert_eq!(host.seal(&[IoSlice::new(b"more")]), Ok(0));
    assert_eq!(carry(&mut host, &mut target, usize::MAX).unwrap(), b"last");
    assert!(target.is_peer_closed());
    assert!(target.has_input(), "the end, without another receive");
    // The other direction is still open.
    target.seal(&[IoSlice::new(b"answer")]).unwrap();
    target.close(Alert::BAD_RECORD_MAC);
    let mut data = [0; 6];
    let bytes = target.ciphertext().to_vec();
    host.room()[..bytes.len()].copy_from_slice(&bytes);
    host.received(bytes.len());
    assert_eq!(host.read(&mut [IoSliceMut::new(&mut data)]), Ok(6));
    let failure = host.read(&mut [IoSliceMut::new(&mut data)]).unwrap_err();
    assert_eq!(failure, Failure::Alert(Alert::BAD_RECORD_MAC));
    assert_eq!(failure.alert(), None);
    assert!(
        failure.to_string().ends_with("the alert bad_record_mac"),
        "{failure}"
    );
}

/// Goal: no damaged record gives data, and each ends the connection with an alert.
#[test]
fn damaged_records() {
    let open = |bytes: &[u8]| {
        let (mut target, mut host) = pair(SHORT);
        host.seal(&[IoSlice::new(&[7; 100])]).unwrap();
        let mut record = host.ciphertext().to_vec();
        record.splice(..bytes.len().min(record.len()), bytes.iter().copied());
        target.room()[..record.len()].copy_from_slice(&record);
        target.received(record.len());
        target.read(&mut [IoSliceMut::new(&mut [0; 200])])
    };
    assert_eq!(open(&[]), Ok(100));
    let forged = Err(Failure::Forged);
    for at in HEADER..HEADER + 117 {
        let (mut target, mut host) = pair(SHORT);
        host.seal(&[IoSlice::new(&[7; 100])]).unwrap();
        let mut record = host.ciphertext().to_vec();
        record[at] ^= 1;
        target.room()[..record.len()].copy_from_slice(&record);
        target.received(record.len());
        let read = target.read(&mut [IoSliceMut::new(&mut [0; 200])]);
        assert_eq!(read, forged, "{at}");
    }
    assert_eq!(open(&[23, 3, 3, 0, 10]), forged);
    assert_eq!(open(&[23, 3, 3, 0, 0]), forged);
    assert_eq!(open(&[23, 3, 3, 0, 200]), Ok(0), "the rest is not there");
    let long = Failure::Long {
        bytes: 0xffff,
        most: MOST_PROTECTED,
    };
    assert_eq!(open(&[23, 3, 3, 0xff, 0xff]), Err(long));
    let clear = Failure::Type {
        kind: 21,
        expected: 23,
    };
    assert_eq!(open(&[21, 3, 3, 0, 2]), Err(clear));
}

/// Goal: a record that was opened once is not opened again.
#[test]
fn replayed_records() {
    let (mut target, mut host) = pair(SHORT);
    host.seal(&[IoSlice::new(b"once")]).unwrap();
    let record = host.ciphertext().to_vec();
    for expected in [Ok(4), Err(Failure::Forged)] {
        let room = target.room();
        room[..record.len()].copy_from_slice(&record);
        target.received(record.len());
        assert_eq!(target.read(&mut [IoSliceMut::new(&mut [0; 4])]), expected);
    }
}

#[test]
fn output_has_a_bound() {
    let (mut target, mut host) = pair(SHORT);
    let data = vec![9; 1 << 20];
    let first = host.seal(&[IoSlice::new(&data)]).unwrap();
    assert!(
        (256 << 10..(256 << 10) + MOST_DATA).contains(&first),
        "{first}"
    );
    assert_eq!(host.seal(&[IoSlice::new(&data)]), Ok(0));
    assert_eq!(
        carry(&mut host, &mut target, usize::MAX).unwrap().len(),
        first
    );
    assert!(host.seal(&[IoSlice::new(&data)]).unwrap() > 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    /// Goal: data arrives in order, however it is cut.
    #[test]
    fn any_cut(pieces in proptest::collection::vec((0usize..40_000, 1usize..5000), 1..8)) {
        let (mut target, mut host) = pair(SHORT);
        let (mut sent, mut got, mut next) = (Vec::new(), Vec::new(), 0u8);
        for (length, most) in pieces {
            let data: Vec<u8> = (0..length).map(|_| { next = next.wrapping_mul(5).wrapping_add(1); next }).collect();
            let (a, b) = data.split_at(length / 3);
            let count = host.seal(&[IoSlice::new(a), IoSlice::new(&[]), IoSlice::new(b)]).unwrap();
            prop_assert_eq!(count, length);
            sent.extend(data);
            got.extend(carry(&mut host, &mut target, most).unwrap());
        }
        prop_assert_eq!(sent, got);
    }
}

/// Runs `openssl` with these arguments. `None`: it is not installed.
fn openssl(test: &str, arguments: &[&str]) -> Option<Child> {
    let started = Command::new("openssl")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    if started.is_err() {
        eprintln!("SKIPPED: {test}: openssl is not installed (apt-get install openssl)");
    }
    started.ok()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A handshake over a socket.
fn over(mut end: Handshake, socket: &mut TcpStream) -> Result<Outcome, Failure> {
    let limit = Some(Duration::from_secs(20));
    socket.set_read_timeout(limit).expect("a limit");
    loop {
        socket.write_all(&end.take_output()).expect("sent");
        let mut bytes = [0; 2000];
        let count = socket.read(&mut bytes).expect("bytes of OpenSSL");
        assert!(count > 0, "OpenSSL closed the connection");
        let result = end.received(&bytes[..count]);
        let _ = socket.write_all(&end.take_output());
        if let Some(outcome) = result? {
            return Ok(outcome);
        }
    }
}

fn read_all(session: &mut Session, socket: &mut TcpStream, until: &[u8]) {
    let mut data = Vec::new();
    while data.len() < until.len() {
        let mut place = [0; 4096];
        match session.read(&mut [IoSliceMut::new(&mut place)]) {
            Ok(0) => {
                let count = socket.read(session.room()).expect("bytes of OpenSSL");
                assert!(count > 0, "OpenSSL closed the connection");
                session.received(count);
            }
            Ok(count) => data.extend_from_slice(&place[..count]),
            Err(failure) => panic!("{failure}"),
        }
    }
    assert_eq!(data, until);
}

fn write_all(session: &mut Session, socket: &mut TcpStream, data: &[u8]) {
    session.seal(&[IoSlice::new(data)]).expect("sealed");
    socket.write_all(session.ciphertext()).expect("sent");
    session.sent(session.ciphertext().len());
}

/// Goal: OpenSSL as a host. Method: both derivations, a wrong key, KeyUpdates that it sends.
#[test]
fn openssl_as_host() {
    let standard = Derivation::Standard;
    let right = identity(SHORT, Version::Zero, standard);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let key = |text: &str, derivation| {
        let identity = identity(text, Version::Zero, derivation);
        hex(&psk(text).tls_psk(&identity, derivation).expect("a key"))
    };
    for (key, derivation) in [
        (key(SHORT, standard), Some(standard)),
        (key(SHORT, Derivation::Libnvme), Some(Derivation::Libnvme)),
        (key(OTHER, standard), None),
    ] {
        let name = right.to_string();
        let arguments = [
            "s_client",
            "-connect",
            &address,
            "-tls1_3",
            "-psk",
            &key,
            "-psk_identity",
            &name,
            "-ciphersuites",
            "TLS_AES_128_GCM_SHA256",
            "-nocommands",
            "-quiet",
        ];
        // With commands, a line `K` at its standard input sends a KeyUpdate that asks for ours.
        let arguments: Vec<&str> = arguments
            .into_iter()
            .filter(|argument| {
                derivation.is_none() || !["-nocommands", "-quiet"].contains(argument)
            })
            .collect();
        let Some(mut child) = openssl("openssl_as_host", &arguments) else {
            return;
        };
        let (mut socket, _) = listener.accept().expect("OpenSSL connects");
        let outcome = over(target(&[SHORT]), &mut socket);
        let Some(derivation) = derivation else {
            let failure = outcome.err().expect("the key is wrong");
            assert_eq!(failure.alert(), Some(Alert::DECRYPT_ERROR), "{failure}");
            drop(socket);
            let output = child.wait_with_output().expect("it ends");
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(text.contains("alert decrypt error"), "{text}");
            continue;
        };
        let outcome = outcome.unwrap_or_else(|failure| panic!("{failure}"));
        assert_eq!(
            (outcome.derivation, outcome.identity),
            (derivation, right.clone())
        );
        let mut session = outcome.session;
        let mut input = child.stdin.take().expect("piped");
        for (line, expected) in [("hello\n", "hello\n"), ("K\n", ""), ("again\n", "again\n")] {
            input.write_all(line.as_bytes()).expect("OpenSSL reads");
            input.flush().expect("OpenSSL reads");
            // OpenSSL looks for a command at the beginning of what one read gives.
            std::thread::sleep(Duration::from_millis(100));
            read_all(&mut session, &mut socket, expected.as_bytes());
        }
        write_all(&mut session, &mut socket, b"from the target\n");
        session.close(Alert::CLOSE_NOTIFY);
        socket.write_all(session.ciphertext()).expect("sent");
        drop((socket, input));
        let output = child.wait_with_output().expect("it ends");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("from the target"), "{text}");
    }
}

/// Goal: OpenSSL as a target, with tickets after the handshake.
#[test]
fn openssl_as_target() {
    let port = local_port().to_string();
    let identity = identity(SHORT, Version::One, Derivation::Standard);
    let key = psk(SHORT).tls_psk(&identity, Derivation::Standard);
    let (key, name) = (hex(&key.expect("a key")), identity.to_string());
    let address = format!("127.0.0.1:{port}");
    let arguments = [
        "s_server",
        "-accept",
        &address,
        "-tls1_3",
        "-psk",
        &key,
        "-psk_identity",
        &name,
        "-nocert",
        "-ciphersuites",
        "TLS_AES_128_GCM_SHA256",
        "-num_tickets",
        "2",
        "-quiet",
        "-naccept",
        "1",
    ];
    let Some(mut child) = openssl("openssl_as_target", &arguments) else {
        return;
    };
    let connected = (0..200).find_map(|_| {
        std::thread::sleep(Duration::from_millis(50));
        TcpStream::connect(&address).ok()
    });
    let mut socket = connected.expect("OpenSSL listens");
    let end = host(SHORT, Version::One, Derivation::Standard);
    let outcome = over(end, &mut socket).unwrap_or_else(|failure| panic!("{failure}"));
    let mut session = outcome.session;
    write_all(&mut session, &mut socket, b"from the host\n");
    let mut input = child.stdin.take().expect("piped");
    input.write_all(b"answer\n").expect("OpenSSL reads");
    read_all(&mut session, &mut socket, b"answer\n");
    session.close(Alert::CLOSE_NOTIFY);
    socket.write_all(session.ciphertext()).expect("sent");
    drop((socket, input));
    let output = child.wait_with_output().expect("it ends");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("from the host"), "{text}");
}

/// The corpus of the fuzz target, and inputs near it.
mod fuzz {
    use std::path::Path;

    use proptest::prelude::*;

    use crate::fuzzing::tls_records;

    fn corpus() -> Vec<Vec<u8>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/tls_records");
        let entries = std::fs::read_dir(folder).expect("the corpus is in the repository");
        let read = |entry: std::io::Result<std::fs::DirEntry>| std::fs::read(entry?.path());
        entries.map(|entry| read(entry).expect("a file")).collect()
    }

    #[test]
    fn replay() {
        let inputs = corpus();
        assert!(inputs.len() >= 24, "the corpus is complete");
        inputs.iter().for_each(|input| tls_records(input));
    }

    proptest! {
        /// Goal: damaged inputs do not panic. Method: a byte of each input of the corpus, changed.
        #[test]
        fn damaged(which in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), to: u8) {
            let inputs = corpus();
            let mut input = which.get(&inputs).clone();
            let at = at.index(input.len());
            input[at] = to;
            tls_records(&input);
        }

        #[test]
        fn anything(input in proptest::collection::vec(any::<u8>(), 0..200)) {
            tls_records(&input);
        }
    }
}
