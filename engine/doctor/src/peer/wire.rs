//! Messages of a session: lines of JSON over TCP, and probes over UDP.
//!
//! ```text
//!   ┌ "nacre\0pr" 8 ┬ token 8 ┬ kind 1 ┬ sent 1 ┬ arrived 1 ┬ priority 1 ┬ sequence 4 ┐ zeroes
//!   kind: 0 a probe, 1 its echo; sent: the probe's DSCP; arrived: in an echo, its DSCP on arrival
//!   priority: that of both sockets (SO_PRIORITY, for the tag of a VLAN) plus one; 0: none is set
//! ```

use std::io::{self, BufRead, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use rustix::net::sockopt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Bytes, End};

/// A line with all settings has about 2 KiB.
const LINE_MAX: u64 = 64 * 1024;

/// A message of the requesting end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Request {
    /// `port`: the UDP port from which probes come.
    Hello { version: u32, port: u16 },
    /// Asks for byte counts and for the probes that arrived.
    Counts,
    /// The session is complete.
    Bye,
}

/// A message of the responder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reply {
    Hello {
        version: u32,
        /// Every probe carries it.
        token: u64,
        end: Box<End>,
    },
    Counts {
        bytes: Box<Bytes>,
        arrived: Vec<Arrived>,
    },
}

/// The number of probes that were sent with one DSCP and arrived with another, or the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Arrived {
    pub sent: u8,
    pub arrived: u8,
    pub count: u64,
}

pub(super) fn write(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message).map_err(io::Error::from)?;
    line.push(b'\n');
    to.write_all(&line)
}

/// Reads one line. A longer one, or one that is not a message, is `InvalidData`.
pub(super) fn read<T: DeserializeOwned>(from: &mut impl BufRead) -> io::Result<T> {
    let mut line = Vec::new();
    from.take(LINE_MAX).read_until(b'\n', &mut line)?;
    match line.last() {
        None => Err(io::ErrorKind::UnexpectedEof.into()),
        Some(b'\n') => serde_json::from_slice(&line).map_err(|error| {
            // Not `From`: that makes an end of input of a line that is too short.
            io::Error::new(io::ErrorKind::InvalidData, error)
        }),
        Some(_) => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// A connection whose reads end at a deadline, however slowly bytes arrive.
pub(super) struct Timed<'a> {
    pub stream: &'a TcpStream,
    pub until: Instant,
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left < Duration::from_millis(1) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut stream = self.stream;
        stream.read(buffer)
    }
}

/// A socket from `local`, whose port it takes, to `remote` only: the kernel drops datagrams of
/// other senders. Reports the DSCP of each datagram.
pub(super) fn probe_socket(local: SocketAddr, remote: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(local)?;
    socket.connect(remote)?;
    if local.is_ipv4() {
        sockopt::set_ip_recvtos(&socket, true)?;
    } else {
        sockopt::set_ipv6_recvtclass(&socket, true)?;
    }
    // So that a thread notices the end of its session.
    socket.set_read_timeout(Some(Duration::from_millis(20)))?;
    Ok(socket)
}

/// Sets the marks of the datagrams that the socket sends.
pub(super) fn mark(socket: &UdpSocket, dscp: u8, priority: Option<u8>) -> io::Result<()> {
    let tos = dscp << 2;
    if socket.local_addr()?.is_ipv4() {
        sockopt::set_ip_tos(socket, tos)?;
    } else {
        sockopt::set_ipv6_tclass(socket, tos.into())?;
    }
    // After the DSCP, which sets a priority of its own. 7 needs CAP_NET_ADMIN: only a VLAN's tag
    // shows the difference.
    if let Some(priority) = priority {
        let _ = socket2::SockRef::from(socket).set_priority(priority.into());
    }
    Ok(())
}

const MAGIC: &[u8; 8] = b"nacre\0pr";
const HEADER: usize = 24;
/// Bytes of a probe: some that fit every MTU, so that a burst stands out of other traffic.
pub(super) const PROBE: usize = 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProbePacket {
    pub token: u64,
    /// In an echo, the DSCP with which the probe arrived.
    pub echo: Option<u8>,
    pub sent: u8,
    pub priority: Option<u8>,
    pub sequence: u32,
}

