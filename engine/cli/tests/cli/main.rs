//! The command line as a client. Against a daemon that a script plays (`fake.rs`): calls to the
//! daemon, output, exit codes. Against the real daemon (`real.rs`): that the script
//! answers like it.

mod bdev;
mod fake;
mod general;
mod paths;
mod rdma;
mod real;
mod target;
mod top;
mod volume;
