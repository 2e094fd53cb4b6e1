//! The unit by which limits count peers: an IPv4 address or an IPv6 network.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// The unit by which limits count connections of a peer: an IPv4 address, or the first 64 bits of
/// an IPv6 address. One machine may use all addresses of its IPv6 network. A link-local IPv6
/// address counts alone, because all machines of a link share that network. IPv4-mapped addresses
/// are IPv4 addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Origin(IpAddr);

impl From<IpAddr> for Origin {
    fn from(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(v6) if !v6.is_unicast_link_local() => {
                let network = v6.to_bits() >> 64 << 64;
                Self(Ipv6Addr::from_bits(network).into())
            }
            counts_alone => Self(counts_alone),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            IpAddr::V6(v6) if !v6.is_unicast_link_local() => write!(f, "{v6}/64"),
            counts_alone => counts_alone.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(address: &str) -> Origin {
        address.parse::<IpAddr>().unwrap().into()
    }

    #[test]
    fn addresses_of_one_machine_are_one_origin() {
        assert_ne!(origin("192.0.2.1"), origin("192.0.2.2"));
        assert_eq!(origin("::ffff:192.0.2.1"), origin("192.0.2.1"));
        assert_eq!(origin("2001:db8::1"), origin("2001:db8::ffff:0:0:1"));
        assert_ne!(origin("2001:db8::1"), origin("2001:db8:0:1::1"));
        assert_ne!(origin("fe80::1"), origin("fe80::2"));
        assert_eq!(origin("2001:db8::1").to_string(), "2001:db8::/64");
        assert_eq!(origin("fe80::1").to_string(), "fe80::1");
    }
}
