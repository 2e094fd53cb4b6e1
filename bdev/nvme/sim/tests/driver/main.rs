//! The driver against a simulated drive, in virtual time: its life, and all its failures.

mod attach;
mod everything;
mod faults;
mod health;
mod interrupts;
mod namespaces;
mod random;
mod removal;
mod resets;
mod rig;
mod timeouts;
