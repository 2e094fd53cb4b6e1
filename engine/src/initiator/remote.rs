//! The address of a controller: `tcp://192.0.2.1:4420/nqn.2025-01.io.example:volume?nsid=1`.
//!
//! `rdma://…` selects RDMA; `auto://…` selects RDMA if the route to the target has it, else TCP.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use nacre_nvmf_wire::Nqn;

use crate::values::address::{self, AddressError, Written};

/// The port of NVMe/TCP I/O controllers, and of discovery controllers.
pub const DEFAULT_PORT: u16 = address::NVME_PORT;
pub const DISCOVERY_PORT: u16 = 8009;

/// The transport to use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Choice {
    /// RDMA if the route to the target has it, else TCP
    #[default]
    Auto,
    Rdma,
    Tcp,
}

impl Choice {
    pub fn word(self) -> &'static str {
        match self {
            Choice::Tcp => "tcp",
            Choice::Rdma => "rdma",
            Choice::Auto => "auto",
        }
    }
}

/// A controller's address as users write it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remote {
    /// `None`: use the command's default.
    pub kind: Option<Choice>,
    /// An IP address, without brackets, or a host name.
    pub host: String,
    /// `None`: use the default of the requested service.
    pub port: Option<u16>,
    pub subnqn: Option<Nqn>,
    pub nsid: Option<u32>,
}

/// Why a text is not a valid address.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    #[error(transparent)]
    Address(#[from] AddressError),
    #[error("\"{found}\" is not a subsystem's name: {source}")]
    Nqn {
        found: String,
        source: nacre_nvmf_wire::NqnError,
    },
    #[error("\"{found}\" is not a namespace identifier: a number from 1 to 4294967294")]
    Nsid { found: String },
    #[error("\"{key}\" is not known here: only nsid can follow the question mark")]
    Parameter { key: String },
}

impl Remote {
    pub fn parse_transport(text: &str) -> Result<Choice, AddressError> {
        let word = text.to_ascii_lowercase();
        let mut all = [Choice::Tcp, Choice::Rdma, Choice::Auto].into_iter();
        all.find(|choice| choice.word() == word)
            .ok_or_else(|| AddressError::Transport {
                found: text.to_owned(),
                allowed: "tcp, rdma or auto",
            })
    }

    pub fn parse_nqn(text: &str) -> Result<Nqn, RemoteError> {
        let found = || text.to_owned();
        Nqn::foreign(text).map_err(|source| RemoteError::Nqn {
            found: found(),
            source,
        })
    }

    pub fn parse_nsid(text: &str) -> Result<u32, RemoteError> {
        match text.parse() {
            Ok(nsid) if (1..u32::MAX).contains(&nsid) => Ok(nsid),
            _ => Err(RemoteError::Nsid {
                found: text.to_owned(),
            }),
        }
    }

    /// Resolves to a socket address, with `default_port` if no port was given. Of several addresses
    /// of a name, the first one counts.
    pub fn resolve(&self, default_port: u16) -> Result<SocketAddr, AddressError> {
        address::resolve(&self.host, self.port.unwrap_or(default_port))
    }
}

impl FromStr for Remote {
    type Err = RemoteError;

    fn from_str(text: &str) -> Result<Remote, RemoteError> {
        const FORM: &str = "ADDRESS[:PORT] or tcp://ADDRESS[:PORT][/NQN][?nsid=N], with an IPv6 address \
                            in brackets";
        let written = Written::parse(text, FORM)?;
        let mut remote = Remote {
            kind: written.scheme.map(Remote::parse_transport).transpose()?,
            host: written.host.to_owned(),
            port: written.port,
            subnqn: match written.path {
                "" => None,
                path => Some(Remote::parse_nqn(path)?),
            },
            nsid: None,
        };
        for pair in written.query.into_iter().flat_map(|q| q.split('&')) {
            match pair.split_once('=') {
                Some(("nsid", value)) => remote.nsid = Some(Remote::parse_nsid(value)?),
                _ => {
                    let key = pair.split('=').next().unwrap_or(pair).to_owned();
                    return Err(RemoteError::Parameter { key });
                }
            }
        }
        Ok(remote)
    }
}

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(kind) = self.kind {
            write!(f, "{}://", kind.word())?;
        }
        if self.host.contains(':') {
            write!(f, "[{}]", self.host)?;
        } else {
            f.write_str(&self.host)?;
        }
        if let Some(port) = self.port {
            write!(f, ":{port}")?;
        }
        if let Some(nqn) = &self.subnqn {
            write!(f, "/{nqn}")?;
        }
        if let Some(nsid) = self.nsid {
            write!(f, "?nsid={nsid}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: an address is read back as written, and omitted parts stay open.
    #[test]
    fn addresses() {
        for text in [
            "tcp://127.0.0.1:4420/nqn.2025-01.io.nacre:v?nsid=7",
            "tcp://127.0.0.1/nqn.2025-01.io.nacre:v",
            "tcp://[::1]:8009",
            "tcp://[fe80::1]",
            "127.0.0.1",
            "[::1]:4420/nqn.2025-01.io.nacre:v?nsid=7",
            "tcp://storage.example.com:1/nqn.2025-01.io.nacre:v",
            "rdma://192.0.2.1:4420/nqn.2025-01.io.nacre:v",
            "auto://[fd00::1]/nqn.2025-01.io.nacre:v?nsid=2",
        ] {
            assert_eq!(text.parse::<Remote>().unwrap().to_string(), text);
        }
        let bare: Remote = "TCP://::1".parse().unwrap();
        assert_eq!((bare.host.as_str(), bare.port), ("::1", None));
        assert_eq!(bare.resolve(8009).unwrap().to_string(), "[::1]:8009");
    }

    #[test]
    fn refusals() {
        use AddressError as A;
        use RemoteError as E;
        let refused = |text: &str| text.parse::<Remote>().unwrap_err();
        for text in ["", "tcp://", "tcp://[::1", "tcp://[::1]4420"] {
            assert!(
                matches!(refused(text), E::Address(A::Form { .. })),
                "{text}"
            );
        }
        assert!(matches!(refused("fc://x"), E::Address(A::Transport { .. })));
        for text in ["tcp://x:0", "x:65536"] {
            assert!(
                matches!(refused(text), E::Address(A::Port { .. })),
                "{text}"
            );
        }
        assert!(matches!(
            refused(&format!("tcp://x/{}", "v".repeat(224))),
            E::Nqn { .. }
        ));
        assert!(matches!(refused("tcp://x?nsid=0"), E::Nsid { .. }));
        assert!(matches!(refused("tcp://x?nsid=4294967295"), E::Nsid { .. }));
        assert!(matches!(refused("tcp://x?size=1"), E::Parameter { .. }));
    }
}
