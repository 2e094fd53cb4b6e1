//! Metrics, read from their sources at the time of a scrape.
//!
//! ```text
//! MetricsSource (reactors, pools, devices, …) ── collect ──▶ Scrape ──▶ Prometheus text | JSON
//! ```
//!
//! This module counts nothing itself. Each source declares its families ([`Desc`]) once;
//! docs/reference/metrics.md is generated from them, and a sample of an undeclared family does not
//! compile.

pub mod alerts;
pub mod backup;
pub mod cluster;
pub mod devices;
pub mod drives;
pub mod http;
pub mod keys;
pub mod listeners;
pub mod nic;
pub mod nvmf;
pub mod pools;
pub mod process;
pub mod rdma;
pub mod reactors;
pub mod remotes;
#[cfg(test)]
mod testing;
pub mod volume_store;
pub mod volumes;

use std::fmt::Write;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_transport_rdma_link::{Counter, Fabric, Roots};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabelSet, EncodeMetric, LabelSetEncoder, MetricEncoder,
};
use prometheus_client::metrics::MetricType;
use serde::Serialize;

use crate::plane::{Plane, PoolUse};
use crate::services::Engine;
use crate::services::nics::{NicCounters, Used};

/// Limit for reactors to report their buffers.
const PATIENCE: Duration = Duration::from_secs(1);

/// The type of a metric family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MetricKind {
    Counter,
    Gauge,
    Histogram,
}

/// A family of metrics.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Desc {
    /// Name of the family, without the suffix `_total` that counters have in the text format.
    pub name: &'static str,
    pub kind: MetricKind,
    pub help: &'static str,
    pub labels: &'static [&'static str],
}

/// A value of a metric family.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Sample {
    Value(f64),
    /// Sum, count, and pairs of an upper bound and the cumulative count. Bounds ascend and are
    /// finite; the count of the bound `+Inf` is `count`.
    Histogram {
        sum: f64,
        count: u64,
        buckets: Vec<(f64, u64)>,
    },
}

/// A source of metrics. Called on the management thread; must not block.
pub trait MetricsSource {
    fn describe(&self) -> &'static [&'static Desc];
    fn collect(&self, of: &Moment, into: &mut Scrape);
}

/// The input of sources: the engine, and data collected from the reactors in advance.
pub struct Moment<'a> {
    pub engine: &'a Engine,
    /// `None` before the data plane starts and after it ends.
    pub plane: Option<Rc<Plane>>,
    pub pools: Vec<PoolUse>,
    pub ports: Vec<PortCounters>,
    pub nics: Vec<NicCounters>,
}

/// The kernel's counters of one RDMA port.
#[derive(Debug)]
pub struct PortCounters {
    pub device: String,
    pub port: u8,
    pub counters: Vec<Counter>,
}

/// Reads the counters. This may query the device, so call it on a thread that may block.
fn port_counters() -> Vec<PortCounters> {
    let roots = Roots::real();
    let fabric = Fabric::read(&roots.sys);
    let of = |(device, port): (
        &nacre_transport_rdma_link::Device,
        &nacre_transport_rdma_link::Port,
    )| PortCounters {
        device: device.name.clone(),
        port: port.num,
        counters: nacre_transport_rdma_link::counters(&roots.sys, &device.name, port.num, None),
    };
    fabric.ports().map(of).collect()
}

/// All sources.
pub fn sources() -> Vec<Box<dyn MetricsSource>> {
    vec![
        Box::new(process::Process),
        Box::new(listeners::ListenerMetrics),
        Box::new(reactors::Reactors),
        Box::new(devices::DeviceMetrics),
        Box::new(volumes::VolumeMetrics),
        Box::new(volume_store::VolumeStoreMetrics),
        Box::new(cluster::ClusterMetrics),
        Box::new(pools::PoolMetrics),
        Box::new(backup::BackupMetrics),
        Box::new(nvmf::NvmfMetrics),
        Box::new(rdma::RdmaMetrics),
        Box::new(nic::NicMetrics),
        Box::new(remotes::RemoteMetrics),
        Box::new(drives::DriveMetrics),
        Box::new(keys::KeyMetrics),
        Box::new(alerts::AlertMetrics),
    ]
}

/// The samples of a family, each with its label values.
type Samples = Vec<(Vec<String>, Sample)>;

