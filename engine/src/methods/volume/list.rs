//! `volume_list`, `volume_get`, `volume_get_records`: volumes with their state, replicas and
//! progress.

use std::collections::HashMap;
use std::rc::Rc;

use nacre_bdev::{Bdev, Op};
use nacre_bdev_pool::Lvol;
use nacre_bdev_replica::handle::{
    Fencing, ReplicaStatus, ResyncStatus, VerifyStatus, VolumeStatus,
};
use nacre_bdev_replica::model::{Origin, ReplicaState, Settings, SettingsPatch, shown};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use super::NameParams;
use crate::bdev_modules;
use crate::plane::Plane;
use crate::refusal::OrRefuse;
use crate::rpc::{Class, Method, NoParams, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::pools::alias;
use crate::services::volumes::words::{kind_word, replica_word, state_word};
use crate::services::volumes::{Listed, OpenState, REMOTE_PRODUCT};

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<List>().add::<GetVolume>().add::<Records>();
}

/// The present state of a volume.
#[derive(Debug, Serialize, JsonSchema)]
pub struct VolumeReply {
    name: String,
    uuid: String,
    /// Its block device; none until the volume is opened for the first time.
    bdev: Option<String>,
    /// `healthy`, `degraded`, `frozen`, `writes_held`, `failing`, `fenced`, `store_lost`,
    /// `closed`, `standby` (another node of the cluster may serve it) or `opening`.
    state: &'static str,
    /// Reason for the state, unless the volume is healthy.
    why: Option<String>,
    block_size: u32,
    num_blocks: u64,
    /// Incremented by each opening.
    epoch: u64,
    /// Incremented by each change of the volume's record.
    revision: u64,
    /// Bytes per region of the dirty-region log.
    region_size: u64,
    num_regions: u64,
    /// Regions that may differ between replicas after a crash, or that an absent replica misses.
    dirty_regions: u64,
    #[schemars(with = "SettingsPatch")]
    settings: Settings,
    /// The snapshot with whose contents the volume began.
    #[serde(skip_serializing_if = "Option::is_none")]
    origin: Option<Origin>,
    /// Subsystems that offer the volume to hosts.
    subsystems: Vec<String>,
    replicas: Vec<ReplicaReply>,
    verify: Option<VerifyStatus>,
    /// Queues open on it.
    queues: usize,
    /// The reactor that runs the volume's control.
    reactor: Option<String>,
    counters: CountersReply,
}

