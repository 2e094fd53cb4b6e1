//! A remote namespace as a bdev: it passes the conformance suite over TCP and over (simulated)
//! RDMA, and keeps its guarantees when connections, targets and namespaces come and go.

mod conformance;
mod lifecycle;
mod reserved;
mod rig;
mod zeroes;
