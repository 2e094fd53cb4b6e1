//! A minimal netlink client: encodes a request, sends it, and iterates over the messages and
//! attributes of the reply. Used by [`crate::dcb`], [`crate::ethtool`] and [`crate::netlink`].
//!
//! ```text
//!   ┌ length u32 ┬ kind u16 ┬ flags u16 ┬ sequence u32 ┬ port u32 ┐ body
//!   body: a header of the family, then attributes
//!   ┌ length u16 ┬ kind u16 ┐ value, padded to 4 bytes; a value may be attributes itself
//! ```
//!
//! Integers are in host byte order, except where an attribute has NLA_F_NET_BYTEORDER.

use std::io;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto,
    socket_with,
};

pub(crate) const NLM_F_REQUEST: u16 = 0x1;
pub(crate) const NLM_F_ACK: u16 = 0x4;
pub(crate) const NLM_F_DUMP: u16 = 0x300;
pub(crate) const NLMSG_ERROR: u16 = 2;
pub(crate) const NLMSG_DONE: u16 = 3;
pub(crate) const HEADER: usize = 16;
/// NLA_TYPE_MASK: the two upper bits of an attribute's type are NLA_F_NESTED and
/// NLA_F_NET_BYTEORDER.
const KIND_MASK: u16 = 0x3fff;
const ANSWER_MAX: usize = 32 * 1024;
/// Receive timeout. The kernel replies once the request is done; adding a link takes milliseconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A request under construction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    bytes: Vec<u8>,
}

impl Request {
    /// Begins a request. `body`: the header of the family, such as `struct dcbmsg`.
    pub(crate) fn new(kind: u16, flags: u16, body: &[u8]) -> Self {
        let mut bytes = vec![0; HEADER];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        // The sequence number; each socket has one exchange.
        bytes[8..12].copy_from_slice(&1u32.to_ne_bytes());
        bytes.extend(body);
        Self { bytes }
    }

    pub(crate) fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(4 + value.len()).expect("values are short");
        self.bytes.extend(length.to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend(value);
        let padded = self.bytes.len().next_multiple_of(4);
        self.bytes.resize(padded, 0);
        self
    }

    /// An attribute whose value is the attributes that `fill` adds.
    pub(crate) fn nested(mut self, kind: u16, fill: impl FnOnce(Self) -> Self) -> Self {
        let at = self.bytes.len();
        self.bytes.extend([0; 2]);
        self.bytes.extend(kind.to_ne_bytes());
        self = fill(self);
        let length = u16::try_from(self.bytes.len() - at).expect("values are short");
        self.bytes[at..at + 2].copy_from_slice(&length.to_ne_bytes());
        self
    }

    pub(crate) fn finish(mut self) -> Vec<u8> {
        let length = u32::try_from(self.bytes.len()).expect("values are short");
        self.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes
    }
}

pub(crate) fn c_string(text: &str) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    bytes.push(0);
    bytes
}

/// Sends `message` on a new socket and passes each message of the reply to `take`, until that
/// returns true. `protocol`: the netlink family; `None` is NETLINK_ROUTE.
pub(crate) fn exchange(
    protocol: Option<Protocol>,
    message: &[u8],
    mut take: impl FnMut(Part<'_>) -> bool,
) -> io::Result<()> {
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        protocol,
    )?;
    sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER_TIMEOUT))?;
    sendto(
        &socket,
        message,
        SendFlags::empty(),
        &SocketAddrNetlink::new(0, 0),
    )?;
    let mut buffer = vec![0; ANSWER_MAX];
    loop {
        let (length, _) = recv(&socket, &mut buffer[..], RecvFlags::empty())?;
        if length == 0 {
            return Ok(());
        }
        for part in parts(&buffer[..length]) {
            if take(part) {
                return Ok(());
            }
        }
    }
}

/// One message of a reply: its type (`nlmsg_type`), and the bytes after the netlink header.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part<'a> {
    pub(crate) kind: u16,
    pub(crate) body: &'a [u8],
}

/// Iterates over the messages in a receive buffer. Ends at the first truncated one.
pub(crate) fn parts(mut bytes: &[u8]) -> impl Iterator<Item = Part<'_>> {
    std::iter::from_fn(move || {
        let length = u32_at(bytes, 0)? as usize;
        let message = bytes.get(..length).filter(|m| m.len() >= HEADER)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Part {
            kind: u16_at(message, 4)?,
            body: &message[HEADER..],
        })
    })
}

/// The result in an NLMSG_ERROR message. `None`: another kind of message.
pub(crate) fn read_answer(part: Part<'_>) -> Option<Result<(), Errno>> {
    if part.kind != NLMSG_ERROR {
        return None;
    }
    match u32_at(part.body, 0)?.cast_signed() {
        0 => Some(Ok(())),
        // `Errno` panics for other numbers.
        code @ -4095..=-1 => Some(Err(Errno::from_raw_os_error(-code))),
        _ => Some(Err(Errno::PROTO)),
    }
}

/// Iterates over the attributes in `bytes`: type without its flags, and value. Ends at the first
/// truncated one.
pub(crate) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16_at(bytes, 0)?);
        let kind = u16_at(bytes, 2)? & KIND_MASK;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

pub(crate) fn attribute_of(bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(bytes)
        .find(|(kind, _)| *kind == wanted)
        .map(|(_, value)| value)
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_error_number_panics() {
        let answer = |code: i32| {
            let body = code.to_ne_bytes();
            let kind = NLMSG_ERROR;
            read_answer(Part { kind, body: &body })
        };
        assert_eq!(answer(0), Some(Ok(())));
        assert_eq!(answer(-19), Some(Err(Errno::NODEV)));
        for code in [1, 19, -4096, i32::MIN, i32::MAX] {
            assert_eq!(answer(code), Some(Err(Errno::PROTO)), "{code}");
        }
    }
}
