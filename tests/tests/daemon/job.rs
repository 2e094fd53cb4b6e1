//! Tests the basic use of the daemon: a file is served without a configuration, a host writes it,
//! and reads the same data after a restart.

use std::time::Duration;

use nacre_bdev::Status;
use nacre_tests::daemon::Place;
use nacre_tests::host::{Host, options, pattern};
use serde_json::{Value, json};

const NQN: &str = "nqn.2025-01.io.nacre:job";
const BLOCK: u32 = 4096;
const BYTES: u64 = 16 << 20;

/// Goal: data written is read back, across a stop and a start. The stop drains: the host's
/// connections end, the process exits with 0, and objects created by RPC are unchanged. Method:
/// writes of several sizes at both ends of the device, read back before and after.
#[test]
fn data_and_objects_survive_a_stop_and_a_start() {
    let place = Place::new();
    let mut daemon = place.start();
    daemon.create_file("disk", BLOCK, BYTES);
    daemon.create_ram("ram", 512, 1 << 20);
    daemon.create_subsystem(NQN);
    let nsid = daemon.add_namespace(NQN, "disk");
    daemon.add_namespace(NQN, "ram");
    let address = daemon.listen(NQN, "127.0.0.1:0");
    daemon.listen(NQN, "127.0.0.1:0");
    let host = "nqn.2025-01.io.nacre:another";
    daemon.call(
        "nvmf_subsystem_add_host",
        json!({ "nqn": NQN, "host": host }),
    );

    let mut host = Host::connected(address, options(NQN), &[nsid, nsid]);
    let last = BYTES / u64::from(BLOCK) - 1;
    let places = [(0, 1), (1, 2), (3, 32), (100, 8), (last, 1)];
    for (seed, (lba, blocks)) in places.into_iter().enumerate() {
        let data = pattern((blocks * BLOCK) as usize, seed as u64);
        assert_eq!(host.write(0, lba, blocks, &data), Status::Ok);
    }
    assert_eq!(host.flush(1), Status::Ok);
    let check = |host: &mut Host| {
        for (seed, (lba, blocks)) in places.into_iter().enumerate() {
            let len = (blocks * BLOCK) as usize;
            let found = host.read(1, lba, blocks, len);
            assert!(
                found == pattern(len, seed as u64),
                "{lba}+{blocks} is damaged"
            );
        }
    };
    check(&mut host);
    assert_eq!(
        host.write(0, last + 1, 1, &pattern(4096, 9)),
        Status::OutOfRange
    );
    assert_eq!(host.buffers_in_use(), 0);

    let before = (
        daemon.subsystem(NQN),
        bdevs(daemon.call("bdev_get_bdevs", Value::Null)),
    );
    let namespace = host.controller.link().namespace(nsid).unwrap();
    assert_eq!(before.0["namespaces"].as_array().unwrap().len(), 2);
    assert_eq!(before.0["listen_addresses"].as_array().unwrap().len(), 2);
    daemon.stop();
    assert!(!place.socket().exists(), "the socket is taken away");
    host.until("noticed", |h| !h.controller.is_live());

    let mut daemon = place.start();
    let after = (
        daemon.subsystem(NQN),
        bdevs(daemon.call("bdev_get_bdevs", Value::Null)),
    );
    assert_eq!(after, before);
    // The same host reconnects by itself.
    host.until("back", |h| h.controller.is_live());
    assert_eq!(host.controller.link().namespace(nsid).unwrap(), namespace);
    check(&mut host);
    assert_eq!(host.queues[0].stats().losses, 1);
    host.disconnect();
    daemon.stop();
}

/// The listed bdevs without their activity.
fn bdevs(listed: Value) -> Vec<Value> {
    let of = |b: &Value| {
        json!([
            b["name"],
            b["uuid"],
            b["num_blocks"],
            b["block_size"],
            b["aliases"]
        ])
    };
    listed.as_array().unwrap().iter().map(of).collect()
}

