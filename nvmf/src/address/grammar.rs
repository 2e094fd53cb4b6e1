//! The grammar of addresses. Each use (controller, namespace, target) allows certain parts.

use std::str::FromStr;

use nacre_nvmf_wire::{Nqn, NqnError};
use uuid::Uuid;

use super::{Endpoint, Scheme, Select};

/// The addresses that one use of addresses accepts.
#[derive(Debug, Clone, Copy)]
pub struct Grammar {
    /// The expected form, for error messages.
    pub form: &'static str,
    pub schemes: &'static [Scheme],
    /// Refuses an address without a scheme.
    pub needs_scheme: bool,
    pub subsystem: SubsystemPart,
}

/// Whether an address names a subsystem, and with it a namespace and a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubsystemPart {
    Refused,
    Optional,
    Required,
}

/// The error of a text that is no address, or not one that the use accepts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error("\"{text}\" is not an address: write {form}")]
    Form { text: String, form: &'static str },
    #[error("\"{found}\" is not a transport: write {allowed}")]
    Transport { found: String, allowed: String },
    #[error("\"{found}\" is not a port: write a number from 1 to 65535")]
    Port { found: String },
    #[error("\"{text}\" names no subsystem: write {form}")]
    NoSubsystem { text: String, form: &'static str },
    #[error("{key} \"{found}\": {source}")]
    Nqn {
        key: &'static str,
        found: String,
        source: NqnError,
    },
    #[error("\"{found}\" is not a namespace identifier: write a number from 1 to 4294967294")]
    Nsid { found: String },
    #[error("\"{found}\" is not a UUID other than zero")]
    Uuid { found: String },
    #[error(
        "\"{key}\" is not known here: {allowed} can follow the question mark, with = and a value"
    )]
    Parameter { key: String, allowed: &'static str },
    #[error("\"{key}\" is there twice: leave one of them out")]
    Twice { key: &'static str },
    #[error("nsid and uuid both name the namespace: leave one of them out")]
    TwoNames,
}

impl Grammar {
    /// Every address.
    pub const ANY: Self = Self {
        form: "[SCHEME://]ADDRESS[:PORT][/NQN][?nsid=N], with an IPv6 address in brackets, or pcie://BDF",
        schemes: &[
            Scheme::Tcp,
            Scheme::Rdma,
            Scheme::RdmaThenTcp,
            Scheme::Auto,
            Scheme::Pcie,
        ],
        needs_scheme: false,
        subsystem: SubsystemPart::Optional,
    };

    /// A controller that a tool connects to.
    pub const CONTROLLER: Self = Self {
        form: "ADDRESS[:PORT] or tcp://ADDRESS[:PORT][/NQN][?nsid=N], with an IPv6 address in brackets",
        schemes: &[Scheme::Tcp, Scheme::Rdma, Scheme::RdmaThenTcp, Scheme::Auto],
        ..Self::ANY
    };

    /// A namespace, or all namespaces of a subsystem, to attach.
    pub const NAMESPACE: Self = Self {
        form: "auto://ADDRESS[:PORT]/NQN[?nsid=N], with an IPv6 address in brackets",
        needs_scheme: true,
        subsystem: SubsystemPart::Required,
        ..Self::CONTROLLER
    };

    /// An address to listen on.
    pub const LISTENER: Self = Self {
        form: "tcp://ADDRESS[:PORT] or rdma://ADDRESS[:PORT], with an IPv6 address in brackets",
        schemes: &[Scheme::Tcp, Scheme::Rdma],
        needs_scheme: false,
        subsystem: SubsystemPart::Refused,
    };

    /// A drive of this machine. The caller checks the PCI address.
    pub const DRIVE: Self = Self {
        form: "pcie://BDF[?nsid=N]",
        schemes: &[Scheme::Pcie],
        needs_scheme: true,
        subsystem: SubsystemPart::Optional,
    };

    pub fn parse(&self, text: &str) -> Result<Endpoint, AddressError> {
        let refused = || AddressError::Form {
            text: text.to_owned(),
            form: self.form,
        };
        // A name behind the host may have the separator too.
        let split = text.split_once("://");
        let (scheme, rest) = match split.filter(|(scheme, _)| !scheme.contains(['/', '?'])) {
            Some((scheme, rest)) => (Some(self.scheme(scheme)?), rest),
            None if self.needs_scheme => return Err(refused()),
            None => (None, text),
        };
        let (rest, query) = match rest.split_once('?') {
            Some((rest, query)) => (rest, Some(query)),
            None => (rest, None),
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let is_drive = scheme == Some(Scheme::Pcie);
        let (host, port) = if is_drive {
            (authority, None)
        } else {
            split_authority(authority).ok_or_else(refused)?
        };
        if !is_host(host) || (is_drive && !path.is_empty()) {
            return Err(refused());
        }
        let names_more = !path.is_empty() || query.is_some();
        if self.subsystem == SubsystemPart::Refused && names_more {
            return Err(refused());
        }
        let mut endpoint = Endpoint {
            scheme,
            host: host.to_owned(),
            port: port.map(parse_port).transpose()?,
            subnqn: match path {
                "" => None,
                path => Some(parse_nqn("subsystem", path)?),
            },
            select: Select::All,
            hostnqn: None,
        };
        if self.subsystem == SubsystemPart::Required && endpoint.subnqn.is_none() {
            return Err(AddressError::NoSubsystem {
                text: text.to_owned(),
                form: self.form,
            });
        }
        endpoint.take_query(query.unwrap_or_default())?;
        Ok(endpoint)
    }

    fn scheme(&self, word: &str) -> Result<Scheme, AddressError> {
        let found = Scheme::parse(word).filter(|scheme| self.schemes.contains(scheme));
        found.ok_or_else(|| AddressError::Transport {
            found: word.to_owned(),
            allowed: self.scheme_words(),
        })
    }

    fn scheme_words(&self) -> String {
        let words: Vec<&str> = self.schemes.iter().map(|scheme| scheme.word()).collect();
        match words.as_slice() {
            [rest @ .., last] if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
            words => words.concat(),
        }
    }
}

impl FromStr for Endpoint {
    type Err = AddressError;

    /// Accepts every address; [`Grammar::parse`] accepts those of one use.
    fn from_str(text: &str) -> Result<Self, AddressError> {
        Grammar::ANY.parse(text)
    }
}

impl Endpoint {
    fn take_query(&mut self, query: &str) -> Result<(), AddressError> {
        let is_drive = self.scheme == Some(Scheme::Pcie);
        let (mut nsid, mut uuid) = (None, None);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(("nsid", value)) => once("nsid", &mut nsid, parse_nsid(value)?)?,
                Some(("uuid", value)) if !is_drive => {
                    once("uuid", &mut uuid, parse_uuid(value)?)?;
                }
                Some(("hostnqn", value)) if !is_drive => {
                    once("hostnqn", &mut self.hostnqn, parse_nqn("hostnqn", value)?)?;
                }
                _ => {
                    let key = pair.split('=').next().unwrap_or(pair).to_owned();
                    let allowed = if is_drive {
                        "only nsid"
                    } else {
                        "nsid, uuid and hostnqn"
                    };
                    return Err(AddressError::Parameter { key, allowed });
                }
            }
        }
        self.select = match (nsid, uuid) {
            (None, None) => Select::All,
            (Some(nsid), None) => Select::Nsid(nsid),
            (None, Some(uuid)) => Select::Uuid(uuid),
            (Some(_), Some(_)) => return Err(AddressError::TwoNames),
        };
        Ok(())
    }
}