/// All metrics of one moment.
#[derive(Debug, Default)]
pub struct Scrape {
    families: Vec<(&'static Desc, Samples)>,
}

impl Scrape {
    pub async fn of(engine: &Engine) -> Self {
        let plane = engine.plane().ok();
        // A reactor that does not answer must not block the scrape.
        let pools = match &plane {
            Some(plane) => tokio::time::timeout(PATIENCE, plane.pools())
                .await
                .unwrap_or_default(),
            None => Vec::new(),
        };
        let ports = tokio::task::spawn_blocking(port_counters);
        let ports = tokio::time::timeout(PATIENCE, ports).await;
        let used = Used::of(engine, plane.as_deref());
        let nics = Arc::clone(&engine.rdma.nics);
        let nics = tokio::task::spawn_blocking(move || nics.read(&used));
        let nics = tokio::time::timeout(PATIENCE, nics).await;
        let moment = Moment {
            engine,
            plane,
            pools,
            ports: ports.ok().and_then(Result::ok).unwrap_or_default(),
            nics: nics.ok().and_then(Result::ok).unwrap_or_default(),
        };
        let mut scrape = Self::default();
        for source in sources() {
            source.collect(&moment, &mut scrape);
        }
        scrape
    }

    /// # Panics
    /// If the number of labels differs from the family's, or a bound is not finite: a bug in the
    /// source.
    pub fn add(&mut self, desc: &'static Desc, labels: &[&str], sample: Sample) {
        assert_eq!(labels.len(), desc.labels.len(), "labels of {}", desc.name);
        if let Sample::Histogram { buckets, .. } = &sample {
            let finite = buckets.iter().all(|(bound, _)| bound.is_finite());
            assert!(finite, "bounds of {}", desc.name);
        }
        let labels = labels.iter().map(|l| (*l).to_owned()).collect();
        match self
            .families
            .iter_mut()
            .find(|(known, _)| std::ptr::eq(*known, desc))
        {
            Some((_, samples)) => samples.push((labels, sample)),
            None => self.families.push((desc, vec![(labels, sample)])),
        }
    }

    pub fn value(&mut self, desc: &'static Desc, labels: &[&str], value: impl IntoF64) {
        self.add(desc, labels, Sample::Value(value.into_f64()));
    }

    /// The text format that Prometheus scrapes.
    pub fn text(self) -> String {
        let mut registry = prometheus_client::registry::Registry::default();
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry)
            .expect("writing to a string");
        text
    }

    pub fn json(&self) -> serde_json::Value {
        let family = |(desc, samples): &(&'static Desc, Samples)| {
            let sample = |(labels, sample): &(Vec<String>, Sample)| {
                let labels: serde_json::Map<String, serde_json::Value> = desc
                    .labels
                    .iter()
                    .zip(labels)
                    .map(|(k, v)| ((*k).to_owned(), v.clone().into()))
                    .collect();
                serde_json::json!({ "labels": labels, "value": sample })
            };
            serde_json::json!({
                "name": desc.name, "type": desc.kind, "help": desc.help,
                "samples": samples.iter().map(sample).collect::<Vec<_>>(),
            })
        };
        self.families.iter().map(family).collect()
    }
}

/// Numbers that become samples. Counters lose precision above 2^53, as always in Prometheus.
pub trait IntoF64 {
    fn into_f64(self) -> f64;
}

impl IntoF64 for f64 {
    fn into_f64(self) -> f64 {
        self
    }
}

impl IntoF64 for u64 {
    fn into_f64(self) -> f64 {
        self as f64
    }
}

impl IntoF64 for usize {
    fn into_f64(self) -> f64 {
        self as f64
    }
}

impl IntoF64 for bool {
    fn into_f64(self) -> f64 {
        f64::from(u8::from(self))
    }
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), std::fmt::Error> {
        for (desc, samples) in &self.families {
            let kind = match desc.kind {
                MetricKind::Counter => MetricType::Counter,
                MetricKind::Gauge => MetricType::Gauge,
                MetricKind::Histogram => MetricType::Histogram,
            };
            let family = Family { desc, samples };
            // The crate adds a full stop to each help text.
            let help = desc.help.trim_end_matches('.');
            let metric = encoder.encode_descriptor(desc.name, help, None, kind)?;
            family.encode(metric)?;
        }
        Ok(())
    }
}

struct Family<'a> {
    desc: &'a Desc,
    samples: &'a [(Vec<String>, Sample)],
}

