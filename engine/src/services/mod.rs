//! The services: each owns one kind of object of the daemon. [`engine::Engine`] has one of each.
//!
//! ```text
//!   methods ─▶ Engine ─┬─ calls        clients, their roles and calls
//!                      ├─ web          the administration page, part of calls
//!                      ├─ alerts      receivers of messages about events
//!                      ├─ volumes     replicated volumes: open, close, events
//!                      ├─ cluster     this node of a cluster, part of volumes
//!                      ├─ pools       storage pools, kept by devices
//!                      ├─ backup       backups of snapshots of pools, kept by devices
//!                      ├─ devices     requested histograms and samples, device events
//!                      ├─ drives      NVMe drives of this machine
//!                      ├─ remotes     namespaces of other machines
//!                      ├─ keyring     keys of hosts, and of this host
//!                      ├─ listeners   addresses that hosts connect to
//!                      ├─ failover    listeners that are inaccessible for a test
//!                      ├─ rdma        RDMA devices
//!                      ├─ nics        counters of network interfaces
//!                      ├─ declared    objects of the configuration file
//!                      └─ deferred    devices whose base does not exist yet
//! ```
//!
//! RPC methods use services. Services never use methods; a service that needs a method's work calls
//! it by name, through the engine.

pub mod alerts;
pub mod backup;
pub mod calls;
pub mod certificates;
pub mod cluster;
pub mod concat;
pub mod declared;
pub mod deferred;
pub mod devices;
pub mod drives;
pub mod engine;
pub mod failover;
pub mod http_token;
pub mod keyring;
pub mod lifecycle;
pub mod listeners;
pub mod nics;
pub mod nvme;
pub mod pools;
pub mod rdma;
pub mod remotes;
pub mod reservations;
pub mod sandbox;
pub mod startup;
pub mod subsystems;
pub mod volumes;
pub mod web;
