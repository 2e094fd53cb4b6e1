//! `bdev_get_iostat`, `bdev_reset_iostat`: operation counts and latencies of devices.
//!
//! A tick is one nanosecond, as `tick_rate` says.

use std::collections::BTreeMap;
use std::rc::Rc;

use nacre_bdev::layer::Layer;
use nacre_bdev::stats::{OpStats, Reset, Snapshot};
use nacre_bdev::{Bdev, Op, Status};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::methods::replies::TICK_RATE;
use crate::plane::Plane;
use crate::refusal::OrRefuse;
use crate::rpc::access;
use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::rpc::{Changes, Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::devices::sampling::Sampled;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<GetIostat>().add::<ResetIostat>();
}

pub struct GetIostat;

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ResetMode {
    All,
    /// Only the minimum and maximum latencies.
    Maxmin,
    /// Only failed operations.
    Error,
    #[default]
    None,
}

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GetIostatParams {
    /// Default: all devices.
    pub names: Option<Vec<String>>,
    /// Each queue separately; for one device only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub per_channel: bool,
    /// The counters to reset afterwards; default: none.
    #[serde(default, skip_serializing_if = "is_none")]
    pub reset_mode: ResetMode,
}

fn is_none(mode: &ResetMode) -> bool {
    *mode == ResetMode::None
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum IostatReply {
    Devices {
        tick_rate: u64,
        ticks: u64,
        bdevs: Vec<DeviceStat>,
    },
    Channels {
        tick_rate: u64,
        ticks: u64,
        name: String,
        channels: Vec<ChannelStat>,
    },
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct DeviceStat {
    name: String,
    #[serde(flatten)]
    stat: Stat,
    /// Present for devices with a sampling period (bdev_set_qd_sampling_period).
    #[serde(flatten)]
    sampled: Option<Sampled>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct ChannelStat {
    /// The id as in `thread_get_stats`.
    thread_id: u64,
    #[serde(flatten)]
    stat: Stat,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Stat {
    bytes_read: u64,
    num_read_ops: u64,
    bytes_written: u64,
    num_write_ops: u64,
    bytes_unmapped: u64,
    num_unmap_ops: u64,
    bytes_copied: u64,
    num_copy_ops: u64,
    read_latency_ticks: u64,
    max_read_latency_ticks: u64,
    min_read_latency_ticks: u64,
    write_latency_ticks: u64,
    max_write_latency_ticks: u64,
    min_write_latency_ticks: u64,
    unmap_latency_ticks: u64,
    max_unmap_latency_ticks: u64,
    min_unmap_latency_ticks: u64,
    copy_latency_ticks: u64,
    max_copy_latency_ticks: u64,
    min_copy_latency_ticks: u64,
    /// Failures by kind; kinds with none are left out.
    io_error: BTreeMap<&'static str, u64>,
}

impl Stat {
    fn of(snapshot: &Snapshot) -> Self {
        let [read, write, unmap, copy]: [&OpStats; 4] =
            [Op::Read, Op::Write, Op::Unmap, Op::Copy].map(|op| snapshot.op(op));
        let mut io_error = BTreeMap::new();
        for (kind, count) in Status::KIND_NAMES
            .into_iter()
            .zip(snapshot.statuses)
            .skip(1)
        {
            // SPDK's name of the status, if it has one.
            let name = match kind {
                "aborted" | "miscompare" => kind,
                "retry" => "nomem",
                "nvme" => "nvme error",
                _ => "failed",
            };
            if count > 0 {
                *io_error.entry(name).or_default() += count;
            }
        }
        Self {
            bytes_read: read.bytes,
            num_read_ops: read.ops,
            bytes_written: write.bytes,
            num_write_ops: write.ops,
            bytes_unmapped: unmap.bytes,
            num_unmap_ops: unmap.ops,
            bytes_copied: copy.bytes,
            num_copy_ops: copy.ops,
            read_latency_ticks: read.latency_sum_ns,
            max_read_latency_ticks: read.latency_max_ns,
            min_read_latency_ticks: read.latency_min_ns,
            write_latency_ticks: write.latency_sum_ns,
            max_write_latency_ticks: write.latency_max_ns,
            min_write_latency_ticks: write.latency_min_ns,
            unmap_latency_ticks: unmap.latency_sum_ns,
            max_unmap_latency_ticks: unmap.latency_max_ns,
            min_unmap_latency_ticks: unmap.latency_min_ns,
            copy_latency_ticks: copy.latency_sum_ns,
            max_copy_latency_ticks: copy.latency_max_ns,
            min_copy_latency_ticks: copy.latency_min_ns,
            io_error,
        }
    }
}

impl Method<Engine> for GetIostat {
    const NAME: &'static str = "bdev_get_iostat";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Gives the counters of devices.";
    const CLASS: Class = Class::Read;
    const CHANGES: Changes = Changes::With(&["reset_mode"]);
    type Params = GetIostatParams;
    type Reply = IostatReply;

    async fn apply(params: GetIostatParams, engine: Rc<Engine>) -> Result<IostatReply, RpcError> {
        if !matches!(params.reset_mode, ResetMode::None) {
            access::require(Class::Operate, "reset_mode")?;
        }
        let plane = engine.plane()?;
        if params.per_channel && params.names.as_ref().is_none_or(|names| names.len() != 1) {
            return Err(
                RpcError::errno(Errno::EINVAL, "per_channel needs exactly one name")
                    .field("per_channel"),
            );
        }
        let reset = reset_of(params.reset_mode);
        let layers = match &params.names {
            None => plane.bdevs.list().into_iter().map(|l| l.layer).collect(),
            Some(names) => names
                .iter()
                .map(|n| Ok(plane.bdevs.get(n).or_refuse()?.layer))
                .collect::<Result<Vec<_>, RpcError>>()?,
        };
        let ticks = engine.lifecycle.started.elapsed().as_nanos() as u64;
        let answer = match (params.per_channel, layers.first()) {
            (true, Some(layer)) => IostatReply::Channels {
                tick_rate: TICK_RATE,
                ticks,
                name: layer.name().to_owned(),
                channels: channels(&plane, layer),
            },
            _ => IostatReply::Devices {
                tick_rate: TICK_RATE,
                ticks,
                bdevs: layers
                    .iter()
                    .map(|l| DeviceStat {
                        name: l.name().to_owned(),
                        stat: Stat::of(&l.stats().snapshot()),
                        sampled: engine.devices.samplers.of(l),
                    })
                    .collect(),
            },
        };
        if let Some(what) = reset {
            layers.iter().for_each(|layer| layer.stats().reset(what));
        }
        Ok(answer)
    }
}

fn channels(plane: &Plane, layer: &Layer) -> Vec<ChannelStat> {
    let id = |thread: &str| {
        let at = plane.reactors.iter().position(|r| r.name() == thread);
        at.map_or(0, |at| at as u64 + 1)
    };
    let queues = layer.stats().per_queue();
    queues
        .iter()
        .map(|q| ChannelStat {
            thread_id: id(&q.thread),
            stat: Stat::of(&q.snapshot),
        })
        .collect()
}

fn reset_of(mode: ResetMode) -> Option<Reset> {
    match mode {
        ResetMode::All => Some(Reset::All),
        ResetMode::Maxmin => Some(Reset::Extremes),
        ResetMode::Error => Some(Reset::Errors),
        ResetMode::None => None,
    }
}

struct ResetIostat;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ResetIostatParams {
    /// Default: all devices.
    name: Option<String>,
    /// Counters to set to zero: `maxmin` the lowest and highest latencies, `error` those of failed
    /// I/O, `none` none of them. Default `all`.
    #[serde(default = "everything")]
    mode: ResetMode,
}

fn everything() -> ResetMode {
    ResetMode::All
}

impl Method<Engine> for ResetIostat {
    const NAME: &'static str = "bdev_reset_iostat";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Resets the counters of devices.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Exclusive;
    type Params = ResetIostatParams;
    type Reply = bool;

    async fn apply(params: ResetIostatParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = engine.plane()?;
        let layers = match &params.name {
            None => plane.bdevs.list(),
            Some(name) => vec![plane.bdevs.get(name).or_refuse()?],
        };
        if let Some(what) = reset_of(params.mode) {
            layers
                .iter()
                .for_each(|listed| listed.layer.stats().reset(what));
        }
        Ok(true)
    }
}
