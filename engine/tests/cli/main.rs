//! The command line as a client, against a daemon that a script plays (`fake.rs`): what is asked of
//! the daemon, what is printed of its answers, and with which code the program ends. And against
//! the real one (`real.rs`): that it means what the script does.

mod bdev;
mod fake;
mod general;
mod rdma;
mod real;
mod target;
mod top;
mod volume;
