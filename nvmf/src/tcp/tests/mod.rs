//! The machines against each other, against raw bytes, and against the clock.

mod exchange;
mod fuzz;
mod host_rules;
mod in_place;
mod pair;
mod starved;
mod target_rules;
mod timing;
