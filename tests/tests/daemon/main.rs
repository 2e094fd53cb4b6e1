//! The daemon as a whole: `nacre serve` as a process, hosts in this process, TCP between them.

mod change;
mod crash;
mod crowd;
mod cut;
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
mod raw;
mod remote;
mod replicas;
mod reservations;
mod saved;
mod signals;
mod spdk;
mod volumes;
