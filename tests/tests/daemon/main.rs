//! The daemon as a whole: `nacre serve` as a process, hosts in this process, TCP between them.

mod crash;
mod job;
mod ledger;
mod many;
mod network;
mod raw;
