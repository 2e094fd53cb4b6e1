//! The management socket: SPDK's JSON-RPC dialect over a unix stream socket.
//!
//! ```text
//!   scan    where a JSON value ends, byte by byte          parse
//!   frame   bytes -> requests and batches                  parse
//!   method  what a method is; the registry                 decide
//!   socket  the socket's file and its lock                 perform
//!   clients who has a place                                decide
//!   server  peers, deadlines, answers                      perform
//!   client  the other end, for `nacre` itself              perform
//!   folder  whose the folder of a socket is                perform
//! ```

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
