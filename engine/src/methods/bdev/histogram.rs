//! `bdev_*_histogram`: latencies by bucket, in SPDK's layout.
//!
//! Latencies are always counted. Enabling a histogram sets the begin of its counts, its operations,
//! and the resolution of replies. SPDK's layout (include/spdk/histogram_data.h) divides each power
//! of two into `1 << granularity` buckets. Values outside of `min_nsec..max_nsec` count in the
//! outermost buckets.

use std::rc::Rc;

use base64ct::{Base64, Encoding};
use nacre_bdev::Bdev;
use nacre_bdev::layer::Layer;
use nacre_bdev::module::ByName;
use nacre_bdev::stats::{Class, GRANULARITIES, HistogramSnapshot};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::methods::replies::TICK_RATE;
use crate::refusal::OrRefuse;
use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::rpc::{self, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::devices::HistogramRequest;

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<EnableHistogram>()
        .add::<GetHistogram>()
        .add::<GetBorders>();
}

pub struct EnableHistogram;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EnableHistogramParams {
    /// The bdev: its name, alias or UUID.
    pub name: String,
    /// True: start counting, from empty buckets; false: stop, and drop the counts.
    pub enable: bool,
    /// `read` or `write`; default: all operations.
    pub opc: Option<String>,
    /// log2 of the number of buckets per power of two: 1 to 16.
    #[serde(
        default = "default_granularity",
        skip_serializing_if = "is_default_granularity"
    )]
    pub granularity: u8,
    /// Lowest latency of the buckets in nanoseconds; lower ones count in the first bucket. Default
    /// 1000.
    #[serde(default = "default_min", skip_serializing_if = "is_default_min")]
    pub min_nsec: u64,
    /// Highest latency of the buckets in nanoseconds, more than min_nsec; higher ones count in the
    /// last bucket. Default 120000000000: two minutes.
    #[serde(default = "default_max", skip_serializing_if = "is_default_max")]
    pub max_nsec: u64,
}

fn default_granularity() -> u8 {
    7
}

fn is_default_granularity(value: &u8) -> bool {
    *value == default_granularity()
}

fn default_min() -> u64 {
    1000
}

fn is_default_min(value: &u64) -> bool {
    *value == default_min()
}

fn default_max() -> u64 {
    120_000_000_000
}

fn is_default_max(value: &u64) -> bool {
    *value == default_max()
}

impl EnableHistogramParams {
    /// With the default buckets, of all operations.
    pub fn new(name: String, enable: bool) -> Self {
        Self {
            name,
            enable,
            opc: None,
            granularity: default_granularity(),
            min_nsec: default_min(),
            max_nsec: default_max(),
        }
    }
}

/// The counts of the requested operations since the bdev exists.
fn counts(layer: &Layer, opc: Option<&str>) -> Result<HistogramSnapshot, RpcError> {
    let snapshot = layer.stats().snapshot();
    match opc {
        None => Ok(snapshot.histogram_all()),
        Some("read") => Ok(snapshot.histogram(Class::Read).clone()),
        Some("write") => Ok(snapshot.histogram(Class::Write).clone()),
        Some(other) => {
            let mut refused =
                RpcError::internal(format!("there are no histograms of \"{other}\" by itself"));
            refused.message = "Invalid Io type".into();
            Err(refused.field("opc").remedy("read, write, or leave it out"))
        }
    }
}

impl Method<Engine> for EnableHistogram {
    const NAME: &'static str = "bdev_enable_histogram";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Starts or ends a latency histogram of a device.";
    const CLASS: rpc::Class = rpc::Class::Operate;
    const ORDER: Order = Order::Exclusive;
    type Params = EnableHistogramParams;
    type Reply = bool;

