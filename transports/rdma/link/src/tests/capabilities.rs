//! Tests of [`crate::capability`]: the chosen port and GID, and the reason for each address that
//! RDMA cannot use.

use std::net::IpAddr;

use super::tree::{self, Tree};
use crate::*;

fn ask(tree: &Tree, want: &CapabilityRequest) -> Result<Chosen, Reason> {
    ask_with(tree, want, |_| {})
}

fn ask_with(
    tree: &Tree,
    want: &CapabilityRequest,
    change: impl FnOnce(&mut Environment),
) -> Result<Chosen, Reason> {
    let roots = tree.roots();
    let mut environment = Environment::read(&roots);
    change(&mut environment);
    capability(&Fabric::read(&roots.sys), want, &environment)
}

fn want(netdev: &str, ip: &str) -> CapabilityRequest {
    CapabilityRequest::new(netdev, ip.parse::<IpAddr>().unwrap())
}

fn chosen(outcome: Result<Chosen, Reason>) -> (String, u8, u16) {
    let chosen = outcome.expect("it is capable");
    (chosen.device, chosen.port, chosen.gid_index)
}

fn reason(outcome: Result<Chosen, Reason>) -> Reason {
    let reason = outcome.expect_err("it is not capable");
    assert!(Reason::WORDS.contains(&reason.word()));
    for text in [reason.to_string(), reason.evidence(), reason.remedy()] {
        assert!(!text.is_empty(), "{reason:?}");
    }
    // What programs read has the same word.
    let value = serde_word(&reason);
    assert_eq!(value, reason.word());
    reason
}

/// The tag that serde writes, without a format crate: it is the variant's name in snake case.
fn serde_word(reason: &Reason) -> String {
    let name = format!("{reason:?}");
    let name = name.split([' ', '{']).next().unwrap();
    let mut word = String::new();
    for c in name.chars() {
        if c.is_uppercase() && !word.is_empty() {
            word.push('_');
        }
        word.extend(c.to_lowercase());
    }
    word
}

#[test]
fn addresses_of_both_families_have_their_gid() {
    let tree = tree::rxe_on_eth();
    for (netdev, ip, index) in [
        ("eth0", "10.0.0.4", 1),
        ("eth0", "::ffff:10.0.0.4", 1),
        ("eth0", "fd00::4", 2),
        ("eth0", "fe80::5054:ff:fe12:3456", 0),
        ("eth0.7", "10.7.0.4", 3),
    ] {
        let found = chosen(ask(&tree, &want(netdev, ip)));
        assert_eq!(found, ("rxe0".into(), 1, index), "{ip}");
    }
}

#[test]
fn version_2_is_chosen_and_version_1_taken_when_named() {
    let tree = tree::mlx5_dual_port();
    let mut want = want("ens1f0", "10.0.1.4");
    assert_eq!(chosen(ask(&tree, &want)), ("mlx5_0".into(), 1, 1));
    want.gid_index = Some(0);
    let found = ask(&tree, &want).unwrap();
    assert_eq!((found.gid_index, found.gid_kind), (0, GidKind::RoceV1));
}

/// Goal: of two entries of an address, the one that the connection manager takes counts. Method:
/// the kernel's default, and the value of `cma_roce_mode`.
#[test]
fn the_gid_of_the_connection_manager() {
    let tree = tree::mlx5_dual_port();
    let used = |tree: &Tree| {
        let fabric = Fabric::read(tree.roots().sys);
        let port = fabric.device("mlx5_0").unwrap().port(1).unwrap();
        let used = port.gids.iter().filter(|gid| port.uses(gid));
        (port.roce_mode, used.map(|gid| gid.index).collect())
    };
    assert_eq!(used(&tree), (Some(GidKind::RoceV2), vec![1]));
    let mode = "sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_mode";
    tree.file(mode, "IB/RoCE v1");
    assert_eq!(used(&tree), (Some(GidKind::RoceV1), vec![0]));
    tree.file(mode, "RoCE v2");
    assert_eq!(used(&tree), (Some(GidKind::RoceV2), vec![1]));
    tree.remove(mode);
    tree.remove("sys/class/infiniband/mlx5_0/ports/1/gids/1");
    assert_eq!(used(&tree), (Some(GidKind::RoceV1), vec![0]));
    let fabric = Fabric::read(tree::infiniband().roots().sys);
    assert!(fabric.ports().all(|(_, port)| port.roce_mode.is_none()));
}

