//! `rdma_get_*`, a Nacre extension: devices, counters, queue pairs and memory of the RDMA
//! transport.

use std::collections::BTreeMap;
use std::rc::Rc;

use nacre_transport_rdma::{
    DomainInfo, LatencySnapshot, QueuePairInfo, QueuePairState, RegionInfo, StatsSnapshot, Timed,
};
use nacre_transport_rdma_link::{Fabric, Roots};
use nacre_transport_rdma_verbs::Access;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::rpc::{Class, Method, NoParams, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::rdma::{Rdma, describe};

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<GetDevices>()
        .add::<GetRdmaStats>()
        .add::<GetQueuePairs>()
        .add::<GetMemory>();
}

struct GetDevices;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DevicesParams {
    /// Only this device; default: all.
    name: Option<String>,
}

impl Method<Engine> for GetDevices {
    const NAME: &'static str = "rdma_get_devices";
    const ABOUT: &'static str = "Lists the RDMA devices of this machine with their ports and GIDs, and, where libibverbs can open them, their limits.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = DevicesParams;
    type Reply = Value;

    async fn apply(params: DevicesParams, engine: Rc<Engine>) -> Result<Value, RpcError> {
        let verbs = engine.rdma.verbs.clone();
        // Files, libraries and devices may be slow.
        let read = tokio::task::spawn_blocking(move || {
            let mut described = describe::described(&Fabric::read(&Roots::real().sys));
            let limits = match verbs.open() {
                Err(absence) => Err(absence.to_string()),
                Ok(provider) => match provider.devices() {
                    Err(error) => Err(error.to_string()),
                    Ok(all) => Ok(all.iter().map(|of| of.attributes().clone()).collect()),
                },
            };
            for device in described.as_array_mut().into_iter().flatten() {
                describe::add_limits(device, &limits);
            }
            described
        });
        let mut all = read
            .await
            .map_err(|error| RpcError::internal(error.to_string()))?;
        Rdma::watch_for_removal(&engine);
        if let (Some(name), Some(list)) = (&params.name, all.as_array_mut()) {
            list.retain(|device| device["name"] == name[..]);
        }
        Ok(all)
    }
}

pub struct GetRdmaStats;

/// All zero and empty while there is no RDMA transport.
#[derive(Debug, Serialize, JsonSchema)]
pub struct RdmaStats {
    rdma_connections: usize,
    rdma_send_ops: u64,
    rdma_recv_ops: u64,
    rdma_read_ops: u64,
    rdma_write_ops: u64,
    rdma_send_bytes: u64,
    rdma_recv_bytes: u64,
    rdma_read_bytes: u64,
    rdma_write_bytes: u64,
    /// Failed work requests, without those flushed when a queue pair ends.
    rdma_completion_errors: u64,
    /// Exhausted transport and receiver-not-ready retries.
    rdma_retry_exceeded: u64,
    /// Failed work requests by completion status.
    completion_errors: BTreeMap<&'static str, u64>,
    /// Time from post to completion: `send`, `read` and `write`.
    latency: BTreeMap<&'static str, LatencyReply>,
    /// Bytes copied between host buffers and device buffers, over any transport; 0 if all buffers
    /// are aligned.
    copied_bytes: u64,
    /// Events of the connection manager by name; `async_events` counts those of devices.
    cm_events: BTreeMap<&'static str, u64>,
    async_events: u64,
    /// Refused connection requests, by the reason sent to the host.
    rejects: BTreeMap<&'static str, u64>,
    cq_resizes: u64,
    /// Every counter, by reactor and device.
    reactors: Vec<ReactorStats>,
}

/// Signaled work requests only: each READ and some SENDs; a WRITE completes with a later signaled
/// SEND.
#[derive(Debug, Serialize, JsonSchema)]
struct LatencyReply {
    count: u64,
    total_us: u64,
    /// Percentile: this share of requests took less time than the value, a power of two.
    p50_us: Option<u64>,
    p99_us: Option<u64>,
}

