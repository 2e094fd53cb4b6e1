//! Tests of the command line. Against a scripted daemon (`fake.rs`): calls, output and exit codes.
//! Against the real daemon (`real.rs`): that the scripted one answers like it.

mod bdev;
mod cluster;
mod cluster_backup;
mod fake;
mod general;
mod host_keys;
mod join;
mod paths;
mod rdma;
mod real;
mod target;
mod top;
mod volume;
