//! Goal: the operator's commands work with the real daemon. Method: `nacre serve` in its own
//! directory; commands create, change, list and delete every kind of object.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nacre_random_ports::free_address;
use serde_json::{Value, json};

use super::fake::{Outcome, cells, nacre};

pub(crate) struct Daemon {
    child: Child,
    directory: tempfile::TempDir,
}

impl Daemon {
    pub(crate) fn serve() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let mut child = Command::new(env!("CARGO_BIN_EXE_nacre"))
            .env_clear()
            .env("HOME", directory.path())
            // Its usual port may be taken on this machine.
            .env("NACRE_NVMF_DISCOVERY_PORT", "0")
            .args([
                "serve",
                "--cores",
                "auto:1",
                "--mem-size",
                "32",
                "--data-dir",
            ])
            .arg(at("data"))
            .arg("-r")
            .arg(at("rpc.sock"))
            .stderr(Stdio::from(std::fs::File::create(at("log")).unwrap()))
            .spawn()
            .unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while nacre("rpc framework_wait_init", &at("rpc.sock")).code != 0 {
            let ended = child.try_wait().unwrap();
            assert!(
                ended.is_none() && Instant::now() < until,
                "{ended:?}: {}",
                std::fs::read_to_string(at("log")).unwrap()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        Self { child, directory }
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn nacre(&self, words: &str) -> Outcome {
        nacre(words, &self.path().join("rpc.sock"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The directory goes with it: nothing is left that an orderly end would save.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const NQN: &str = "nqn.2026-01.io.nacre:disk";

#[test]
fn an_operators_day() {
    let daemon = Daemon::serve();
    let file = daemon.path().join("disk.img");
    // Devices of every kind.
    let name = |words: &str| {
        daemon
            .nacre(&format!("bdev create {words}"))
            .printed()
            .trim_end()
            .to_owned()
    };
    assert_eq!(name("malloc --size 4MiB"), "Malloc0");
    assert_eq!(name("null null0 --size 1GiB --block-size 4096"), "null0");
    assert_eq!(
        name(&format!("file disk {} --size 8MiB", file.display())),
        "disk"
    );
    assert_eq!(name("delay slow null0 --read 1ms --write 2ms"), "slow");
    assert_eq!(name("error Malloc0"), "EE_Malloc0");
    assert_eq!(name("passthru pass EE_Malloc0"), "pass");
    assert_eq!(std::fs::metadata(&file).unwrap().len(), 8 << 20);
    let listed = daemon.nacre("bdev list --json").json();
    assert_eq!(listed.as_array().unwrap().len(), 6);
    let slow = daemon.nacre("bdev show slow --json").json();
    assert_eq!(slow["driver_specific"]["delay"]["p99_write_latency"], 2000);
    let again = daemon.nacre("bdev create null null0 --size 1GiB").failed(4);
    assert!(
        again.starts_with("error: name: ") && again.contains("already"),
        "{again}"
    );

    // Sizes.
    assert_eq!(
        daemon.nacre("bdev resize disk 16MiB").printed(),
        "16.0 MiB\n"
    );
    assert_eq!(
        daemon.nacre("bdev resize null0 2GiB --json").json(),
        json!({ "name": "null0", "size": 2u64 << 30 })
    );
    std::fs::OpenOptions::new()
        .write(true)
        .open(&file)
        .unwrap()
        .set_len(24 << 20)
        .unwrap();
    assert_eq!(daemon.nacre("bdev rescan disk").printed(), "24.0 MiB\n");

    // Hosts get them.
    daemon
        .nacre(&format!("subsystem create {NQN} --namespace pass"))
        .printed();
    assert_eq!(
        daemon
            .nacre(&format!("subsystem add-namespace {NQN} disk --nsid 5"))
            .printed(),
        "5\n"
    );
    let free = free_address(IpAddr::V4(Ipv4Addr::LOCALHOST));
    assert_eq!(
        daemon
            .nacre(&format!("listener add {NQN} {free}"))
            .printed(),
        format!(
            "nvme connect -t tcp -a 127.0.0.1 -s {} -n {NQN}\n",
            free.port()
        )
    );
    assert_eq!(
        daemon.nacre(&format!("listener list {NQN} --json")).json()[0]["address"]["trsvcid"],
        free.port().to_string()
    );
    let host = "nqn.2014-08.org.nvmexpress:uuid:11111111-1111-4111-8111-111111111111";
    daemon.nacre(&format!("host allow {NQN} {host}")).printed();
    assert_eq!(cells(&daemon.nacre("host list").printed()), [[NQN, host]]);
    daemon.nacre(&format!("host remove {NQN} {host}")).printed();
    daemon.nacre(&format!("host allow-any {NQN}")).printed();
    assert_eq!(cells(&daemon.nacre("host list").printed()), [[NQN, "any"]]);
    let missing = daemon
        .nacre(&format!("subsystem add-namespace {NQN} nothing"))
        .failed(4);
    assert!(
        missing.contains("namespace.bdev_name: ") && !missing.contains('\n'),
        "{missing}"
    );

    // With one of them under load, the counters match the host's.
    let mut perf = Command::new(env!("CARGO_BIN_EXE_nacre"))
        .env_clear()
        .env("HOME", daemon.path())
        .args([
            "perf",
            &format!("tcp://{free}/{NQN}?nsid=1"),
            "--rw",
            "randread",
            "--queues",
            "1",
        ])
        .args(["--seconds", "60", "--rate", "200", "--quiet"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    let seen = loop {
        let seen = daemon.nacre("top --json --interval 500ms").json();
        let pass = seen["namespaces"]
            .as_array()
            .unwrap()
            .iter()
            .find(|n| n["bdev_name"] == "pass")
            .unwrap()
            .clone();
        if pass["read"]["iops"].as_f64().unwrap() > 0.0 {
            assert!(pass["latency_p99_us"].as_f64().unwrap() > 0.0, "{pass}");
            break seen;
        }
        assert!(Instant::now() < until, "{seen}");
    };
    assert_eq!(seen["connections"][0]["nqn"], NQN);
    assert_eq!(seen["listeners"][0]["queues"], 2);
    assert!(
        seen["reactors"][0]["share"]["sleep"].as_f64().is_some() && seen["refused"] == json!([]),
        "{seen}"
    );
    let connections = daemon.nacre("subsystem connections --json").json();
    let ours = connections
        .as_array()
        .unwrap()
        .iter()
        .find(|s| s["nqn"] == NQN)
        .unwrap();
    assert_eq!(ours["qpairs"].as_array().unwrap().len(), 2);
    let table = daemon
        .nacre(&format!("subsystem connections {NQN}"))
        .printed();
    assert_eq!(
        cells(&table)[0][3..6],
        ["1", "enabled", "127.0.0.1"],
        "{table}"
    );
    let iostat = daemon.nacre("bdev iostat pass --json").json();
    assert!(
        iostat["bdevs"][0]["num_read_ops"].as_u64().unwrap() > 0,
        "{iostat}"
    );
    // Its histogram was enabled for top only.
    assert!(
        daemon
            .nacre("rpc bdev_get_histogram name=pass")
            .failed(4)
            .contains("Bad address")
    );

    // Faults reach it.
    daemon
        .nacre("bdev inject EE_Malloc0 read failure --count 1000000")
        .printed();
    assert_eq!(perf.wait().unwrap().code(), Some(1));
    daemon.nacre("bdev inject EE_Malloc0 clear").printed();

    // A volume, of files.
    for n in 0..2 {
        let image = daemon.path().join(format!("replica{n}.img"));
        name(&format!("file replica{n} {} --size 4MiB", image.display()));
    }
    assert_eq!(
        daemon
            .nacre("volume create vol0 replica0 replica1")
            .printed(),
        "vol0\n"
    );
    daemon.nacre("volume resync vol0 --wait").printed();
    let listed = daemon.nacre("volume list").printed();
    assert_eq!(
        cells(&listed)[0][..5],
        ["vol0", "healthy", "3.0", "MiB", "2/2"]
    );
    daemon.nacre("volume verify vol0 --wait").printed();
    daemon.nacre("volume offline vol0 replica1").printed();
    let shown = daemon.nacre("volume show vol0").printed();
    assert!(shown.contains("replica1 is out: "), "{shown}");
    let kept = daemon
        .nacre("volume remove-replica vol0 replica0")
        .failed(4);
    assert!(kept.contains("force: "), "{kept}");
    daemon.nacre("volume online vol0 replica1 --wait").printed();
    let told = daemon.nacre("events --category replica").printed();
    assert!(told.contains("is in sync"), "{told}");
    daemon.nacre("bdev delete vol0").printed();
    daemon.nacre("bdev delete replica0 replica1").printed();

    // Everything can be removed; a device goes with its users.
    daemon
        .nacre(&format!("listener remove {NQN} {free}"))
        .printed();
    daemon
        .nacre(&format!("subsystem remove-namespace {NQN} 5"))
        .printed();
    daemon.nacre("bdev delete Malloc0 null0 disk").printed();
    assert_eq!(daemon.nacre("bdev list --json").json(), json!([]));
    let subsystem = daemon.nacre(&format!("subsystem show {NQN} --json")).json();
    assert_eq!(subsystem["namespaces"], json!([]));
    daemon.nacre(&format!("subsystem delete {NQN}")).printed();
    let left: Vec<Value> = daemon
        .nacre("subsystem list --json")
        .json()
        .as_array()
        .unwrap()
        .clone();
    assert!(left.iter().all(|s| s["nqn"] != NQN), "{left:?}");
    assert!(file.exists());
}

/// Goal: a command takes any path, and changes no file but that of the device. Method: a path
/// that is not UTF-8, and a file that was put in the place of the device's.
#[test]
fn paths_of_files() {
    use std::os::unix::ffi::OsStrExt;
    let daemon = Daemon::serve();
    let odd = daemon.path().join(std::ffi::OsStr::from_bytes(b"\xff.img"));
    for words in [
        &["bdev", "create", "file", "odd"][..],
        &["serve", "--data-dir", "none", "-r"],
        &["serve", "-r", "s", "--data-dir"],
        &["serve", "-r", "s", "--data-dir", "none", "--log-file"],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_nacre"))
            .env_clear()
            .env("NACRE_RPC_SOCKET", daemon.path().join("rpc.sock"))
            .args(words)
            .arg(&odd)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{words:?}: {said}");
        assert!(
            said.contains("UTF-8") && said.lines().count() == 1,
            "{words:?}: {said}"
        );
    }

    let file = daemon.path().join("disk.img");
    let create = format!("bdev create file disk {} --size 1MiB", file.display());
    daemon.nacre(&create).printed();
    std::fs::rename(&file, daemon.path().join("moved")).unwrap();
    std::fs::write(&file, "precious").unwrap();
    let refused = daemon.nacre("bdev resize disk 2MiB");
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.err.contains("another file"), "{refused:?}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
    std::fs::rename(daemon.path().join("moved"), &file).unwrap();
    daemon.nacre("bdev resize disk 2MiB").printed();
    let refused = daemon.nacre("bdev accept disk");
    assert_eq!(refused.code, 4, "there is nothing to accept: {refused:?}");
}

/// Goal: parts are made, used over TCP and deleted together; their base may go while a host uses
/// one.
#[test]
fn parts_of_a_device() {
    let daemon = Daemon::serve();
    daemon.nacre("bdev create malloc ram --size 9MiB").printed();
    assert_eq!(
        daemon
            .nacre("bdev create split ram 2 --split-size-mb 4")
            .printed(),
        "ramp0\nramp1\n"
    );
    let listed = daemon.nacre("bdev show ramp1 --json").json();
    assert_eq!(listed["driver_specific"]["split"]["offset_blocks"], 8192);
    let some = daemon.nacre("bdev delete ramp0").failed(1);
    assert_eq!(
        some,
        "error: ramp0: it can only be deleted together with the others on the same device; nacre bdev delete ramp0 ramp1"
    );
    let fixed = daemon.nacre("bdev resize ramp0 5MiB").failed(1);
    assert!(
        fixed.contains("devices of this kind have a fixed size"),
        "{fixed}"
    );
    let mistyped = daemon.nacre("bdev create split rma 2").failed(4);
    assert!(mistyped.contains("there is no bdev"), "{mistyped}");
    let names = json!({ "names": ["ramp0", "ramp1"] });
    assert_eq!(daemon.nacre("bdev delete ramp1 ramp0").printed(), "");
    assert_eq!(daemon.nacre("bdev create split ram 2 --json").json(), names);

    daemon
        .nacre(&format!("subsystem create {NQN} --namespace ramp1"))
        .printed();
    let free = free_address(IpAddr::V4(Ipv4Addr::LOCALHOST));
    daemon
        .nacre(&format!("listener add {NQN} {free}"))
        .printed();
    daemon.nacre(&format!("host allow-any {NQN}")).printed();
    let mut perf = Command::new(env!("CARGO_BIN_EXE_nacre"))
        .env_clear()
        .env("HOME", daemon.path())
        .args(["perf", &format!("tcp://{free}/{NQN}?nsid=1")])
        .args([
            "--rw",
            "randwrite",
            "--queues",
            "1",
            "--seconds",
            "60",
            "--quiet",
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    let written = || {
        let stats = daemon.nacre("rpc bdev_get_iostat names=[\"ramp1\"]").json();
        stats["bdevs"][0]["num_write_ops"].as_u64().unwrap()
    };
    while written() == 0 {
        assert!(Instant::now() < until, "the host writes nothing");
    }
    assert_eq!(daemon.nacre("bdev delete ram").printed(), "");
    assert_eq!(daemon.nacre("bdev list --json").json(), json!([]));
    perf.kill().unwrap();
    perf.wait().unwrap();
}
