//! Tests of the host side against the target, in one thread and in virtual time: connecting,
//! namespaces, and the handling of I/O when connections are lost.

mod admin;
mod authentication;
mod discovery;
mod garbage;
mod io;
mod loss;
mod namespaces;
mod rig;
mod static_ids;
mod tap;
mod waiting;
