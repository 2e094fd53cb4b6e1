//! Latency histograms from `bdev_get_histogram`, and percentiles of the I/O between two of them.
//!
//! The layout is SPDK's (include/spdk/histogram_data.h): each power of two ("range") in `1 <<
//! granularity` buckets, beginning with `min_range`; buckets of the lowest two ranges are one tick
//! wide.

use base64ct::{Base64, Encoding};
use nacre_bdev::stats::GRANULARITIES;
use serde_json::Value;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Histogram {
    granularity: u32,
    min_range: u32,
    tick_rate: u64,
    counts: Vec<u64>,
}

impl Histogram {
    /// Parses a histogram; `None` if it is invalid.
    pub(super) fn read(answer: &Value) -> Option<Self> {
        let number = |key: &str| u32::try_from(answer[key].as_u64()?).ok();
        let granularity = number("granularity").filter(|g| GRANULARITIES.contains(g))?;
        let min_range = answer
            .get("min_range")
            .map_or(Some(0), |_| number("min_range"))
            .filter(|r| *r <= 64)?;
        let bytes = Base64::decode_vec(answer["histogram"].as_str()?).ok()?;
        let (words, rest) = bytes.as_chunks::<8>();
        let most = 65usize << granularity;
        if !rest.is_empty() || words.len() > most {
            return None;
        }
        Some(Self {
            granularity,
            min_range,
            tick_rate: answer["tsc_rate"].as_u64().filter(|rate| *rate > 0)?,
            counts: words.iter().map(|word| u64::from_le_bytes(*word)).collect(),
        })
    }

    /// The counts since `earlier`; none if that was another histogram or it was reset.
    pub(super) fn since(&self, earlier: &Self) -> Option<Self> {
        let same = (self.granularity, self.min_range, self.counts.len())
            == (earlier.granularity, earlier.min_range, earlier.counts.len());
        let pairs = self.counts.iter().zip(&earlier.counts);
        let counts = pairs
            .map(|(now, before)| now.checked_sub(*before))
            .collect::<Option<_>>();
        Some(Self {
            counts: counts.filter(|_| same)?,
            ..self.clone()
        })
    }

    /// The latency in seconds that a fraction (0 to 1) of the I/O does not exceed: the end of its
    /// bucket.
    pub(super) fn quantile_s(&self, fraction: f64) -> Option<f64> {
        let total: u64 = self.counts.iter().sum();
        if total == 0 {
            return None;
        }
        let wanted = (total as f64 * fraction).ceil().max(1.0) as u64;
        let mut so_far = 0;
        let index = self.counts.iter().position(|count| {
            so_far += count;
            so_far >= wanted
        })?;
        Some(self.end_of(index) / self.tick_rate as f64)
    }

    /// The end of a bucket, in ticks. The last one's end is beyond 64 bits.
    fn end_of(&self, index: usize) -> f64 {
        let range = self.min_range + (index >> self.granularity) as u32;
        let place = (index & ((1 << self.granularity) - 1)) as f64 + 1.0;
        match range {
            0 => place,
            range => {
                let start = f64::from(range + self.granularity - 1).exp2();
                start + place * f64::from(range - 1).exp2()
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use serde_json::json;

    /// A reply with these counts by latency in ticks, counted as SPDK counts.
    pub(crate) fn answer(
        granularity: u32,
        min_range: u32,
        tick_rate: u64,
        samples: &[(u64, u64)],
    ) -> Value {
        let mut counts = vec![0u64; (40 - min_range as usize) << granularity];
        for &(ticks, count) in samples {
            let range = (64 - ticks.leading_zeros()).saturating_sub(granularity);
            let (range, place) = if range < min_range {
                (min_range, 0)
            } else {
                (
                    range,
                    ticks >> range.saturating_sub(1) & ((1 << granularity) - 1),
                )
            };
            counts[((range - min_range) << granularity) as usize + place as usize] += count;
        }
        let bytes: Vec<u8> = counts
            .iter()
            .flat_map(|count| count.to_le_bytes())
            .collect();
        json!({
            "histogram": Base64::encode_string(&bytes), "granularity": granularity,
            "min_range": min_range, "max_range": 39, "tsc_rate": tick_rate,
        })
    }

    /// In every layout, a percentile is at most one bucket above the exact value.
    #[test]
    fn percentiles() {
        for (granularity, min_range) in [(4, 0), (7, 0), (7, 3), (2, 5)] {
            let samples = [(10_000, 900), (200_000, 95), (5_000_000, 5)];
            let histogram =
                Histogram::read(&answer(granularity, min_range, 1_000_000_000, &samples)).unwrap();
            let width = 1.0 / f64::from(1 << granularity);
            for (fraction, truth) in [
                (0.5, 1e-5),
                (0.9, 1e-5),
                (0.99, 2e-4),
                (0.999, 5e-3),
                (1.0, 5e-3),
            ] {
                let said = histogram.quantile_s(fraction).unwrap();
                let range = truth..=truth * (1.0 + width) + 1e-9;
                assert!(
                    range.contains(&said),
                    "{granularity} {min_range} {fraction}: {said}"
                );
            }
        }
    }

    #[test]
    fn percentiles_of_the_difference_of_two_histograms() {
        let read =
            |samples: &[(u64, u64)]| Histogram::read(&answer(7, 0, 1_000_000, samples)).unwrap();
        let before = read(&[(10, 1000)]);
        let now = read(&[(10, 1000), (500, 10)]);
        assert!((now.since(&before).unwrap().quantile_s(0.5).unwrap() - 5e-4).abs() < 1e-5);
        assert_eq!(before.since(&before).unwrap().quantile_s(0.99), None);
        // Reset, or another layout: nothing to compare with.
        assert_eq!(before.since(&now), None);
        assert_eq!(
            now.since(&Histogram::read(&answer(4, 0, 1_000_000, &[])).unwrap()),
            None
        );
    }

    #[test]
    fn wrong_histograms_are_refused() {
        let good = answer(4, 0, 1000, &[(1, 1)]);
        assert!(Histogram::read(&good).is_some());
        for (key, bad) in [
            ("granularity", json!(0)),
            ("granularity", json!(17)),
            ("min_range", json!(65)),
            ("tsc_rate", json!(0)),
            ("histogram", json!("@")),
            ("histogram", json!("AAAA")),
            ("histogram", json!(null)),
        ] {
            let mut answer = good.clone();
            answer[key] = bad.clone();
            assert_eq!(Histogram::read(&answer), None, "{key} {bad}");
        }
    }

    #[test]
    fn the_last_bucket_has_an_end() {
        let histogram = Histogram {
            granularity: 7,
            min_range: 57,
            tick_rate: 1,
            counts: vec![1; 128],
        };
        assert_eq!(histogram.quantile_s(1.0), Some(64f64.exp2()));
    }
}
