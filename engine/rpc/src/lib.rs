//! The management socket: JSON-RPC 2.0 as SPDK's, over a Unix stream socket.
//!
//! ```text
//!   scan    the end of a JSON value, byte by byte          parse
//!   frame   bytes -> requests and batches                  parse
//!   access  roles of clients, classes of methods          decide
//!   method  the trait of methods; the registry             decide
//!   secret  the type of secret parameters                  parse
//!   socket  the socket's file and its lock                 perform
//!   clients admission of clients, limit of unsent bytes    decide
//!   places  places of network clients                      decide
//!   der     the elements of certificates                   parse
//!   subject the subject of a certificate                   parse
//!   tls     certificates, the TLS listener and its client  parse, perform
//!   server  connections, deadlines, replies                perform
//!   client  the client side, for `nacre` itself            perform
//!   folder  ownership of a socket's folder                 perform
//! ```

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::cast_possible_truncation))]

pub mod access;
pub mod client;
pub mod clients;
pub mod der;
pub mod error;
pub mod folder;
pub mod frame;
pub mod method;
pub mod places;
pub mod scan;
pub mod secret;
pub mod server;
pub mod socket;
pub mod subject;
pub mod tls;

pub use access::{Class, Role};
pub use error::RpcError;
pub use method::{Changes, Method, MethodEntry, NoParams, Order, Registry, When};
