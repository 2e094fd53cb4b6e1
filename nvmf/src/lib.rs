//! NVMe over Fabrics without I/O: the target and the host side of the protocol.
//!
//! ```text
//! queues       one core's data path: queue pairs, commands from capsule to response
//! controller   registers, features, Identify, log pages and events: the admin commands
//! subsystems   targets, subsystems, namespaces, hosts: shared state that management changes
//! transport    the interface that TCP, RDMA and loopback implement, outside this crate
//! tcp          the NVMe/TCP state machines of both sides: bytes in, events out
//! host         the host side: connect, discover, identify, I/O queues, reconnect
//! address      addresses of controllers and namespaces, parsed from text
//! auth         in-band authentication, DH-HMAC-CHAP: messages, keys, the two ends of a transaction
//! tls          TLS 1.3 with pre-shared keys: the keys, and the choice of one for a ClientHello
//! ```
//!
//! Each of the first four uses those below it.

#![forbid(unsafe_code)]

pub mod address;
pub mod auth;
mod controller;
pub mod fuzzing;
pub mod host;
pub mod queues;
pub mod subsystems;
pub mod tcp;
#[cfg(test)]
mod tests;
pub mod tls;
pub mod transport;
