//! What the configuration file declares ([[bdev]], [[nvmf.listener]], [[nvmf.subsystem]]), made by
//! the same calls that anybody would make. Its home is the file: nothing of it is stored.
//!
//! What the store already has under the same name is left as it is: it was changed by RPC since.
//! What cannot be made now is told, does not stop the rest, and is tried again.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::rc::Rc;

use serde_json::{Value, json};
use tracing::{info, warn};
use uuid::Uuid;

use crate::config::settings::{Bdev, BdevKind, Listener, RdmaWish, Subsystem, Transport};
use crate::config::{ConfigError, Problem, Settings};
use crate::engine::Engine;
use crate::rpc::RpcError;

/// Identities of declared devices are made from their names under this one, so that they are the
/// same at every start and on every machine with the same file.
const IDENTITIES: Uuid = Uuid::from_u128(0x0b5c_4a0e_7d1f_4c6a_9a52_6e61_6372_6500);

/// Bytes per block of malloc and null devices that name none.
const DEFAULT_BLOCK: u32 = 512;

/// One call that makes a part of what is declared.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// For messages: `[[bdev]] "disk0"`.
    pub what: String,
    pub method: &'static str,
    pub params: Value,
}

#[derive(Debug)]
struct Planned {
    call: Call,
    made: bool,
    refused: Option<RpcError>,
}

#[derive(Debug, Default)]
pub struct Declared {
    calls: RefCell<Vec<Planned>>,
}

impl Declared {
    /// Decides the calls. Fails where waiting would not help.
    pub fn plan(&self, settings: &Settings) -> Result<(), ConfigError> {
        let calls = calls(settings, &interfaces())?;
        let planned = calls.into_iter().map(|call| Planned {
            call,
            made: false,
            refused: None,
        });
        *self.calls.borrow_mut() = planned.collect();
        Ok(())
    }

    /// Makes what is not made yet, in order.
    pub async fn make(&self, on: &Rc<Engine>) {
        let waiting: Vec<(usize, Call)> = {
            let calls = self.calls.borrow();
            calls
                .iter()
                .enumerate()
                .filter(|(_, p)| !p.made)
                .map(|(at, p)| (at, p.call.clone()))
                .collect()
        };
        for (at, call) in waiting {
            let outcome = match stored_already(on, &call) {
                true => {
                    info!("{}: what was configured by RPC stands", call.what);
                    Ok(())
                }
                false => on.declared_call(call.method, &call.params).await.map(drop),
            };
            let mut calls = self.calls.borrow_mut();
            let planned = &mut calls[at];
            match outcome {
                Ok(()) => {
                    if planned.refused.take().is_some() {
                        info!("{}: made at last", call.what);
                    }
                    planned.made = true;
                }
                Err(error) => {
                    if planned.refused.is_none() {
                        warn!(%error, "{}: not made; it is tried again", call.what);
                    }
                    planned.refused = Some(error);
                }
            }
        }
    }

    /// What could not be made, and why.
    pub fn missing(&self) -> Vec<(Call, RpcError)> {
        let calls = self.calls.borrow();
        calls
            .iter()
            .filter_map(|p| Some((p.call.clone(), p.refused.clone()?)))
            .collect()
    }
}

/// Whether the store has the object that the call would make.
fn stored_already(on: &Engine, call: &Call) -> bool {
    let entries = on.journal.entries();
    let durable = entries.iter().filter(|e| e.durable);
    let same = |field: &str, params: &Value| {
        params.get(field).is_some() && params.get(field) == call.params.get(field)
    };
    match call.method {
        "nvmf_create_transport" => entries
            .iter()
            .any(|e| e.record.method == call.method && same("trtype", &e.record.params)),
        "nvmf_create_subsystem" => durable
            .clone()
            .any(|e| e.record.method == call.method && same("nqn", &e.record.params)),
        method if method.starts_with("bdev_") => durable
            .clone()
            .any(|e| e.record.key.starts_with("bdev/") && same("name", &e.record.params)),
        // Parts of a subsystem that was configured by RPC are the business of RPC.
        _ => durable
            .clone()
            .any(|e| e.record.method == "nvmf_create_subsystem" && same("nqn", &e.record.params)),
    }
}

/// An address of this machine: interface name, address, prefix length.
pub type Interface = (String, IpAddr, u8);

