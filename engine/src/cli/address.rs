//! The address of a listener: `tcp://127.0.0.1:4420` for people, SPDK's `listen_address` in calls,
//! and the `nvme connect` line of a Linux host.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::str::FromStr;

use nacre_nvmf_wire::Nqn;
use serde_json::{Value, json};

use crate::initiator::{Choice, Remote, RemoteError};
use crate::values::address::{
    AddressError, NVME_PORT, ScopedIp, Written, is_link_local, resolve, shown, with_port,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenAddress {
    /// `TCP`, as in calls.
    pub trtype: String,
    pub ip: ScopedIp,
    pub port: u16,
}

impl FromStr for ListenAddress {
    type Err = AddressError;

    /// A URL, or only ADDRESS[:PORT]: TCP and port 4420 unless given.
    fn from_str(text: &str) -> Result<ListenAddress, AddressError> {
        const FORM: &str =
            "tcp://ADDRESS[:PORT] or rdma://ADDRESS[:PORT], with an IPv6 address in brackets";
        let written = Written::bare(text, FORM)?;
        let trtype = written.scheme.unwrap_or("tcp").to_ascii_uppercase();
        if !["TCP", "RDMA"].contains(&trtype.as_str()) {
            return Err(AddressError::Transport {
                found: written.scheme.unwrap_or_default().to_owned(),
                allowed: "tcp or rdma",
            });
        }
        // The daemon knows the interfaces that it can use; a name is looked up here.
        let ip = match written.ip() {
            Err(AddressError::Name { host }) => ScopedIp::from(&resolve(&host, 0)?),
            read => read?,
        };
        Ok(ListenAddress {
            trtype,
            ip,
            port: written.port.unwrap_or(NVME_PORT),
        })
    }
}

/// The target of a command that does not need a transport.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetAddress {
    pub scheme: Option<Choice>,
    pub socket: SocketAddr,
    pub nqn: Option<Nqn>,
}

impl FromStr for TargetAddress {
    type Err = RemoteError;

    fn from_str(text: &str) -> Result<TargetAddress, RemoteError> {
        let remote: Remote = text.parse()?;
        let address = remote.resolve(NVME_PORT)?;
        Ok(TargetAddress {
            scheme: remote.kind,
            socket: address,
            nqn: remote.subnqn,
        })
    }
}

impl TargetAddress {
    pub fn ip(&self) -> IpAddr {
        self.socket.ip()
    }

    pub fn port(&self) -> u16 {
        self.socket.port()
    }

    /// In nvme-cli's format.
    pub fn traddr(&self) -> String {
        ScopedIp::from(&self.socket).to_string()
    }
}

impl fmt::Display for TargetAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shown(&self.socket))
    }
}

impl ListenAddress {
    /// From a reply; none for a kind without an IP address.
    pub fn from_value(value: &Value) -> Option<ListenAddress> {
        let text = |key: &str| value[key].as_str();
        Some(ListenAddress {
            trtype: text("trtype")?.to_uppercase(),
            ip: text("traddr")?.parse().ok()?,
            port: text("trsvcid")?.parse().ok()?,
        })
    }

    pub fn params(&self) -> Value {
        json!({
            "trtype": self.trtype,
            "adrfam": if self.ip.ip.is_ipv4() { "IPv4" } else { "IPv6" },
            "traddr": self.ip.to_string(),
            "trsvcid": self.port.to_string(),
        })
    }

    /// The command for a Linux host.
    pub fn connect_line(&self, nqn: &str) -> String {
        let address = match self.ip.ip.is_unspecified() {
            // The host has an interface of another name on that link.
            false if is_link_local(self.ip.ip) => format!("{}%INTERFACE", self.ip.ip),
            false => self.ip.to_string(),
            true => match outward(self.ip.ip) {
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

/// This machine's most likely address for others: the source address that it would send from.
/// Connecting a datagram socket chooses it and sends nothing; the destination is an address for
/// examples (RFC 5737, RFC 3849).
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
            with_port(&self.ip, self.port)
        )
    }
}

/// Any address of a reply as text, also one that this program could not have written.
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
            ("tcp://[fe80::1%eth7]:1", "tcp://[fe80::1%eth7]:1"),
            ("fe80::1%eth7", "tcp://[fe80::1%eth7]:4420"),
            ("[::ffff:192.0.2.1]", "tcp://192.0.2.1:4420"),
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
            "fe80::1",
            "192.0.2.1%eth0",
            "tcp://127.0.0.1/nqn.2025-01.io.nacre:v",
        ] {
            assert!(bad.parse::<ListenAddress>().is_err(), "{bad}");
        }
    }

    /// What nvme-cli is given has the interface, without which it connects nowhere.
    #[test]
    fn targets_keep_their_interface() {
        let target: TargetAddress = "[fe80::1%lo]:1".parse().unwrap();
        assert_eq!(target.traddr(), "fe80::1%lo");
        assert_eq!(target.to_string(), "[fe80::1%lo]:1");
        let error = "fe80::1".parse::<TargetAddress>().unwrap_err();
        assert!(error.to_string().contains("name the interface"), "{error}");
        let listens: ListenAddress = "fe80::1%eth7".parse().unwrap();
        let line = listens.connect_line("nqn.2025-01.io.nacre:v");
        assert!(line.contains("-a fe80::1%INTERFACE -s"), "{line}");
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
    fn hosts_get_an_address_that_they_can_reach() {
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
