//! Calls that wait for a device that is not there yet.
//!
//! SPDK answers the creation of a stacked device before its base exists, and makes the device when the base comes: its
//! saved configurations list stacked devices first. Here such a call becomes a journal record of its own,
//! `deferred/<name>`. The record is stored, exported and listed by `state_get`; it gives way to the device's own record
//! when the device is made.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use nacre_bdev::Bdev;
use serde_json::Value;
use tracing::info;

use crate::engine::Engine;
use crate::plane::Plane;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::store::{Change, Record};

/// How the keys of deferred calls begin.
pub const PREFIX: &str = "deferred/";

pub fn key(name: &str) -> String {
    format!("{PREFIX}{name}")
}

#[derive(Default)]
pub struct Deferred {
    /// Keys of deferred calls by the device that they wait for.
    waiting: RefCell<HashMap<String, BTreeSet<String>>>,
    /// Devices that came and were not looked at yet.
    arrived: Arc<Mutex<Vec<String>>>,
    /// Held while deferred calls are made.
    settling: tokio::sync::Mutex<()>,
}

impl Deferred {
    /// Where the registry's event handler notes new devices.
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

    /// Keys of the calls that wait for one of `names`; they are looked up once.
    fn take(&self, names: impl Iterator<Item = String>) -> BTreeSet<String> {
        let mut waiting = self.waiting.borrow_mut();
        names
            .filter_map(|name| waiting.remove(&name))
            .flatten()
            .collect()
    }
}

/// The devices that a call needs.
fn bases(record: &Record) -> impl Iterator<Item = &str> {
    let one = ["base_bdev_name", "base_name"]
        .into_iter()
        .filter_map(|field| record.params.get(field)?.as_str());
    let many = record.params.get("base_bdevs").and_then(Value::as_array);
    one.chain(many.into_iter().flatten().filter_map(Value::as_str))
}

/// The device that a deferred call waits for; `None` if all its devices are there, or if it is no deferred call.
pub fn missing_base<'a>(plane: &Plane, record: &'a Record) -> Option<&'a str> {
    if !record.key.starts_with(PREFIX) {
        return None;
    }
    bases(record).find(|base| plane.bdevs.lookup(base).is_none())
}

/// Keeps the creation of `name` for the time when its base is there. The daemon's own calls (the store's, the TOML
/// file's) are refused with `missing` instead: the daemon repeats these itself.
pub async fn wait_for_base(
    on: &Engine,
    name: &str,
    method: &str,
    params: Value,
    missing: RpcError,
) -> Result<(), RpcError> {
    if crate::journal::is_replaying() || crate::journal::is_declaring() {
        return Err(missing);
    }
    nacre_bdev::registry::check_name(name)?;
    let key = key(name);
    let there = on.plane()?.bdevs.lookup(name).is_some() || on.volumes.find(name).is_ok();
    if there
        || on.journal.find(&key).is_some()
        || on.journal.find(&format!("bdev/{name}")).is_some()
    {
        let taken = format!("there is a device \"{name}\", or one that waits for its base");
        return Err(RpcError::errno(Errno::EEXIST, taken).field("name"));
    }
    let record = Record {
        key,
        method: method.to_owned(),
        params,
    };
    on.deferred.expect(&record);
    let base = missing_or(&record);
    info!(
        bdev = name,
        base, "the device is made when its base is there"
    );
    on.journal.defer(record).await
}

fn missing_or(record: &Record) -> String {
    bases(record).collect::<Vec<_>>().join(", ")
}

/// Finds the deferred calls among what the store had.
pub fn restore(on: &Engine) {
    for entry in on.journal.below(PREFIX) {
        on.deferred.expect(&entry.record);
    }
}

/// Makes what waited for devices that have come. Returns when every such device was made or refused.
pub async fn settle(on: &Rc<Engine>) {
    let deferred = &on.deferred;
    let _one = deferred.settling.lock().await;
    loop {
        let arrived: Vec<String> = {
            let mut arrived = deferred
                .arrived
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            arrived.drain(..).collect()
        };
        if arrived.is_empty() {
            return;
        }
        if deferred.waiting.borrow().is_empty() {
            continue;
        }
        let Ok(plane) = on.plane() else { return };
        let names = arrived.into_iter().flat_map(|name| {
            let listed = plane.bdevs.get(&name).ok();
            let others = listed.map(|l| (l.layer.uuid().to_string(), l.aliases));
            let (uuid, aliases) = others.map_or((None, Vec::new()), |(u, a)| (Some(u), a));
            std::iter::once(name).chain(uuid).chain(aliases)
        });
        for key in deferred.take(names) {
            let Some(entry) = on.journal.find(&key) else {
                continue;
            };
            match missing_base(&plane, &entry.record) {
                Some(_) => deferred.expect(&entry.record),
                None => on.replay(&entry.record).await,
            }
        }
    }
}

/// After a deferred call was made: its record gives way to the device's, if it has not yet.
pub async fn done(on: &Engine, record: &Record) {
    if record.key.starts_with(PREFIX) && on.journal.find(&record.key).is_some() {
        // It is dropped at the next attempt otherwise.
        let _ = on.journal.commit(Change::remove(&record.key)).await;
    }
}
