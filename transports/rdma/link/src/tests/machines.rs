//! Tests of the devices that are found in given sysfs files.

use super::tree;
use crate::*;

#[test]
fn a_machine_without_rdma_has_nothing() {
    let tree = tree::empty();
    let roots = tree.roots();
    assert_eq!(Fabric::read(&roots.sys), Fabric::default());
    let environment = Environment::read(&roots);
    assert!(environment.uverbs.is_empty());
    assert_eq!(environment.rdma_cm, Access::Absent);
    assert!(counters(&roots.sys, "mlx5_0", 1, Some("eth0")).is_empty());
}

#[test]
fn soft_roce_on_ethernet() {
    let fabric = Fabric::read(tree::rxe_on_eth().roots().sys);
    let [device] = &fabric.devices[..] else {
        panic!("{fabric:?}");
    };
    assert_eq!(device.kind, DriverKind::Rxe);
    assert!(device.is_software());
    assert_eq!(device.driver.as_deref(), Some("rxe"));
    assert_eq!((&device.fw, &device.bus, device.numa), (&None, &None, None));
    let port = &device.ports[0];
    assert_eq!(
        (port.state, port.phys_state),
        (PortState::Active, PhysState::LinkUp)
    );
    assert_eq!(port.netdev.as_deref(), Some("eth0"));
    assert_eq!(port.mtu, Some(1024));
    assert_eq!(port.gids.len(), 4);
    let ips: Vec<String> = port
        .gids
        .iter()
        .map(|g| g.ip.unwrap().to_string())
        .collect();
    assert_eq!(
        ips,
        ["fe80::5054:ff:fe12:3456", "10.0.0.4", "fd00::4", "10.7.0.4"]
    );
    assert!(port.carries("eth0.7") && !port.carries("eth1"));
}

#[test]
fn a_card_of_two_ports() {
    let tree = tree::mlx5_dual_port();
    let fabric = Fabric::read(tree.roots().sys);
    let device = fabric.device("mlx5_0").unwrap();
    assert_eq!(device.kind, DriverKind::Hardware);
    assert_eq!(device.driver.as_deref(), Some("mlx5_core"));
    assert_eq!(device.quirk().unwrap().module, "mlx5_ib");
    assert_eq!(device.fw.as_deref(), Some("16.35.2000"));
    assert_eq!(device.bus.as_deref(), Some("0000:3b:00.0"));
    assert_eq!(device.numa, Some(1));
    assert_eq!(device.ports.len(), 2);
    let second = device.port(2).unwrap();
    assert_eq!(
        (second.state, second.phys_state),
        (PortState::Down, PhysState::Disabled)
    );
    assert_eq!(second.netdev.as_deref(), Some("ens1f1"));
    assert_eq!(second.mtu, Some(4096));
    assert_eq!(second.gids[0].kind, GidKind::RoceV1);
    assert_eq!(second.gids[1].kind, GidKind::RoceV2);
}

/// The ports of a card without GIDs are found through the bus device that they share.
#[test]
fn ports_without_gids_have_their_interfaces() {
    let tree = tree::mlx5_dual_port();
    for port in [1, 2] {
        for index in [0, 1] {
            tree.remove(&format!(
                "sys/class/infiniband/mlx5_0/ports/{port}/gids/{index}"
            ));
        }
    }
    for (name, port) in [("ens1f0", "0"), ("ens1f1", "1")] {
        tree.file(
            &format!("sys/devices/pci0/0000:3b:00.0/net/{name}/dev_port"),
            port,
        );
    }
    let fabric = Fabric::read(tree.roots().sys);
    let netdevs: Vec<_> = fabric
        .ports()
        .map(|(_, port)| port.netdev.as_deref())
        .collect();
    assert_eq!(netdevs, [Some("ens1f0"), Some("ens1f1")]);
}

#[test]
fn infiniband_and_its_ip_interface() {
    let fabric = Fabric::read(tree::infiniband().roots().sys);
    let device = &fabric.devices[0];
    assert_eq!(device.numa, None);
    let port = &device.ports[0];
    assert_eq!(port.link_layer, LinkLayer::InfiniBand);
    assert_eq!((port.lid, port.sm_lid), (0x11, 1));
    assert_eq!(port.netdev.as_deref(), Some("ib0"));
    assert_eq!(port.mtu, None);
    assert_eq!(port.gids[0].kind, GidKind::InfiniBand);
    assert_eq!(port.gids[0].ip, None);
}

#[test]
fn soft_iwarp_is_found_by_its_address() {
    let fabric = Fabric::read(tree::siw().roots().sys);
    let device = &fabric.devices[0];
    assert_eq!(
        (device.kind, device.node_type),
        (DriverKind::Siw, NodeType::Rnic)
    );
    assert_eq!(device.ports[0].netdev.as_deref(), Some("eth0"));
    assert_eq!(device.ports[0].gids[0].kind, GidKind::Iwarp);
}

#[test]
fn counters_of_port_driver_and_interface() {
    let tree = tree::rxe_on_eth();
    let port = "sys/class/infiniband/rxe0/ports/1";
    tree.file(&format!("{port}/counters/port_xmit_data"), "4096");
    tree.file(&format!("{port}/hw_counters/sent_pkts"), "17");
    tree.file(&format!("{port}/hw_counters/lifespan"), "10");
    tree.file("sys/class/net/eth0/statistics/rx_dropped", "3");
    let read = counters(tree.roots().sys, "rxe0", 1, Some("eth0"));
    let read: Vec<_> = read
        .iter()
        .map(|c| (c.group, &c.name[..], c.value))
        .collect();
    assert_eq!(
        read,
        [
            (CounterGroup::Port, "port_xmit_data", 4096),
            (CounterGroup::Hardware, "sent_pkts", 17),
            (CounterGroup::Netdev, "rx_dropped", 3),
        ]
    );
}

#[test]
fn modules_in_every_state() {
    let tree = tree::empty();
    assert!(!Modules::read(&tree.roots()).is_listed());
    tree.modules(
        &["rdma_ucm"],
        &[
            "kernel/drivers/infiniband/core/ib_uverbs.ko.xz",
            "kernel/drivers/nvme/host/nvme-rdma.ko",
        ],
    );
    let modules = Modules::read(&tree.roots());
    assert!(modules.is_listed());
    for (name, state) in [
        ("rdma_ucm", ModuleState::Loaded),
        ("rdma-ucm", ModuleState::Loaded),
        ("ib_uverbs", ModuleState::Loadable),
        ("nvme_rdma", ModuleState::Loadable),
        ("nvme_core", ModuleState::BuiltIn),
        ("rdma_rxe", ModuleState::Missing),
    ] {
        assert_eq!(modules.state(name), state, "{name}");
    }
}

#[test]
fn the_path_mtu_is_the_kernels() {
    use crate::fabric::path_mtu;
    for (interface, path) in [
        (9000, Some(4096)),
        (4192, Some(4096)),
        (4191, Some(2048)),
        (1500, Some(1024)),
        (1119, Some(512)),
        (352, Some(256)),
        (351, None),
        (68, None),
    ] {
        assert_eq!(path_mtu(interface), path, "{interface}");
    }
}

#[test]
fn every_driver_is_known_by_one_name() {
    for name in [
        "mlx5_core",
        "irdma",
        "bnxt_re",
        "qedr",
        "rxe",
        "siw",
        "hfi1",
    ] {
        assert!(quirk(name).unwrap().reliable_connected, "{name}");
    }
    assert!(!quirk("efa").unwrap().reliable_connected);
    assert_eq!(quirk("virtio_net"), None);
}
