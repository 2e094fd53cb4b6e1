//! Killed at any moment: what was acknowledged is there, hosts come back by themselves, and what was
//! being changed is as before or as after.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use nacre_bdev::{Completion, Io, Op, Status};
use nacre_tests::daemon::{Daemon, Place, free_address};
use nacre_tests::host::{Host, options};
use nacre_tests::rng::Rng;
use serde_json::{Value, json};

use crate::ledger::{BLOCK, Ledger};

const NQN: &str = "nqn.2025-01.io.nacre:crash";
const BLOCKS: usize = 1024;
/// Blocks of the largest write.
const MAX_RUN: usize = 8;
/// I/Os kept under way on each queue.
const DEPTH: usize = 16;
/// Writes between two flushes.
const FLUSH_EVERY: u32 = 40;
const KILLS: u32 = 5;

enum Work {
    Write { lba: usize, blocks: usize },
    Read { lba: usize },
    Flush { promised: Vec<u64> },
}

/// Writes, reads and flushes, each judged when it comes back.
struct Load {
    host: Host,
    ledger: Ledger,
    rng: Rng,
    under_way: HashMap<u64, Work>,
    writes: u32,
    completed: u64,
}

impl Load {
    fn turn(&mut self) {
        self.host.turn_or_nap();
        while let Some(completion) = self.host.take_completion() {
            self.completed(completion);
        }
    }

    fn fill(&mut self) {
        for queue in 0..self.host.queues.len() {
            let mut tries = 0;
            while self.under_way.len() < DEPTH * (queue + 1) && tries < 2 * DEPTH {
                self.submit(queue);
                tries += 1;
            }
        }
    }

    fn submit(&mut self, queue: usize) {
        let work = match self.rng.below(10) {
            _ if self.writes >= FLUSH_EVERY => {
                self.writes = 0;
                let promised = self.ledger.acknowledged();
                Work::Flush { promised }
            }
            0..3 => Work::Read {
                lba: self.rng.below(BLOCKS as u64) as usize,
            },
            _ => {
                let blocks = 1 + self.rng.below(MAX_RUN as u64) as usize;
                let lba = self.rng.below((BLOCKS - blocks) as u64) as usize;
                Work::Write { lba, blocks }
            }
        };
        let (op, lba, blocks) = match &work {
            Work::Write { lba, blocks } => (Op::Write, *lba, *blocks),
            Work::Read { lba } => (Op::Read, *lba, 1),
            Work::Flush { .. } => (Op::Flush, 0, 0),
        };
        let entries = &mut self.ledger.entries[lba..lba + blocks];
        if entries.iter().any(|e| e.in_use) {
            return;
        }
        let mut io = Io::new(0, op, lba as u64, blocks as u32);
        if blocks > 0 {
            let Some(mut buf) = self.host.buf(blocks * BLOCK) else {
                return;
            };
            for entry in entries {
                entry.in_use = true;
                entry.submitted += u64::from(op == Op::Write);
            }
            let bytes = buf.bytes_mut().unwrap();
            for (at, block) in bytes.chunks_exact_mut(BLOCK).enumerate() {
                match op {
                    Op::Write => {
                        let generation = self.ledger.entries[lba + at].submitted;
                        self.ledger.fill(lba + at, generation, block);
                    }
                    _ => block.fill(0xee),
                }
            }
            io = io.with(buf);
        }
        let token = self.host.submit(queue, |token| Io { token, ..io });
        let token = token.expect("the queue is deeper than the load");
        self.writes += u32::from(op == Op::Write);
        self.under_way.insert(token, work);
    }

    fn completed(&mut self, completion: Completion) {
        let work = self.under_way.remove(&completion.token).expect("ours");
        assert_eq!(completion.status, Status::Ok, "the host gave up an I/O");
        self.completed += 1;
        match work {
            Work::Write { lba, blocks } => {
                for entry in &mut self.ledger.entries[lba..lba + blocks] {
                    entry.acknowledged = entry.submitted;
                    entry.in_use = false;
                }
            }
            Work::Read { lba } => {
                let found = self.ledger.judge(lba, &completion.data[0]);
                found.unwrap_or_else(|wrong| panic!("while it runs: {wrong}"));
                self.ledger.entries[lba].in_use = false;
            }
            Work::Flush { promised } => self.ledger.flushed(&promised),
        }
    }

    /// Runs for this many more I/Os.
    fn run(&mut self, ios: u64) {
        let until = self.completed + ios;
        while self.completed < until {
            self.fill();
            self.turn();
        }
    }

