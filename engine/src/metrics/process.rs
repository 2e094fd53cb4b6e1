//! Metrics of the process and its management plane.

use super::{Desc, MetricKind, MetricsSource, Moment, Scrape};

static INFO: Desc = Desc {
    name: "nacre_build",
    kind: MetricKind::Gauge,
    help: "Always 1; the version is in the label.",
    labels: &["version"],
};
static UPTIME: Desc = Desc {
    name: "nacre_uptime_seconds",
    kind: MetricKind::Gauge,
    help: "Time since the daemon started.",
    labels: &[],
};
static CALLS: Desc = Desc {
    name: "nacre_rpc_calls",
    kind: MetricKind::Counter,
    help: "RPC calls answered.",
    labels: &[],
};
static REFUSED: Desc = Desc {
    name: "nacre_rpc_errors",
    kind: MetricKind::Counter,
    help: "RPC calls answered with an error.",
    labels: &[],
};
static OBJECTS: Desc = Desc {
    name: "nacre_objects",
    kind: MetricKind::Gauge,
    help: "Configured objects by state (live, waiting, failed).",
    labels: &["state"],
};
static FDS: Desc = Desc {
    name: "nacre_open_fds",
    kind: MetricKind::Gauge,
    help: "Open file descriptors.",
    labels: &[],
};
static MEMORY: Desc = Desc {
    name: "nacre_resident_memory_bytes",
    kind: MetricKind::Gauge,
    help: "Resident memory of the process.",
    labels: &[],
};

static LOST: Desc = Desc {
    name: "nacre_bdev_lost_requests",
    kind: MetricKind::Counter,
    help: "Requests that a defect of the daemon left without a completion. Report a number above 0.",
    labels: &[],
};

#[derive(Debug)]
pub struct Process;

impl MetricsSource for Process {
    fn describe(&self) -> &'static [&'static Desc] {
        static ALL: [&Desc; 8] = [
            &INFO, &UPTIME, &CALLS, &REFUSED, &OBJECTS, &FDS, &MEMORY, &LOST,
        ];
        &ALL
    }

    fn collect(&self, of: &Moment, into: &mut Scrape) {
        let engine = of.engine;
        into.value(&INFO, &[env!("CARGO_PKG_VERSION")], 1.0);
        into.value(
            &UPTIME,
            &[],
            engine.lifecycle.started.elapsed().as_secs_f64(),
        );
        into.value(&LOST, &[], nacre_bdev::pending::lost_requests());
        let calls = engine.calls.counts();
        into.value(&CALLS, &[], calls.answered);
        into.value(&REFUSED, &[], calls.refused);
        let counts = engine.journal.counts();
        for (state, count) in ["live", "waiting", "failed"].into_iter().zip(counts) {
            into.value(&OBJECTS, &[state], count);
        }
        if let Ok(fds) = std::fs::read_dir("/proc/self/fd") {
            into.value(&FDS, &[], fds.count().saturating_sub(1));
        }
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
        if let Some(pages) = statm.split(' ').nth(1).and_then(|p| p.parse::<u64>().ok()) {
            into.value(&MEMORY, &[], pages * rustix::param::page_size() as u64);
        }
    }
}
