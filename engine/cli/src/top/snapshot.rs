//! Computes what `nacre top` shows from two samples of the daemon's statistics: I/O rates, latency
//! percentiles, and each reactor's shares of time.

use std::collections::{BTreeMap, BTreeSet};

use clap::ValueEnum;
use serde_json::Value;

use super::super::address;
use super::super::reply::items;
use super::poll::Sample;
use super::rates::{self, Counters, Iostat, Rates};

/// The data that `nacre top` shows at one moment.
#[derive(Debug, Clone, Default)]
pub(super) struct Snapshot {
    /// Name and version of the daemon.
    pub daemon: String,
    pub pid: Option<u64>,
    /// The time between the samples in seconds. `None` for the first sample of a daemon, also after
    /// its restart: then there are no rates.
    pub seconds: Option<f64>,
    pub reactors: Vec<Reactor>,
    pub listeners: Vec<Listener>,
    pub namespaces: Vec<Namespace>,
    pub devices: Vec<Device>,
    /// A row per controller, with its queue pairs.
    pub connections: Vec<ControllerRow>,
    pub paths: Vec<PathRow>,
    pub pools: Vec<Pool>,
    /// Calls that the daemon refused, with the errors: the reason of missing data.
    pub refused: BTreeSet<String>,
    /// Devices whose percentiles are not counted, because there are too many.
    pub not_watched: usize,
}

/// A reactor of the daemon.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Reactor {
    pub name: String,
    pub core: u64,
    /// As the daemon reports it. For SPDK, which does not: `interrupt` or `poll`.
    pub mode: String,
    /// `None`: there is no earlier sample of this reactor.
    pub share: Option<Share>,
    /// Queue pairs on this reactor.
    pub queues: usize,
    /// Completed NVMe commands per second.
    pub commands: Option<f64>,
}

/// Parts of a reactor's time, each from 0 to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Share {
    pub busy: f64,
    /// Polling without work.
    pub idle: f64,
    pub sleep: f64,
}

/// A listener, with the numbers of hosts, controllers and queue pairs that are connected to it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Listener {
    pub address: String,
    /// Subsystems that accept connections here.
    pub subsystems: usize,
    pub hosts: usize,
    pub controllers: usize,
    pub queues: usize,
}

/// A namespace, with its bdev.
#[derive(Debug, Clone, Default)]
pub(super) struct Namespace {
    /// The NQN of its subsystem.
    pub nqn: String,
    pub nsid: u64,
    pub device: Device,
    /// The number of controllers of its subsystem.
    pub controllers: usize,
}

/// A bdev.
#[derive(Debug, Clone, Default)]
pub(super) struct Device {
    pub name: String,
    pub rates: Rates,
    /// 99th percentile of the latency in seconds; available only with a histogram.
    pub p99_s: Option<f64>,
}

/// A controller with its queue pairs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ControllerRow {
    pub host: String,
    pub nqn: String,
    pub cntlid: u64,
    pub queues: usize,
    /// The address of the host, without its port.
    pub from: String,
    /// The address of the listener.
    pub to: String,
    /// The reactors that serve its queue pairs.
    pub reactors: Vec<String>,
}

/// A path of a remote bdev.
#[derive(Debug, Clone, Default)]
pub(super) struct PathRow {
    pub bdev: String,
    pub address: String,
    pub state: String,
    pub ana_state: String,
    /// New I/O is sent on it.
    pub is_current: bool,
    pub rates: Rates,
    /// I/O that was sent again since the path was attached.
    pub resent: u64,
}

/// A storage pool.
#[derive(Debug, Clone, Default)]
pub(super) struct Pool {
    pub name: String,
    pub state: String,
    pub total_bytes: u64,
    pub free_bytes: u64,
    /// Free bytes that metadata and thick volumes keep.
    pub reserved_bytes: u64,
    pub lvols: u64,
    /// Writes that wait for space.
    pub waiting: u64,
    pub disks: usize,
    /// The share of data that has moved away from a disk that leaves the pool, in percent. `None`:
    /// no disk leaves.
    pub leaving: Option<u64>,
}

impl Pool {
    pub(super) fn used_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.free_bytes)
    }

    /// The used part of the pool, from 0 to 1.
    pub(super) fn used(&self) -> f64 {
        if self.total_bytes == 0 {
            return 0.0;
        }
        self.used_bytes() as f64 / self.total_bytes as f64
    }
}

/// The column that namespaces and devices are sorted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Sort {
    Name,
    Iops,
    Bytes,
    Latency,
    P99,
    Errors,
}

