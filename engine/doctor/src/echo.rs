//! Sends ICMP echo requests with the Don't Fragment bit, as `ping -M do` does, to find the MTU of a
//! path.
//!
//! Linux has two kinds of socket for it. `SOCK_DGRAM` needs a group in `net.ipv4.ping_group_range`,
//! which also covers ICMPv6. `SOCK_RAW` needs CAP_NET_RAW. This tries them in this order. The bytes
//! are in [`nacre_transport_rdma_link::icmp`].

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nacre_transport_rdma_link::icmp::{self, Version};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{
    Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, set_ip_mtu_discover, set_ipv6_mtu_discover,
};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, ipproto, recv, send,
    socket_with,
};

/// Number of requests: the first one may be lost while the neighbour's address is resolved.
const TRIES: u16 = 2;
/// Limit for each reply.
const PATIENCE: Duration = Duration::from_millis(700);
/// Unprivileged groups that may send echoes.
const GROUP_RANGE: &str = "/proc/sys/net/ipv4/ping_group_range";

/// The outcome of an echo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Echo {
    /// The reply has the same data; the time from request to reply.
    Answered(Duration),
    /// This machine or a router reports a smaller MTU.
    TooLong,
    /// This machine or a router reports that it has no route to the peer.
    Unreachable(Errno),
    /// No reply arrived in time.
    Silent,
}

impl fmt::Display for Echo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Answered(time) => write!(f, "answered in {:.2} ms", time.as_secs_f64() * 1000.0),
            Self::TooLong => f.write_str("longer than the MTU of an interface on the way"),
            Self::Unreachable(errno) => write!(f, "{}", io::Error::from(*errno)),
            Self::Silent => f.write_str("no answer"),
        }
    }
}

/// The reason why no echo could be sent.
#[derive(Debug, thiserror::Error)]
pub enum EchoError {
    /// `range`: the value of `net.ipv4.ping_group_range`.
    #[error(
        "not permitted: the process lacks CAP_NET_RAW, and net.ipv4.ping_group_range is \"{}\"; run it as root, or \
         `sysctl -w net.ipv4.ping_group_range=\"0 2147483647\"`",
        range.as_deref().unwrap_or("unknown")
    )]
    NotPermitted { range: Option<String> },
    #[error(transparent)]
    Socket(io::Error),
}

impl From<Errno> for EchoError {
    fn from(errno: Errno) -> Self {
        Self::Socket(errno.into())
    }
}

/// Sends an echo in an IP packet of `size` bytes, at most twice. Takes less than two seconds.
pub(crate) fn echo(to: SocketAddr, size: u32) -> Result<Echo, EchoError> {
    let socket = EchoSocket::open(to)?;
    // Raw sockets receive the replies to every program: the identifier says which are ours.
    let [low, high, ..] = rustix::process::getpid()
        .as_raw_nonzero()
        .get()
        .to_le_bytes();
    let identifier = u16::from_le_bytes([low, high]);
    let data = (size as usize).saturating_sub(socket.version.headers());
    let mut outcome = Echo::Silent;
    for sequence in 1..=TRIES {
        let request = icmp::request(socket.version, identifier, sequence, data);
        outcome = socket.exchange(&request)?;
        if outcome != Echo::Silent {
            break;
        }
    }
    Ok(outcome)
}

struct EchoSocket {
    socket: OwnedFd,
    version: Version,
    is_raw: bool,
}

impl EchoSocket {
    /// Connected: the kernel then reports errors of routers on it.
    fn open(to: SocketAddr) -> Result<Self, EchoError> {
        let (version, family, protocol) = match to {
            SocketAddr::V4(_) => (Version::V4, AddressFamily::INET, ipproto::ICMP),
            SocketAddr::V6(_) => (Version::V6, AddressFamily::INET6, ipproto::ICMPV6),
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let open = |kind| socket_with(family, kind, flags, Some(protocol));
        let (socket, is_raw) = match open(SocketType::DGRAM) {
            Ok(socket) => (socket, false),
            Err(Errno::ACCESS | Errno::PERM | Errno::PROTONOSUPPORT) => {
                match open(SocketType::RAW) {
                    Ok(socket) => (socket, true),
                    Err(Errno::ACCESS | Errno::PERM) => {
                        let range = std::fs::read_to_string(GROUP_RANGE).ok();
                        let range = range.map(|text| text.trim().replace('\t', " "));
                        return Err(EchoError::NotPermitted { range });
                    }
                    Err(errno) => return Err(errno.into()),
                }
            }
            Err(errno) => return Err(errno.into()),
        };
        // PROBE forbids fragments and ignores the path MTU that the kernel remembers.
        match version {
            Version::V4 => set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::PROBE)?,
            Version::V6 => set_ipv6_mtu_discover(&socket, Ipv6PathMtuDiscovery::PROBE)?,
        }
        let mut to = to;
        to.set_port(0);
        connect(&socket, &to)?;
        Ok(Self {
            socket,
            version,
            is_raw,
        })
    }

