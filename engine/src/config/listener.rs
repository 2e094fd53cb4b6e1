//! `[[nvmf.listener]]`: addresses on which hosts can connect, selected by interface.

use std::fmt;
use std::net::IpAddr;

use nacre_nvmf::address::{Grammar, IpTransport, NVME_PORT, Scheme};
use nacre_nvmf::transport::{ListenerOptions, TlsPolicy};
use serde::{Deserialize, Serialize};

use crate::values::address::{AddressError, ScopedIp};
use crate::values::flattened;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, remote = "Self")]
pub struct Listener {
    pub name: String,
    /// Selectors, see [`Selector`](crate::values::selector::Selector); empty: `address` applies.
    pub iface: Vec<String>,
    pub address: ScopedIp,
    pub port: u16,
    /// Allowed transports; `rdma` says whether RDMA is used.
    pub transports: Vec<IpTransport>,
    pub rdma: RdmaSetting,
    /// False: where RDMA is wanted, TCP is omitted from the discovery log and refuses hosts.
    pub tcp_fallback: bool,
    pub ana: Ana,
    /// None: the device and port of the interface.
    pub rdma_device: Option<String>,
    pub rdma_port: Option<u8>,
    /// None: the RoCE v2 entry of the listener's address.
    pub rdma_gid_index: Option<u16>,
    /// Allow soft-RoCE and soft-iWARP.
    pub allow_software: bool,
    /// Options whose keys are in the same table.
    #[serde(skip)]
    pub options: ListenerOptions,
}

flattened!(Listener, options);

impl Default for Listener {
    fn default() -> Self {
        Self {
            name: "default".into(),
            iface: Vec::new(),
            address: IpAddr::from([127, 0, 0, 1]).into(),
            port: NVME_PORT,
            transports: vec![IpTransport::Rdma, IpTransport::Tcp],
            rdma: RdmaSetting::Off,
            tcp_fallback: true,
            ana: Ana::default(),
            rdma_device: None,
            rdma_port: None,
            rdma_gid_index: None,
            allow_software: true,
            options: ListenerOptions {
                idle_timeout_s: Some(0),
                tls: Some(TlsPolicy::Off),
                ..ListenerOptions::default()
            },
        }
    }
}

impl Listener {
    /// Parses `tcp://ADDRESS[:PORT]` or `rdma://ADDRESS[:PORT]`; `at` is the position in the list
    /// `listen`, from 1, for the listener's name.
    pub fn short(at: usize, text: &str) -> Result<Self, AddressError> {
        const SHORT: Grammar = Grammar {
            form: "tcp://ADDRESS:PORT or rdma://ADDRESS:PORT, with an IPv6 address in brackets",
            needs_scheme: true,
            ..Grammar::LISTENER
        };
        let endpoint = SHORT.parse(text)?;
        let (transport, rdma) = match endpoint.scheme {
            Some(Scheme::Rdma) => (IpTransport::Rdma, RdmaSetting::Require),
            _ => (IpTransport::Tcp, RdmaSetting::Off),
        };
        Ok(Self {
            name: format!("listen-{at}"),
            address: endpoint.host.parse()?,
            port: endpoint.port.unwrap_or(NVME_PORT),
            transports: vec![transport],
            rdma,
            ..Self::default()
        })
    }

    pub fn uses(&self, transport: IpTransport) -> bool {
        self.transports.contains(&transport)
    }

    pub fn wants_rdma(&self) -> bool {
        self.rdma != RdmaSetting::Off && self.uses(IpTransport::Rdma)
    }

    /// The ANA state of the listener's path over `transport`.
    pub fn ana_of(&self, transport: IpTransport) -> AnaSetting {
        match (transport, self.ana.tcp) {
            (IpTransport::Rdma, _) => self.ana.rdma,
            (IpTransport::Tcp, AnaSetting::Auto) if self.wants_rdma() => AnaSetting::NonOptimized,
            (IpTransport::Tcp, setting) => setting,
        }
    }

    /// The options, as the transport of the listener takes them.
    pub fn options(&self) -> ListenerOptions {
        ListenerOptions {
            idle_timeout_s: self.options.idle_timeout_s.filter(|&seconds| seconds > 0),
            tls: self.options.tls.filter(|tls| *tls != TlsPolicy::Off),
            ..self.options
        }
    }

