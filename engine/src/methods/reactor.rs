//! Reactors, threads, pollers and buffers: `framework_get_reactors`, `thread_get_*`,
//! `iobuf_get_stats`, and Nacre's own `reactor_set_mode`.
//!
//! SPDK runs lightweight threads on reactors. In Nacre each reactor is one thread and is listed as
//! both.

use std::rc::Rc;

use nacre_reactor::{CoreSet, Mode, ReactorHandle, numa_node};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::replies::TICK_RATE;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, NoParams, Order, Registry, RpcError};
use crate::services::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<GetReactors>()
        .add::<GetStats>()
        .add::<GetPollers>()
        .add::<IobufGetStats>()
        .add::<SetMode>();
}

fn cpumask(reactor: &ReactorHandle) -> String {
    let core = reactor.core().map(|c| c.to_string()).unwrap_or_default();
    CoreSet::parse(&core)
        .map(|set| set.mask())
        .unwrap_or_default()
}

pub struct GetReactors;

#[derive(Debug, Serialize, JsonSchema)]
pub struct ReactorsReply {
    tick_rate: u64,
    pid: u32,
    reactors: Vec<ReactorReply>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ReactorReply {
    lcore: usize,
    numa_id: i64,
    tid: i32,
    busy: u64,
    /// Nanoseconds polling without work, or sleeping.
    idle: u64,
    in_interrupt: bool,
    /// The core's time in interrupts, in the kernel and in programs, in USER_HZ (100 per second).
    irq: u64,
    sys: u64,
    usr: u64,
    lw_threads: Vec<LwThread>,
    /// Nacre extension: `poll`, `adaptive` or `interrupt`.
    mode: &'static str,
    /// Nacre extension: the part of `idle` spent sleeping; `sleeps` counts how often.
    sleep: u64,
    sleeps: u64,
    /// Nacre extension: turns that took longer than 100 ms.
    stalls: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
struct LwThread {
    name: String,
    id: u64,
    cpumask: String,
    elapsed: u64,
}

impl Method<Engine> for GetReactors {
    const NAME: &'static str = "framework_get_reactors";
    const ABOUT: &'static str = "Lists the reactors and how busy they are. A tick is a nanosecond.";
    const CLASS: Class = Class::Read;
    type Params = NoParams;
    type Reply = ReactorsReply;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<ReactorsReply, RpcError> {
        let plane = engine.plane()?;
        let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let describe = |(index, handle): (usize, &ReactorHandle)| {
            let stats = handle.stats();
            let core = handle.core().unwrap_or(0);
            let (usr, sys, irq) = core_times(&stat, core).unwrap_or_default();
            ReactorReply {
                lcore: core,
                numa_id: numa_node(core).map_or(-1, i64::from),
                tid: stats.tid,
                busy: stats.busy_ns,
                idle: stats.idle_ns + stats.sleep_ns,
                in_interrupt: stats.mode == Mode::Interrupt,
                irq,
                sys,
                usr,
                lw_threads: vec![LwThread {
                    name: stats.name.clone(),
                    id: index as u64 + 1,
                    cpumask: cpumask(handle),
                    elapsed: stats.busy_ns + stats.idle_ns + stats.sleep_ns,
                }],
                mode: stats.mode.word(),
                sleep: stats.sleep_ns,
                sleeps: stats.sleeps,
                stalls: stats.stalls,
            }
        };
        let reactors = plane.reactors.iter().enumerate().map(describe).collect();
        Ok(ReactorsReply {
            tick_rate: TICK_RATE,
            pid: std::process::id(),
            reactors,
        })
    }
}

/// User, system and interrupt time of a core, from /proc/stat (proc(5)).
fn core_times(stat: &str, core: usize) -> Option<(u64, u64, u64)> {
    let name = format!("cpu{core} ");
    let line = stat.lines().find(|l| l.starts_with(&name))?;
    let fields: Vec<u64> = line
        .split_whitespace()
        .skip(1)
        .filter_map(|f| f.parse().ok())
        .collect();
    Some((*fields.first()?, *fields.get(2)?, *fields.get(5)?))
}

struct GetStats;

#[derive(Debug, Serialize, JsonSchema)]
struct Threads<T> {
    tick_rate: u64,
    threads: Vec<T>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ThreadStats {
    name: String,
    id: u64,
    cpumask: String,
    busy: u64,
    idle: u64,
    active_pollers_count: u64,
    timed_pollers_count: u64,
    paused_pollers_count: u64,
}

impl Method<Engine> for GetStats {
    const NAME: &'static str = "thread_get_stats";
    const ABOUT: &'static str = "Lists the threads that do I/O and how busy they are.";
    const CLASS: Class = Class::Read;
    type Params = NoParams;
    type Reply = Threads<ThreadStats>;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Threads<ThreadStats>, RpcError> {
        let plane = engine.plane()?;
        let describe = |(index, handle): (usize, &ReactorHandle)| {
            let stats = handle.stats();
            ThreadStats {
                id: index as u64 + 1,
                cpumask: cpumask(handle),
                busy: stats.busy_ns,
                idle: stats.idle_ns + stats.sleep_ns,
                active_pollers_count: handle.pollers().len() as u64,
                timed_pollers_count: stats.timers as u64,
                paused_pollers_count: 0,
                name: stats.name,
            }
        };
        Ok(Threads {
            tick_rate: TICK_RATE,
            threads: plane.reactors.iter().enumerate().map(describe).collect(),
        })
    }
}

struct GetPollers;

#[derive(Debug, Serialize, JsonSchema)]
struct ThreadPollers {
    name: String,
    id: u64,
    active_pollers: Vec<PollerInfo>,
    timed_pollers: Vec<PollerInfo>,
    paused_pollers: Vec<PollerInfo>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct PollerInfo {
    name: String,
    id: u64,
    state: &'static str,
    run_count: u64,
    busy_count: u64,
    /// Nacre extension: items of work done.
    items: u64,
}

impl Method<Engine> for GetPollers {
    const NAME: &'static str = "thread_get_pollers";
    const ABOUT: &'static str = "Lists the pollers of each thread.";
    const CLASS: Class = Class::Read;
    type Params = NoParams;
    type Reply = Threads<ThreadPollers>;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Threads<ThreadPollers>, RpcError> {
        let plane = engine.plane()?;
        let describe = |(index, handle): (usize, &ReactorHandle)| ThreadPollers {
            name: handle.name().to_owned(),
            id: index as u64 + 1,
            active_pollers: handle
                .pollers()
                .into_iter()
                .map(|p| PollerInfo {
                    name: p.name,
                    id: p.id.0,
                    state: "waiting",
                    run_count: p.run_count,
                    busy_count: p.busy_count,
                    items: p.items,
                })
                .collect(),
            timed_pollers: Vec::new(),
            paused_pollers: Vec::new(),
        };
        Ok(Threads {
            tick_rate: TICK_RATE,
            threads: plane.reactors.iter().enumerate().map(describe).collect(),
        })
    }
}

struct IobufGetStats;

#[derive(Debug, Serialize, JsonSchema)]
struct ModulePools {
    module: String,
    small_pool: PoolInfo,
    large_pool: PoolInfo,
}

/// Use of a buffer pool. SPDK counts buffers from a thread's cache and from the shared pool
/// separately. In Nacre every buffer belongs to its reactor.
#[derive(Debug, Default, Serialize, JsonSchema)]
struct PoolInfo {
    /// Buffers acquired.
    cache: u64,
    /// Always 0: there is no shared pool.
    main: u64,
    /// Failed attempts; the request waited for a buffer.
    retry: u64,
    /// Total number of buffers.
    cache_size: u64,
    /// Nacre extension: free buffers now.
    free: u64,
    /// Nacre extension: minimum of `free` so far.
    low_water: u64,
}

impl Method<Engine> for IobufGetStats {
    const NAME: &'static str = "iobuf_get_stats";
    const ABOUT: &'static str = "Returns the use of each reactor's data buffers.";
    const CLASS: Class = Class::Read;
    type Params = NoParams;
    type Reply = Vec<ModulePools>;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Vec<ModulePools>, RpcError> {
        let plane = engine.plane()?;
        let small = engine.options.borrow().iobuf.small_bufsize.max(16 << 10) as usize;
        let mut out = Vec::new();
        for pools in plane.pools().await {
            for (kind, classes) in [("io", &pools.io), ("admin", &pools.admin)] {
                let mut entry = ModulePools {
                    module: format!("{}_{kind}", pools.reactor),
                    small_pool: PoolInfo::default(),
                    large_pool: PoolInfo::default(),
                };
                for class in classes {
                    let pool = if class.size <= small {
                        &mut entry.small_pool
                    } else {
                        &mut entry.large_pool
                    };
                    pool.cache += class.acquired;
                    pool.free += class.free as u64;
                    pool.cache_size += class.count as u64;
                    pool.retry += class.exhausted;
                    pool.low_water += class.low_water as u64;
                }
                out.push(entry);
            }
        }
        Ok(out)
    }
}

struct SetMode;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetModeParams {
    /// How reactors wait for work: `poll` always polls, `adaptive` sleeps when idle, `interrupt`
    /// sleeps at once.
    mode: Mode,
    /// How long an idle adaptive reactor polls before sleeping, in microseconds. Grows to eight
    /// times this value while work arrives within it.
    busy_poll_us: Option<u64>,
    /// Only the reactor on this core; default: all.
    lcore: Option<usize>,
}

impl Method<Engine> for SetMode {
    const NAME: &'static str = "reactor_set_mode";
    const ABOUT: &'static str = "Changes how reactors wait for work, until the daemon ends.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Exclusive;
    type Params = SetModeParams;
    type Reply = bool;

    async fn apply(params: SetModeParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = engine.plane()?;
        let meant = |r: &&ReactorHandle| params.lcore.is_none() || r.core() == params.lcore;
        let reactors: Vec<&ReactorHandle> = plane.reactors.iter().filter(meant).collect();
        if reactors.is_empty() {
            return Err(
                RpcError::errno(Errno::ENODEV, "no reactor runs on that core").field("lcore"),
            );
        }
        for reactor in reactors {
            reactor.set_mode(params.mode);
            if let Some(us) = params.busy_poll_us {
                reactor.set_busy_poll_us(us);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::test_daemon;
    use super::*;
    use serde_json::json;

    #[test]
    fn reactors_threads_and_pollers_are_listed() {
        let daemon = test_daemon();
        let reactors = daemon.call("framework_get_reactors", json!(null));
        assert_eq!(reactors["tick_rate"], 1_000_000_000);
        let reactor = &reactors["reactors"][0];
        assert_eq!(
            (reactor["mode"].as_str(), &reactor["in_interrupt"]),
            (Some("adaptive"), &json!(false))
        );
        let threads = daemon.call("thread_get_stats", json!(null));
        assert_eq!(threads["threads"][0]["id"], 1);
        assert_eq!(
            threads["threads"][0]["cpumask"],
            reactor["lw_threads"][0]["cpumask"]
        );
        let pollers = daemon.call("thread_get_pollers", json!(null));
        assert_eq!(pollers["threads"][0]["active_pollers"][0]["name"], "nvmf");
        let pools = daemon.call("iobuf_get_stats", json!(null));
        assert!(
            pools[0]["large_pool"]["cache_size"].as_u64().unwrap() >= 4,
            "{pools}"
        );

        assert_eq!(
            daemon.call("reactor_set_mode", json!({ "mode": "interrupt" })),
            true
        );
        assert_eq!(
            daemon.call("framework_get_reactors", json!(null))["reactors"][0]["in_interrupt"],
            true
        );
        assert_eq!(
            daemon
                .refused("reactor_set_mode", json!({ "mode": "poll", "lcore": 4000 }))
                .code,
            -19
        );
    }

    /// Goal: a stuck reactor blocks only calls that query it; changes still proceed.
    #[test]
    fn a_stuck_reactor_blocks_only_calls_that_query_it() {
        let mut settings = crate::config::Settings::default();
        settings.rpc.deadline_s = 1;
        let daemon = super::super::testing::TestDaemon::with(settings, None);
        let (go, stuck) = std::sync::mpsc::channel::<()>();
        let reactor = daemon.engine.plane().unwrap().reactors[0].clone();
        let mut blocked = std::pin::pin!(reactor.run(move |_| stuck.recv().is_ok()));
        daemon.run(async {
            let soon = std::time::Duration::from_millis(50);
            let _ = tokio::time::timeout(soon, &mut blocked).await;
        });
        assert_eq!(daemon.refused("iobuf_get_stats", json!(null)).code, -110);
        let disk = json!({ "name": "n", "num_blocks": 8, "block_size": 512 });
        assert_eq!(daemon.call("bdev_null_create", disk), "n");
        drop(go);
        daemon.run(blocked).unwrap();
    }

    #[test]
    fn core_times_are_read_from_proc_stat() {
        let stat = "cpu  9 9 9 9 9 9 9\ncpu1 10 0 20 300 5 7 1 0 0 0\ncpu10 1 2 3 4 5 6 7\n";
        assert_eq!(core_times(stat, 1), Some((10, 20, 7)));
        assert_eq!(core_times(stat, 10), Some((1, 3, 6)));
        assert_eq!(core_times(stat, 2), None);
    }
}
