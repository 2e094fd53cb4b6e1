//! `csi.v1.Identity`, and calls that no service has.

use nacre_cluster_csi::messages::Nothing;
use nacre_cluster_csi::messages::identity::{
    GetPluginCapabilitiesResponse, GetPluginInfoResponse, PluginFeature, ProbeResponse, ServiceKind,
};
use nacre_cluster_csi::{Driver, Identity};
use tonic::{Code, Status};

use crate::client::{Served, wanted};

fn alone(is_ready: impl Fn() -> Result<bool, Status> + Send + Sync + 'static) -> Served {
    Served::start(Driver {
        identity: Identity::new(is_ready),
        controller: None,
        node: None,
    })
}

/// GetPluginInfo: "The name MUST follow domain name notation format … 63 characters or less".
#[test]
fn the_name_is_a_domain_name() {
    let info: GetPluginInfoResponse = alone(|| Ok(true))
        .call("Identity/GetPluginInfo", Nothing {})
        .expect("an answer");
    assert_eq!(info.name, nacre_cluster_csi::DRIVER_NAME);
    let is_good = |label: &str| {
        let ends = label.starts_with(|c: char| c.is_ascii_alphanumeric())
            && label.ends_with(|c: char| c.is_ascii_alphanumeric());
        ends && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
    };
    assert!(info.name.len() <= 63 && info.name.split('.').all(is_good));
    assert!(!info.vendor_version.is_empty());
}

/// GetPluginCapabilities: CONTROLLER_SERVICE if there is a controller, in this process or another;
/// no VOLUME_ACCESSIBILITY_CONSTRAINTS, because all nodes reach all volumes.
#[test]
fn a_controller_is_advertised() {
    let found: GetPluginCapabilitiesResponse = alone(|| Ok(true))
        .call("Identity/GetPluginCapabilities", Nothing {})
        .expect("an answer");
    let features = found.capabilities.iter().filter_map(|one| one.feature);
    let services = features.filter_map(|feature| match feature {
        PluginFeature::Service(service) => Some(service.kind()),
        PluginFeature::VolumeExpansion(_) => None,
    });
    let services: Vec<ServiceKind> = services.collect();
    assert_eq!(services, [ServiceKind::Controller]);
}

/// Probe: ready is false while the plugin initializes; FAILED_PRECONDITION if it is not healthy.
#[test]
fn a_probe_returns_readiness() {
    for ready in [true, false] {
        let found: ProbeResponse = alone(move || Ok(ready))
            .call("Identity/Probe", Nothing {})
            .expect("an answer");
        assert_eq!(found.ready.map(|found| found.value), Some(ready));
    }
    let sick = alone(|| Err(Status::failed_precondition("no kernel module")));
    sick.refused("Identity/Probe", Nothing {}, Code::FailedPrecondition);
}

/// Error scheme: "Call not implemented": UNIMPLEMENTED, also for a service of another process.
#[test]
fn unknown_calls_are_not_implemented() {
    let driver = alone(|| Ok(true));
    for method in [
        "Controller/CreateSnapshot",
        "Controller/ControllerModifyVolume",
        "GroupController/GroupControllerGetCapabilities",
        "Controller/None",
        "Controller/CreateVolume",
        "Controller/ControllerGetCapabilities",
        "Node/NodeGetInfo",
        "Node/NodeGetCapabilities",
    ] {
        driver.refused(method, Nothing {}, Code::Unimplemented);
    }
}

/// Size limits: a request of more than the sum of all fields' limits is not read.
#[test]
fn a_giant_request_is_refused() {
    let driver = alone(|| Ok(true));
    let giant = wanted(&"x".repeat(1 << 20), 1);
    driver.refused("Controller/CreateVolume", giant, Code::OutOfRange);
}
