//! Connected hosts: `nvmf_subsystem_get_controllers`, `_get_qpairs`, `nvmf_get_stats`.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nacre_nvmf::subsystems::{
    Association, GroupHandle, ListenerStats, Phase, QueueInfo, SubsystemKind,
};
use nacre_nvmf::transport::TransportType;
use nacre_transport_rdma::StatsSnapshot;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::address::AddressReply;
use super::{any_subsystem, check_target};
use crate::methods::replies::TICK_RATE;
use crate::plane::Plane;
use crate::rpc::{Class, Method, Registry, RpcError};
use crate::services::Engine;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<GetControllers>()
        .add::<GetQpairs>()
        .add::<GetTargetStats>();
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SubsystemParams {
    /// NQN of the subsystem.
    pub nqn: String,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
}

pub struct GetControllers;

#[derive(Debug, Serialize, JsonSchema)]
pub struct ControllerReply {
    cntlid: u16,
    /// `io` or `discovery`.
    cntrltype: &'static str,
    hostnqn: String,
    hostid: String,
    /// Includes the admin queue pair, as in SPDK.
    num_io_qpairs: usize,
}

impl Method<Engine> for GetControllers {
    const NAME: &'static str = "nvmf_subsystem_get_controllers";
    const ABOUT: &'static str =
        "Lists the controllers of a subsystem: one per connected host and path.";
    const CLASS: Class = Class::Read;
    type Params = SubsystemParams;
    type Reply = Vec<ControllerReply>;

    async fn apply(
        params: SubsystemParams,
        engine: Rc<Engine>,
    ) -> Result<Vec<ControllerReply>, RpcError> {
        let plane = engine.plane()?;
        let subsystem = any_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let cntrltype = match subsystem.kind {
            SubsystemKind::Nvm => "io",
            SubsystemKind::Discovery => "discovery",
        };
        let describe = |controller: &Arc<Association>| ControllerReply {
            cntlid: controller.cntlid,
            cntrltype,
            hostnqn: controller.hostnqn.to_string(),
            hostid: Uuid::from_bytes(controller.hostid).to_string(),
            num_io_qpairs: controller.queues().len(),
        };
        Ok(subsystem.controllers().iter().map(describe).collect())
    }
}

pub struct GetQpairs;

#[derive(Debug, Serialize, JsonSchema)]
pub struct QpairReply {
    cntlid: u16,
    qid: u16,
    /// `authenticating`, `enabled` or `deactivating`.
    state: &'static str,
    /// The reactor that serves the queue pair.
    thread: String,
    hostnqn: String,
    listen_address: AddressReply,
    peer_address: AddressReply,
    /// The queue's latest authentication.
    #[serde(skip_serializing_if = "Option::is_none")]
    auth: Option<AuthReply>,
    /// Left out for a connection in clear.
    #[serde(skip_serializing_if = "Option::is_none")]
    tls: Option<TlsReply>,
    /// Nacre extension: completed I/O commands; left out for the admin queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    completed_nvme_io: Option<u64>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct TlsReply {
    /// The identity of the pre-shared key.
    identity: String,
    cipher: &'static str,
    /// How the host derives its key: `standard`, or `libnvme` and `libnvme-1.8` as libnvme before
    /// 1.16 did.
    derivation: &'static str,
}

impl TlsReply {
    fn of(queue: &QueueInfo) -> Option<Self> {
        let secure = queue.secure.as_ref()?;
        Some(Self {
            identity: secure.identity.to_string(),
            cipher: secure.suite.name(),
            derivation: secure.derivation.name(),
        })
    }
}

#[derive(Debug, Serialize, JsonSchema)]
struct AuthReply {
    /// `negotiate`, `challenge`, `reply`, `success1`, `success2`, `failure1`, `completed` or
    /// `error`.
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    digest: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dhgroup: Option<&'static str>,
}

