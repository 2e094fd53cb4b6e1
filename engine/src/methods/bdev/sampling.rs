//! `bdev_set_qd_sampling_period`: samples a device's queue depth.
//!
//! ```text
//!   set period ──> a task: every period, depth ──> queue_depth, io_time, weighted_io_time
//!                    └ ends with the device, or when another period is set     (bdev_get_iostat)
//! ```
//!
//! SPDK adds the period at each sample. Nacre adds the time since the last sample, which is never
//! less.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use nacre_bdev::Bdev;
use nacre_bdev::layer::Layer;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::task::AbortHandle;

use crate::refusal::OrRefuse;
use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::rpc::{Method, Order, Registry, RpcError};
use crate::services::engine::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<SetPeriod>();
}

/// Shortest period: the timer resolution of the management thread.
const MIN_PERIOD_US: u64 = 1000;
/// Longest period: one day.
const MAX_PERIOD_US: u64 = 86_400_000_000;

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
    fn look(&mut self, depth: u64, since: Duration) {
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

    fn start(&self, layer: &Arc<Layer>, period_us: u64) {
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
                    .look(layer.stats().inflight(), last.elapsed());
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

    fn stop(&self, name: &str) {
        self.all.borrow_mut().remove(name);
    }
}

struct SetPeriod;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetPeriodParams {
    name: String,
    /// Sampling period in microseconds, at least 1000; 0 stops sampling.
    period: u64,
}

impl Method<Engine> for SetPeriod {
    const NAME: &'static str = "bdev_set_qd_sampling_period";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Samples a device's queue depth from time to time, until the daemon ends; bdev_get_iostat returns the samples.";
    const ORDER: Order = Order::Exclusive;
    type Params = SetPeriodParams;
    type Reply = bool;

    async fn apply(params: SetPeriodParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let layer = engine.plane()?.bdevs.get(&params.name).or_refuse()?.layer;
        match params.period {
            0 => engine.devices.samplers.stop(layer.name()),
            MIN_PERIOD_US..=MAX_PERIOD_US => engine.devices.samplers.start(&layer, params.period),
            other => {
                let cause =
                    format!("{other} us is neither 0 nor from {MIN_PERIOD_US} to {MAX_PERIOD_US}");
                return Err(RpcError::errno(Errno::EINVAL, cause).field("period"));
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::test_daemon;
    use super::*;
    use serde_json::json;

    #[test]
    fn time_counts_while_io_is_in_flight() {
        let mut seen = Sampled::default();
        let ms = Duration::from_millis;
        for (depth, since) in [(0, ms(10)), (3, ms(10)), (1, ms(20)), (0, ms(5))] {
            seen.look(depth, since);
        }
        assert_eq!(
            (seen.queue_depth, seen.io_time, seen.weighted_io_time),
            (0, 30_000, 50_000)
        );
        seen.look(u64::MAX, Duration::MAX);
        assert_eq!(seen.weighted_io_time, u64::MAX);
    }

    /// Goal: the fields are present while a period is set, and are removed with the device.
    #[test]
    fn samples_are_in_the_iostat() {
        let daemon = test_daemon();
        let disk = json!({ "name": "n", "num_blocks": 2048, "block_size": 512 });
        daemon.call("bdev_null_create", disk.clone());
        let stat = || daemon.call("bdev_get_iostat", json!({ "names": ["n"] }))["bdevs"][0].clone();
        let period = |us: u64| json!({ "name": "n", "period": us });
        assert!(stat().get("queue_depth").is_none());
        let set = "bdev_set_qd_sampling_period";
        assert_eq!(daemon.call(set, period(1000)), true);
        daemon.run(async { tokio::time::sleep(Duration::from_millis(20)).await });
        let seen = stat();
        assert_eq!(
            (
                &seen["queue_depth_polling_period"],
                &seen["queue_depth"],
                &seen["io_time"]
            ),
            (&json!(1000), &json!(0), &json!(0))
        );
        assert_eq!(daemon.call(set, period(0)), true);
        assert!(stat().get("queue_depth").is_none());
        daemon.call(set, period(5000));
        daemon.call("bdev_null_delete", json!({ "name": "n" }));
        daemon.call("bdev_null_create", disk);
        assert!(
            stat().get("queue_depth").is_none(),
            "another device of that name"
        );
        for us in [1, 999, MAX_PERIOD_US + 1] {
            assert_eq!(daemon.refused(set, period(us)).code, -22);
        }
        assert_eq!(
            daemon
                .refused(set, json!({ "name": "x", "period": 0 }))
                .code,
            -19
        );
    }
}
