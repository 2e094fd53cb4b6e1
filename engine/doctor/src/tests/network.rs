//! Tests of the checks of the network, of containers and of hosts.

use super::super::select::same_subnet;
use super::*;
use nacre_engine_values::selector::Selector;

#[test]
fn packet_filters() {
    let tree = testing::rxe_on_eth();
    let with = |rules: &'static str| {
        let probe = ScriptedProbe {
            output: HashMap::from([("nft", rules)]),
            ..ScriptedProbe::default()
        };
        examine(&system(&tree, &[], probe), &Scope::default())
    };
    tree.modules(&[], &["kernel/net/netfilter/nf_tables.ko"]);
    expect(
        &with(""),
        "net.firewall",
        Status::Pass,
        "no packet filter is loaded",
    );
    tree.modules(&["nf_tables"], &[]);
    let report = with("table inet filter {\n chain input {\n policy accept;\n }\n}");
    expect(&report, "net.firewall", Status::Pass, "UDP 4791");
    let report = with(
        "table inet filter {\n chain input {\n type filter hook input; policy drop;\n udp dport 1 reject\n }\n}",
    );
    expect(
        &report,
        "net.firewall",
        Status::Warn,
        "2 rules drop or reject",
    );
    let report = examine(
        &system(&tree, &[], ScriptedProbe::default()),
        &Scope::default(),
    );
    expect(&report, "net.firewall", Status::Skip, "cannot be read");
}

#[test]
fn the_route_to_a_peer_is_checked() {
    let tree = testing::rxe_on_eth();
    let scope = Scope {
        peer: Some(ip("10.0.0.9").into()),
        ..Scope::default()
    };
    let report = |probe| examine(&system(&tree, &[("eth0", "10.0.0.4")], probe), &scope);
    let scripted = |open: &[u16], echo| ScriptedProbe {
        source: Some(ip("10.0.0.4")),
        open: open.to_vec(),
        echo,
        ..ScriptedProbe::default()
    };
    let peers = |report: &Report| -> Vec<Status> {
        let of = report
            .findings
            .iter()
            .filter(|f| f.subject.as_deref() == Some("10.0.0.9"));
        of.map(|f| f.status).collect()
    };
    use Status::{Fail, Pass, Skip, Warn};
    assert_eq!(
        peers(&report(scripted(&[4420], Some(1500)))),
        [Pass, Pass, Skip, Pass, Skip]
    );
    assert_eq!(
        peers(&report(scripted(&[4420], Some(1400)))),
        [Pass, Pass, Skip, Warn, Skip]
    );
    // Without a small echo the larger ones say nothing.
    assert_eq!(
        peers(&report(scripted(&[], None))),
        [Warn, Warn, Skip, Skip, Skip]
    );
    assert_eq!(peers(&report(ScriptedProbe::default())), [Fail]);
}

/// Goal: the finding names the largest packets that pass, of the usual sizes; and a machine that
/// may not send echoes says so, with the remedy.
#[test]
fn the_path_mtu_is_found_by_echoes() {
    let tree = testing::rxe_on_eth();
    tree.netdev("eth0", "52:54:00:12:34:56", 9000);
    let finding = |probe: ScriptedProbe| {
        let scope = Scope {
            peer: Some(ip("10.0.0.9").into()),
            ..Scope::default()
        };
        let probe = ScriptedProbe {
            source: Some(ip("10.0.0.4")),
            ..probe
        };
        let report = examine(&system(&tree, &[("eth0", "10.0.0.4")], probe), &scope);
        let of = |f: &&Finding| f.id == "net.mtu" && f.subject.as_deref() == Some("10.0.0.9");
        report.findings.iter().find(of).expect("a finding").clone()
    };
    let echo = |largest| ScriptedProbe {
        echo: Some(largest),
        ..ScriptedProbe::default()
    };
    assert_eq!(finding(echo(9000)).status, Status::Pass);
    for (largest, evidence) in [
        (
            8999,
            "of 9000 bytes, not to be fragmented: no answer; packets of 4192 bytes pass",
        ),
        (4191, "packets of 1500 bytes pass"),
        (1499, "packets of 1280 bytes pass"),
        (64, "only packets of 64 bytes pass"),
    ] {
        let found = finding(echo(largest));
        assert_eq!(found.status, Status::Warn);
        assert!(found.evidence.contains(evidence), "{found:?}");
        assert!(
            found
                .remedy
                .is_some_and(|remedy| remedy.contains("eth0 has 9000"))
        );
    }
    let refused = finding(ScriptedProbe {
        echo_refused: true,
        ..ScriptedProbe::default()
    });
    assert_eq!(refused.status, Status::Skip);
    assert!(
        refused.evidence.contains("net.ipv4.ping_group_range"),
        "{refused:?}"
    );
}

