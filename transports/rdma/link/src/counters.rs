//! A port's counters.

use std::path::Path;

use serde::Serialize;

use crate::sysfs;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Counter {
    pub group: CounterGroup,
    /// Name that the kernel or the driver gives.
    pub name: String,
    pub value: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CounterGroup {
    /// The port counters of IBA (`counters`).
    Port,
    /// The driver's own (`hw_counters`).
    Hardware,
    /// Counters of the network interface behind the port.
    Netdev,
}

/// All counters of one port, in order. Reading them may ask the device, so they are not part of
/// [`crate::Fabric`]. `netdev` adds the interface's.
pub fn counters(
    sysfs_root: impl AsRef<Path>,
    device: &str,
    port: u8,
    netdev: Option<&str>,
) -> Vec<Counter> {
    let root = sysfs_root.as_ref();
    let ib = root.join("class/infiniband").join(device);
    let of_port = ib.join("ports").join(port.to_string());
    let mut all = group(&of_port.join("counters"), CounterGroup::Port);
    all.extend(group(&of_port.join("hw_counters"), CounterGroup::Hardware));
    if let Some(netdev) = netdev {
        let folder = root.join("class/net").join(netdev).join("statistics");
        all.extend(group(&folder, CounterGroup::Netdev));
    }
    all
}

fn group(folder: &Path, group: CounterGroup) -> Vec<Counter> {
    let counter = |name: String| {
        // Settings stand among the counters.
        if name == "lifespan" {
            return None;
        }
        let value = sysfs::number(&folder.join(&name))?;
        Some(Counter { group, name, value })
    };
    sysfs::names(folder)
        .into_iter()
        .filter_map(counter)
        .collect()
}
