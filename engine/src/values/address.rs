//! `[SCHEME://]HOST[:PORT][/PATH][?QUERY]`: the one reader of network addresses that people write.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use nacre_bdev_remote::uri::split_authority;

/// The port of NVMe/TCP and NVMe/RDMA controllers (registered with IANA).
pub const NVME_PORT: u16 = 4420;

/// An address as it is written, in its parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written<'a> {
    pub scheme: Option<&'a str>,
    /// An IP address, without brackets, or a host name.
    pub host: &'a str,
    pub port: Option<u16>,
    pub path: &'a str,
    pub query: Option<&'a str>,
}

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
    #[error("no address of \"{host}\" is known: {source}")]
    Resolve {
        host: String,
        source: std::io::Error,
    },
}

impl<'a> Written<'a> {
    /// `form`: what may be written there, for the refusal.
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
        let good = match name.contains(':') {
            true => name.chars().all(|c| named(c) || ":%".contains(c)),
            false => name.chars().all(named),
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

    /// As [`Written::parse`], of text that has nothing behind the port.
    pub fn bare(text: &'a str, form: &'static str) -> Result<Written<'a>, AddressError> {
        let written = Written::parse(text, form)?;
        match written.path.is_empty() && written.query.is_none() {
            true => Ok(written),
            false => Err(AddressError::Form {
                text: text.to_owned(),
                form,
            }),
        }
    }

    /// The IP address; a name is refused.
    pub fn ip(&self) -> Result<IpAddr, AddressError> {
        self.host.parse().map_err(|_| AddressError::Name {
            host: self.host.to_owned(),
        })
    }

    pub fn resolve(&self, default_port: u16) -> Result<SocketAddr, AddressError> {
        resolve(self.host, self.port.unwrap_or(default_port))
    }
}

/// What [`endpoint`] reads.
pub const ENDPOINT: &str = "an IP address and a port, such as 127.0.0.1:9464 or [::1]:9464";

/// Where to listen: an IP address and a port; 0 is any free one.
pub fn endpoint(text: &str) -> Result<SocketAddr, AddressError> {
    let refused = || AddressError::Form {
        text: text.to_owned(),
        form: ENDPOINT,
    };
    text.trim().parse().map_err(|_| refused())
}

/// A port that can be connected to.
pub fn port_of(text: &str) -> Result<u16, AddressError> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(port) if port > 0 && digits => Ok(port),
        _ => Err(AddressError::Port {
            found: text.to_owned(),
        }),
    }
}

/// A name may stand for several addresses: the first one counts.
pub fn resolve(host: &str, port: u16) -> Result<SocketAddr, AddressError> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, port));
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

    /// Goal: every spelling in one table. Method: parse, and compare the parts.
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
}
