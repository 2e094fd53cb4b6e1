//! NVMe controllers, both remote ones ([`super::remotes`]) and drives of this machine
//! ([`super::drives`]): the parameters that attach one, and its record.
//!
//! A controller is attached by one call, [`ATTACH`], whose parameters are its record in the
//! journal. [`Options`](options::Options) of all controllers are another record.

pub mod options;
mod params;

use std::rc::Rc;

use futures_util::future::join_all;

use crate::rpc::RpcError;
use crate::services::drives::bus;
use crate::services::engine::Engine;
use crate::services::remotes::{Remote, RemotePlan};
use crate::store::Record;

pub use crate::attach::{AttachParams, Multipath};

/// The method that attaches a controller.
pub const ATTACH: &str = "bdev_nvme_attach_controller";

/// The journal key of a controller.
pub fn key(name: &str) -> String {
    format!("nvme/ctrlr/{name}")
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
pub async fn begin(engine: &Rc<Engine>, params: AttachParams) -> Result<Rc<Remote>, RpcError> {
    let wanted = params.check(engine).await?;
    let plan = RemotePlan::of(wanted, engine).await?;
    engine.remotes.begin(engine, plan).await
}

/// Starts all remote controllers of the store and of the configuration file, so that their
/// connection times overlap.
pub async fn begin_all(engine: &Rc<Engine>, records: &[Record]) {
    if let Some(options) = records.iter().find(|r| r.key == options::KEY) {
        engine.replay(options).await;
    }
    let stored: Vec<AttachParams> = records.iter().filter_map(params_of).collect();
    let declared = engine.declared.calls_of(ATTACH).into_iter();
    let declared = declared.filter_map(|params| serde_json::from_value(params).ok());
    // A stored controller has priority.
    let is_other = |params: &AttachParams| stored.iter().all(|one| one.name != params.name);
    let declared: Vec<AttachParams> = declared.filter(is_other).collect();
    let remote = stored
        .into_iter()
        .chain(declared)
        .filter(|params| !params.is_drive());
    // Errors are reported by the replay of the record, or by the declared call.
    let begun = remote.map(|params| async { drop(begin(engine, params).await) });
    join_all(begun).await;
}
