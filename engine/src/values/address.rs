//! `[SCHEME://]HOST[:PORT][/PATH][?QUERY]`: the single parser of network addresses written by
//! users.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;

use nacre_bdev_remote::uri::split_authority;
use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The port of NVMe/TCP and NVMe/RDMA controllers (registered with IANA).
pub const NVME_PORT: u16 = 4420;

/// The parts of an address as written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written<'a> {
    pub scheme: Option<&'a str>,
    /// An IP address, without brackets, or a host name.
    pub host: &'a str,
    pub port: Option<u16>,
    pub path: &'a str,
    pub query: Option<&'a str>,
}

/// Why a text is not an acceptable address.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    #[error("\"{text}\" is not an address: write {form}")]
    Form { text: String, form: &'static str },
    #[error("\"{found}\" is not a transport: write {allowed}")]
    Transport {
        found: String,
        allowed: &'static str,
    },
    #[error("\"{found}\" is not a port: write a number from 1 to 65535")]
    Port { found: String },
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

impl<'a> Written<'a> {
    /// `form`: the expected form, for error messages.
    pub fn parse(text: &'a str, form: &'static str) -> Result<Written<'a>, AddressError> {
        let refused = || AddressError::Form {
            text: text.to_owned(),
            form,
        };
        let (scheme, rest) = match text.split_once("://") {
            Some((scheme, rest)) => (Some(scheme), rest),
            None => (None, text),
        };
        let (rest, query) = match rest.split_once('?') {
            Some((rest, query)) => (rest, Some(query)),
            None => (rest, None),
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (host, port) = split_authority(authority).ok_or_else(refused)?;
        let named = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        // An IPv6 address may name its interface: fe80::1%eth0.
        let name = match host.split_once('%') {
            Some((address, zone)) if address.contains(':') && !zone.is_empty() => host,
            Some(_) => return Err(refused()),
            None => host,
        };
        let good = if name.contains(':') {
            name.chars().all(|c| named(c) || ":%".contains(c))
        } else {
            name.chars().all(named)
        };
        if host.is_empty() || !good {
            return Err(refused());
        }
        Ok(Written {
            scheme,
            host,
            port: port.map(port_of).transpose()?,
            path,
            query,
        })
    }

    /// Like [`Written::parse`], for text without path and query.
    pub fn bare(text: &'a str, form: &'static str) -> Result<Written<'a>, AddressError> {
        let written = Written::parse(text, form)?;
        if written.path.is_empty() && written.query.is_none() {
            Ok(written)
        } else {
            Err(AddressError::Form {
                text: text.to_owned(),
                form,
            })
        }
    }

    /// The IP address; a host name is refused.
    pub fn ip(&self) -> Result<ScopedIp, AddressError> {
        self.host.parse()
    }

    pub fn resolve(&self, default_port: u16) -> Result<SocketAddr, AddressError> {
        resolve(self.host, self.port.unwrap_or(default_port))
    }
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
    /// An address of an interface. Only link-local addresses keep its name.
    pub fn of_interface(ip: IpAddr, interface: &str) -> ScopedIp {
        ScopedIp {
            ip,
            interface: is_link_local(ip).then(|| interface.to_owned()),
        }
    }

    /// Queries the kernel for the index of the interface.
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
    fn from(address: &SocketAddr) -> ScopedIp {
        let interface = match address {
            SocketAddr::V6(v6) if v6.scope_id() > 0 => {
                let name = name_of(v6.scope_id());
                Some(name.unwrap_or_else(|| v6.scope_id().to_string()))
            }
            _ => None,
        };
        let ip = address.ip().to_canonical();
        ScopedIp { ip, interface }
    }
}

impl From<IpAddr> for ScopedIp {
    fn from(ip: IpAddr) -> ScopedIp {
        let ip = ip.to_canonical();
        ScopedIp {
            ip,
            interface: None,
        }
    }
}

impl FromStr for ScopedIp {
    type Err = AddressError;

    /// With or without brackets.
    fn from_str(text: &str) -> Result<ScopedIp, AddressError> {
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
            _ => Ok(ScopedIp {
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
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<ScopedIp, D::Error> {
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

/// A listening address: an IP address and a port; 0 is any free port.
pub fn endpoint(text: &str) -> Result<SocketAddr, AddressError> {
    let refused = || AddressError::Form {
        text: text.to_owned(),
        form: ENDPOINT,
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

/// A port to connect to.
pub fn port_of(text: &str) -> Result<u16, AddressError> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(port) if port > 0 && digits => Ok(port),
        _ => Err(AddressError::Port {
            found: text.to_owned(),
        }),
    }
}

/// Of several addresses of a name, the first one counts.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: every accepted spelling. Method: parse a table, and compare the parts.
    #[test]
    fn parts() {
        for (text, scheme, host, port, path, query) in [
            ("127.0.0.1", None, "127.0.0.1", None, "", None),
            ("127.0.0.1:1", None, "127.0.0.1", Some(1), "", None),
            ("::1", None, "::1", None, "", None),
            ("[::1]", None, "::1", None, "", None),
            ("[::1]:8009", None, "::1", Some(8009), "", None),
            ("fe80::1%eth0", None, "fe80::1%eth0", None, "", None),
            ("host_1.example", None, "host_1.example", None, "", None),
            ("tcp://::1", Some("tcp"), "::1", None, "", None),
            (
                "rdma://h:1/nqn.2025-01.a:b?nsid=1",
                Some("rdma"),
                "h",
                Some(1),
                "nqn.2025-01.a:b",
                Some("nsid=1"),
            ),
        ] {
            let written = Written::parse(text, "x").unwrap();
            let expected = Written {
                scheme,
                host,
                port,
                path,
                query,
            };
            assert_eq!(written, expected, "{text}");
        }
    }

    #[test]
    fn refusals() {
        for text in [
            "", ":1", "tcp://", "[::1", "[::1]1", "::1]:1", "a b", "user@h", "h%eth0", "::1%",
        ] {
            let error = Written::parse(text, "ADDRESS[:PORT]").unwrap_err();
            let said = error.to_string();
            assert!(said.contains("write ADDRESS[:PORT]"), "{text}: {said}");
        }
        for port in ["", "0", "65536", "+1", "http"] {
            let text = format!("127.0.0.1:{port}");
            let said = Written::parse(&text, "x").unwrap_err().to_string();
            let expected = format!("\"{port}\" is not a port: write a number from 1 to 65535");
            assert_eq!(said, expected);
        }
        assert!(Written::bare("h/x", "x").is_err() && Written::bare("h?x", "x").is_err());
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
        let name = Written::parse("localhost:1", "x").unwrap();
        assert!(name.ip().is_err() && name.resolve(1).is_ok());
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
