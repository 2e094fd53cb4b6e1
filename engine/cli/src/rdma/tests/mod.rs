//! Tests of the tables and values of `nacre rdma`, on simulated machines.

mod perf;

use std::num::NonZeroU32;

use clap::Parser;
use nacre_transport_rdma::{RdmaConfig, bytes_per_core};
use nacre_transport_rdma_link::Fabric;
use nacre_transport_rdma_link::testing;
use nacre_transport_rdma_verbs::{DeviceAttributes, OnDemandPaging, Wire};

use super::counters::{CounterSample, chosen};
use super::devices::{device_row, gid_row, link_row};
use super::size::{Configured, Limits, Need, SizeArgs};
use nacre_engine::config::Personality;
use nacre_engine::config::Settings;
use nacre_engine::plane::demand::{Demand, data_path};
use nacre_engine::services::rdma::describe::{add_limits, described};

#[test]
fn a_card_in_tables() {
    let fabric = Fabric::read(testing::mlx5_dual_port().roots().sys);
    assert_eq!(
        device_row(&fabric.devices[0]),
        [
            "mlx5_0",
            "mlx5_core",
            "0c42:a103:0065:4b6e",
            "0c42:a103:0065:4b6e",
            "16.35.2000",
            "2",
            "ens1f0,ens1f1",
            "1"
        ]
    );
    let links: Vec<_> = fabric.ports().map(link_row).collect();
    assert_eq!(links[0], ["mlx5_0/1", "ACTIVE", "LINK_UP", "ens1f0"]);
    assert_eq!(links[1], ["mlx5_0/2", "DOWN", "DISABLED", "ens1f1"]);
    let (device, port) = fabric.ports().next().unwrap();
    let used: Vec<_> = port
        .gids
        .iter()
        .map(|gid| gid_row(device, port, gid))
        .map(|row| (row[3].clone(), row[5].clone(), row[7].clone()))
        .collect();
    let line = |kind: &str, used: &str| (kind.to_owned(), "10.0.1.4".to_owned(), used.to_owned());
    assert_eq!(used, [line("RoCE v1", "no"), line("RoCE v2", "yes")]);
}

#[test]
fn programs_get_every_value() {
    let value = described(&Fabric::read(testing::rxe_on_eth().roots().sys));
    for (at, wanted) in [
        ("/0/name", "rxe0"),
        ("/0/driver", "rxe"),
        ("/0/note", "rxe: functional, not fast"),
        ("/0/ports/0/state", "active"),
        ("/0/ports/0/gids/1/ip", "10.0.0.4"),
        ("/0/ports/0/gids/1/kind", "roce_v2"),
    ] {
        assert_eq!(
            value.pointer(at).and_then(|v| v.as_str()),
            Some(wanted),
            "{at}"
        );
    }
    assert_eq!(value[0]["software"], true);
}

#[test]
fn counters_and_their_changes() {
    let tree = testing::rxe_on_eth();
    let counter = "sys/class/infiniband/rxe0/ports/1/hw_counters";
    tree.file(&format!("{counter}/sent_pkts"), "100");
    tree.file(&format!("{counter}/rcvd_pkts"), "0");
    let roots = tree.roots();
    let ports = chosen(&Fabric::read(&roots.sys), Some("rxe0/1")).unwrap();
    let before = CounterSample::take(&roots, &ports);
    assert_eq!(before.rows(None, false).len(), 1);
    assert_eq!(before.rows(None, true).len(), 2);

    tree.file(&format!("{counter}/sent_pkts"), "130");
    let now = CounterSample::take(&roots, &ports);
    let row = &now.rows(Some(&before), false)[0];
    assert_eq!(row[..6], ["rxe0", "1", "driver", "sent_pkts", "130", "30"]);
    assert_eq!(now.json(Some(&before))["counters"][1]["change"], 30);

    // Reset meanwhile: counted from 0 again.
    tree.file(&format!("{counter}/sent_pkts"), "5");
    let reset = CounterSample::take(&roots, &ports);
    assert_eq!(reset.rows(Some(&now), false)[0][5], "5");
}

