//! Detects added and removed NVMe drives, and changes of their driver, for the drive bdev's
//! hotplug.
//!
//! The kernel sends a uevent for every device change to a netlink socket. Uevents can be lost, and
//! a container receives none. So a uevent only triggers a comparison with sysfs, and the caller
//! also compares periodically.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};

use crate::pci::{Address, Driver, System};

/// A change of a drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    Added(Address, Driver),
    Removed(Address),
    /// The drive was bound to this driver, or unbound.
    Driver(Address, Driver),
}

pub struct Watch {
    system: Arc<System>,
    known: BTreeMap<Address, Driver>,
    announcements: Option<OwnedFd>,
}

/// The maximum number of uevents read per call of [`Watch::changes`].
const MESSAGES_MAX: usize = 1024;

impl Watch {
    /// Starts watching: only changes after this call are reported.
    pub fn new(system: Arc<System>) -> Self {
        let announcements = listen()
            .inspect_err(|error| tracing::debug!(%error, "no announcements of devices: looking from time to time"))
            .ok();
        let known = drives(&system);
        Self {
            system,
            known,
            announcements,
        }
    }

    /// The uevent socket, which becomes readable when a drive may have changed. `None`: the socket
    /// could not be opened, and the caller must poll [`Watch::changes`].
    pub fn fd(&self) -> Option<RawFd> {
        self.announcements.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Returns the changes since the last call. Does not block.
    pub fn changes(&mut self) -> Vec<Change> {
        self.drain();
        let now = drives(&self.system);
        let before = std::mem::replace(&mut self.known, now);
        let mut changes = Vec::new();
        let gone = before.keys().filter(|at| !self.known.contains_key(at));
        changes.extend(gone.map(|at| Change::Removed(*at)));
        for (at, driver) in &self.known {
            match before.get(at) {
                None => changes.push(Change::Added(*at, driver.clone())),
                Some(was) if was != driver => changes.push(Change::Driver(*at, driver.clone())),
                Some(_) => {}
            }
        }
        changes
    }

    fn drain(&self) {
        let Some(socket) = &self.announcements else {
            return;
        };
        let mut message = [0; 64];
        for _ in 0..MESSAGES_MAX {
            // The content of a uevent is not used, and lost uevents (ENOBUFS) do not matter: sysfs
            // has the present state.
            match rustix::net::recv(socket, &mut message, RecvFlags::DONTWAIT | RecvFlags::TRUNC) {
                Ok(_) | Err(rustix::io::Errno::NOBUFS | rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }
}

fn drives(system: &System) -> BTreeMap<Address, Driver> {
    system
        .addresses()
        .into_iter()
        .map(|address| (address, system.driver_of(address)))
        .collect()
}

fn listen() -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        Some(KOBJECT_UEVENT),
    )?;
    /// The multicast group of the kernel's uevents (udev sends to another group).
    const KERNEL: u32 = 1;
    rustix::net::bind(&socket, &SocketAddrNetlink::new(0, KERNEL))?;
    Ok(socket)
}
