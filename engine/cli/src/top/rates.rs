//! Rates and latencies of block devices, from the differences between two replies of
//! `bdev_get_iostat`, and their text formats. Used by `nacre top`.

use serde_json::{Value, json};

/// The counters of one kind of operation: reads, writes or unmaps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    pub ops: u64,
    pub bytes: u64,
    /// The sum of the latencies of the operations, in ticks of the daemon's clock.
    pub ticks: u64,
}

/// The counters of a block device, or their increase between two replies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Iostat {
    pub read: Counters,
    pub write: Counters,
    pub unmap: Counters,
    pub errors: u64,
}

impl Iostat {
    pub(crate) fn read(device: &Value) -> Self {
        let number = |key: &str| device[key].as_u64().unwrap_or(0);
        let counters = |ops, bytes, ticks| Counters {
            ops: number(ops),
            bytes: number(bytes),
            ticks: number(ticks),
        };
        let errors = device["io_error"].as_object();
        Self {
            read: counters("num_read_ops", "bytes_read", "read_latency_ticks"),
            write: counters("num_write_ops", "bytes_written", "write_latency_ticks"),
            unmap: counters("num_unmap_ops", "bytes_unmapped", "unmap_latency_ticks"),
            errors: errors.map_or(0, |kinds| kinds.values().filter_map(Value::as_u64).sum()),
        }
    }

    /// Returns the increase of each counter since `earlier`. A counter that decreased was reset in
    /// the meantime: its increase is its present value.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        let grew = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
        let counters = |now: &Counters, before: &Counters| Counters {
            ops: grew(now.ops, before.ops),
            bytes: grew(now.bytes, before.bytes),
            ticks: grew(now.ticks, before.ticks),
        };
        Self {
            read: counters(&self.read, &earlier.read),
            write: counters(&self.write, &earlier.write),
            unmap: counters(&self.unmap, &earlier.unmap),
            errors: grew(self.errors, earlier.errors),
        }
    }

    /// Returns rates over `elapsed` seconds. `tick_rate` is in ticks per second.
    pub(crate) fn rates(&self, elapsed: f64, tick_rate: u64) -> Rates {
        let rate = |counters: &Counters| Rate {
            iops: per(counters.ops, elapsed),
            bytes_per_s: per(counters.bytes, elapsed),
            latency_s: match counters.ops {
                0 => None,
                // Completed within a turn of the reactor, whose clock does not advance meanwhile.
                _ if counters.ticks == 0 => None,
                ops => Some(counters.ticks as f64 / tick_rate.max(1) as f64 / ops as f64),
            },
        };
        Rates {
            read: rate(&self.read),
            write: rate(&self.write),
            unmap: rate(&self.unmap),
            errors: self.errors,
        }
    }
}