fn interfaces() -> Vec<Interface> {
    let found = if_addrs::get_if_addrs().unwrap_or_default();
    let prefix = |addr: &if_addrs::IfAddr| match addr {
        if_addrs::IfAddr::V4(v4) => v4.prefixlen,
        if_addrs::IfAddr::V6(v6) => v6.prefixlen,
    };
    found
        .into_iter()
        .map(|i| (i.name.clone(), i.ip(), prefix(&i.addr)))
        .collect()
}

/// The calls that make everything that is declared, in an order in which they succeed.
pub fn calls(settings: &Settings, here: &[Interface]) -> Result<Vec<Call>, ConfigError> {
    let mut calls: Vec<Call> = settings.bdev.iter().map(bdev).collect();
    let nvmf = &settings.nvmf;
    if !nvmf.listener.is_empty() {
        calls.push(Call {
            what: "[[nvmf.listener]]: the TCP transport".into(),
            method: "nvmf_create_transport",
            params: json!({ "trtype": "TCP" }),
        });
    }
    let mut addresses = Vec::new();
    for listener in &nvmf.listener {
        addresses.push((listener, addresses_of(listener, here)?));
    }
    for declared in &nvmf.subsystem {
        subsystem(declared, &addresses, &mut calls);
    }
    Ok(calls)
}

fn bdev(declared: &Bdev) -> Call {
    let uuid = declared
        .uuid
        .unwrap_or_else(|| Uuid::new_v5(&IDENTITIES, declared.name.as_bytes()));
    let block_size = declared.block_size.unwrap_or(DEFAULT_BLOCK);
    let blocks = declared
        .size
        .map_or(0, |size| size.0 / u64::from(block_size.max(1)));
    let (method, params) = match declared.kind {
        BdevKind::Malloc | BdevKind::Null => {
            let method = if declared.kind == BdevKind::Malloc {
                "bdev_malloc_create"
            } else {
                "bdev_null_create"
            };
            (
                method,
                json!({ "name": declared.name, "num_blocks": blocks, "block_size": block_size, "uuid": uuid }),
            )
        }
        BdevKind::File => {
            let mut params = json!({
                "name": declared.name,
                "filename": declared.path,
                "readonly": declared.read_only,
                "uuid": uuid,
            });
            if let Some(block_size) = declared.block_size {
                params["block_size"] = block_size.into();
            }
            if let Some(size) = declared.size {
                params["size"] = size.0.into();
            }
            ("bdev_uring_create", params)
        }
    };
    Call {
        what: format!("[[bdev]] \"{}\"", declared.name),
        method,
        params,
    }
}

fn subsystem(declared: &Subsystem, listeners: &[(&Listener, Vec<IpAddr>)], calls: &mut Vec<Call>) {
    let nqn = &declared.nqn;
    let mut call = |what: String, method, params| {
        calls.push(Call {
            what: format!("[[nvmf.subsystem]] {nqn}{what}"),
            method,
            params,
        });
    };
    let mut create = json!({ "nqn": nqn, "allow_any_host": declared.allow_any_host });
    if let Some(serial) = &declared.serial_number {
        create["serial_number"] = serial.as_str().into();
    }
    if let Some(model) = &declared.model_number {
        create["model_number"] = model.as_str().into();
    }
    call(String::new(), "nvmf_create_subsystem", create);
    for host in &declared.hosts {
        call(
            format!(", host {host}"),
            "nvmf_subsystem_add_host",
            json!({ "nqn": nqn, "host": host }),
        );
    }
    for namespace in &declared.namespace {
        let mut params = json!({ "bdev_name": namespace.bdev });
        if namespace.nsid != 0 {
            params["nsid"] = namespace.nsid.into();
        }
        if let Some(uuid) = namespace.uuid {
            params["uuid"] = uuid.to_string().into();
        }
        let params = json!({ "nqn": nqn, "namespace": params });
        call(
            format!(", namespace on \"{}\"", namespace.bdev),
            "nvmf_subsystem_add_ns",
            params,
        );
    }
    // One address may be named by several listeners.
    let mut seen = BTreeSet::new();
    for (listener, addresses) in listeners {
        if !declared.listeners.is_empty() && !declared.listeners.contains(&listener.name) {
            continue;
        }
        for address in addresses
            .iter()
            .filter(|a| seen.insert((**a, listener.port)))
        {
            let family = if address.is_ipv4() { "IPv4" } else { "IPv6" };
            let place = json!({
                "trtype": "TCP", "adrfam": family, "traddr": address.to_string(), "trsvcid": listener.port.to_string(),
            });
            let params = json!({ "nqn": nqn, "listen_address": place });
            call(
                format!(", listener \"{}\" on {address}", listener.name),
                "nvmf_subsystem_add_listener",
                params,
            );
        }
    }
}

