//! Tests of the checks that contact a peer or transfer data, over simulated devices; and of the
//! checks of counters, drops and NUMA nodes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

use nacre_transport_rdma_perf::{DEFAULT_PORT, Server, ServerOptions};
use nacre_transport_rdma_verbs::sim::{self, ConnectFault};
use nacre_transport_rdma_verbs::{CmEventKind, CmOptions, DeviceAttributes};

use super::*;

const OURS: &str = "10.0.0.4";
const PEER: &str = "10.0.0.9";

/// The device of the simulated machine, and a peer's.
fn network(change: impl FnOnce(&mut DeviceAttributes)) -> sim::Fabric {
    let fabric = sim::Fabric::new();
    let mut ours = sim::attributes("rxe0");
    change(&mut ours);
    fabric.add_device(ours, &[ip(OURS), ip("fd00::4")]).unwrap();
    fabric
        .add_device(sim::attributes("peer"), &[ip(PEER)])
        .unwrap();
    fabric
}

fn machine(tree: &Tree, fabric: Option<&sim::Fabric>) -> System {
    let probe = ScriptedProbe {
        source: Some(ip(OURS)),
        rdma: fabric.cloned(),
        ..ScriptedProbe::default()
    };
    system(tree, &[("eth0", OURS), ("eth0", "fd00::4")], probe)
}

/// A `nacre rdma perf server` on the peer.
struct PeersServer(Arc<AtomicBool>, Option<JoinHandle<()>>);

impl PeersServer {
    fn start(fabric: &sim::Fabric) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (provider, stopped) = (fabric.provider(), Arc::clone(&stop));
        let (ready, listening) = channel();
        let thread = std::thread::spawn(move || {
            let at = SocketAddr::new(ip(PEER), DEFAULT_PORT);
            let mut server = Server::bind(provider, ServerOptions::new(vec![at])).unwrap();
            ready.send(()).unwrap();
            server.serve(&stopped, &mut |_| ()).unwrap();
        });
        listening.recv().unwrap();
        Self(stop, Some(thread))
    }
}

impl Drop for PeersServer {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        let _ = self.1.take().map(JoinHandle::join);
    }
}

fn peers(report: &Report) -> Vec<&Finding> {
    let of = |f: &&Finding| f.id == "net.peer" && f.subject.as_deref() == Some(PEER);
    report.findings.iter().filter(of).collect()
}

