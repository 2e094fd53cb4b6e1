//! Calls that create a stacked bdev, deferred until its base bdev exists; and the replay of journal
//! records whose objects wait for a bdev.
//!
//! SPDK accepts the creation of a stacked bdev before its base exists, and creates it when the base
//! appears. The saved configurations of SPDK list stacked bdevs first. Here such a call becomes a
//! journal record `deferred/<name>`. The record is stored, exported, and listed by `state_get`. The
//! bdev's own record replaces it once the bdev exists.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use nacre_bdev::Bdev;
use parking_lot::Mutex;
use serde_json::Value;
use tracing::info;

use crate::bdev_modules;
use crate::journal::DEFERRED;
use crate::plane::Plane;
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::store::{Change, Record};

pub fn key(name: &str) -> String {
    format!("{DEFERRED}{name}")
}

/// The deferred calls.
#[derive(Default)]
pub struct Deferred {
    /// Journal keys of deferred calls, by the name of a base bdev.
    waiting: RefCell<HashMap<String, BTreeSet<String>>>,
    /// Names of new bdevs that were not handled yet.
    arrived: Arc<Mutex<Vec<String>>>,
    /// Held while deferred calls run.
    running: tokio::sync::Mutex<()>,
    replays: Replays,
}

impl Deferred {
    /// The list to which the registry's event handler adds the names of new bdevs.
    pub fn arrivals(&self) -> Arc<Mutex<Vec<String>>> {
        Arc::clone(&self.arrived)
    }

    fn expect(&self, record: &Record) {
        let mut waiting = self.waiting.borrow_mut();
        for base in bases(record) {
            let keys = waiting.entry(base.to_owned()).or_default();
            keys.insert(record.key.clone());
        }
    }

    /// Takes the keys of the calls that wait for one of `names`.
    fn take(&self, names: impl Iterator<Item = String>) -> BTreeSet<String> {
        let mut waiting = self.waiting.borrow_mut();
        names
            .filter_map(|name| waiting.remove(&name))
            .flatten()
            .collect()
    }
}

/// The names of the base bdevs of a call.
fn bases(record: &Record) -> impl Iterator<Item = &str> {
    let one = bdev_modules::base(&record.method, &record.params);
    let many = record.params.get("base_bdevs").and_then(Value::as_array);
    one.into_iter()
        .chain(many.into_iter().flatten().filter_map(Value::as_str))
}

/// A base bdev that the deferred call lacks. `None` if all exist, or if the record is no deferred
/// call.
pub fn missing_base<'a>(plane: &Plane, record: &'a Record) -> Option<&'a str> {
    if !record.key.starts_with(DEFERRED) {
        return None;
    }
    bases(record).find(|base| plane.bdevs.lookup(base).is_none())
}

/// Stores the creation of `name` as a deferred call. Calls from the journal and from the
/// configuration file get the error `missing` instead: the daemon retries those anyway.
pub async fn wait_for_base(
    engine: &Engine,
    name: &str,
    method: &str,
    params: Value,
    missing: RpcError,
) -> Result<(), RpcError> {
    if crate::journal::is_replaying() || crate::journal::is_declaring() {
        return Err(missing);
    }
    nacre_bdev::registry::check_name(name).or_refuse()?;
    let key = key(name);
    let there = engine.plane()?.bdevs.lookup(name).is_some() || engine.volumes.find(name).is_ok();
    if there
        || engine.journal.find(&key).is_some()
        || engine.journal.find(&format!("bdev/{name}")).is_some()
    {
        let taken = format!("there is a device \"{name}\", or one that waits for its base");
        return Err(RpcError::errno(Errno::EEXIST, taken).field("name"));
    }
    let record = Record {
        key,
        method: method.to_owned(),
        params,
    };
    engine.deferred.expect(&record);
    let base = missing_or(&record);
    info!(
        bdev = name,
        base, "the device is made when its base is there"
    );
    engine.journal.defer(record).await
}

fn missing_or(record: &Record) -> String {
    bases(record).collect::<Vec<_>>().join(", ")
}

/// Finds the deferred calls in the restored journal.
pub fn restore(engine: &Engine) {
    for entry in engine.journal.below(DEFERRED) {
        engine.deferred.expect(&entry.record);
    }
}

/// Runs the deferred calls whose bases have appeared. Returns when each has succeeded or failed.
pub async fn run_ready(engine: &Rc<Engine>) {
    let deferred = &engine.deferred;
    let _one = deferred.running.lock().await;
    loop {
        let arrived: Vec<String> = {
            let mut arrived = deferred.arrived.lock();
            arrived.drain(..).collect()
        };
        if arrived.is_empty() {
            return;
        }
        if deferred.waiting.borrow().is_empty() {
            continue;
        }
        let Ok(plane) = engine.plane() else { return };
        let names = arrived.into_iter().flat_map(|name| {
            let listed = plane.bdevs.get(&name).ok();
            let others = listed.map(|l| (l.layer.uuid().to_string(), l.aliases));
            let (uuid, aliases) = others.map_or((None, Vec::new()), |(u, a)| (Some(u), a));
            std::iter::once(name).chain(uuid).chain(aliases)
        });
        for key in deferred.take(names) {
            let Some(entry) = engine.journal.find(&key) else {
                continue;
            };
            match missing_base(&plane, &entry.record) {
                Some(_) => deferred.expect(&entry.record),
                None => engine.replay(&entry.record).await,
            }
        }
    }
}

/// Removes the record of a deferred call that succeeded, if it still exists.
pub async fn done(engine: &Engine, record: &Record) {
    if record.key.starts_with(DEFERRED) && engine.journal.find(&record.key).is_some() {
        // On failure the next attempt removes it.
        let _ = engine.journal.commit(Change::remove(&record.key)).await;
    }
}

/// Merges concurrent calls of [`replay_waiting`].
#[derive(Default)]
struct Replays {
    requested: Cell<u64>,
    /// Number of the last request that a pass has served.
    served: tokio::sync::Mutex<u64>,
}

/// Replays the journal records that wait, in order, for example those of namespaces and limits on
/// new bdevs. If many bdevs appear at once, one pass serves all requests that came before its
/// begin.
pub async fn replay_waiting(engine: &Rc<Engine>) {
    let replays = &engine.deferred.replays;
    let request = replays.requested.get() + 1;
    replays.requested.set(request);
    let mut served = replays.served.lock().await;
    if *served >= request {
        return;
    }
    let upto = replays.requested.get();
    for record in engine.journal.waiting() {
        engine.replay(&record).await;
    }
    *served = upto;
}
