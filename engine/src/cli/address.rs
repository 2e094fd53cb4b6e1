//! Where a subsystem listens: `tcp://127.0.0.1:4420` in words, SPDK's `listen_address` in calls, and
//! the `nvme connect` line of a Linux host.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::str::FromStr;

use serde_json::{Value, json};

/// The port of NVMe/TCP and NVMe/RDMA controllers (registered with IANA).
const DEFAULT_PORT: u16 = 4420;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenAddress {
    /// `TCP`, as in calls.
    pub trtype: String,
    pub ip: IpAddr,
    pub port: u16,
}

#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    #[error(
        "\"{text}\" is not an address: write tcp://ADDRESS[:PORT], with an IPv6 address in brackets"
    )]
    Form { text: String },
    #[error("\"{found}\" is no transport of this command: tcp and rdma are")]
    Transport { found: String },
    #[error("port 0 is none: 4420 is usual")]
    Port,
    #[error("no address of \"{host}\" is known: {source}")]
    Resolve {
        host: String,
        source: std::io::Error,
    },
}

impl FromStr for ListenAddress {
    type Err = AddressError;

    /// A URL, or only ADDRESS[:PORT]: TCP and port 4420 unless told otherwise.
    fn from_str(text: &str) -> Result<ListenAddress, AddressError> {
        let (scheme, authority) = text.split_once("://").unwrap_or(("tcp", text));
        let trtype = scheme.to_ascii_uppercase();
        if !["TCP", "RDMA"].contains(&trtype.as_str()) {
            return Err(AddressError::Transport {
                found: scheme.to_owned(),
            });
        }
        let address = socket_address(authority, text)?;
        match address.port() {
            0 => Err(AddressError::Port),
            port => Ok(ListenAddress {
                trtype,
                ip: address.ip(),
                port,
            }),
        }
    }
}

/// `192.0.2.1:4420`, `192.0.2.1`, `[::1]:4420`, `[::1]`, `::1`, or a name in place of the address.
fn socket_address(authority: &str, text: &str) -> Result<SocketAddr, AddressError> {
    let form = || AddressError::Form {
        text: text.to_owned(),
    };
    if let Ok(address) = authority.parse() {
        return Ok(address);
    }
    let bare = authority
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .unwrap_or(authority);
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, DEFAULT_PORT));
    }
    let (host, port) = match authority.split_once(':') {
        Some((host, port)) => (host, port.parse().map_err(|_| form())?),
        None => (authority, DEFAULT_PORT),
    };
    if host.is_empty()
        || !host
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || ".-_".contains(c))
    {
        return Err(form());
    }
    let resolve = |source| AddressError::Resolve {
        host: host.to_owned(),
        source,
    };
    let mut found = (host, port).to_socket_addrs().map_err(resolve)?;
    found
        .next()
        .ok_or_else(|| resolve(std::io::ErrorKind::NotFound.into()))
}

impl ListenAddress {
    /// From an answer; none if it is of a kind that has no IP address.
    pub fn from_value(value: &Value) -> Option<ListenAddress> {
        let text = |key: &str| value[key].as_str();
        Some(ListenAddress {
            trtype: text("trtype")?.to_uppercase(),
            ip: text("traddr")?.trim_matches(['[', ']']).parse().ok()?,
            port: text("trsvcid")?.parse().ok()?,
        })
    }

    pub fn params(&self) -> Value {
        json!({
            "trtype": self.trtype,
            "adrfam": if self.ip.is_ipv4() { "IPv4" } else { "IPv6" },
            "traddr": self.ip.to_string(),
            "trsvcid": self.port.to_string(),
        })
    }

    /// What to type on a Linux host.
    pub fn connect_line(&self, nqn: &str) -> String {
        let address = match self.ip.is_unspecified() {
            false => self.ip.to_string(),
            true => match outward(self.ip) {
                Some(ip) => ip.to_string(),
                None => "ADDRESS-OF-THIS-MACHINE".into(),
            },
        };
        let trtype = self.trtype.to_lowercase();
        format!(
            "nvme connect -t {trtype} -a {address} -s {} -n {nqn}",
            self.port
        )
    }
}

/// The address of this machine that others see most likely: the one it would send from. Connecting
/// a datagram socket chooses it and sends nothing; the address asked about is one for examples
/// (RFC 5737, RFC 3849).
fn outward(any: IpAddr) -> Option<IpAddr> {
    let example: IpAddr = match any {
        IpAddr::V4(_) => Ipv4Addr::new(192, 0, 2, 1).into(),
        IpAddr::V6(_) => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
    };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).ok()?;
    socket.connect(SocketAddr::new(example, 9)).ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_unspecified()).then_some(ip)
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}://{}",
            self.trtype.to_lowercase(),
            SocketAddr::new(self.ip, self.port)
        )
    }
}

/// Any address of an answer in words, also one that this program could not have written.
pub fn describe(value: &Value) -> String {
    match ListenAddress::from_value(value) {
        Some(address) => address.to_string(),
        None => {
            let text = |key: &str| value[key].as_str().unwrap_or_default();
            let service = text("trsvcid");
            let colon = if service.is_empty() { "" } else { ":" };
            format!(
                "{}://{}{colon}{service}",
                text("trtype").to_lowercase(),
                text("traddr")
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_in_words_and_calls() {
        for (text, shown) in [
            ("tcp://127.0.0.1:4420", "tcp://127.0.0.1:4420"),
            ("TCP://127.0.0.1", "tcp://127.0.0.1:4420"),
            ("127.0.0.1:1234", "tcp://127.0.0.1:1234"),
            ("[::1]:8009", "tcp://[::1]:8009"),
            ("::1", "tcp://[::1]:4420"),
            ("rdma://192.0.2.1", "rdma://192.0.2.1:4420"),
        ] {
            let address: ListenAddress = text.parse().unwrap();
            assert_eq!(address.to_string(), shown);
            assert_eq!(ListenAddress::from_value(&address.params()), Some(address));
        }
        assert_eq!(
            "[::1]".parse::<ListenAddress>().unwrap().params(),
            json!({ "trtype": "TCP", "adrfam": "IPv6", "traddr": "::1", "trsvcid": "4420" })
        );
        for bad in [
            "",
            "tcp://",
            "fc://127.0.0.1",
            "127.0.0.1:0",
            "127.0.0.1:x",
            "[::1",
            "::1]:1",
            "tcp://127.0.0.1/nqn.2025-01.io.nacre:v",
        ] {
            assert!(bad.parse::<ListenAddress>().is_err(), "{bad}");
        }
    }

    #[test]
    fn addresses_of_other_kinds_are_shown_too() {
        let pipe = json!({ "trtype": "VFIOUSER", "traddr": "/var/run/vfio", "trsvcid": "" });
        assert_eq!(describe(&pipe), "vfiouser:///var/run/vfio");
        let rdma =
            json!({ "trtype": "RDMA", "adrfam": "IPv4", "traddr": "192.0.2.7", "trsvcid": "4420" });
        assert_eq!(describe(&rdma), "rdma://192.0.2.7:4420");
    }

    #[test]
    fn hosts_are_told_an_address_that_they_can_reach() {
        let listens: ListenAddress = "127.0.0.1:4420".parse().unwrap();
        let nqn = "nqn.2025-01.io.nacre:v";
        assert_eq!(
            listens.connect_line(nqn),
            format!("nvme connect -t tcp -a 127.0.0.1 -s 4420 -n {nqn}")
        );
        let everywhere: ListenAddress = "0.0.0.0".parse().unwrap();
        assert!(!everywhere.connect_line(nqn).contains(" 0.0.0.0 "));
    }
}
