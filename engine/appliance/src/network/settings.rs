//! The network settings of one interface: parsed, checked, and written as a file for
//! systemd-networkd.

use std::fmt::{self, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Most bytes of an interface's name: IFNAMSIZ without the final zero.
const MOST_NAME: usize = 15;
/// Most name servers: resolvers ask three at most.
const MOST_DNS: usize = 3;
const MOST_ADDRESSES: usize = 8;

/// The name of an interface. It has no character with a meaning in a file name or match pattern.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Interface(String);

impl From<Interface> for String {
    fn from(interface: Interface) -> Self {
        interface.0
    }
}

impl TryFrom<String> for Interface {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for Interface {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.');
        let starts_well = text
            .bytes()
            .next()
            .is_some_and(|b| b.is_ascii_alphanumeric());
        if text.len() > MOST_NAME || !starts_well || !text.bytes().all(is_allowed) {
            return Err(format!(
                "{text:?} is no name of an interface: up to {MOST_NAME} letters, digits, '.', '_' and '-'"
            ));
        }
        if text == "lo" {
            return Err("lo is the loopback interface, which has no settings".into());
        }
        Ok(Self(text.to_owned()))
    }
}

impl Interface {
    pub fn name(&self) -> &str {
        &self.0
    }
}

/// An address with its prefix length, such as `192.0.2.7/24`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct HostAddress {
    pub address: IpAddr,
    pub prefix: u8,
}

impl fmt::Display for HostAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl From<HostAddress> for String {
    fn from(address: HostAddress) -> Self {
        address.to_string()
    }
}

impl TryFrom<String> for HostAddress {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for HostAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = |cause: &str| Err(format!("{text:?}: {cause}"));
        let Some((address, prefix)) = text.split_once('/') else {
            return refuse("an address needs its prefix, such as 192.0.2.7/24");
        };
        let Ok(address) = address.parse::<IpAddr>() else {
            return refuse("not an IP address");
        };
        if let Err(cause) = check_host(address) {
            return refuse(cause);
        }
        let most = if address.is_ipv4() { 32 } else { 128 };
        let is_number = prefix.bytes().all(|b| b.is_ascii_digit());
        let prefix = match prefix.parse::<u8>() {
            Ok(prefix) if is_number && (1..=most).contains(&prefix) => prefix,
            _ => return refuse(&format!("the prefix is a number from 1 to {most}")),
        };
        if let IpAddr::V4(host) = address
            && prefix < 31
        {
            let mask = u32::MAX >> prefix;
            let part = u32::from(host) & mask;
            if part == 0 {
                return refuse("the address of a network, not of a host");
            }
            if part == mask {
                return refuse("the broadcast address of its network");
            }
        }
        Ok(Self { address, prefix })
    }
}

impl HostAddress {
    fn contains(&self, other: IpAddr) -> bool {
        match (self.address, other) {
            (IpAddr::V4(a), IpAddr::V4(b)) => {
                (u32::from(a) ^ u32::from(b)).leading_zeros() >= u32::from(self.prefix)
            }
            (IpAddr::V6(a), IpAddr::V6(b)) => {
                (u128::from(a) ^ u128::from(b)).leading_zeros() >= u32::from(self.prefix)
            }
            _ => false,
        }
    }
}

