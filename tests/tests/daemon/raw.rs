//! Tests of peers that violate the protocol: the daemon closes their connection and no other.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use nacre_bdev::Status;
use nacre_tests::daemon::{Daemon, Place};
use nacre_tests::host::{Host, options, pattern};
use nacre_tests::seed;
use serde_json::{Value, json};

const NQN: &str = "nqn.2025-01.io.nacre:raw";

/// A valid ICReq (TCP 3.6.2.2).
fn ic_req() -> Vec<u8> {
    let mut pdu = vec![0; 128];
    pdu[..8].copy_from_slice(&[0, 0, 128, 0, 128, 0, 0, 0]);
    pdu
}

/// The common header of a PDU, and zeroes up to `len`.
fn pdu(kind: u8, hlen: u8, pdo: u8, plen: u32, len: usize) -> Vec<u8> {
    let mut pdu = vec![kind, 0, hlen, pdo];
    pdu.extend_from_slice(&plen.to_le_bytes());
    pdu.resize(len, 0);
    pdu
}

/// CapsuleCmd with a command that is all zeroes except for these bytes.
fn capsule(plen: u32, set: &[(usize, u8)]) -> Vec<u8> {
    let mut pdu = pdu(4, 72, if plen > 72 { 72 } else { 0 }, plen, 72);
    for (at, byte) in set {
        pdu[8 + at] = *byte;
    }
    pdu
}

fn after_ic_req(rest: Vec<u8>) -> Vec<u8> {
    [ic_req(), rest].concat()
}

/// Sends `bytes` and reads until the peer closes the connection. Returns the bytes read.
fn provoke(address: SocketAddr, bytes: &[u8], close: bool) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    // Both may fail if the peer closes before it has everything.
    let _ = stream.write_all(bytes);
    if close {
        let _ = stream.shutdown(std::net::Shutdown::Write);
    }
    let mut said = Vec::new();
    let begun = Instant::now();
    if let Err(error) = stream.read_to_end(&mut said) {
        let reset = error.kind() == std::io::ErrorKind::ConnectionReset;
        assert!(
            reset,
            "it does not hang up: {error} after {:?}",
            begun.elapsed()
        );
    }
    said
}

/// The sum of a metric over the series with all these labels.
fn metric(daemon: &mut Daemon, name: &str, labels: &[&str]) -> f64 {
    let text = daemon.call("metrics_get", json!({ "format": "text" }));
    let text = text.as_str().expect("Prometheus text");
    let is_it = |line: &&str| line.starts_with(name) && labels.iter().all(|l| line.contains(l));
    let value = |line: &str| line.rsplit(' ').next()?.parse::<f64>().ok();
    text.lines().filter(is_it).filter_map(value).sum()
}

/// Number of connections that are not queues of a controller yet.
fn strangers(daemon: &mut Daemon) -> u64 {
    let stats = daemon.call("nvmf_get_stats", Value::Null);
    let groups = stats["poll_groups"].as_array().unwrap();
    let of = |g: &Value| g["current_unassociated_qpairs"].as_u64().unwrap();
    groups.iter().map(of).sum()
}

