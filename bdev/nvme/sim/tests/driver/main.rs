//! Tests of the driver on a simulated drive, in virtual time: attach to detach, and all failures.

mod all_faults;
mod attach;
mod faults;
mod firmware;
mod health;
mod interrupts;
mod namespaces;
mod random;
mod removal;
mod resets;
mod rig;
mod timeouts;