fn check_host(address: IpAddr) -> Result<(), &'static str> {
    let first_is_zero = matches!(address, IpAddr::V4(v4) if v4.octets()[0] == 0);
    if address.is_unspecified() || first_is_zero {
        return Err("no address of a host");
    }
    if address.is_loopback() {
        return Err("a loopback address");
    }
    if address.is_multicast() || address == IpAddr::V4(Ipv4Addr::BROADCAST) {
        return Err("an address of a group, not of a host");
    }
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Addressing {
    Dhcp,
    Static {
        addresses: Vec<HostAddress>,
        /// At most one per address family.
        gateways: Vec<IpAddr>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    pub addressing: Addressing,
    pub dns: Vec<IpAddr>,
    pub mtu: Option<u32>,
}

/// A setting that is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {cause}")]
pub struct SettingsError {
    /// `address`, `gateway`, `dns` or `mtu`.
    pub field: &'static str,
    pub cause: String,
}

impl From<SettingsError> for String {
    fn from(error: SettingsError) -> Self {
        error.to_string()
    }
}

fn refuse(field: &'static str, cause: impl Into<String>) -> Result<(), SettingsError> {
    Err(SettingsError {
        field,
        cause: cause.into(),
    })
}

fn check_other(field: &'static str, host: IpAddr) -> Result<(), SettingsError> {
    match check_host(host) {
        Ok(()) => Ok(()),
        Err(cause) => refuse(field, format!("{host}: {cause}")),
    }
}

impl Settings {
    /// Checks the number of values, and that they fit together: each gateway is in the network of
    /// an address (except IPv6 link-local ones) and is no own address, no address is given twice,
    /// and the MTU suffices for the address families.
    pub fn check(&self) -> Result<(), SettingsError> {
        if self.dns.len() > MOST_DNS {
            return refuse("dns", format!("at most {MOST_DNS} servers"));
        }
        for server in &self.dns {
            check_other("dns", *server)?;
        }
        let Addressing::Static {
            addresses,
            gateways,
        } = &self.addressing
        else {
            // Routers may add IPv6.
            return self.check_mtu(true);
        };
        if addresses.is_empty() || addresses.len() > MOST_ADDRESSES {
            return refuse("address", format!("from 1 to {MOST_ADDRESSES} addresses"));
        }
        for (at, address) in addresses.iter().enumerate() {
            if addresses[..at].iter().any(|a| a.address == address.address) {
                return refuse("address", format!("{} is given twice", address.address));
            }
        }
        for family in [true, false] {
            if gateways.iter().filter(|g| g.is_ipv4() == family).count() > 1 {
                return refuse("gateway", "one for IPv4 and one for IPv6 at most");
            }
        }
        for gateway in gateways {
            check_other("gateway", *gateway)?;
            if addresses.iter().any(|a| a.address == *gateway) {
                let cause = format!("{gateway} is this machine's own address");
                return refuse("gateway", cause);
            }
            let is_link_local = matches!(gateway, IpAddr::V6(v6) if v6.is_unicast_link_local());
            if !is_link_local && !addresses.iter().any(|a| a.contains(*gateway)) {
                let cause = format!("{gateway} is in the network of no address; check the prefix");
                return refuse("gateway", cause);
            }
        }
        self.check_mtu(addresses.iter().any(|a| a.address.is_ipv6()))
    }

    fn check_mtu(&self, has_ipv6: bool) -> Result<(), SettingsError> {
        // The least of IPv6 (RFC 8200, section 5), and of IPv4 with a header of any length.
        let least = if has_ipv6 { 1280 } else { 576 };
        match self.mtu {
            Some(mtu) if !(least..=65_535).contains(&mtu) => {
                refuse("mtu", format!("{mtu} is not from {least} to 65535"))
            }
            _ => Ok(()),
        }
    }

    /// The text of the file for systemd-networkd. All values come from parsed types, so no value
    /// can add a line.
    pub fn file(&self, interface: &Interface) -> String {
        let mut text = format!(
            "# Written by `nacre appliance network set`.\n[Match]\nName={}\n",
            interface.name()
        );
        // Writing to a String does not fail.
        if let Some(mtu) = self.mtu {
            let _ = write!(text, "\n[Link]\nMTUBytes={mtu}\n");
        }
        text += "\n[Network]\nLLDP=yes\n";
        match &self.addressing {
            Addressing::Dhcp => text += "DHCP=yes\nIPv6AcceptRA=yes\n",
            Addressing::Static {
                addresses,
                gateways,
            } => {
                text += "DHCP=no\nIPv6AcceptRA=no\n";
                for address in addresses {
                    let _ = writeln!(text, "Address={address}");
                }
                for gateway in gateways {
                    let _ = writeln!(text, "Gateway={gateway}");
                }
            }
        }
        for server in &self.dns {
            let _ = writeln!(text, "DNS={server}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixed(addresses: &[&str], gateways: &[&str], dns: &[&str], mtu: Option<u32>) -> Settings {
        Settings {
            addressing: Addressing::Static {
                addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
                gateways: gateways.iter().map(|g| g.parse().unwrap()).collect(),
            },
            dns: dns.iter().map(|d| d.parse().unwrap()).collect(),
            mtu,
        }
    }

    #[test]
    fn values_are_checked() {
        for good in ["eth0", "enp0s31f6", "ens1f0np0", "bond0.100", "a_b-c"] {
            assert_eq!(good.parse::<Interface>().unwrap().name(), good);
        }
        for bad in [
            "",
            "lo",
            "..",
            ".a",
            "-a",
            "a/b",
            "a b",
            "a*",
            "a\n",
            "a;b",
            "é",
            "sixteen-letters0",
        ] {
            assert!(bad.parse::<Interface>().is_err(), "{bad:?}");
        }
        for good in [
            "192.0.2.7/24",
            "192.0.2.0/31",
            "10.0.0.1/8",
            "192.0.2.0/32",
            "2001:db8::7/64",
            "fe80::1/64",
        ] {
            good.parse::<HostAddress>().unwrap();
        }
        for bad in [
            "192.0.2.7",
            "192.0.2.7/",
            "192.0.2.7/0",
            "192.0.2.7/33",
            "192.0.2.7/+9",
            "192.0.2.0/24",
            "192.0.2.255/24",
            "0.0.0.0/8",
            "0.1.2.3/8",
            "127.0.0.1/8",
            "224.0.0.1/4",
            "255.255.255.255/32",
            "::/64",
            "::1/128",
            "ff02::1/64",
            "2001:db8::7/129",
            "x/24",
            "1.2.3/24",
            "192.0.2.7/24\nDHCP=yes",
        ] {
            assert!(bad.parse::<HostAddress>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn settings_agree_with_one_another() {
        let good = [
            fixed(&["192.0.2.7/24"], &[], &[], None),
            fixed(
                &["192.0.2.7/24", "2001:db8::7/64"],
                &["192.0.2.1", "2001:db8::1"],
                &["192.0.2.1"],
                Some(9000),
            ),
            fixed(&["2001:db8::7/64"], &["fe80::1"], &[], Some(1280)),
        ];
        for settings in good {
            assert_eq!(settings.check(), Ok(()));
        }
        for (settings, part) in [
            (fixed(&[], &[], &[], None), "from 1 to 8"),
            (fixed(&["192.0.2.7/24"; 2], &[], &[], None), "twice"),
            (
                fixed(&["192.0.2.7/24"], &["192.0.3.1"], &[], None),
                "network of no address",
            ),
            (
                fixed(&["192.0.2.7/24"], &["192.0.2.7"], &[], None),
                "own address",
            ),
            (
                fixed(&["192.0.2.7/24"], &["192.0.2.1", "192.0.2.2"], &[], None),
                "one for IPv4",
            ),
            (
                fixed(&["192.0.2.7/24"], &["fe00::1"], &[], None),
                "network of no address",
            ),
            (
                fixed(&["192.0.2.7/24"], &[], &["0.0.0.0"], None),
                "dns: 0.0.0.0",
            ),
            (
                fixed(&["192.0.2.7/24"], &[], &["192.0.2.1"; 4], None),
                "at most 3",
            ),
            (fixed(&["192.0.2.7/24"], &[], &[], Some(575)), "576"),
            (fixed(&["2001:db8::7/64"], &[], &[], Some(1279)), "1280"),
            (fixed(&["192.0.2.7/24"], &[], &[], Some(65_536)), "65535"),
        ] {
            let refused = settings.check().unwrap_err().to_string();
            assert!(refused.contains(part), "{refused}");
        }
    }

    #[test]
    fn the_text_for_networkd() {
        let interface = "eth0".parse().unwrap();
        let settings = fixed(
            &["192.0.2.7/24"],
            &["192.0.2.1"],
            &["192.0.2.2", "2001:db8::1"],
            Some(9000),
        );
        insta::assert_snapshot!(settings.file(&interface), @r"
        # Written by `nacre appliance network set`.
        [Match]
        Name=eth0

        [Link]
        MTUBytes=9000

        [Network]
        LLDP=yes
        DHCP=no
        IPv6AcceptRA=no
        Address=192.0.2.7/24
        Gateway=192.0.2.1
        DNS=192.0.2.2
        DNS=2001:db8::1
        ");
        let settings = Settings {
            addressing: Addressing::Dhcp,
            dns: Vec::new(),
            mtu: None,
        };
        insta::assert_snapshot!(settings.file(&interface), @r"
        # Written by `nacre appliance network set`.
        [Match]
        Name=eth0

        [Network]
        LLDP=yes
        DHCP=yes
        IPv6AcceptRA=yes
        ");
    }
}
