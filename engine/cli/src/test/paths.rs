//! The listeners of a subsystem, and this program's own connections to them.

use std::net::IpAddr;
use std::ops::RangeInclusive;

use clap::Args;
use nacre_engine_load::multipath::{Path, Shape};
use nacre_nvmf::address::{IpTransport, NVME_PORT};
use serde_json::Value;

use super::super::address::{ListenUrl, outward};
use super::super::remote::{Needs, OwnHost, RemoteArgs, usage};
use super::super::reply::{is_discovery, items, subsystems};
use super::super::{Failure, output};
use nacre_engine::methods::nvmf::listener::{GetSubsystemListeners, SubsystemListenersParams};
use nacre_engine_rpc::client::Client;
use nacre_engine_values::size::parse_bytes;

/// The range of the I/Os in flight of a test.
pub(super) const IN_FLIGHT: RangeInclusive<i64> = 1..=256;

/// The namespace of a test, and the start of the range in it.
#[derive(Debug, Clone, Args)]
pub(super) struct Place {
    /// Namespace, where there are several
    #[arg(long, value_name = "ID", value_parser = clap::value_parser!(u32).range(1..))]
    pub nsid: Option<u32>,
    /// Write patterns to the range and compare them: its data is lost
    #[arg(long)]
    pub overwrite: bool,
    /// Start of the range
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = parse_bytes)]
    pub offset: u64,
}

/// A listener of a subsystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TestedListener {
    pub url: ListenUrl,
    /// The distinct ANA states of its groups; empty if the subsystem does not report them.
    pub states: Vec<String>,
    pub withheld: bool,
}

impl TestedListener {
    pub(super) fn is_accessible(&self) -> bool {
        let is_one = |state: &String| matches!(state.as_str(), "optimized" | "non_optimized");
        !self.withheld && self.states.iter().all(is_one)
    }
}

/// Finds the subsystem by its NQN, by the name of a published volume or device, or by a listener
/// that no other subsystem has.
pub(super) fn subsystem(
    client: &mut Client,
    named: Option<&str>,
    listener: Option<&ListenUrl>,
) -> Result<String, Failure> {
    let all = subsystems(client, None)?;
    chosen(&all, named, listener).map_err(Failure::Usage)
}

fn chosen(
    all: &[Value],
    named: Option<&str>,
    listener: Option<&ListenUrl>,
) -> Result<String, String> {
    let nqn = |subsystem: &Value| output::cell(subsystem.get("nqn"));
    let fits = |subsystem: &&Value| match named {
        Some(name) => {
            nqn(subsystem) == name
                || items(&subsystem["namespaces"])
                    .iter()
                    .any(|namespace| namespace["bdev_name"] == name)
        }
        None => items(&subsystem["listen_addresses"])
            .iter()
            .any(|at| ListenUrl::from_value(at).as_ref() == listener),
    };
    let found: Vec<String> = all
        .iter()
        .filter(|subsystem| !is_discovery(subsystem))
        .filter(fits)
        .map(nqn)
        .collect();
    match (&found[..], named, listener) {
        ([only], _, _) => Ok(only.clone()),
        ([], Some(name), _) => Err(format!(
            "no subsystem or published volume \"{name}\": `nacre subsystem list` lists them"
        )),
        ([], None, Some(listener)) => Err(format!(
            "no subsystem listens on {listener}: `nacre listener list` lists them"
        )),
        ([], None, None) => Err("name a subsystem or a published volume".into()),
        (several, _, _) => Err(format!(
            "several subsystems: name one of {}",
            several.join(", ")
        )),
    }
}

pub(super) fn listeners(client: &mut Client, nqn: &str) -> Result<Vec<TestedListener>, Failure> {
    let params = SubsystemListenersParams {
        nqn: nqn.to_owned(),
        tgt_name: None,
    };
    let answer = client.call_for_json::<GetSubsystemListeners, _>(&params)?;
    Ok(items(&answer).iter().filter_map(listener).collect())
}

fn listener(value: &Value) -> Option<TestedListener> {
    let mut states: Vec<String> = items(&value["ana_states"])
        .iter()
        .map(|state| output::cell(state.get("ana_state")))
        .collect();
    states.sort();
    states.dedup();
    Some(TestedListener {
        url: ListenUrl::from_value(&value["address"])?,
        states,
        withheld: value["withheld"] == true,
    })
}

