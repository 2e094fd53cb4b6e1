//! Volumes whose store is a real etcd: Debian's, or `NACRE_TEST_ETCD` names it. Without it, these
//! tests are skipped aloud.

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nacre_random::Random;
use nacre_tests::daemon::{Daemon, Place, free_address};
use nacre_tests::seed;
use serde_json::json;

use crate::ledger::BLOCK;
use crate::load::Load;
use crate::volumes::{HOLD_MS, events, healthy, patient, publish, replica, until, verify_bytes};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 48 * MIB;
const REPLICAS: [&str; 3] = ["a", "b", "c"];

/// One member on loopback, with its data in a temporary folder.
struct Etcd {
    program: PathBuf,
    dir: tempfile::TempDir,
    client: SocketAddr,
    peer: SocketAddr,
    process: Option<Child>,
}

impl Etcd {
    /// `None`, said aloud: there is no etcd.
    fn start(test: &str) -> Option<Self> {
        let named = std::env::var_os("NACRE_TEST_ETCD").map(PathBuf::from);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut places = std::env::split_paths(&path).map(|dir| dir.join("etcd"));
        let Some(program) = named.or_else(|| places.find(|place| place.is_file())) else {
            // The harness captures only the print macros.
            let text = "no etcd (apt-get install etcd-server, or name one in NACRE_TEST_ETCD)";
            let _ = writeln!(std::io::stderr().lock(), "SKIPPED: {test}: {text}");
            return None;
        };
        let mut etcd = Self {
            program,
            dir: tempfile::tempdir().expect("a folder"),
            client: free_address("127.0.0.1"),
            peer: free_address("127.0.0.1"),
            process: None,
        };
        etcd.run();
        Some(etcd)
    }