fn per(count: u64, elapsed: f64) -> f64 {
    if elapsed > 0.0 {
        count as f64 / elapsed
    } else {
        0.0
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Rate {
    pub iops: f64,
    pub bytes_per_s: f64,
    /// The average latency in seconds. `None` if no operation completed, or if all completed within
    /// one tick.
    pub latency_s: Option<f64>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Rates {
    pub read: Rate,
    pub write: Rate,
    pub unmap: Rate,
    /// The number of new errors (not per second, so that a single error is visible).
    pub errors: u64,
}

impl Rates {
    pub(crate) fn iops(&self) -> f64 {
        self.read.iops + self.write.iops + self.unmap.iops
    }

    pub(crate) fn bytes_per_s(&self) -> f64 {
        self.read.bytes_per_s + self.write.bytes_per_s
    }

    /// The average latency of reads and writes together, in seconds.
    pub(crate) fn latency_s(&self) -> Option<f64> {
        let both =
            [&self.read, &self.write].map(|r| r.latency_s.map_or_else(Rate::default, |_| *r));
        let ops: f64 = both.iter().map(|r| r.iops).sum();
        let time: f64 = both
            .iter()
            .filter_map(|r| Some(r.latency_s? * r.iops))
            .sum();
        (ops > 0.0).then(|| time / ops)
    }

    pub(crate) fn json(&self) -> Value {
        let rate = |rate: &Rate| {
            json!({
                "iops": rounded(rate.iops),
                "bytes_per_s": rounded(rate.bytes_per_s),
                "latency_avg_us": rate.latency_s.map(|s| rounded(s * 1e6)),
            })
        };
        json!({
            "read": rate(&self.read), "write": rate(&self.write), "unmap": rate(&self.unmap),
            "latency_avg_us": self.latency_s().map(|s| rounded(s * 1e6)),
            "errors": self.errors,
        })
    }
}

/// Rounds to a thousandth: further digits are noise and hard to read.
pub(crate) fn rounded(number: f64) -> f64 {
    (number * 1e3).round() / 1e3
}

/// The block devices in a reply of `bdev_get_iostat`, by name.
pub(crate) fn devices(answer: &Value) -> impl Iterator<Item = (&str, Iostat)> {
    let devices = answer["bdevs"].as_array().map_or(&[][..], Vec::as_slice);
    devices
        .iter()
        .filter_map(|device| Some((device["name"].as_str()?, Iostat::read(device))))
}

pub(crate) fn tick_rate(answer: &Value) -> u64 {
    answer["tick_rate"].as_u64().unwrap_or(1).max(1)
}

/// Seconds between two replies, by the daemon's clock. `None` if the clock went back, as after a
/// restart of the daemon.
pub(crate) fn elapsed(before: &Value, now: &Value) -> Option<f64> {
    let ticks = now["ticks"]
        .as_u64()?
        .checked_sub(before["ticks"].as_u64()?)?;
    (ticks > 0).then(|| ticks as f64 / tick_rate(now) as f64)
}

/// `0`, `0.4`, `950`, `12.3k`, `1.52M`: at most five characters.
pub(crate) fn count(number: f64) -> String {
    for (unit, letter) in [(1e9, "G"), (1e6, "M"), (1e3, "k")] {
        // A value that would be rounded up to the unit belongs to it.
        if number >= unit * 0.9995 {
            return format!("{}{letter}", three_digits(number / unit));
        }
    }
    match number {
        n if n <= 0.0 => "0".into(),
        n if n < 10.0 => format!("{n:.1}"),
        n => format!("{n:.0}"),
    }
}

/// `1.5 GB/s`: decimal, as networks and disks are sold.
pub(crate) fn throughput(bytes_per_s: f64) -> String {
    for (unit, name) in [(1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")] {
        if bytes_per_s >= unit * 0.9995 {
            return format!("{} {name}", three_digits(bytes_per_s / unit));
        }
    }
    format!("{bytes_per_s:.0} B/s")
}

/// `850ns`, `12.3us`, `1.52ms`, `2.10s`.
pub(crate) fn time(seconds: f64) -> String {
    for (unit, name) in [(1.0, "s"), (1e-3, "ms"), (1e-6, "us")] {
        if seconds >= unit * 0.9995 {
            return format!("{}{name}", three_digits(seconds / unit));
        }
    }
    format!("{:.0}ns", seconds * 1e9)
}

fn three_digits(number: f64) -> String {
    match number {
        n if n < 9.995 => format!("{n:.2}"),
        n if n < 99.95 => format!("{n:.1}"),
        n => format!("{n:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (number, text) in [
            (0.0, "0"),
            (0.42, "0.4"),
            (12.0, "12"),
            (999.4, "999"),
            (999.6, "1.00k"),
            (12_345.0, "12.3k"),
            (999_990.0, "1.00M"),
            (1_520_000.0, "1.52M"),
        ] {
            assert_eq!(count(number), text, "{number}");
        }
        assert_eq!(throughput(0.0), "0 B/s");
        assert_eq!(throughput(4096.0), "4.10 kB/s");
        assert_eq!(throughput(1.234e9), "1.23 GB/s");
        for (seconds, text) in [
            (8.5e-7, "850ns"),
            (1.23e-5, "12.3us"),
            (1.52e-3, "1.52ms"),
            (2.1, "2.10s"),
            (0.0, "0ns"),
        ] {
            assert_eq!(time(seconds), text, "{seconds}");
        }
    }

    /// Two answers, half a second apart by the daemon's clock, become rates; a reset between them
    /// and a device without operations do not.
    #[test]
    fn counters_become_rates() {
        let answer = |ticks: u64, reads: u64, writes: u64| {
            json!({ "tick_rate": 1000, "ticks": ticks, "bdevs": [{
                "name": "ram0",
                "num_read_ops": reads, "bytes_read": reads * 4096, "read_latency_ticks": reads * 2,
                "num_write_ops": writes, "bytes_written": writes * 512, "write_latency_ticks": writes * 6,
                "io_error": { "failed": reads, "nomem": 1 },
            }]})
        };
        let rates_of = |before: &Value, now: &Value| {
            let [(_, then), (name, now_)] = [
                devices(before).next().unwrap(),
                devices(now).next().unwrap(),
            ];
            assert_eq!(name, "ram0");
            now_.since(&then)
                .rates(elapsed(before, now).unwrap(), tick_rate(now))
        };
        let rates = rates_of(&answer(500, 10, 0), &answer(1000, 60, 50));
        assert_eq!(
            (rates.read.iops, rates.read.bytes_per_s),
            (100.0, 409_600.0)
        );
        assert_eq!(
            (rates.read.latency_s, rates.write.latency_s),
            (Some(0.002), Some(0.006))
        );
        assert_eq!((rates.latency_s(), rates.errors), (Some(0.004), 50));
        assert_eq!((rates.iops(), rates.bytes_per_s()), (200.0, 460_800.0));
        assert_eq!(rates.json()["read"]["latency_avg_us"], 2000.0);

        let reset = rates_of(&answer(500, 1000, 0), &answer(1000, 5, 0));
        assert_eq!(reset.read.iops, 10.0);
        assert_eq!((reset.write.latency_s, reset.write.iops), (None, 0.0));
        // A new daemon's clock starts again.
        assert_eq!(elapsed(&answer(500, 0, 0), &answer(100, 0, 0)), None);
    }

    /// A RAM disk completes within a turn: that is not a latency of 0 ns, and does not reduce the
    /// average of others.
    #[test]
    fn a_latency_that_was_not_measured_is_not_shown() {
        let counters = |ops, ticks| Counters {
            ops,
            bytes: ops * 4096,
            ticks,
        };
        let sample = Iostat {
            read: counters(1000, 0),
            write: counters(10, 20_000),
            ..Iostat::default()
        };
        let rates = sample.rates(1.0, 1_000_000);
        assert_eq!(rates.read.latency_s, None);
        assert_eq!(rates.read.iops, 1000.0);
        assert_eq!(rates.latency_s(), Some(0.002));
    }
}
