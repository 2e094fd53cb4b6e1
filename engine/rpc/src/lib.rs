//! The management socket: SPDK's JSON-RPC dialect over a unix stream socket.
//!
//! ```text
//!   scan    the end of a JSON value, byte by byte          parse
//!   frame   bytes -> requests and batches                  parse
//!   access  roles of clients, classes of methods          decide
//!   method  the trait of methods; the registry             decide
//!   secret  the type of secret parameters                  parse
//!   socket  the socket's file and its lock                 perform
//!   clients places of clients, limits of unsent bytes      decide
//!   server  peers, deadlines, answers                      perform
//!   client  the client side, for `nacre` itself            perform
//!   folder  ownership of a socket's folder                 perform
//! ```

#![forbid(unsafe_code)]

pub mod access;
pub mod client;
pub mod clients;
pub mod error;
pub mod folder;
pub mod frame;
pub mod method;
pub mod scan;
pub mod secret;
pub mod server;
pub mod socket;

pub use access::{Class, Role};
pub use error::RpcError;
pub use method::{Method, MethodEntry, NoParams, Order, Registry, When};