/// The URI of a listener for a host on this machine.
fn uri(url: &ListenUrl, nqn: &str) -> String {
    let mut url = url.clone();
    if url.ip.ip.is_unspecified() {
        let loopback: IpAddr = match url.ip.ip {
            IpAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        };
        url.ip.ip = match url.transport {
            IpTransport::Tcp => loopback,
            IpTransport::Rdma => outward(url.ip.ip).unwrap_or(loopback),
        };
    }
    format!("{url}/{nqn}")
}

/// Connects to the namespace over one listener.
/// Most bytes of an I/O.
const IO_MOST: u64 = 16 << 20;

/// Bytes of an I/O, from 1 to 16 MiB.
pub(super) fn io_bytes(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        bytes @ 1..=IO_MOST => Ok(bytes),
        _ => Err(format!("{text} is not from 1 byte to 16 MiB")),
    }
}

pub(super) fn open(
    listener: &TestedListener,
    nqn: &str,
    nsid: Option<u32>,
    shape: Shape,
    own: &OwnHost,
) -> Result<Path, Failure> {
    let target = RemoteArgs::of_path(uri(&listener.url, nqn), own)?.target(Needs {
        subnqn: None,
        port: NVME_PORT,
        entries: shape.depth + 2,
        memory: shape.memory(),
    })?;
    let session = target.connect()?;
    let name = listener.url.to_string();
    Path::open(name, session, &target.connector, nsid, shape).map_err(usage_or_failed)
}

/// The failure of a path or of several.
pub(super) fn usage_or_failed(error: nacre_engine_load::multipath::MountError) -> Failure {
    use nacre_engine_load::PerfError;
    use nacre_engine_load::multipath::MountError;
    match error {
        MountError::Path(
            error @ (PerfError::Job(_)
            | PerfError::SeveralNamespaces { .. }
            | PerfError::NoNamespace { .. }),
        ) => usage(error),
        error => Failure::Failed(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn subsystems() -> Vec<Value> {
        let at = |port: &str| json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "192.0.2.1", "trsvcid": port });
        vec![
            json!({ "nqn": "nqn.d", "subtype": "Discovery", "listen_addresses": [at("4420")] }),
            json!({
                "nqn": "nqn.a", "subtype": "NVMe", "listen_addresses": [at("4420"), at("4421")],
                "namespaces": [{ "nsid": 1, "bdev_name": "vol0" }],
            }),
            json!({ "nqn": "nqn.b", "subtype": "NVMe", "listen_addresses": [at("4420")], "namespaces": [] }),
        ]
    }

    /// Goal: a subsystem is found by NQN, by its volume, and by a listener of its own.
    #[test]
    fn subsystems_are_found() {
        let all = subsystems();
        let url = |text: &str| text.parse::<ListenUrl>().unwrap();
        let find = |named, listener: Option<&str>| chosen(&all, named, listener.map(url).as_ref());
        assert_eq!(find(Some("nqn.b"), None).unwrap(), "nqn.b");
        assert_eq!(find(Some("vol0"), None).unwrap(), "nqn.a");
        assert_eq!(find(None, Some("192.0.2.1:4421")).unwrap(), "nqn.a");
        let several = find(None, Some("192.0.2.1")).unwrap_err();
        assert!(several.ends_with("nqn.a, nqn.b"), "{several}");
        for (named, listener) in [(Some("x"), None), (None, Some("192.0.2.9")), (None, None)] {
            assert!(find(named, listener).is_err());
        }
    }

    /// Goal: states of listeners are read, and a wildcard listener is reached on this machine.
    #[test]
    fn listeners_are_paths() {
        let value = json!({
            "address": { "trtype": "RDMA", "adrfam": "IPv4", "traddr": "192.0.2.1", "trsvcid": "4420" },
            "ana_states": [{ "ana_group": 1, "ana_state": "optimized" }, { "ana_group": 2, "ana_state": "optimized" }],
        });
        let mut found = listener(&value).unwrap();
        assert_eq!(found.states, ["optimized"]);
        assert!(found.is_accessible());
        found.states.push("inaccessible".into());
        assert!(!found.is_accessible());
        let of = |text: &str| uri(&text.parse().unwrap(), "nqn.a");
        assert_eq!(of("tcp://0.0.0.0:1"), "tcp://127.0.0.1:1/nqn.a");
        assert_eq!(of("tcp://[::]:1"), "tcp://[::1]:1/nqn.a");
        assert_eq!(of("rdma://192.0.2.1"), "rdma://192.0.2.1:4420/nqn.a");
    }
}
