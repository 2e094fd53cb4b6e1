//! `[[nvmf.listener]]`: addresses for hosts, selected by interface.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use nacre_nvmf::address::{Grammar, IpTransport, NVME_PORT, Scheme};
use serde::{Deserialize, Serialize};

use crate::values::address::{AddressError, ScopedIp};
use crate::values::read;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Listener {
    pub name: String,
    /// Selectors, see [`Selector`]; empty: `address` applies.
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
    /// This and the next two: none means the transport's value.
    #[serde(deserialize_with = "read::some_bytes")]
    pub in_capsule_data_size: Option<u32>,
    pub max_queue_depth: Option<u16>,
    /// DSCP << 2.
    pub tos: Option<u8>,
}

impl Default for Listener {
    fn default() -> Listener {
        Listener {
            name: "default".into(),
            iface: Vec::new(),
            address: IpAddr::from([127, 0, 0, 1]).into(),
            port: 4420,
            transports: vec![IpTransport::Rdma, IpTransport::Tcp],
            rdma: RdmaSetting::Off,
            tcp_fallback: true,
            ana: Ana::default(),
            rdma_device: None,
            rdma_port: None,
            rdma_gid_index: None,
            allow_software: true,
            in_capsule_data_size: None,
            max_queue_depth: None,
            tos: None,
        }
    }
}

impl Listener {
    /// Parses `tcp://ADDRESS[:PORT]` or `rdma://ADDRESS[:PORT]`; `at` is the position in the list,
    /// from 1.
    pub fn short(at: usize, text: &str) -> Result<Listener, AddressError> {
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
        Ok(Listener {
            name: format!("listen-{at}"),
            address: endpoint.host.parse()?,
            port: endpoint.port.unwrap_or(NVME_PORT),
            transports: vec![transport],
            rdma,
            ..Listener::default()
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
        if let Some(bytes) = self.in_capsule_data_size.filter(|n| !n.is_multiple_of(16)) {
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
    fn default() -> Ana {
        Ana {
            rdma: AnaSetting::Optimized,
            tcp: AnaSetting::Auto,
        }
    }
}

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
            AnaSetting::Auto | AnaSetting::Optimized => "optimized",
            AnaSetting::NonOptimized => "non_optimized",
            AnaSetting::Inaccessible => "inaccessible",
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
            RdmaSetting::Off => "off",
            RdmaSetting::Prefer => "prefer",
            RdmaSetting::Require => "require",
        })
    }
}

/// Selects interfaces, or some of their addresses, for a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    Name(String),
    Mac([u8; 6]),
    Ip(IpAddr),
    /// A link-local address of an interface.
    Link(IpAddr, String),
    Subnet(IpAddr, u8),
    /// The interfaces of an RDMA device.
    Rdma(String),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    #[error("\"{text}\" is no selector")]
    Form { text: String },
    #[error("\"{text}\": \"{found}\" is not {expected}")]
    Value {
        text: String,
        found: String,
        expected: &'static str,
    },
}

impl Selector {
    pub const FORMS: &'static str = "write name:eth0, mac:02:00:5e:00:53:01, ip:10.0.0.4, \
        subnet:10.0.0.0/24 (or IPv6), or rdma:mlx5_0";
}

impl Selector {
    /// As [`Selector::from_str`], but also accepts the plain name or address of an interface.
    pub fn plain(text: &str) -> Result<Selector, SelectorError> {
        let text = text.trim();
        if text.parse::<IpAddr>().is_ok() || text.parse::<ScopedIp>().is_ok() {
            return format!("ip:{text}").parse();
        }
        if text.contains(':') || text.is_empty() {
            text.parse()
        } else {
            Ok(Selector::Name(text.to_owned()))
        }
    }

    /// Validates a selector of the command line; returns the trimmed text.
    pub fn checked(text: &str) -> Result<String, String> {
        match Selector::plain(text) {
            Ok(_) => Ok(text.trim().to_owned()),
            Err(error) => Err(format!("{error}: {}", Selector::FORMS)),
        }
    }
}

