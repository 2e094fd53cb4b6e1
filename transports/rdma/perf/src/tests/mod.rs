//! Tests of both ends of the RDMA performance test, over simulated devices with injected faults.

mod faults;
mod foreign_peers;
mod probe;
mod refusals;
mod rig;
mod runs;
mod wire;
