//! The local address from which connections are made, shared by the code that sets it and the
//! connectors that use it.

use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;

/// The local address of connections; the kernel chooses it unless it is set. Clones share the
/// value, so it can follow an interface whose address changes: the next connection uses the new
/// address.
#[derive(Debug, Clone, Default)]
pub struct Source(Arc<Mutex<Option<IpAddr>>>);

impl Source {
    /// The address; `None`: the kernel chooses it.
    pub fn get(&self) -> Option<IpAddr> {
        *self.0.lock()
    }

    pub fn set(&self, address: Option<IpAddr>) {
        *self.0.lock() = address;
    }
}
