//! The checks of `nacre doctor` of the network: interfaces, MTU, packet filter, ARP, and the route
//! to a peer.

use std::net::SocketAddr;

use nacre_transport_rdma_link::{Fabric, NodeType};

use super::select::{no_interface, same_subnet, select, select_all};
use super::{Echo, EchoError, Finding, Scope, System, live};

/// Ports of NVMe over TCP and RDMA, and of RoCE v2 (IANA).
pub(super) use nacre_nvmf::address::NVME_PORT;
const ROCE_PORT: u16 = 4791;

pub(crate) fn checks(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    exists(system, scope, findings);
    mtu(system, findings);
    findings.push(firewall(system));
    shared(system, findings);
    arp(system, scope, findings);
    peer(system, scope, findings);
}

/// Checks of the interfaces that RDMA uses.
pub(crate) fn of_rdma(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    mtu(system, findings);
    shared(system, findings);
    arp(system, scope, findings);
}

fn exists(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    const ID: &str = "net.iface.exists";
    for selector in &scope.listeners {
        let found = select(system, selector);
        let finding = if !found.is_empty() {
            let found: Vec<String> = found
                .iter()
                .map(|selected| format!("{} {}", selected.netdev, selected.ip))
                .collect();
            Finding::pass(ID, found.join(", "))
        } else {
            Finding::fail(
                ID,
                no_interface(system, selector),
                "name an interface or address of this machine, or give the interface an address",
            )
        };
        findings.push(finding.of(selector));
    }
}

/// RoCE packets carry at most 4096 bytes, which need an interface MTU of 4192.
fn mtu(system: &System, findings: &mut Vec<Finding>) {
    const ID: &str = "net.mtu";
    const NEEDED: u32 = 4096 + 96;
    for netdev in rdma_netdevs(&system.fabric) {
        let Some(interface) = system.netdev_mtu(&netdev) else {
            findings.push(Finding::skip(ID, "the interface's MTU cannot be read").of(netdev));
            continue;
        };
        let port = system
            .fabric
            .ports_of(&netdev)
            .find_map(|(_, port)| port.mtu);
        let finding = match port {
            Some(path) if path >= 4096 => {
                Finding::pass(ID, format!("interface {interface}, RDMA {path}"))
            }
            Some(path) => Finding::warn(
                ID,
                format!("interface {interface}, RDMA {path}"),
                format!(
                    "`ip link set {netdev} mtu 9000` on all machines and switch ports: RDMA uses 4096 from {NEEDED} on"
                ),
            ),
            None => Finding::pass(ID, format!("interface {interface}")),
        };
        findings.push(finding.of(netdev));
    }
}

pub(super) fn rdma_netdevs(fabric: &Fabric) -> Vec<String> {
    let mut names: Vec<String> = fabric
        .ports()
        .filter_map(|(_, port)| port.netdev.clone())
        .collect();
    names.sort();
    names.dedup();
    names
}

fn firewall(system: &System) -> Finding {
    const ID: &str = "net.firewall";
    let ports = ports_in_words(&system.fabric);
    let loaded = ["nf_tables", "ip_tables", "ip6_tables"]
        .into_iter()
        .filter(|module| system.modules.state(module).is_there())
        .collect::<Vec<_>>();
    if loaded.is_empty() && system.modules.is_listed() {
        return Finding::pass(ID, format!("no packet filter is loaded; needed: {ports}"));
    }
    let rules = match system.probe.output("nft", &["list", "ruleset"]) {
        Ok(rules) => rules,
        Err(error) => {
            return Finding::skip(
                ID,
                format!(
                    "the packet filter's rules cannot be read ({error}); they must admit: {ports}"
                ),
            );
        }
    };
    let refuses = rules
        .lines()
        .filter(|line| {
            let words = || line.split([' ', '\t', ';']);
            words().any(|word| word == "drop" || word == "reject")
        })
        .count();
    match refuses {
        0 => Finding::pass(ID, format!("no rule refuses anything; needed: {ports}")),
        count => Finding::warn(
            ID,
            format!("{count} rules drop or reject; they must admit: {ports}"),
            format!(
                "if hosts cannot connect: `nft insert rule inet filter input tcp dport {{ {NVME_PORT}, 8009 }} accept` and \
                 `nft insert rule inet filter input udp dport {ROCE_PORT} accept`"
            ),
        ),
    }
}