#[test]
fn missing_ports_are_refused() {
    let fabric = Fabric::read(testing::mlx5_dual_port().roots().sys);
    assert_eq!(chosen(&fabric, None).unwrap().len(), 2);
    assert_eq!(chosen(&fabric, Some("mlx5_0")).unwrap().len(), 2);
    for (port, said) in [
        ("mlx5_1", "there is no RDMA device \"mlx5_1\"; have: mlx5_0"),
        ("mlx5_0/3", "RDMA device \"mlx5_0\" has no port 3; it has 2"),
        (
            "mlx5_0/x",
            "\"x\" is no port: DEVICE/PORT, such as mlx5_0/1",
        ),
    ] {
        assert_eq!(chosen(&fabric, Some(port)).unwrap_err().to_string(), said);
    }
}

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    size: SizeArgs,
}

fn size(words: &str) -> SizeArgs {
    let words = std::iter::once("size").chain(words.split_whitespace());
    Line::try_parse_from(words).expect("it parses").size
}

fn need(args: &SizeArgs, settings: &Settings) -> Need {
    Need::of(args, &Configured::of(args, settings).unwrap())
}

#[test]
fn needs_are_summed() {
    let settings = Settings::default();
    let one = need(
        &size("--hosts 32 --queues 8 --depth 128 --srq 0 --reactors 1"),
        &settings,
    );
    assert_eq!(one.queue_pairs, 32 * 9);
    assert_eq!((one.send_wrs, one.recv_wrs), (256, 128));
    // A data transfer and a response for each command, READs, rounded up to a power of two.
    assert_eq!(one.cqes, 32 * 8 * (512 + 128) + 32 * (128 + 32));
    let core = |change: &dyn Fn(&mut RdmaConfig)| {
        let mut config = settings.rdma_transport();
        change(&mut config);
        bytes_per_core(&config)
    };
    assert_eq!(one.memory_bytes, core(&|config| config.srq_size = 0));

    let args = size("--hosts 32 --queues 8 --depth 128 --srq 4096 --reactors 4 --in-capsule 0");
    let shared = need(&args, &settings);
    assert_eq!(shared.recv_wrs, 4096);
    assert_eq!(shared.cqes, 64 * 512 + 8 * 128 + 4096);
    let each = core(&|config| (config.srq_size, config.in_capsule_data_size) = (4096, 0));
    assert_eq!(shared.memory_bytes, 4 * each);

    // Unrealistic numbers must not overflow.
    let max = NonZeroU32::MAX;
    let words = format!("--hosts {max} --queues {max} --depth 4096 --srq 262144 --reactors 1");
    assert_eq!(need(&size(&words), &settings).cqes, u64::MAX);
}

/// Goal: without options the output describes a daemon with this configuration.
#[test]
fn the_configuration_is_sized() {
    let mut settings = Settings::default();
    settings.reactor.cores = "auto:2".into();
    settings.rdma.srq_size = 512;
    settings.nvmf.max_queue_depth = 64;
    let args = size("--hosts 4 --queues 2");
    let found = need(&args, &settings);
    let config = data_path(&settings, &Default::default(), Personality::Nacre).unwrap();
    let demand = Demand::of(&config, Some(&settings.rdma_transport())).unwrap();
    assert_eq!((found.send_wrs, found.recv_wrs), (128, 512));
    let cores = config.cores.len().max(1) as u64;
    assert_eq!(
        found.memory_bytes,
        cores * bytes_per_core(&settings.rdma_transport())
    );
    assert!(demand.rdma.iter().sum::<u64>() >= found.memory_bytes);
}

