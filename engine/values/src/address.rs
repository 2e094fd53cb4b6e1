//! Resolves the addresses that users write: IP addresses with a zone, and host names.
//!
//! [`nacre_nvmf::address`] parses the text of an address.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;

use nacre_nvmf::address::{AddressError as TextError, Endpoint, split_authority};
use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Why a text is not an acceptable address.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    #[error(transparent)]
    Text(#[from] TextError),
    #[error("\"{host}\" is not an IP address; names are not looked up here")]
    Name { host: String },
    #[error(
        "{ip} is a link-local address, which other links may have too: name the interface, {ip}%eth0"
    )]
    NoInterface { ip: IpAddr },
    #[error("\"{text}\" names an interface, which only IPv6 link-local addresses do: write {ip}")]
    Interface { text: String, ip: IpAddr },
    #[error("there is no interface \"{name}\" for {ip}: `ip link` lists them")]
    Absent { ip: IpAddr, name: String },
    #[error("no address of \"{host}\" is known: {source}")]
    Resolve {
        host: String,
        source: std::io::Error,
    },
}

/// An address as text, in one spelling: an IP address in its shortest form without brackets, a host
/// name in lower case. An IPv4-mapped address becomes IPv4.
pub fn canonical_host(text: &str) -> String {
    let text = text.trim().trim_matches(['[', ']']);
    let (address, interface) = match text.split_once('%') {
        Some((address, interface)) => (address, Some(interface)),
        None => (text, None),
    };
    match (address.parse::<IpAddr>(), interface) {
        (Ok(ip), None) => ip.to_canonical().to_string(),
        (Ok(ip), Some(interface)) => format!("{}%{interface}", ip.to_canonical()),
        (Err(_), _) => text.to_ascii_lowercase(),
    }
}

/// A port as text, in one spelling: without leading zeros. Other text stays as it is.
pub fn canonical_port(text: &str) -> String {
    let text = text.trim();
    let port = text.parse::<u16>();
    port.map_or_else(|_| text.to_owned(), |port| port.to_string())
}

/// An IP address. A link-local address names the interface of its link (RFC 4007): `fe80::1%eth0`.
/// An IPv4-mapped address becomes IPv4: `::ffff:192.0.2.1` is 192.0.2.1.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ScopedIp {
    pub ip: IpAddr,
    /// Name of the interface, or the index of a removed one.
    interface: Option<String>,
}

impl ScopedIp {
    /// An address of an interface. Only IPv6 link-local addresses keep its name.
    pub fn of_interface(ip: IpAddr, interface: &str) -> Self {
        Self {
            ip,
            interface: is_link_local(ip).then(|| interface.to_owned()),
        }
    }

    /// An address that a machine at `peer` announced. A link-local one is on the link of `peer`, so
    /// it takes that interface; `None` if `peer` names none.
    pub fn announced_by(ip: IpAddr, peer: &Self) -> Option<Self> {
        let ip = ip.to_canonical();
        let interface = match (is_link_local(ip), &peer.interface) {
            (true, None) => return None,
            (true, Some(name)) => Some(name.clone()),
            (false, _) => None,
        };
        Some(Self { ip, interface })
    }

    /// The socket address with this port. Queries the kernel for the index of the interface; fails
    /// with [`AddressError::Absent`] if there is no such interface.
    pub fn socket(&self, port: u16) -> Result<SocketAddr, AddressError> {
        let mut address = SocketAddr::new(self.ip, port);
        if let (SocketAddr::V6(v6), Some(name)) = (&mut address, &self.interface) {
            let absent = || AddressError::Absent {
                ip: self.ip,
                name: name.clone(),
            };
            let index = match (index_of(name), name.parse::<u32>()) {
                (Some(index), _) => index,
                (None, Ok(index)) if index > 0 => index,
                _ => return Err(absent()),
            };
            v6.set_scope_id(index);
        }
        Ok(address)
    }
}