impl Snapshot {
    /// Computes rates, percentiles and shares from two samples of one daemon. Without `before`, or
    /// if the daemon was restarted after it, the result has the counts of `now` only.
    pub(super) fn between(before: Option<&Sample>, now: &Sample) -> Self {
        let pid = |sample: &Sample| sample.reactors["pid"].as_u64();
        // A restarted daemon counts from zero.
        let before = before.filter(|before| pid(before) == pid(now));
        let wall = before.map(|before| now.at.saturating_duration_since(before.at).as_secs_f64());
        let seconds = before
            .and_then(|before| rates::elapsed(&before.iostat, &now.iostat))
            .or(wall);
        let connections = connections(now);
        let devices = devices(before, now, seconds);
        Self {
            daemon: now.daemon.clone(),
            pid: pid(now),
            seconds,
            reactors: reactors(before, now, seconds),
            listeners: listeners(now),
            namespaces: namespaces(now, &devices, &connections),
            devices: devices.into_values().collect(),
            connections,
            paths: paths(before, now, seconds),
            pools: pools(now),
            refused: now.refused.clone(),
            not_watched: 0,
        }
    }

    /// Sorts namespaces and devices: names in ascending order, numbers in descending order.
    /// Controllers are always sorted by name. `reverse` reverses both.
    pub(super) fn sort(&mut self, by: Sort, reverse: bool) {
        let order = |a: &Device, b: &Device| {
            let key = |device: &Device| match by {
                Sort::Name => 0.0,
                Sort::Iops => device.rates.iops(),
                Sort::Bytes => device.rates.bytes_per_s(),
                Sort::Latency => device.rates.latency_s().unwrap_or(-1.0),
                Sort::P99 => device.p99_s.unwrap_or(-1.0),
                Sort::Errors => device.rates.errors as f64,
            };
            key(b).total_cmp(&key(a))
        };
        let turn = |order: std::cmp::Ordering| if reverse { order.reverse() } else { order };
        self.devices
            .sort_by(|a, b| turn(order(a, b).then_with(|| a.name.cmp(&b.name))));
        let name = |n: &Namespace| (n.nqn.clone(), n.nsid);
        self.namespaces
            .sort_by(|a, b| turn(order(&a.device, &b.device).then_with(|| name(a).cmp(&name(b)))));
        let name = |c: &ControllerRow| (c.host.clone(), c.nqn.clone(), c.cntlid);
        self.connections.sort_by(|a, b| turn(name(a).cmp(&name(b))));
    }

    /// The names of the devices: first those with a namespace, in the order of the namespaces, then
    /// the others.
    pub(super) fn bdevs(&self) -> Vec<String> {
        let mut seen = BTreeSet::new();
        let exported = self.namespaces.iter().map(|n| &n.device.name);
        let all = exported.chain(self.devices.iter().map(|d| &d.name));
        all.filter(|name| seen.insert(name.as_str()))
            .cloned()
            .collect()
    }

    /// The sum of I/O, bytes and errors of all namespaces. It has no latency.
    pub(super) fn total(&self) -> Rates {
        let mut total = Rates::default();
        for rates in self.namespaces.iter().map(|n| &n.device.rates) {
            for (sum, part) in [
                (&mut total.read, &rates.read),
                (&mut total.write, &rates.write),
                (&mut total.unmap, &rates.unmap),
            ] {
                sum.iops += part.iops;
                sum.bytes_per_s += part.bytes_per_s;
            }
            total.errors += rates.errors;
        }
        total
    }