/// The addresses that a listener means on this machine.
fn addresses_of(listener: &Listener, here: &[Interface]) -> Result<Vec<IpAddr>, ConfigError> {
    let place = format!("listener \"{}\"", listener.name);
    let refuse = |cause: String, remedy: String| {
        let problem = Problem::new(place.clone(), "nvmf.listener", cause);
        ConfigError::from(if remedy.is_empty() {
            problem
        } else {
            problem.remedy(remedy)
        })
    };
    match listener.rdma {
        RdmaWish::Require => {
            return Err(refuse(
                "rdma = \"require\": this build has no RDMA transport (no_uverbs)".into(),
                "use \"prefer\" or \"off\"".into(),
            ));
        }
        RdmaWish::Prefer => {
            warn!("{place}: TCP only: this build has no RDMA transport (no_uverbs)")
        }
        RdmaWish::Off => {}
    }
    if !listener.transports.contains(&Transport::Tcp) {
        return Err(refuse(
            "no transport that this build has".into(),
            "add \"tcp\" to transports".into(),
        ));
    }
    if listener.iface.is_empty() {
        return Ok(vec![listener.address]);
    }
    let mut found = Vec::new();
    for wanted in &listener.iface {
        let matches: Vec<IpAddr> = match wanted.split_once(':') {
            Some(("name", name)) => here
                .iter()
                .filter(|(n, ..)| n == name)
                .map(|(_, ip, _)| *ip)
                .collect(),
            Some(("ip", ip)) => here
                .iter()
                .filter(|(_, have, _)| ip.parse() == Ok(*have))
                .map(|(_, ip, _)| *ip)
                .collect(),
            Some(("subnet", subnet)) => here
                .iter()
                .filter(|(_, ip, _)| in_subnet(*ip, subnet))
                .map(|(_, ip, _)| *ip)
                .collect(),
            _ => {
                return Err(refuse(
                    format!("\"{wanted}\" is no selector"),
                    "write name:eth0, ip:10.0.0.4 or subnet:10.0.0.0/24".into(),
                ));
            }
        };
        // A link-local address needs a scope that no host knows.
        let matches: Vec<IpAddr> = matches
            .into_iter()
            .filter(|ip| !is_link_local(*ip))
            .collect();
        if matches.is_empty() {
            let list: Vec<String> = here
                .iter()
                .map(|(name, ip, _)| format!("{name} {ip}"))
                .collect();
            return Err(refuse(
                format!(
                    "no interface matches \"{wanted}\"; have: {}",
                    list.join(", ")
                ),
                String::new(),
            ));
        }
        found.extend(matches);
    }
    Ok(found)
}

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(v6) if v6.segments()[0] & 0xffc0 == 0xfe80)
}

