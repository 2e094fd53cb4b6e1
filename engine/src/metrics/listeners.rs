//! The listeners of the configuration file: what is wanted, and whether it is there.

use std::collections::BTreeMap;

use super::reactors::family;
use super::{Desc, Kind, MetricsSource, Moment, Scrape};

family!(
    TRANSPORT,
    "nacre_listener_transport",
    Gauge,
    "Addresses of an interface that the configuration file wants listened on: `listening`, `idle` (no subsystem asks for them) or `absent`, with the reason.",
    ["iface", "transport", "state", "reason"]
);
family!(
    WITHHELD,
    "nacre_listener_withheld_connects",
    Counter,
    "Connects refused over TCP because tcp_fallback is false.",
    []
);
family!(
    LOOKS,
    "nacre_listener_looks",
    Counter,
    "Times that the machine's interfaces and RDMA devices were looked at.",
    []
);

#[derive(Debug)]
pub struct Listeners;

impl MetricsSource for Listeners {
    fn describe(&self) -> &'static [&'static Desc] {
        static ALL: [&Desc; 3] = [&TRANSPORT, &WITHHELD, &LOOKS];
        &ALL
    }

    fn collect(&self, of: &Moment, into: &mut Scrape) {
        let mut counts = BTreeMap::<_, u64>::new();
        for standing in of.engine.listeners.standings() {
            let (state, reason) = (standing.actual.word(), standing.actual.reason());
            let path = standing.path;
            let labels = (path.iface, path.transport.trtype(), state, reason);
            *counts.entry(labels).or_default() += 1;
        }
        for ((iface, transport, state, reason), count) in counts {
            into.value(&TRANSPORT, &[&iface, transport, state, reason], count);
        }
        into.value(&LOOKS, &[], of.engine.listeners.looks());
        if let Some(plane) = &of.plane {
            into.value(&WITHHELD, &[], plane.target.withheld_connects());
        }
    }
}
