//! Goal: a daemon that is killed, stopped or frozen at any moment loses no acknowledged write, and
//! hosts reconnect by themselves.

use std::time::Duration;

use nacre_bdev::Status;
use nacre_nvmf::host::IoStats;
use nacre_tests::at_length;
use nacre_tests::daemon::{Daemon, Place, free_address};
use nacre_tests::host::{Host, options};
use nacre_tests::seed;
use rustix::process::Signal;
use serde_json::json;

use crate::ledger::BLOCK;
use crate::load::{BLOCKS, Load};

const NQN: &str = "nqn.2025-01.io.nacre:crash";

/// Serves a file for [`Load`], on as many cores as there are queues, if the machine has them.
fn serve(place: &Place) -> (Daemon, std::net::SocketAddr, u32) {
    let mut daemon = place.start();
    daemon.create_file("disk", BLOCK as u32, (BLOCKS * BLOCK) as u64);
    daemon.create_subsystem(NQN);
    let nsid = daemon.add_namespace(NQN, "disk");
    let address = daemon.listen(NQN, "127.0.0.1:0");
    (daemon, address, nsid)
}

fn two_cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(2))
}

/// Goal: no acknowledged write is lost, torn or applied late, however often the daemon ends.
/// Method: verified load with flushes on a file over two queues. At random moments the daemon is
/// killed with kill -9, or sometimes stopped in order, and restarted while the load runs; the host
/// reconnects and resends by itself. Reads are checked all the time, and every block at the end,
/// after a last restart.
#[test]
fn nothing_acknowledged_is_lost_to_kill_9() {
    let mut rng = seed::announced("nothing_acknowledged_is_lost_to_kill_9");
    let place = Place::new().on_cores(two_cores());
    let (mut daemon, address, nsid) = serve(&place);
    let mut load = Load::start(address, options(NQN), nsid, &mut rng);
    load.run(1000);
    // Number of kills and stops.
    let ends: u64 = at_length(4, 12);
    for end in 0..ends {
        let after = Duration::from_micros(rng.below(150_000));
        daemon = load.run_during(|| {
            std::thread::sleep(after);
            match end % 4 {
                3 => daemon.stop(),
                _ => daemon.kill(),
            }
            place.start()
        });
        load.run(300);
        load.until_connected();
    }
    load.drain();
    let flushed = load.ledger.entries.iter().filter(|e| e.flushed > 0);
    assert!(flushed.count() > BLOCKS / 2, "hardly anything was flushed");
    load.check_all("after the load");
    daemon.kill();
    let daemon = place.start();
    load.check_all("after the last restart");

    let stats = load.stats();
    let all_lost = |s: &IoStats| s.losses > ends;
    assert!(
        stats.iter().all(all_lost),
        "not every end was met: {stats:?}"
    );
    assert!(
        stats.iter().any(|s| s.resent > 0),
        "nothing was under way: {stats:?}"
    );
    daemon.stop();
}

/// Goal: a frozen target never applies commands of an abandoned connection after commands that the
/// host resent. Method: the process is stopped (SIGSTOP) under verified load for longer than the
/// host's I/O timeout, and continued. It finds the old connections full of commands, and the new
/// ones beside them.
#[test]
fn a_frozen_daemon_does_not_write_late() {
    let mut rng = seed::announced("a_frozen_daemon_does_not_write_late");
    let place = Place::new().on_cores(two_cores());
    let (daemon, address, nsid) = serve(&place);
    let mut patient = options(NQN);
    patient.io_timeout = Duration::from_millis(100);
    patient.connect_timeout = Duration::from_millis(300);
    let mut load = Load::start(address, patient, nsid, &mut rng);
    load.run(500);
    for _ in 0..at_length(1, 3) {
        let (before, after) = (load.stats(), Duration::from_micros(rng.below(20_000)));
        load.run_during(|| {
            std::thread::sleep(after);
            daemon.signal(Signal::STOP);
            std::thread::sleep(Duration::from_millis(700));
            daemon.signal(Signal::CONT);
        });
        load.run(500);
        load.until_connected();
        let more = |(now, before): (&IoStats, &IoStats)| now.losses > before.losses;
        assert!(
            load.stats().iter().zip(&before).all(more),
            "the host waited"
        );
    }
    load.drain();
    load.check_all("after the load");
    daemon.stop();
}

/// Goal: after a crash, a host of one of many subsystems on a port finds its namespace and its
/// permission again. During the restart it never gets a permanent refusal. Method: listeners are
/// created before everything else, so a replay in that order would have a moment for each wrong
/// answer; hosts retry all the time.
#[test]
fn hosts_reconnect_to_a_daemon_that_is_still_restoring() {
    const SUBSYSTEMS: u32 = 24;
    let place = Place::new();
    let mut daemon = place.start();
    let address = free_address("127.0.0.1").to_string();
    let name = |n: u32| format!("{NQN}-{n}");
    for n in 0..SUBSYSTEMS {
        let (nqn, bdev) = (name(n), format!("ram{n}"));
        daemon.call("nvmf_create_subsystem", json!({ "nqn": nqn }));
        daemon.listen(&nqn, &address);
        daemon.create_ram(&bdev, 512, 64 << 10);
        daemon.add_namespace(&nqn, &bdev);
        let host = nacre_tests::host::HOSTNQN;
        daemon.call(
            "nvmf_subsystem_add_host",
            json!({ "nqn": nqn, "host": host }),
        );
    }
    let address = address.parse().unwrap();
    let mut hosts: Vec<Host> = Vec::new();
    for n in [0, SUBSYSTEMS / 2, SUBSYSTEMS - 1] {
        let mut options = options(&name(n));
        options.reconnect_delay = Duration::from_millis(1);
        options.reconnect_delay_max = Duration::from_millis(1);
        hosts.push(Host::connected(address, options, &[1]));
    }
    for round in 0..2 {
        let (down, restarted) = std::thread::scope(|scope| {
            let restart = scope.spawn(|| {
                daemon.kill();
                place.start()
            });
            let mut down = 0;
            while !restart.is_finished() {
                for host in &mut hosts {
                    host.turn_or_nap();
                    down |= u32::from(!host.controller.is_live());
                }
            }
            (down, restart.join().expect("the restart ends"))
        });
        daemon = restarted;
        assert_eq!(down, 1, "no host noticed");
        for host in &mut hosts {
            host.until("live again", |h| {
                let over = h.controller.link().has_failed();
                assert!(!over, "round {round}: {:?}", h.controller.state());
                h.controller.is_live()
            });
            let known = host.controller.link().state().namespaces.len();
            assert_eq!(
                known, 1,
                "round {round}: it came back without its namespace"
            );
            host.until("its queue is live again", |h| h.queues[0].is_live());
            assert_eq!(host.write(0, 0, 1, &[round; 512]), Status::Ok);
        }
    }
}
