//! The plug on real sockets over loopback.

mod batches;
mod conformance;
mod placement;
mod sockets;
mod turns;
