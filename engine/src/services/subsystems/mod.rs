//! The target's subsystems with their journal records, and changes of them that no call asked for:
//! removed bdevs, and listeners that are withheld from hosts.

mod discovery;
pub mod key;
mod listeners;
mod namespaces;

pub use discovery::configured_nqn;
pub use listeners::{is_stored_listener, note_withheld, place, withhold};
pub use namespaces::{
    bdev_gone, find_namespace, forget_namespace, forget_namespaces_of, named, remove_namespaces_on,
};

/// The methods of the records of subsystems, listeners and namespaces.
pub const CREATE_SUBSYSTEM: &str = "nvmf_create_subsystem";
pub const ADD_LISTENER: &str = "nvmf_subsystem_add_listener";
pub const ADD_NAMESPACE: &str = "nvmf_subsystem_add_ns";
