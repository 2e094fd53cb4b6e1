//! A log-bucketed latency histogram: one writer, any number of readers, no locks.
//!
//! The bucket layout is SPDK's with 4 bits of granularity: range 0 has a bucket per nanosecond
//! below 16, range `r` divides `2^(r+3) .. 2^(r+4)` into 16 equal buckets. So a bucket is at most
//! 6.25 % wide, which is finer than the difference of two runs, and a histogram is a few KiB per
//! core and device. Longer values count in the last bucket (2 minutes and more).

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Sub-buckets per power of two, as a power of two.
pub const GRANULARITY: u32 = 4;
/// The granularities of histograms in SPDK's layout.
pub const GRANULARITIES: RangeInclusive<u32> = 1..=16;
/// Powers of two covered beyond range 0: up to 2^37 ns, 137 s.
const RANGES: u32 = 33;
/// Buckets in a histogram.
pub const BUCKETS: usize = ((RANGES + 1) << GRANULARITY) as usize;

/// Written by one core, read by any thread.
#[derive(Debug)]
pub struct Histogram {
    buckets: Box<[AtomicU64]>,
}

impl Histogram {
    pub(super) fn new() -> Self {
        Self {
            buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Counts one value. Only the owning core calls this, so a plain load and store suffice.
    pub(super) fn record(&self, nanos: u64, times: u64) {
        let bucket = &self.buckets[bucket_of(nanos)];
        bucket.store(bucket.load(Relaxed) + times, Relaxed);
    }

    pub(super) fn clear(&self) {
        for bucket in &self.buckets {
            bucket.store(0, Relaxed);
        }
    }

    pub(super) fn add_to(&self, snapshot: &mut HistogramSnapshot) {
        for (sum, bucket) in snapshot.buckets.iter_mut().zip(&self.buckets) {
            *sum += bucket.load(Relaxed);
        }
    }
}

/// Counts by bucket at one moment, merged from any number of cores.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HistogramSnapshot {
    buckets: Vec<u64>,
}

impl Default for HistogramSnapshot {
    fn default() -> Self {
        Self {
            buckets: vec![0; BUCKETS],
        }
    }
}

impl HistogramSnapshot {
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    pub fn merge(&mut self, other: &Self) {
        for (sum, more) in self.buckets.iter_mut().zip(&other.buckets) {
            *sum += more;
        }
    }

    /// Counts one value in a snapshot that the caller fills itself.
    pub fn record(&mut self, nanos: u64) {
        self.buckets[bucket_of(nanos)] += 1;
    }

    /// The smallest latency in ns that at least `fraction` (0 to 1) of all values stay within. Its
    /// precision is a bucket: it is the largest value of the bucket. `None` without values.
    pub fn quantile(&self, fraction: f64) -> Option<u64> {
        let total = self.count();
        if total == 0 {
            return None;
        }
        let wanted = ((fraction.clamp(0.0, 1.0) * total as f64).ceil() as u64).max(1);
        let mut seen = 0;
        for (index, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return Some(lower_edge(index + 1) - 1);
            }
        }
        None
    }

    /// `(upper edge in ns, exclusive; count)` of every bucket that is not empty, ascending.
    pub fn nonzero(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let counted = self
            .buckets
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0);
        counted.map(|(index, count)| (lower_edge(index + 1), *count))
    }

    /// The counts in the layout of SPDK's histograms with `granularity` bits (clamped to
    /// [`GRANULARITIES`]), range by range. `bdev_get_histogram` replies with them, as little-endian
    /// 64-bit words in base64. The result has `64 - granularity + 1` ranges of `1 << granularity`
    /// buckets. Each bucket of this histogram counts at its lower edge.
    pub fn spdk_buckets(&self, granularity: u32) -> Vec<u64> {
        let granularity = granularity.clamp(*GRANULARITIES.start(), *GRANULARITIES.end());
        let mut out = vec![0; ((64 - granularity + 1) << granularity) as usize];
        for (index, count) in self
            .buckets
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0)
        {
            out[layout_index(lower_edge(index), granularity)] += count;
        }
        out
    }
}

fn bucket_of(nanos: u64) -> usize {
    layout_index(nanos, GRANULARITY).min(BUCKETS - 1)
}

/// The bucket of `value` where each range has `1 << bits` buckets.
fn layout_index(value: u64, bits: u32) -> usize {
    let range = (64 - value.leading_zeros()).saturating_sub(bits);
    let shift = range.saturating_sub(1);
    let within = (value >> shift) & ((1 << bits) - 1);
    ((u64::from(range) << bits) + within) as usize
}

/// The smallest value of bucket `index`.
fn lower_edge(index: usize) -> u64 {
    let range = (index >> GRANULARITY) as u32;
    let within = (index & ((1 << GRANULARITY) - 1)) as u64;
    match range {
        0 => within,
        _ => ((1 << GRANULARITY) + within) << (range - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The edges of neighbouring buckets, by hand.
    #[test]
    fn edges() {
        for (value, bucket) in [
            (0, 0),
            (15, 15),
            (16, 16),
            (31, 31),
            (32, 32),
            (33, 32),
            (34, 33),
        ] {
            assert_eq!(bucket_of(value), bucket, "value {value}");
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        assert_eq!(lower_edge(BUCKETS), 1 << 37);
    }

    proptest! {
        /// A value lies between the edges of its bucket, and the bucket is narrow.
        #[test]
        fn value_lies_in_its_bucket(value in 0u64..1 << 37) {
            let bucket = bucket_of(value);
            let (low, high) = (lower_edge(bucket), lower_edge(bucket + 1));
            prop_assert!(low <= value && value < high);
            prop_assert!(high - low == 1 || (high - low) * 16 <= low);
        }

        /// A quantile errs by at most a bucket, upwards.
        #[test]
        fn quantile_is_close(mut values in prop::collection::vec(1u64..1 << 36, 1..200), q in 0.0f64..1.0) {
            let mut histogram = HistogramSnapshot::default();
            values.iter().for_each(|v| histogram.record(*v));
            values.sort_unstable();
            let rank = ((q * values.len() as f64).ceil() as usize).max(1) - 1;
            let answer = histogram.quantile(q).expect("there are values");
            prop_assert!(answer >= values[rank] && answer <= values[rank] + values[rank] / 16);
        }

        /// Any granularity keeps every count, and our own is the identity.
        #[test]
        fn spdk_layout_keeps_counts(values in prop::collection::vec(1u64..1 << 40, 0..100), bits in 1u32..10) {
            let mut histogram = HistogramSnapshot::default();
            values.iter().for_each(|v| histogram.record(*v));
            prop_assert_eq!(histogram.spdk_buckets(bits).iter().sum::<u64>(), values.len() as u64);
            prop_assert_eq!(&histogram.spdk_buckets(GRANULARITY)[..BUCKETS], &histogram.buckets[..]);
        }
    }
}
