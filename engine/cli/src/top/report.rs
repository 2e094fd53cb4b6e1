//! Prints a snapshot of `nacre top` once, as tables or as JSON; and formats the cells of both
//! views.

use serde_json::{Value, json};

use super::super::{Failure, output};
use super::poll::WATCHED_MAX;
use super::rates::{self, Rates, rounded};
use super::snapshot::{
    ControllerRow, Device, Listener, Namespace, PathRow, Pool, Reactor, Share, Snapshot,
};

pub(super) fn print(snapshot: &Snapshot) -> Result<(), Failure> {
    output::line(&headline(snapshot))?;
    let named = |header: &[&'static str], rows: Vec<Vec<String>>| {
        output::line("")?;
        output::table(header, rows)
    };
    named(&REACTOR, snapshot.reactors.iter().map(reactor).collect())?;
    named(&LISTENER, snapshot.listeners.iter().map(listener).collect())?;
    named(
        &[&NAMESPACE[..], &DEVICE].concat(),
        snapshot.namespaces.iter().map(namespace).collect(),
    )?;
    if !snapshot.paths.is_empty() {
        named(&PATH, snapshot.paths.iter().map(path).collect())?;
    }
    if !snapshot.pools.is_empty() {
        named(&POOL, snapshot.pools.iter().map(pool).collect())?;
    }
    notes(snapshot)
        .iter()
        .try_for_each(|note| output::line(note))
}

/// The reasons of missing data.
pub(super) fn notes(snapshot: &Snapshot) -> Vec<String> {
    let refused = snapshot.refused.iter();
    let mut notes: Vec<String> = refused.map(|why| format!("refused: {why}")).collect();
    if snapshot.not_watched > 0 {
        notes.push(format!(
            "p99 is only of the {WATCHED_MAX} devices that this order had first one interval earlier, \
             not of the {} others; `nacre top` without --once shows it as you scroll",
            snapshot.not_watched
        ));
    }
    notes
}

/// The daemon and its hosts in one line.
pub(super) fn headline(snapshot: &Snapshot) -> String {
    let total = snapshot.total();
    let pid = snapshot
        .pid
        .map(|pid| format!(" ({pid})"))
        .unwrap_or_default();
    let many =
        |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let load = match snapshot.seconds {
        None => String::new(),
        Some(_) => format!(
            ", {} IOPS, {} read, {} written",
            rates::count(total.iops()),
            rates::throughput(total.read.bytes_per_s),
            rates::throughput(total.write.bytes_per_s)
        ),
    };
    format!(
        "{}{pid}: {}, {}{load}",
        snapshot.daemon,
        many(snapshot.hosts(), "host"),
        many(snapshot.connections.iter().map(|c| c.queues).sum(), "queue"),
    )
}

pub(super) const REACTOR: [&str; 8] = [
    "reactor", "core", "mode", "busy", "idle", "sleep", "queues", "cmd/s",
];

pub(super) fn reactor(reactor: &Reactor) -> Vec<String> {
    let percent = |part: fn(&Share) -> f64| {
        reactor
            .share
            .map_or_else(|| "-".into(), |s| format!("{:.1}%", part(&s) * 100.0))
    };
    vec![
        reactor.name.clone(),
        reactor.core.to_string(),
        reactor.mode.clone(),
        percent(|s| s.busy),
        percent(|s| s.idle),
        percent(|s| s.sleep),
        reactor.queues.to_string(),
        reactor.commands.map_or_else(|| "-".into(), rates::count),
    ]
}

pub(super) const LISTENER: [&str; 5] = ["listener", "subsystems", "hosts", "controllers", "queues"];

pub(super) fn listener(listener: &Listener) -> Vec<String> {
    let Listener {
        address,
        subsystems,
        hosts,
        controllers,
        queues,
    } = listener;
    let mut cells = vec![address.clone()];
    cells.extend([subsystems, hosts, controllers, queues].map(usize::to_string));
    cells
}

/// The columns of a namespace before those of its device.
pub(super) const NAMESPACE: [&str; 2] = ["subsystem", "nsid"];

pub(super) fn namespace(namespace: &Namespace) -> Vec<String> {
    let mut cells = vec![namespace.nqn.clone(), namespace.nsid.to_string()];
    cells.extend(device(&namespace.device));
    cells
}

pub(super) const DEVICE: [&str; 9] = [
    "device", "r/s", "w/s", "read", "written", "r avg", "w avg", "p99", "errors",
];

pub(super) fn device(device: &Device) -> Vec<String> {
    let Rates {
        read,
        write,
        errors,
        ..
    } = &device.rates;
    let latency = |seconds: Option<f64>| seconds.map_or_else(|| "-".into(), rates::time);
    vec![
        device.name.clone(),
        rates::count(read.iops),
        rates::count(write.iops),
        rates::throughput(read.bytes_per_s),
        rates::throughput(write.bytes_per_s),
        latency(read.latency_s),
        latency(write.latency_s),
        latency(device.p99_s),
        errors.to_string(),
    ]
}

pub(super) const CONNECTION: [&str; 7] = [
    "host",
    "subsystem",
    "cntlid",
    "queues",
    "from",
    "to",
    "reactors",
];

