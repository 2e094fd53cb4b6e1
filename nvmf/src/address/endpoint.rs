//! The parts of a parsed address, and their text form.

use std::fmt;
use std::net::IpAddr;

use nacre_nvmf_wire::Nqn;
use uuid::Uuid;

use super::{Fallback, NVME_PORT, Scheme, TransportChoice};

/// A controller, or a namespace behind it. An omitted part is `None`; each use has its defaults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    pub scheme: Option<Scheme>,
    /// An IP address without brackets, or a host name; with [`Scheme::Pcie`] a PCI address.
    pub host: String,
    pub port: Option<u16>,
    pub subnqn: Option<Nqn>,
    pub select: Select,
    pub hostnqn: Option<Nqn>,
}

/// Namespaces of a subsystem.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Select {
    #[default]
    All,
    Nsid(u32),
    /// The namespace with this UUID or NGUID.
    Uuid(Uuid),
}

impl Endpoint {
    pub fn of_host(host: &str) -> Self {
        Self {
            scheme: None,
            host: host.trim_matches(['[', ']']).to_owned(),
            port: None,
            subnqn: None,
            select: Select::All,
            hostnqn: None,
        }
    }

    /// The transport that the scheme names.
    pub fn choice(&self) -> Option<TransportChoice> {
        self.scheme.and_then(Scheme::choice)
    }

    /// The address in the fields of SPDK's calls.
    pub fn spdk_fields(&self) -> SpdkFields {
        let is_drive = self.scheme == Some(Scheme::Pcie);
        let port = || self.port.unwrap_or(NVME_PORT).to_string();
        SpdkFields {
            trtype: match self.scheme {
                Some(Scheme::Pcie) => "PCIe",
                _ => self.choice().unwrap_or_default().trtype(),
            },
            traddr: self.host.clone(),
            trsvcid: (!is_drive).then(port),
            subnqn: self.subnqn.as_ref().map(Nqn::to_string),
            fallback: match self.scheme {
                Some(Scheme::Rdma) => Some(Fallback::None),
                Some(scheme) => scheme.fallback(),
                None => None,
            },
        }
    }
}

/// An address in the fields of SPDK's `trid`, and Nacre's fallback.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpdkFields {
    pub trtype: &'static str,
    pub traddr: String,
    /// The port; `None` for a drive.
    pub trsvcid: Option<String>,
    pub subnqn: Option<String>,
    pub fallback: Option<Fallback>,
}

/// The address family, as SPDK spells it.
pub fn adrfam(ip: IpAddr) -> &'static str {
    if ip.is_ipv4() { "IPv4" } else { "IPv6" }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(scheme) = self.scheme {
            write!(f, "{}://", scheme.word())?;
        }
        if self.host.contains(':') && self.scheme != Some(Scheme::Pcie) {
            write!(f, "[{}]", self.host)?;
        } else {
            f.write_str(&self.host)?;
        }
        if let Some(port) = self.port {
            write!(f, ":{port}")?;
        }
        if let Some(subnqn) = &self.subnqn {
            write!(f, "/{subnqn}")?;
        }
        let mark = match self.select {
            Select::All => '?',
            Select::Nsid(_) | Select::Uuid(_) => '&',
        };
        match self.select {
            Select::All => {}
            Select::Nsid(nsid) => write!(f, "?nsid={nsid}")?,
            Select::Uuid(uuid) => write!(f, "?uuid={uuid}")?,
        }
        match &self.hostnqn {
            Some(hostnqn) => write!(f, "{mark}hostnqn={hostnqn}"),
            None => Ok(()),
        }
    }
}
