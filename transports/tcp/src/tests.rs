//! The plug on real sockets over loopback.

mod batches;
mod conformance;
mod listening;
mod placement;
mod sockets;
mod tls;
mod turns;
