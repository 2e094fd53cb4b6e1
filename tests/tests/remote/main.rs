//! A remote namespace as a block device: it passes the devices' own suite over TCP and over (simulated) RDMA, and
//! keeps its promises when connections, targets and namespaces come and go.

mod conformance;
mod life;
mod reserved;
mod rig;
mod zeroes;
