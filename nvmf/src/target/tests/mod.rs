//! The target in one thread and virtual time, with a transport made of two lists.

mod connect;
mod io;
mod rig;
