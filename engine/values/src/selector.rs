//! Selectors of network interfaces: `name:eth0`, `subnet:10.0.0.0/24`, `rdma:mlx5_0`.

use std::net::IpAddr;
use std::str::FromStr;

use crate::address::ScopedIp;

/// Selects interfaces, or some of their addresses, for a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    Name(String),
    Mac([u8; 6]),
    Ip(IpAddr),
    /// An IPv6 link-local address, and the name of its interface.
    Link(IpAddr, String),
    /// An address in the subnet, and the length of the prefix in bits.
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
    /// The forms, for help and errors.
    pub const FORMS: &'static str = "write name:eth0, mac:02:00:5e:00:53:01, ip:10.0.0.4, \
        subnet:10.0.0.0/24 (or IPv6), or rdma:mlx5_0";

    /// As [`Selector::from_str`], but also accepts the plain name or address of an interface.
    pub fn plain(text: &str) -> Result<Self, SelectorError> {
        let text = text.trim();
        if text.parse::<IpAddr>().is_ok() || text.parse::<ScopedIp>().is_ok() {
            return format!("ip:{text}").parse();
        }
        if text.contains(':') || text.is_empty() {
            text.parse()
        } else {
            Ok(Self::Name(text.to_owned()))
        }
    }

    /// Validates a selector of the command line; returns the trimmed text.
    pub fn checked(text: &str) -> Result<String, String> {
        match Self::plain(text) {
            Ok(_) => Ok(text.trim().to_owned()),
            Err(error) => Err(format!("{error}: {}", Self::FORMS)),
        }
    }
}

impl FromStr for Selector {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Self, SelectorError> {
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
            "name" => Ok(Self::Name(value.to_owned())),
            "rdma" if value.is_empty() => Err(wrong("the name of an RDMA device")),
            "rdma" => Ok(Self::Rdma(value.to_owned())),
            "ip" => {
                let bare = value.trim_matches(['[', ']']);
                match bare.split_once('%') {
                    None => {
                        let ip: IpAddr = bare.parse().map_err(|_| wrong("an IP address"))?;
                        Ok(Self::Ip(ip.to_canonical()))
                    }
                    Some((_, interface)) => {
                        let scoped = bare.parse::<ScopedIp>();
                        let scoped = scoped
                            .map_err(|_| wrong("a link-local IPv6 address with its interface"))?;
                        Ok(Self::Link(scoped.ip, interface.to_owned()))
                    }
                }
            }
            "mac" => {
                let mac = mac(value).ok_or_else(|| wrong("a MAC address"))?;
                Ok(Self::Mac(mac))
            }
            "subnet" => {
                let subnet = || {
                    let (net, length) = value.split_once('/')?;
                    let (net, length) = (net.parse::<IpAddr>().ok()?, length.parse::<u8>().ok()?);
                    (length <= if net.is_ipv4() { 32 } else { 128 }).then_some((net, length))
                };
                let (net, length) = subnet().ok_or_else(|| wrong("a subnet"))?;
                Ok(Self::Subnet(net, length))
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
}
