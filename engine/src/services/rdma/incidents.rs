//! Reports RDMA failures as events, with the counters that indicate the cause.

use std::collections::BTreeMap;
use std::rc::Rc;

use nacre_transport_rdma::{Incident, StatsSnapshot};
use nacre_transport_rdma_link::{Fabric, Roots, counters};
use serde_json::{Value, json};

use crate::services::Engine;

/// Parts of the names of counters about loss, congestion and link failures. Drivers name the
/// counters differently.
const TELLING: [&str; 10] = [
    "err",
    "retr",
    "discard",
    "out_of_se",
    "timeout",
    "cnp",
    "ecn_",
    "downed",
    "nak",
    "drop",
];

/// Reports later failures of the transport as events.
pub(super) fn follow(engine: &Rc<Engine>) {
    let weak = Rc::downgrade(engine);
    let more = engine.rdma.incidents();
    tokio::task::spawn_local(async move {
        loop {
            more.notified().await;
            let Some(engine) = weak.upgrade() else { return };
            let Some(plug) = engine.rdma.plug() else {
                return;
            };
            let all = plug.incidents();
            if all.is_empty() {
                continue;
            }
            // Files of the kernel, which may query the device.
            let read = tokio::task::spawn_blocking(of_ports).await;
            let ports = read.unwrap_or_default();
            let mut done = BTreeMap::<String, StatsSnapshot>::new();
            for (device, stats) in plug.stats().into_iter().flat_map(|(_, devices)| devices) {
                let sum = done.entry(device).or_default();
                *sum = *sum + stats;
            }
            for incident in all {
                let (kind, subject, facts) = described(&incident, &done, &ports);
                let same = (subject, incident.cause());
                engine
                    .notes
                    .report_repeating(kind, same, incident.to_string(), facts);
            }
        }
    });
}

/// The counters of each port that are not 0 and match [`TELLING`], by device and port.
fn of_ports() -> BTreeMap<String, BTreeMap<String, u64>> {
    let roots = Roots::real();
    let fabric = Fabric::read(&roots.sys);
    let mut all = BTreeMap::<_, BTreeMap<_, _>>::new();
    for (device, port) in fabric.ports() {
        for counter in counters(&roots.sys, &device.name, port.num, None) {
            if counter.value > 0 && TELLING.iter().any(|part| counter.name.contains(part)) {
                let name = format!("{}/{}", port.num, counter.name);
                let of_device = all.entry(device.name.clone()).or_default();
                of_device.insert(name, counter.value);
            }
        }
    }
    all
}

/// Event type, subject and facts of a failure. Events with the same type and subject are
/// rate-limited.
fn described(
    incident: &Incident,
    done: &BTreeMap<String, StatsSnapshot>,
    ports: &BTreeMap<String, BTreeMap<String, u64>>,
) -> (&'static str, String, Value) {
    let counted = |device: &str| {
        let stats = done.get(device).copied().unwrap_or_default();
        let errors: BTreeMap<_, _> = stats.completion_errors().filter(|e| e.1 > 0).collect();
        json!({
            "completion_errors": errors,
            "retry_exceeded": stats.retry_exceeded(),
            "port": ports.get(device),
        })
    };
    match incident {
        Incident::QueuePairFailed {
            device,
            number,
            local,
            peer,
            status,
            vendor_error,
            ..
        } => (
            "rdma_queue_failed",
            peer.ip().to_string(),
            json!({
                "device": device, "qp_num": number, "local": local.to_string(), "peer": peer.to_string(),
                "status": status.name(), "vendor_error": vendor_error, "operation": incident.operation(),
                "meaning": status.meaning(), "remedy": incident.remedy(), "counters": counted(device),
            }),
        ),
        Incident::Refused {
            local,
            peer,
            status,
            why,
        } => (
            "rdma_refused",
            peer.ip().to_string(),
            json!({
                "local": local.to_string(), "peer": peer.to_string(), "status": status.name(),
                "code": *status as u16, "why": why, "remedy": incident.remedy(),
            }),
        ),
        Incident::DeviceLost { device, why } => (
            "rdma_device_lost",
            device.clone(),
            json!({ "device": device, "why": why, "remedy": incident.remedy(), "counters": counted(device) }),
        ),
    }
}
