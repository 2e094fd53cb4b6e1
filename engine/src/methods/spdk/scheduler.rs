//! `framework_*_scheduler`, `framework_get_governor`, `thread_get_io_channels`: SPDK's queries
//! about thread placement. A reactor is a thread that stays on its own core, which SPDK calls the
//! static scheduler. CPU frequency is left to the operating system.

use std::rc::Rc;

use nacre_bdev::Bdev;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::methods::replies::TICK_RATE;
use crate::rpc::error::Errno;
use crate::rpc::{Changes, Class, Method, NoParams, Order, Registry, RpcError, When};
use crate::services::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<GetScheduler>()
        .add::<SetScheduler>()
        .add::<GetGovernor>()
        .add::<GetIoChannels>();
}

const STATIC: &str = "static";

#[derive(Debug, Serialize, JsonSchema)]
struct Scheduler {
    scheduler_name: &'static str,
    /// 0: threads never move, so nothing is measured.
    scheduler_period: u64,
    /// Empty: no core is isolated.
    isolated_core_mask: &'static str,
    /// Core of the first reactor.
    scheduling_core: usize,
}

struct GetScheduler;

impl Method<Engine> for GetScheduler {
    const NAME: &'static str = "framework_get_scheduler";
    const ABOUT: &'static str = "Returns the placement of threads: each stays on its core.";
    const CLASS: Class = Class::Read;
    const WHEN: When = When::Always;
    type Params = NoParams;
    type Reply = Scheduler;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Scheduler, RpcError> {
        // Before the start there are no reactors.
        let first = engine
            .plane()
            .ok()
            .and_then(|plane| plane.reactors.first()?.core());
        Ok(Scheduler {
            scheduler_name: STATIC,
            scheduler_period: 0,
            isolated_core_mask: "",
            scheduling_core: first.unwrap_or(0),
        })
    }
}

/// Unknown members are accepted: SPDK's other schedulers have more parameters.
#[derive(Debug, Deserialize, JsonSchema)]
struct SetSchedulerParams {
    /// Must be `static`.
    name: String,
    /// Must be 0: the static scheduler has no period.
    #[serde(default)]
    period: u64,
}

struct SetScheduler;

impl Method<Engine> for SetScheduler {
    const NAME: &'static str = "framework_set_scheduler";
    const ABOUT: &'static str = "Chooses how threads are placed: static, the one way there is.";
    const CLASS: Class = Class::Admin;
    const CHANGES: Changes = Changes::Nothing;
    const WHEN: When = When::Always;
    const ORDER: Order = Order::Free;
    type Params = SetSchedulerParams;
    type Reply = bool;

    async fn apply(params: SetSchedulerParams, _: Rc<Engine>) -> Result<bool, RpcError> {
        if params.name != STATIC {
            return Err(RpcError::internal(format!(
                "there is no scheduler \"{}\"",
                params.name
            ))
            .field("name")
            .remedy(
                "reactors stay on their cores (static); reactor_set_mode says whether they sleep",
            ));
        }
        match params.period {
            0 => Ok(true),
            _ => Err(
                RpcError::errno(Errno::EINVAL, "the static scheduler has no period")
                    .field("period"),
            ),
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
struct Governor {}

struct GetGovernor;

impl Method<Engine> for GetGovernor {
    const NAME: &'static str = "framework_get_governor";
    const ABOUT: &'static str =
        "Returns an empty governor: CPU frequency is left to the operating system.";
    const CLASS: Class = Class::Read;
    const WHEN: When = When::Always;
    type Params = NoParams;
    type Reply = Governor;

    async fn apply(_: NoParams, _: Rc<Engine>) -> Result<Governor, RpcError> {
        Ok(Governor {})
    }
}

#[derive(Debug, Serialize, JsonSchema)]
struct IoChannels {
    tick_rate: u64,
    threads: Vec<ThreadChannels>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ThreadChannels {
    name: String,
    io_channels: Vec<IoChannel>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct IoChannel {
    /// Name of the block device.
    name: String,
    /// Number of the thread's queues on it.
    #[serde(rename = "ref")]
    references: u32,
}

struct GetIoChannels;

impl Method<Engine> for GetIoChannels {
    const NAME: &'static str = "thread_get_io_channels";
    const ABOUT: &'static str = "Lists the block devices that each thread has a queue open on.";
    const CLASS: Class = Class::Read;
    type Params = NoParams;
    type Reply = IoChannels;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<IoChannels, RpcError> {
        let plane = engine.plane()?;
        let devices = plane.bdevs.list();
        let open_on = |thread: &str| {
            let count = |listed: &nacre_bdev::registry::Listed| {
                let queues = listed.layer.stats().per_queue();
                let references = queues.iter().filter(|q| q.thread == thread).count() as u32;
                (references > 0).then(|| IoChannel {
                    name: listed.layer.name().to_owned(),
                    references,
                })
            };
            devices.iter().filter_map(count).collect()
        };
        let threads = plane.reactors.iter().map(|reactor| ThreadChannels {
            name: reactor.name().to_owned(),
            io_channels: open_on(reactor.name()),
        });
        Ok(IoChannels {
            tick_rate: TICK_RATE,
            threads: threads.collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::methods::testing::{TestDaemon, test_daemon};
    use serde_json::json;

    #[test]
    fn the_scheduler_is_the_static_one() {
        let daemon = test_daemon();
        let scheduler = daemon.call("framework_get_scheduler", json!(null));
        let reactors = daemon.call("framework_get_reactors", json!(null));
        assert_eq!(
            scheduler,
            json!({
                "scheduler_name": "static", "scheduler_period": 0, "isolated_core_mask": "",
                "scheduling_core": reactors["reactors"][0]["lcore"],
            })
        );
        assert_eq!(
            daemon.call("framework_get_governor", json!(null)),
            json!({})
        );
        let set = "framework_set_scheduler";
        assert_eq!(daemon.call(set, json!({ "name": "static" })), true);
        for (params, field, code) in [
            (json!({ "name": "dynamic" }), "name", -32603),
            (json!({ "name": "static", "period": 1000 }), "period", -22),
        ] {
            let refused = daemon.refused(set, params);
            assert_eq!(refused.code, code);
            assert_eq!(refused.data.unwrap().field.as_deref(), Some(field));
        }
        assert_eq!(
            TestDaemon::waiting().call(set, json!({ "name": "static" })),
            true
        );
    }

    /// Goal: every thread is listed, without queues on a device that is not in use.
    #[test]
    fn channels_are_listed_by_thread() {
        let daemon = test_daemon();
        let disk = json!({ "name": "n", "num_blocks": 2048, "block_size": 512 });
        daemon.call("bdev_null_create", disk);
        let all = daemon.call("thread_get_io_channels", json!(null));
        let threads = daemon.call("thread_get_stats", json!(null));
        assert_eq!(all["threads"][0]["name"], threads["threads"][0]["name"]);
        assert_eq!(all["threads"][0]["io_channels"], json!([]));
    }
}
