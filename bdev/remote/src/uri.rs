//! Where a remote namespace is: `nvmf://192.0.2.1:4420/nqn.2025-01.io.example:volume?nsid=1`.
//!
//! | scheme | transport |
//! |---|---|
//! | `nvmf` | as the configuration says |
//! | `nvmf+tcp` | TCP |
//! | `nvmf+rdma` | RDMA |
//! | `nvmf+rdma+tcp` | RDMA, and TCP where that does not work |

use std::fmt;
use std::str::FromStr;

use nacre_nvmf_wire::{Nqn, NqnError};
use uuid::Uuid;

use crate::attachment::Select;

/// By which transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// As the configuration says.
    Auto,
    Tcp,
    Rdma,
    /// RDMA, and TCP where that does not work.
    RdmaThenTcp,
}

impl Way {
    const ALL: [Way; 4] = [Way::Auto, Way::Tcp, Way::Rdma, Way::RdmaThenTcp];

    pub fn scheme(self) -> &'static str {
        match self {
            Way::Auto => "nvmf",
            Way::Tcp => "nvmf+tcp",
            Way::Rdma => "nvmf+rdma",
            Way::RdmaThenTcp => "nvmf+rdma+tcp",
        }
    }
}

/// A namespace, or all of a subsystem, as people and other programs write it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteUri {
    pub way: Way,
    /// An IP address, without brackets, or a host name.
    pub host: String,
    pub port: u16,
    pub subnqn: Nqn,
    pub select: Select,
    /// The host NQN to use; derived from this machine's name unless given.
    pub hostnqn: Option<Nqn>,
}

/// The port where none is given.
pub const DEFAULT_PORT: u16 = 4420;

/// Why a text is not such an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UriError {
    #[error(
        "\"{text}\" is not the address of a remote namespace: write nvmf://ADDRESS[:PORT]/NQN[?nsid=N], with an IPv6 address in brackets"
    )]
    Form { text: String },
    #[error(
        "\"{found}\" is not a scheme for remote namespaces: nvmf, nvmf+tcp, nvmf+rdma and nvmf+rdma+tcp are"
    )]
    Scheme { found: String },
    #[error("\"{found}\" is not a port: a number from 1 to 65535")]
    Port { found: String },
    #[error("no subsystem is named: its NQN follows the address, nvmf://{authority}/NQN")]
    NoSubsystem { authority: String },
    #[error("{what} \"{found}\": {source}")]
    Nqn {
        what: &'static str,
        found: String,
        source: NqnError,
    },
    #[error("\"{found}\" is not a namespace identifier: a number from 1 to 4294967294")]
    Nsid { found: String },
    #[error("\"{found}\" is not a UUID other than zero")]
    Uuid { found: String },
    #[error(
        "\"{key}\" is not known here: nsid, uuid and hostnqn can follow the question mark, each with = and a value"
    )]
    Parameter { key: String },
    #[error("\"{key}\" is there twice")]
    Twice { key: &'static str },
    #[error("nsid and uuid both name the namespace: give one of them")]
    TwoNames,
}

impl FromStr for RemoteUri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<RemoteUri, UriError> {
        let form = || UriError::Form {
            text: text.to_owned(),
        };
        let (scheme, rest) = text.split_once("://").ok_or_else(form)?;
        let way = Way::ALL
            .into_iter()
            .find(|way| scheme.eq_ignore_ascii_case(way.scheme()));
        let way = way.ok_or_else(|| UriError::Scheme {
            found: scheme.to_owned(),
        })?;
        let (rest, query) = match rest.split_once('?') {
            Some((rest, query)) => (rest, Some(query)),
            None => (rest, None),
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (host, port) = split_authority(authority).ok_or_else(form)?;
        let named = |c: char| c.is_ascii_alphanumeric() || "._-:%".contains(c);
        if host.is_empty() || !host.chars().all(named) {
            return Err(form());
        }
        if path.is_empty() {
            return Err(UriError::NoSubsystem {
                authority: authority.to_owned(),
            });
        }
        let mut uri = RemoteUri {
            way,
            host: host.to_owned(),
            port: port.map_or(Ok(DEFAULT_PORT), parse_port)?,
            subnqn: parse_nqn("the subsystem", path)?,
            select: Select::All,
            hostnqn: None,
        };
        uri.take_query(query)?;
        Ok(uri)
    }
}

