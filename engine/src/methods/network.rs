//! `network_get_interfaces`, a Nacre extension: the network interfaces of this machine.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::rc::Rc;

use nacre_transport_rdma_link::Roots;
use schemars::JsonSchema;
use serde::Serialize;

use crate::rpc::{Class, Method, NoParams, Order, Registry, RpcError};
use crate::services::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<GetInterfaces>();
}

struct GetInterfaces;

#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
struct NetworkInterface {
    name: String,
    /// The kernel's word: `up`, `down`, `lowerlayerdown`, `unknown`, ….
    state: Option<String>,
    /// Largest packet in bytes.
    mtu: Option<u32>,
    /// Mbit/s; `null` without a link, and for software interfaces.
    speed_mbit: Option<u32>,
    mac: Option<String>,
    driver: Option<String>,
    /// Each with the length of its prefix.
    addresses: Vec<String>,
}

impl Method<Engine> for GetInterfaces {
    const NAME: &'static str = "network_get_interfaces";
    const ABOUT: &'static str = "Lists the network interfaces of this machine, without loopback, with their addresses and MTU.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = NoParams;
    type Reply = Vec<NetworkInterface>;

    async fn apply(_: NoParams, _: Rc<Engine>) -> Result<Vec<NetworkInterface>, RpcError> {
        // A driver may answer slowly.
        let read = tokio::task::spawn_blocking(|| {
            let present = if_addrs::get_if_addrs().unwrap_or_default();
            interfaces(&Roots::real().sys, &addresses(present))
        });
        read.await
            .map_err(|error| RpcError::internal(error.to_string()))
    }
}

fn addresses(present: Vec<if_addrs::Interface>) -> BTreeMap<String, Vec<String>> {
    let mut all = BTreeMap::<String, Vec<String>>::new();
    for interface in present {
        let (ip, prefix) = match interface.addr {
            if_addrs::IfAddr::V4(v4) => (IpAddr::V4(v4.ip), v4.prefixlen),
            if_addrs::IfAddr::V6(v6) => (IpAddr::V6(v6.ip), v6.prefixlen),
        };
        // A label such as eth0:1 belongs to eth0.
        let name = interface.name.split(':').next().unwrap_or_default();
        let own = all.entry(name.to_owned()).or_default();
        own.push(format!("{ip}/{prefix}"));
    }
    all
}

fn interfaces(sys: &Path, addresses: &BTreeMap<String, Vec<String>>) -> Vec<NetworkInterface> {
    let class = sys.join("class/net");
    let names = std::fs::read_dir(&class).into_iter().flatten();
    let names = names.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut all: Vec<NetworkInterface> = names
        // `bonding_masters` is a file of the kernel.
        .filter(|name| name != "lo" && class.join(name).is_dir())
        .map(|name| {
            let folder = class.join(&name);
            // Without a link, the kernel refuses to read the speed, or says -1.
            let text = |attribute: &str| {
                let text = std::fs::read_to_string(folder.join(attribute)).ok()?;
                Some(text.trim().to_owned()).filter(|text| !text.is_empty())
            };
            let number = |attribute: &str| text(attribute)?.parse().ok();
            let driver = std::fs::read_link(folder.join("device/driver")).ok();
            NetworkInterface {
                state: text("operstate"),
                mtu: number("mtu"),
                speed_mbit: number("speed"),
                mac: text("address"),
                driver: driver.and_then(|path| path.file_name()?.to_str().map(str::to_owned)),
                addresses: addresses.get(&name).cloned().unwrap_or_default(),
                name,
            }
        })
        .collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: an interface has its facts, and one without a link has no speed. Method: a machine in
    /// a folder.
    #[test]
    fn interfaces_of_a_machine() {
        let root = tempfile::tempdir().unwrap();
        let class = root.path().join("class/net");
        let write = |name: &str, attribute: &str, text: &str| {
            std::fs::create_dir_all(class.join(name)).unwrap();
            std::fs::write(class.join(name).join(attribute), text).unwrap();
        };
        write("lo", "mtu", "65536\n");
        write(".", "bonding_masters", "bond0\n");
        write("eth1", "mtu", "9000\n");
        write("eth1", "operstate", "up\n");
        write("eth1", "speed", "100000\n");
        write("eth1", "address", "02:00:00:00:00:01\n");
        write("eth0", "operstate", "down\n");
        write("eth0", "speed", "-1\n");
        let driver = class.join("eth1/device/driver");
        std::fs::create_dir_all(driver.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink("../../bus/pci/drivers/mlx5_core", driver).unwrap();
        let addresses = [("eth1".to_owned(), vec!["192.0.2.7/24".to_owned()])].into();
        let found = interfaces(root.path(), &addresses);
        let some = |text: &str| Some(text.to_owned());
        let eth0 = NetworkInterface {
            name: "eth0".into(),
            state: some("down"),
            mtu: None,
            speed_mbit: None,
            mac: None,
            driver: None,
            addresses: Vec::new(),
        };
        let eth1 = NetworkInterface {
            name: "eth1".into(),
            state: some("up"),
            mtu: Some(9000),
            speed_mbit: Some(100_000),
            mac: some("02:00:00:00:00:01"),
            driver: some("mlx5_core"),
            addresses: vec!["192.0.2.7/24".into()],
        };
        assert_eq!(found, [eth0, eth1]);
    }
}
