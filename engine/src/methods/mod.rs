//! The RPC methods, one family per file. The parameter and reply types are the schema.

pub mod alert_receivers;
pub mod alerts;
pub mod appliance;
pub mod audit;
pub mod backup;
pub mod bdev;
pub mod cluster;
pub mod disk;
mod disk_list;
pub mod doctor;
pub mod events;
pub mod examples;
pub mod framework;
pub mod keyring;
pub mod log;
pub mod metrics;
pub mod network;
pub mod nvmf;
pub mod options;
pub mod pool;
pub mod rdma;
pub mod reactor;
pub mod reference;
mod replies;
pub mod sandbox;
pub mod spdk;
pub mod state;
pub mod volume;
pub mod web;

use crate::rpc::Registry;
use crate::services::Engine;

/// All RPC methods.
pub fn all() -> Registry<Engine> {
    let mut registry = Registry::default();
    alerts::register(&mut registry);
    alert_receivers::register(&mut registry);
    appliance::register(&mut registry);
    network::register(&mut registry);
    audit::register(&mut registry);
    backup::register(&mut registry);
    bdev::register(&mut registry);
    cluster::register(&mut registry);
    disk::register(&mut registry);
    disk_list::register(&mut registry);
    doctor::register(&mut registry);
    events::register(&mut registry);
    framework::register(&mut registry);
    reactor::register(&mut registry);
    keyring::register(&mut registry);
    log::register(&mut registry);
    metrics::register(&mut registry);
    nvmf::register(&mut registry);
    options::register(&mut registry);
    pool::register(&mut registry);
    rdma::register(&mut registry);
    sandbox::register(&mut registry);
    spdk::register(&mut registry);
    state::register(&mut registry);
    volume::register(&mut registry);
    web::register(&mut registry);
    registry
}

#[cfg(test)]
pub mod testing;
