//! The journal keys of a bdev and of its limits, and the look-up of a bdev of a known module.

use std::sync::Arc;

use nacre_bdev::Bdev;

use crate::bdev_modules;
use crate::services::{Engine, subsystems};
use crate::store::Edit;

/// The journal key of a device.
pub fn key(name: &str) -> String {
    format!("bdev/{name}")
}

/// The journal key of a device's limits.
pub fn limits_key(bdev: &str) -> String {
    format!("qos/{bdev}")
}

pub fn forget_limits(bdev: &str) -> Edit {
    Edit::Remove(limits_key(bdev))
}

/// The bdev of the module `T` with this name, alias or UUID.
pub fn find<T: Bdev>(engine: &Engine, name: &str) -> Option<Arc<T>> {
    bdev_modules::device::<T>(engine.plane().ok()?.bdevs.lookup(name)?.module())
}

/// Edits that remove the limits of bdevs and the namespaces on them from the journal.
pub fn forget_uses_of(engine: &Engine, names: &[String]) -> Vec<Edit> {
    let mut edits: Vec<Edit> = names.iter().map(|name| forget_limits(name)).collect();
    edits.extend(subsystems::forget_namespaces_of(engine, names));
    edits
}
