//! Creates and configures the TCP sockets of target and host, and wraps the two system calls of the
//! data path: a non-blocking receive and a non-blocking send.

use std::io::{IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nacre_nvmf::transport::ListenError;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType, sockopt,
};

/// The congestion control for connections within one machine. It does not pace packets with a
/// timer, exists in every kernel and needs no privilege.
const UNPACED: &str = "reno";

/// Socket options of a connection, on the target or the host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tuning {
    pub marking: Marking,
    pub send_buffer: Option<usize>,
    pub receive_buffer: Option<usize>,
    pub ack_timeout: Duration,
}

/// The QoS marking of the packets of a socket: DSCP and priority.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Marking {
    /// Type of Service byte (DSCP << 2); 0: the system's default.
    pub tos: u8,
    /// SO_PRIORITY, which a VLAN maps to the priority in its tag (`egress-qos-map`). `None`: the
    /// kernel derives it from `tos`. Values above 6 need CAP_NET_ADMIN.
    pub priority: Option<u8>,
}

impl Marking {
    /// Sets the options. Ignores errors: the connection works without them.
    fn apply(self, socket: BorrowedFd<'_>, is_ipv4: bool) {
        if self.tos != 0 {
            let _ = if is_ipv4 {
                sockopt::set_ip_tos(socket, self.tos)
            } else {
                sockopt::set_ipv6_tclass(socket, self.tos.into())
            };
        }
        // After IP_TOS, which sets a priority of its own.
        if let Some(priority) = self.priority {
            let _ = socket2::SockRef::from(&socket).set_priority(priority.into());
        }
    }
}

pub(crate) fn stream_socket(address: &SocketAddr) -> rustix::io::Result<OwnedFd> {
    let family = if address.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(family, SocketType::STREAM, flags, None)
}

/// Creates a listening socket. Returns it with its actual address, whose port was assigned if
/// `address` has port 0.
pub(crate) fn listen(
    address: SocketAddr,
    backlog: i32,
    marking: Marking,
) -> Result<(OwnedFd, SocketAddr), ListenError> {
    let attempt = || -> rustix::io::Result<(OwnedFd, SocketAddr)> {
        let socket = stream_socket(&address)?;
        // A restarted daemon takes its port back while old connections linger in TIME_WAIT.
        sockopt::set_socket_reuseaddr(&socket, true)?;
        if address.is_ipv6() {
            // IPv4 has sockets of its own: `::` leaves them their port.
            sockopt::set_ipv6_v6only(&socket, true)?;
        }
        // For the kernel's answers to handshakes. Accepted sockets inherit the byte, not the
        // priority.
        marking.apply(socket.as_fd(), address.is_ipv4());
        rustix::net::bind(&socket, &address)?;
        rustix::net::listen(&socket, backlog)?;
        let real = rustix::net::getsockname(&socket)?.try_into()?;
        Ok((socket, real))
    };
    attempt().map_err(|errno| ListenError::Bind {
        address: address.to_string(),
        source: errno.into(),
        remedy: remedy(errno, address),
    })
}

fn remedy(errno: Errno, address: SocketAddr) -> String {
    let port = address.port();
    match errno {
        Errno::ADDRINUSE => format!(
            "another program has the port: find it with `ss -ltnp 'sport = :{port}'`, stop it, or choose another port"
        ),
        Errno::ADDRNOTAVAIL => format!(
            "no interface has the address {}: see `ip address`, or listen on all with {}",
            address.ip(),
            if address.is_ipv4() { "0.0.0.0" } else { "::" }
        ),
        Errno::ACCESS | Errno::PERM => format!(
            "ports below the system's limit (`sysctl net.ipv4.ip_unprivileged_port_start`) need CAP_NET_BIND_SERVICE: \
             grant it, or choose a port above it instead of {port}"
        ),
        Errno::INVAL if is_link_local(address.ip()) => {
            "a link-local address needs its interface: write it as fe80::1%eth0".to_owned()
        }
        Errno::NODEV => format!(
            "no interface has the index {}: see `ip link`",
            match address {
                SocketAddr::V6(v6) => v6.scope_id(),
                SocketAddr::V4(_) => 0,
            }
        ),
        Errno::AFNOSUPPORT => "this kernel runs without IPv6: use an IPv4 address".to_owned(),
        Errno::MFILE | Errno::NFILE => "no file descriptor is left: raise `ulimit -n`".to_owned(),
        _ => "see the kernel's log".to_owned(),
    }
}

