//! Tests of remote bdevs: the conformance suite over TCP and over simulated RDMA, and the
//! guarantees while connections, targets and namespaces are lost and return.

mod concat;
mod conformance;
mod lifecycle;
mod paths;
mod reserved;
mod rig;
mod zeroes;