    /// Errors that do not depend on the machine: keys, causes and remedies.
    pub fn problems(&self) -> Vec<(&'static str, String, &'static str)> {
        let mut problems = Vec::new();
        if self.name.is_empty() {
            problems.push((
                "name",
                "a listener without a name".into(),
                "add name = \"…\"",
            ));
        }
        if !self.uses(IpTransport::Tcp) && !self.wants_rdma() {
            let cause = "it would listen on nothing: without TCP, and with rdma = \"off\"";
            problems.push((
                "transports",
                cause.into(),
                "add \"tcp\" to transports, or set rdma = \"prefer\" or \"require\"",
            ));
        } else if self.rdma != RdmaSetting::Off && !self.uses(IpTransport::Rdma) {
            let cause = format!("rdma = \"{}\" without \"rdma\" in transports", self.rdma);
            problems.push(("rdma", cause, "add it, or set rdma = \"off\""));
        }
        if !self.tcp_fallback && !self.wants_rdma() {
            problems.push((
                "tcp_fallback",
                "false without RDMA leaves hosts no way".into(),
                "set rdma = \"prefer\" or \"require\", or keep the fallback",
            ));
        }
        if self.options.tls() != TlsPolicy::Off && self.wants_rdma() {
            problems.push((
                "tls",
                "TLS is for TCP, and this listener uses RDMA".into(),
                "make a listener with transports = [\"tcp\"] for the hosts that use TLS",
            ));
        }
        let in_capsule = self.options.in_capsule_data_size;
        if let Some(bytes) = in_capsule.filter(|n| !n.is_multiple_of(16)) {
            let cause = format!("{bytes} is not a multiple of 16");
            problems.push(("in_capsule_data_size", cause, ""));
        }
        problems
    }
}

/// ANA states by transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Ana {
    pub rdma: AnaSetting,
    pub tcp: AnaSetting,
}

impl Default for Ana {
    fn default() -> Self {
        Self {
            rdma: AnaSetting::Optimized,
            tcp: AnaSetting::Auto,
        }
    }
}

/// The ANA state of a listener's paths in the configuration file: `auto`, or a state that an
/// operator may set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AnaSetting {
    /// TCP is non-optimized if any listener wants RDMA, and for published volumes.
    Auto,
    Optimized,
    NonOptimized,
    Inaccessible,
}

impl AnaSetting {
    /// The name in `nvmf_subsystem_add_listener`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Auto | Self::Optimized => "optimized",
            Self::NonOptimized => "non_optimized",
            Self::Inaccessible => "inaccessible",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RdmaSetting {
    Off,
    Prefer,
    Require,
}

impl fmt::Display for RdmaSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Prefer => "prefer",
            Self::Require => "require",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::values::address::with_port;

    #[test]
    fn short_listeners_are_read() {
        for (text, transport, rdma, address) in [
            (
                "tcp://10.0.0.4:4421",
                IpTransport::Tcp,
                RdmaSetting::Off,
                "10.0.0.4:4421",
            ),
            (
                "rdma://10.0.0.4",
                IpTransport::Rdma,
                RdmaSetting::Require,
                "10.0.0.4:4420",
            ),
            (
                "tcp://[fd00::4]:1",
                IpTransport::Tcp,
                RdmaSetting::Off,
                "[fd00::4]:1",
            ),
            (
                "tcp://[::]",
                IpTransport::Tcp,
                RdmaSetting::Off,
                "[::]:4420",
            ),
            (
                "tcp://[fe80::4%eth7]:1",
                IpTransport::Tcp,
                RdmaSetting::Off,
                "[fe80::4%eth7]:1",
            ),
            (
                "tcp://[::ffff:10.0.0.4]:1",
                IpTransport::Tcp,
                RdmaSetting::Off,
                "10.0.0.4:1",
            ),
        ] {
            let listener = Listener::short(1, text).unwrap();
            assert_eq!(with_port(&listener.address, listener.port), address);
            assert_eq!(
                (listener.transports.as_slice(), listener.rdma),
                (&[transport][..], rdma)
            );
            assert_eq!(listener.problems(), []);
        }
        for (text, expected) in [
            ("10.0.0.4", "write tcp://ADDRESS:PORT"),
            ("tcp://", "write tcp://ADDRESS:PORT"),
            ("fc://10.0.0.4", "write tcp or rdma"),
            ("tcp://eth0:4420", "\"eth0\" is not an IP address"),
            ("tcp://[fe80::4]", "name the interface, fe80::4%eth0"),
            ("tcp://1.2.3.4:x", "\"x\" is not a port"),
            ("tcp://1.2.3.4:0", "\"0\" is not a port"),
        ] {
            let error = Listener::short(1, text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn a_tcp_path_beside_rdma_is_non_optimized() {
        let mut listener = Listener::default();
        assert_eq!(listener.ana_of(IpTransport::Tcp), AnaSetting::Auto);
        assert_eq!(listener.ana_of(IpTransport::Tcp).word(), "optimized");
        listener.rdma = RdmaSetting::Prefer;
        assert_eq!(listener.ana_of(IpTransport::Tcp), AnaSetting::NonOptimized);
        assert_eq!(listener.ana_of(IpTransport::Rdma), AnaSetting::Optimized);
        listener.ana.tcp = AnaSetting::Optimized;
        assert_eq!(listener.ana_of(IpTransport::Tcp), AnaSetting::Optimized);
    }
}
