//! Tests of the whole target, in one thread and virtual time, over a transport that consists of two
//! lists.

mod abort;
mod admin;
mod ana;
mod any_command;
mod any_io;
mod authentication;
mod children;
mod cntlid;
mod concatenation;
mod connect;
pub(crate) mod corpus;
mod devices;
mod discovery;
mod events;
mod fused;
mod host;
mod idle;
mod io;
mod lba_status;
mod limits;
mod listening;
mod logs;
mod memory;
mod payload;
mod replaced;
mod reservations;
mod rig;
mod scripted;
mod shared;
mod sync;
mod tls;
mod waiting;