fn once<T>(key: &'static str, place: &mut Option<T>, value: T) -> Result<(), AddressError> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(AddressError::Twice { key }),
    }
}

/// True for a name, an IP address, or an IPv6 address with its interface: `fe80::1%eth0`.
fn is_host(host: &str) -> bool {
    let named = |text: &str, more: &str| {
        let mut chars = text.chars();
        !text.is_empty() && chars.all(|c| c.is_ascii_alphanumeric() || more.contains(c))
    };
    match host.split_once('%') {
        Some((address, zone)) => address.contains(':') && named(host, "._-:%") && !zone.is_empty(),
        None => named(host, "._-:"),
    }
}

/// Splits `[::1]:4420`, `::1`, `192.0.2.1:4420` or `host` into host and port; `None`: malformed. An
/// IPv6 address without brackets has no port.
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

/// Parses a port from 1 to 65535.
pub fn parse_port(text: &str) -> Result<u16, AddressError> {
    match parse_digits(text) {
        Some(port) if port > 0 => Ok(port),
        _ => Err(AddressError::Port {
            found: text.to_owned(),
        }),
    }
}

/// A number without a sign, which `parse` would accept.
fn parse_digits<T: FromStr>(text: &str) -> Option<T> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

/// Parses an NQN, or another name in use ([`Nqn::foreign`]). `key`: the name of the part, for the
/// error.
pub fn parse_nqn(key: &'static str, text: &str) -> Result<Nqn, AddressError> {
    Nqn::foreign(text).map_err(|source| AddressError::Nqn {
        key,
        found: text.to_owned(),
        source,
    })
}

pub fn parse_nsid(text: &str) -> Result<u32, AddressError> {
    match parse_digits(text) {
        Some(nsid) if (1..u32::MAX).contains(&nsid) => Ok(nsid),
        _ => Err(AddressError::Nsid {
            found: text.to_owned(),
        }),
    }
}

fn parse_uuid(text: &str) -> Result<Uuid, AddressError> {
    match Uuid::parse_str(text) {
        Ok(uuid) if !uuid.is_nil() => Ok(uuid),
        _ => Err(AddressError::Uuid {
            found: text.to_owned(),
        }),
    }
}
