//! The address of a listener: its URL (`tcp://127.0.0.1:4420`), SPDK's `listen_address`, and the
//! `nvme connect` command for a Linux host.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::str::FromStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser, ValueParser};
use nacre_nvmf::address::{
    Endpoint, Fallback, Grammar, IpTransport, NVME_PORT, Scheme, TransportChoice, adrfam,
};
use serde_json::Value;

use super::Failure;
use nacre_engine::methods::nvmf::address::TransportAddress;
use nacre_engine_values::address::{
    AddressError, ScopedIp, is_link_local, resolve, shown, socket_of, with_port,
};

/// The values of an option that chooses a transport.
pub(crate) fn transport_choice() -> ValueParser {
    let words = PossibleValuesParser::new([
        PossibleValue::new("auto").help("RDMA if the route to the target has it, else TCP"),
        PossibleValue::new("rdma"),
        PossibleValue::new("tcp"),
    ]);
    ValueParser::new(words.try_map(|word| word.parse::<TransportChoice>()))
}

/// The values of an option that chooses the transport to use while RDMA fails.
pub(crate) fn fallback() -> ValueParser {
    let words = PossibleValuesParser::new(["tcp", "none"]);
    ValueParser::new(words.try_map(|word| word.parse::<Fallback>()))
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListenUrl {
    pub transport: IpTransport,
    pub ip: ScopedIp,
    pub port: u16,
}

impl FromStr for ListenUrl {
    type Err = AddressError;

    /// A URL, or only ADDRESS[:PORT]: TCP and port 4420 unless given.
    fn from_str(text: &str) -> Result<Self, AddressError> {
        let endpoint = Grammar::LISTENER.parse(text)?;
        // The daemon knows the interfaces that it can use; a name is looked up here.
        let ip = match endpoint.host.parse() {
            Err(AddressError::Name { host }) => ScopedIp::from(&resolve(&host, 0)?),
            read => read?,
        };
        Ok(Self {
            transport: match endpoint.scheme {
                Some(Scheme::Rdma) => IpTransport::Rdma,
                _ => IpTransport::Tcp,
            },
            ip,
            port: endpoint.port.unwrap_or(NVME_PORT),
        })
    }
}

/// The host NQN that --hostnqn or the URI names.
pub(crate) fn hostnqn(
    option: Option<&str>,
    endpoint: &Endpoint,
) -> Result<Option<String>, Failure> {
    match (option, &endpoint.hostnqn) {
        (Some(option), Some(named)) if option != named.as_str() => Err(Failure::Usage(format!(
            "the URI names the host {named} and --hostnqn names {option}: leave one of them out"
        ))),
        (Some(option), _) => Ok(Some(option.to_owned())),
        (None, named) => Ok(named.as_ref().map(ToString::to_string)),
    }
}

/// The target of a command, looked up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TargetAddress {
    pub endpoint: Endpoint,
    pub socket: SocketAddr,
}

impl FromStr for TargetAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let endpoint = Grammar::CONTROLLER.parse(text)?;
        let socket = socket_of(&endpoint, NVME_PORT)?;
        Ok(Self { endpoint, socket })
    }
}

impl TargetAddress {
    pub(crate) fn ip(&self) -> IpAddr {
        self.socket.ip()
    }

    pub(crate) fn port(&self) -> u16 {
        self.socket.port()
    }

    /// The fallback that the scheme names.
    pub(crate) fn fallback(&self) -> Option<Fallback> {
        self.endpoint.scheme.and_then(Scheme::fallback)
    }

    /// Returns the IP address in nvme-cli's format (`traddr`).
    pub(crate) fn traddr(&self) -> String {
        self.scoped_ip().to_string()
    }

    pub(crate) fn scoped_ip(&self) -> ScopedIp {
        ScopedIp::from(&self.socket)
    }
}

impl fmt::Display for TargetAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shown(&self.socket))
    }
}

impl ListenUrl {
    /// Parses the listener of a reply. Returns `None` for a transport without an IP address.
    pub(crate) fn from_value(value: &Value) -> Option<Self> {
        let text = |key: &str| value[key].as_str();
        Some(Self {
            transport: text("trtype")?.parse().ok()?,
            ip: text("traddr")?.parse().ok()?,
            port: text("trsvcid")?.parse().ok()?,
        })
    }

    pub(crate) fn params(&self) -> TransportAddress {
        TransportAddress {
            trtype: self.transport.trtype().to_owned(),
            adrfam: Some(adrfam(self.ip.ip).to_owned()),
            traddr: self.ip.to_string(),
            trsvcid: Some(self.port.to_string()),
        }
    }

    /// The command for a Linux host.
    pub(crate) fn connect_line(&self, nqn: &str) -> String {
        let address = match self.ip.ip.is_unspecified() {
            // The host has an interface of another name on that link.
            false if is_link_local(self.ip.ip) => format!("{}%INTERFACE", self.ip.ip),
            false => self.ip.to_string(),
            true => match outward(self.ip.ip) {
                Some(ip) => ip.to_string(),
                None => "ADDRESS-OF-THIS-MACHINE".into(),
            },
        };
        let (transport, port) = (self.transport.word(), self.port);
        format!("nvme connect -t {transport} -a {address} -s {port} -n {nqn}")
    }
}

/// This machine's most likely address for others: the source address that it would send from.
/// Connecting a datagram socket chooses it and sends nothing; the destination is an address for
/// examples (RFC 5737, RFC 3849).
pub(super) fn outward(any: IpAddr) -> Option<IpAddr> {
    let example: IpAddr = match any {
        IpAddr::V4(_) => Ipv4Addr::new(192, 0, 2, 1).into(),
        IpAddr::V6(_) => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
    };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).ok()?;
    socket.connect(SocketAddr::new(example, 9)).ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_unspecified()).then_some(ip)
}

impl fmt::Display for ListenUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}://{}",
            self.transport.word(),
            with_port(&self.ip, self.port)
        )
    }
}

/// Any address of a reply as text, also one that this program could not have written.
pub(crate) fn describe(value: &Value) -> String {
    match ListenUrl::from_value(value) {
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
    use serde_json::json;

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
            let address: ListenUrl = text.parse().unwrap();
            assert_eq!(address.to_string(), shown);
            assert_eq!(
                ListenUrl::from_value(&json!(address.params())),
                Some(address)
            );
        }
        assert_eq!(
            json!("[::1]".parse::<ListenUrl>().unwrap().params()),
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
            assert!(bad.parse::<ListenUrl>().is_err(), "{bad}");
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
        let listens: ListenUrl = "fe80::1%eth7".parse().unwrap();
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
        let listens: ListenUrl = "127.0.0.1:4420".parse().unwrap();
        let nqn = "nqn.2025-01.io.nacre:v";
        assert_eq!(
            listens.connect_line(nqn),
            format!("nvme connect -t tcp -a 127.0.0.1 -s 4420 -n {nqn}")
        );
        let everywhere: ListenUrl = "0.0.0.0".parse().unwrap();
        assert!(!everywhere.connect_line(nqn).contains(" 0.0.0.0 "));
    }
}