#[test]
fn only_version_1() {
    let tree = tree::mlx5_dual_port();
    tree.remove("sys/class/infiniband/mlx5_0/ports/1/gids/1");
    let reason = reason(ask(&tree, &want("ens1f0", "10.0.1.4")));
    assert_eq!(reason.word(), "unsupported_link");
    assert_eq!(
        reason.to_string(),
        "port 1 of RDMA device mlx5_0 has only RoCE v1 for 10.0.1.4"
    );
    assert!(reason.remedy().contains("gid_index = 0"));
}

#[test]
fn infiniband_and_iwarp_need_no_gid_of_the_address() {
    let found = ask(&tree::infiniband(), &want("ib0", "10.9.0.1")).unwrap();
    assert_eq!(
        (&found.device[..], found.gid_kind),
        ("mlx5_2", GidKind::InfiniBand)
    );
    let found = ask(&tree::siw(), &want("eth0", "10.0.0.4")).unwrap();
    assert_eq!(
        (&found.device[..], found.gid_kind),
        ("siw0", GidKind::Iwarp)
    );
    assert!(found.software);
}

#[test]
fn no_device() {
    let none = reason(ask(&tree::empty(), &want("eth0", "10.0.0.4")));
    assert_eq!(none.word(), "no_rdma_dev");
    assert_eq!(none.to_string(), "no RDMA device belongs to interface eth0");
    let evidence = none.evidence();
    assert!(
        evidence.starts_with("this kernel has no RDMA"),
        "{evidence}"
    );
    assert!(!none.remedy().contains("rxe"), "{}", none.remedy());

    let other = reason(ask(&tree::mlx5_dual_port(), &want("eth0", "10.0.0.4")));
    assert_eq!(
        other.evidence(),
        "have: mlx5_0/1 (ens1f0), mlx5_0/2 (ens1f1)"
    );

    let mut pinned = want("ens1f0", "10.0.1.4");
    pinned.device = Some("mlx5_1".into());
    let pinned = reason(ask(&tree::mlx5_dual_port(), &pinned));
    assert_eq!(
        pinned.to_string(),
        "RDMA device mlx5_1 does not belong to interface ens1f0"
    );
}

/// Goal: the second port of a device serves where its interface is, and where one interface is on
/// both ports (a bond) only if it is named. Method: the address is on port 2, then on both.
#[test]
fn the_second_port_of_a_device() {
    let tree = tree::mlx5_dual_port();
    tree.port("mlx5_0", 2, "4: ACTIVE", "5: LinkUp", "Ethernet");
    let on_port = |port: Option<u8>, netdev: &str, ip: &str| CapabilityRequest {
        port,
        ..want(netdev, ip)
    };
    let of = |port: Option<u8>| ask(&tree, &on_port(port, "ens1f1", "10.0.2.4"));
    assert_eq!(chosen(of(None)), ("mlx5_0".into(), 2, 1));
    assert_eq!(chosen(of(Some(2))), ("mlx5_0".into(), 2, 1));
    let other = reason(of(Some(1)));
    assert_eq!(other.word(), "no_rdma_dev");
    assert_eq!(
        other.to_string(),
        "no RDMA device has interface ens1f1 on its port 1"
    );
    assert!(other.remedy().contains("leave device and port out"));

    let ip = "0000:0000:0000:0000:0000:ffff:0a00:0104";
    tree.gid("mlx5_0", 2, 0, ip, "IB/RoCE v1", "ens1f0");
    tree.gid("mlx5_0", 2, 1, ip, "RoCE v2", "ens1f0");
    let of = |port: Option<u8>| ask(&tree, &on_port(port, "ens1f0", "10.0.1.4"));
    assert_eq!(chosen(of(None)), ("mlx5_0".into(), 1, 1));
    assert_eq!(chosen(of(Some(2))), ("mlx5_0".into(), 2, 1));
    let mut named = on_port(Some(2), "ens1f0", "10.0.1.4");
    named.device = Some("mlx5_0".into());
    assert_eq!(chosen(ask(&tree, &named)), ("mlx5_0".into(), 2, 1));
}

#[test]
fn port_down() {
    let down = reason(ask(&tree::mlx5_dual_port(), &want("ens1f1", "10.0.2.4")));
    assert_eq!(down.word(), "port_down");
    assert_eq!(down.evidence(), "state DOWN, physical state DISABLED");
}