    /// Starts the member, with the data that it has.
    fn run(&mut self) {
        let (client, peer) = (self.url(), format!("http://{}", self.peer));
        let log = std::fs::File::create(self.dir.path().join("log")).expect("a log");
        let child = Command::new(&self.program)
            .args(["--name", "m", "--data-dir"])
            .arg(self.dir.path().join("m"))
            .args(["--listen-client-urls", &client])
            .args(["--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer])
            .args(["--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("m={peer}")])
            .args(["--heartbeat-interval", "50", "--election-timeout", "500"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        self.process = Some(child.expect("etcd starts"));
    }

    fn url(&self) -> String {
        format!("http://{}", self.client)
    }

    /// As `kill -9`.
    fn kill(&mut self) {
        if let Some(mut child) = self.process.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn place(&self, prefix: &str) -> Place {
        Place::new()
            .on_cores(2)
            .with("NACRE_STORE_ENDPOINTS", self.url())
            .with("NACRE_STORE_PREFIX", prefix)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Makes volume "v" on three files.
fn create(daemon: &mut Daemon) {
    for name in REPLICAS {
        daemon.create_file(name, BLOCK as u32, SIZE);
    }
    let settings = json!({
        "read_policy": "round-robin",
        "settle_ms": 50,
        "frozen_hold_ms": HOLD_MS,
        "deadline_ms": HOLD_MS,
    });
    daemon.call(
        "volume_create",
        json!({ "name": "v", "devices": REPLICAS, "settings": settings }),
    );
    healthy(daemon);
}

fn loaded(place: &Place, rng: &mut Random) -> (Daemon, Load) {
    let mut daemon = place.start();
    create(&mut daemon);
    let address = publish(&mut daemon);
    (daemon, Load::start(address, patient(), 1, rng))
}

fn until_logged(daemon: &Daemon, text: &str) {
    let end = Instant::now() + Duration::from_secs(60);
    while !daemon.log().contains(text) {
        assert!(Instant::now() < end, "never \"{text}\":\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a daemon that must end by itself, and returns what it says.
fn refused(place: &Place) -> String {
    let mut command = place.serve_command(&place.socket(), &place.path("data"));
    let output = command.output().expect("nacre runs");
    assert!(!output.status.success());
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

/// Goal: no acknowledged write is lost, whether daemon or etcd is killed. Method: verified load
/// through kill -9 of the daemon; a start while etcd is away, which waits; etcd killed, without and
/// with the loss of a replica.
#[test]
fn a_volume_in_etcd_survives_kill_9() {
    const NAME: &str = "a_volume_in_etcd_survives_kill_9";
    let Some(mut etcd) = Etcd::start(NAME) else {
        return;
    };
    let mut rng = seed::announced(NAME);
    // So that the daemon notices in time that etcd is away.
    let place = etcd.place("lab").with("NACRE_STORE_DEADLINE_MS", "1000");
    let (mut daemon, mut load) = loaded(&place, &mut rng);
    assert!(!place.path("data/volumes.redb").exists());
    load.run(300);
    for etcd_is_away in [false, true] {
        daemon = load.run_during(|| {
            std::thread::sleep(Duration::from_micros(rng.below(50_000)));
            daemon.kill();
            if !etcd_is_away {
                return place.start();
            }
            etcd.kill();
            let starting = place.spawn();
            until_logged(&starting, "the start waits for the volume store");
            // A signal ends a start that waits.
            starting.stop();
            let starting = place.spawn();
            etcd.run();
            let mut daemon = starting;
            let mut client = daemon.connect();
            let ready = client.call_by_name("framework_wait_init", serde_json::Value::Null);
            ready.unwrap_or_else(|error| panic!("{error}\n{}", daemon.log()));
            daemon
        });
        load.until_connected();
        load.run(200);
        healthy(&mut daemon);
    }

    // No state changes: I/O goes on without etcd.
    etcd.kill();
    load.run(300);
    // A replica is lost: its volume waits, and loses nothing. The deletion of the device waits,
    // too.
    load.run_during(|| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_secs(6));
                etcd.run();
            });
            daemon.call("bdev_uring_delete", json!({ "name": "b" }));
        });
        until(&mut daemon, "b is out", |v| {
            replica(v, "b")["state"] == "out"
        });
    });
    assert!(!events(&mut daemon, "volume_store_lost").is_empty());
    load.run(200);
    load.run_during(|| {
        daemon.create_file("b", BLOCK as u32, SIZE);
        healthy(&mut daemon);
    });
    load.drain();
    load.check_all("after all");
    verify_bytes(&mut daemon, SIZE - MIB);
    // An orderly end does not wait for etcd. The record lacks it, so the volume is reconciled.
    etcd.kill();
    let began = Instant::now();
    daemon.stop();
    let took = began.elapsed();
    assert!(took < Duration::from_secs(30), "{took:?}");
    etcd.run();
    let mut daemon = place.start();
    healthy(&mut daemon);
    let opened = events(&mut daemon, "volume_open");
    assert_eq!(opened[0]["facts"]["clean"], false, "{opened:?}");
    daemon.stop();
    let mut daemon = place.start();
    healthy(&mut daemon);
    let opened = events(&mut daemon, "volume_open");
    assert_eq!(opened[0]["facts"]["clean"], true, "{opened:?}");
    daemon.stop();
}

/// Goal: a prefix is one daemon's, and a takeover is possible by name. Method: a second daemon with
/// the same prefix while the first one runs; then with the claim that the refusal names.
#[test]
fn a_prefix_in_use_is_refused() {
    let Some(etcd) = Etcd::start("a_prefix_in_use_is_refused") else {
        return;
    };
    let place = etcd.place("lab");
    let mut daemon = place.start();
    create(&mut daemon);
    let second = etcd.place("lab");
    let said = refused(&second);
    assert!(said.contains("belongs to another daemon"), "{said}");
    let (_, claim) = said.split_once("take_over = \"").expect("a remedy");
    let claim = claim.split('"').next().expect("a claim");
    daemon.kill();
    let second = second.with("NACRE_STORE_TAKE_OVER", claim);
    let mut daemon = second.start();
    let volumes = daemon.call("volume_list", json!({}));
    assert!(volumes.to_string().contains("\"v\""), "{volumes}");
    daemon.stop();
    // The claim is used up: the first daemon does not come back by itself.
    let said = refused(&place);
    assert!(said.contains("belongs to another daemon"), "{said}");
    second.start().stop();
}

/// Goal: volumes of the file move to etcd, and no start serves without them. Method: `[store]`
/// appears, changes its prefix, and disappears; etcd is replaced by an empty one.
#[test]
fn volumes_move_to_etcd() {
    let Some(mut etcd) = Etcd::start("volumes_move_to_etcd") else {
        return;
    };
    let place = Place::new().on_cores(2);
    let mut daemon = place.start();
    create(&mut daemon);
    daemon.stop();
    let url = etcd.url();
    let configured = |prefix: &str, place: Place| {
        place
            .with("NACRE_STORE_ENDPOINTS", &url)
            .with("NACRE_STORE_PREFIX", prefix)
    };
    let place = configured("lab", place);
    for _ in 0..2 {
        let mut daemon = place.start();
        healthy(&mut daemon);
        daemon.stop();
    }
    assert!(place.path("data/volumes.redb.moved").exists());
    assert!(!place.path("data/volumes.redb").exists());
    let place = configured("lab2", place);
    let said = refused(&place);
    assert!(said.contains("in etcd /nacre/lab/"), "{said}");
    let place = place
        .without("NACRE_STORE_ENDPOINTS")
        .without("NACRE_STORE_PREFIX");
    let said = refused(&place);
    assert!(said.contains("has no [store]"), "{said}");
    let place = configured("lab", place);
    etcd.kill();
    std::fs::remove_dir_all(etcd.dir.path().join("m")).expect("removed");
    etcd.run();
    let said = refused(&place);
    assert!(said.contains("has lost its data"), "{said}");
}
