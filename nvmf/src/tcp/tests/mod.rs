//! Tests of the NVMe/TCP connection machines: against each other, with bytes written by hand, and
//! in virtual time.

mod exchange;
mod fuzz;
mod host_rules;
mod in_place;
mod pair;
mod starved;
mod target_rules;
mod timing;
