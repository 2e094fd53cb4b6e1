//! Tests of the tuning profiles, on simulated cards.

use super::tree;
use crate::testing::Tree;
use crate::*;

const CARD: &str = "sys/devices/pci0/0000:3b:00.0";

/// A PCI configuration space whose PCI Express capability at 60h follows another one at 40h.
fn config(max_read_request: u16) -> Vec<u8> {
    let mut config = vec![0; 256];
    config[0x34] = 0x40;
    config[0x40..0x42].copy_from_slice(&[0x05, 0x60]);
    config[0x60..0x62].copy_from_slice(&[0x10, 0x00]);
    config[0x68..0x6a].copy_from_slice(&(max_read_request << 12 | 0x0936).to_le_bytes());
    config
}

/// A ConnectX in a slot with half of the card's lanes, behind an IOMMU that translates.
fn untuned() -> Tree {
    let tree = tree::mlx5_dual_port();
    for (name, value) in [
        ("current_link_speed", "8.0 GT/s PCIe"),
        ("current_link_width", "8"),
        ("max_link_speed", "16.0 GT/s PCIe"),
        ("max_link_width", "16"),
        ("iommu_group/type", "DMA-FQ"),
    ] {
        tree.file(&format!("{CARD}/{name}"), value);
    }
    std::fs::write(tree.path(&format!("{CARD}/config")), config(2)).unwrap();
    for cpu in 0..2 {
        tree.file(
            &format!("sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor"),
            "powersave",
        );
    }
    for node in ["node0", "node1"] {
        tree.file(&format!("sys/devices/system/node/{node}/cpulist"), "0-1");
    }
    tree
}

/// `name found recommended verdict` of each setting.
fn rows(tree: &Tree) -> Vec<String> {
    let roots = tree.roots();
    let fabric = Fabric::read(&roots.sys);
    tuning(&roots, &fabric.devices[0])
        .iter()
        .map(|setting| {
            format!(
                "{} {} {} {:?}",
                setting.name,
                setting.found.as_deref().unwrap_or("-"),
                setting.recommended,
                setting.verdict
            )
        })
        .collect()
}

/// Goal: each setting of a card that is not tuned is found, with the recommended value. Method: a
/// simulated ConnectX.
#[test]
fn a_card_that_is_not_tuned() {
    assert_eq!(
        rows(&untuned()),
        [
            "pcie.link 8.0 GT/s x8 16.0 GT/s x16 Differs",
            "pcie.iommu DMA-FQ identity Differs",
            "pcie.max_read_request 512 4096 Differs",
            "ethernet.path_mtu 4096 4096 Recommended",
            "ethernet.path_mtu 4096 4096 Recommended",
            "cpu.governor powersave performance Differs",
            "nacre.cores - cores of NUMA node 1 Unknown",
        ]
    );
}

/// Goal: a tuned card has nothing to change, and what only root can read is unknown, not wrong.
/// Method: the same card with the recommended values, then without the rest of its configuration
/// space.
#[test]
fn a_tuned_card() {
    let tree = untuned();
    tree.file(&format!("{CARD}/current_link_speed"), "16.0 GT/s PCIe");
    tree.file(&format!("{CARD}/current_link_width"), "16");
    tree.file(&format!("{CARD}/iommu_group/type"), "identity");
    let file = tree.path(&format!("{CARD}/config"));
    std::fs::write(&file, config(5)).unwrap();
    for cpu in 0..2 {
        tree.file(
            &format!("sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor"),
            "performance",
        );
    }
    let differing: Vec<String> = rows(&tree)
        .into_iter()
        .filter(|row| !row.ends_with("Recommended"))
        .collect();
    assert_eq!(differing, ["nacre.cores - cores of NUMA node 1 Unknown"]);

    std::fs::write(&file, &config(5)[..64]).unwrap();
    assert!(rows(&tree).contains(&"pcie.max_read_request - 4096 Unknown".to_owned()));
}

/// Goal: bytes of a configuration space that are not a list of capabilities end the search. Method:
/// a loop, and a pointer past the end.
#[test]
fn a_bad_configuration_space_is_unknown() {
    let tree = untuned();
    let file = tree.path(&format!("{CARD}/config"));
    let mut looped = config(5);
    looped[0x41] = 0x40;
    let mut past = config(5);
    past[0x41] = 0xff;
    for bytes in [looped, past, Vec::new()] {
        std::fs::write(&file, bytes).unwrap();
        assert!(rows(&tree).contains(&"pcie.max_read_request - 4096 Unknown".to_owned()));
    }
}

/// Goal: an Intel card shows which of its two protocols it speaks, if its ports show it. Method: a
/// simulated E810 with RoCE v2, with iWARP, and with neither.
#[test]
fn the_protocol_of_an_intel_card() {
    for (node_type, kind, found) in [
        ("1: CA", "RoCE v2", "RoCE v2 RoCE v2 Recommended"),
        ("4: RNIC", "IB/RoCE v1", "iWARP RoCE v2 Differs"),
        // Its ports have no usable entry.
        ("1: CA", "IB/RoCE v1", "- RoCE v2 Unknown"),
    ] {
        let tree = tree::mlx5_dual_port();
        tree.device("mlx5_0", &[("node_type", node_type)]);
        tree.remove(&format!("{CARD}/driver"));
        tree.link(&format!("{CARD}/driver"), "../../../bus/pci/drivers/ice");
        for port in 1..=2 {
            for index in 0..2 {
                let types = "gid_attrs/types";
                tree.file(
                    &format!("sys/class/infiniband/mlx5_0/ports/{port}/{types}/{index}"),
                    kind,
                );
            }
        }
        assert!(
            rows(&tree).contains(&format!("card.protocol {found}")),
            "{kind}: {:?}",
            rows(&tree)
        );
    }
}

#[test]
fn a_software_device_has_no_profile() {
    assert!(rows(&tree::rxe_on_eth()).is_empty());
}
