//! Metrics of alerts, by receiver.

use super::reactors::family;
use super::{Desc, MetricKind, MetricsSource, Moment, Scrape};

family!(
    DELIVERED,
    "nacre_alert_delivered_messages",
    Counter,
    "Messages that the receiver accepted.",
    ["receiver"]
);
family!(
    FAILED,
    "nacre_alert_failed_attempts",
    Counter,
    "Attempts to deliver a message that failed.",
    ["receiver"]
);
family!(
    DROPPED,
    "nacre_alert_dropped_messages",
    Counter,
    "Messages that were given up.",
    ["receiver"]
);
family!(
    PENDING,
    "nacre_alert_pending_events",
    Gauge,
    "Events that wait to be sent.",
    ["receiver"]
);

#[derive(Debug)]
pub struct AlertMetrics;

impl MetricsSource for AlertMetrics {
    fn describe(&self) -> &'static [&'static Desc] {
        static ALL: [&Desc; 4] = [&DELIVERED, &FAILED, &DROPPED, &PENDING];
        &ALL
    }

    fn collect(&self, of: &Moment, into: &mut Scrape) {
        for task in of.engine.alerts.receivers() {
            let (labels, state) = ([task.receiver.name()], task.state());
            into.value(&DELIVERED, &labels, state.delivered);
            into.value(&FAILED, &labels, state.failed_attempts);
            into.value(&DROPPED, &labels, state.dropped);
            into.value(&PENDING, &labels, task.pending() as u64);
        }
    }
}