    fn drain(&mut self) {
        while !self.under_way.is_empty() {
            self.turn();
        }
    }

    fn check_all(&mut self, when: &str) {
        for lba in 0..BLOCKS {
            let block = self.host.read(lba % 2, lba as u64, 1, BLOCK);
            let found = self.ledger.judge(lba, &block);
            found.unwrap_or_else(|wrong| panic!("{when}: {wrong}"));
        }
    }
}

/// Goal: no write that was acknowledged is lost, none is torn, none lands late, however often the
/// daemon dies. Method: verified load with flushes on a file over two queues; kill -9 at random moments
/// and a restart, while the load goes on (the host connects again and sends again by itself); reads are
/// judged all the time, and every block at the end, through a last restart.
#[test]
fn nothing_acknowledged_is_lost_to_kill_9() {
    let mut rng = Rng::announced("nothing_acknowledged_is_lost_to_kill_9");
    let place = Place::new();
    let mut daemon = place.start();
    daemon.create_file("disk", BLOCK as u32, (BLOCKS * BLOCK) as u64);
    daemon.create_subsystem(NQN);
    let nsid = daemon.add_namespace(NQN, "disk");
    let address = daemon.listen(NQN, "127.0.0.1:0");
    let mut wish = options(NQN);
    wish.io_queues = 2;
    let mut host = Host::new(address, wish, 2 * DEPTH);
    host.until("live", |h| h.controller.is_live());
    host.open_queue(nsid);
    host.open_queue(nsid);
    let mut load = Load {
        host,
        ledger: Ledger::new(BLOCKS, rng.draw()),
        rng: Rng::seeded(rng.draw()),
        under_way: HashMap::new(),
        writes: 0,
        completed: 0,
    };
    load.run(1000);
    for _ in 0..KILLS {
        let after = Duration::from_micros(rng.below(150_000));
        daemon = std::thread::scope(|scope| {
            let restart = scope.spawn(|| {
                std::thread::sleep(after);
                daemon.kill();
                place.start()
            });
            while !restart.is_finished() {
                load.fill();
                load.turn();
            }
            restart.join().expect("it comes back")
        });
        load.run(300);
    }
    load.drain();
    let flushed = load.ledger.entries.iter().filter(|e| e.flushed > 0);
    assert!(flushed.count() > BLOCKS / 2, "hardly anything was flushed");
    load.check_all("after the load");
    daemon.kill();
    let daemon = place.start();
    load.check_all("after the last restart");

    let stats: Vec<_> = load.host.queues.iter().map(|q| q.stats()).collect();
    let all_lost = |s: &nacre_nvmf::host::IoStats| s.losses > u64::from(KILLS);
    assert!(
        stats.iter().all(all_lost),
        "not every kill was met: {stats:?}"
    );
    assert!(
        stats.iter().any(|s| s.resent > 0),
        "nothing was under way: {stats:?}"
    );
    daemon.stop();
}

/// Goal: a host whose subsystem is one of many on a port finds it again after a crash, with its
/// namespace and its permission: it is never told for good, in the middle of the restart, that one of
/// them does not exist. Method: the listeners are made before everything else, so that a replay in that
/// order would have a moment for each wrong answer; hosts that knock all the time.
#[test]
fn hosts_come_back_to_a_daemon_that_is_still_restoring() {
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
            (down, restart.join().expect("it comes back"))
        });
        daemon = restarted;
        assert_eq!(down, 1, "nobody noticed");
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

/// What a subsystem has: namespaces as (id, device), listeners, hosts.
#[derive(Debug, Clone, Default, PartialEq)]
struct Made {
    namespaces: BTreeSet<(u64, String)>,
    listeners: BTreeSet<String>,
    hosts: BTreeSet<String>,
}

type Model = BTreeMap<String, Made>;

