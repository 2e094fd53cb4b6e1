//! Conversions between Rust's socket addresses and the `sockaddr_storage` of librdmacm.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use libc::{AF_INET, AF_INET6, sockaddr_in, sockaddr_in6, sockaddr_storage};

/// Converts from C. Returns `None` if the address is neither IPv4 nor IPv6: the id is unbound, or
/// the family is `AF_IB`.
pub(super) fn from_storage(storage: &sockaddr_storage) -> Option<SocketAddr> {
    let at = std::ptr::from_ref(storage);
    match i32::from(storage.ss_family) {
        AF_INET => {
            // SAFETY: `sockaddr_storage` has the size and alignment for every address type, and
            // any bytes are a valid `sockaddr_in`.
            let v4 = unsafe { &*at.cast::<sockaddr_in>() };
            let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
            Some(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
        }
        AF_INET6 => {
            // SAFETY: as above.
            let v6 = unsafe { &*at.cast::<sockaddr_in6>() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            let port = u16::from_be(v6.sin6_port);
            Some(SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id).into())
        }
        _ => None,
    }
}

/// Converts to C, in network byte order.
pub(super) fn to_storage(address: SocketAddr) -> sockaddr_storage {
    // SAFETY: all zeros is a valid value of this plain struct: an unspecified family.
    let mut storage: sockaddr_storage = unsafe { std::mem::zeroed() };
    let at = std::ptr::from_mut(&mut storage);
    match address {
        SocketAddr::V4(v4) => {
            // SAFETY: `sockaddr_storage` has the size and alignment for every address type, and
            // `storage` is a local variable.
            let raw = unsafe { &mut *at.cast::<sockaddr_in>() };
            raw.sin_family = AF_INET as u16;
            raw.sin_port = v4.port().to_be();
            raw.sin_addr.s_addr = u32::from(*v4.ip()).to_be();
        }
        SocketAddr::V6(v6) => {
            // SAFETY: as above.
            let raw = unsafe { &mut *at.cast::<sockaddr_in6>() };
            raw.sin6_family = AF_INET6 as u16;
            raw.sin6_port = v6.port().to_be();
            raw.sin6_addr.s6_addr = v6.ip().octets();
            raw.sin6_flowinfo = v6.flowinfo();
            raw.sin6_scope_id = v6.scope_id();
        }
    }
    storage
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: an address survives both conversions. Method: an IPv4, an IPv6, a wildcard and a
    /// link-local address, and one of another family.
    #[test]
    fn addresses_round_trip() {
        for text in ["10.9.0.1:4420", "[fd00::9:1]:8009", "0.0.0.0:0"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(from_storage(&to_storage(address)), Some(address));
        }
        let link_local = SocketAddrV6::new("fe80::1".parse().unwrap(), 4420, 0, 7).into();
        assert_eq!(from_storage(&to_storage(link_local)), Some(link_local));
        let mut neither = to_storage("1.2.3.4:5".parse().unwrap());
        neither.ss_family = 27;
        assert_eq!(from_storage(&neither), None);
    }
}