impl EncodeMetric for Family<'_> {
    fn encode(&self, mut encoder: MetricEncoder) -> Result<(), std::fmt::Error> {
        for (values, sample) in self.samples {
            let labels = Labels {
                names: self.desc.labels,
                values,
            };
            let mut encoder = encoder.encode_family(&labels)?;
            match sample {
                Sample::Value(value) if self.desc.kind == MetricKind::Counter => {
                    encoder.encode_counter::<prometheus_client::encoding::NoLabelSet, _, f64>(
                        value, None,
                    )?;
                }
                Sample::Value(value) => encoder.encode_gauge(value)?,
                Sample::Histogram {
                    sum,
                    count,
                    buckets,
                } => {
                    encoder.encode_histogram::<prometheus_client::encoding::NoLabelSet>(
                        *sum,
                        *count,
                        &per_bucket(buckets, *count),
                        None,
                    )?;
                }
            }
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        match self.desc.kind {
            MetricKind::Counter => MetricType::Counter,
            MetricKind::Gauge => MetricType::Gauge,
            MetricKind::Histogram => MetricType::Histogram,
        }
    }
}

/// The count of each bucket, with that of `+Inf` last: the encoder accumulates them itself.
fn per_bucket(cumulative: &[(f64, u64)], count: u64) -> Vec<(f64, u64)> {
    let mut below = 0;
    let mut out: Vec<(f64, u64)> = Vec::with_capacity(cumulative.len() + 1);
    for (bound, upto) in cumulative {
        out.push((*bound, upto - below));
        below = *upto;
    }
    out.push((f64::INFINITY, count - below));
    out
}

struct Labels<'a> {
    names: &'a [&'a str],
    values: &'a [String],
}

impl EncodeLabelSet for Labels<'_> {
    fn encode(&self, encoder: &mut LabelSetEncoder) -> Result<(), std::fmt::Error> {
        use prometheus_client::encoding::EncodeLabel;
        for (name, value) in self.names.iter().zip(self.values) {
            (*name, value.as_str()).encode(encoder.encode_label())?;
        }
        Ok(())
    }
}