/// Goal: the finding about a peer over RDMA depends on its answer. Method: no listener, a target
/// that refuses, a ping-pong server, and no answer at all.
#[test]
fn a_peer_over_rdma() {
    let tree = testing::rxe_on_eth();
    let fabric = network(|_| ());
    let scope = |rdma| Scope {
        rdma,
        peer: Some(ip(PEER).into()),
        ..Scope::default()
    };
    let last = |rdma: bool| {
        let report = examine(&machine(&tree, Some(&fabric)), &scope(rdma));
        let finding = (*peers(&report).last().unwrap()).clone();
        (finding.status, finding.evidence)
    };
    let (status, evidence) = last(true);
    assert_eq!(status, Status::Warn, "{evidence}");
    assert!(evidence.contains(
        "its connection manager answers 10.0.0.4 over RDMA; nothing listens on port 4420 or 18515"
    ));

    // An NVMe/RDMA target refuses a request without a host's private data.
    let mut target = fabric.provider().connection_manager().unwrap();
    let at = SocketAddr::new(ip(PEER), 4420);
    target.listen(at, 4, CmOptions::default()).unwrap();
    let (done, until) = channel::<()>();
    let refusing = std::thread::spawn(move || {
        while until.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
            match target.next_event().unwrap() {
                Some(event) if matches!(event.kind, CmEventKind::ConnectRequest { .. }) => {
                    target.reject(event.id, &[0, 0, 1, 0]).unwrap();
                    target.destroy(event.id);
                }
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    });
    let (status, evidence) = last(false);
    assert_eq!(status, Status::Pass, "{evidence}");
    assert!(
        evidence.contains("a target answers over RDMA on port 4420"),
        "{evidence}"
    );
    drop(done);
    refusing.join().unwrap();

    let server = PeersServer::start(&fabric);
    let (status, evidence) = last(true);
    assert_eq!(status, Status::Pass, "{evidence}");
    assert!(
        evidence.starts_with(
            "a reliable connection by rxe0/1 from 10.0.0.4: 100 messages there and back, compared;"
        ),
        "{evidence}"
    );
    drop(server);

    fabric.fault_connects(ip(PEER), Some(ConnectFault::Unreachable));
    for (rdma, wanted) in [(true, Status::Fail), (false, Status::Warn)] {
        let (status, evidence) = last(rdma);
        assert_eq!(status, wanted, "{evidence}");
        assert!(evidence.contains("RDMA_CM_EVENT_UNREACHABLE"), "{evidence}");
    }
    assert_eq!(fabric.ids(), []);
}

/// Goal: without a device or libraries, the check of the peer reports why nothing was tried.
#[test]
fn a_peer_without_rdma_here() {
    let probe = ScriptedProbe {
        source: Some(ip(OURS)),
        ..ScriptedProbe::default()
    };
    let tree = testing::empty();
    tree.netdev("eth0", "52:54:00:00:00:01", 1500);
    let plain = system(&tree, &[("eth0", OURS)], probe);
    for (rdma, wanted) in [(true, Status::Fail), (false, Status::Skip)] {
        let scope = Scope {
            rdma,
            peer: Some(ip(PEER).into()),
            ..Scope::default()
        };
        let report = examine(&plain, &scope);
        let finding = *peers(&report).last().unwrap();
        assert_eq!(finding.status, wanted);
        assert!(finding.evidence.contains("no_rdma_dev"), "{finding:?}");
    }
    let scope = Scope {
        peer: Some(ip(PEER).into()),
        traffic: Some(1),
        ..Scope::default()
    };
    let report = examine(&machine(&testing::rxe_on_eth(), None), &scope);
    let finding = *peers(&report).last().unwrap();
    assert_eq!(finding.status, Status::Skip);
    assert!(
        finding.evidence.contains("no libraries here"),
        "{finding:?}"
    );
    expect(&report, "rdma.traffic", Status::Skip, "no libraries here");
    expect(&report, "rdma.cq", Status::Skip, "no libraries here");
}

/// Goal: data moves only on request, then through every address with RDMA, or to the peer; failures
/// are reported.
#[test]
fn traffic() {
    let tree = testing::rxe_on_eth();
    let fabric = network(|_| ());
    let scope = |traffic, peer| Scope {
        rdma: true,
        traffic,
        peer,
        ..Scope::default()
    };
    let of = |scope: &Scope| -> Vec<(Option<String>, Status, String)> {
        let report = examine(&machine(&tree, Some(&fabric)), scope);
        let of = report
            .findings
            .into_iter()
            .filter(|f| f.id == "rdma.traffic");
        of.map(|f| (f.subject, f.status, f.evidence)).collect()
    };
    let found = of(&scope(None, None));
    assert_eq!((found.len(), found[0].1), (1, Status::Skip));
    assert!(found[0].2.contains("`--traffic` moves 64 MiB"));

    let found = of(&scope(Some(1 << 20), None));
    let subjects: Vec<_> = found.iter().filter_map(|f| f.0.as_deref()).collect();
    assert_eq!(subjects, ["eth0 10.0.0.4", "eth0 fd00::4"]);
    for (_, status, evidence) in &found {
        // Simulated devices have no counters.
        assert_eq!(*status, Status::Skip);
        assert!(evidence.starts_with("1.0 MiB compared in "), "{evidence}");
        assert!(
            evidence.contains("do not count traffic to themselves"),
            "{evidence}"
        );
    }

    let to_peer = scope(Some(1 << 20), Some(ip(PEER).into()));
    let found = of(&to_peer);
    assert_eq!((found.len(), found[0].1), (1, Status::Skip));
    assert!(
        found[0]
            .2
            .contains("`nacre rdma perf server` there answers this check"),
        "{found:?}"
    );
    let server = PeersServer::start(&fabric);
    let found = of(&to_peer);
    assert_eq!(found.len(), 1);
    assert!(
        found[0].2.contains("no counter of the port moved"),
        "{found:?}"
    );
    drop(server);

    fabric.fault_connects(ip(OURS), Some(ConnectFault::ConnectError));
    let found = of(&scope(Some(1), None));
    assert_eq!(found[0].1, Status::Fail);
    assert!(
        found[0].2.contains("RDMA_CM_EVENT_CONNECT_ERROR"),
        "{found:?}"
    );
}

/// Goal: the device's completion entries are compared with a host's needs.
#[test]
fn completion_queues() {
    let tree = testing::rxe_on_eth();
    let scope = Scope {
        rdma: true,
        queues: 8,
        ..Scope::default()
    };
    let report = |max_cqe| {
        let fabric = network(|attributes| attributes.max_cqe = max_cqe);
        let report = examine(&machine(&tree, Some(&fabric)), &scope);
        let found = report.findings.into_iter().find(|f| f.id == "rdma.cq");
        found.unwrap()
    };
    // The shared receives and the send queues, as reserved by the transport.
    let needed = 2048 + 8 * 512 + 128;
    let finding = report(needed);
    assert_eq!(finding.status, Status::Pass, "{finding:?}");
    assert!(
        finding
            .evidence
            .contains("8 queues of depth 128 needs 6272 completion entries")
    );
    let finding = report(needed - 1);
    assert_eq!(finding.status, Status::Warn, "{finding:?}");
    assert!(finding.evidence.contains("the device allows 6271"));
}

/// Goal: a port without counters is reported with its driver; losses of an interface are a warning
/// if they are high.
#[test]
fn counters_and_drops() {
    let tree = testing::rxe_on_eth();
    let report = || examine(&machine(&tree, None), &Scope::default());
    tree.file(
        "sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts",
        "5",
    );
    expect(&report(), "rdma.counters", Status::Pass, "of the driver");
    expect(&report(), "net.drops", Status::Skip, "cannot be read");
    let statistics = |name: &str, value: &str| {
        tree.file(&format!("sys/class/net/eth0/statistics/{name}"), value);
    };
    statistics("rx_packets", "900000");
    statistics("tx_packets", "100000");
    statistics("rx_dropped", "0");
    expect(
        &report(),
        "net.drops",
        Status::Pass,
        "nothing lost of 1000000 packets",
    );
    statistics("rx_dropped", "100");
    expect(
        &report(),
        "net.drops",
        Status::Pass,
        "rx_dropped 100 of 1000000 packets",
    );
    statistics("rx_missed_errors", "101");
    expect(&report(), "net.drops", Status::Warn, "rx_missed_errors 101");

    let bare = testing::siw();
    let report = examine(
        &system(&bare, &[], ScriptedProbe::default()),
        &Scope::default(),
    );
    expect(&report, "rdma.counters", Status::Skip, "shows no counters");
}

/// Goal: a card or disk on another NUMA node than the usable CPUs is reported.
#[test]
fn numa_nodes() {
    let tree = testing::rxe_on_eth();
    let report = || examine(&machine(&tree, None), &Scope::default());
    tree.file("sys/devices/system/node/node0/cpulist", "0-3,8-11");
    tree.file("proc/self/status", "Name:\tx\nCpus_allowed_list:\t2-5");
    tree.file("sys/class/nvme/nvme0/transport", "pcie");
    tree.file("sys/class/nvme/nvme0/device/numa_node", "1");
    tree.file("sys/class/nvme/nvme1/transport", "tcp");
    expect(&report(), "numa.nic", Status::Pass, "one NUMA node");
    tree.file("sys/devices/system/node/node1/cpulist", "4-7,12-15");
    expect(&report(), "numa.nic", Status::Skip, "not known");
    expect(
        &report(),
        "numa.disk",
        Status::Pass,
        "node 1, 2 usable CPUs",
    );
    tree.file("sys/class/net/eth0/device/numa_node", "0");
    expect(&report(), "numa.nic", Status::Pass, "node 0, 2 usable CPUs");
    tree.file("proc/self/status", "Cpus_allowed_list:\t4,5");
    expect(
        &report(),
        "numa.nic",
        Status::Warn,
        "none of the CPUs that this process may use (2) is",
    );
}

/// Goal: `auto-numa` gets the cards of the listeners, also those below a VLAN on a bond, and all
/// cards where no listener selects one. Left out: devices without a node, disks of other machines.
#[test]
fn devices_with_their_nodes() {
    let tree = testing::rxe_on_eth();
    let system = |tree: &Tree| {
        let addresses = [
            ("eth0", "10.0.0.4"),
            ("bond0.7", "10.0.7.4"),
            ("virbr0", "10.9.0.1"),
        ];
        system(tree, &addresses, ScriptedProbe::default())
    };
    tree.file("sys/class/net/eth0/device/numa_node", "-1");
    tree.file("sys/class/net/eth2/device/numa_node", "1");
    tree.file("sys/class/net/eth1/device/numa_node", "0");
    tree.file("sys/class/net/bond0.7/lower_bond0/mtu", "1500");
    tree.file("sys/class/net/bond0/lower_eth2/mtu", "1500");
    tree.file("sys/class/net/bond0/lower_eth1/mtu", "1500");
    tree.file("sys/class/net/virbr0/mtu", "1500");
    tree.file("sys/class/nvme/nvme0/transport", "pcie");
    tree.file("sys/class/nvme/nvme0/device/numa_node", "1");
    tree.file("sys/class/nvme/nvme1/transport", "tcp");
    tree.file("sys/class/nvme/nvme1/device/numa_node", "0");
    let placed = |listeners: &[&str]| {
        let listeners: Vec<String> = listeners.iter().map(|l| (*l).to_owned()).collect();
        let (cards, disks) = placed_devices(&system(&tree), &listeners);
        let text = |all: Vec<Placed>| -> Vec<String> {
            let one = |p: Placed| format!("{} {}", p.device, p.node);
            all.into_iter().map(one).collect()
        };
        (text(cards), text(disks))
    };
    let disks = vec!["nvme0 1".to_owned()];
    let both = vec!["eth1 0".to_owned(), "eth2 1".to_owned()];
    assert_eq!(placed(&["name:bond0.7"]), (both.clone(), disks.clone()));
    assert_eq!(placed(&["ip:10.0.7.4"]), (both.clone(), disks.clone()));
    // Neither has a card with a node.
    assert_eq!(
        placed(&["name:virbr0", "name:eth0"]),
        (both.clone(), disks.clone())
    );
    assert_eq!(placed(&["ip:0.0.0.0"]), (both, disks));
}

/// Goal: counters of the right port confirm the path, those of another port disprove it. Method:
/// simulated counters before and after.
#[test]
fn counters_identify_the_port() {
    use super::super::live::{Activity, changes, counter_finding};
    let at = |ours: u64, other: u64| -> Activity {
        let of = |value| [("port_xmit_data".to_owned(), value)].into();
        [("a/1".to_owned(), of(ours)), ("b/1".to_owned(), of(other))].into()
    };
    let judged = |before, after, to_peer| {
        let finding = counter_finding(
            "1 MiB compared",
            "a/1",
            "eth0",
            &changes(&before, &after),
            to_peer,
        );
        (finding.status, finding.evidence)
    };
    let (status, evidence) = judged(at(5, 5), at(105, 5), true);
    assert_eq!(
        (status, evidence.as_str()),
        (Status::Pass, "1 MiB compared; a/1: port_xmit_data +100")
    );
    let (status, evidence) = judged(at(5, 5), at(5, 105), true);
    assert_eq!(status, Status::Fail);
    assert_eq!(
        evidence,
        "1 MiB compared, but not by a/1 of eth0; b/1: port_xmit_data +100"
    );
    // For traffic to the machine itself, another port's traffic proves nothing.
    assert_eq!(judged(at(5, 5), at(5, 105), false).0, Status::Skip);
    assert_eq!(judged(at(5, 5), at(5, 5), true).0, Status::Skip);
}
