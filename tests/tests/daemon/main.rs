//! End-to-end tests: `nacre serve` as a process, hosts in the test's process, TCP between them.

mod change;
mod cluster;
mod cluster_changes;
mod crash;
mod crowd;
mod cut;
mod etcd;
mod fence;
mod files;
mod full;
mod info;
mod job;
mod ledger;
mod listeners;
mod load;
mod many;
mod network;
mod nodes;
mod raw;
mod remote;
mod replicas;
mod reservations;
mod saved;
mod signals;
mod spdk;
mod volumes;