impl RemoteUri {
    fn take_query(&mut self, query: Option<&str>) -> Result<(), UriError> {
        let (mut nsid, mut uuid) = (None, None);
        for pair in query.into_iter().flat_map(|query| query.split('&')) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            match key {
                "nsid" if !value.is_empty() => once("nsid", &mut nsid, parse_nsid(value)?)?,
                "uuid" if !value.is_empty() => once("uuid", &mut uuid, parse_uuid(value)?)?,
                "hostnqn" if !value.is_empty() => {
                    once("hostnqn", &mut self.hostnqn, parse_nqn("the host", value)?)?;
                }
                _ => {
                    let key = key.to_owned();
                    return Err(UriError::Parameter { key });
                }
            }
        }
        self.select = match (nsid, uuid) {
            (None, None) => Select::All,
            (Some(nsid), None) => Select::Nsid(nsid),
            (None, Some(uuid)) => Select::Uuid(uuid),
            (Some(_), Some(_)) => return Err(UriError::TwoNames),
        };
        Ok(())
    }

    /// The address and the port, together as a socket address is written.
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

fn once<T>(key: &'static str, place: &mut Option<T>, value: T) -> Result<(), UriError> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(UriError::Twice { key }),
    }
}

fn parse_port(text: &str) -> Result<u16, UriError> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(port) if port > 0 && digits => Ok(port),
        _ => Err(UriError::Port {
            found: text.to_owned(),
        }),
    }
}

fn parse_nqn(what: &'static str, text: &str) -> Result<Nqn, UriError> {
    Nqn::foreign(text).map_err(|source| UriError::Nqn {
        what,
        found: text.to_owned(),
        source,
    })
}

fn parse_nsid(text: &str) -> Result<u32, UriError> {
    match text.parse() {
        Ok(nsid) if (1..u32::MAX).contains(&nsid) => Ok(nsid),
        _ => Err(UriError::Nsid {
            found: text.to_owned(),
        }),
    }
}

fn parse_uuid(text: &str) -> Result<Uuid, UriError> {
    match Uuid::parse_str(text) {
        Ok(uuid) if !uuid.is_nil() => Ok(uuid),
        _ => Err(UriError::Uuid {
            found: text.to_owned(),
        }),
    }
}

/// `[::1]:4420`, `::1`, `192.0.2.1:4420`, `host`. An IPv6 address without brackets has no port.
pub fn split_authority(authority: &str) -> Option<(&str, Option<&str>)> {
    if let Some(rest) = authority.strip_prefix('[') {
        let (host, after) = rest.split_once(']')?;
        return match after {
            "" => Some((host, None)),
            _ => Some((host, Some(after.strip_prefix(':')?))),
        };
    }
    match authority.split_once(':') {
        Some((_, rest)) if rest.contains(':') => Some((authority, None)),
        Some((host, port)) => Some((host, Some(port))),
        None => Some((authority, None)),
    }
}

