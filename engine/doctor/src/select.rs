//! Finds the addresses of this machine that a listener's selector matches.

use std::net::IpAddr;

use super::{Interface, Scope, System};
use nacre_engine_values::selector::{Selector, mac};

/// An address selected by a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selected {
    pub netdev: String,
    pub ip: IpAddr,
}

/// All addresses that the scope's selectors match; `net.iface.exists` reports selectors without a
/// match.
pub(crate) fn select_all(system: &System, scope: &Scope) -> Vec<Selected> {
    let mut all = Vec::new();
    for selector in &scope.listeners {
        for found in select(system, selector) {
            if !all.contains(&found) {
                all.push(found);
            }
        }
    }
    all
}

/// The addresses that match a selector: `name:`, `ip:`, `subnet:`, `mac:`, `rdma:` (DEVICE or
/// DEVICE/PORT), or a plain name or address.
pub fn select(system: &System, selector: &str) -> Vec<Selected> {
    let Ok(selector) = Selector::plain(selector) else {
        return Vec::new();
    };
    let interfaces = system.interfaces.iter();
    let matching: Vec<&Interface> = match &selector {
        Selector::Name(name) => interfaces.filter(|i| i.name == *name).collect(),
        Selector::Ip(ip) => system.interface_of(*ip).into_iter().collect(),
        Selector::Link(ip, of) => interfaces
            .filter(|i| i.ip == *ip && i.name == *of)
            .collect(),
        Selector::Mac(wanted) => interfaces
            .filter(|i| {
                let file = system.roots.sys.join("class/net").join(&i.name);
                let address = system.text(file.join("address")).unwrap_or_default();
                mac(&address) == Some(*wanted)
            })
            .collect(),
        Selector::Subnet(net, length) => interfaces
            .filter(|i| same_subnet(i.ip, *net, *length))
            .collect(),
        Selector::Rdma(device) => interfaces
            .filter(|i| {
                let mut ports = system.fabric.ports_of(&i.name);
                ports.any(|(of, port)| match device.split_once('/') {
                    None => of.name == *device,
                    Some((name, num)) => of.name == name && num.parse() == Ok(port.num),
                })
            })
            .collect(),
    };
    matching
        .into_iter()
        .map(|interface| Selected {
            netdev: interface.name.clone(),
            ip: interface.ip,
        })
        .collect()
}

pub(crate) fn same_subnet(a: IpAddr, b: IpAddr, prefix: u8) -> bool {
    let (a, b, width) = match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits().into(), b.to_bits().into(), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits(), b.to_bits(), 128),
        _ => return false,
    };
    let differing: u128 = a ^ b;
    prefix <= width
        && differing
            .checked_shr(u32::from(width - prefix))
            .unwrap_or(0)
            == 0
}

/// The error text for a selector without a match.
pub fn no_interface(system: &System, selector: &str) -> String {
    let have: Vec<String> = system
        .interfaces
        .iter()
        .map(|interface| format!("{} {}", interface.name, interface.ip))
        .collect();
    let have = if have.is_empty() {
        "none".into()
    } else {
        have.join(", ")
    };
    format!("no interface matches \"{selector}\"; have: {have}")
}