impl AuthReply {
    fn of(queue: &QueueInfo) -> Option<Self> {
        let (progress, chosen) = queue.auth.load()?;
        Some(Self {
            state: progress.name(),
            digest: chosen.map(|(hash, _)| hash.name()),
            dhgroup: chosen.map(|(_, group)| group.name()),
        })
    }
}

impl Method<Engine> for GetQpairs {
    const NAME: &'static str = "nvmf_subsystem_get_qpairs";
    const ABOUT: &'static str = "Lists the queue pairs of a subsystem's controllers.";
    const CLASS: Class = Class::Read;
    type Params = SubsystemParams;
    type Reply = Vec<QpairReply>;

    async fn apply(
        params: SubsystemParams,
        engine: Rc<Engine>,
    ) -> Result<Vec<QpairReply>, RpcError> {
        let plane = engine.plane()?;
        let subsystem = any_subsystem(&plane, params.tgt_name.as_deref(), &params.nqn)?;
        let mut all = Vec::new();
        for controller in subsystem.controllers() {
            all.extend(controller.queues().iter().map(|queue| QpairReply {
                cntlid: controller.cntlid,
                qid: queue.qid,
                state: match controller.phase() {
                    Phase::Connected | Phase::Ready if !queue.is_authenticated() => {
                        "authenticating"
                    }
                    Phase::Connected | Phase::Ready => "enabled",
                    Phase::Closing => "deactivating",
                },
                thread: thread(&plane, &queue.group),
                hostnqn: controller.hostnqn.to_string(),
                listen_address: AddressReply::new(queue.transport, &queue.local),
                peer_address: AddressReply::new(queue.transport, &queue.peer),
                auth: AuthReply::of(queue),
                tls: TlsReply::of(queue),
                completed_nvme_io: (queue.qid != 0).then(|| queue.stats.totals().operations()),
            }));
        }
        Ok(all)
    }
}

fn thread(plane: &Plane, group: &GroupHandle) -> String {
    plane
        .reactors
        .get(group.core)
        .map_or_else(String::new, |reactor| reactor.name().to_owned())
}

