//! The checks of `nacre doctor` inside a container: its device nodes, capabilities and network.

use nacre_transport_rdma_link::{Access, NoDevice};

use super::{Finding, Scope, System, memory, rdma};

pub(crate) fn checks(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    if !rdma::in_container(system) {
        findings.push(Finding::skip("container", "this is not a container"));
        return;
    }
    let wanted = scope.rdma || !system.fabric.devices.is_empty();
    if wanted {
        findings.push(device_nodes(system));
        findings.push(lock(system));
    }
    findings.push(network(system));
    findings.push(hugepages(system, scope));
}

fn device_nodes(system: &System) -> Finding {
    const ID: &str = "container.infiniband";
    // Without a device on the machine there are no device nodes to pass.
    if let Some(lack) = NoDevice::of(&system.roots) {
        return Finding::fail(ID, lack.to_string(), lack.remedy());
    }
    let environment = &system.environment;
    let nodes: Vec<String> = environment
        .uverbs
        .iter()
        .map(|uverbs| format!("{} {:?}", uverbs.node.display(), uverbs.access).to_lowercase())
        .chain([format!("rdma_cm {:?}", environment.rdma_cm).to_lowercase()])
        .collect();
    let all = environment.rdma_cm == Access::Granted
        && environment
            .uverbs
            .iter()
            .all(|uverbs| uverbs.access == Access::Granted);
    if all {
        Finding::pass(ID, nodes.join(", "))
    } else {
        Finding::fail(
            ID,
            nodes.join(", "),
            "start it with `--device=/dev/infiniband`",
        )
    }
}

fn lock(system: &System) -> Finding {
    const ID: &str = "container.ipc_lock";
    match system.environment.memlock.limit {
        None => Finding::pass(ID, "memory may be locked without limit"),
        Some(limit) => Finding::warn(
            ID,
            format!("no CAP_IPC_LOCK, and {limit} bytes may be locked"),
            "start it with `--cap-add=IPC_LOCK` or `--ulimit memlock=-1`",
        ),
    }
}

/// RDMA does not work through published ports, because a device belongs to one network namespace.
fn network(system: &System) -> Finding {
    const ID: &str = "container.network";
    let names = system.netdevs();
    let physical = names.iter().any(|name| {
        let net = system.roots.sys.join("class/net");
        net.join(name).join("device").exists()
    });
    if physical || !system.fabric.devices.is_empty() {
        Finding::pass(ID, format!("interfaces {}", names.join(", ")))
    } else {
        Finding::warn(
            ID,
            format!("only virtual interfaces: {}", names.join(", ")),
            "start it with `--network host`: RDMA is not carried by published ports (`-p`), and TCP is faster too",
        )
    }
}

fn hugepages(system: &System, scope: &Scope) -> Finding {
    const ID: &str = "container.hugepages";
    let free: u64 = system.hugepages.iter().map(|pool| pool.available()).sum();
    match free {
        0 => Finding::warn(
            ID,
            "the machine has no free huge pages",
            format!(
                "reserve them on the host: {}; the container needs no mount for them",
                memory::reserve(scope)
            ),
        ),
        pages => Finding::pass(ID, format!("{pages} pages free on the machine")),
    }
}
