//! `bdev_set_qd_sampling_period`: samples a device's queue depth.

use std::rc::Rc;

use nacre_bdev::Bdev;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::refusal::OrRefuse;
use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<SetPeriod>();
}

/// Shortest period: the timer resolution of the management thread.
const MIN_PERIOD_US: u64 = 1000;
/// Longest period: one day.
const MAX_PERIOD_US: u64 = 86_400_000_000;

struct SetPeriod;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetPeriodParams {
    /// The bdev: its name, alias or UUID.
    name: String,
    /// Sampling period in microseconds, at least 1000; 0 stops sampling.
    period: u64,
}

impl Method<Engine> for SetPeriod {
    const NAME: &'static str = "bdev_set_qd_sampling_period";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Samples a device's queue depth from time to time, until the daemon ends; bdev_get_iostat returns the samples.";
    const CLASS: Class = Class::Operate;
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
    use std::time::Duration;

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