impl FromStr for Selector {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Selector, SelectorError> {
        let form = || SelectorError::Form {
            text: text.to_owned(),
        };
        let (kind, value) = text.split_once(':').ok_or_else(form)?;
        let wrong = |expected| SelectorError::Value {
            text: text.to_owned(),
            found: value.to_owned(),
            expected,
        };
        match kind {
            "name" if value.is_empty() => Err(wrong("the name of an interface")),
            "name" => Ok(Selector::Name(value.to_owned())),
            "rdma" if value.is_empty() => Err(wrong("the name of an RDMA device")),
            "rdma" => Ok(Selector::Rdma(value.to_owned())),
            "ip" => {
                let bare = value.trim_matches(['[', ']']);
                match bare.split_once('%') {
                    None => {
                        let ip: IpAddr = bare.parse().map_err(|_| wrong("an IP address"))?;
                        Ok(Selector::Ip(ip.to_canonical()))
                    }
                    Some((_, interface)) => {
                        let scoped = bare.parse::<ScopedIp>();
                        let scoped = scoped
                            .map_err(|_| wrong("a link-local IPv6 address with its interface"))?;
                        Ok(Selector::Link(scoped.ip, interface.to_owned()))
                    }
                }
            }
            "mac" => {
                let mac = mac(value).ok_or_else(|| wrong("a MAC address"))?;
                Ok(Selector::Mac(mac))
            }
            "subnet" => {
                let subnet = || {
                    let (net, length) = value.split_once('/')?;
                    let (net, length) = (net.parse::<IpAddr>().ok()?, length.parse::<u8>().ok()?);
                    (length <= if net.is_ipv4() { 32 } else { 128 }).then_some((net, length))
                };
                let (net, length) = subnet().ok_or_else(|| wrong("a subnet"))?;
                Ok(Selector::Subnet(net, length))
            }
            _ => Err(form()),
        }
    }
}

/// Parses a MAC address: six hexadecimal bytes, separated by colons or dashes.
pub fn mac(text: &str) -> Option<[u8; 6]> {
    let mut bytes = [0; 6];
    let mut parts = text.trim().split([':', '-']);
    for byte in &mut bytes {
        let part = parts.next().filter(|p| (1..=2).contains(&p.len()))?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::values::address::with_port;

    #[test]
    fn selectors_are_read() {
        for (text, selector) in [
            ("name:eth0", Selector::Name("eth0".into())),
            ("name:eth0:1", Selector::Name("eth0:1".into())),
            (
                "mac:02:00:5E:00:53:01",
                Selector::Mac([2, 0, 0x5e, 0, 0x53, 1]),
            ),
            (
                "mac:02-00-5e-00-53-01",
                Selector::Mac([2, 0, 0x5e, 0, 0x53, 1]),
            ),
            ("ip:10.0.0.4", Selector::Ip([10, 0, 0, 4].into())),
            ("ip:fd00::4", Selector::Ip("fd00::4".parse().unwrap())),
            ("ip:[fd00::4]", Selector::Ip("fd00::4".parse().unwrap())),
            (
                "ip:fe80::4%eth0",
                Selector::Link("fe80::4".parse().unwrap(), "eth0".into()),
            ),
            (
                "subnet:fd00::/64",
                Selector::Subnet("fd00::".parse().unwrap(), 64),
            ),
            (
                "subnet:10.0.0.0/0",
                Selector::Subnet([10, 0, 0, 0].into(), 0),
            ),
            ("rdma:mlx5_0", Selector::Rdma("mlx5_0".into())),
        ] {
            assert_eq!(text.parse(), Ok(selector), "{text}");
        }
        for (text, expected) in [
            ("eth0", "\"eth0\" is no selector"),
            ("iface:eth0", "is no selector"),
            ("name:", "the name of an interface"),
            ("rdma:", "the name of an RDMA device"),
            ("ip:10.0.0", "not an IP address"),
            ("mac:02:00:5e:00:53", "not a MAC address"),
            ("mac:02:00:5e:00:53:01:02", "not a MAC address"),
            ("mac:02:00:5e:00:53:0g", "not a MAC address"),
            ("subnet:10.0.0.0", "not a subnet"),
            ("subnet:10.0.0.0/33", "not a subnet"),
            ("subnet:fd00::/129", "not a subnet"),
        ] {
            let error = text.parse::<Selector>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn plain_names_and_addresses_are_selectors() {
        for (text, selector) in [
            ("eth0", "name:eth0"),
            ("10.0.0.4", "ip:10.0.0.4"),
            ("fd00::4", "ip:fd00::4"),
            ("fe80::4%eth0", "ip:fe80::4%eth0"),
            ("mac:02-00-5e-00-53-01", "mac:02:00:5e:00:53:01"),
        ] {
            assert_eq!(Selector::plain(text), selector.parse(), "{text}");
        }
        for text in ["", "iface:eth0", "ip:10.0.0", "subnet:10.0.0.0/33"] {
            let message = Selector::checked(text).unwrap_err();
            assert!(message.contains("write name:eth0"), "{text}: {message}");
        }
    }

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