/// Goal: a change is there or not there after a crash, whole, and never half. Method: creations,
/// additions and deletions of subsystems with everything they have, in random order, and kill -9 at
/// random moments; after each restart the daemon's state is the last one acknowledged, or the one that
/// the call under way was to make.
#[test]
fn a_change_under_way_happened_or_did_not() {
    let mut rng = Rng::announced("a_change_under_way_happened_or_did_not");
    let place = Place::new();
    let mut daemon = place.start();
    for n in 0..4 {
        daemon.create_ram(&format!("ram{n}"), 512, 64 << 10);
    }
    let listeners: Vec<String> = (0..2)
        .map(|_| free_address("127.0.0.1").to_string())
        .collect();
    let (mut model, mut changes) = (Model::new(), 0);
    for round in 0..6 {
        let at = Duration::from_micros(rng.below(120_000));
        let pid = rustix::process::Pid::from_raw(daemon.pid() as i32).unwrap();
        let next = std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(at);
                // Ours, and not waited for yet: its number cannot be anybody else's.
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            });
            loop {
                let (method, params, next) = change(&model, &listeners, &mut rng);
                match daemon.try_call(method, params) {
                    Ok(_) => model = next,
                    Err(nacre_engine::rpc::client::ClientError::Refused { method, error }) => {
                        panic!("{method}: {error}")
                    }
                    Err(_) => break next,
                }
                changes += 1;
            }
        });
        daemon.kill();
        daemon = place.start();
        let found = state(&mut daemon);
        assert!(
            found == model || found == next,
            "round {round}: found {found:#?}\nneither before {model:#?}\nnor after {next:#?}"
        );
        let failed = daemon.call("state_get", Value::Null).to_string();
        assert!(!failed.contains("\"failed\""), "round {round}: {failed}");
        model = found;
    }
    assert!(changes > 20, "only {changes} changes were made");
}

/// A random call that is possible now, and what it makes of the model.
fn change(model: &Model, listeners: &[String], rng: &mut Rng) -> (&'static str, Value, Model) {
    let mut next = model.clone();
    let nqn = format!("{NQN}-{}", rng.below(3));
    let Some(made) = next.get_mut(&nqn) else {
        next.insert(nqn.clone(), Made::default());
        return ("nvmf_create_subsystem", json!({ "nqn": nqn }), next);
    };
    loop {
        match rng.below(8) {
            0 => {
                next.remove(&nqn);
                return ("nvmf_delete_subsystem", json!({ "nqn": nqn }), next);
            }
            1..4 => {
                let bdev = format!("ram{}", rng.below(4));
                let used = |m: &Made| m.namespaces.iter().any(|(_, b)| *b == bdev);
                if model.values().any(used) {
                    continue;
                }
                let taken = |id: &u64| made.namespaces.iter().any(|(n, _)| n == id);
                let nsid = (1..).find(|id| !taken(id)).unwrap();
                let namespace = json!({ "bdev_name": bdev, "nsid": nsid });
                made.namespaces.insert((nsid, bdev));
                let params = json!({ "nqn": nqn, "namespace": namespace });
                return ("nvmf_subsystem_add_ns", params, next);
            }
            4 => {
                let Some((nsid, bdev)) = made.namespaces.first().cloned() else {
                    continue;
                };
                made.namespaces.remove(&(nsid, bdev));
                return (
                    "nvmf_subsystem_remove_ns",
                    json!({ "nqn": nqn, "nsid": nsid }),
                    next,
                );
            }
            5..7 => {
                let address = &listeners[rng.below(2) as usize];
                let (ip, port) = address.rsplit_once(':').unwrap();
                let listen_address = json!({ "trtype": "TCP", "traddr": ip, "trsvcid": port });
                let params = json!({ "nqn": nqn, "listen_address": listen_address });
                let method = match made.listeners.remove(address) {
                    true => "nvmf_subsystem_remove_listener",
                    false => {
                        made.listeners.insert(address.clone());
                        "nvmf_subsystem_add_listener"
                    }
                };
                return (method, params, next);
            }
            _ => {
                let host = format!("nqn.2025-01.io.nacre:host-{}", rng.below(2));
                let params = json!({ "nqn": nqn, "host": host });
                let method = match made.hosts.remove(&host) {
                    true => "nvmf_subsystem_remove_host",
                    false => {
                        made.hosts.insert(host);
                        "nvmf_subsystem_add_host"
                    }
                };
                return (method, params, next);
            }
        }
    }
}

fn state(daemon: &mut Daemon) -> Model {
    let listed = daemon.call("nvmf_get_subsystems", Value::Null);
    let text = |v: &Value| v.as_str().unwrap().to_owned();
    let list = |v: &Value| v.as_array().unwrap().clone();
    let nvm = list(&listed).into_iter().filter(|s| s["subtype"] == "NVMe");
    let made = |s: &Value| Made {
        namespaces: list(&s["namespaces"])
            .iter()
            .map(|n| (n["nsid"].as_u64().unwrap(), text(&n["bdev_name"])))
            .collect(),
        listeners: list(&s["listen_addresses"])
            .iter()
            .map(|l| format!("{}:{}", text(&l["traddr"]), text(&l["trsvcid"])))
            .collect(),
        hosts: list(&s["hosts"]).iter().map(|h| text(&h["nqn"])).collect(),
    };
    nvm.map(|s| (text(&s["nqn"]), made(&s))).collect()
}
