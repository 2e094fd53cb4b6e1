//! Notifies about changes of the machine's links and addresses: an rtnetlink socket in both groups.
//!
//! The messages are not parsed: the listeners read the whole state again, which is also correct
//! after lost messages. A burst (a bond that comes up, a hundred VLANs) is one change.

use std::io::ErrorKind;
use std::time::Duration;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::net::UnixDatagram;

/// RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR.
const GROUPS: u32 = 0x1 | 0x10 | 0x100;

/// Length of a burst; an IPv6 address becomes usable shortly after its announcement.
const SETTLE: Duration = Duration::from_millis(200);

/// Larger than any message of these groups. Longer ones are truncated, which is harmless.
const MESSAGE: usize = 8192;

/// Maximum number of messages discarded at once; later ones are the next change.
const BURST: usize = 4096;

/// A netlink socket. The runtime has safe types for known socket families only. A unix datagram
/// socket receives in the same way, and nothing else is used.
pub(super) struct Watch(UnixDatagram);

impl Watch {
    pub(super) fn open() -> std::io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, GROUPS))?;
        Ok(Self(UnixDatagram::from_std(socket.into())?))
    }

    /// Resolves after a change, once the burst had time to end.
    pub(super) async fn changed(&self) -> std::io::Result<()> {
        self.0.readable().await?;
        tokio::time::sleep(SETTLE).await;
        let mut message = [0; MESSAGE];
        for _ in 0..BURST {
            match self.0.try_recv(&mut message) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // Messages were lost, which also means a change.
                Err(error)
                    if error.raw_os_error() == Some(rustix::io::Errno::NOBUFS.raw_os_error()) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
