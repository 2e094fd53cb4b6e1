//! The features of this program and the maturity of each: the source of `nacre features`,
//! docs/reference/features.md and the line in the log at start.

use std::fmt::{Display, Write};

use nacre_transport_rdma_verbs::Wire;
use serde::Serialize;

use crate::services::Engine;

/// A feature, as users know it.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Feature {
    pub name: &'static str,
    pub maturity: Maturity,
    /// The first version that has it.
    pub since: &'static str,
    pub about: &'static str,
    /// True if the daemon uses an experimental feature; `None`: only commands use it.
    #[serde(skip)]
    pub used: Option<fn(&Engine) -> bool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Maturity {
    Stable,
    Preview,
    Experimental,
}

impl Maturity {
    const ALL: [Self; 3] = [Self::Stable, Self::Preview, Self::Experimental];

    pub fn word(self) -> &'static str {
        match self {
            Self::Stable => "stable",
            Self::Preview => "preview",
            Self::Experimental => "experimental",
        }
    }

    fn meaning(self) -> &'static str {
        match self {
            Self::Stable => {
                "Tests run it with stock Linux hosts. Its settings and its data stay compatible within a major version."
            }
            Self::Preview => {
                "Complete. Its tests use a simulated or emulated device, or Nacre at both ends, or its settings may still change."
            }
            Self::Experimental => {
                "No test runs it on the hardware that it is for, or a part of it is missing. It may change or go."
            }
        }
    }
}

impl Display for Maturity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.word())
    }
}

const fn stable(name: &'static str, about: &'static str) -> Feature {
    Feature {
        name,
        maturity: Maturity::Stable,
        since: "0.1.0",
        about,
        used: None,
    }
}

const fn preview(name: &'static str, about: &'static str) -> Feature {
    Feature {
        maturity: Maturity::Preview,
        ..stable(name, about)
    }
}

const fn experimental(
    name: &'static str,
    about: &'static str,
    used: Option<fn(&Engine) -> bool>,
) -> Feature {
    Feature {
        maturity: Maturity::Experimental,
        used,
        ..stable(name, about)
    }
}

pub const FEATURES: &[Feature] = &[
    stable(
        "nvme-tcp",
        "Serves hosts over NVMe/TCP, with digests and data in command capsules.",
    ),
    preview(
        "nvme-rdma",
        "Serves hosts over NVMe/RDMA, on RoCE cards and soft-RoCE.",
    ),
    experimental(
        "infiniband",
        "NVMe/RDMA on InfiniBand cards.",
        Some(|engine| is_used(engine, Wire::Infiniband)),
    ),
    experimental(
        "iwarp",
        "NVMe/RDMA on iWARP cards and soft-iWARP.",
        Some(|engine| is_used(engine, Wire::Iwarp)),
    ),
    stable(
        "discovery",
        "Lists subsystems and their addresses for hosts, with referrals and change events.",
    ),
    stable(
        "ana",
        "Reports the preferred paths to hosts, per listener and group.",
    ),
    experimental(
        "pools",
        "Storage pools with thin volumes, snapshots and clones, on up to 64 disks each.",
        Some(|engine| !engine.devices.pools.list().is_empty()),
    ),
    experimental(
        "backup",
        "Backups of snapshots of pools to directories and S3-compatible object stores.",
        Some(|engine| !engine.devices.backups.list().is_empty()),
    ),
    experimental(
        "clusters",
        "Daemons as nodes of a cluster, with etcd: `[cluster]` and `nacre cluster`.",
        Some(|engine| engine.cluster.state().is_some()),
    ),
    stable(
        "reservations",
        "Reservations of namespaces, which survive a restart.",
    ),
    preview(
        "static-controllers",
        "A subsystem whose hosts choose their controller by its id.",
    ),
    stable(
        "authentication",
        "Hosts and target prove to each other that they have a key (DH-HMAC-CHAP).",
    ),
    preview(
        "sealed-keys",
        "Keys that the daemon stores itself, sealed under a store key.",
    ),
    preview("tls", "TLS 1.3 with pre-shared keys over NVMe/TCP."),
    preview(
        "concat",
        "Keys of TLS made by authentication: secure channel concatenation, as target and as host.",
    ),
    preview(
        "rpc-tls",
        "Management over mutual TLS, with roles by certificate (`nacre --tls`).",
    ),
    preview(
        "roles",
        "Users and groups with roles at the management socket, and the audit log.",
    ),
    preview(
        "sandbox",
        "The daemon gives up capabilities, and the kernel filters its system calls.",
    ),
    stable(
        "files",
        "Files and disks as block devices, through io_uring.",
    ),
    stable(
        "memory-devices",
        "RAM disks, and null devices for measurements.",
    ),
    stable(
        "stacked-devices",
        "Delay, fault, passthru and equal parts on top of another device.",
    ),
    preview(
        "nvme-drives",
        "NVMe drives of this machine, driven in userspace through VFIO.",
    ),
    preview(
        "remote-devices",
        "Namespaces of other targets as block devices, over RDMA with TCP as the fallback.",
    ),
    preview(
        "volumes",
        "Volumes of one to five replicas, with resynchronisation, verification and growth.",
    ),
    preview(
        "qos-marking",
        "Marks the packets of hosts and of replicas with a DSCP and a priority.",
    ),
    experimental(
        "qos-apply",
        "Sets PFC, ETS and DSCP of a card by `nacre rdma qos apply`.",
        None,
    ),
    stable(
        "spdk-rpc",
        "The management calls, saved configurations and flags of SPDK's nvmf_tgt.",
    ),
    experimental(
        "alerts",
        "Messages about events to webhooks and by mail: `nacre alert`.",
        Some(|engine| !engine.alerts.receivers().is_empty()),
    ),
    experimental(
        "web",
        "The web server of the administration page: accounts, calls and live data.",
        Some(|engine| !engine.calls.page.listen().is_empty()),
    ),
    stable(
        "metrics",
        "Metrics for Prometheus with alerting rules and a Grafana dashboard, and events.",
    ),
];

