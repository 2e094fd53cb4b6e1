//! Metrics of attached controllers of other targets.

use nacre_bdev::Bdev;
use nacre_nvmf_remote::{RemoteBdev, State};

use super::reactors::family;
use super::{Desc, MetricKind, MetricsSource, Moment, Scrape};

family!(
    STATE,
    "nacre_remote_state",
    Gauge,
    "1 for the state that an attached controller is in: `enabled`, `resetting` (it is being connected), `failed` or `deleting`; and by which transport. One series for each path.",
    ["controller", "address", "state", "transport"]
);
family!(
    CONNECTS,
    "nacre_remote_connects",
    Counter,
    "Times that an attached controller was connected, the first among them.",
    ["controller", "address"]
);
family!(
    LOSSES,
    "nacre_remote_losses",
    Counter,
    "Connections to an attached controller that ended with data that the target may not have flushed.",
    ["controller", "address"]
);
family!(
    AWAY,
    "nacre_remote_away",
    Gauge,
    "1 while an attached controller has been away for longer than I/O waits for it.",
    ["controller", "address"]
);
family!(
    FALLBACKS,
    "nacre_remote_fallbacks",
    Counter,
    "Times that an attached controller fell back from RDMA to TCP.",
    ["controller", "address"]
);
family!(
    RETURNS,
    "nacre_remote_returns",
    Counter,
    "Times that an attached controller returned from TCP to RDMA.",
    ["controller", "address"]
);
family!(
    DEVICES,
    "nacre_remote_devices",
    Gauge,
    "Namespaces of an attached controller: those in `use` as devices, and those that are `refused` because their identity changed or cannot be known.",
    ["controller", "standing"]
);

family!(
    PATH_ACCESS,
    "nacre_remote_path_state",
    Gauge,
    "1 for the ANA state of a device's namespace on a path: `optimized`, `non_optimized`, `inaccessible`, `persistent_loss`, `change`, or `unknown` while the path is not connected.",
    ["bdev", "address", "state"]
);
family!(
    PATH_CURRENT,
    "nacre_remote_path_current",
    Gauge,
    "Reactors that send new I/O of a remote device on a path.",
    ["bdev", "address"]
);
family!(
    PATH_IOS,
    "nacre_remote_path_ios",
    Counter,
    "Completed I/O of a remote device on a path.",
    ["bdev", "address", "op"]
);
family!(
    PATH_BYTES,
    "nacre_remote_path_bytes",
    Counter,
    "Bytes that were read and written on a path of a remote device.",
    ["bdev", "address", "op"]
);
family!(
    PATH_RESENT,
    "nacre_remote_path_resent",
    Counter,
    "I/O of a remote device that was sent again after it was on this path.",
    ["bdev", "address"]
);

fn device_paths(device: &RemoteBdev, into: &mut Scrape) {
    let name = device.name();
    for path in device.paths() {
        let (traddr, trsvcid) = &path.address;
        let address = if traddr.contains(':') {
            format!("[{traddr}]:{trsvcid}")
        } else {
            format!("{traddr}:{trsvcid}")
        };
        into.value(&PATH_ACCESS, &[name, &address, path.access_word()], 1u64);
        into.value(&PATH_CURRENT, &[name, &address], path.io.current);
        into.value(&PATH_IOS, &[name, &address, "read"], path.io.reads);
        into.value(&PATH_IOS, &[name, &address, "write"], path.io.writes);
        into.value(&PATH_BYTES, &[name, &address, "read"], path.io.read_bytes);
        into.value(&PATH_BYTES, &[name, &address, "write"], path.io.write_bytes);
        into.value(&PATH_RESENT, &[name, &address], path.io.resent);
    }
}

#[derive(Debug)]
pub struct RemoteMetrics;

impl MetricsSource for RemoteMetrics {
    fn describe(&self) -> &'static [&'static Desc] {
        static ALL: [&Desc; 12] = [
            &STATE,
            &CONNECTS,
            &LOSSES,
            &AWAY,
            &FALLBACKS,
            &RETURNS,
            &DEVICES,
            &PATH_ACCESS,
            &PATH_CURRENT,
            &PATH_IOS,
            &PATH_BYTES,
            &PATH_RESENT,
        ];
        &ALL
    }

    fn collect(&self, of: &Moment, into: &mut Scrape) {
        for (name, remote) in of.engine.remotes.list() {
            for path in remote.paths() {
                let (status, address) = (path.path.status(), path.wanted.address.to_string());
                let transport = status.transport.to_string();
                let labels = [&*name, &*address, status.state.word(), &transport];
                into.value(&STATE, &labels, 1u64);
                let labels = [&*name, &*address];
                into.value(&CONNECTS, &labels, status.connects);
                into.value(&LOSSES, &labels, status.losses);
                let away = status.away && status.state != State::Live;
                into.value(&AWAY, &labels, u64::from(away));
                if let Some(paths) = &status.paths {
                    into.value(&FALLBACKS, &labels, paths.fallbacks);
                    into.value(&RETURNS, &labels, paths.returns);
                }
            }
            let devices = remote.attachment.devices();
            for device in &devices {
                device_paths(device, into);
            }
            let refused = devices.iter().filter(|d| d.refusal().is_some()).count();
            let used = devices.len() - refused;
            let refused = refused + remote.attachment.refusals().len();
            into.value(&DEVICES, &[&name, "use"], used as u64);
            into.value(&DEVICES, &[&name, "refused"], refused as u64);
        }
    }
}