pub(crate) fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// Sets the options of a connection's socket. Fails only if TCP_NODELAY or SO_KEEPALIVE cannot be
/// set; errors of other options are ignored.
pub(crate) fn tune(
    socket: impl AsFd,
    address: &SocketAddr,
    tuning: &Tuning,
) -> rustix::io::Result<()> {
    let socket = socket.as_fd();
    // A response never waits for an acknowledgement of earlier data.
    sockopt::set_tcp_nodelay(socket, true)?;
    // Keepalive detects a peer that disappeared while there is nothing to send to it.
    sockopt::set_socket_keepalive(socket, true)?;
    let _ = sockopt::set_tcp_keepidle(socket, Duration::from_secs(30));
    let _ = sockopt::set_tcp_keepintvl(socket, Duration::from_secs(10));
    let _ = sockopt::set_tcp_keepcnt(socket, 3);
    let millis = u32::try_from(tuning.ack_timeout.as_millis()).unwrap_or(u32::MAX);
    let _ = sockopt::set_tcp_user_timeout(socket, millis);
    if let Some(bytes) = tuning.send_buffer {
        let _ = sockopt::set_socket_send_buffer_size(socket, bytes);
    }
    if let Some(bytes) = tuning.receive_buffer {
        let _ = sockopt::set_socket_recv_buffer_size(socket, bytes);
    }
    // The system's congestion control for its networks (BBR, say) may pace packets with a timer for
    // each. The path between two programs of one machine cannot be congested.
    if address.ip().to_canonical().is_loopback() {
        let _ = sockopt::set_tcp_congestion(socket, UNPACED);
    }
    tuning.marking.apply(socket, address.is_ipv4());
    Ok(())
}

/// Receives once, without blocking. Returns the number of bytes; 0: the peer closed the connection.
#[inline]
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    slices: &mut [IoSliceMut<'_>],
) -> rustix::io::Result<usize> {
    match slices {
        // Without a vector the kernel has less to import.
        [one] => rustix::net::recv(socket, &mut **one, RecvFlags::DONTWAIT).map(|(_, n)| n),
        _ => rustix::io::readv(socket, slices),
    }
}

/// Sends the slices with one system call, without blocking. Returns the number of bytes sent.
#[inline]
pub(crate) fn send(socket: BorrowedFd<'_>, slices: &[IoSlice<'_>]) -> rustix::io::Result<usize> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match slices {
        [one] => rustix::net::send(socket, one, flags),
        _ => rustix::net::sendmsg(socket, slices, &mut SendAncillaryBuffer::default(), flags),
    }
}

pub(crate) fn describe(errno: Errno) -> String {
    std::io::Error::from(errno).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Congestion control of a socket that is tuned for this peer.
    fn congestion_towards(peer: &str) -> String {
        let peer = peer.parse().expect("an address");
        let socket = stream_socket(&peer).expect("a socket");
        let tuning = Tuning {
            marking: Marking::default(),
            send_buffer: None,
            receive_buffer: None,
            ack_timeout: Duration::from_secs(1),
        };
        tune(&socket, &peer, &tuning).expect("tuned");
        sockopt::tcp_congestion(&socket).expect("known")
    }

    /// Goal: the handshake's answer, which the kernel sends, is marked as well. Method: the options
    /// of the listening socket, and of an accepted one before it is tuned.
    #[test]
    fn a_listener_marks_from_the_first_packet_on() {
        let marking = Marking {
            tos: 104,
            priority: Some(3),
        };
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let address: SocketAddr = address.parse().unwrap();
            let Ok((listener, real)) = listen(address, 8, marking) else {
                assert!(address.is_ipv6(), "this machine has IPv4");
                continue;
            };
            let host = std::net::TcpStream::connect(real).unwrap();
            let mut ready = [rustix::event::PollFd::new(
                &listener,
                rustix::event::PollFlags::IN,
            )];
            rustix::event::poll(&mut ready, None).unwrap();
            let accepted = rustix::net::accept(&listener).unwrap();
            for socket in [listener.as_fd(), accepted.as_fd()] {
                let tos = if address.is_ipv4() {
                    sockopt::ip_tos(socket).unwrap().into()
                } else {
                    sockopt::ipv6_tclass(socket).unwrap()
                };
                assert_eq!(tos, 104, "{address}");
            }
            let listener = socket2::SockRef::from(&listener);
            assert_eq!(listener.priority().unwrap(), 3, "{address}");
            drop(host);
        }
    }

    /// Only where nothing can be congested is the system's choice not followed.
    #[test]
    fn loopback_is_not_paced() {
        let elsewhere = "192.0.2.1:4420".parse().expect("an address");
        let untouched = stream_socket(&elsewhere).expect("a socket");
        let systems = sockopt::tcp_congestion(&untouched).expect("known");
        assert_eq!(congestion_towards("192.0.2.1:4420"), systems);
        assert_eq!(congestion_towards("127.0.0.1:4420"), UNPACED);
        assert_eq!(congestion_towards("127.9.9.9:4420"), UNPACED);
        if rustix::net::socket(AddressFamily::INET6, SocketType::STREAM, None).is_ok() {
            assert_eq!(congestion_towards("[2001:db8::1]:4420"), systems);
            assert_eq!(congestion_towards("[::1]:4420"), UNPACED);
        }
    }
}
