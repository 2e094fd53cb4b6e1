//! Goal: `nacre test` passes on good paths, restores what it changes, and refuses what would stop
//! hosts. Method: `nacre serve` with one namespace and two TCP listeners.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nacre_random_ports::local_port;

use super::real::Daemon;

const NQN: &str = "nqn.2026-01.io.nacre:paths";

fn free() -> String {
    format!("127.0.0.1:{}", local_port())
}

/// A daemon whose first listener is optimized and whose second is not.
fn daemon() -> (Daemon, [String; 2]) {
    let daemon = Daemon::serve();
    daemon
        .nacre("bdev create malloc ram --size 16MiB")
        .printed();
    let create = format!("subsystem create {NQN} --ana --allow-any-host --namespace ram");
    daemon.nacre(&create).printed();
    let addresses = [free(), free()];
    for address in &addresses {
        daemon
            .nacre(&format!("listener add {NQN} {address}"))
            .printed();
    }
    let second = &addresses[1];
    daemon
        .nacre(&format!("listener set-ana {NQN} {second} non-optimized"))
        .printed();
    (daemon, addresses)
}

fn state(daemon: &Daemon, index: usize) -> String {
    let all = daemon.nacre(&format!("listener list {NQN} --json")).json();
    all[index]["ana_states"][0]["ana_state"]
        .as_str()
        .unwrap()
        .to_owned()
}

#[test]
fn failover_moves_io_and_restores() {
    let (daemon, [first, second]) = daemon();
    let run = |words: &str| {
        let quick = "--for 2s --around 1s --settle 300ms --range 1MiB";
        daemon.nacre(&format!("test failover --listener {first} {quick} {words}"))
    };
    // By the listener alone, writing.
    let found = run("--overwrite --to tcp --json").json();
    assert_eq!(found["failures"], serde_json::json!([]), "{found}");
    assert_eq!(found["subsystem"], NQN);
    let withdrawn = &found["phases"][1];
    assert!(withdrawn["paths"][1]["ios"].as_u64().unwrap() > 500);
    for phase in [0, 2] {
        let ios = &found["phases"][phase]["paths"][0]["ios"];
        assert!(ios.as_u64().unwrap() > 100, "{found}");
    }
    assert!(found["seconds"].as_array().unwrap().len() >= 3);
    assert!(found["contents"]["units_written"].as_u64().unwrap() > 256);
    assert_eq!(found["contents"]["units_wrong"], 0);
    assert_eq!(state(&daemon, 0), "optimized");
    // By the device's name, only reading, for people.
    let text = daemon
        .nacre(&format!(
            "test failover ram --listener {first} --for 1s --around 1s --settle 300ms --range 1MiB"
        ))
        .printed();
    assert!(text.ends_with("passed\n"), "{text}");
    assert!(text.contains(&format!("tcp://{first} is inaccessible for 1 s")));
    // A killed command, and the command that ends its test.
    let mut killed = Command::new(env!("CARGO_BIN_EXE_nacre"))
        .env_clear()
        .env("HOME", daemon.path())
        .args(["test", "failover", "--listener", &first, "--for", "5m"])
        .args(["--around", "200ms", "--range", "1MiB", "-r"])
        .arg(daemon.path().join("rpc.sock"))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    while state(&daemon, 0) != "inaccessible" {
        assert!(Instant::now() < until, "the test does not start");
        std::thread::sleep(Duration::from_millis(50));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert_eq!(state(&daemon, 0), "inaccessible");
    // Without another accessible listener nothing is tested.
    let refused = daemon
        .nacre(&format!("test failover --listener {second} --for 1s"))
        .failed(2);
    assert!(refused.contains("no listener other than"), "{refused}");
    daemon
        .nacre(&format!("test failover --listener {first} --restore"))
        .printed();
    assert_eq!(state(&daemon, 0), "optimized");
    let refused = run("--to rdma").failed(2);
    assert!(refused.contains("--to: no other listener"), "{refused}");
    let refused = daemon
        .nacre("test failover --listener 127.0.0.1:9")
        .failed(2);
    assert!(refused.contains("no subsystem listens"), "{refused}");
}

#[test]
fn copies_over_every_path() {
    let (daemon, [first, second]) = daemon();
    let reads = daemon.nacre("test copy ram --json").json();
    assert_eq!(reads["failures"], serde_json::json!([]), "{reads}");
    let paths = &reads["report"]["paths"];
    assert_eq!(paths[0]["checksum"], paths[1]["checksum"]);
    assert_eq!(paths[0]["bytes_written"], 0);
    // Alone and together.
    assert_eq!(paths[1]["bytes_read"], 2 * (16 << 20));
    let writes = daemon
        .nacre(&format!(
            "test copy {NQN} --overwrite --offset 1MiB --range 2MiB --quiet"
        ))
        .printed();
    for path in [&first, &second] {
        let row = writes
            .lines()
            .find(|line| line.starts_with(&format!("tcp://{path}")));
        assert!(row.is_some_and(|row| row.ends_with("good")), "{writes}");
    }
    assert!(
        writes.contains("96 written") && writes.contains("0 wrong"),
        "{writes}"
    );
    // The first MiB stays as it was.
    let list = format!("listener set-ana {NQN} {second} inaccessible");
    daemon.nacre(&list).printed();
    let one = daemon.nacre("test copy ram --range 1MiB --json").json();
    assert_eq!(one["paths"][1]["notes"][0], "not tested: inaccessible");
    assert_eq!(one["failures"], serde_json::json!([]));
    let refused = daemon.nacre("test copy nothing").failed(2);
    assert!(refused.contains("nacre subsystem list"), "{refused}");
}