/// Ports to admit. RDMA's connection manager has no TCP port: over RoCE its messages are in the
/// same UDP packets as the data.
fn ports_in_words(fabric: &Fabric) -> String {
    let mut words = vec![format!("TCP {NVME_PORT} and 8009 (NVMe/TCP, discovery)")];
    let has = |kind| fabric.devices.iter().any(|device| device.node_type == kind);
    if has(NodeType::Ca) || fabric.devices.is_empty() {
        words.push(format!(
            "UDP {ROCE_PORT} (RoCE v2: NVMe/RDMA's {NVME_PORT} is a service inside it, no port)"
        ));
    }
    if has(NodeType::Rnic) {
        words.push(format!("TCP {NVME_PORT} (NVMe/RDMA over iWARP)"));
    }
    words.join(", ")
}

/// Checks whether storage shares the interface of the default route.
fn shared(system: &System, findings: &mut Vec<Finding>) {
    const ID: &str = "net.shared";
    let defaults = default_routes(system);
    for netdev in rdma_netdevs(&system.fabric) {
        let finding = if !defaults.contains(&netdev) {
            Finding::pass(ID, "no default route leaves by it")
        } else {
            Finding::warn(
                ID,
                "the default route leaves by it: storage shares it with everything else",
                "use a network of its own for storage, or give storage a priority of its own",
            )
        };
        findings.push(finding.of(netdev));
    }
}

fn default_routes(system: &System) -> Vec<String> {
    let net = system.roots.proc.join("net");
    let v4 = system.text(net.join("route")).unwrap_or_default();
    let v6 = system.text(net.join("ipv6_route")).unwrap_or_default();
    // iface destination gateway flags refcnt use metric mask …
    let v4 = v4.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_default = *fields.get(1)? == "00000000" && *fields.get(7)? == "00000000";
        is_default.then(|| fields[0].to_owned())
    });
    // destination prefix … flags iface; the loopback has refusing entries.
    let v6 = v6.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let zeros = fields.first()?.chars().all(|c| c == '0') && *fields.get(1)? == "00";
        let name = *fields.last()?;
        (zeros && name != "lo").then(|| name.to_owned())
    });
    v4.chain(v6).collect()
}

/// Linux answers ARP for any of its addresses on any interface. With two interfaces in one network,
/// RDMA traffic arrives at the interface without the address, and is lost.
fn arp(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    const ID: &str = "net.arp";
    let names: Vec<String> = if scope.listeners.is_empty() {
        rdma_netdevs(&system.fabric)
    } else {
        select_all(system, scope)
            .into_iter()
            .map(|selected| selected.netdev)
            .collect()
    };
    for ours in &system.interfaces {
        if !names.contains(&ours.name) || ours.ip.is_ipv6() {
            continue;
        }
        let Some(other) = system
            .interfaces
            .iter()
            .find(|other| other.name != ours.name && same_subnet(other.ip, ours.ip, ours.prefix))
        else {
            continue;
        };
        let setting = |name: &str| {
            let conf = system.roots.proc.join("sys/net/ipv4/conf");
            let read = |of: &str| {
                let text = system.text(conf.join(of).join(name))?;
                text.parse::<u32>().ok()
            };
            // The larger of the two values applies.
            read("all").unwrap_or(0).max(read(&ours.name).unwrap_or(0))
        };
        let (ignore, announce) = (setting("arp_ignore"), setting("arp_announce"));
        let evidence = format!(
            "{} {} and {} {} are in one network; arp_ignore {ignore}, arp_announce {announce}",
            ours.name, ours.ip, other.name, other.ip
        );
        let finding = if ignore >= 1 && announce >= 2 {
            Finding::pass(ID, evidence)
        } else {
            Finding::warn(
                ID,
                evidence,
                "`sysctl net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2`, or a network for each",
            )
        };
        findings.push(finding.of(&ours.name));
    }
}

