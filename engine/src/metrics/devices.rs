//! Metrics of bdevs: operations, bytes, errors and latencies.

use nacre_bdev::stats::{Class, Snapshot};
use nacre_bdev::{Bdev, Op, Status};

use super::reactors::family;
use super::{Desc, MetricKind, MetricsSource, Moment, Sample, Scrape};

family!(
    OPERATIONS,
    "nacre_bdev_operations",
    Counter,
    "Operations completed without an error.",
    ["bdev", "op"]
);
family!(
    BYTES,
    "nacre_bdev_bytes",
    Counter,
    "Bytes of operations completed without an error.",
    ["bdev", "op"]
);
family!(
    ERRORS,
    "nacre_bdev_errors",
    Counter,
    "Operations that failed, by status.",
    ["bdev", "status"]
);
family!(
    INFLIGHT,
    "nacre_bdev_inflight",
    Gauge,
    "Operations in flight.",
    ["bdev"]
);
family!(
    BUSY,
    "nacre_bdev_queue_full",
    Counter,
    "Times that a queue was full and an operation had to wait.",
    ["bdev"]
);
family!(
    THROTTLED,
    "nacre_bdev_throttled",
    Counter,
    "Operations that a limit of the device held back.",
    ["bdev"]
);
family!(
    COPIED,
    "nacre_copy_bytes",
    Counter,
    "Data copied on its way between a host and a device: by `device` (buffers without the alignment that it needs), or by `target` (data in a capsule that the device keeps for longer than the receive buffer can be spared). 0 where the path is aligned, and always over RDMA; the copies of a RAM disk are its I/O.",
    ["by"]
);
family!(
    SIZE,
    "nacre_bdev_size_bytes",
    Gauge,
    "Size of the device.",
    ["bdev"]
);
family!(
    LATENCY,
    "nacre_bdev_latency_seconds",
    Histogram,
    "Time from submission to completion.",
    ["bdev", "class"]
);

/// Upper bounds in nanoseconds: 1, 2, 5 per decade from 5 µs to 10 s.
const BOUNDS: [u64; 20] = [
    5_000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
    200_000_000,
    500_000_000,
    1_000_000_000,
    2_000_000_000,
    5_000_000_000,
    10_000_000_000,
];

#[derive(Debug)]
pub struct DeviceMetrics;

impl MetricsSource for DeviceMetrics {
    fn describe(&self) -> &'static [&'static Desc] {
        static ALL: [&Desc; 9] = [
            &OPERATIONS,
            &BYTES,
            &ERRORS,
            &INFLIGHT,
            &BUSY,
            &THROTTLED,
            &COPIED,
            &SIZE,
            &LATENCY,
        ];
        &ALL
    }

    fn collect(&self, of: &Moment, into: &mut Scrape) {
        let Some(plane) = &of.plane else { return };
        let copied = plane.copied_bytes();
        into.value(&COPIED, &["device"], copied.by_devices);
        into.value(&COPIED, &["target"], copied.by_target);
        for listed in plane.bdevs.list() {
            let name = listed.layer.name();
            let snapshot = listed.layer.stats().snapshot();
            into.value(&SIZE, &[name], listed.layer.geometry().bytes());
            into.value(&INFLIGHT, &[name], snapshot.inflight);
            into.value(&BUSY, &[name], snapshot.busy);
            into.value(&THROTTLED, &[name], snapshot.throttled);
            for op in Op::ALL {
                let stats = snapshot.op(op);
                into.value(&OPERATIONS, &[name, op.name()], stats.ops);
                into.value(&BYTES, &[name, op.name()], stats.bytes);
            }
            for (kind, count) in Status::KIND_NAMES
                .into_iter()
                .zip(snapshot.statuses)
                .skip(1)
            {
                into.value(&ERRORS, &[name, kind], count);
            }
            for (class, label) in [
                (Class::Read, "read"),
                (Class::Write, "write"),
                (Class::Other, "other"),
            ] {
                into.add(&LATENCY, &[name, label], latency(&snapshot, class));
            }
        }
    }
}

fn latency(snapshot: &Snapshot, class: Class) -> Sample {
    let histogram = snapshot.histogram(class);
    let mut buckets = Vec::with_capacity(BOUNDS.len());
    let mut counted = histogram.nonzero().peekable();
    let mut below = 0;
    for bound in BOUNDS {
        while let Some((_, count)) = counted.next_if(|(upper, _)| *upper <= bound) {
            below += count;
        }
        buckets.push((bound as f64 / 1e9, below));
    }
    let sum: u64 = Op::ALL
        .into_iter()
        .filter(|op| Class::of(*op) == class)
        .map(|op| snapshot.op(op).latency_sum_ns)
        .sum();
    Sample::Histogram {
        sum: sum as f64 / 1e9,
        count: histogram.count(),
        buckets,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_complete() {
        let mut snapshot = Snapshot::default();
        for ns in [100, 4_000, 70_000, 3_000_000, 20_000_000_000] {
            snapshot.histograms[Class::Read as usize].record(ns);
        }
        let Sample::Histogram { count, buckets, .. } = latency(&snapshot, Class::Read) else {
            panic!("a histogram")
        };
        assert_eq!((count, buckets[0].1, buckets.last().unwrap().1), (5, 2, 4));
        assert!(
            buckets
                .windows(2)
                .all(|w| w[0].0 < w[1].0 && w[0].1 <= w[1].1)
        );
    }
}
