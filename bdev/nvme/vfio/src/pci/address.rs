//! PCI addresses (`0000:5e:00.0`): parsed from text and written as the kernel writes them.

use std::fmt;
use std::str::FromStr;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The address of a PCI function: domain, bus, device, function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// The text is not a PCI address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is no PCI address: they are written 0000:5e:00.0 or 5e:00.0")]
pub struct AddressError(String);

impl FromStr for Address {
    type Err = AddressError;

    /// Parses an address in the kernel's format. The domain may be omitted for domain 0. Dots may
    /// separate all parts (`0000.5e.00.0`), as in SPDK.
    fn from_str(text: &str) -> Result<Self, AddressError> {
        let parse = || {
            let (rest, function) = text.rsplit_once('.')?;
            let mut parts = rest.rsplit([':', '.']);
            let device = parts.next()?;
            let bus = parts.next()?;
            let domain = parts.next().unwrap_or("0");
            if parts.next().is_some() {
                return None;
            }
            let hex = |text: &str, longest: usize| {
                let digits = text.bytes().all(|byte| byte.is_ascii_hexdigit());
                (digits && (1..=longest).contains(&text.len()))
                    .then(|| u32::from_str_radix(text, 16).ok())
                    .flatten()
            };
            let address = Self {
                domain: hex(domain, 8)?,
                bus: hex(bus, 2)? as u8,
                device: hex(device, 2)? as u8,
                function: hex(function, 1)? as u8,
            };
            (address.device < 32 && address.function < 8).then_some(address)
        };
        parse().ok_or_else(|| AddressError(text.to_owned()))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            domain,
            bus,
            device,
            function,
        } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

impl Serialize for Address {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'a> Deserialize<'a> for Address {
    fn deserialize<D: Deserializer<'a>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_in_every_spelling_and_written_in_one() {
        for (text, wanted) in [
            ("0000:5e:00.0", "0000:5e:00.0"),
            ("5e:00.0", "0000:5e:00.0"),
            ("5E:1f.7", "0000:5e:1f.7"),
            ("10000:01:00.0", "10000:01:00.0"),
            ("0000.5e.00.0", "0000:5e:00.0"),
            ("0:3:0.1", "0000:03:00.1"),
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), wanted);
            let read: Address = serde_json::from_value(text.into()).unwrap();
            assert_eq!(serde_json::to_value(read).unwrap(), wanted);
        }
        for text in [
            "",
            "5e",
            "5e:00",
            "5e:20.0",
            "5e:00.8",
            "x:00.0",
            "0:0:0:0.0",
            "+5e:00.0",
            "123456789:00:00.0",
            "nvme0",
        ] {
            assert!(text.parse::<Address>().is_err(), "{text}");
            assert!(serde_json::from_value::<Address>(text.into()).is_err());
        }
    }
}
