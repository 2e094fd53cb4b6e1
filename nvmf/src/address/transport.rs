//! The transports that an address or a setting can name.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::transport::TransportType;

/// The scheme of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    Auto,
    Tcp,
    Rdma,
    /// RDMA, and TCP while RDMA fails.
    RdmaThenTcp,
    /// A drive on the PCI bus of this machine.
    Pcie,
}

impl Scheme {
    /// The canonical word, and an alias.
    const WORDS: [(Self, &str, &str); 5] = [
        (Self::Tcp, "tcp", "nvmf+tcp"),
        (Self::Rdma, "rdma", "nvmf+rdma"),
        (Self::RdmaThenTcp, "rdma+tcp", "nvmf+rdma+tcp"),
        (Self::Auto, "auto", "nvmf"),
        (Self::Pcie, "pcie", "vfio"),
    ];

    /// Parses the word or its alias in any case.
    pub fn parse(word: &str) -> Option<Self> {
        let is_one = |name: &str| word.eq_ignore_ascii_case(name);
        let mut words = Self::WORDS.into_iter();
        let found = words.find(|(_, word, alias)| is_one(word) || is_one(alias));
        found.map(|(scheme, ..)| scheme)
    }

    pub fn word(self) -> &'static str {
        let mut words = Self::WORDS.into_iter();
        let found = words.find(|(scheme, ..)| *scheme == self);
        found.map_or("", |(_, word, _)| word)
    }

    /// The choice of a network transport; `None` for a drive of this machine.
    pub fn choice(self) -> Option<TransportChoice> {
        match self {
            Self::Auto => Some(TransportChoice::Auto),
            Self::Tcp => Some(TransportChoice::Tcp),
            Self::Rdma | Self::RdmaThenTcp => Some(TransportChoice::Rdma),
            Self::Pcie => None,
        }
    }

    /// The fallback that the scheme itself names.
    pub fn fallback(self) -> Option<Fallback> {
        (self == Self::RdmaThenTcp).then_some(Fallback::Tcp)
    }
}

impl From<IpTransport> for Scheme {
    fn from(transport: IpTransport) -> Self {
        match transport {
            IpTransport::Tcp => Self::Tcp,
            IpTransport::Rdma => Self::Rdma,
        }
    }
}

impl From<TransportChoice> for Scheme {
    fn from(choice: TransportChoice) -> Self {
        match choice {
            TransportChoice::Auto => Self::Auto,
            TransportChoice::Tcp => Self::Tcp,
            TransportChoice::Rdma => Self::Rdma,
        }
    }
}

/// A transport whose addresses are an IP address and a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IpTransport {
    Tcp,
    Rdma,
}

impl IpTransport {
    pub fn word(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        }
    }

    /// The name in RPC calls.
    pub fn trtype(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Rdma => "RDMA",
        }
    }
}

impl From<IpTransport> for TransportType {
    fn from(transport: IpTransport) -> Self {
        match transport {
            IpTransport::Tcp => Self::Tcp,
            IpTransport::Rdma => Self::Rdma,
        }
    }
}

impl FromStr for IpTransport {
    type Err = UnknownTransport;

    /// Parses the name in upper or lower case, as RPC calls do.
    fn from_str(text: &str) -> Result<Self, UnknownTransport> {
        let mut all = [Self::Tcp, Self::Rdma].into_iter();
        all.find(|transport| text.eq_ignore_ascii_case(transport.word()))
            .ok_or_else(|| UnknownTransport {
                found: text.to_owned(),
                allowed: "tcp or rdma",
            })
    }
}

/// The transport that a user chooses for a connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TransportChoice {
    /// RDMA if the route to the target has it, else TCP; in a call, as the configuration says.
    #[default]
    Auto,
    Rdma,
    Tcp,
}

impl TransportChoice {
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Rdma, Self::Auto];

    pub fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
        }
    }

    /// The name in RPC calls.
    pub fn trtype(self) -> &'static str {
        match self {
            Self::Auto => "AUTO",
            Self::Rdma => "RDMA",
            Self::Tcp => "TCP",
        }
    }

    /// The fallback of a tool whose user names none.
    pub fn default_fallback(self) -> Fallback {
        match self {
            Self::Auto => Fallback::Tcp,
            Self::Rdma | Self::Tcp => Fallback::None,
        }
    }
}

impl FromStr for TransportChoice {
    type Err = UnknownTransport;

    /// Parses the name in upper or lower case, as RPC calls do.
    fn from_str(text: &str) -> Result<Self, UnknownTransport> {
        let mut all = Self::ALL.into_iter();
        all.find(|choice| text.eq_ignore_ascii_case(choice.word()))
            .ok_or_else(|| UnknownTransport {
                found: text.to_owned(),
                allowed: "tcp, rdma or auto",
            })
    }
}

impl fmt::Display for TransportChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// The transport to use while RDMA fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Fallback {
    Tcp,
    None,
}

impl Fallback {
    pub fn word(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::None => "none",
        }
    }
}

impl FromStr for Fallback {
    type Err = UnknownTransport;

    fn from_str(text: &str) -> Result<Self, UnknownTransport> {
        let mut all = [Self::Tcp, Self::None].into_iter();
        all.find(|fallback| text.eq_ignore_ascii_case(fallback.word()))
            .ok_or_else(|| UnknownTransport {
                found: text.to_owned(),
                allowed: "tcp or none",
            })
    }
}

/// The error of an unknown transport name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{found}\" is not a transport: write {allowed}")]
pub struct UnknownTransport {
    pub found: String,
    pub allowed: &'static str,
}
