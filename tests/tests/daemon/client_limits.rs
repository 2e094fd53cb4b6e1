//! Goal: open connections of one client do not lock out the administrator or other hosts, and a
//! refused peer learns the reason. Method: more clients and hosts than the limits allow, against
//! the daemon as a process.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nacre_tests::daemon::{Daemon, Place, free_address};
use rustix::process::{Pid, Resource, Rlimit, prlimit};

const NQN: &str = "nqn.2026-01.com.example:crowd";

fn succeeds_soon(place: &Place, args: &[&str]) {
    let begin = Instant::now();
    let output = place.client(args);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {error}");
    assert!(
        begin.elapsed() < Duration::from_secs(20),
        "{:?}",
        begin.elapsed()
    );
}

/// A daemon that serves a RAM disk over TCP.
fn serving(place: &Place) -> (Daemon, SocketAddr) {
    let mut daemon = place.start();
    daemon.create_ram("ram", 4096, 16 << 20);
    daemon.create_subsystem(NQN);
    daemon.add_namespace(NQN, "ram");
    let address = daemon.listen(NQN, "127.0.0.1:0");
    (daemon, address)
}

/// Goal: a script that leaks connections, and calls that never end, lock out no other program. The
/// log reports it once.
#[test]
fn leaked_and_waiting_clients_leave_room_for_a_command() {
    let place = Place::new().with("NACRE_RPC_MAX_CLIENTS", 8);
    let daemon = place.start();
    let connect = || UnixStream::connect(place.socket()).unwrap();
    let mut leaked: Vec<UnixStream> = (0..30).map(|_| connect()).collect();
    std::thread::sleep(Duration::from_millis(1500));
    for _ in 0..3 {
        succeeds_soon(&place, &["bdev", "list"]);
    }
    leaked.clear();
    let waiting: Vec<UnixStream> = (0..8)
        .map(|_| {
            let mut stream = connect();
            stream
                .write_all(br#"{"id":1,"method":"events_subscribe","params":{}}"#)
                .unwrap();
            stream
        })
        .collect();
    std::thread::sleep(Duration::from_millis(500));
    succeeds_soon(&place, &["bdev", "list"]);
    // One process gets no reserved place beyond its share.
    let mut refused = connect();
    refused
        .write_all(br#"{"id":1,"method":"bdev_get_bdevs"}"#)
        .unwrap();
    let mut text = String::new();
    refused
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    refused.read_to_string(&mut text).unwrap();
    assert!(text.contains("[rpc] max_clients is 8"), "{text}");
    drop(waiting);
    // The log is written by a separate thread: the client may read its answer first.
    let last = "a new one was refused";
    let end = Instant::now() + Duration::from_secs(10);
    let log = loop {
        let log = daemon.log();
        if log.contains(last) || Instant::now() > end {
            break log;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let said = |text: &str| log.lines().filter(|line| line.contains(text)).count();
    assert_eq!(
        said("an idle RPC client was closed for a new one"),
        1,
        "{log}"
    );
    assert_eq!(said(last), 1, "{log}");
    daemon.stop();
}

/// Goal: hosts that use up the descriptors leave those that management needs. Method: a limit that
/// few hosts reach, idle connections up to it, then a command and a health check.
#[test]
fn descriptors_are_reserved_for_management() {
    let metrics = free_address("127.0.0.1");
    let place = Place::new().with("NACRE_METRICS_LISTEN", metrics);
    let (daemon, address) = serving(&place);
    let limit = 200;
    let pid = Pid::from_raw(daemon.pid() as i32).unwrap();
    let wanted = Rlimit {
        current: Some(limit),
        maximum: Some(limit),
    };
    prlimit(Some(pid), Resource::Nofile, wanted).unwrap();
    let _hosts: Vec<TcpStream> = (0..limit)
        .map(|_| TcpStream::connect(address).unwrap())
        .collect();
    let end = Instant::now() + Duration::from_secs(30);
    while !daemon.log().contains("reserved for management") {
        assert!(Instant::now() < end, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    succeeds_soon(&place, &["bdev", "list"]);
    let mut health = TcpStream::connect(metrics).unwrap();
    health
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    health
        .write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        .unwrap();
    let mut text = String::new();
    health.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    let log = daemon.log();
    let lines = log
        .lines()
        .filter(|line| line.contains("reserved for management"));
    assert_eq!(lines.count(), 1, "{log}");
    daemon.stop();
}

/// Goal: a host beyond `max_connections` is refused at once, and the load generator reports that
/// reason.
#[test]
fn a_host_beyond_the_limit_is_refused_at_once() {
    let place = Place::new().with("NACRE_NVMF_MAX_CONNECTIONS", 3);
    let (daemon, address) = serving(&place);
    let begin = Instant::now();
    let mut perf = place.nacre();
    perf.args([
        "perf",
        &format!("tcp://{address}/{NQN}"),
        "--queues",
        "8",
        "--seconds",
        "1",
    ]);
    let output = perf.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{error}");
    assert!(
        error.contains("was refused by the target: Connect Controller Busy"),
        "{error}"
    );
    assert!(
        begin.elapsed() < Duration::from_secs(30),
        "{:?}",
        begin.elapsed()
    );
    let log = daemon.log();
    let refused = log.lines().filter(|line| {
        line.contains("3 queues are connected, as many as [nvmf] max_connections allows")
    });
    assert_eq!(refused.count(), 1, "{log}");
    // With an allowed number of connections it runs.
    let mut perf = place.nacre();
    perf.args([
        "perf",
        &format!("tcp://{address}/{NQN}"),
        "--queues",
        "2",
        "--seconds",
        "1",
    ]);
    let output = perf.output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    daemon.stop();
}
