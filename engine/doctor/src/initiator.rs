//! The checks of `nacre doctor --host` on a Linux host: kernel modules, nvme-cli, RDMA device, and
//! the route to the target.

use std::net::{IpAddr, SocketAddr};

use nacre_transport_rdma_link::{
    Access, CapabilityRequest, Environment, Memlock, ModuleState, Uverbs, capability,
};

use super::{Finding, Report, System};

/// The target that the host should reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    pub ip: IpAddr,
    pub port: u16,
}

/// All checks of a host.
pub fn examine(system: &System, target: Option<Target>) -> Report {
    let mut findings = vec![
        nvme_cli(system),
        fabrics(system),
        module(system, "init.nvme_tcp_module", "nvme_tcp"),
        module(system, "init.nvme_rdma_module", "nvme_rdma"),
        rdma_device(system),
        multipath(system),
    ];
    if let Some(target) = target {
        route(system, target, &mut findings);
    }
    Report::of(findings)
}

fn nvme_cli(system: &System) -> Finding {
    const ID: &str = "init.nvme_cli";
    match system.probe.output("nvme", &["version"]) {
        Ok(text) => {
            let line = text.lines().next().unwrap_or_default().to_owned();
            Finding::pass(ID, line)
        }
        Err(error) => Finding::fail(
            ID,
            format!("nvme-cli cannot be run: {error}"),
            "install the package nvme-cli",
        ),
    }
}

/// The host connects by writing to this file of the kernel.
fn fabrics(system: &System) -> Finding {
    const ID: &str = "init.fabrics_device";
    if system.roots.dev.join("nvme-fabrics").exists() {
        return Finding::pass(ID, "/dev/nvme-fabrics is there");
    }
    match system.modules.state("nvme_fabrics") {
        ModuleState::Loadable => Finding::pass(
            ID,
            "/dev/nvme-fabrics comes with nvme_fabrics; `nacre connect` loads it",
        ),
        ModuleState::Loaded | ModuleState::BuiltIn => Finding::fail(
            ID,
            "nvme_fabrics is loaded, and there is no /dev/nvme-fabrics",
            "give the container the device (`--device=/dev/nvme-fabrics`), or connect on its host",
        ),
        ModuleState::Missing => Finding::fail(
            ID,
            "there is no /dev/nvme-fabrics, and nvme_fabrics cannot be loaded: this kernel cannot connect",
            "load nvme-tcp or nvme-rdma on the machine itself (in a container: on its host), or use a kernel that has \
             them (Debian: linux-image-amd64; others: linux-modules-extra)",
        ),
    }
}

fn module(system: &System, id: &'static str, name: &str) -> Finding {
    match system.modules.state(name) {
        ModuleState::Loaded => Finding::pass(id, format!("{name} is loaded")),
        ModuleState::BuiltIn => Finding::pass(id, format!("{name} is built in")),
        ModuleState::Loadable => Finding::pass(
            id,
            format!("{name} can be loaded; `nacre connect` loads it"),
        ),
        ModuleState::Missing => {
            // Without the list, modprobe has nothing to load.
            let (evidence, remedy) = if system.modules.is_listed() {
                (
                    format!("this kernel has no {name}"),
                    "install the kernel's package of further modules (such as linux-modules-extra)",
                )
            } else {
                (
                    format!(
                        "{name} is not loaded, and the modules of this kernel are not installed here"
                    ),
                    "load it on the machine itself (in a container: on its host), or install the kernel's modules",
                )
            };
            // Without RDMA, TCP still works; without TCP, possibly nothing.
            match name {
                "nvme_rdma" => Finding::warn(id, evidence, remedy),
                _ => Finding::fail(id, evidence, remedy),
            }
        }
    }
}

