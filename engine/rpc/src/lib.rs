//! The management protocol: JSON-RPC 2.0 as in SPDK, over a Unix stream socket, and over TLS with
//! certificates for clients on other machines. Server and client. The methods themselves are in
//! `nacre-engine`.
//!
//! ```text
//!   scan    finds the end of a JSON value, byte by byte   parse
//!   frame   bytes -> requests and batches                  parse
//!   access  which role may call which class of methods     decide
//!   method  the trait of a method; the registry of all     decide
//!   secret  the type of secret parameters                  parse
//!   socket  the socket's file and its lock                 perform
//!   clients most connections, most bytes of unsent replies decide
//!   places  most network clients, fair between addresses   decide
//!   der     the elements of certificates (DER)             parse
//!   subject the subject of a certificate                   parse
//!   tls     certificate files, TLS listener and connection parse, perform
//!   server  connections, deadlines, replies                perform
//!   client  the client side, for the program `nacre`       perform
//!   folder  checks the owner of the socket's folder        perform
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