fn in_subnet(ip: IpAddr, subnet: &str) -> bool {
    let Some((net, len)) = subnet.split_once('/') else {
        return false;
    };
    let (Ok(net), Ok(len)) = (net.parse::<IpAddr>(), len.parse::<u32>()) else {
        return false;
    };
    let head = |bits: u128, width: u32| {
        if len == 0 {
            0
        } else {
            bits >> (width - len.min(width))
        }
    };
    match (ip, net) {
        (IpAddr::V4(ip), IpAddr::V4(net)) => {
            head(ip.to_bits().into(), 32) == head(net.to_bits().into(), 32)
        }
        (IpAddr::V6(ip), IpAddr::V6(net)) => head(ip.to_bits(), 128) == head(net.to_bits(), 128),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    //! Goal: a declaration becomes the calls that make it, or a refusal that names what there is.

    use super::*;
    use crate::config::load_text;
    use crate::methods::testing::Bench;

    fn settings(text: &str) -> Settings {
        load_text(Some(("nacre.toml", text)), [], &[])
            .unwrap()
            .settings
    }

    fn here() -> Vec<Interface> {
        [
            ("lo", "127.0.0.1", 8),
            ("eth0", "10.1.2.3", 24),
            ("eth0", "fd00::3", 64),
            ("eth0", "fe80::1", 64),
        ]
        .map(|(name, ip, len)| (name.to_owned(), ip.parse().unwrap(), len))
        .to_vec()
    }

    const WHOLE: &str = r#"
        [[bdev]]
        name = "disk0"
        path = "/srv/disk0"
        size = "1GiB"
        [[bdev]]
        name = "ram"
        type = "malloc"
        size = "8MiB"
        block_size = 4096
        [[nvmf.listener]]
        name = "data"
        iface = ["name:eth0"]
        [[nvmf.listener]]
        name = "local"
        port = 4421
        [[nvmf.subsystem]]
        nqn = "nqn.2026-01.org.example:a"
        hosts = ["nqn.2026-01.org.example:host"]
        listeners = ["data"]
        namespace = [{ bdev = "disk0", nsid = 3 }, { bdev = "ram" }]
    "#;

    #[test]
    fn declarations_become_calls() {
        insta::assert_json_snapshot!(
            calls(&settings(WHOLE), &here())
                .unwrap()
                .into_iter()
                .map(|c| json!([c.what, c.method, c.params]))
                .collect::<Vec<_>>()
        );
    }

    #[test]
    fn selectors_that_match_nothing_say_what_there_is() {
        for (listener, said) in [
            (
                "iface = [\"name:eth9\"]",
                "listener \"default\": no interface matches \"name:eth9\"; have: lo 127.0.0.1, eth0 10.1.2.3",
            ),
            (
                "iface = [\"eth0\"]",
                "\"eth0\" is no selector; write name:eth0",
            ),
            (
                "iface = [\"subnet:192.168.0.0/16\"]",
                "no interface matches",
            ),
            ("rdma = \"require\"", "no RDMA transport"),
            ("transports = [\"rdma\"]", "add \"tcp\""),
        ] {
            let error = calls(
                &settings(&format!("[[nvmf.listener]]\n{listener}")),
                &here(),
            )
            .unwrap_err()
            .to_string();
            assert!(error.contains(said), "{listener}: {error}");
        }
        assert!(in_subnet("10.1.2.3".parse().unwrap(), "10.1.0.0/16"));
        assert!(!in_subnet("10.2.2.3".parse().unwrap(), "10.1.0.0/16"));
        assert!(in_subnet("fd00::9".parse().unwrap(), "fd00::/64"));
    }

    #[test]
    fn declared_devices_are_made_not_stored_and_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let text = format!(
            "[[bdev]]\nname = \"ram\"\ntype = \"malloc\"\nsize = \"1MiB\"\n[[bdev]]\nname = \"disk\"\npath = {path:?}\n"
        );
        let state = dir.path().join("state");
        let open = || Some(crate::store::Store::open(&state).unwrap());
        let uuid = {
            let bench = Bench::with(settings(&text), open());
            let made = bench.call("bdev_get_bdevs", json!({ "name": "ram" }));
            assert_eq!(made[0]["num_blocks"], 2048);
            let objects = bench.call("state_get", json!(null))["objects"].clone();
            assert_eq!(
                (&objects[0]["kept_in"], &objects[0]["state"]),
                (&json!("config"), &json!("live")),
                "{objects}"
            );
            assert_eq!(
                (&objects[1]["key"], &objects[1]["state"]),
                (&json!("[[bdev]] \"disk\""), &json!("failed")),
                "{objects}"
            );
            std::fs::write(&path, vec![0; 1 << 20]).unwrap();
            bench.run(bench.engine.declared.make(&bench.engine));
            bench.call("bdev_get_bdevs", json!({ "name": "disk" }));
            made[0]["uuid"].clone()
        };
        let bench = Bench::with(Settings::default(), open());
        assert_eq!(
            bench.call("state_get", json!(null))["objects"],
            json!([]),
            "nothing of it was stored"
        );
        drop(bench);
        let bench = Bench::with(settings(&text), open());
        assert_eq!(
            bench.call("bdev_get_bdevs", json!({ "name": "ram" }))[0]["uuid"],
            uuid,
            "the same identity again"
        );
    }
}