impl From<&SocketAddr> for ScopedIp {
    /// Queries the kernel for the name of the interface.
    fn from(address: &SocketAddr) -> Self {
        let interface = match address {
            SocketAddr::V6(v6) if v6.scope_id() > 0 => {
                let name = name_of(v6.scope_id());
                Some(name.unwrap_or_else(|| v6.scope_id().to_string()))
            }
            _ => None,
        };
        let ip = address.ip().to_canonical();
        Self { ip, interface }
    }
}

impl From<IpAddr> for ScopedIp {
    fn from(ip: IpAddr) -> Self {
        let ip = ip.to_canonical();
        Self {
            ip,
            interface: None,
        }
    }
}

impl FromStr for ScopedIp {
    type Err = AddressError;

    /// Parses an IP address, with or without brackets.
    fn from_str(text: &str) -> Result<Self, AddressError> {
        let trimmed = text.trim();
        let inner = trimmed
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'));
        let (address, interface) = match inner.unwrap_or(trimmed).split_once('%') {
            Some((address, interface)) => (address, Some(interface)),
            None => (inner.unwrap_or(trimmed), None),
        };
        let name = || AddressError::Name {
            host: text.to_owned(),
        };
        let ip = address.parse::<IpAddr>().map_err(|_| name())?;
        let ip = ip.to_canonical();
        match interface {
            Some("") => Err(name()),
            Some(_) if !is_link_local(ip) => Err(AddressError::Interface {
                text: text.to_owned(),
                ip,
            }),
            None if is_link_local(ip) => Err(AddressError::NoInterface { ip }),
            _ => Ok(Self {
                ip,
                interface: interface.map(str::to_owned),
            }),
        }
    }
}

impl fmt::Display for ScopedIp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.interface {
            Some(interface) => write!(f, "{}%{interface}", self.ip),
            None => self.ip.fmt(f),
        }
    }
}

impl Serialize for ScopedIp {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ScopedIp {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// An address and a port in the form that this program parses: `[fe80::1%eth0]:4420`.
pub fn with_port(ip: &ScopedIp, port: u16) -> String {
    match ip.ip {
        IpAddr::V4(_) => format!("{ip}:{port}"),
        IpAddr::V6(_) => format!("[{ip}]:{port}"),
    }
}

/// Like [`with_port`], for a socket address.
pub fn shown(address: &SocketAddr) -> String {
    with_port(&address.into(), address.port())
}

/// True for IPv6 link-local unicast addresses (fe80::/10). False for every IPv4 address.
pub fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// A socket for queries about interfaces; the kernel accepts any kind.
fn asking() -> Option<std::os::fd::OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::DGRAM);
    rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).ok()
}

fn index_of(name: &str) -> Option<u32> {
    netdevice::name_to_index(asking()?, name).ok()
}

fn name_of(index: u32) -> Option<String> {
    netdevice::index_to_name(asking()?, index).ok()
}

/// The form that [`endpoint`] parses.
pub const ENDPOINT: &str = "an IP address and a port, such as 127.0.0.1:9464 or [::1]:9464";

/// Parses a listening address: an IP address and a port; 0 is any free port.
pub fn endpoint(text: &str) -> Result<SocketAddr, AddressError> {
    let refused = || {
        AddressError::Text(TextError::Form {
            text: text.to_owned(),
            form: ENDPOINT,
        })
    };
    let (host, port) = split_authority(text.trim()).ok_or_else(refused)?;
    let port = port
        .and_then(|port| port.parse().ok())
        .ok_or_else(refused)?;
    match host.parse::<ScopedIp>() {
        Ok(ip) => ip.socket(port),
        Err(AddressError::Name { .. }) => Err(refused()),
        Err(other) => Err(other),
    }
}

/// The socket address of a controller: see [`resolve`]. `default_port` is for an endpoint without a
/// port.
pub fn socket_of(endpoint: &Endpoint, default_port: u16) -> Result<SocketAddr, AddressError> {
    resolve(&endpoint.host, endpoint.port.unwrap_or(default_port))
}