    async fn apply(params: EnableHistogramParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = engine.plane()?;
        let layer = plane.bdevs.get(&params.name).or_refuse()?.layer;
        if !GRANULARITIES.contains(&params.granularity.into()) {
            let cause = format!("granularity is not in {GRANULARITIES:?}");
            return Err(RpcError::errno(Errno::EINVAL, cause).field("granularity"));
        }
        if params.min_nsec >= params.max_nsec {
            return Err(
                RpcError::errno(Errno::EINVAL, "min_nsec is not less than max_nsec")
                    .field("min_nsec"),
            );
        }
        let granularity = u32::from(params.granularity);
        let before = counts(&layer, params.opc.as_deref())?.spdk_buckets(granularity);
        let mut requests = engine.devices.histograms.borrow_mut();
        if params.enable {
            let request = HistogramRequest {
                granularity,
                min_ns: params.min_nsec,
                max_ns: params.max_nsec,
                opc: params.opc,
                before,
            };
            requests.insert(layer.name().to_owned(), request);
        } else {
            requests.remove(layer.name());
        }
        Ok(true)
    }
}

pub struct GetHistogram;

#[derive(Debug, Serialize, JsonSchema)]
pub struct HistogramReply {
    /// The counts as little-endian 64-bit words, in base64.
    histogram: String,
    granularity: u32,
    min_range: u32,
    max_range: u32,
    tsc_rate: u64,
}

impl Method<Engine> for GetHistogram {
    const NAME: &'static str = "bdev_get_histogram";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Gives the latency histogram of a device.";
    const CLASS: rpc::Class = rpc::Class::Read;
    type Params = ByName;
    type Reply = HistogramReply;

    async fn apply(params: ByName, engine: Rc<Engine>) -> Result<HistogramReply, RpcError> {
        let (request, since) = since_enabled(&engine, &params.name)?;
        let (min_range, max_range) = (
            range_of(request.min_ns, request.granularity),
            range_of(request.max_ns, request.granularity),
        );
        let window = fold(&since, request.granularity, min_range, max_range);
        let bytes: Vec<u8> = window
            .iter()
            .flat_map(|count| count.to_le_bytes())
            .collect();
        Ok(HistogramReply {
            histogram: Base64::encode_string(&bytes),
            granularity: request.granularity,
            min_range,
            max_range,
            tsc_rate: TICK_RATE,
        })
    }
}

/// The histogram enabled for a device, and the counts of all its buckets since then.
fn since_enabled(engine: &Engine, name: &str) -> Result<(HistogramRequest, Vec<u64>), RpcError> {
    let plane = engine.plane()?;
    let layer = plane.bdevs.get(name).or_refuse()?.layer;
    let Some(request) = engine
        .devices
        .histograms
        .borrow()
        .get(layer.name())
        .cloned()
    else {
        // SPDK's reply: -EFAULT, as an internal error.
        let mut refused = RpcError::internal("no histogram was started")
            .remedy("bdev_enable_histogram starts one");
        refused.message = "Bad address".into();
        return Err(refused);
    };
    let now = counts(&layer, request.opc.as_deref())?.spdk_buckets(request.granularity);
    // After a reset the counts are lower than the start values; saturate.
    let since: Vec<u64> = now
        .iter()
        .zip(&request.before)
        .map(|(now, before)| now.saturating_sub(*before))
        .collect();
    Ok((request, since))
}

