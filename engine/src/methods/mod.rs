//! The RPC methods, one family per file. The parameter and reply types are the schema.

pub mod accel;
pub mod bdev;
pub mod doctor;
pub mod events;
pub mod examples;
pub mod framework;
pub mod log;
pub mod metrics;
pub mod notify;
pub mod nvmf;
pub mod options;
pub mod rdma;
pub mod reactor;
pub mod reference;
pub mod scheduler;
pub mod sock;
pub mod spdk;
pub mod spdk_export;
pub mod state;
pub mod volume;

use crate::engine::Engine;
use crate::rpc::Registry;

/// All RPC methods.
pub fn all() -> Registry<Engine> {
    let mut registry = Registry::default();
    accel::register(&mut registry);
    bdev::register(&mut registry);
    doctor::register(&mut registry);
    events::register(&mut registry);
    framework::register(&mut registry);
    reactor::register(&mut registry);
    log::register(&mut registry);
    metrics::register(&mut registry);
    notify::register(&mut registry);
    nvmf::register(&mut registry);
    options::register(&mut registry);
    scheduler::register(&mut registry);
    sock::register(&mut registry);
    rdma::register(&mut registry);
    state::register(&mut registry);
    volume::register(&mut registry);
    registry
}

#[cfg(test)]
pub mod testing;
