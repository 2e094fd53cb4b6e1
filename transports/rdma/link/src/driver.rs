//! The known RDMA drivers: the kernel module of each, whether it supports reliable-connected queue
//! pairs, and notes for operators.

use std::fmt;

use serde::Serialize;

/// Hardware, or one of the kernel's software devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DriverKind {
    Hardware,
    /// Soft-RoCE.
    Rxe,
    /// Soft-iWARP.
    Siw,
}

impl DriverKind {
    pub fn is_software(self) -> bool {
        self != Self::Hardware
    }
}

impl fmt::Display for DriverKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hardware => "hardware",
            Self::Rxe => "rxe",
            Self::Siw => "siw",
        })
    }
}

/// An RDMA driver, and its suitability for NVMe/RDMA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quirk {
    /// The kernel module that creates the RDMA device.
    pub module: &'static str,
    /// A description for people.
    pub title: &'static str,
    /// Has reliable-connected queue pairs, which NVMe/RDMA needs.
    pub reliable_connected: bool,
    /// A note for operators.
    pub note: Option<&'static str>,
}

/// Finds the entry for the name of the bus device's driver, or of the RDMA module.
pub fn quirk(driver: &str) -> Option<&'static Quirk> {
    QUIRKS
        .iter()
        .find(|(names, _)| names.contains(&driver))
        .map(|(_, quirk)| quirk)
}

const fn good(module: &'static str, title: &'static str) -> Quirk {
    Quirk {
        module,
        title,
        reliable_connected: true,
        note: None,
    }
}

const fn noted(module: &'static str, title: &'static str, note: &'static str) -> Quirk {
    Quirk {
        note: Some(note),
        ..good(module, title)
    }
}

const QUIRKS: &[(&[&str], Quirk)] = &[
    (
        &["mlx5_core", "mlx5_ib"],
        good("mlx5_ib", "NVIDIA ConnectX-4 and later, BlueField"),
    ),
    (
        &["mlx4_core", "mlx4_ib"],
        good("mlx4_ib", "Mellanox ConnectX-3"),
    ),
    (
        &["irdma", "ice", "i40e", "idpf"],
        good("irdma", "Intel E810 (RoCE v2, iWARP) and X722 (iWARP)"),
    ),
    (
        &["bnxt_re", "bnxt_en"],
        good("bnxt_re", "Broadcom NetXtreme-E"),
    ),
    (&["qedr", "qede"], good("qedr", "Marvell FastLinQ")),
    (
        &["iw_cxgb4", "cxgb4"],
        good("iw_cxgb4", "Chelsio T4 and later, iWARP"),
    ),
    (
        &["hns_roce_hw_v2", "hns3"],
        good("hns_roce_hw_v2", "HiSilicon RoCE"),
    ),
    (&["erdma"], good("erdma", "Alibaba Elastic RDMA")),
    (&["mana_ib", "mana"], good("mana_ib", "Microsoft MANA")),
    (&["ocrdma", "be2net"], good("ocrdma", "Emulex OneConnect")),
    (
        &["vmw_pvrdma"],
        good("vmw_pvrdma", "VMware paravirtual RDMA"),
    ),
    (&["ib_mthca"], good("ib_mthca", "Mellanox InfiniHost")),
    (
        &["hfi1"],
        noted(
            "hfi1",
            "Omni-Path",
            "verbs on Omni-Path run on the processor: they work, and cost processor time",
        ),
    ),
    (
        &["efa"],
        Quirk {
            module: "efa",
            title: "Amazon Elastic Fabric Adapter",
            reliable_connected: false,
            note: Some("EFA has no reliable-connected queue pairs, which NVMe/RDMA needs"),
        },
    ),
    (
        &["usnic_verbs", "enic"],
        Quirk {
            module: "usnic_verbs",
            title: "Cisco usNIC",
            reliable_connected: false,
            note: Some(
                "usNIC has only unreliable datagrams; NVMe/RDMA needs reliable-connected queue pairs",
            ),
        },
    ),
    (
        &["rxe", "rdma_rxe"],
        noted("rdma_rxe", "soft-RoCE", "rxe: functional, not fast"),
    ),
    (
        &["siw"],
        noted("siw", "soft-iWARP", "siw: functional, not fast"),
    ),
];
