//! ICMP echo messages: build a request, recognise its reply (RFC 792; RFC 4443, section 4).
//!
//! ```text
//!   ┌ type 1 ┬ code 1 ┬ checksum 2 ┬ identifier 2 ┬ sequence 2 ┐ data
//!   type: 8 request, 0 reply; ICMPv6: 128 request, 129 reply
//! ```
//!
//! These are the bytes that ping(8) exchanges. This module opens no socket. The caller chooses the
//! socket, and the socket decides which fields the kernel fills in:
//!
//! | socket | the kernel | received messages |
//! |---|---|---|
//! | `SOCK_DGRAM` | sets identifier and checksum | begin at the ICMP header |
//! | `SOCK_RAW`, IPv4 | changes nothing | begin at the IP header: [`without_ip_header`] |
//! | `SOCK_RAW`, IPv6 | sets the checksum | begin at the ICMPv6 header |

/// The two versions of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    V4,
    V6,
}

impl Version {
    fn request_type(self) -> u8 {
        match self {
            Self::V4 => 8,
            Self::V6 => 128,
        }
    }

    fn reply_type(self) -> u8 {
        match self {
            Self::V4 => 0,
            Self::V6 => 129,
        }
    }

    /// Bytes of the IP header without options, and of the ICMP header.
    pub fn headers(self) -> usize {
        let ip = match self {
            Self::V4 => 20,
            Self::V6 => 40,
        };
        ip + HEADER
    }
}

/// Bytes of an echo message before its data.
const HEADER: usize = 8;

/// An echo request with `data` bytes of a fixed pattern. ICMPv6 has a checksum over the IP
/// addresses too; the kernel computes it on every socket, so its field stays 0 here.
pub fn request(version: Version, identifier: u16, sequence: u16, data: usize) -> Vec<u8> {
    let mut message = vec![version.request_type(), 0, 0, 0];
    message.extend(identifier.to_be_bytes());
    message.extend(sequence.to_be_bytes());
    message.extend((0..data).map(|at| at as u8));
    if version == Version::V4 {
        let sum = checksum(&message);
        message[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    message
}

/// An echo reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reply<'a> {
    pub identifier: u16,
    pub sequence: u16,
    pub data: &'a [u8],
}

impl Reply<'_> {
    /// True if this replies to `request`. `SOCK_DGRAM` sockets have identifiers of their own:
    /// `any_identifier` accepts them.
    pub fn answers(&self, request: &[u8], any_identifier: bool) -> bool {
        let has = |at: usize, value: u16| request.get(at..at + 2) == Some(&value.to_be_bytes()[..]);
        has(6, self.sequence)
            && (any_identifier || has(4, self.identifier))
            && request.get(HEADER..) == Some(self.data)
    }
}

/// Parses an echo reply. Other messages, damaged ones, and echo requests are `None`.
pub fn reply(version: Version, message: &[u8]) -> Option<Reply<'_>> {
    let (header, data) = message.split_at_checked(HEADER)?;
    if header[0] != version.reply_type() || header[1] != 0 {
        return None;
    }
    // The kernel checks ICMPv6 before it delivers a message, also to raw sockets.
    if version == Version::V4 && checksum(message) != 0 {
        return None;
    }
    Some(Reply {
        identifier: u16::from_be_bytes([header[4], header[5]]),
        sequence: u16::from_be_bytes([header[6], header[7]]),
        data,
    })
}

/// The payload of an IPv4 packet, as a raw socket receives it.
pub fn without_ip_header(packet: &[u8]) -> Option<&[u8]> {
    let first = *packet.first()?;
    let length = usize::from(first & 0x0f) * 4;
    if first >> 4 != 4 || length < 20 {
        return None;
    }
    packet.get(length..)
}

/// The checksum of the Internet protocols (RFC 1071). 0 for a message with a right checksum.
fn checksum(message: &[u8]) -> u16 {
    let words = message.chunks(2).map(|pair| {
        let low = pair.get(1).copied().unwrap_or(0);
        u32::from(u16::from_be_bytes([pair[0], low]))
    });
    // At most 32,768 words of an IP packet: no overflow.
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests;