/// True if the target, or a connection to another target, uses an RDMA device of this network type.
fn is_used(engine: &Engine, wire: Wire) -> bool {
    let served = engine.rdma.plug().map(|plug| plug.domains());
    let domains = served.unwrap_or_default().into_iter();
    let mut domains = domains.chain(engine.remotes.rdma_domains());
    domains.any(|domain| domain.attributes().wire == wire)
}

/// The line for the log that names the experimental features in use; `None`: there are none.
pub fn warning(engine: &Engine) -> Option<String> {
    let used = FEATURES
        .iter()
        .filter(|feature| feature.used.is_some_and(|used| used(engine)));
    let names: Vec<&str> = used.map(|feature| feature.name).collect();
    let names = names.join(", ");
    (!names.is_empty()).then(|| {
        format!("experimental features in use: {names}; `nacre features` explains the maturity")
    })
}

/// The reference of all features: docs/reference/features.md.
pub fn markdown() -> String {
    let mut out = String::from(
        "# Features\n\n\
         Written by `nacre features --reference`; do not edit.\n\n\
         The log names the experimental features in use, once, when the daemon is ready.\n\n\
         | maturity | |\n|---|---|\n",
    );
    for maturity in Maturity::ALL {
        let _ = writeln!(out, "| {maturity} | {} |", maturity.meaning());
    }
    out.push_str("\n| feature | maturity | since | |\n|---|---|---|---|\n");
    for feature in FEATURES {
        let Feature {
            name,
            maturity,
            since,
            about,
            ..
        } = feature;
        let _ = writeln!(out, "| {name} | {maturity} | {since} | {about} |");
    }
    out
}

#[cfg(test)]
mod tests {
    use nacre_transport_rdma_verbs::DeviceAttributes;
    use nacre_transport_rdma_verbs::sim::attributes;
    use serde_json::json;

    use super::*;
    use crate::methods::testing::test_daemon;

    /// Goal: a network that no test ran on is named, from the first listener on it.
    #[test]
    fn experimental_features_in_use_are_named() {
        let daemon = test_daemon();
        let device = DeviceAttributes {
            wire: Wire::Infiniband,
            ..attributes("sim0")
        };
        let address = "192.0.2.10".parse().unwrap();
        daemon.fabric.add_device(device, &[address]).unwrap();
        let nqn = "nqn.2026-01.org.example:a";
        daemon.call("nvmf_create_subsystem", json!({ "nqn": nqn }));
        assert_eq!(warning(&daemon.engine), None);
        let on = json!({ "trtype": "rdma", "traddr": address, "trsvcid": "4420" });
        let listener = json!({ "nqn": nqn, "listen_address": on });
        daemon.call("nvmf_subsystem_add_listener", listener);
        assert_eq!(
            warning(&daemon.engine).unwrap(),
            "experimental features in use: infiniband; `nacre features` explains the maturity"
        );
    }

    #[test]
    fn features_have_names_of_their_own_and_sentences() {
        let mut names = std::collections::BTreeSet::new();
        for feature in FEATURES {
            assert!(names.insert(feature.name), "{} twice", feature.name);
            assert!(feature.about.ends_with('.'), "{}", feature.about);
            let is_experimental = feature.maturity == Maturity::Experimental;
            assert!(is_experimental || feature.used.is_none());
        }
    }

    #[test]
    fn the_committed_reference_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/features.md");
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            committed == markdown(),
            "docs/reference/features.md is out of date: run `nacre features --reference > docs/reference/features.md`"
        );
    }
}
