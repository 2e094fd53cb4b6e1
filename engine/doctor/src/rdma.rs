//! The checks of `nacre doctor` of RDMA: kernel modules, devices, links, GIDs, drivers and
//! firmware.

use nacre_transport_rdma_link::{
    Access, CapabilityRequest, Device, Firmware, GidKind, LinkLayer, ModuleState, NoDevice,
    NodeType, Port, capability,
};

use super::select::{self, Selected};
use super::{Finding, Scope, Status, System};

/// Modules that RDMA needs with any hardware, each with its purpose.
const MODULES: [(&str, &str); 3] = [
    ("ib_core", "RDMA itself"),
    ("ib_uverbs", "verbs for programs"),
    ("rdma_ucm", "the connection manager for programs"),
];

pub(crate) fn modules(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    const ID: &str = "rdma.modules";
    let states = MODULES.map(|(name, purpose)| (name, purpose, system.modules.state(name)));
    let evidence: Vec<String> = states
        .iter()
        .map(|(name, _, state)| format!("{name} {}", in_words(*state, system.modules.is_listed())))
        .collect();
    let evidence = evidence.join(", ");
    let lacking: Vec<_> = states
        .iter()
        .filter(|(_, _, state)| !state.is_there())
        .collect();
    let wanted = scope.rdma || !system.fabric.devices.is_empty();
    // A container often has no list of the loaded modules. Its devices prove that they are loaded.
    let proven =
        system.environment.rdma_cm != Access::Absent && !system.environment.uverbs.is_empty();
    findings.push(if lacking.is_empty() || proven {
        Finding::pass(ID, evidence)
    } else if !wanted {
        Finding::skip(ID, format!("{evidence}; RDMA is not asked for"))
    } else {
        let load: Vec<&str> = lacking.iter().map(|(name, ..)| *name).collect();
        let purposes: Vec<&str> = lacking.iter().map(|(_, purpose, _)| *purpose).collect();
        let missing = lacking
            .iter()
            .any(|(_, _, state)| *state == ModuleState::Missing)
            && system.modules.is_listed();
        let remedy = match &system.environment.no_device {
            Some(kernel @ NoDevice::Kernel { .. }) => kernel.remedy(),
            _ if missing => {
                "this kernel does not have them: install its package of further modules (such as \
                             linux-modules-extra)"
                    .into()
            }
            _ => format!("`modprobe -a {}`", load.join(" ")),
        };
        Finding::fail(
            ID,
            format!("{evidence}: without {}", purposes.join(", ")),
            remedy,
        )
    });
}

fn in_words(state: ModuleState, listed: bool) -> &'static str {
    match state {
        ModuleState::Missing if !listed => "not seen",
        ModuleState::Loaded => "loaded",
        ModuleState::BuiltIn => "built in",
        ModuleState::Loadable => "not loaded",
        ModuleState::Missing => "missing",
    }
}

pub(crate) fn devices(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    const ID: &str = "rdma.devices";
    if !system.fabric.devices.is_empty() {
        let names: Vec<String> = system.fabric.devices.iter().map(named).collect();
        findings.push(Finding::pass(ID, names.join(", ")));
        return;
    }
    if !scope.rdma {
        findings.push(Finding::skip(ID, "No RDMA devices found; TCP needs none"));
        return;
    }
    let Some(missing) = &system.environment.no_device else {
        findings.push(Finding::skip(ID, "RDMA devices come and go"));
        return;
    };
    findings.push(Finding::fail(
        ID,
        format!("No RDMA devices found: {missing}"),
        missing.remedy(),
    ));
}

fn named(device: &Device) -> String {
    let driver = device.driver.as_deref().unwrap_or("unknown driver");
    format!("{} ({driver})", device.name)
}

/// True if this process runs in a container, as far as it can detect.
pub(crate) fn in_container(system: &System) -> bool {
    nacre_transport_rdma_link::in_container(&system.roots)
}

/// Checks of each device by itself.
pub(crate) fn of_each_device(system: &System, findings: &mut Vec<Finding>) {
    for device in &system.fabric.devices {
        findings.push(driver(device).of(&device.name));
        findings.push(software(device).of(&device.name));
        findings.push(firmware(device).of(&device.name));
        for port in &device.ports {
            let subject = format!("{}/{}", device.name, port.num);
            if port.link_layer == LinkLayer::InfiniBand {
                findings.push(subnet_manager(port).of(&subject));
            }
            if device.node_type == NodeType::Ca && port.link_layer == LinkLayer::Ethernet {
                findings.push(gid_types(device, port).of(&subject));
            }
        }
    }
}