impl LatencyReply {
    fn new(of: &LatencySnapshot) -> Self {
        Self {
            count: of.count(),
            total_us: of.sum_ns / 1000,
            p50_us: of.quantile_us(0.5),
            p99_us: of.quantile_us(0.99),
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
struct ReactorStats {
    reactor: String,
    device: String,
    counters: BTreeMap<&'static str, u64>,
}

impl Method<Engine> for GetRdmaStats {
    const NAME: &'static str = "rdma_get_stats";
    const ABOUT: &'static str =
        "Returns the counters of the RDMA transport, in sum and by reactor and device.";
    const CLASS: Class = Class::Read;
    type Params = NoParams;
    type Reply = RdmaStats;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<RdmaStats, RpcError> {
        let plug = engine.rdma.plug();
        let plane = engine.plane()?;
        let total = plug.as_ref().map(|plug| plug.total()).unwrap_or_default();
        let copied = plane.copied_bytes();
        let control = plug
            .as_ref()
            .map(|plug| plug.control_counts())
            .unwrap_or_default();
        let mut reactors = Vec::new();
        for (core, devices) in plug.iter().flat_map(|plug| plug.stats()) {
            let reactor = plane.reactors.get(core);
            for (device, stats) in devices {
                reactors.push(ReactorStats {
                    reactor: reactor.map_or_else(String::new, |r| r.name().to_owned()),
                    device,
                    counters: counters(&stats),
                });
            }
        }
        Ok(RdmaStats {
            rdma_connections: plug.as_ref().map_or(0, |plug| plug.connections()),
            rdma_send_ops: total.send_ops,
            rdma_recv_ops: total.recv_ops,
            rdma_read_ops: total.read_ops,
            rdma_write_ops: total.write_ops,
            rdma_send_bytes: total.send_bytes,
            rdma_recv_bytes: total.recv_bytes,
            rdma_read_bytes: total.read_bytes,
            rdma_write_bytes: total.write_bytes,
            rdma_completion_errors: total.completion_errors().map(|(_, count)| count).sum(),
            rdma_retry_exceeded: total.retry_exceeded(),
            completion_errors: total.completion_errors().filter(|e| e.1 > 0).collect(),
            latency: Timed::ALL
                .into_iter()
                .map(|op| (op.name(), LatencyReply::new(total.latency(op))))
                .collect(),
            copied_bytes: copied.by_target + copied.by_devices,
            cm_events: control.events,
            async_events: control.async_events,
            rejects: control.rejects,
            cq_resizes: control.cq_resizes,
            reactors,
        })
    }
}

fn counters(stats: &StatsSnapshot) -> BTreeMap<&'static str, u64> {
    stats.iter().collect()
}

struct GetQueuePairs;

#[derive(Debug, Serialize, JsonSchema)]
struct QueuePairReply {
    qp_num: u32,
    device: String,
    /// `connecting`, `established` or `ending`.
    state: &'static str,
    reactor: String,
    local: String,
    peer: String,
    /// Maximum number of outstanding commands of the host.
    queue_depth: u16,
    /// Maximum number of outstanding RDMA READs.
    read_depth: u8,
    /// Responses invalidate the host's memory registrations (SEND_WITH_INVALIDATE).
    send_with_invalidate: bool,
    /// Index of the queue pair's GID in the port's table (`nacre rdma gids`). The host's request
    /// selects the RoCE v1 or v2 entry of an address. Null: no GID, or not accepted yet.
    gid_index: Option<u16>,
}

impl Method<Engine> for GetQueuePairs {
    const NAME: &'static str = "rdma_get_qpairs";
    const ABOUT: &'static str = "Lists the RDMA queue pairs of hosts.";
    const CLASS: Class = Class::Read;
    type Params = NoParams;
    type Reply = Vec<QueuePairReply>;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Vec<QueuePairReply>, RpcError> {
        let plane = engine.plane()?;
        let describe = |pair: QueuePairInfo| QueuePairReply {
            qp_num: pair.number,
            device: pair.device,
            state: match pair.state {
                QueuePairState::Connecting => "connecting",
                QueuePairState::Established => "established",
                QueuePairState::Ending => "ending",
            },
            reactor: plane
                .reactors
                .get(pair.core)
                .map_or_else(String::new, |reactor| reactor.name().to_owned()),
            local: pair.local.to_string(),
            peer: pair.peer.to_string(),
            queue_depth: pair.depth,
            read_depth: pair.read_depth,
            send_with_invalidate: pair.invalidate,
            gid_index: pair.gid_index,
        };
        let pairs = engine.rdma.plug().map(|plug| plug.queue_pairs());
        Ok(pairs.into_iter().flatten().map(describe).collect())
    }
}

struct GetMemory;

#[derive(Debug, Serialize, JsonSchema)]
struct MemoryReply {
    device: String,
    /// Remote access of peers: none on a target.
    access: &'static str,
    /// Current memory regions, their total bytes, and registrations since the start: constant under
    /// load.
    regions: u64,
    bytes: u64,
    registrations_total: u64,
    /// Maximum bytes per region: the largest power of two within `[rdma] max_mr_size` and the
    /// device's limit.
    max_mr_size: u64,
    mrs: Vec<RegionReply>,
    /// The memory, registered with every device in use.
    arenas: Vec<ArenaReply>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct RegionReply {
    /// Index in `arenas`; `offset` is the start of the region within the arena in bytes.
    arena: usize,
    offset: u64,
    bytes: u64,
    lkey: u32,
}

#[derive(Debug, Clone, Serialize, JsonSchema)]
struct ArenaReply {
    bytes: u64,
    pages: String,
    numa_node: Option<u32>,
    locked: bool,
}

impl Method<Engine> for GetMemory {
    const NAME: &'static str = "rdma_get_mrs";
    const ABOUT: &'static str =
        "Lists the memory regions that are registered with each RDMA device in use.";
    const CLASS: Class = Class::Read;
    type Params = NoParams;
    type Reply = Vec<MemoryReply>;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Vec<MemoryReply>, RpcError> {
        let Some(plug) = engine.rdma.plug() else {
            return Ok(Vec::new());
        };
        let arena = |arena: &nacre_hugepages::Arena| {
            let report = arena.report();
            ArenaReply {
                bytes: report.bytes,
                pages: report.pages.to_string(),
                numa_node: report.node,
                locked: report.locked,
            }
        };
        let arenas: Vec<ArenaReply> = plug.arenas().iter().map(arena).collect();
        let region = |region: &RegionInfo| RegionReply {
            arena: region.arena,
            offset: region.offset,
            bytes: region.bytes,
            lkey: region.lkey,
        };
        let describe = |known: DomainInfo| {
            let there = known.domain.registrations();
            MemoryReply {
                device: known.domain.attributes().name.clone(),
                access: match known.domain.access() {
                    Access::Local => "local",
                    Access::Remote => "remote",
                },
                regions: there.regions,
                bytes: there.bytes,
                registrations_total: there.registered_total,
                max_mr_size: known.max_mr_size,
                mrs: known.regions.iter().map(region).collect(),
                arenas: arenas.clone(),
            }
        };
        Ok(plug.memory_regions().into_iter().map(describe).collect())
    }
}
