//! A cluster made by the commands that docs/operate/cluster.md shows, and restored from its backup.

use std::path::PathBuf;
use std::process::Output;
use std::time::{Duration, Instant};

use nacre_cluster_etcd_members::{Members, program};
use nacre_nvmf_wire::StatusCode;
use nacre_tests::daemon::{Daemon, Place, free_address};
use serde_json::{Value, json};

use crate::ledger::BLOCK;
use crate::nodes::{PATIENCE, SIZE};
use crate::reservations::Host;

/// Bytes of a device before the data of the volume.
const RESERVED: usize = 1 << 20;

struct Machine {
    // Dropped before its place.
    daemon: Option<Daemon>,
    place: Place,
    name: &'static str,
    listen: String,
}

impl Machine {
    fn new(name: &'static str) -> Self {
        let place = Place::new();
        let file = place.path("nacre.toml");
        Self {
            daemon: None,
            place: place.with("NACRE_CONFIG", file.display()),
            name,
            listen: format!("tcp://{}", free_address("127.0.0.1")),
        }
    }

    fn run(&self, words: &[&str]) -> Output {
        let output = self.place.nacre().args(words).output();
        output.expect("nacre runs")
    }

    /// The output of a command that succeeds.
    fn said(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8(output.stdout).expect("text")
    }

    fn start(&mut self) {
        self.daemon = Some(self.place.start());
    }

    fn daemon(&mut self) -> &mut Daemon {
        self.daemon.as_mut().expect("it runs")
    }

    fn until(&mut self, what: &str, done: impl Fn(&Value) -> bool) {
        let end = Instant::now() + PATIENCE;
        loop {
            let status = self.daemon().call("cluster_get_status", Value::Null);
            if done(&status) {
                return;
            }
            assert!(Instant::now() < end, "never {what}: {status:#}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// The replica without the part that belongs to the volume.
    fn data(&self) -> Vec<u8> {
        let mut data = std::fs::read(self.place.path("disk.img")).expect("a file");
        data.drain(..RESERVED);
        data
    }

    /// The backups in the data directory.
    fn backups(&self) -> Vec<PathBuf> {
        let files = std::fs::read_dir(self.place.path("data")).expect("a folder");
        let paths = files.map(|file| file.expect("a file").path());
        let name = |path: &PathBuf| path.file_name().unwrap_or_default().display().to_string();
        paths
            .filter(|path| name(path).starts_with("cluster-backup-"))
            .collect()
    }
}

fn count(status: &Value, is_met: impl Fn(&Value) -> bool) -> usize {
    let nodes = status["nodes"].as_array().map_or(&[][..], Vec::as_slice);
    nodes.iter().filter(|node| is_met(node)).count()
}

/// Writes a block of the volume over this node. False: it does not serve the volume.
fn write(machine: &Machine, nqn: &str) -> bool {
    let address = machine.listen.trim_start_matches("tcp://");
    let mut host = Host::connect_to(nqn, address.parse().expect("an address"), 0xa);
    host.write_block(BLOCK) == StatusCode::SUCCESS
}

/// Goal: three commands make a cluster of three fresh machines, and each machine keeps a backup.
/// When etcd has lost everything, a backup restores the cluster: the volume has its name, its hosts
/// and every write since the backup. Method: three daemons with empty folders and a real etcd. A
/// replica misses writes, of which the backup has no record. Then an empty etcd replaces the first.
#[test]
fn three_commands_make_a_cluster() {
    let Some(etcd) = program("three_commands_make_a_cluster") else {
        return;
    };
    let mut members = Members::start(etcd, 1, &[]);
    let url = members.endpoints().urls[0].clone();
    let mut machines = ["ant", "bee", "cow"].map(Machine::new);
    for (at, machine) in machines.iter().enumerate() {
        let mut words = vec!["cluster", if at == 0 { "init" } else { "join" }, "lab"];
        if at == 0 {
            words.push("--join");
        }
        words.extend([
            "--etcd",
            &url,
            "--node",
            machine.name,
            "--listen",
            &machine.listen,
        ]);
        let said = machine.said(&words);
        let begin = if at == 0 {
            "Created cluster lab"
        } else {
            "Found cluster lab"
        };
        assert!(said.starts_with(begin) && said.contains("Next: "), "{said}");
    }
    for machine in &mut machines {
        machine.start();
        machine.daemon().create_file("disk", BLOCK as u32, SIZE);
    }
    machines[0].until("three nodes", |status| {
        count(status, |node| {
            node["lease"] == "good" && node["name"].is_string()
        }) == 3
    });
    let devices = ["ant:disk", "bee:disk", "cow:disk"];
    let params = json!({ "name": "v", "devices": devices });
    machines[0].daemon().call("volume_create", params);
    let params = json!({ "name": "v", "allow_any_host": true });
    let published = machines[1].daemon().call("volume_publish", params);
    let nqn = published["nqn"].as_str().expect("text").to_owned();
    machines[0].until("healthy", |status| status["volumes"]["healthy"] == 1);

    let end = Instant::now() + PATIENCE;
    while machines.iter().any(|machine| machine.backups().is_empty()) {
        assert!(Instant::now() < end, "no backup of a node");
        std::thread::sleep(Duration::from_millis(200));
    }
    let file = machines[0].place.path("lab.jsonl").display().to_string();
    let said = machines[0].said(&["cluster", "backup", &file]);
    assert!(
        said.starts_with("Saved cluster lab, id ") && said.contains("1 volume"),
        "{said}"
    );

    // A replica misses a write that the backup does not know of.
    machines[2].daemon.take().expect("it runs").kill();
    machines[0].until("degraded", |status| status["volumes"]["degraded"] == 1);
    let end = Instant::now() + PATIENCE;
    while !machines[..2].iter().any(|machine| write(machine, &nqn)) {
        assert!(Instant::now() < end, "no node takes a write");
        std::thread::sleep(Duration::from_millis(200));
    }
    let written = machines[0].data();
    assert_ne!(written, machines[2].data());

    // etcd loses everything. The nodes wait for a backup, and join by themselves.
    members.lose_all();
    let end = Instant::now() + PATIENCE;
    let said = loop {
        // Until etcd answers.
        let output = machines[0].run(&["cluster", "restore", &file, "--publish"]);
        if output.status.success() {
            break String::from_utf8(output.stdout).expect("text");
        }
        assert!(Instant::now() < end, "{output:?}");
        std::thread::sleep(Duration::from_millis(200));
    };
    assert!(said.starts_with("Restored cluster lab, id "), "{said}");
    let again = machines[0].run(&["cluster", "restore", &file]);
    let again = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(again.contains("meta\" exists"), "{again}");
    machines[0].until("two nodes with a lease", |status| {
        count(status, |node| node["lease"] == "good") == 2
    });
    machines[2].start();
    // The replica gets the write that it missed.
    let end = Instant::now() + PATIENCE;
    while machines.iter().any(|machine| machine.data() != written) {
        assert!(Instant::now() < end, "a machine has other data");
        std::thread::sleep(Duration::from_millis(200));
    }
    machines[0].until("healthy", |status| status["volumes"]["healthy"] == 1);
    let listed = machines[1]
        .daemon()
        .call("cluster_get_volumes", Value::Null);
    assert_eq!(listed[0]["name"], "v");
    assert_eq!(listed[0]["nodes"].as_array().map(Vec::len), Some(3));
    for machine in &mut machines {
        machine.daemon.take().expect("it runs").stop();
    }
}
