//! Metrics of the configured listeners: requested and actual state.

use std::collections::BTreeMap;

use super::reactors::family;
use super::{Desc, MetricKind, MetricsSource, Moment, Scrape};

family!(
    TRANSPORT,
    "nacre_listener_transport",
    Gauge,
    "Addresses of an interface on which the configuration file wants a listener: `listening`, `idle` (no subsystem uses them) or `absent`, with the reason.",
    ["iface", "transport", "state", "reason"]
);
family!(
    WITHHELD,
    "nacre_listener_withheld_connects",
    Counter,
    "Connects refused over a transport that the listener (tcp_fallback = false) or the volume (transport_policy) excludes.",
    []
);
family!(
    LOOKS,
    "nacre_listener_looks",
    Counter,
    "Reads of the machine's interfaces and RDMA devices.",
    []
);

family!(
    ACCEPTED,
    "nacre_listener_accepted",
    Counter,
    "Connections that a listener accepted since it was opened.",
    ["transport", "address"]
);
family!(
    REFUSED,
    "nacre_listener_refused",
    Counter,
    "Connections that a listener refused since it was opened, before it read any byte of them.",
    ["transport", "address"]
);
family!(
    OPERATIONS,
    "nacre_listener_operations",
    Counter,
    "Commands of queue pairs that connected through a listener.",
    ["transport", "address", "op"]
);
family!(
    BYTES,
    "nacre_listener_bytes",
    Counter,
    "Bytes moved by queue pairs that connected through a listener.",
    ["transport", "address", "op"]
);

#[derive(Debug)]
pub struct ListenerMetrics;

impl MetricsSource for ListenerMetrics {
    fn describe(&self) -> &'static [&'static Desc] {
        static ALL: [&Desc; 7] = [
            &TRANSPORT,
            &WITHHELD,
            &LOOKS,
            &ACCEPTED,
            &REFUSED,
            &OPERATIONS,
            &BYTES,
        ];
        &ALL
    }

    fn collect(&self, of: &Moment, into: &mut Scrape) {
        let mut counts = BTreeMap::<_, u64>::new();
        for status in of.engine.listeners.statuses(of.engine) {
            let (state, reason) = (status.actual.word(), status.actual.reason());
            let path = status.path;
            let labels = (path.iface, path.transport.trtype(), state, reason);
            *counts.entry(labels).or_default() += 1;
        }
        for ((iface, transport, state, reason), count) in counts {
            into.value(&TRANSPORT, &[&iface, transport, state, reason], count);
        }
        into.value(&LOOKS, &[], of.engine.listeners.checks());
        if let Some(plane) = &of.plane {
            into.value(&WITHHELD, &[], plane.target.withheld_connects());
            for listener in plane.target.listener_stats() {
                let (transport, address) =
                    (listener.transport.to_string(), listener.address.to_string());
                if let Some(counts) = listener.counts {
                    into.value(&ACCEPTED, &[&transport, &address], counts.accepted);
                    into.value(&REFUSED, &[&transport, &address], counts.refused);
                }
                for (op, of) in [
                    ("read", listener.totals.read),
                    ("write", listener.totals.write),
                    ("other", listener.totals.other),
                ] {
                    into.value(&OPERATIONS, &[&transport, &address, op], of.operations);
                    into.value(&BYTES, &[&transport, &address, op], of.bytes);
                }
            }
        }
    }
}
