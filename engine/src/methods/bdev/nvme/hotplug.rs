//! `bdev_nvme_set_hotplug`: attaches drives automatically when they are bound to a userspace
//! driver.

use std::rc::Rc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::drives::HotPlug;
use crate::store::Change;

const KEY: &str = "nvme/hotplug";
/// Limits of the period, as in SPDK. The longest is also the default interval of drive checks.
const LONGEST: Duration = Duration::from_secs(10);
const SHORTEST: Duration = Duration::from_millis(10);

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<SetHotplug>();
}

struct SetHotplug;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Params {
    /// True: attach new drives from now on; false: no longer.
    enable: bool,
    /// Polling period in microseconds: 10,000 to 10,000,000; 0 or left out: 1,000,000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    period_us: Option<u64>,
}

impl Method<Engine> for SetHotplug {
    const NAME: &'static str = "bdev_nvme_set_hotplug";
    const ABOUT: &'static str = "Attaches every drive that is given to userspace from now on, as HotInNvme and a number. Drives that are pulled \
         and put back are noticed in any case.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = Params;
    type Reply = bool;

    async fn apply(params: Params, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let given = params.period_us.filter(|us| *us > 0);
        let period = given.map_or_else(|| HotPlug::default().period, Duration::from_micros);
        if !(SHORTEST..=LONGEST).contains(&period) {
            let cause = format!(
                "{} is neither 0 nor from {} to {}",
                period.as_micros(),
                SHORTEST.as_micros(),
                LONGEST.as_micros()
            );
            return Err(RpcError::invalid_params(cause).field("period_us"));
        }
        let record = serde_json::to_value(&params).expect("parameters are plain data");
        let change = Change::put(KEY, Self::NAME, record);
        engine.journal.commit(change).await?;
        let enabled = params.enable;
        engine.drives.hot_plug.set(HotPlug { enabled, period });
        Ok(true)
    }
}
