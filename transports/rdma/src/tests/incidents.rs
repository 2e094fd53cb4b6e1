//! Tests of the incidents that operators are notified of.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nacre_transport_rdma_verbs::WcStatus;
use nacre_transport_rdma_verbs::sim::Target;

use super::faults::World;
use super::rig::{Options, TARGET, TestRig};
use crate::{Incident, RdmaHostOptions};

/// A failure is reported once, with all known facts: also the operation, which the completion does
/// not name.
#[test]
fn incidents() {
    let mut world = World::new(Options::default());
    let calls = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&calls);
    world.rig.plug.on_incident(move || {
        count.fetch_add(1, Ordering::Relaxed);
    });
    for (target, operation, vendor) in [
        (Target::Send, "SEND", "0x5e"),
        (Target::Write, "RDMA WRITE", "0x5e"),
        (Target::Read, "RDMA READ", "0x5e"),
        (Target::Recv, "RECV", "0x0"),
    ] {
        world.connect();
        let (ours, _) = world.qps();
        let status = WcStatus::RemoteOperation;
        world.rig.fabric.inject_status(ours, target, 0, status);
        world.submit();
        world.turns(20);
        let [failed] = &world.rig.plug.incidents()[..] else {
            panic!("one for each");
        };
        assert_eq!(failed.operation(), Some(operation));
        let Incident::QueuePairFailed { peer, .. } = failed else {
            panic!("{failed}");
        };
        let text = format!(
            "Work completion error: IBV_WC_REM_OP_ERR of a {operation} on queue pair {ours} of sim_target with {peer} \
             (vendor error {vendor}): the peer's device could not complete the request; look at the peer's log"
        );
        assert_eq!(failed.to_string(), text);
        world.disconnect_and_check(operation);
    }
    assert_eq!(calls.load(Ordering::Relaxed), 4);
    world.dial(RdmaHostOptions {
        qid: u16::MAX,
        ..TestRig::host_options()
    });
    world.turns(8);
    let refused = world.rig.plug.incidents();
    assert!(
        matches!(&refused[..], [Incident::Refused { why, .. }] if why == "queue 65535"),
        "{refused:?}"
    );
    world.disconnect_and_check("refused");
    // A connection and a listener are lost with the device, which is one.
    world.connect();
    world.rig.fabric.remove_device(world.rig.device);
    world.turns(10);
    let lost = world.rig.plug.incidents();
    let why = "its device was removed";
    let device = "sim_target".to_owned();
    assert_eq!(lost, [Incident::DeviceLost { device, why }]);
    world.disconnect_and_check("lost");
    // Incidents that no caller takes are bounded.
    let attributes = nacre_transport_rdma_verbs::sim::attributes("sim_target");
    world.rig.fabric.add_device(attributes, &[TARGET]).unwrap();
    world.turns(2);
    for _ in 0..70 {
        world.dial(RdmaHostOptions {
            qid: u16::MAX,
            ..TestRig::host_options()
        });
        world.turns(8);
        world.disconnect_and_check("refused again");
    }
    assert_eq!(world.rig.plug.incidents().len(), 64);
    assert_eq!(calls.load(Ordering::Relaxed), 4 + 1 + 1 + 64);
}

/// A failure is reported although the peer, which saw the same, ended the connection first. The
/// silence of a peer that ended the connection is not reported.
#[test]
fn the_peer_is_faster() {
    let mut world = World::new(Options::default());
    for (status, expected) in [(WcStatus::RemoteOperation, 1), (WcStatus::RetryExceeded, 0)] {
        world.connect();
        let (ours, _) = world.qps();
        world
            .rig
            .fabric
            .inject_status(ours, Target::Recv, 0, status);
        world.submit();
        world.host_leaves();
        world.turns(20);
        let incidents = world.rig.plug.incidents();
        assert_eq!(incidents.len(), expected, "{incidents:?}");
        world.disconnect_and_check(status.name());
    }
}