#[test]
fn two_interfaces_in_one_network() {
    let tree = testing::rxe_on_eth();
    tree.netdev("eth1", "52:54:00:12:34:57", 1500);
    let report = |other| {
        let addresses = [("eth0", "10.0.0.4"), ("eth1", other)];
        examine(
            &system(&tree, &addresses, ScriptedProbe::default()),
            &Scope::default(),
        )
    };
    assert!(
        report("10.0.1.5")
            .findings
            .iter()
            .all(|f| f.id != "net.arp")
    );
    expect(
        &report("10.0.0.5"),
        "net.arp",
        Status::Warn,
        "arp_ignore 0, arp_announce 0",
    );
    tree.file("proc/sys/net/ipv4/conf/all/arp_ignore", "1");
    tree.file("proc/sys/net/ipv4/conf/eth0/arp_announce", "2");
    expect(
        &report("10.0.0.5"),
        "net.arp",
        Status::Pass,
        "arp_ignore 1, arp_announce 2",
    );
}

#[test]
fn io_uring_may_be_forbidden() {
    let tree = testing::rxe_on_eth();
    let allowed = system(&tree, &[], ScriptedProbe::default());
    let report = examine(&allowed, &rdma_scope(&[]));
    expect(&report, "disk.io_uring", Status::Pass, "plain");
    let forbidden = || ScriptedProbe {
        io_uring_refused: Some("io_uring_setup(2): Operation not permitted"),
        ..ScriptedProbe::default()
    };
    let remedy = |tree: &Tree| {
        let report = examine(&system(tree, &[], forbidden()), &rdma_scope(&[]));
        expect(&report, "disk.io_uring", Status::Warn, "not permitted");
        the(&report, "disk.io_uring").remedy.clone().unwrap()
    };
    assert!(remedy(&tree).contains("kernel.io_uring_disabled"));
    tree.file("proc/self/status", "CapEff:\t0000000000000000");
    tree.file("run/.containerenv", "");
    assert!(remedy(&tree).contains("seccomp=unconfined"));
}

#[test]
fn inside_a_container() {
    let tree = testing::rxe_on_eth();
    tree.file("run/.containerenv", "");
    tree.file("proc/self/status", "CapEff:\t0000000000000000");
    let mut machine = system(&tree, &[], ScriptedProbe::default());
    machine.environment.memlock.limit = Some(65536);
    let report = examine(&machine, &rdma_scope(&[]));
    expect(
        &report,
        "container.infiniband",
        Status::Pass,
        "rdma_cm granted",
    );
    expect(&report, "container.ipc_lock", Status::Warn, "65536 bytes");
    expect(&report, "container.network", Status::Pass, "eth0");
    expect(
        &report,
        "container.hugepages",
        Status::Warn,
        "no free huge pages",
    );
    machine.environment.rdma_cm = Access::Absent;
    let report = examine(&machine, &rdma_scope(&[]));
    expect(
        &report,
        "container.infiniband",
        Status::Fail,
        "rdma_cm absent",
    );

    // If the kernel has no RDMA, device nodes would not help.
    let tree = testing::empty();
    tree.file("run/.containerenv", "");
    tree.modules(&[], &["kernel/drivers/net/dummy.ko"]);
    let report = examine(
        &system(&tree, &[], ScriptedProbe::default()),
        &rdma_scope(&[]),
    );
    let found = report
        .findings
        .iter()
        .find(|f| f.id == "container.infiniband");
    let found = found.expect("checked in a container");
    assert!(found.evidence.contains("no RDMA"), "{found:?}");
    let remedy = found.remedy.as_deref().unwrap_or_default();
    assert!(!remedy.contains("--device"), "{found:?}");

    // Published ports: only one end of a veth pair.
    let tree = testing::empty();
    tree.file("proc/1/environ", "PATH=/bin\0container=podman\0");
    tree.netdev("eth0", "02:42:00:00:00:01", 1500);
    let report = examine(
        &system(&tree, &[], ScriptedProbe::default()),
        &Scope::default(),
    );
    expect(
        &report,
        "container.network",
        Status::Warn,
        "only virtual interfaces: eth0",
    );
}