/// The reference of all metrics: docs/reference/metrics.md.
pub fn markdown() -> String {
    let mut out = String::from(
        "# Metrics\n\n\
         Written by `nacre metrics --reference`; do not edit.\n\n\
         Served as Prometheus text at `/metrics` where `[metrics] listen` says, and by `nacre metrics`.\n\
         Times are in seconds, sizes in bytes. Counters carry `_total` in the text.\n\n\
         | metric | type | labels | |\n|---|---|---|---|\n",
    );
    for source in sources() {
        for desc in source.describe() {
            let kind = match desc.kind {
                MetricKind::Counter => "counter",
                MetricKind::Gauge => "gauge",
                MetricKind::Histogram => "histogram",
            };
            let suffix = if desc.kind == MetricKind::Counter {
                "_total"
            } else {
                ""
            };
            let labels: Vec<String> = desc.labels.iter().map(|l| format!("`{l}`")).collect();
            let _ = writeln!(
                out,
                "| `{}{suffix}` | {kind} | {} | {} |",
                desc.name,
                labels.join(", "),
                desc.help
            );
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::testing::test_daemon;

    #[test]
    fn the_text_has_the_format_of_prometheus() {
        static COUNT: Desc = Desc {
            name: "nacre_x",
            kind: MetricKind::Counter,
            help: "Counts x.",
            labels: &["a", "b"],
        };
        static LEVEL: Desc = Desc {
            name: "nacre_y",
            kind: MetricKind::Gauge,
            help: "Level of y.",
            labels: &[],
        };
        static TIMES: Desc = Desc {
            name: "nacre_z_seconds",
            kind: MetricKind::Histogram,
            help: "Time of z.",
            labels: &["a"],
        };
        let mut scrape = Scrape::default();
        scrape.value(&COUNT, &["1", "q\"\\\n"], 3u64);
        scrape.value(&LEVEL, &[], 0.5);
        scrape.value(&COUNT, &["2", ""], 4u64);
        let buckets = vec![(0.001, 2), (0.01, 5)];
        scrape.add(
            &TIMES,
            &["v"],
            Sample::Histogram {
                sum: 0.25,
                count: 6,
                buckets,
            },
        );
        insta::assert_snapshot!(scrape.text());
    }

    #[test]
    fn every_sample_is_declared_and_named_nacre() {
        let daemon = test_daemon();
        daemon.call(
            "bdev_null_create",
            serde_json::json!({ "name": "n", "num_blocks": 8, "block_size": 512 }),
        );
        let scrape = daemon.run(Scrape::of(&daemon.engine));
        let declared: Vec<&'static Desc> = sources()
            .iter()
            .flat_map(|s| s.describe())
            .copied()
            .collect();
        for (desc, _) in &scrape.families {
            assert!(declared.contains(desc), "{} is not declared", desc.name);
        }
        let text = daemon.run(Scrape::of(&daemon.engine)).text();
        for expected in [
            "nacre_reactor_busy_seconds_total{",
            "nacre_buffers{",
            "nacre_bdev_operations_total{bdev=\"n\",op=\"read\"} 0",
        ] {
            assert!(text.contains(expected), "{expected} in {text}");
        }
        let mut names = std::collections::BTreeSet::new();
        for desc in declared {
            assert!(
                desc.name.starts_with("nacre_") && !desc.name.ends_with("_total"),
                "{}",
                desc.name
            );
            assert!(names.insert(desc.name), "{} twice", desc.name);
        }
    }

    /// Goal: a strict parser accepts the output of a daemon with all kinds of objects. Method: a
    /// RAM disk, a null device and a volume are served and used; RDMA and drives, which need
    /// hardware, have simulated samples.
    #[test]
    fn the_exposition_passes_a_strict_parser() {
        let daemon = test_daemon();
        let nqn = "nqn.2025-01.io.nacre:strict";
        for (method, params) in [
            (
                "bdev_null_create",
                serde_json::json!({ "name": "n", "num_blocks": 8, "block_size": 512 }),
            ),
            (
                "bdev_malloc_create",
                serde_json::json!({ "name": "m", "num_blocks": 8192, "block_size": 512 }),
            ),
            (
                "nvmf_create_subsystem",
                serde_json::json!({ "nqn": nqn, "allow_any_host": true }),
            ),
            (
                "nvmf_subsystem_add_ns",
                serde_json::json!({ "nqn": nqn, "namespace": { "bdev_name": "n" } }),
            ),
            (
                "nvmf_subsystem_add_ns",
                serde_json::json!({ "nqn": nqn, "namespace": { "bdev_name": "m" } }),
            ),
        ] {
            daemon.call(method, params);
        }
        let mut scrape = daemon.run(Scrape::of(&daemon.engine));
        let there: Vec<&str> = scrape.families.iter().map(|(desc, _)| desc.name).collect();
        for desc in sources().iter().flat_map(|s| s.describe().iter().copied()) {
            if there.contains(&desc.name) {
                continue;
            }
            for of in ["a", "b\"\\\n"] {
                let labels = vec![of; desc.labels.len()];
                let sample = match desc.kind {
                    MetricKind::Histogram => Sample::Histogram {
                        sum: 1.5,
                        count: 3,
                        buckets: vec![(0.5, 1), (1.0, 2)],
                    },
                    _ => Sample::Value(1.0),
                };
                scrape.add(desc, &labels, sample);
                if desc.labels.is_empty() {
                    break;
                }
            }
        }
        let families = testing::check(&scrape.text());
        let declared: usize = sources().iter().map(|s| s.describe().len()).sum();
        assert_eq!(families, declared);
    }

    #[test]
    fn the_committed_reference_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/metrics.md");
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            committed == markdown(),
            "docs/reference/metrics.md is out of date: run `nacre metrics --reference > docs/reference/metrics.md`"
        );
    }

    /// Goal: the alert rules judge the same counters of loss as the doctor.
    #[test]
    fn alerts_know_all_counters_of_loss() {
        use nacre_transport_rdma_link::Symptom;

        let rules = include_str!("../../../deploy/alerts.yml");
        for sign in Symptom::ALL {
            let selector = format!("{{counter=~\"{}\"}}", sign.counters().join("|"));
            assert!(rules.contains(&selector), "{sign:?}: {selector}");
        }
    }

    /// Goal: alert rules use existing metrics and labels. A rule on a renamed metric would never
    /// fire.
    #[test]
    fn alerts_use_existing_metrics_and_labels() {
        let rules = include_str!("../../../deploy/alerts.yml");
        let reference = markdown();
        let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let mut alerts = 0;
        for rule in rules.split("- alert: ").skip(1) {
            let expr = rule.lines().find(|line| line.contains("expr: ")).unwrap();
            let names = expr.split(|c| !is_name(c));
            let mut rows = Vec::new();
            for name in names.filter(|name| name.starts_with("nacre_")) {
                let row = reference.lines().find(|l| l.contains(&format!("`{name}`")));
                rows.push(row.unwrap_or_else(|| panic!("no metric {name}: {expr}")));
            }
            for label in rule.split("$labels.").skip(1) {
                let label = label.split(|c| !is_name(c)).next().unwrap();
                let known = label == "instance"
                    || rows.iter().any(|row| row.contains(&format!("`{label}`")));
                assert!(known, "no label {label}: {expr}");
            }
            alerts += usize::from(!rows.is_empty());
        }
        assert!(alerts >= 8, "{alerts} alerts");
    }
}
