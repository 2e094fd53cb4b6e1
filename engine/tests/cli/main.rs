//! The command line as a client, against a daemon that a script plays (`fake.rs`): what is asked of
//! the daemon, what is printed of its answers, and with which code the program ends.

mod bdev;
mod fake;
mod general;
mod target;
mod top;
