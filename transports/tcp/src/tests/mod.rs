//! Tests of the TCP transport on real sockets, over the loopback interface.

mod batches;
mod conformance;
mod listening;
mod placement;
mod sockets;
mod tls;
mod turns;
