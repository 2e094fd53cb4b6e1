//! Goal: the daemon is killed under writes to a thin volume, while snapshots and clones come and
//! go. No acknowledged write or change is lost, and the pool has no fault. Method: `nacre
//! perf --verify` over TCP lives through all kills and compares every block; then every snapshot
//! and clone must have whole blocks of its own places.

use std::collections::BTreeSet;

use nacre_engine_rpc::client::ClientError;
use nacre_random::Random;
use nacre_random::seeds::seeds;

use super::*;

const NQN: &str = "nqn.2026-01.org.example:volume";
/// Has one snapshot or clone at a time: blocks name the namespace that they were written to.
const COPIES: &str = "nqn.2026-01.org.example:copies";
const RANGE: &str = "8MiB";
/// Snapshots and clones; beyond it some are deleted.
const MOST: usize = 10;

struct Host<'a> {
    place: &'a Place,
    port: u16,
}

impl Host<'_> {
    fn perf(&self, nqn: &str, args: &[&str]) -> Command {
        let mut command = self.place.nacre();
        let uri = format!("tcp://127.0.0.1:{}/{nqn}?nsid=1", self.port);
        command.args(["perf", &uri, "--range", RANGE, "--quiet"]);
        command.args(args).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self, nqn: &str, args: &[&str]) {
        good(
            &format!("{nqn} {args:?}"),
            &self.perf(nqn, args).output().unwrap(),
        );
    }
}

fn good(what: &str, output: &Output) {
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{what}: {out}\n{err}");
}

/// The versions of the pool, as far as calls were answered.
#[derive(Default)]
struct Versions {
    snapshots: BTreeSet<String>,
    clones: BTreeSet<String>,
    /// Made or deleted by a call without an answer.
    unknown: BTreeSet<String>,
    made: u32,
}

impl Versions {
    /// Makes changes until a call has no answer. Returns their number.
    fn change(&mut self, client: &mut Client, random: &mut Random) -> u32 {
        for count in 0.. {
            let (call, params, name, kind) = self.next(random);
            match client.call_by_name(call, params) {
                Ok(_) if call == "lvol_delete" => {}
                Ok(_) if kind == 's' => drop(self.snapshots.insert(name)),
                Ok(_) => drop(self.clones.insert(name)),
                Err(error @ ClientError::Refused { .. }) => panic!("{error}"),
                Err(_) => {
                    self.unknown.insert(name);
                    return count;
                }
            }
        }
        0
    }

    /// A call, its parameters, and the name and kind of the version that it is about.
    fn next(&mut self, random: &mut Random) -> (&'static str, Value, String, char) {
        let any = |set: &BTreeSet<String>, random: &mut Random| {
            let at = random.below(set.len() as u64) as usize;
            set.iter().nth(at).unwrap().clone()
        };
        if self.snapshots.len() + self.clones.len() >= MOST {
            let set = match random.below(2) {
                0 if !self.clones.is_empty() => &mut self.clones,
                _ if !self.snapshots.is_empty() => &mut self.snapshots,
                _ => &mut self.clones,
            };
            let name = any(set, random);
            set.remove(&name);
            let params = json!({ "lvol": format!("pool0/{name}") });
            return ("lvol_delete", params, name, 'd');
        }
        self.made += 1;
        if self.snapshots.is_empty() || random.below(2) == 0 {
            let name = format!("s{}", self.made);
            let params = json!({ "snapshots": [{ "lvol": "pool0/v", "name": name }] });
            return ("lvol_snapshot", params, name, 's');
        }
        let name = format!("c{}", self.made);
        let snapshot = format!("pool0/{}", any(&self.snapshots, random));
        let params = json!({ "snapshot": snapshot, "name": name });
        ("lvol_clone", params, name, 'c')
    }

