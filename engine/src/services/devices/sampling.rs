//! Samples the queue depth of bdevs at an interval.
//!
//! ```text
//!   set period ──> a task: every period, depth ──> queue_depth, io_time, weighted_io_time
//!                    └ ends with the device, or when another period is set     (bdev_get_iostat)
//! ```
//!
//! SPDK adds the configured period at each sample. Nacre adds the time since the last sample, which
//! is at least the period.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use nacre_bdev::Bdev;
use nacre_bdev::layer::Layer;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::task::AbortHandle;

/// Accumulated samples of one device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Sampled {
    /// Sampling period in microseconds.
    queue_depth_polling_period: u64,
    /// I/Os in flight at the last sample.
    queue_depth: u64,
    /// Microseconds with at least one I/O in flight.
    io_time: u64,
    /// The same, multiplied by the depth.
    weighted_io_time: u64,
}

impl Sampled {
    fn sample(&mut self, depth: u64, since: Duration) {
        let us = u64::try_from(since.as_micros()).unwrap_or(u64::MAX);
        self.queue_depth = depth;
        if depth > 0 {
            self.io_time = self.io_time.saturating_add(us);
            self.weighted_io_time = self
                .weighted_io_time
                .saturating_add(us.saturating_mul(depth));
        }
    }
}

/// The sampled devices, by name.
#[derive(Default)]
pub struct Samplers {
    all: RefCell<BTreeMap<String, Sampler>>,
}

struct Sampler {
    device: Weak<Layer>,
    found: Rc<RefCell<Sampled>>,
    task: AbortHandle,
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Samplers {
    /// The samples of a device; `None` if it is not sampled.
    pub fn of(&self, layer: &Arc<Layer>) -> Option<Sampled> {
        let all = self.all.borrow();
        let sampler = all.get(layer.name())?;
        // The name may already belong to another device.
        let same = sampler.device.as_ptr() == Arc::as_ptr(layer);
        same.then(|| *sampler.found.borrow())
    }

    pub fn clear(&self) {
        self.all.borrow_mut().clear();
    }

    pub fn start(&self, layer: &Arc<Layer>, period_us: u64) {
        let found = Rc::new(RefCell::new(Sampled {
            queue_depth_polling_period: period_us,
            ..Sampled::default()
        }));
        let (device, into) = (Arc::downgrade(layer), Rc::clone(&found));
        let looks = async move {
            let mut last = Instant::now();
            loop {
                tokio::time::sleep(Duration::from_micros(period_us)).await;
                let Some(layer) = device.upgrade().filter(|layer| !layer.is_gone()) else {
                    return;
                };
                into.borrow_mut()
                    .sample(layer.stats().inflight(), last.elapsed());
                last = Instant::now();
            }
        };
        let sampler = Sampler {
            device: Arc::downgrade(layer),
            found,
            task: tokio::task::spawn_local(looks).abort_handle(),
        };
        let mut all = self.all.borrow_mut();
        all.retain(|_, other| other.device.strong_count() > 0);
        all.insert(layer.name().to_owned(), sampler);
    }

    pub fn stop(&self, name: &str) {
        self.all.borrow_mut().remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_counts_while_io_is_in_flight() {
        let mut seen = Sampled::default();
        let ms = Duration::from_millis;
        for (depth, since) in [(0, ms(10)), (3, ms(10)), (1, ms(20)), (0, ms(5))] {
            seen.sample(depth, since);
        }
        assert_eq!(
            (seen.queue_depth, seen.io_time, seen.weighted_io_time),
            (0, 30_000, 50_000)
        );
        seen.sample(u64::MAX, Duration::MAX);
        assert_eq!(seen.weighted_io_time, u64::MAX);
    }
}
