//! Metrics of a node of a cluster. There are none in a daemon without `[cluster]`.

use super::reactors::family;
use super::{Desc, MetricKind, MetricsSource, Moment, Scrape};

family!(
    UP,
    "nacre_cluster_lease_good",
    Gauge,
    "1 while this node has a good lease of the cluster.",
    ["cluster"]
);
family!(
    LEFT,
    "nacre_cluster_lease_left_seconds",
    Gauge,
    "Time that is left of the node's lease; it is renewed five times in its duration.",
    ["cluster"]
);
family!(
    RENEWALS,
    "nacre_cluster_renewals",
    Counter,
    "Renewals of the lease that etcd has confirmed.",
    ["cluster"]
);
family!(
    DECISIONS,
    "nacre_cluster_decisions",
    Counter,
    "Decisions: volumes taken, handed over, lost to another node; nodes fenced; own leases lost.",
    ["cluster", "decision"]
);
family!(
    VOLUMES,
    "nacre_cluster_volumes",
    Gauge,
    "Volumes of the cluster, by the role of this node.",
    ["cluster", "role"]
);
family!(
    NODES,
    "nacre_cluster_nodes",
    Gauge,
    "Nodes of the cluster, with and without a lease.",
    ["cluster", "lease"]
);

family!(
    BRAKE,
    "nacre_cluster_brake",
    Gauge,
    "1 while no lost replica is replaced, because many nodes lost their leases at once.",
    ["cluster"]
);

pub struct ClusterMetrics;

impl MetricsSource for ClusterMetrics {
    fn describe(&self) -> &'static [&'static Desc] {
        static ALL: [&Desc; 7] = [&UP, &LEFT, &RENEWALS, &DECISIONS, &VOLUMES, &NODES, &BRAKE];
        &ALL
    }

    fn collect(&self, of: &Moment, into: &mut Scrape) {
        let Some(figures) = of.engine.cluster.figures() else {
            return;
        };
        let cluster = of.engine.settings.cluster.name.as_deref();
        let cluster = cluster.unwrap_or_default();
        let left = figures.lease_left.as_secs_f64();
        into.value(&UP, &[cluster], f64::from(u8::from(left > 0.0)));
        into.value(&LEFT, &[cluster], left);
        let is_braked = f64::from(u8::from(figures.is_braked));
        into.value(&BRAKE, &[cluster], is_braked);
        into.value(&RENEWALS, &[cluster], figures.renewals as f64);
        let counts = figures.counts;
        for (decision, count) in [
            ("volume_taken", counts.takes),
            ("volume_handed_over", counts.handovers),
            ("volume_lost", counts.volumes_lost),
            ("node_fenced", counts.fences),
            ("lease_lost", counts.incarnations_lost),
        ] {
            into.value(&DECISIONS, &[cluster, decision], count as f64);
        }
        for (role, count) in [("holder", figures.held), ("standby", figures.standby)] {
            into.value(&VOLUMES, &[cluster, role], count as f64);
        }
        for (lease, count) in [("yes", figures.nodes - figures.away), ("no", figures.away)] {
            into.value(&NODES, &[cluster, lease], count as f64);
        }
    }
}