    /// Compares with the pool, and learns how calls without an answer ended.
    fn compare(&mut self, daemon: &Daemon, client: &mut Client) {
        let list = client.call_by_name("lvol_list", json!({ "pool": "pool0" }));
        let list = list.unwrap_or_else(|error| panic!("{error}\n{}", daemon.log()));
        let names = list.as_array().unwrap().iter();
        let names: BTreeSet<String> = names
            .map(|lvol| lvol["name"].as_str().unwrap().to_owned())
            .filter(|name| name != "v")
            .collect();
        for name in self.snapshots.iter().chain(&self.clones) {
            assert!(names.contains(name), "{name} is lost: {names:?}");
        }
        for name in &names {
            let is_known = self.snapshots.contains(name) || self.clones.contains(name);
            assert!(
                is_known || self.unknown.contains(name),
                "{name} was deleted"
            );
            let set = if name.starts_with('s') {
                &mut self.snapshots
            } else {
                &mut self.clones
            };
            set.insert(name.clone());
        }
        self.unknown.clear();
    }
}

/// The writes of hosts to the volume, in this life of the daemon.
fn writes(client: &mut Client) -> u64 {
    let stat = client.call_by_name("bdev_get_iostat", json!({ "names": ["pool0/v"] }));
    stat.unwrap()["bdevs"][0]["num_write_ops"].as_u64().unwrap()
}

/// The disks of a run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Disks {
    One,
    /// Snapshots fill a small disk, and go on on the next one, which joins meanwhile.
    Joins,
    /// The volume is on the second disk, which leaves meanwhile.
    Leaves,
}

fn set_up(place: &Place, client: &mut Client, port: u16, disks: Disks) {
    let [disk, more] = ["disk", "more"].map(|name| place.path(name));
    let sizes = match disks {
        Disks::One => [512, 256],
        Disks::Joins => [32, 256],
        Disks::Leaves => [256, 512],
    };
    for (path, mebibytes) in [&disk, &more].into_iter().zip(sizes) {
        let file = std::fs::File::create(path).unwrap();
        file.set_len(mebibytes << 20).unwrap();
    }
    let address = json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port.to_string() });
    let mut calls = vec![
        (
            "bdev_aio_create",
            json!({ "name": "disk", "filename": disk, "block_size": 512 }),
        ),
        (
            "bdev_aio_create",
            json!({ "name": "more", "filename": more, "block_size": 512 }),
        ),
        ("pool_create", json!({ "name": "pool0", "disk": "disk" })),
    ];
    if disks == Disks::Leaves {
        let add = json!({ "pool": "pool0", "disk": "more" });
        calls.push(("pool_add_disk", add));
    }
    calls.extend([
        (
            "lvol_create",
            json!({ "pool": "pool0", "name": "v", "size": "64MiB" }),
        ),
        ("nvmf_create_transport", json!({ "trtype": "TCP" })),
    ]);
    for nqn in [NQN, COPIES] {
        calls.push((
            "nvmf_create_subsystem",
            json!({ "nqn": nqn, "allow_any_host": true }),
        ));
        calls.push((
            "nvmf_subsystem_add_listener",
            json!({ "nqn": nqn, "listen_address": address }),
        ));
    }
    calls.push((
        "nvmf_subsystem_add_ns",
        json!({ "nqn": NQN, "namespace": { "bdev_name": "pool0/v", "nsid": 1 } }),
    ));
    for (call, params) in calls {
        let outcome = client.call_by_name(call, params);
        outcome.unwrap_or_else(|error| panic!("{call}: {error}"));
    }
}

/// Adds the second disk. Returns false if the daemon ended meanwhile.
fn add_disk(client: &mut Client) -> bool {
    let params = json!({ "pool": "pool0", "disk": "more" });
    match client.call_by_name("pool_add_disk", params) {
        Ok(_) => true,
        Err(error @ ClientError::Refused { .. }) => panic!("{error}"),
        Err(_) => false,
    }
}

fn removal() -> Value {
    json!({ "pool": "pool0", "disk": "more" })
}

/// Removes the second disk, or learns that it has left. Returns false if the daemon ended.
fn remove_disk(client: &mut Client) -> bool {
    match client.call_by_name("pool_remove_disk", removal()) {
        Ok(_) => true,
        Err(ClientError::Refused { error, .. }) if error.message == "No such device" => true,
        Err(error @ ClientError::Refused { .. }) => panic!("{error}"),
        Err(_) => false,
    }
}