pub(super) fn connection(connection: &ControllerRow) -> Vec<String> {
    vec![
        connection.host.clone(),
        connection.nqn.clone(),
        connection.cntlid.to_string(),
        connection.queues.to_string(),
        connection.from.clone(),
        connection.to.clone(),
        // The numbers suffice in a narrow column.
        connection
            .reactors
            .iter()
            .map(|name| name.strip_prefix("reactor_").unwrap_or(name))
            .collect::<Vec<_>>()
            .join(","),
    ]
}

pub(super) const PATH: [&str; 10] = [
    "device", "path", "state", "ana", "used", "r/s", "w/s", "read", "written", "resent",
];

pub(super) fn path(path: &PathRow) -> Vec<String> {
    let Rates { read, write, .. } = &path.rates;
    vec![
        path.bdev.clone(),
        path.address.clone(),
        path.state.clone(),
        path.ana_state.clone(),
        if path.is_current { "yes" } else { "no" }.to_owned(),
        rates::count(read.iops),
        rates::count(write.iops),
        rates::throughput(read.bytes_per_s),
        rates::throughput(write.bytes_per_s),
        path.resent.to_string(),
    ]
}

pub(super) const POOL: [&str; 8] = [
    "pool", "state", "size", "used", "free", "lvols", "waiting", "disks",
];

pub(super) fn pool(pool: &Pool) -> Vec<String> {
    vec![
        pool.name.clone(),
        pool.state.clone(),
        output::bytes(pool.total_bytes),
        format!("{:.1}%", pool.used() * 100.0),
        output::bytes(pool.free_bytes),
        pool.lvols.to_string(),
        pool.waiting.to_string(),
        match pool.leaving {
            None => pool.disks.to_string(),
            Some(percent) => format!("{}, one leaving {percent}%", pool.disks),
        },
    ]
}

/// Stable: fields may be added, none changes its meaning.
pub(super) fn json(snapshot: &Snapshot) -> Value {
    let share = |share: &Share| json!({ "busy": rounded(share.busy), "idle": rounded(share.idle), "sleep": rounded(share.sleep) });
    let reactor = |r: &Reactor| {
        json!({
            "name": r.name, "core": r.core, "mode": r.mode, "share": r.share.as_ref().map(share),
            "queues": r.queues, "commands_per_s": r.commands.map(rounded),
        })
    };
    let listener = |l: &Listener| {
        json!({
            "address": l.address, "subsystems": l.subsystems, "hosts": l.hosts,
            "controllers": l.controllers, "queues": l.queues,
        })
    };
    let device = |d: &Device| {
        let mut object = d.rates.json();
        object["name"] = json!(d.name);
        object["latency_p99_us"] = json!(d.p99_s.map(|s| rounded(s * 1e6)));
        object
    };
    let namespace = |n: &Namespace| {
        let mut object = device(&n.device);
        let name = object["name"].take();
        object
            .as_object_mut()
            .expect("rates are an object")
            .remove("name");
        object["bdev_name"] = name;
        object["nqn"] = json!(n.nqn);
        object["nsid"] = json!(n.nsid);
        object["controllers"] = json!(n.controllers);
        object
    };
    let connection = |c: &ControllerRow| {
        json!({
            "hostnqn": c.host, "nqn": c.nqn, "cntlid": c.cntlid, "queues": c.queues,
            "from": c.from, "to": c.to, "reactors": c.reactors,
        })
    };
    let path = |p: &PathRow| {
        json!({
            "bdev_name": p.bdev, "address": p.address, "state": p.state, "ana_state": p.ana_state,
            "current": p.is_current, "resent": p.resent,
            "read": { "iops": rounded(p.rates.read.iops), "bytes_per_s": rounded(p.rates.read.bytes_per_s) },
            "write": { "iops": rounded(p.rates.write.iops), "bytes_per_s": rounded(p.rates.write.bytes_per_s) },
        })
    };
    let pool = |p: &Pool| {
        let mut pool = json!({
            "name": p.name, "state": p.state, "total_bytes": p.total_bytes,
            "used_bytes": p.used_bytes(), "free_bytes": p.free_bytes,
            "reserved_bytes": p.reserved_bytes, "lvols": p.lvols, "waiting_writes": p.waiting,
            "disks": p.disks,
        });
        if let Some(percent) = p.leaving {
            pool["leaving_percent"] = json!(percent);
        }
        pool
    };
    json!({
        "daemon": snapshot.daemon,
        "pid": snapshot.pid,
        "seconds": snapshot.seconds.map(rounded),
        "reactors": snapshot.reactors.iter().map(reactor).collect::<Vec<_>>(),
        "listeners": snapshot.listeners.iter().map(listener).collect::<Vec<_>>(),
        "namespaces": snapshot.namespaces.iter().map(namespace).collect::<Vec<_>>(),
        "devices": snapshot.devices.iter().map(device).collect::<Vec<_>>(),
        "connections": snapshot.connections.iter().map(connection).collect::<Vec<_>>(),
        "paths": snapshot.paths.iter().map(path).collect::<Vec<_>>(),
        "pools": snapshot.pools.iter().map(pool).collect::<Vec<_>>(),
        "refused": snapshot.refused, "devices_without_p99": snapshot.not_watched,
    })
}
