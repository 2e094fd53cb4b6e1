//! Tells when the machine's links or addresses changed: an rtnetlink socket in the groups of both.
//!
//! What changed is not read from the messages: the listeners look at the whole machine again, which
//! is right after lost messages, too. A burst (a bond that comes up, a hundred VLANs) is one change.

use std::io::ErrorKind;
use std::time::Duration;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::net::UnixDatagram;

/// RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR.
const GROUPS: u32 = 0x1 | 0x10 | 0x100;

/// How long a burst may last; an IPv6 address is usable a moment after it is announced.
const SETTLE: Duration = Duration::from_millis(200);

/// Larger than any message of these groups; what does not fit is cut, and not looked at anyway.
const MESSAGE: usize = 8192;

/// Messages thrown away at once: what comes after them is the next change.
const BURST: usize = 4096;

/// The socket is a netlink socket. The runtime has safe types for sockets of known families only;
/// of those, datagrams of the local kind are received as these are, and nothing else is done here.
pub struct Watch(UnixDatagram);

impl Watch {
    pub fn open() -> std::io::Result<Watch> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, GROUPS))?;
        Ok(Watch(UnixDatagram::from_std(socket.into())?))
    }

    /// Resolves after something changed and a burst of changes has had time to end.
    pub async fn changed(&self) -> std::io::Result<()> {
        self.0.readable().await?;
        tokio::time::sleep(SETTLE).await;
        let mut message = [0; MESSAGE];
        for _ in 0..BURST {
            match self.0.try_recv(&mut message) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // Messages were lost: as good a change as any.
                Err(error)
                    if error.raw_os_error() == Some(rustix::io::Errno::NOBUFS.raw_os_error()) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