fn driver(device: &Device) -> Finding {
    const ID: &str = "rdma.driver";
    let Some(name) = &device.driver else {
        return Finding::warn(
            ID,
            "the driver is unknown",
            "nothing is known against it: test it with `nacre perf --verify`",
        );
    };
    match device.quirk() {
        None => Finding::warn(
            ID,
            format!("{name} is not one that is known here"),
            "nothing is known against it: test it with `nacre perf --verify`",
        ),
        Some(quirk) if !quirk.reliable_connected => Finding::fail(
            ID,
            format!("{name}: {}", quirk.note.unwrap_or(quirk.title)),
            "use TCP on this device",
        ),
        Some(quirk) => match quirk.note.filter(|_| !device.is_software()) {
            Some(note) => Finding::warn(ID, format!("{name}: {note}"), "use TCP, or measure both"),
            None if device.node_type == NodeType::Rnic => Finding::pass(
                ID,
                format!("{name}: {}; iWARP: PFC not required", quirk.title),
            ),
            None => Finding::pass(ID, format!("{name}: {}", quirk.title)),
        },
    }
}

fn software(device: &Device) -> Finding {
    const ID: &str = "rdma.software";
    if !device.is_software() {
        Finding::pass(ID, "hardware")
    } else {
        Finding::warn(
            ID,
            format!("{}: functional, not fast", device.kind),
            "fine for trying and testing; for speed use TCP, or a network card with RDMA",
        )
    }
}

fn firmware(device: &Device) -> Finding {
    const ID: &str = "rdma.fw";
    let Some(version) = &device.fw else {
        return Finding::skip(ID, "it has no firmware version");
    };
    match nacre_transport_rdma_link::firmware(device.driver.as_deref().unwrap_or_default(), version)
    {
        Firmware::Bad(all) => {
            let what = all
                .iter()
                .map(|bad| format!("{} ({})", bad.what, bad.source));
            let what: Vec<String> = what.collect();
            // The entries of a family are sorted; the last update fixes all of them.
            let update_to = all.last().map_or("", |bad| bad.update_to);
            Finding::warn(
                ID,
                format!("firmware {version}: {}", what.join("; ")),
                format!("update it to {update_to} or later"),
            )
        }
        Firmware::NotListed => Finding::pass(
            ID,
            format!(
                "firmware {version}: none of the versions of its kind that are known to be bad"
            ),
        ),
        Firmware::Unknown => Finding::skip(
            ID,
            format!(
                "firmware {version}: no bad versions of its kind are known here; compare it with the vendor's \
                 release notes"
            ),
        ),
    }
}

fn subnet_manager(port: &Port) -> Finding {
    const ID: &str = "ib.sm";
    let evidence = format!(
        "state {}, subnet manager at LID {}",
        port.state, port.sm_lid
    );
    if !port.is_active() || port.sm_lid == 0 {
        return Finding::fail(
            ID,
            evidence,
            "start a subnet manager: on a switch, or `opensm` on one machine of the fabric",
        );
    }
    match &port.netdev {
        Some(netdev) => Finding::pass(ID, format!("{evidence}, IPoIB interface {netdev}")),
        None => Finding::fail(
            ID,
            format!("{evidence}, and no IPoIB interface"),
            "the connection manager needs an IP address: `modprobe ib_ipoib`, then give the interface one",
        ),
    }
}

fn gid_types(device: &Device, port: &Port) -> Finding {
    const ID: &str = "rdma.gid.type";
    let kinds: Vec<GidKind> = port.gids.iter().map(|gid| gid.kind).collect();
    if kinds.contains(&GidKind::RoceV2) && port.roce_mode == Some(GidKind::RoceV1) {
        Finding::warn(
            ID,
            "RoCE v2, but the connection manager takes v1 (default_roce_mode), which is not routed",
            format!("`cma_roce_mode -d {} -p {} -m 2`", device.name, port.num),
        )
    } else if kinds.contains(&GidKind::RoceV2) {
        Finding::pass(ID, "RoCE v2")
    } else if kinds.is_empty() {
        Finding::fail(
            ID,
            "the GID table is empty",
            format!(
                "`ip link set {} up`, and give it an address",
                port.netdev.as_deref().unwrap_or("INTERFACE")
            ),
        )
    } else {
        Finding::fail(
            ID,
            "only RoCE v1, which is not routed",
            format!(
                "`cma_roce_mode -d {} -p {} -m 2`, or pin an entry of v1 with gid_index",
                device.name, port.num
            ),
        )
    }
}

