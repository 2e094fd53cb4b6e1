//! The bdev conformance suite on a remote namespace, over TCP and over simulated RDMA.

use std::cell::RefCell;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::Bdev;
use nacre_bdev::conformance::Suite;
use nacre_hugepages::Pool;
use nacre_nvmf::host::Connector;
use nacre_nvmf::host::PathOptions;
use nacre_nvmf::transport::{Address, Plug, TransportType};
use nacre_tests::target::{SUBNQN, TestTarget, nqn, ram};
use nacre_transport_connect::{PathConnector, Rdma, RdmaTuning};
use nacre_transport_rdma::{RdmaConfig, RdmaPlug};
use nacre_transport_rdma_verbs::VerbsError;
use nacre_transport_rdma_verbs::sim::{Fabric, attributes};

use super::rig::{AttachedRemote, ENTRIES, config, options, tcp};

fn device(attached: &AttachedRemote, nsid: u32) -> Arc<dyn Bdev> {
    let devices = attached.attachment.devices();
    let found = devices.into_iter().find(|device| device.nsid() == nsid);
    found.expect("it was registered")
}

#[test]
fn over_tcp() {
    let target = TestTarget::start();
    for block_size in [512, 4096] {
        target.add_namespace(ram(&format!("ram{block_size}"), block_size, 8 << 20));
    }
    let attached = AttachedRemote::to(config(options()), tcp(target.address));
    for nsid in [1, 2] {
        Suite::new(|| device(&attached, nsid)).run();
    }
}

#[test]
fn over_rdma() {
    let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let fabric = Fabric::new();
    let host = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
    fabric.add_device(attributes("sim_host"), &[host]).unwrap();
    fabric
        .add_device(attributes("sim_target"), &[here])
        .unwrap();
    let rdma = RdmaConfig {
        max_qpairs: 32,
        srq_size: 512,
        ..RdmaConfig::default()
    };
    let target = TestTarget::start_with(SocketAddr::new(here, 0), |arenas| {
        vec![Arc::new(RdmaPlug::new(rdma, fabric.provider(), arenas).unwrap()) as Arc<dyn Plug>]
    });
    let listen = Address::Ip(target.address);
    let added = target
        .target
        .add_listener(&nqn(SUBNQN), TransportType::Rdma, &listen);
    added.unwrap();
    target.add_namespace(ram("ram", 512, 8 << 20));

    let tuning = RdmaTuning {
        entries: ENTRIES,
        cm_timeout: Duration::from_secs(5),
    };
    let absence = || VerbsError::Unavailable {
        what: "none is simulated".into(),
        remedy: "add one".into(),
    };
    let rdma = Arc::new(Rdma::over(fabric.provider(), Box::new(absence), tuning));
    let connector: Arc<dyn Connector> =
        Arc::new(PathConnector::new(Arc::clone(&rdma), target.address, None));
    let mut options = options();
    options.connect_timeout = Duration::from_secs(20);
    options.paths = Some(PathOptions::new(TransportType::Rdma, None));
    let attached = AttachedRemote::to(config(options), connector);
    let status = attached.attachment.status();
    assert_eq!(status.transport, TransportType::Rdma);

    thread_local! {
        // A simulated device never forgets its memory, so memory of finished tests is reused.
        static MEMORY: RefCell<Vec<Pool>> = const { RefCell::new(Vec::new()) };
    }
    let unused = |pool: &&Pool| pool.stats().iter().all(|class| class.free == class.count);
    Suite::new(|| device(&attached, 1))
        .memory(move |classes| {
            MEMORY.with_borrow_mut(|all| {
                if let Some(pool) = all.iter().find(unused) {
                    return pool.clone();
                }
                all.push(rdma.memory(classes).expect("memory for a device"));
                all[all.len() - 1].clone()
            })
        })
        .run();
}
