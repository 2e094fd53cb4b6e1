//! Tests of the signals that the kernel, systemd, log rotation and scripts send.

use std::time::{Duration, Instant};

use nacre_tests::daemon::{Daemon, Place};
use rustix::process::Signal;
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(120);

fn until(daemon: &Daemon, what: &str, is: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is() {
        assert!(Instant::now() < end, "{what}\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A mask in /proc/PID/status (proc_pid_status(5)): bit N - 1 is signal N.
fn mask(daemon: &Daemon, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid()));
    let status = status.expect("the daemon's status");
    let line = status.lines().find_map(|l| l.strip_prefix(name));
    let mask = line.unwrap_or_default().trim_start_matches(':').trim();
    u64::from_str_radix(mask, 16).expect("a mask")
}

/// Every signal whose default action ends the process, except those that stop the daemon, report
/// faults, or cannot be caught.
fn harmless() -> Vec<i32> {
    let named = [1, 10, 12, 13, 14, 16, 24, 25, 26, 27, 29, 30];
    named.into_iter().chain(34..=64).collect()
}

fn send(daemon: &Daemon, number: i32) {
    // By the shell, whose numbers include the real-time signals.
    let pid = daemon.pid().to_string();
    let status = std::process::Command::new("kill")
        .args([&format!("-{number}"), &pid])
        .status();
    assert!(status.expect("kill runs").success(), "signal {number}");
}

/// Goal: none of these signals ends the daemon in any phase, with or without I/O. Method: a start
/// and a stream of signals from the first moment; then a stop, which still exits with 0.
#[test]
fn no_other_signal_ends_the_daemon() {
    let place = Place::new();
    let mut daemon = place.spawn();
    // Before its first instructions no program can handle a signal.
    until(&daemon, "it takes SIGHUP", || {
        mask(&daemon, "SigCgt") & 1 != 0
    });
    until(&daemon, "it takes the last", || {
        mask(&daemon, "SigCgt") >> 63 != 0
    });
    let kept = mask(&daemon, "SigCgt") | mask(&daemon, "SigIgn");
    for number in harmless() {
        assert!(kept >> (number - 1) & 1 == 1, "signal {number} ends it");
    }
    for number in [10, 1, 12, 14, 13, 64] {
        send(&daemon, number);
    }
    daemon.call("framework_wait_init", json!(null));
    daemon.create_ram("m", 512, 1 << 20);
    for number in harmless() {
        send(&daemon, number);
    }
    for _ in 0..20 {
        daemon.signal(Signal::HUP);
        daemon.signal(Signal::USR1);
        daemon.call("bdev_get_bdevs", json!({ "name": "m" }));
    }
    for name in ["SIGHUP", "SIGUSR1"] {
        daemon.call("spdk_kill_instance", json!({ "sig_name": name }));
    }
    daemon.call("bdev_get_bdevs", json!({ "name": "m" }));
    daemon.stop();
}

/// Goal: SIGHUP reopens the log file and applies the configuration changes that it can. The log
/// names the others, and an invalid file changes nothing. Method: a log file that is renamed, and
/// three versions of a configuration file.
#[test]
fn sighup_reloads_the_configuration_and_reopens_the_log() {
    let place = Place::new();
    let (config, log, old) = (
        place.path("nacre.toml"),
        place.path("nacre.log"),
        place.path("nacre.log.1"),
    );
    let write = |text: &str| {
        let text = format!("{text}\n[[bdev]]\nname = \"a\"\ntype = \"null\"\nsize = \"1MiB\"\n");
        std::fs::write(&config, text).expect("room");
    };
    // Relative to the directory of the configuration file.
    let file = "[log]\nfile = \"nacre.log\"\n";
    write(file);
    let place = place.with("NACRE_CONFIG", config.display());
    let mut daemon = place.start();
    let said = |text: &str| {
        std::fs::read_to_string(&log)
            .unwrap_or_default()
            .contains(text)
    };
    until(&daemon, "it logs to the file", || said("ready"));
    std::fs::rename(&log, &old).expect("in one directory");
    let new = "level = \"debug\"\n[reactor]\nbusy_poll_us = 7\n[[bdev]]\nname = \"b\"\ntype = \"null\"\nsize = \"2MiB\"\n";
    write(&format!("{file}{new}"));
    daemon.signal(Signal::HUP);
    until(&daemon, "the file is reopened", || log.exists());
    until(&daemon, "it is read", || said("at the next start"));
    assert!(said("applied: log.level, [[bdev]] \"b\""), "{}", read(&log));
    assert!(
        said("at the next start: reactor.busy_poll_us"),
        "{}",
        read(&log)
    );
    assert!(!read(&old).contains("applied"), "{}", read(&old));
    let level = daemon.call("log_get_level", json!(null));
    assert_eq!(level, "DEBUG");
    daemon.call("bdev_get_bdevs", json!({ "name": "b" }));

    write("[log]\nlevle = 1\n");
    daemon.signal(Signal::HUP);
    until(&daemon, "it is refused", || said("did you mean"));
    daemon.call("bdev_get_bdevs", json!({ "name": "a" }));
    daemon.stop();
}

fn read(path: &std::path::Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}
