//! NVMe controllers, both remote ones ([`super::remotes`]) and drives of this machine
//! ([`super::drives`]): the parameters that attach one, and its journal record.
//!
//! One call of [`ATTACH`] attaches a controller or a further path; its parameters are the record.
//! The [`Options`](options::Options) of all controllers are a record too.

pub mod options;
mod params;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::rc::Rc;

use futures_util::future::join_all;

use crate::journal::JournalEntry;
use crate::rpc::RpcError;
use crate::services::Engine;
use crate::services::bus;
use crate::services::remotes::{Remote, RemotePath, RemotePlan};
use crate::store::Record;
use crate::values::address::{canonical_host, canonical_port};

pub use crate::attach::{AttachParams, Multipath};

/// The method that attaches a controller.
pub const ATTACH: &str = "bdev_nvme_attach_controller";

/// The journal key of a controller.
pub fn key(name: &str) -> String {
    format!("nvme/ctrlr/{name}")
}

/// The journal key of a further path (not the first) to a controller's subsystem.
pub fn path_key(params: &AttachParams) -> String {
    let (name, traddr) = (&params.name, canonical_host(&params.traddr));
    let kind = params.trtype.to_ascii_lowercase();
    let port = canonical_port(params.trsvcid.as_deref().unwrap_or(DEFAULT_PORT));
    let source = params.hostaddr.as_deref().unwrap_or_default();
    format!("{PATHS}{name}/{kind}/{traddr}/{port}/{source}")
}

/// The journal key of a discovery service.
pub fn discovery_key(name: &str) -> String {
    format!("{DISCOVERIES}{name}")
}

/// Prefix of the keys of discovery services.
pub const DISCOVERIES: &str = "nvme/discovery/";
/// Prefix of the keys of paths.
pub const PATHS: &str = "nvme/path/";
/// Prefix of the keys of multipath policies; the name of the bdev follows.
pub const POLICIES: &str = "nvme/policy/";
/// TCP and RDMA port of a remote target, unless the call names one.
pub const DEFAULT_PORT: &str = "4420";

/// The journal key of an attaching call: that of the controller, or of a further path.
pub fn record_key(engine: &Engine, params: &AttachParams) -> String {
    let further = path_key(params);
    // The key of a stored path may have another spelling of its address.
    let prefix = format!("{PATHS}{}/", params.name);
    let is_it = |entry: &JournalEntry| {
        params_of(&entry.record).is_some_and(|stored| path_key(&stored) == further)
    };
    if let Some(stored) = engine.journal.below(&prefix).into_iter().find(is_it) {
        return stored.record.key;
    }
    let first = engine.journal.find(&key(&params.name));
    let first = first.and_then(|entry| params_of(&entry.record));
    match (first, engine.remotes.find(&params.name)) {
        (Some(first), _) if path_key(&first) == further => key(&params.name),
        (Some(_), _) => further,
        (None, Some(remote)) if !remote.paths().iter().any(|path| params.is_at(path)) => further,
        (None, _) => key(&params.name),
    }
}

/// The records, stored or declared, of the calls that attached these paths of a controller. Paths
/// attached for a discovery service have none.
pub fn records_of(engine: &Engine, name: &str, paths: &[Rc<RemotePath>]) -> Vec<JournalEntry> {
    let further = format!("{PATHS}{name}/");
    let is_of = |entry: &JournalEntry| {
        let record = &entry.record;
        let of_name = record.key == key(name) || record.key.starts_with(&further);
        let params = params_of(record).filter(|_| of_name);
        params.is_some_and(|params| paths.iter().any(|path| params.is_at(path)))
    };
    engine.journal.select(is_of)
}

/// PCI address of the drive that the record attaches; `None` for a remote controller.
pub fn address_of(record: &Record) -> Option<String> {
    let params = params_of(record)?;
    let is_drive = params.is_drive();
    is_drive.then(|| bus::address(&params.traddr)).flatten()
}

fn params_of(record: &Record) -> Option<AttachParams> {
    let attaches = record.method == ATTACH;
    attaches
        .then(|| serde_json::from_value(record.params.clone()).ok())
        .flatten()
}

/// Starts to connect to a remote controller; does not wait for the connection.
pub async fn begin(
    engine: &Rc<Engine>,
    params: AttachParams,
) -> Result<(Rc<Remote>, Rc<RemotePath>), RpcError> {
    let wanted = params.check(engine).await?;
    let plan = RemotePlan::of(wanted, engine).await?;
    engine.remotes.begin(engine, plan).await
}

/// Begins to connect all remote controllers of the journal and of the configuration file, so that
/// the connection times overlap.
pub async fn begin_all(engine: &Rc<Engine>, records: &[Record]) {
    if let Some(options) = records.iter().find(|r| r.key == options::KEY) {
        engine.replay(options).await;
    }
    let stored: Vec<AttachParams> = records.iter().filter_map(params_of).collect();
    let declared = engine.declared.calls_of(ATTACH).into_iter();
    let declared = declared.filter_map(|params| serde_json::from_value(params).ok());
    // A stored controller has priority.
    let is_other = |params: &AttachParams| engine.journal.find(&key(&params.name)).is_none();
    let declared: Vec<AttachParams> = declared.filter(is_other).collect();
    let remote = stored
        .into_iter()
        .chain(declared)
        .filter(|params| !params.is_drive());
    let (mut first, mut further) = (BTreeMap::new(), Vec::new());
    for params in remote {
        match first.entry(params.name.clone()) {
            Entry::Vacant(place) => drop(place.insert(params)),
            Entry::Occupied(_) => further.push(params),
        }
    }
    // Errors are reported by the replay of the record, or by the declared call.
    let begin = |params| async { drop(begin(engine, params).await) };
    join_all(first.into_values().map(begin)).await;
    join_all(further.into_iter().map(begin)).await;
}