    /// The number of hosts with a controller.
    pub(super) fn hosts(&self) -> usize {
        self.connections
            .iter()
            .map(|c| c.host.as_str())
            .collect::<BTreeSet<_>>()
            .len()
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn reactors(before: Option<&Sample>, now: &Sample, seconds: Option<f64>) -> Vec<Reactor> {
    let tick_rate = rates::tick_rate(&now.reactors) as f64;
    let queues = qpairs(now).fold(
        BTreeMap::<&str, usize>::new(),
        |mut by_thread, (_, qpair)| {
            *by_thread
                .entry(qpair["thread"].as_str().unwrap_or_default())
                .or_default() += 1;
            by_thread
        },
    );
    let describe = |reactor: &Value| {
        let core = reactor["lcore"].as_u64().unwrap_or(0);
        let earlier = before.and_then(|before| {
            items(&before.reactors["reactors"])
                .iter()
                .find(|r| r["lcore"] == reactor["lcore"])
        });
        let threads: Vec<&str> = items(&reactor["lw_threads"])
            .iter()
            .filter_map(|thread| thread["name"].as_str())
            .collect();
        // SPDK's threads are many and have long names; ours is the reactor.
        let name = match threads[..] {
            [only] if only.starts_with("reactor") => only.to_owned(),
            _ => format!("reactor_{core}"),
        };
        let mode = match (reactor["mode"].as_str(), reactor["in_interrupt"] == true) {
            (Some(mode), _) => mode,
            (None, true) => "interrupt",
            (None, false) => "poll",
        };
        Reactor {
            mode: mode.to_owned(),
            share: earlier
                .zip(seconds)
                .and_then(|(earlier, s)| share(earlier, reactor, s * tick_rate)),
            queues: threads.iter().filter_map(|thread| queues.get(thread)).sum(),
            commands: before.zip(seconds).and_then(|(before, s)| {
                let done = |sample: &Sample| commands(&sample.nvmf, &threads, core);
                Some(done(now)?.checked_sub(done(before)?)? as f64 / s)
            }),
            name,
            core,
        }
    };
    items(&now.reactors["reactors"])
        .iter()
        .map(describe)
        .collect()
}

fn share(before: &Value, now: &Value, elapsed: f64) -> Option<Share> {
    let grew = |key: &str| Some(now[key].as_u64()?.checked_sub(before[key].as_u64()?)? as f64);
    let (busy, idle) = (grew("busy")?, grew("idle")?);
    let (idle, sleep) = match grew("sleep") {
        // Our reactors report the part of idle time spent asleep.
        Some(sleep) => ((idle - sleep).max(0.0), sleep),
        // SPDK's count neither when they sleep.
        None if now["in_interrupt"] == true => (idle, (elapsed - busy - idle).max(0.0)),
        None => (idle, 0.0),
    };
    let all = busy + idle + sleep;
    (all > 0.0).then(|| Share {
        busy: busy / all,
        idle: idle / all,
        sleep: sleep / all,
    })
}

/// The count of NVMe commands that the poll groups of a reactor have completed. A poll group has
/// the name of one of the reactor's threads, or is called `reactor_` with the core. `None`: the
/// reactor has no poll group.
fn commands(nvmf: &Value, threads: &[&str], core: u64) -> Option<u64> {
    let ours = |group: &&Value| {
        let name = group["name"].as_str().unwrap_or_default();
        threads.contains(&name) || name == format!("reactor_{core}")
    };
    let mut groups = items(&nvmf["poll_groups"]).iter().filter(ours).peekable();
    groups.peek()?;
    Some(
        groups
            .filter_map(|group| group["completed_nvme_io"].as_u64())
            .sum(),
    )
}

/// Every queue pair, with the subsystem that it belongs to.
fn qpairs(sample: &Sample) -> impl Iterator<Item = (&str, &Value)> {
    sample
        .qpairs
        .iter()
        .flat_map(|(nqn, qpairs)| items(qpairs).iter().map(move |q| (nqn.as_str(), q)))
}

fn connections(now: &Sample) -> Vec<ControllerRow> {
    let mut all: BTreeMap<(&str, u64), ControllerRow> = BTreeMap::new();
    for (nqn, qpair) in qpairs(now) {
        let cntlid = qpair["cntlid"].as_u64().unwrap_or(0);
        let one = all.entry((nqn, cntlid)).or_insert_with(|| ControllerRow {
            host: text(&qpair["hostnqn"]),
            nqn: nqn.to_owned(),
            cntlid,
            from: text(&qpair["peer_address"]["traddr"]),
            to: if qpair["listen_address"].is_object() {
                address::describe(&qpair["listen_address"])
            } else {
                String::new()
            },
            ..ControllerRow::default()
        });
        one.queues += 1;
        let thread = text(&qpair["thread"]);
        if !one.reactors.contains(&thread) {
            one.reactors.push(thread);
        }
    }
    all.into_values().collect()
}

fn paths(before: Option<&Sample>, now: &Sample, seconds: Option<f64>) -> Vec<PathRow> {
    let iostat = |path: &Value| {
        let number = |key: &str| path[key].as_u64().unwrap_or(0);
        let counters = |ops, bytes| Counters {
            ops: number(ops),
            bytes: number(bytes),
            ticks: 0,
        };
        Iostat {
            read: counters("reads", "read_bytes"),
            write: counters("writes", "write_bytes"),
            ..Iostat::default()
        }
    };
    let is_same = |a: &Value, b: &Value| a["bdev"] == b["bdev"] && a["trid"] == b["trid"];
    let path = |path: &Value| {
        let then = before.and_then(|before| {
            let mut then = items(&before.paths).iter();
            then.find(|then| is_same(then, path))
        });
        let rates = then.zip(seconds).map(|(then, seconds)| {
            let between = iostat(path).since(&iostat(then));
            between.rates(seconds, rates::tick_rate(&now.iostat))
        });
        PathRow {
            bdev: text(&path["bdev"]),
            address: address::describe(&path["trid"]),
            state: text(&path["state"]),
            ana_state: text(&path["ana_state"]),
            is_current: path["current"] == true,
            rates: rates.unwrap_or_default(),
            resent: path["resent"].as_u64().unwrap_or(0),
        }
    };
    items(&now.paths).iter().map(path).collect()
}

fn pools(now: &Sample) -> Vec<Pool> {
    let pool = |pool: &Value| {
        let number = |key: &str| pool[key].as_u64().unwrap_or(0);
        Pool {
            name: text(&pool["name"]),
            state: text(&pool["state"]),
            total_bytes: number("total_bytes"),
            free_bytes: number("free_bytes"),
            reserved_bytes: number("reserved_bytes"),
            lvols: number("lvols"),
            waiting: number("waiting_writes"),
            // A daemon of before pools of several disks has no list.
            disks: items(&pool["disks"]).len().max(1),
            leaving: items(&pool["disks"])
                .iter()
                .find_map(|disk| disk["leaving"]["percent"].as_u64()),
        }
    };
    items(&now.pools).iter().map(pool).collect()
}

fn listeners(now: &Sample) -> Vec<Listener> {
    #[derive(Default)]
    struct Seen<'a> {
        hosts: BTreeSet<&'a str>,
        controllers: BTreeSet<(&'a str, u64)>,
        queues: usize,
        subsystems: usize,
    }
    let mut all: BTreeMap<String, Seen> = BTreeMap::new();
    for subsystem in items(&now.subsystems) {
        for listens in items(&subsystem["listen_addresses"]) {
            all.entry(address::describe(listens))
                .or_default()
                .subsystems += 1;
        }
    }
    for (nqn, qpair) in qpairs(now).filter(|(_, q)| q["listen_address"].is_object()) {
        let seen = all
            .entry(address::describe(&qpair["listen_address"]))
            .or_default();
        seen.hosts
            .insert(qpair["hostnqn"].as_str().unwrap_or_default());
        seen.controllers
            .insert((nqn, qpair["cntlid"].as_u64().unwrap_or(0)));
        seen.queues += 1;
    }
    let listener = |(address, seen): (String, Seen)| Listener {
        address,
        subsystems: seen.subsystems,
        hosts: seen.hosts.len(),
        controllers: seen.controllers.len(),
        queues: seen.queues,
    };
    all.into_iter().map(listener).collect()
}

fn devices(
    before: Option<&Sample>,
    now: &Sample,
    seconds: Option<f64>,
) -> BTreeMap<String, Device> {
    let earlier: BTreeMap<&str, Iostat> = before
        .map(|b| rates::devices(&b.iostat).collect())
        .unwrap_or_default();
    let tick_rate = rates::tick_rate(&now.iostat);
    let device = |(name, iostat): (&str, Iostat)| {
        let rates = match (before, seconds) {
            // One that is new counted from zero.
            (Some(_), Some(seconds)) => iostat
                .since(&earlier.get(name).copied().unwrap_or_default())
                .rates(seconds, tick_rate),
            _ => Rates::default(),
        };
        let then = before.and_then(|before| before.histograms.get(name));
        let histogram = now
            .histograms
            .get(name)
            .zip(then)
            .and_then(|(now, then)| now.since(then));
        let p99_s = histogram.and_then(|between| between.quantile_s(0.99));
        (
            name.to_owned(),
            Device {
                name: name.to_owned(),
                rates,
                p99_s,
            },
        )
    };
    rates::devices(&now.iostat).map(device).collect()
}

fn namespaces(
    now: &Sample,
    devices: &BTreeMap<String, Device>,
    connections: &[ControllerRow],
) -> Vec<Namespace> {
    let controllers =
        connections
            .iter()
            .fold(BTreeMap::<&str, usize>::new(), |mut by_nqn, connection| {
                *by_nqn.entry(&connection.nqn).or_default() += 1;
                by_nqn
            });
    let mut all = Vec::new();
    for subsystem in items(&now.subsystems) {
        let nqn = text(&subsystem["nqn"]);
        for namespace in items(&subsystem["namespaces"]) {
            let name = text(&namespace["bdev_name"]);
            let unknown = || Device {
                name: name.clone(),
                ..Device::default()
            };
            all.push(Namespace {
                nsid: namespace["nsid"].as_u64().unwrap_or(0),
                device: devices.get(&name).cloned().unwrap_or_else(unknown),
                controllers: controllers.get(nqn.as_str()).copied().unwrap_or(0),
                nqn: nqn.clone(),
            });
        }
    }
    all
}
