//! The NVMe/TCP connection machines of both sides: bytes in, events out. No socket, no clock.
//!
//! ```text
//!   frame    one PDU header, checked or built
//!   rx       where the next bytes belong (a payload's Buf, or a receive buffer lent by the core)
//!   tx       queued headers and Bufs, leaving as one vectored send
//!   closing  the phases of a connection up to its close
//!   controller, host   the two ends of one connection
//! ```
//!
//! Both machines have the same interface. The driver (a socket, or a test's pipe) does, per turn:
//!
//! ```text
//!   while wants_read:   recv_slices -> read into them -> received(n) (at the end: peer_closed)
//!   until Starved:      poll -> an event for the layer above, or Waiting (ask again next turn)
//!   end_receive         gives the receive buffer back
//!   ... the layer above calls fetch, respond, submit ...
//!   while wants_write:  send_slices -> write them -> sent(n)
//!   takes_shutdown      shut the sending side down;  is_finished: drop the socket
//!   deadline            handle_timeout(now) when it has passed
//! ```
//!
//! A PDU is handled where it arrived. Payload that came with its header is copied once; the rest of
//! it is received straight into its buffer. Every violation of the protocol ends the connection
//! with a termination request that names the field, and affects only that connection.

mod closing;
pub mod controller;
pub mod frame;
#[doc(hidden)]
pub mod fuzzing;
pub mod host;
pub mod rx;
pub mod tx;

#[cfg(test)]
mod tests;

pub use controller::{Polled, TargetConn, TargetEvent, TargetPoll, TcpTargetConfig};
pub use host::{HostConfig, HostConn, HostPoll};
pub use rx::{RecvSlices, RxBuffers};
pub use tx::Slices;
