//! Tests of the web server.

mod live;
mod rig;
mod server;
mod upload;
