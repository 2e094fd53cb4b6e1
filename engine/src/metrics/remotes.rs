//! Metrics of attached controllers of other targets.

use nacre_nvmf_remote::State;

use super::reactors::family;
use super::{Desc, MetricKind, MetricsSource, Moment, Scrape};

family!(
    STATE,
    "nacre_remote_state",
    Gauge,
    "1 for the state that an attached controller is in: `enabled`, `resetting` (it is being connected), `failed` or `deleting`; and by which transport.",
    ["controller", "state", "transport"]
);
family!(
    CONNECTS,
    "nacre_remote_connects",
    Counter,
    "Times that an attached controller was connected, the first among them.",
    ["controller"]
);
family!(
    LOSSES,
    "nacre_remote_losses",
    Counter,
    "Connections to an attached controller that ended with data that the target may not have flushed.",
    ["controller"]
);
family!(
    AWAY,
    "nacre_remote_away",
    Gauge,
    "1 while an attached controller has been away for longer than I/O waits for it.",
    ["controller"]
);
family!(
    FALLBACKS,
    "nacre_remote_fallbacks",
    Counter,
    "Times that an attached controller fell back from RDMA to TCP.",
    ["controller"]
);
family!(
    RETURNS,
    "nacre_remote_returns",
    Counter,
    "Times that an attached controller returned from TCP to RDMA.",
    ["controller"]
);
family!(
    DEVICES,
    "nacre_remote_devices",
    Gauge,
    "Namespaces of an attached controller: those in `use` as devices, and those that are `refused` because their identity changed or cannot be known.",
    ["controller", "standing"]
);

#[derive(Debug)]
pub struct RemoteMetrics;

impl MetricsSource for RemoteMetrics {
    fn describe(&self) -> &'static [&'static Desc] {
        static ALL: [&Desc; 7] = [
            &STATE, &CONNECTS, &LOSSES, &AWAY, &FALLBACKS, &RETURNS, &DEVICES,
        ];
        &ALL
    }

    fn collect(&self, of: &Moment, into: &mut Scrape) {
        for (name, remote) in of.engine.remotes.list() {
            let status = remote.attachment.status();
            let transport = status.transport.to_string();
            into.value(&STATE, &[&name, status.state.word(), &transport], 1u64);
            into.value(&CONNECTS, &[&name], status.connects);
            into.value(&LOSSES, &[&name], status.losses);
            let away = status.away && status.state != State::Live;
            into.value(&AWAY, &[&name], u64::from(away));
            if let Some(paths) = &status.paths {
                into.value(&FALLBACKS, &[&name], paths.fallbacks);
                into.value(&RETURNS, &[&name], paths.returns);
            }
            let devices = remote.attachment.devices();
            let refused = devices.iter().filter(|d| d.refusal().is_some()).count();
            let used = devices.len() - refused;
            let refused = refused + remote.attachment.refusals().len();
            into.value(&DEVICES, &[&name, "use"], used as u64);
            into.value(&DEVICES, &[&name, "refused"], refused as u64);
        }
    }
}