/// Resolves a host name or IP address. If a name has several addresses, the first one counts. The
/// lookup of a name blocks.
pub fn resolve(host: &str, port: u16) -> Result<SocketAddr, AddressError> {
    match host.parse::<ScopedIp>() {
        Ok(ip) => return ip.socket(port),
        Err(AddressError::Name { .. }) => {}
        Err(other) => return Err(other),
    }
    let fail = |source| AddressError::Resolve {
        host: host.to_owned(),
        source,
    };
    let mut found = (host, port).to_socket_addrs().map_err(fail)?;
    found
        .next()
        .ok_or_else(|| fail(std::io::ErrorKind::NotFound.into()))
}

/// The interface of an address from getifaddrs(3), which returns labels of IPv4 addresses
/// (`eth0:1`) instead of interface names. Names never have a colon.
pub fn interface_of_label(label: &str) -> &str {
    label
        .split_once(':')
        .map_or(label, |(interface, _)| interface)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the spellings of an address are one text.
    #[test]
    fn spellings() {
        for (text, expected) in [
            ("[::1]", "::1"),
            ("2001:DB8:0:0::1", "2001:db8::1"),
            ("::ffff:192.0.2.1", "192.0.2.1"),
            (" 192.0.2.1 ", "192.0.2.1"),
            ("[FE80::1%eth0]", "fe80::1%eth0"),
            ("Storage.Example.org", "storage.example.org"),
        ] {
            assert_eq!(canonical_host(text), expected);
        }
        assert_eq!(canonical_port("04420"), "4420");
        assert_eq!(canonical_port("http"), "http");
    }

    #[test]
    fn refusals() {
        for text in [
            "9464",
            ":9464",
            "localhost:9464",
            "127.0.0.1",
            "tcp://127.0.0.1:1",
        ] {
            let said = endpoint(text).unwrap_err().to_string();
            assert!(said.contains("such as 127.0.0.1:9464"), "{text}: {said}");
        }
        assert_eq!(endpoint("127.0.0.1:0").unwrap().port(), 0);
        assert_eq!(endpoint("[::1]:9464").unwrap().to_string(), "[::1]:9464");
        let name: Endpoint = "localhost:1".parse().unwrap();
        assert!(name.host.parse::<ScopedIp>().is_err() && socket_of(&name, 2).unwrap().port() == 1);
        let bare: Endpoint = "TCP://::1".parse().unwrap();
        assert_eq!(socket_of(&bare, 8009).unwrap().to_string(), "[::1]:8009");
    }

    /// Goal: an address names its interface if and only if it needs one, and formatting reverses
    /// parsing. Method: a table, and the kernel's own names of the loopback interface.
    #[test]
    fn interfaces_of_addresses() {
        for (text, shown) in [
            ("fe80::1%lo", "fe80::1%lo"),
            ("[FE80::1%lo]", "fe80::1%lo"),
            ("::ffff:192.0.2.1", "192.0.2.1"),
            (" 2001:db8::1 ", "2001:db8::1"),
            ("192.0.2.1", "192.0.2.1"),
        ] {
            let ip: ScopedIp = text.parse().unwrap();
            assert_eq!(ip.to_string(), shown, "{text}");
            let socket = ip.socket(7).unwrap();
            assert_eq!(ScopedIp::from(&socket), ip, "{text}");
            assert_eq!(resolve(text.trim(), 7).unwrap(), socket);
            assert_eq!(endpoint(&super::shown(&socket)).unwrap(), socket);
        }
        for (text, said) in [
            ("fe80::1", "name the interface, fe80::1%eth0"),
            ("fe80::1%", "is not an IP address"),
            ("192.0.2.1%lo", "write 192.0.2.1"),
            ("2001:db8::1%lo", "write 2001:db8::1"),
            ("eth0", "is not an IP address"),
            ("[::1", "is not an IP address"),
        ] {
            let error = text.parse::<ScopedIp>().unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
        let nowhere: ScopedIp = "fe80::1%eth99".parse().unwrap();
        let error = nowhere.socket(1).unwrap_err().to_string();
        assert!(error.contains("no interface \"eth99\""), "{error}");
        assert!(resolve("fe80::1%eth99", 1).is_err() && resolve("fe80::1", 1).is_err());
        assert!(endpoint("[fe80::1]:1").is_err());
    }
}