impl ProbePacket {
    pub(super) fn to_bytes(self) -> [u8; PROBE] {
        let mut bytes = [0; PROBE];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..16].copy_from_slice(&self.token.to_be_bytes());
        bytes[16..20].copy_from_slice(&[
            u8::from(self.echo.is_some()),
            self.sent,
            self.echo.unwrap_or(0),
            self.priority.map_or(0, |priority| priority + 1),
        ]);
        bytes[20..24].copy_from_slice(&self.sequence.to_be_bytes());
        bytes
    }

    /// `None` for every other datagram. A DSCP has six bits, a priority three.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != PROBE || bytes[HEADER..].iter().any(|byte| *byte != 0) {
            return None;
        }
        let [kind, sent, arrived, priority @ 0..=8] = bytes[16..20] else {
            return None;
        };
        let echo = match kind {
            0 if arrived == 0 => None,
            1 if arrived < 64 => Some(arrived),
            _ => return None,
        };
        (&bytes[..8] == MAGIC && sent < 64).then_some(Self {
            token: u64::from_be_bytes(bytes[8..16].try_into().ok()?),
            echo,
            sent,
            priority: priority.checked_sub(1),
            sequence: u32::from_be_bytes(bytes[20..24].try_into().ok()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::VERSION;

    fn probe() -> ProbePacket {
        ProbePacket {
            token: 0x0102_0304_0506_0708,
            echo: None,
            sent: 26,
            priority: Some(3),
            sequence: 9,
        }
    }

    #[test]
    fn probes() {
        let bytes = probe().to_bytes();
        let expected = b"nacre\0pr\x01\x02\x03\x04\x05\x06\x07\x08\x00\x1a\x00\x04\x00\x00\x00\x09";
        assert_eq!(&bytes[..HEADER], expected);
        assert_eq!(ProbePacket::parse(&bytes), Some(probe()));
        let echo = ProbePacket {
            echo: Some(0),
            priority: None,
            ..probe()
        };
        assert_eq!(ProbePacket::parse(&echo.to_bytes()), Some(echo));
    }

    #[test]
    fn other_datagrams_are_ignored() {
        let good = probe().to_bytes();
        assert_eq!(ProbePacket::parse(&good[..PROBE - 1]), None);
        assert_eq!(ProbePacket::parse(&[]), None);
        // Position and value of one wrong byte: magic, kind, both DSCPs, padding.
        for (at, value) in [
            (0, 0),
            (7, 0),
            (16, 2),
            (17, 64),
            (18, 1),
            (19, 9),
            (24, 1),
            (1023, 1),
        ] {
            let mut bad = good;
            bad[at] = value;
            assert_eq!(ProbePacket::parse(&bad), None, "{at}");
        }
        let mut echo = ProbePacket {
            echo: Some(63),
            ..probe()
        }
        .to_bytes();
        echo[18] = 64;
        assert_eq!(ProbePacket::parse(&echo), None);
    }

    #[test]
    fn lines() {
        let mut line = Vec::new();
        let hello = Request::Hello {
            version: VERSION,
            port: 7,
        };
        write(&mut line, &hello).unwrap();
        assert_eq!(line, b"{\"hello\":{\"version\":1,\"port\":7}}\n");
        assert_eq!(read::<Request>(&mut &line[..]).unwrap(), hello);
        let kind = |bytes: &[u8]| read::<Request>(&mut &bytes[..]).unwrap_err().kind();
        assert_eq!(kind(b""), io::ErrorKind::UnexpectedEof);
        for bad in [
            &b"GET / HTTP/1.1\r\n"[..],
            b"\"bye\"",
            b"{\"hello\"\n",
            b"\n",
            &[b' '; 70_000],
        ] {
            assert_eq!(kind(bad), io::ErrorKind::InvalidData);
        }
    }
}
