//! NVMe over Fabrics, sans-IO: the target and the host side of the protocol.
//!
//! ```text
//! transport   the interface of a plug; sockets and verbs are on its other side
//! target      subsystems, controllers, queue pairs: capsules in, bdev I/O and responses out
//! tcp         the NVMe/TCP connection machines of both sides: bytes in, events out
//! host        the host side: connect, discover, identify, I/O queues, reconnect
//! ```

#![forbid(unsafe_code)]

pub mod host;
pub mod target;
pub mod tcp;
pub mod transport;