    fn exchange(&self, request: &[u8]) -> Result<Echo, EchoError> {
        let start = Instant::now();
        if let Err(errno) = send(&self.socket, request, SendFlags::empty()) {
            return outcome_of(errno);
        }
        let mut buffer = vec![0; 1 << 16];
        loop {
            match recv(&self.socket, &mut buffer[..], RecvFlags::empty()) {
                Ok((length, _)) if self.is_reply(&buffer[..length], request) => {
                    return Ok(Echo::Answered(start.elapsed()));
                }
                // A message to another program, or a late one.
                Ok(_) if start.elapsed() < PATIENCE => {}
                Ok(_) => return Ok(Echo::Silent),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let left = PATIENCE.saturating_sub(start.elapsed());
                    if left.is_zero() {
                        return Ok(Echo::Silent);
                    }
                    let left = left.try_into().map_err(|_| Errno::INVAL)?;
                    match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&left)) {
                        Ok(_) | Err(Errno::INTR) => {}
                        Err(errno) => return Err(errno.into()),
                    }
                }
                Err(errno) => return outcome_of(errno),
            }
        }
    }

    fn is_reply(&self, received: &[u8], request: &[u8]) -> bool {
        let message = match (self.version, self.is_raw) {
            (Version::V4, true) => icmp::without_ip_header(received),
            _ => Some(received),
        };
        let reply = message.and_then(|message| icmp::reply(self.version, message));
        reply.is_some_and(|reply| reply.answers(request, !self.is_raw))
    }
}

/// Errors that say something about the path.
fn outcome_of(errno: Errno) -> Result<Echo, EchoError> {
    match errno {
        Errno::MSGSIZE => Ok(Echo::TooLong),
        Errno::HOSTUNREACH
        | Errno::NETUNREACH
        | Errno::CONNREFUSED
        | Errno::HOSTDOWN
        | Errno::PROTO
        | Errno::ACCESS
        | Errno::PERM => Ok(Echo::Unreachable(errno)),
        errno => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: this machine answers itself, over both versions, also with large packets.
    #[test]
    fn this_machine_answers() {
        for to in ["127.0.0.1:1", "[::1]:1"] {
            let to: SocketAddr = to.parse().unwrap();
            for size in [64, 1500, 4192, 9000, 65_535] {
                match echo(to, size) {
                    Ok(Echo::Answered(_)) => {}
                    Ok(Echo::Unreachable(errno)) if to.is_ipv6() => {
                        return eprintln!("SKIPPED: this_machine_answers: no IPv6: {errno}");
                    }
                    Err(EchoError::Socket(error)) if to.is_ipv6() => {
                        return eprintln!("SKIPPED: this_machine_answers: no IPv6: {error}");
                    }
                    Err(error @ EchoError::NotPermitted { .. }) => {
                        return eprintln!("SKIPPED: this_machine_answers: {error}");
                    }
                    other => panic!("{to} {size}: {other:?}"),
                }
            }
        }
    }

    #[test]
    fn a_missing_permission_names_the_remedy() {
        let error = EchoError::NotPermitted {
            range: Some("1 0".into()),
        };
        let text = error.to_string();
        assert!(
            text.contains("CAP_NET_RAW") && text.contains("\"1 0\""),
            "{text}"
        );
        assert!(
            text.contains("sysctl -w net.ipv4.ping_group_range"),
            "{text}"
        );
    }

    #[test]
    fn errors_of_routers_are_outcomes() {
        assert_eq!(outcome_of(Errno::MSGSIZE).unwrap(), Echo::TooLong);
        let unreachable = outcome_of(Errno::HOSTUNREACH).unwrap();
        assert_eq!(unreachable, Echo::Unreachable(Errno::HOSTUNREACH));
        assert!(outcome_of(Errno::NOMEM).is_err());
    }
}