#[test]
fn needs_meet_limits() {
    let args = size("--hosts 2 --queues 4 --depth 128 --srq 0 --reactors 1");
    let mut settings = Settings::default();
    let limits = Limits::from(&attributes("rxe0"));
    let over = |settings: &Settings| {
        let lines = need(&args, settings).against(Some(&limits));
        let over = lines.into_iter().filter(|line| !line.fits());
        over.map(|line| line.name).collect::<Vec<_>>()
    };
    assert_eq!(over(&settings), ["queue pairs"]);
    settings.rdma.max_qpairs = 9;
    assert_eq!(
        over(&settings),
        ["queue pairs", "queue pairs as configured"]
    );
}

/// An exceeded limit fails, with a remedy.
#[test]
fn an_exceeded_limit_fails_with_a_remedy() {
    let args = size("--hosts 2 --queues 4 --device rxe0 --json");
    let error = super::size::run(&args, || Ok(vec![attributes("rxe0")])).unwrap_err();
    assert!(matches!(error, crate::Failure::Failed(_)));
    let error = error.to_string();
    assert!(
        error.starts_with("it does not fit: queue pairs: 10 of 9; use fewer hosts"),
        "{error}"
    );
}

#[test]
fn limits_are_shown_or_the_reason_why_not() {
    let fabric = Fabric::read(testing::rxe_on_eth().roots().sys);
    let mut device = described(&fabric)[0].clone();
    add_limits(&mut device, &Err("libibverbs.so.1 is not there".into()));
    assert_eq!(device["limits_unknown"], "libibverbs.so.1 is not there");

    let mut device = described(&fabric)[0].clone();
    add_limits(&mut device, &Ok(vec![attributes("mlx5_0")]));
    assert!(device["limits"].is_null() && device["limits_unknown"].is_string());
    add_limits(&mut device, &Ok(vec![attributes("rxe0")]));
    assert_eq!(device["limits"]["max_qp"], 9);
    assert_eq!(device["limits"]["general_odp_caps"], "unknown");
    let mut pages = attributes("rxe0");
    pages.on_demand_paging = Some(OnDemandPaging {
        explicit: true,
        implicit: false,
        operations: vec!["SUPPORT_SEND", "SUPPORT_READ"],
    });
    add_limits(&mut device, &Ok(vec![pages.clone()]));
    assert_eq!(device["limits"]["general_odp_caps"], "ODP_SUPPORT");
    assert_eq!(
        device["limits"]["rc_odp_caps"],
        "SUPPORT_SEND, SUPPORT_READ"
    );
    pages.on_demand_paging = Some(OnDemandPaging::default());
    add_limits(&mut device, &Ok(vec![pages]));
    assert_eq!(device["limits"]["rc_odp_caps"], "none");

    let named = size("--hosts 2 --queues 4 --depth 128 --device rxe1 --json");
    let error = super::size::run(&named, || Ok(vec![attributes("rxe0")])).unwrap_err();
    assert_eq!(
        error.to_string(),
        "libibverbs shows no device \"rxe1\"; have: rxe0"
    );
    let error = super::size::run(&named, || Err("no library".into())).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the limits of rxe1 are unknown: no library"
    );
}

fn attributes(name: &str) -> DeviceAttributes {
    DeviceAttributes {
        name: name.into(),
        wire: Wire::Roce,
        node_guid: 1,
        sys_image_guid: 1,
        firmware: String::new(),
        vendor: (0, 0),
        ports: 1,
        numa_node: None,
        max_qp: 9,
        max_qp_wr: 256,
        max_sge: 4,
        max_sge_rd: 4,
        max_cq: 9,
        max_cqe: 100_000,
        max_mr: 9,
        max_mr_size: 1 << 30,
        max_pd: 9,
        max_responder_resources: 16,
        max_initiator_depth: 16,
        max_srq: 1,
        max_srq_wr: 256,
        max_srq_sge: 1,
        send_with_invalidate: true,
        on_demand_paging: None,
        software: true,
    }
}
