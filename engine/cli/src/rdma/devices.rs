//! `nacre rdma devices`, `link` and `gids`: the RDMA devices of this machine, their ports and their
//! GIDs.

use nacre_transport_rdma_link::{Device, Fabric, Gid, Port};
use nacre_transport_rdma_verbs::DeviceAttributes;
use serde_json::json;

use super::none_there;
use crate::{Failure, output, record};
use nacre_engine::services::rdma::describe::{add_limits, described};

/// Returns every device's limits, or the reason for their absence.
type AskLimits = dyn Fn() -> Result<Vec<DeviceAttributes>, String>;

pub(super) fn devices(
    fabric: &Fabric,
    verbose: bool,
    json: bool,
    limits: &AskLimits,
) -> Result<(), Failure> {
    let limits = if verbose && !fabric.devices.is_empty() {
        Some(limits())
    } else {
        None
    };
    let mut described = described(fabric);
    for device in described.as_array_mut().into_iter().flatten() {
        if let Some(limits) = &limits {
            add_limits(device, limits);
        }
    }
    if json {
        return output::json(&described);
    }
    if fabric.devices.is_empty() {
        return none_there();
    }
    if !verbose {
        return output::table(
            &[
                "device",
                "driver",
                "node guid",
                "sys image guid",
                "firmware",
                "ports",
                "netdev",
                "numa",
            ],
            fabric.devices.iter().map(device_row),
        );
    }
    for (at, device) in described.as_array_mut().into_iter().flatten().enumerate() {
        if at > 0 {
            output::line("")?;
        }
        // Ports have a table of their own.
        for port in device["ports"].as_array_mut().into_iter().flatten() {
            let gids = port["gids"].as_array().map_or(0, Vec::len);
            port["gids"] = gids.into();
        }
        record::print(device)?;
    }
    Ok(())
}

pub(super) fn link(fabric: &Fabric, json: bool) -> Result<(), Failure> {
    if json {
        let links = fabric.ports().map(|(device, port)| {
            json!({
                "link": format!("{}/{}", device.name, port.num),
                "state": port.state.to_string(),
                "physical_state": port.phys_state.to_string(),
                "netdev": port.netdev,
            })
        });
        return output::json(&links.collect());
    }
    if fabric.devices.is_empty() {
        return none_there();
    }
    output::table(
        &["link", "state", "physical_state", "netdev"],
        fabric.ports().map(link_row),
    )
}

pub(super) fn gids(fabric: &Fabric, device: Option<&str>, json: bool) -> Result<(), Failure> {
    if let Some(name) = device.filter(|name| fabric.device(name).is_none()) {
        return Err(no_device(fabric, name));
    }
    let entries = || {
        fabric
            .ports()
            .filter(|(of, _)| device.is_none_or(|name| name == of.name))
            .flat_map(|(device, port)| port.gids.iter().map(move |gid| (device, port, gid)))
    };
    if json {
        let entries = entries().map(|(device, port, gid)| {
            let mut value = serde_json::to_value(gid).expect("a GID serialises");
            value["device"] = device.name.clone().into();
            value["port"] = port.num.into();
            value["used"] = port.uses(gid).into();
            value
        });
        return output::json(&entries.collect());
    }
    if fabric.devices.is_empty() {
        return none_there();
    }
    output::table(
        &[
            "device", "port", "index", "type", "netdev", "address", "gid", "used",
        ],
        entries().map(|(device, port, gid)| gid_row(device, port, gid)),
    )
}

/// The refusal of a name that no device has.
pub(super) fn no_device(fabric: &Fabric, name: &str) -> Failure {
    let have: Vec<&str> = fabric.devices.iter().map(|d| &d.name[..]).collect();
    let have = if have.is_empty() {
        "none".into()
    } else {
        have.join(", ")
    };
    Failure::Failed(anyhow::anyhow!(
        "there is no RDMA device \"{name}\"; have: {have}"
    ))
}

pub(super) fn device_row(device: &Device) -> Vec<String> {
    let mut netdevs: Vec<&str> = device
        .ports
        .iter()
        .filter_map(|port| port.netdev.as_deref())
        .collect();
    netdevs.dedup();
    vec![
        device.name.clone(),
        device.driver.clone().unwrap_or_default(),
        device.node_guid.clone(),
        device.sys_image_guid.clone(),
        device.fw.clone().unwrap_or_default(),
        device.ports.len().to_string(),
        netdevs.join(","),
        device.numa.map(|node| node.to_string()).unwrap_or_default(),
    ]
}

pub(super) fn link_row((device, port): (&Device, &Port)) -> Vec<String> {
    vec![
        format!("{}/{}", device.name, port.num),
        port.state.to_string(),
        port.phys_state.to_string(),
        port.netdev.clone().unwrap_or_default(),
    ]
}

pub(super) fn gid_row(device: &Device, port: &Port, gid: &Gid) -> Vec<String> {
    vec![
        device.name.clone(),
        port.num.to_string(),
        gid.index.to_string(),
        gid.kind.to_string(),
        gid.ndev.clone().unwrap_or_default(),
        gid.ip.map(|ip| ip.to_string()).unwrap_or_default(),
        gid.gid.to_string(),
        if port.uses(gid) { "yes" } else { "no" }.into(),
    ]
}