impl fmt::Display for RemoteUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, authority) = (self.way.scheme(), self.authority());
        write!(f, "{scheme}://{authority}/{}", self.subnqn)?;
        let mut mark = '?';
        match self.select {
            Select::All => {}
            Select::Nsid(nsid) => write!(f, "?nsid={nsid}")?,
            Select::Uuid(uuid) => write!(f, "?uuid={uuid}")?,
        }
        if self.select != Select::All {
            mark = '&';
        }
        match &self.hostnqn {
            Some(hostnqn) => write!(f, "{mark}hostnqn={hostnqn}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NQN: &str = "nqn.2019-05.io.openebs:8c8f0a5d";

    /// Parsing the formatted URI yields the same value.
    #[test]
    fn there_and_back() {
        for text in [
            "nvmf://192.0.2.1:4420/nqn.2019-05.io.openebs:8c8f0a5d",
            "nvmf://192.0.2.1:8420/nqn.2019-05.io.openebs:8c8f0a5d?uuid=8c8f0a5d-7d1e-4c9f-9c53-5d3a3f8f0a11",
            "nvmf+tcp://[2001:db8::1]:4420/nqn.2019-05.io.openebs:8c8f0a5d?nsid=4294967294",
            "nvmf+rdma://storage-1.example.com:1/nqn.2019-05.io.openebs:8c8f0a5d?hostnqn=nqn.2025-01.io.example:b",
            "nvmf+rdma+tcp://192.0.2.1:65535/nqn.2019-05.io.openebs:8c8f0a5d?nsid=7&hostnqn=nqn.2025-01.io.example:b",
            "nvmf://[fe80::1%eth0]:4420/nqn.2019-05.io.openebs:8c8f0a5d",
        ] {
            assert_eq!(text.parse::<RemoteUri>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn defaults_and_spellings() {
        let uri: RemoteUri = format!("NVMF+TCP://::1/{NQN}").parse().unwrap();
        assert_eq!((uri.host.as_str(), uri.port), ("::1", DEFAULT_PORT));
        assert_eq!(uri.authority(), "[::1]:4420");
        assert_eq!(
            (uri.way, uri.select, uri.hostnqn),
            (Way::Tcp, Select::All, None)
        );
        let uri: RemoteUri = format!(
            "nvmf://h/{NQN}?hostnqn=nqn.2025-01.io.example:b&uuid=8C8F0A5D7D1E4C9F9C535D3A3F8F0A11"
        )
        .parse()
        .unwrap();
        let uuid = Uuid::from_u128(0x8c8f0a5d_7d1e_4c9f_9c53_5d3a3f8f0a11);
        assert_eq!((uri.way, uri.select), (Way::Auto, Select::Uuid(uuid)));
        assert_eq!(uri.hostnqn.unwrap().to_string(), "nqn.2025-01.io.example:b");
    }

    #[test]
    fn refusals() {
        use UriError as E;
        let of = |text: &str| text.parse::<RemoteUri>().expect_err(text);
        let with = |rest: &str| of(&format!("nvmf://192.0.2.1/{NQN}{rest}"));
        for text in [
            "",
            "nvmf",
            "192.0.2.1",
            "nvmf:/x",
            "nvmf:///x",
            "nvmf://[::1/x",
            "nvmf://[::1]4420/x",
            "nvmf://a b/x",
            "nvmf://user@host/x",
        ] {
            assert!(matches!(of(text), E::Form { .. }), "{text}: {:?}", of(text));
        }
        for scheme in [
            "tcp",
            "nvme",
            "nvmf+fc",
            "nvmf+tcp+rdma",
            "pcie",
            "iscsi",
            "",
        ] {
            let found = of(&format!("{scheme}://192.0.2.1/{NQN}"));
            assert_eq!(
                found,
                E::Scheme {
                    found: scheme.into()
                }
            );
        }
        for port in ["", "0", "65536", "+1", "http"] {
            let found = of(&format!("nvmf://192.0.2.1:{port}/{NQN}"));
            assert_eq!(found, E::Port { found: port.into() });
        }
        for text in [
            "nvmf://192.0.2.1:1",
            "nvmf://192.0.2.1:1/",
            "nvmf://192.0.2.1:1?nsid=1",
        ] {
            let authority = "192.0.2.1:1".into();
            assert_eq!(of(text), E::NoSubsystem { authority });
        }
        assert!(matches!(
            of(&format!("nvmf://192.0.2.1/{}", "v".repeat(224))),
            E::Nqn {
                what: "the subsystem",
                ..
            }
        ));
        assert!(matches!(
            with(&format!("?hostnqn={}", "h".repeat(224))),
            E::Nqn {
                what: "the host",
                ..
            }
        ));
        for nsid in ["0", "4294967295", "-1", "one"] {
            assert_eq!(
                with(&format!("?nsid={nsid}")),
                E::Nsid { found: nsid.into() }
            );
        }
        for uuid in ["7", "00000000-0000-0000-0000-000000000000"] {
            assert_eq!(
                with(&format!("?uuid={uuid}")),
                E::Uuid { found: uuid.into() }
            );
        }
        for (query, key) in [
            ("?size=1", "size"),
            ("?nsid", "nsid"),
            ("?uuid=", "uuid"),
            ("?", ""),
            ("?nsid=1&", ""),
        ] {
            assert_eq!(with(query), E::Parameter { key: key.into() });
        }
        assert_eq!(with("?nsid=1&nsid=1"), E::Twice { key: "nsid" });
        let both = "?nsid=1&uuid=8c8f0a5d-7d1e-4c9f-9c53-5d3a3f8f0a11";
        assert_eq!(with(both), E::TwoNames);
    }
}
