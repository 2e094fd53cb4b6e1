//! Finds namespaces by NSID. Removes the namespaces of removed bdevs from the target, and those of
//! deleted bdevs from the journal.

use std::sync::Arc;

use nacre_bdev::Layer;
use nacre_nvmf::subsystems::{NamespaceEntry, Subsystem, SubsystemError};
use nacre_nvmf_wire::Nqn;
use serde_json::Value;

use super::{ADD_NAMESPACE, key};
use crate::plane::Plane;
use crate::refusal::Refusal;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::store::{Change, Edit};

/// A namespace in events: `<nqn>/<nsid>`.
pub fn named(nqn: &Nqn, nsid: u32) -> String {
    format!("{nqn}/{nsid}")
}

pub fn find_namespace(subsystem: &Subsystem, nsid: u32) -> Result<NamespaceEntry, RpcError> {
    let none = || {
        SubsystemError::NoNamespace {
            nqn: subsystem.nqn().to_string(),
            nsid,
        }
        .refusal()
    };
    subsystem
        .namespaces()
        .into_iter()
        .find(|n| n.namespace.nsid == nsid)
        .ok_or_else(none)
}

/// The change that removes a namespace's record and the records below it.
pub fn forget_namespace(own: &str) -> Change {
    Change(vec![
        Edit::RemoveAll(key::below(own)),
        Edit::Remove(own.to_owned()),
    ])
}

/// Edits that remove the namespaces on `devices` from the journal, with the records below them.
pub fn forget_namespaces_of(engine: &Engine, devices: &[String]) -> Vec<Edit> {
    let on_one_of_them = |entry: &crate::journal::JournalEntry| {
        let device = entry
            .record
            .params
            .pointer("/namespace/bdev_name")
            .and_then(Value::as_str);
        entry.record.method == ADD_NAMESPACE
            && devices.iter().any(|name| Some(name.as_str()) == device)
    };
    let entries = engine.journal.select(on_one_of_them);
    entries
        .iter()
        .flat_map(|entry| forget_namespace(&entry.record.key).0)
        .collect()
}

/// Removes the namespaces of a removed bdev from the target. Their records stay, marked as failed,
/// so they return with the bdev.
pub fn bdev_gone(engine: &Engine, plane: &Plane, bdev: &str) {
    // The name may already belong to a new device with its own namespaces.
    let now = plane.bdevs.lookup(bdev);
    let is_of_now = |entry: &NamespaceEntry| {
        let backing = Arc::as_ptr(&entry.namespace.backing.bdev);
        let same = |layer: &Arc<Layer>| std::ptr::addr_eq(Arc::as_ptr(layer), backing);
        entry.bdev_name == bdev && now.as_ref().is_some_and(same)
    };
    for subsystem in plane.target.subsystems() {
        if subsystem.namespaces().iter().any(is_of_now) {
            continue;
        }
        remove_namespaces_on(engine, &subsystem, bdev);
    }
}

/// Removes the namespaces on a bdev from one subsystem, as [`bdev_gone`] does.
pub fn remove_namespaces_on(engine: &Engine, subsystem: &Subsystem, bdev: &str) {
    let nqn = subsystem.nqn();
    for nsid in subsystem.bdev_removed(bdev) {
        engine.notes.send("nvmf_namespace_change", named(nqn, nsid));
        let own = key::namespace(nqn, nsid);
        let away = || RpcError::errno(Errno::ENODEV, format!("device \"{bdev}\" went away"));
        for part in engine.journal.below(&key::below(&own)) {
            engine.journal.restored(&part.record.key, Err(away()));
        }
        engine.journal.restored(&own, Err(away()));
    }
}