#[test]
fn hosts() {
    let tree = testing::rxe_on_eth();
    tree.modules(&["nvme_tcp"], &["kernel/drivers/nvme/host/nvme-rdma.ko.xz"]);
    tree.file("sys/module/nvme_core/parameters/multipath", "Y");
    tree.file("dev/nvme-fabrics", "");
    let target = Some(Target {
        ip: ip("10.0.0.9"),
        port: 4420,
    });
    let probe = ScriptedProbe {
        source: Some(ip("10.0.0.4")),
        output: HashMap::from([("nvme", "nvme version 2.3 (git 2.3)\nlibnvme version 1.3")]),
        ..ScriptedProbe::default()
    };
    let machine = system(&tree, &[("eth0", "10.0.0.4")], probe);
    let report = examine_initiator(&machine, target);
    expect(&report, "init.nvme_cli", Status::Pass, "nvme version 2.3");
    expect(&report, "init.nvme_tcp_module", Status::Pass, "loaded");
    expect(
        &report,
        "init.nvme_rdma_module",
        Status::Pass,
        "can be loaded",
    );
    expect(&report, "init.rdma_dev", Status::Pass, "rxe0/1 (eth0)");
    expect(&report, "init.multipath", Status::Pass, "on");
    expect(
        &report,
        "init.route_to_target",
        Status::Pass,
        "by eth0 from 10.0.0.4",
    );
    expect(
        &report,
        "init.rdma_to_target",
        Status::Pass,
        "rxe0/1, GID 1",
    );
    expect(&report, "init.fabrics_device", Status::Pass, "is there");
    assert_eq!(report.failed + report.warnings, 0);

    let tree = testing::empty();
    tree.modules(&[], &["kernel/fs/ext4/ext4.ko"]);
    tree.file("sys/module/nvme_core/parameters/multipath", "N");
    let probe = ScriptedProbe {
        source: Some(ip("10.0.0.4")),
        ..ScriptedProbe::default()
    };
    let report = examine_initiator(&system(&tree, &[("eth0", "10.0.0.4")], probe), target);
    expect(&report, "init.nvme_cli", Status::Fail, "cannot be run");
    expect(&report, "init.nvme_tcp_module", Status::Fail, "no nvme_tcp");
    expect(
        &report,
        "init.nvme_rdma_module",
        Status::Warn,
        "no nvme_rdma",
    );
    expect(
        &report,
        "init.rdma_dev",
        Status::Warn,
        "No RDMA devices found",
    );
    expect(&report, "init.multipath", Status::Warn, "off");
    expect(
        &report,
        "init.rdma_to_target",
        Status::Warn,
        "TCP only: no_rdma_dev",
    );

    let report = examine_initiator(&system(&tree, &[], ScriptedProbe::default()), target);
    expect(&report, "init.route_to_target", Status::Fail, "no route");
    let cannot = "this kernel cannot connect";
    expect(&report, "init.fabrics_device", Status::Fail, cannot);

    // No list of modules and no device: connecting fails, which a skipped check would hide.
    let bare = testing::empty();
    let report = examine_initiator(&system(&bare, &[], ScriptedProbe::default()), None);
    expect(&report, "init.fabrics_device", Status::Fail, cannot);
    let installed = "are not installed here";
    expect(&report, "init.nvme_tcp_module", Status::Fail, installed);
    expect(&report, "init.nvme_rdma_module", Status::Warn, installed);

    let tree = testing::empty();
    tree.modules(&[], &["kernel/drivers/nvme/host/nvme-fabrics.ko.xz"]);
    let report = examine_initiator(&system(&tree, &[], ScriptedProbe::default()), None);
    expect(&report, "init.fabrics_device", Status::Pass, "loads it");
}

#[test]
fn subnets() {
    for (address, subnet, inside) in [
        ("10.0.0.4", "10.0.0.0/24", true),
        ("10.0.1.4", "10.0.0.0/24", false),
        ("10.0.1.4", "0.0.0.0/0", true),
        ("10.0.0.4", "10.0.0.4/32", true),
        ("10.0.0.5", "10.0.0.4/32", false),
        ("fd00::4", "fd00::/64", true),
        ("fd01::4", "fd00::/64", false),
        ("fd00::4", "10.0.0.0/8", false),
        ("10.0.0.4", "10.0.0.0/33", false),
        ("10.0.0.4", "10.0.0.0", false),
    ] {
        let found = match format!("subnet:{subnet}").parse() {
            Ok(Selector::Subnet(net, length)) => same_subnet(ip(address), net, length),
            _ => false,
        };
        assert_eq!(found, inside, "{address} {subnet}");
    }
}