/// Goal: a drain does not wait for hosts without a limit, and I/O in flight is completed or
/// dropped, never applied in part. Method: a device with a latency of 60 s per I/O, stopped with
/// some in flight.
#[test]
fn a_stop_does_not_wait_for_a_slow_device() {
    let place = Place::new();
    let mut daemon = place.start();
    daemon.create_ram("ram", 512, 1 << 20);
    let slow = json!({ "base_bdev_name": "ram", "name": "slow", "avg_read_latency": 60_000_000,
        "p99_read_latency": 60_000_000, "avg_write_latency": 60_000_000, "p99_write_latency": 60_000_000 });
    daemon.call("bdev_delay_create", slow);
    daemon.create_subsystem(NQN);
    let nsid = daemon.add_namespace(NQN, "slow");
    let address = daemon.listen(NQN, "127.0.0.1:0");
    let mut host = Host::connected(address, options(NQN), &[nsid]);
    for lba in 0..8 {
        let buf = host.buf(512).unwrap();
        let io = |token| nacre_bdev::Io::new(token, nacre_bdev::Op::Read, lba, 1).with(buf);
        host.submit(0, io).unwrap();
    }
    host.pass(Duration::from_millis(50));
    let begun = std::time::Instant::now();
    daemon.stop();
    assert!(
        begun.elapsed() < Duration::from_secs(50),
        "it waited {:?}",
        begun.elapsed()
    );
}

/// Goal: two daemons never share a socket or data directory; remains of a dead daemon do not
/// prevent a start. Method: a second daemon on the same socket, and on the same data directory;
/// then kill -9, which leaves the socket and the lock file.
#[test]
fn a_second_daemon_is_refused_and_a_dead_one_replaced() {
    let place = Place::new();
    let daemon = place.start();
    let pid = format!("pid {}", daemon.pid());
    let (data, other) = (place.path("data"), place.path("other"));
    for (socket, data) in [(place.socket(), other.clone()), (other, data)] {
        let second = place.serve_command(&socket, &data).output().unwrap();
        let said = String::from_utf8_lossy(&second.stderr);
        assert_eq!(second.status.code(), Some(1), "{said}");
        assert!(said.contains(&pid), "it does not name {pid}: {said}");
    }
    daemon.kill();
    assert!(place.socket().exists());
    let mut daemon = place.start();
    assert_eq!(daemon.call("bdev_get_bdevs", Value::Null), json!([]));
    daemon.stop();
}

/// Goal: a daemon whose log reader stalls (a hung disk, a pager) starts, serves and stops normally.
/// Method: its stderr is a pipe that is full before it starts.
#[test]
fn a_stalled_log_reader_does_not_stop_the_daemon() {
    use rustix::fs::{OFlags, fcntl_setfl};
    use std::io::Write;

    let (reader, mut log) = std::io::pipe().expect("a pipe");
    fcntl_setfl(&log, OFlags::NONBLOCK).expect("it is ours");
    while log.write(&[b'.'; 1024]).is_ok() {}
    fcntl_setfl(&log, OFlags::empty()).expect("it is ours");
    let place = Place::new();
    let mut daemon = place.spawn_logging_to(log);
    daemon.call("framework_wait_init", Value::Null);
    daemon.create_ram("ram", BLOCK, 1 << 20);
    daemon.create_subsystem(NQN);
    let nsid = daemon.add_namespace(NQN, "ram");
    let address = daemon.listen(NQN, "127.0.0.1:0");
    let mut host = Host::connected(address, options(NQN), &[nsid]);
    let data = pattern(BLOCK as usize, 1);
    assert_eq!(host.write(0, 7, 1, &data), Status::Ok);
    assert_eq!(host.read(0, 7, 1, BLOCK as usize), data);
    host.disconnect();
    daemon.stop();
    drop(reader);
}
