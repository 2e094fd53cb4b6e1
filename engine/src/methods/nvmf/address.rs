//! Transport addresses in SPDK's JSON form: `trtype`, `adrfam`, `traddr`, `trsvcid`.

use std::net::SocketAddr;

use nacre_nvmf::address::{IpTransport, adrfam};
use nacre_nvmf::transport::{Address, TransportType};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::rpc::RpcError;
use crate::values::address::{AddressError, ScopedIp};

/// An address in the parameters of a call.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TransportAddress {
    /// `TCP` or `RDMA`, in any case.
    pub trtype: String,
    /// `IPv4` or `IPv6`; derived from the address when left out.
    pub adrfam: Option<String>,
    /// An IP address.
    pub traddr: String,
    /// A port number.
    pub trsvcid: Option<String>,
}

/// An address in replies and in journal records.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AddressReply {
    pub trtype: String,
    pub adrfam: String,
    pub traddr: String,
    pub trsvcid: String,
}

impl AddressReply {
    pub(super) fn new(kind: TransportType, address: &Address) -> Self {
        let (adrfam, traddr, trsvcid) = match address {
            Address::Ip(socket) => {
                let ip = ScopedIp::from(socket);
                (adrfam(ip.ip), ip.to_string(), socket.port().to_string())
            }
            Address::Loopback(name) => ("intra_host", name.clone(), String::new()),
        };
        Self {
            trtype: kind.to_string(),
            adrfam: adrfam.to_owned(),
            traddr,
            trsvcid,
        }
    }
}

impl TransportAddress {
    /// Resolves the address. `at` names the parameter that holds it, for error messages.
    pub fn parse(&self, at: &str) -> Result<(TransportType, SocketAddr), RpcError> {
        let (kind, ip, port) = self.read(at)?;
        let address = ip.socket(port).map_err(|error| {
            RpcError::invalid_params(error.to_string()).field(format!("{at}.traddr"))
        })?;
        Ok((kind, address))
    }

    /// As [`TransportAddress::parse`], but does not resolve the interface, which may be gone.
    pub fn read(&self, at: &str) -> Result<(TransportType, ScopedIp, u16), RpcError> {
        let transport: IpTransport = self.trtype.parse().map_err(|_| {
            let cause = format!("\"{}\" is not a transport type known here", self.trtype);
            RpcError::invalid_params(cause)
                .field(format!("{at}.trtype"))
                .remedy("use TCP or RDMA")
        })?;
        let kind = TransportType::from(transport);
        let refused = |error: AddressError| match error {
            AddressError::Name { .. } => {
                RpcError::invalid_params(format!("\"{}\" is not an IP address", self.traddr))
                    .field(format!("{at}.traddr"))
                    .remedy(
                        "give an address such as 192.0.2.1 or 2001:db8::1; names are not looked up",
                    )
            }
            other => RpcError::invalid_params(other.to_string()).field(format!("{at}.traddr")),
        };
        let ip: ScopedIp = self.traddr.parse().map_err(refused)?;
        let family = self.adrfam.as_deref().map(str::to_ascii_lowercase);
        let fits = match family.as_deref() {
            None => true,
            Some("ipv4") => ip.ip.is_ipv4(),
            // IPv4-mapped addresses are written as IPv6.
            Some("ipv6") => self.traddr.contains(':'),
            Some(_) => false,
        };
        if !fits {
            return Err(RpcError::invalid_params(format!(
                "{} is not of the family of {ip}",
                self.adrfam.as_deref().unwrap_or_default()
            ))
            .field(format!("{at}.adrfam"))
            .remedy("leave adrfam out"));
        }
        let Some(port) = &self.trsvcid else {
            return Err(RpcError::invalid_params(format!("{kind} needs a port"))
                .field(format!("{at}.trsvcid"))
                .remedy("add it; 4420 is usual, 8009 for discovery"));
        };
        let port: u16 = port.parse().map_err(|_| {
            RpcError::invalid_params(format!("\"{port}\" is not a port from 0 to 65535"))
                .field(format!("{at}.trsvcid"))
        })?;
        Ok((kind, ip, port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(
        trtype: &str,
        adrfam: Option<&str>,
        traddr: &str,
        trsvcid: Option<&str>,
    ) -> TransportAddress {
        TransportAddress {
            trtype: trtype.into(),
            adrfam: adrfam.map(Into::into),
            traddr: traddr.into(),
            trsvcid: trsvcid.map(Into::into),
        }
    }

    #[test]
    fn valid_addresses_round_trip() {
        for (address, socket, family) in [
            (
                parameters("tcp", None, "192.0.2.1", Some("4420")),
                "192.0.2.1:4420",
                "IPv4",
            ),
            (
                parameters("TCP", Some("ipv4"), "0.0.0.0", Some("0")),
                "0.0.0.0:0",
                "IPv4",
            ),
            (
                parameters("TCP", Some("IPv6"), "2001:db8::1", Some("8009")),
                "[2001:db8::1]:8009",
                "IPv6",
            ),
            (
                parameters("rdma", None, "::ffff:192.0.2.1", Some("1")),
                "192.0.2.1:1",
                "IPv4",
            ),
            (
                parameters("TCP", Some("IPv6"), "::ffff:192.0.2.1", Some("1")),
                "192.0.2.1:1",
                "IPv4",
            ),
            (
                parameters("TCP", Some("IPv6"), "fe80::1%lo", Some("1")),
                "[fe80::1%1]:1",
                "IPv6",
            ),
        ] {
            let (kind, parsed) = address.parse("x").unwrap();
            assert_eq!(parsed.to_string(), socket);
            let again = parameters(
                "TCP",
                None,
                &AddressReply::new(kind, &Address::Ip(parsed)).traddr,
                Some("1"),
            );
            assert_eq!(again.parse("x").unwrap().1.ip(), parsed.ip());
            let reply = AddressReply::new(kind, &Address::Ip(parsed));
            assert_eq!(
                (reply.adrfam.as_str(), reply.trtype.as_str()),
                (family, address.trtype.to_ascii_uppercase().as_str())
            );
        }
    }

    #[test]
    fn errors_name_the_bad_field() {
        for (address, field) in [
            (parameters("FC", None, "192.0.2.1", Some("1")), "a.trtype"),
            (
                parameters("TCP", None, "host.example", Some("1")),
                "a.traddr",
            ),
            (
                parameters("TCP", Some("ipv6"), "192.0.2.1", Some("1")),
                "a.adrfam",
            ),
            (
                parameters("TCP", Some("ib"), "192.0.2.1", Some("1")),
                "a.adrfam",
            ),
            (parameters("TCP", None, "fe80::1", Some("1")), "a.traddr"),
            (
                parameters("TCP", None, "fe80::1%eth99", Some("1")),
                "a.traddr",
            ),
            (parameters("TCP", None, "192.0.2.1", None), "a.trsvcid"),
            (
                parameters("TCP", None, "192.0.2.1", Some("65536")),
                "a.trsvcid",
            ),
        ] {
            let error = address.parse("a").unwrap_err();
            assert_eq!(
                (error.code, error.data.unwrap().field.as_deref()),
                (-32602, Some(field))
            );
        }
    }
}