fn wait_for_strangers(daemon: &mut Daemon, count: u64) {
    let until = Instant::now() + Duration::from_secs(30);
    while strangers(daemon) != count {
        assert!(Instant::now() < until, "{} strangers", strangers(daemon));
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Goal: garbage, protocol violations, slow and silent peers do not affect a host next to them.
/// They are counted, and leave nothing behind. Method: each kind of peer on the same port as a host
/// that checks its data all the time; then the daemon's counters, descriptors and buffers.
#[test]
fn bad_peers_lose_only_their_own_connection() {
    let place = Place::new();
    let mut daemon = place.start();
    daemon.create_ram("ram", 4096, 4 << 20);
    daemon.create_subsystem(NQN);
    let nsid = daemon.add_namespace(NQN, "ram");
    let address = daemon.listen(NQN, "127.0.0.1:0");
    let descriptors = daemon.descriptors();
    let mut host = Host::connected(address, options(NQN), &[nsid]);
    let closed_before = metric(
        &mut daemon,
        "nacre_transport_closed_total",
        &["cause=\"protocol\""],
    );

    let mut rng = seed::announced("bad_peers_lose_only_their_own_connection");
    let garbage: Vec<u8> = (0..64 * 1024).map(|_| rng.draw() as u8).collect();
    // Not a PDU, or an invalid PDU: the connection is terminated.
    let breakers = [
        ("http", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec()),
        ("zeroes", vec![0; 256]),
        ("garbage", [vec![0xff], garbage.clone()].concat()),
        (
            "an ICReq that says it is 4 GiB long",
            pdu(0, 128, 0, u32::MAX, 128),
        ),
        ("a command before ICReq", capsule(72, &[])),
        ("a second ICReq", after_ic_req(ic_req())),
        (
            "a type that only controllers send",
            after_ic_req(pdu(5, 24, 0, 24, 24)),
        ),
        ("an unknown type", after_ic_req(pdu(0x42, 8, 0, 8, 8))),
        (
            "a header of the wrong length",
            after_ic_req(pdu(4, 71, 0, 72, 72)),
        ),
        (
            "a PDU shorter than its header",
            after_ic_req(pdu(4, 72, 0, 8, 72)),
        ),
        ("a capsule of 2 GiB", after_ic_req(capsule(1 << 31, &[]))),
        (
            "data without an R2T",
            after_ic_req(pdu(6, 24, 24, 4120, 4120)),
        ),
        (
            "garbage after ICReq",
            after_ic_req([vec![0xff], garbage].concat()),
        ),
    ];
    // Valid PDUs with invalid commands: answered, then the connection is closed.
    let refused = [
        (
            "Identify instead of Connect",
            after_ic_req(capsule(72, &[(0, 6)])),
        ),
        (
            "Connect without its data",
            after_ic_req(capsule(72, &[(0, 0x7f), (4, 1)])),
        ),
    ];
    // The peer leaves in the middle of a PDU.
    let leavers = [
        ("nothing", Vec::new()),
        ("half an ICReq", ic_req()[..64].to_vec()),
        (
            "half a capsule",
            after_ic_req(capsule(72, &[])[..40].to_vec()),
        ),
        (
            "a capsule without its data",
            after_ic_req(capsule(72 + 1024, &[(0, 0x7f), (4, 1)])),
        ),
    ];
    std::thread::scope(|scope| {
        let peers = scope.spawn(|| {
            for (what, bytes) in &breakers {
                let said = provoke(address, bytes, false);
                // C2HTermReq comes last, unless the reset overtook it.
                let last = said.get(if said.first() == Some(&1) { 128 } else { 0 });
                assert!(matches!(last, None | Some(3)), "{what}: PDU type {last:?}");
            }
            for (what, bytes) in &refused {
                let said = provoke(address, bytes, false);
                assert_eq!(said.get(128), Some(&5), "{what}: no answer");
                let status = u16::from_le_bytes([said[128 + 22], said[128 + 23]]) >> 1;
                assert_ne!(status, 0, "{what}: it succeeded");
            }
            for (_, bytes) in &leavers {
                provoke(address, bytes, true);
            }
        });
        let mut seed = 0;
        while !peers.is_finished() {
            seed += 1;
            let (lba, data) = (seed * 8 % 1000, pattern(4096 * 4, seed));
            assert_eq!(host.write(0, lba, 4, &data), Status::Ok);
            assert!(host.read(0, lba, 4, data.len()) == data, "damaged at {lba}");
        }
        peers.join().expect("peers are treated as they should be");
    });
    assert_eq!(
        host.queues[0].stats().losses,
        0,
        "the host lost its connection"
    );
    assert!(host.controller.is_live());

    wait_for_strangers(&mut daemon, 0);
    let closed = metric(
        &mut daemon,
        "nacre_transport_closed_total",
        &["cause=\"protocol\""],
    );
    assert_eq!(
        closed - closed_before,
        breakers.len() as f64,
        "not every breaker was counted"
    );

    // Silent or incomplete peers are kept until their timeout, and cost no other peer its
    // connection.
    let mut silent: Vec<TcpStream> = Vec::new();
    for n in 0..20 {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&ic_req()[..n * 5]).unwrap();
        silent.push(stream);
    }
    wait_for_strangers(&mut daemon, 20);
    let data = pattern(4096, 1);
    assert_eq!(host.write(0, 0, 1, &data), Status::Ok);
    assert_eq!(host.read(0, 0, 1, 4096), data);
    drop(silent);
    wait_for_strangers(&mut daemon, 0);
    host.disconnect();
    daemon.assert_comes_down_to(descriptors);
    daemon.stop();
}

/// Goal: the management socket survives the same kinds of peers. Method: garbage and endless
/// requests beside a client that is served all the time.
#[test]
fn bad_clients_lose_only_their_own_connection() {
    use std::os::unix::net::UnixStream;
    let place = Place::new();
    let mut daemon = place.start();
    let mut endless = UnixStream::connect(place.socket()).unwrap();
    endless
        .write_all(b"{\"jsonrpc\":\"2.0\",\"method\":\"")
        .unwrap();
    for bytes in [
        &b"\0\xff\xfe"[..],
        b"GET / HTTP/1.0\r\n\r\n",
        b"]",
        b"{\"id\":1}",
    ] {
        let mut stream = UnixStream::connect(place.socket()).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut said = Vec::new();
        let _ = stream.read_to_end(&mut said);
        let said = String::from_utf8_lossy(&said).into_owned();
        assert!(said.contains("\"error\""), "to {bytes:?}: {said:?}");
        assert_eq!(daemon.call("bdev_get_bdevs", Value::Null), json!([]));
    }
    // Deeper and longer than any valid request.
    let mut stream = UnixStream::connect(place.socket()).unwrap();
    stream
        .set_write_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let before = daemon.resident();
    let chunk = vec![b'['; 1 << 20];
    let took = (0..256)
        .take_while(|_| stream.write_all(&chunk).is_ok())
        .count();
    assert!(took < 256, "it reads a request of 256 MiB");
    let grown = daemon.resident().saturating_sub(before);
    assert!(grown < 64 << 20, "it keeps {grown} bytes of it");
    assert_eq!(daemon.call("bdev_get_bdevs", Value::Null), json!([]));
    drop(endless);
    daemon.stop();
}
