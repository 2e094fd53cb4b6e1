//! Metrics of the volume store in etcd. There are none while it is a file.

use nacre_cluster_etcd::Health;

use super::reactors::family;
use super::{Desc, MetricKind, MetricsSource, Moment, Scrape};

family!(
    UP,
    "nacre_store_up",
    Gauge,
    "1 while the volume store in etcd answers and belongs to this daemon.",
    ["prefix"]
);
family!(
    ANSWER,
    "nacre_store_answer_seconds",
    Gauge,
    "Time of the last answer of the volume store in etcd.",
    ["prefix"]
);

pub struct VolumeStoreMetrics;

impl MetricsSource for VolumeStoreMetrics {
    fn describe(&self) -> &'static [&'static Desc] {
        static ALL: [&Desc; 2] = [&UP, &ANSWER];
        &ALL
    }

    fn collect(&self, of: &Moment, into: &mut Scrape) {
        let Some(store) = of.engine.volumes.of_etcd() else {
            return;
        };
        let prefix: &[&str] = &[&store.prefix];
        match store.health() {
            Health::Answers(took) => {
                into.value(&UP, prefix, 1.0);
                into.value(&ANSWER, prefix, took.as_secs_f64());
            }
            Health::Silent { .. } | Health::Taken { .. } => into.value(&UP, prefix, 0.0),
        }
    }
}