/// Checks that depend on interface and address: of each listener, or of each interface with an RDMA
/// device.
pub(crate) fn interfaces(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    let selected: Vec<Selected> = if scope.listeners.is_empty() {
        with_devices(system)
    } else {
        select::select_all(system, scope)
    };
    for selected in &selected {
        let subject = format!("{} {}", selected.netdev, selected.ip);
        let want = CapabilityRequest::new(&selected.netdev, selected.ip);
        let environment = nacre_transport_rdma_link::Environment {
            memory_needed: scope.memory,
            ..system.environment.clone()
        };
        let outcome = capability(&system.fabric, &want, &environment);
        findings.push(gid_of(system, selected, &outcome).of(&subject));
        findings.push(capable(scope, outcome).of(&subject));
    }
}

/// The reason why an address cannot be used over RDMA, as a word and a text. The reason is `None`
/// if the address can be used, or if this machine does not have it.
pub fn reason_without_rdma(system: &System, ip: std::net::IpAddr) -> Option<String> {
    let interface = system.interface_of(ip)?;
    let want = CapabilityRequest::new(&interface.name, ip);
    let reason = capability(&system.fabric, &want, &system.environment).err()?;
    let (word, evidence, remedy) = (reason.word(), reason.evidence(), reason.remedy());
    Some(format!("{word}: {reason}: {evidence}; {remedy}"))
}

pub(super) fn with_devices(system: &System) -> Vec<Selected> {
    system
        .interfaces
        .iter()
        .filter(|interface| system.fabric.ports_of(&interface.name).next().is_some())
        .map(|interface| Selected {
            netdev: interface.name.clone(),
            ip: interface.ip,
        })
        .collect()
}

type Outcome = Result<nacre_transport_rdma_link::Chosen, nacre_transport_rdma_link::Reason>;

fn capable(scope: &Scope, outcome: Outcome) -> Finding {
    const ID: &str = "rdma.capable";
    match outcome {
        Ok(chosen) => Finding::pass(
            ID,
            format!(
                "{}/{} with GID {} ({})",
                chosen.device, chosen.port, chosen.gid_index, chosen.gid_kind
            ),
        ),
        Err(reason) => {
            let evidence = format!("{}: {reason}: {}", reason.word(), reason.evidence());
            if scope.rdma {
                Finding::fail(ID, evidence, reason.remedy())
            } else {
                Finding::warn(ID, evidence, reason.remedy())
            }
        }
    }
}

/// Lists every entry of the GID table, and the selected one with the reason.
fn gid_of(system: &System, selected: &Selected, outcome: &Outcome) -> Finding {
    const ID: &str = "rdma.gid.ip";
    let ports: Vec<_> = system.fabric.ports_of(&selected.netdev).collect();
    let table: Vec<String> = ports
        .iter()
        .flat_map(|(device, port)| {
            port.gids.iter().map(move |gid| {
                let ndev = gid.ndev.as_deref().unwrap_or("-");
                let ip = gid
                    .ip
                    .map_or_else(|| gid.gid.to_string(), |ip| ip.to_string());
                format!(
                    "{}/{} {} {} {ndev} {ip}",
                    device.name, port.num, gid.index, gid.kind
                )
            })
        })
        .collect();
    let table = table.join("; ");
    match outcome {
        Ok(chosen) => {
            let why = match chosen.gid_kind {
                GidKind::RoceV2 => "the first of RoCE v2 with this address",
                GidKind::RoceV1 => "pinned by the configuration",
                GidKind::InfiniBand => "the port's own",
                GidKind::Iwarp => "iWARP has no other",
            };
            Finding::pass(
                ID,
                format!("GID {}, {why}; have: {table}", chosen.gid_index),
            )
        }
        Err(reason) if reason.word() == "no_gid_for_ip" => {
            Finding::fail(ID, format!("{reason}; have: {table}"), reason.remedy())
        }
        Err(_) if ports.is_empty() => Finding::skip(ID, "no RDMA device on this interface"),
        Err(reason) => Finding::new(
            ID,
            Status::Skip,
            format!("{}; have: {table}", reason.word()),
        ),
    }
}