/// Checks a peer: route, ICMP echo, TCP port, RDMA, path MTU. Without a route, the others are left
/// out.
fn peer(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    const ID: &str = "net.peer";
    let port = if scope.port == 0 {
        NVME_PORT
    } else {
        scope.port
    };
    let (Some(peer), Some(at)) = (&scope.peer, scope.peer_at(port)) else {
        return;
    };
    let subject = peer.to_string();
    let mut push = |finding: Finding| findings.push(finding.of(&subject));
    let no_route = |why: &dyn std::fmt::Display| {
        Finding::fail(
            ID,
            format!("no route: {why}"),
            format!(
                "`ip route get {}`; add a route or an address in its network",
                peer.ip
            ),
        )
    };
    let at = match at {
        Ok(at) => at,
        Err(error) => return push(no_route(&error)),
    };
    let source = match system.probe.source_for(at) {
        Ok(source) => source,
        Err(error) => return push(no_route(&error)),
    };
    let interface = system.interface_of(source);
    let by = interface.map_or("an unknown interface", |interface| &interface.name);
    let echo = system.probe.echo(at, SMALL_ECHO);
    push(match &echo {
        Ok(Echo::Answered(time)) => Finding::pass(
            ID,
            format!(
                "{source} ({by}) reaches it by ICMP in {:.2} ms",
                time.as_secs_f64() * 1000.0
            ),
        ),
        Ok(other) => Finding::warn(
            ID,
            format!("an ICMP echo from {source} ({by}): {other}"),
            "check cable, VLAN and switch; some networks only drop ICMP",
        ),
        Err(error) => Finding::skip(
            ID,
            format!("route from {source} ({by}); an ICMP echo cannot be sent: {error}"),
        ),
    });
    push(match system.probe.connect(at) {
        Ok(()) => Finding::pass(ID, format!("TCP port {port} accepts")),
        Err(error) => Finding::warn(
            ID,
            format!("TCP port {port}: {error}"),
            format!(
                "is a target listening there over TCP, and does the packet filter admit TCP {port}? RDMA does not \
                 need it: RoCE v2 is UDP {ROCE_PORT}"
            ),
        ),
    });
    push(live::peer(system, scope, at, source));
    if let Some(mtu) = interface.and_then(|interface| system.netdev_mtu(&interface.name)) {
        push(path_mtu(system, at, by, mtu, echo));
    }
}

/// Bytes of the IP packet that shows whether the peer answers at all.
const SMALL_ECHO: u32 = 64;
/// IP packets are at most this long.
const LARGEST_PACKET: u32 = 65_535;
/// Sizes to try if packets of the interface's MTU do not pass: jumbo frames, a RoCE packet with
/// 4096 bytes, plain Ethernet, and the least MTU of IPv6.
const PATH_SIZES: [u32; 4] = [9000, 4192, 1500, 1280];

/// Finds the largest packets that reach the peer unfragmented. `small`: the outcome of the echo of
/// [`SMALL_ECHO`] bytes. Without its reply, larger packets are not tried.
fn path_mtu(
    system: &System,
    at: SocketAddr,
    by: &str,
    mtu: u32,
    small: Result<Echo, EchoError>,
) -> Finding {
    const ID: &str = "net.mtu";
    match small {
        Ok(Echo::Answered(_)) => {}
        Ok(other) => return Finding::skip(ID, format!("the path is unknown: {other}")),
        Err(error) => return Finding::skip(ID, format!("an ICMP echo cannot be sent: {error}")),
    }
    let largest = mtu.min(LARGEST_PACKET);
    let smaller = PATH_SIZES.into_iter().filter(|size| *size < largest);
    let mut why = None;
    for size in [largest].into_iter().chain(smaller) {
        let outcome = match system.probe.echo(at, size) {
            Ok(Echo::Answered(_)) if size == largest => {
                return Finding::pass(ID, format!("packets of {size} bytes pass unfragmented"));
            }
            Ok(Echo::Answered(_)) => {
                return too_long(
                    by,
                    largest,
                    why.as_ref(),
                    &format!("packets of {size} bytes pass"),
                );
            }
            Ok(outcome) => outcome,
            Err(error) => {
                return Finding::skip(ID, format!("an ICMP echo cannot be sent: {error}"));
            }
        };
        why.get_or_insert(outcome);
    }
    too_long(
        by,
        largest,
        why.as_ref(),
        &format!("only packets of {SMALL_ECHO} bytes pass"),
    )
}

fn too_long(by: &str, largest: u32, why: Option<&Echo>, passes: &str) -> Finding {
    let why = why.map_or(String::new(), |why| format!(": {why}"));
    Finding::warn(
        "net.mtu",
        format!("an echo of {largest} bytes, not to be fragmented{why}; {passes}"),
        format!("set the same MTU on both ends and every switch port between; {by} has {largest}"),
    )
}