/// Maximum number of borders per call.
const MAX_BORDERS: usize = 64;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct BordersParams {
    /// The bdev: its name, alias or UUID.
    name: String,
    /// Microseconds, ascending, at most 64.
    borders: Vec<u64>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Borders {
    /// Operations below the first border, between each border and the next, and above the last one.
    /// A bucket that contains a border counts below it.
    borders_count: Vec<u64>,
}

struct GetBorders;

impl Method<Engine> for GetBorders {
    const NAME: &'static str = "bdev_get_histogram_borders";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Counts the operations of a device by latency, between borders.";
    const CLASS: rpc::Class = rpc::Class::Read;
    type Params = BordersParams;
    type Reply = Borders;

    async fn apply(params: BordersParams, engine: Rc<Engine>) -> Result<Borders, RpcError> {
        let wrong = |cause: String| RpcError::errno(Errno::EINVAL, cause).field("borders");
        let borders = params.borders;
        if borders.is_empty() || borders.len() > MAX_BORDERS {
            let cause = format!("{} borders: give 1 to {MAX_BORDERS}", borders.len());
            return Err(wrong(cause));
        }
        if !borders.is_sorted_by(|a, b| a < b) {
            return Err(wrong("the borders do not ascend".into()));
        }
        let (request, since) = since_enabled(&engine, &params.name)?;
        let borders: Vec<u64> = borders.iter().map(|us| us.saturating_mul(1000)).collect();
        Ok(Borders {
            borders_count: between(&since, request.granularity, &borders),
        })
    }
}

/// Sums the buckets between borders. A bucket counts in the interval that contains its start.
fn between(all: &[u64], granularity: u32, borders: &[u64]) -> Vec<u64> {
    let mut counts = vec![0; borders.len() + 1];
    for (index, count) in all.iter().enumerate().filter(|(_, count)| **count > 0) {
        let start = start_of(index, granularity);
        let at = borders.partition_point(|border| *border <= start);
        counts[at] += count;
    }
    counts
}

/// The smallest value of a bucket, in ns.
fn start_of(index: usize, granularity: u32) -> u64 {
    let (range, at) = (
        index >> granularity,
        (index as u64) & ((1 << granularity) - 1),
    );
    match range {
        0 => at,
        range => ((1 << granularity) + at) << (range - 1),
    }
}

/// The range (group of buckets with one width) that contains a value.
fn range_of(value: u64, granularity: u32) -> u32 {
    (64 - value.leading_zeros()).saturating_sub(granularity)
}

/// The buckets of ranges `min..=max`; counts outside of them go to the outermost buckets.
fn fold(all: &[u64], granularity: u32, min: u32, max: u32) -> Vec<u64> {
    let (from, to) = (
        (min as usize) << granularity,
        (max as usize + 1) << granularity,
    );
    let mut window = all[from..to].to_vec();
    if let Some(first) = window.first_mut() {
        *first += all[..from].iter().sum::<u64>();
    }
    if let Some(last) = window.last_mut() {
        *last += all[to..].iter().sum::<u64>();
    }
    window
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a value's bucket starts at or below it, and the next bucket starts above it.
    #[test]
    fn values_lie_in_their_bucket() {
        for granularity in [1, 4, 7] {
            for ns in [0, 1, 5, 127, 128, 129, 1000, 1500, 70_000, 1 << 38] {
                let mut all = HistogramSnapshot::default();
                all.record(ns);
                let all = all.spdk_buckets(granularity);
                let index = all.iter().position(|count| *count > 0).unwrap();
                // Recorded buckets are coarser than requested ones.
                let start = start_of(index, granularity);
                assert!(
                    start <= ns + ns / 8,
                    "{ns} in bucket {index}, which starts at {start}"
                );
                assert_eq!(range_of(start, granularity), (index >> granularity) as u32);
            }
        }
    }

    /// Goal: each count is between the right borders, and none is lost.
    #[test]
    fn borders_keep_every_count() {
        let mut all = HistogramSnapshot::default();
        for ns in [500, 50_000, 51_000, 900_000, 5_000_000_000] {
            all.record(ns);
        }
        let all = all.spdk_buckets(7);
        let us = |borders: &[u64]| borders.iter().map(|us| us * 1000).collect::<Vec<_>>();
        assert_eq!(between(&all, 7, &us(&[1])), [1, 4]);
        assert_eq!(between(&all, 7, &us(&[10, 100, 1000])), [1, 2, 1, 1]);
        assert_eq!(between(&all, 7, &us(&[u64::MAX / 1000])), [5, 0]);
    }

    #[test]
    fn the_window_keeps_every_count() {
        let mut all = HistogramSnapshot::default();
        for ns in [5, 999, 1500, 70_000, 1 << 38] {
            all.record(ns);
        }
        let all = all.spdk_buckets(7);
        let (min, max) = (range_of(1000, 7), range_of(1 << 30, 7));
        let window = fold(&all, 7, min, max);
        assert_eq!(window.len(), ((max - min + 1) << 7) as usize);
        assert_eq!(window.iter().sum::<u64>(), 5);
        assert_eq!((window[0], *window.last().unwrap()), (1, 1));
        assert_eq!(
            (
                range_of(127, 7),
                range_of(128, 7),
                range_of(255, 7),
                range_of(256, 7)
            ),
            (0, 1, 1, 2)
        );
    }
}