#[test]
fn no_gid_for_the_address() {
    let tree = tree::rxe_on_eth();
    let none = reason(ask(&tree, &want("eth0", "10.0.0.5")));
    assert_eq!(none.word(), "no_gid_for_ip");
    assert!(
        none.evidence().contains("1 RoCE v2 10.0.0.4"),
        "{}",
        none.evidence()
    );
    // The address is there, on another interface.
    let elsewhere = reason(ask(&tree, &want("eth0", "10.7.0.4")));
    assert_eq!(elsewhere.word(), "no_gid_for_ip");
    // The entry that was named is not of the address.
    let mut named = want("eth0", "10.0.0.4");
    named.gid_index = Some(2);
    let named = reason(ask(&tree, &named));
    assert_eq!(
        named.to_string(),
        "GID 2 of port 1 of RDMA device rxe0 is not one of 10.0.0.4"
    );
}

#[test]
fn links_without_rdma_support() {
    let tree = tree::rxe_on_eth();
    let mut strict = want("eth0", "10.0.0.4");
    strict.allow_software = false;
    let software = reason(ask(&tree, &strict));
    assert_eq!(software.word(), "unsupported_link");
    let remedy = software.remedy();
    assert!(
        remedy.starts_with("set allow_software = true in [rdma] and in the [[nvmf.listener]]"),
        "{remedy}"
    );

    let tree = tree::mlx5_dual_port();
    tree.remove("sys/devices/pci0/0000:3b:00.0/driver");
    tree.link("sys/devices/pci0/0000:3b:00.0/driver", "../../drivers/efa");
    let efa = reason(ask(&tree, &want("ens1f0", "10.0.1.4")));
    assert_eq!(
        efa.to_string(),
        "RDMA device mlx5_0 (efa) has no reliable-connected queue pairs"
    );
}

#[test]
fn missing_process_permissions() {
    let want = want("eth0", "10.0.0.4");
    let word = |tree: &Tree| reason(ask(tree, &want)).evidence();

    let tree = tree::rxe_on_eth();
    tree.remove("dev/infiniband/rdma_cm");
    assert_eq!(word(&tree), "/dev/infiniband/rdma_cm is not there");

    tree.remove("dev/infiniband/uverbs0");
    let node = tree.path("dev/infiniband/uverbs0");
    assert_eq!(word(&tree), format!("{} is not there", node.display()));

    tree.remove("sys/class/infiniband_verbs/uverbs0/ibdev");
    assert_eq!(
        word(&tree),
        "/sys/class/infiniband_verbs has nothing for rxe0"
    );

    let tree = tree::rxe_on_eth();
    let missing = "libibverbs.so.1: cannot open shared object file";
    let library = reason(ask_with(&tree, &want, |e| e.library = Some(missing.into())));
    assert_eq!(
        (library.word(), &library.evidence()[..]),
        ("no_uverbs", missing)
    );

    let denied = reason(ask_with(&tree, &want, |e| e.rdma_cm = Access::Denied));
    assert_eq!(denied.word(), "no_rdma_cm");
    let denied = reason(ask_with(&tree, &want, |e| {
        e.uverbs[0].access = Access::Denied
    }));
    assert_eq!(denied.word(), "no_uverbs");
}

#[test]
fn locked_memory() {
    let tree = tree::rxe_on_eth();
    let want = want("eth0", "10.0.0.4");
    let limited = |needed| {
        ask_with(&tree, &want, |environment| {
            environment.memory_needed = needed;
            environment.memlock = Memlock {
                limit: Some(8 << 20),
                pinned: 1 << 20,
            };
        })
    };
    assert!(limited(7 << 20).is_ok());
    let low = reason(limited((7 << 20) + 1));
    assert_eq!(low.word(), "memlock");
    assert_eq!(
        low.evidence(),
        "7340033 bytes asked, 1048576 registered, limit 8388608"
    );
    assert!(low.remedy().starts_with("`ulimit -l 8193`"));

    tree.file(
        "proc/self/status",
        "VmPin:\t      12 kB\nCapEff:\t0000000000004000",
    );
    let root = Memlock::read(&tree.roots());
    assert_eq!((root.limit, root.pinned), (None, 12 << 10));
    assert!(root.admits(u64::MAX));
}