/// The second disk leaves in the end, and is free: another pool gets it.
fn give_away(place: &Place, client: &mut Client) {
    let count = |client: &mut Client| {
        let pool = client.call_by_name("pool_get", json!({ "pool": "pool0" }));
        pool.unwrap()["disks"].as_array().unwrap().len()
    };
    for _ in 0..600 {
        if count(client) == 1 {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let show = place.client(&["pool", "show", "pool0"]);
    assert_eq!(count(client), 1, "{}", text(&show.stdout));
    // Without force, once the superblocks are erased and the claim has ended.
    let create = json!({ "name": "pool1", "disk": "more" });
    let mut created = Ok(Value::Null);
    for _ in 0..200 {
        created = client.call_by_name("pool_create", create.clone());
        if created.is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    created.unwrap();
}

fn kills(seed: u64, disks: Disks) {
    let adds = disks == Disks::Joins;
    let mut random = Random::new(seed);
    let place = Place::new();
    let port = local_port();
    let (mut daemon, mut client) = place.serve(&[]).ready();
    set_up(&place, &mut client, port, disks);
    let host = Host {
        place: &place,
        port,
    };
    let fill = ["--rw", "write", "--size", "64k", "--ios", "128", "--verify"];
    host.run(NQN, &fill);

    let load = ["--rw", "randrw", "--mix", "30", "--io-size-range", "4k-48k"];
    let mut load = host.perf(NQN, &load);
    load.args(["--depth", "8", "--seconds", "6s", "--verify"]);
    // The fill has written, too: only more writes show that the load runs.
    let mut before = writes(&mut client);
    let mut load = load.spawn().unwrap();
    let mut versions = Versions::default();
    let (mut kills, mut changes, mut has_disk) = (0, 0, !adds);
    loop {
        // Each life begins with the host's return.
        while writes(&mut client) <= before && load.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        if load.try_wait().unwrap().is_some() {
            break;
        }
        let pid = daemon.child.id().to_string();
        let mut pause = Duration::from_millis(random.below(400));
        if disks == Disks::Leaves && kills == 1 {
            // The kill follows the answer at once, while the disk leaves.
            let answer = client.call_by_name("pool_remove_disk", removal()).unwrap();
            assert!(answer["disks"][1].get("leaving").is_some(), "{answer}");
            pause = Duration::ZERO;
        }
        let killer = std::thread::spawn(move || {
            std::thread::sleep(pause);
            let kill = Command::new("kill").args(["-9", &pid]).status();
            assert!(kill.unwrap().success());
        });
        // The same call again, until it is answered.
        has_disk = has_disk || add_disk(&mut client);
        if disks == Disks::Leaves && kills > 1 {
            remove_disk(&mut client);
        }
        if has_disk {
            changes += versions.change(&mut client, &mut random);
        }
        killer.join().unwrap();
        drop(daemon);
        kills += 1;
        (daemon, client) = place.serve(&[]).ready();
        // A new daemon counts from 0.
        before = 0;
        versions.compare(&daemon, &mut client);
    }
    good("the load", &load.wait_with_output().unwrap());
    assert!(kills > 0 && changes > 0, "{kills} kills, {changes} changes");

    if disks == Disks::Leaves {
        assert!(kills > 1);
        assert!(remove_disk(&mut client));
        give_away(&place, &mut client);
    }
    // Once more, without a load: then everything is read.
    drop(daemon);
    let (daemon, mut client) = place.serve(&[]).ready();
    versions.compare(&daemon, &mut client);
    host.run(NQN, &["--verify-only"]);
    for name in versions.snapshots.iter().chain(&versions.clones) {
        let namespace = json!({ "bdev_name": format!("pool0/{name}"), "nsid": 1 });
        let add = json!({ "nqn": COPIES, "namespace": namespace });
        client.call_by_name("nvmf_subsystem_add_ns", add).unwrap();
        host.run(COPIES, &["--verify-only"]);
        let remove = json!({ "nqn": COPIES, "nsid": 1 });
        client
            .call_by_name("nvmf_subsystem_remove_ns", remove)
            .unwrap();
    }
    let check = place.client(&["pool", "check", "pool0"]);
    good("pool check", &check);
    assert!(text(&check.stdout).contains("no faults"));
    if adds {
        let pool = client.call_by_name("pool_get", json!({ "pool": "pool0" }));
        let disk = pool.unwrap()["disks"][1].clone();
        assert_eq!(disk["name"], "more");
        assert!(
            disk["free_bytes"].as_u64() < disk["total_bytes"].as_u64(),
            "{disk}"
        );
    }
    if disks == Disks::Leaves {
        let pools = client.call_by_name("pool_list", Value::Null).unwrap();
        assert_eq!(pools.as_array().unwrap().len(), 2, "{pools}");
    }
    println!("seed {seed}: {kills} kills, {changes} changes");
}

#[test]
fn nothing_is_lost_when_the_daemon_is_killed() {
    for seed in seeds(1, 3) {
        kills(seed, Disks::One);
    }
}

/// The same, while a second disk joins the pool.
#[test]
fn a_disk_is_added_while_the_daemon_is_killed() {
    for seed in seeds(1, 1) {
        kills(seed, Disks::Joins);
    }
}

/// The same, while a disk leaves the pool, which goes on in each life of the daemon. Then another
/// pool gets the disk.
#[test]
fn a_disk_leaves_while_the_daemon_is_killed() {
    for seed in seeds(1, 2) {
        kills(seed, Disks::Leaves);
    }
}

/// Goal: `nacre doctor`, `nacre pool show` and the event name a pool whose disk went while the pool
/// was in use. Method: the RAM disk of a pool is deleted.
#[test]
fn a_pool_without_its_disk_is_named() {
    let place = Place::new();
    let (daemon, mut client) = place.serve(&[]).ready();
    let mut call = |method: &str, params: Value| {
        let answer = client.call_by_name(method, params);
        answer.unwrap_or_else(|error| panic!("{error}\n{}", daemon.log()))
    };
    let ram = json!({ "name": "ram", "num_blocks": 32768, "block_size": 4096 });
    call("bdev_malloc_create", ram);
    call("pool_create", json!({ "name": "pool0", "disk": "ram" }));
    call("bdev_malloc_delete", json!({ "name": "ram" }));
    let until = Instant::now() + Duration::from_secs(30);
    let has_failed = |state: &Value| {
        let objects = state["objects"].as_array().unwrap();
        objects.iter().any(|of| of["state"] == "failed")
    };
    while !has_failed(&call("state_get", Value::Null)) {
        assert!(Instant::now() < until, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    let cause = "pool \"pool0\" is closed: its disk \"ram\" went away";
    let shown = place.client(&["pool", "show", "pool0"]);
    assert!(!shown.status.success());
    assert!(
        text(&shown.stderr).contains(cause),
        "{}",
        text(&shown.stderr)
    );
    let config = place.path("doctor.toml");
    let socket = place.socket();
    std::fs::write(&config, format!("[rpc]\nsocket = {socket:?}\n")).unwrap();
    let mut doctor = place.nacre();
    doctor.args(["doctor", "--json", "--config"]).arg(&config);
    let doctor = doctor.output().unwrap();
    assert!(!doctor.status.success());
    let report: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let findings = report["findings"].as_array().unwrap().iter();
    let found: Vec<&Value> = findings.filter(|of| of["id"] == "pool.open").collect();
    let [found] = found[..] else {
        panic!("{report}");
    };
    assert_eq!(found["status"], "FAIL");
    assert!(
        found["evidence"].as_str().unwrap().contains(cause),
        "{found}"
    );
    assert!(found["remedy"].is_string(), "{found}");
    let events = call("events_get", json!({}));
    let events = events["events"].as_array().unwrap();
    let lost = events.iter().find(|of| of["type"] == "pool_lost").unwrap();
    assert_eq!(lost["facts"]["disk"], "ram", "{lost}");
}