fn rdma_device(system: &System) -> Finding {
    const ID: &str = "init.rdma_dev";
    let active: Vec<String> = system
        .fabric
        .ports()
        .filter(|(_, port)| port.is_active())
        .map(|(device, port)| {
            let netdev = port.netdev.as_deref().unwrap_or("no interface");
            format!("{}/{} ({netdev})", device.name, port.num)
        })
        .collect();
    match (system.fabric.devices.is_empty(), active.is_empty()) {
        (false, false) => Finding::pass(ID, active.join(", ")),
        (false, true) => Finding::warn(
            ID,
            "no port of an RDMA device is active",
            "`nacre rdma link`; set the interface up and look at the cable",
        ),
        (true, _) => Finding::warn(
            ID,
            "No RDMA devices found: connections are over TCP",
            "nothing, if TCP will do; else load the card's driver, or `nacre rdma rxe add rxe0 --netdev NAME`",
        ),
    }
}

fn multipath(system: &System) -> Finding {
    const ID: &str = "init.multipath";
    let file = system
        .roots
        .sys
        .join("module/nvme_core/parameters/multipath");
    match system.text(file).as_deref() {
        Some("Y") => Finding::pass(ID, "native multipath is on"),
        Some("N") => Finding::warn(
            ID,
            "native multipath is off: a second path is a second disk, and no path takes over",
            "`nvme_core.multipath=Y` on the kernel's command line",
        ),
        // Newer kernels of some distributions always have it.
        _ => {
            if system.modules.state("nvme_core").is_there() {
                Finding::pass(
                    ID,
                    "this kernel has no switch for native multipath: it is on",
                )
            } else {
                Finding::skip(ID, "nvme_core is not loaded yet")
            }
        }
    }
}

fn route(system: &System, target: Target, findings: &mut Vec<Finding>) {
    const ID: &str = "init.route_to_target";
    let subject = SocketAddr::new(target.ip, target.port).to_string();
    let source = match system
        .probe
        .source_for(SocketAddr::new(target.ip, target.port))
    {
        Ok(source) => source,
        Err(error) => {
            let finding = Finding::fail(
                ID,
                format!("no route: {error}"),
                format!(
                    "`ip route get {}`; add a route or an address in its network",
                    target.ip
                ),
            );
            findings.push(finding.of(subject));
            return;
        }
    };
    let Some(interface) = system.interface_of(source) else {
        let finding = Finding::warn(
            ID,
            format!("{source} is on no interface that is known"),
            format!("`ip route get {}`", target.ip),
        );
        findings.push(finding.of(subject));
        return;
    };
    let by = format!("by {} from {source}", interface.name);
    findings.push(Finding::pass(ID, by).of(&subject));
    findings.push(rdma_to(system, &interface.name, source).of(&subject));
}

/// Checks whether the kernel's RDMA host can use that route. It needs device, port and GID, but no
/// device nodes or limits of a process.
pub fn rdma_path(
    system: &System,
    netdev: &str,
    source: IpAddr,
) -> Result<nacre_transport_rdma_link::Chosen, nacre_transport_rdma_link::Reason> {
    let uverbs = system.fabric.devices.iter().map(|device| Uverbs {
        device: device.name.clone(),
        node: Default::default(),
        access: Access::Granted,
    });
    let environment = Environment {
        uverbs: uverbs.collect(),
        rdma_cm: Access::Granted,
        library: None,
        memlock: Memlock::default(),
        memory_needed: 0,
        no_device: system.environment.no_device.clone(),
    };
    capability(
        &system.fabric,
        &CapabilityRequest::new(netdev, source),
        &environment,
    )
}

fn rdma_to(system: &System, netdev: &str, source: IpAddr) -> Finding {
    const ID: &str = "init.rdma_to_target";
    match rdma_path(system, netdev, source) {
        Ok(chosen) => Finding::pass(
            ID,
            format!(
                "RDMA by {}/{}, GID {} ({})",
                chosen.device, chosen.port, chosen.gid_index, chosen.gid_kind
            ),
        ),
        Err(reason) => Finding::warn(
            ID,
            format!(
                "TCP only: {}: {reason}: {}",
                reason.word(),
                reason.evidence()
            ),
            reason.remedy(),
        ),
    }
}
