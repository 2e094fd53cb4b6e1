//! The plug on real sockets over loopback.

mod conformance;
mod sockets;
