//! The management socket: SPDK's JSON-RPC dialect over a unix stream socket.
//!
//! ```text
//!   scan    the end of a JSON value, byte by byte          parse
//!   frame   bytes -> requests and batches                  parse
//!   method  the trait of methods; the registry             decide
//!   socket  the socket's file and its lock                 perform
//!   clients places of clients, limits of unsent bytes      decide
//!   server  peers, deadlines, answers                      perform
//!   client  the client side, for `nacre` itself            perform
//!   folder  ownership of a socket's folder                 perform
//! ```

#![forbid(unsafe_code)]

pub mod client;
pub mod clients;
pub mod error;
pub mod folder;
pub mod frame;
pub mod method;
pub mod scan;
pub mod server;
pub mod socket;

pub use error::RpcError;
pub use method::{Method, MethodEntry, NoParams, Order, Registry, When};