#[derive(Debug, Default, Serialize, JsonSchema)]
struct CountersReply {
    /// Writes that waited for the dirty-region log.
    log_waits: u64,
    /// Writes that waited for an overlapping write.
    overlap_waits: u64,
    /// Reads served by another replica after an error.
    reads_moved: u64,
    /// Commands completed with a path error because no replica was in sync.
    frozen_answers: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct ReplicaReply {
    id: String,
    slot: u8,
    device: String,
    /// In a cluster: the node that has the device, and the device's name there.
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_device: Option<String>,
    /// Its device is on this machine, also while another node serves the volume.
    on_this_node: bool,
    /// The pool and the lvol (`pool/name`) that the device is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pool: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lvol: Option<String>,
    /// `in_sync`, `syncing` (resync target), `reconciling` (in sync except for regions being
    /// compared after an unclean stop), `out` (lacks the dirty regions), or `filling` (has no valid
    /// data above its watermark).
    state: &'static str,
    /// Its device is present and in use.
    attached: bool,
    /// Taken offline by the operator: it does not return automatically.
    offline: bool,
    /// `local`, or the transport of the remote namespace; none while the device is missing.
    transport: Option<String>,
    /// Protection against a former holder of the volume: `reservation` (the remote target refuses
    /// that holder's writes) or `label` (the epoch in the label). None while the device is not
    /// used.
    fencing: Option<&'static str>,
    /// Mean latencies of the device since it appeared, in microseconds.
    read_latency_us: Option<u64>,
    write_latency_us: Option<u64>,
    /// Why it is not in sync.
    why: Option<String>,
    resync: Option<ResyncReply>,
    /// The last finished resync since the volume was opened.
    last_resync: Option<LastResyncReply>,
    reads: u64,
    writes: u64,
    errors: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ResyncReply {
    /// `partial`, `full` or `reconcile`.
    kind: &'static str,
    /// The source device.
    source: Option<String>,
    total_bytes: u64,
    left_bytes: u64,
    bytes_per_s: u64,
    /// Seconds left at the current rate; none if unknown.
    left_s: Option<u64>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct LastResyncReply {
    /// As in `ResyncReply`.
    kind: &'static str,
    bytes: u64,
    seconds: f64,
}

pub fn describe(engine: &Engine, listed: &Listed) -> Result<VolumeReply, RpcError> {
    let plane = engine.plane()?;
    let served = listed.bdev().map(|bdev| (bdev, subsystems(&plane, bdev)));
    let served = served.into_iter().collect();
    Ok(describe_among(engine, &plane, listed, &served))
}

/// Names of the subsystems with a namespace on a device, by device.
type Served<'a> = HashMap<&'a str, Vec<String>>;

fn describe_among(
    engine: &Engine,
    plane: &Plane,
    listed: &Listed,
    served: &Served<'_>,
) -> VolumeReply {
    let mut reply = describe_one(plane, listed, served);
    if let Some(holder) = listed.record.holder.filter(|_| reply.state == "standby")
        && let Some(node) = engine.cluster.name_of(holder)
    {
        reply.why = Some(format!("node {node} serves it"));
    }
    reply.origin.clone_from(&listed.record.origin);
    let this_node = engine.cluster.this_node();
    for replica in &mut reply.replicas {
        let recorded = listed.record.replicas.iter();
        let mut recorded = recorded.filter(|one| one.device == replica.device);
        let Some(recorded) = recorded.next() else {
            continue;
        };
        let node = recorded.node;
        // The record of a volume that is not open here: there is no transport.
        replica.on_this_node |= node.is_some() && node == this_node;
        replica.node = node.and_then(|node| engine.cluster.name_of(node));
        replica.node_device.clone_from(&recorded.node_device);
    }
    reply
}

fn describe_one(plane: &Plane, listed: &Listed, served: &Served<'_>) -> VolumeReply {
    let subsystems = |bdev: &str| served.get(bdev).cloned().unwrap_or_default();
    let Some(status) = listed.status() else {
        return of_record(listed);
    };
    let mut reply = of_status(plane, &status);
    if let OpenState::Open(opened) = &listed.open_state {
        reply.reactor = Some(opened.reactor.clone());
    }
    if let Some(bdev) = listed.bdev() {
        reply.subsystems = subsystems(bdev);
        reply.bdev = Some(bdev.to_owned());
    }
    reply
}

/// Names of the subsystems with a namespace on a device.
fn subsystems(plane: &Plane, bdev: &str) -> Vec<String> {
    let has = |s: &std::sync::Arc<nacre_nvmf::subsystems::Subsystem>| {
        s.namespaces().iter().any(|n| n.bdev_name == bdev)
    };
    let all = plane.target.subsystems();
    all.iter()
        .filter(|s| has(s))
        .map(|s| s.nqn().to_string())
        .collect()
}

fn of_status(plane: &Plane, status: &VolumeStatus) -> VolumeReply {
    let replicas = status.replicas.iter();
    VolumeReply {
        name: status.name.clone(),
        uuid: status.id.to_string(),
        bdev: None,
        state: state_word(status.state),
        why: status.why.clone(),
        block_size: status.block_size,
        num_blocks: status.blocks,
        epoch: status.epoch,
        revision: status.revision,
        region_size: status.region_bytes,
        num_regions: status.regions,
        dirty_regions: status.dirty_regions,
        settings: status.settings.clone(),
        origin: None,
        subsystems: Vec::new(),
        replicas: replicas.map(|m| replica(plane, status, m)).collect(),
        verify: status.verify.clone(),
        queues: status.lanes,
        reactor: None,
        counters: CountersReply {
            log_waits: status.log_waits,
            overlap_waits: status.overlap_waits,
            reads_moved: status.reads_moved,
            frozen_answers: status.frozen_answers,
        },
    }
}

fn replica(plane: &Plane, volume: &VolumeStatus, replica: &ReplicaStatus) -> ReplicaReply {
    let layer = plane.bdevs.lookup(&replica.device);
    let mean = |op: Op| {
        let stats = layer.as_ref()?.stats().snapshot();
        let stats = stats.op(op);
        stats
            .latency_sum_ns
            .checked_div(stats.ops + stats.errors)
            .map(|ns| ns / 1000)
    };
    let device_of = |id: uuid::Uuid| {
        let source = volume.replicas.iter().find(|m| m.id == id);
        source.map(|m| m.device.clone())
    };
    let lvol = layer
        .as_ref()
        .and_then(|layer| bdev_modules::device::<Lvol>(layer.module()));
    let pool = lvol.as_ref().map(|lvol| lvol.pool_name());
    ReplicaReply {
        id: replica.id.to_string(),
        slot: replica.slot,
        device: replica.device.clone(),
        node: None,
        node_device: None,
        on_this_node: layer
            .as_ref()
            .is_some_and(|layer| transport(layer) == "local"),
        lvol: lvol
            .zip(pool.as_ref())
            .map(|(lvol, pool)| alias(pool, &lvol.info().name)),
        pool,
        state: replica_word(replica),
        attached: replica.attached,
        offline: replica.offline,
        transport: layer.as_ref().map(|layer| transport(layer)),
        fencing: replica.fencing.map(|fencing| match fencing {
            Fencing::Label => "label",
            Fencing::Reservation => "reservation",
        }),
        read_latency_us: mean(Op::Read),
        write_latency_us: mean(Op::Write),
        why: replica.why.clone(),
        resync: replica.resync.as_ref().map(|r| resync(r, &device_of)),
        last_resync: replica.last_resync.map(|last| LastResyncReply {
            kind: kind_word(last.kind),
            bytes: last.bytes,
            seconds: last.seconds,
        }),
        reads: replica.reads,
        writes: replica.writes,
        errors: replica.errors,
    }
}

/// Transport of a bdev: that of a remote namespace, or `local`.
pub fn transport(layer: &nacre_bdev::Layer) -> String {
    if layer.product_name() != REMOTE_PRODUCT {
        return "local".into();
    }
    let facts = layer.module().driver_specific();
    let trtype = ["/nvme/0/trid/trtype", "/nvme/trid/trtype"]
        .iter()
        .find_map(|at| facts.pointer(at).and_then(Value::as_str));
    trtype.unwrap_or("remote").to_owned()
}

fn resync(of: &ResyncStatus, device_of: &dyn Fn(uuid::Uuid) -> Option<String>) -> ResyncReply {
    ResyncReply {
        kind: kind_word(of.kind),
        source: of.source.and_then(device_of),
        total_bytes: of.total_bytes,
        left_bytes: of.left_bytes,
        bytes_per_s: of.bytes_per_s,
        left_s: of.left_s,
    }
}

/// A volume that is not open, described from its record.
fn of_record(listed: &Listed) -> VolumeReply {
    let record = &listed.record;
    let replica = |m: &nacre_bdev_replica::model::ReplicaRecord| ReplicaReply {
        id: m.id.to_string(),
        slot: m.slot,
        device: m.device.clone(),
        node: None,
        node_device: None,
        on_this_node: false,
        pool: None,
        lvol: None,
        state: match m.state {
            ReplicaState::InSync => "in_sync",
            ReplicaState::Out { .. } => "out",
            ReplicaState::Filling { .. } => "filling",
        },
        attached: false,
        offline: m.offline,
        transport: None,
        fencing: None,
        read_latency_us: None,
        write_latency_us: None,
        why: m.why.clone(),
        resync: None,
        last_resync: None,
        reads: 0,
        writes: 0,
        errors: 0,
    };
    VolumeReply {
        name: record.name.clone(),
        uuid: record.id.to_string(),
        bdev: None,
        state: listed.state(),
        why: listed.reason(),
        block_size: record.block_size,
        num_blocks: record.blocks,
        epoch: record.epoch,
        revision: record.revision,
        region_size: 1 << record.region_shift,
        num_regions: record.regions(),
        dirty_regions: 0,
        settings: record.settings.clone(),
        origin: None,
        subsystems: Vec::new(),
        replicas: record.replicas.iter().map(replica).collect(),
        verify: None,
        queues: 0,
        reactor: None,
        counters: CountersReply::default(),
    }
}

pub struct List;

impl Method<Engine> for List {
    const NAME: &'static str = "volume_list";
    const ABOUT: &'static str = "Lists the replicated volumes, by name.";
    const CLASS: Class = Class::Read;
    const ALIASES: &'static [&'static str] = &["volume_get_volumes"];
    type Params = NoParams;
    type Reply = Vec<VolumeReply>;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Vec<VolumeReply>, RpcError> {
        let (plane, all) = (engine.plane()?, engine.volumes.list());
        let mut served: Served<'_> = all
            .iter()
            .filter_map(|v| Some((v.bdev()?, Vec::new())))
            .collect();
        // One pass over the subsystems for all volumes.
        for subsystem in plane.target.subsystems() {
            let mut of_this: Vec<String> = subsystem
                .namespaces()
                .into_iter()
                .map(|n| n.bdev_name)
                .collect();
            of_this.sort_unstable();
            of_this.dedup();
            for bdev in of_this {
                if let Some(nqns) = served.get_mut(bdev.as_str()) {
                    nqns.push(subsystem.nqn().to_string());
                }
            }
        }
        let describe = |listed: &Listed| describe_among(&engine, &plane, listed, &served);
        Ok(all.iter().map(describe).collect())
    }
}

pub struct GetVolume;

impl Method<Engine> for GetVolume {
    const NAME: &'static str = "volume_get";
    const ABOUT: &'static str = "Returns everything about a volume: its state with the reason, its replicas, and each resync with its source and remaining time.";
    const CLASS: Class = Class::Read;
    type Params = NameParams;
    type Reply = VolumeReply;

    async fn apply(params: NameParams, engine: Rc<Engine>) -> Result<VolumeReply, RpcError> {
        describe(&engine, &engine.volumes.find(&params.name)?)
    }
}

pub struct Records;

#[derive(Debug, Serialize, JsonSchema)]
pub struct RecordsReply {
    /// Path of the store; none: in etcd or in memory.
    file: Option<String>,
    /// Prefix of the store's keys in etcd.
    #[serde(skip_serializing_if = "Option::is_none")]
    etcd: Option<String>,
    /// Id of this daemon among the daemons that share the store.
    holder: String,
    /// The records of the store: one of each volume, with its `replicas`.
    volumes: Vec<Value>,
}

impl Method<Engine> for Records {
    const NAME: &'static str = "volume_get_records";
    const ABOUT: &'static str =
        "Gives the records of the volume store, which say who is in sync, in which epoch.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = NoParams;
    type Reply = RecordsReply;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<RecordsReply, RpcError> {
        let records = engine.volumes.store()?.list().await;
        let records = records
            .map_err(nacre_bdev_replica::handle::VolumeError::from)
            .or_refuse()?;
        let etcd = engine.volumes.of_etcd().map(|of| of.prefix);
        let file = engine.journal.store_path().filter(|_| etcd.is_none());
        let file = file.map(|dir| dir.join(nacre_bdev_replica::store::FILE));
        Ok(RecordsReply {
            file: file.map(|f| f.display().to_string()),
            etcd,
            holder: engine.volumes.holder().to_string(),
            volumes: records.iter().map(|r| shown(json!(r))).collect(),
        })
    }
}