pub struct GetTargetStats;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TargetStatsParams {
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct TargetStats {
    tick_rate: u64,
    poll_groups: Vec<PollGroup>,
    /// Nacre extension: counters of each listener since it was opened.
    listeners: Vec<ListenerCountersReply>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ListenerCountersReply {
    address: AddressReply,
    /// Connections, without the refused ones. Null if the transport does not count them.
    accepted: Option<u64>,
    refused: Option<u64>,
    completed_nvme_io: u64,
    bytes_read: u64,
    bytes_written: u64,
}

impl ListenerCountersReply {
    fn new(of: &ListenerStats) -> Self {
        Self {
            address: AddressReply::new(of.transport, &of.address),
            accepted: of.counts.map(|counts| counts.accepted),
            refused: of.counts.map(|counts| counts.refused),
            completed_nvme_io: of.totals.operations(),
            bytes_read: of.totals.read.bytes,
            bytes_written: of.totals.write.bytes,
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
struct PollGroup {
    name: String,
    /// Total connected since the start.
    admin_qpairs: u64,
    io_qpairs: u64,
    current_admin_qpairs: u64,
    current_io_qpairs: u64,
    /// Connections without a controller yet.
    current_unassociated_qpairs: u64,
    /// Commands waiting for a busy device or for a buffer.
    pending_bdev_io: u64,
    completed_nvme_io: u64,
    transports: Vec<PollGroupTransport>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct PollGroupTransport {
    trtype: String,
    /// RDMA: commands that waited for space in their queue pair.
    #[serde(skip_serializing_if = "Option::is_none")]
    pending_data_buffer: Option<u64>,
    /// RDMA: counters of each device.
    #[serde(skip_serializing_if = "Option::is_none")]
    devices: Option<Vec<RdmaDevice>>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct RdmaDevice {
    name: String,
    polls: u64,
    idle_polls: u64,
    completions: u64,
    requests: u64,
    pending_rdma_read: u64,
    pending_rdma_send: u64,
    total_send_wrs: u64,
    send_doorbell_updates: u64,
    total_recv_wrs: u64,
}

impl RdmaDevice {
    fn new((name, stats): (String, StatsSnapshot)) -> Self {
        let sent = stats.send_ops + stats.read_ops + stats.write_ops;
        Self {
            name,
            polls: stats.batches.iter().sum(),
            idle_polls: stats.batches[0],
            completions: stats.completions,
            requests: stats.recv_ops,
            pending_rdma_read: stats.reads_waited,
            pending_rdma_send: stats.responses_waited,
            total_send_wrs: sent,
            send_doorbell_updates: stats.doorbells,
            total_recv_wrs: stats.receives_posted,
        }
    }
}

fn transport(trtype: String, rdma: Option<Vec<(String, StatsSnapshot)>>) -> PollGroupTransport {
    let waited = |devices: &Vec<(String, StatsSnapshot)>| {
        let of = |(_, stats): &(String, StatsSnapshot)| stats.reads_waited + stats.responses_waited;
        devices.iter().map(of).sum()
    };
    PollGroupTransport {
        trtype,
        pending_data_buffer: rdma.as_ref().map(waited),
        devices: rdma.map(|all| all.into_iter().map(RdmaDevice::new).collect()),
    }
}

impl Method<Engine> for GetTargetStats {
    const NAME: &'static str = "nvmf_get_stats";
    const ABOUT: &'static str = "Returns each reactor's connections, commands and bytes of hosts.";
    const CLASS: Class = Class::Read;
    type Params = TargetStatsParams;
    type Reply = TargetStats;

    async fn apply(params: TargetStatsParams, engine: Rc<Engine>) -> Result<TargetStats, RpcError> {
        check_target(params.tgt_name.as_deref())?;
        let plane = engine.plane()?;
        let mut queues: Vec<QueueInfo> = Vec::new();
        for subsystem in plane
            .target
            .subsystems()
            .iter()
            .chain([plane.target.discovery()])
        {
            queues.extend(subsystem.controllers().iter().flat_map(|c| c.queues()));
        }
        let kinds: Vec<TransportType> = plane.target.plugs().iter().map(|p| p.kind()).collect();
        let rdma: BTreeMap<usize, Vec<(String, StatsSnapshot)>> = match engine.rdma.plug() {
            Some(plug) => plug.stats().into_iter().collect(),
            None => BTreeMap::new(),
        };
        let describe = |group: &GroupHandle| {
            let own = || queues.iter().filter(|q| q.group.core == group.core);
            let counts = group.counts();
            let of = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
            let live: u64 = own().map(|q| q.stats.totals().operations()).sum();
            PollGroup {
                name: thread(&plane, group),
                admin_qpairs: of(&counts.admin_queues),
                io_qpairs: of(&counts.io_queues),
                current_admin_qpairs: own().filter(|q| q.qid == 0).count() as u64,
                current_io_qpairs: own().filter(|q| q.qid != 0).count() as u64,
                current_unassociated_qpairs: of(&counts.unassociated),
                pending_bdev_io: of(&counts.waiting),
                completed_nvme_io: of(&counts.retired_commands) + live,
                transports: kinds
                    .iter()
                    .map(|kind| {
                        let of_core = || rdma.get(&group.core).cloned().unwrap_or_default();
                        let rdma = (*kind == TransportType::Rdma).then(of_core);
                        transport(kind.to_string(), rdma)
                    })
                    .collect(),
            }
        };
        Ok(TargetStats {
            tick_rate: TICK_RATE,
            poll_groups: plane.target.groups().iter().map(describe).collect(),
            listeners: plane
                .target
                .listener_stats()
                .iter()
                .map(ListenerCountersReply::new)
                .collect(),
        })
    }
}
