//! The driver against a simulated drive, in virtual time: its life, and everything that can go wrong.

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
