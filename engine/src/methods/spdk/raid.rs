//! `bdev_raid_*`: SPDK's mirrors, implemented as replicated volumes. Every volume is listed as a
//! mirror.
//!
//! Not supported: other RAID levels, a mirror without metadata (each replica reserves the first
//! MiB), and devices that already hold data.

use std::rc::Rc;

use nacre_bdev::Bdev;
use nacre_bdev::module::ByName;
use nacre_bdev_replica::handle::{Command, NewVolume, ResyncKind, VolumeState};
use nacre_bdev_replica::model::{ReplicaState, Settings};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::plane::Plane;
use crate::refusal::OrRefuse;
use crate::rpc::error::{Errno, INTERNAL_ERROR, PARSE_ERROR};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::deferred;
use crate::services::volumes::{self, Listed, OpenState, RESERVED};
use crate::store::{Change, Record};

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<CreateRaid>()
        .add::<DeleteRaid>()
        .add::<GetRaidBdevs>()
        .add::<AddBase>()
        .add::<RemoveBase>()
        .add::<SetRaidOptions>();
}

const OPTIONS_KEY: &str = "volume/raid_options";

struct CreateRaid;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateRaidParams {
    /// Name of the new mirror.
    name: String,
    /// `raid1` or `1`: the other levels of SPDK are not supported.
    raid_level: RaidLevel,
    /// Two to five bdevs, one per replica: by name, alias or UUID. Those that do not exist yet are
    /// waited for.
    base_bdevs: Vec<String>,
    /// Must be 0 or left out: a mirror has no strips.
    #[serde(default)]
    strip_size_kb: u32,
    /// Default: random.
    #[schemars(with = "Option<String>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    uuid: Option<Uuid>,
    /// Accepted: each replica always has a label.
    #[serde(default)]
    #[allow(dead_code)]
    superblock: bool,
}

/// SPDK's levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
enum RaidLevel {
    #[serde(rename = "raid1", alias = "1")]
    Raid1,
    #[serde(rename = "raid0", alias = "0")]
    Raid0,
    #[serde(rename = "raid5f", alias = "5f")]
    Raid5f,
    #[serde(rename = "concat")]
    Concat,
}

/// Refuses mirrors of fewer than two devices, and empty names.
fn check_bases(bases: &[String]) -> Result<(), RpcError> {
    let wrong = |cause| RpcError::errno(Errno::EINVAL, cause).field("base_bdevs");
    if bases.iter().any(String::is_empty) {
        return Err(wrong("a device without a name"));
    }
    match bases.len() {
        0 | 1 => Err(wrong("a mirror has two devices at least")
            .remedy("volume_create makes a volume of one")),
        _ => Ok(()),
    }
}

impl Method<Engine> for CreateRaid {
    const NAME: &'static str = "bdev_raid_create";
    const UNDECODABLE: i32 = PARSE_ERROR;
    const ABOUT: &'static str = "Makes a mirror: a replicated volume, as volume_create does.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = CreateRaidParams;
    type Reply = bool;

    async fn apply(params: CreateRaidParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.earlier_changes().await;
        if params.raid_level != RaidLevel::Raid1 {
            let cause = "this level keeps no second copy of anything: only mirrors are here";
            return Err(RpcError::errno(Errno::ENOTSUP, cause)
                .field("raid_level")
                .remedy("use raid1"));
        }
        check_bases(&params.base_bdevs)?;
        if params.strip_size_kb != 0 {
            return Err(RpcError::errno(Errno::EINVAL, "a mirror has no strips")
                .field("strip_size_kb")
                .remedy("leave it out"));
        }
        crate::methods::replies::refuse_nil(params.uuid)?;
        let plane = engine.plane()?;
        let own = |(at, name): (usize, &String)| match plane.bdevs.lookup(name) {
            Some(layer) => Ok(layer.name().to_owned()),
            None => {
                Err(crate::methods::replies::no_device(name).field(format!("base_bdevs[{at}]")))
            }
        };
        let devices: Result<Vec<String>, RpcError> =
            params.base_bdevs.iter().enumerate().map(own).collect();
        let devices = match devices {
            Ok(devices) => devices,
            Err(missing) => {
                let record = serde_json::to_value(&params).expect("parameters are plain data");
                let _changing = engine.changing().await;
                let name = &params.name;
                deferred::wait_for_base(&engine, name, Self::NAME, record, missing).await?;
                return Ok(true);
            }
        };
        let settings = Settings {
            resync_bytes_per_s: engine.volumes.raid_bytes_per_s.get(),
            ..Settings::default()
        };
        let new = NewVolume {
            name: params.name,
            id: params.uuid,
            bytes: None,
            devices,
            settings,
            force: false,
            copied_from: None,
        };
        volumes::create(&engine, new).await?;
        Ok(true)
    }
}

struct DeleteRaid;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DeleteRaidParams {
    /// Name of the mirror.
    name: String,
    /// Accepted: the labels are always cleared.
    #[serde(default)]
    #[allow(dead_code)]
    clear_sb: bool,
}

impl Method<Engine> for DeleteRaid {
    const NAME: &'static str = "bdev_raid_delete";
    const UNDECODABLE: i32 = PARSE_ERROR;
    const ABOUT: &'static str = "Deletes a mirror that is not in use, as volume_delete does.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = DeleteRaidParams;
    type Reply = bool;

    async fn apply(params: DeleteRaidParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let waiting = deferred::key(&params.name);
        if engine.journal.find(&waiting).is_some() {
            let _changing = engine.changing().await;
            engine.journal.commit(Change::remove(waiting)).await?;
            return Ok(true);
        }
        engine.earlier_changes().await;
        volumes::delete(&engine, &params.name, None).await?;
        Ok(true)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum RaidCategory {
    All,
    Online,
    Configuring,
    Offline,
}

struct GetRaidBdevs;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetRaidBdevsParams {
    /// `online`, `configuring` (waiting for its devices), `offline` (no I/O) or `all`.
    category: RaidCategory,
}

#[derive(Debug, Serialize, JsonSchema)]
struct RaidReply {
    name: String,
    uuid: String,
    strip_size_kb: u32,
    /// `online`, `configuring` or `offline`.
    state: RaidCategory,
    raid_level: &'static str,
    superblock: bool,
    num_base_bdevs: usize,
    /// Devices that are present.
    num_base_bdevs_discovered: usize,
    /// Devices that are present and in sync.
    num_base_bdevs_operational: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    process: Option<ProcessReply>,
    base_bdevs_list: Vec<BaseReply>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ProcessReply {
    /// `rebuild`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// The target device of the resync.
    target: String,
    progress: ProgressReply,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ProgressReply {
    blocks: u64,
    percent: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
struct BaseReply {
    /// None while it is missing.
    name: Option<String>,
    uuid: String,
    is_configured: bool,
    /// In blocks, like the size.
    data_offset: u64,
    data_size: u64,
}

impl Method<Engine> for GetRaidBdevs {
    const NAME: &'static str = "bdev_raid_get_bdevs";
    const UNDECODABLE: i32 = PARSE_ERROR;
    const ABOUT: &'static str = "Lists replicated volumes as SPDK lists mirrors.";
    const CLASS: Class = Class::Read;
    type Params = GetRaidBdevsParams;
    type Reply = Vec<RaidReply>;

    async fn apply(
        params: GetRaidBdevsParams,
        engine: Rc<Engine>,
    ) -> Result<Vec<RaidReply>, RpcError> {
        let plane = engine.plane()?;
        let all = engine.volumes.list();
        let all = all.iter().map(|volume| describe(&plane, volume));
        let waiting = engine.journal.below(crate::journal::DEFERRED).into_iter();
        let waiting = waiting.filter(|entry| entry.record.method == CreateRaid::NAME);
        let all = all.chain(waiting.filter_map(|entry| waiting_mirror(&plane, &entry.record)));
        let wanted = |raid: &RaidReply| {
            params.category == RaidCategory::All || raid.state == params.category
        };
        Ok(all.filter(wanted).collect())
    }
}

/// The properties of a volume's device, under SPDK's names.
pub fn of(engine: &Engine, bdev: &str) -> Option<Value> {
    let plane = engine.plane().ok()?;
    let all = engine.volumes.list();
    let volume = all.iter().find(|volume| volume.bdev() == Some(bdev))?;
    let mut facts = serde_json::to_value(describe(&plane, volume)).ok()?;
    facts.as_object_mut()?.remove("name");
    Some(facts)
}

/// A mirror that is created once all its devices exist.
fn waiting_mirror(plane: &Plane, record: &Record) -> Option<RaidReply> {
    let params: CreateRaidParams = serde_json::from_value(record.params.clone()).ok()?;
    let base = |name: &String| {
        let layer = plane.bdevs.lookup(name);
        BaseReply {
            uuid: layer.as_ref().map_or(Uuid::nil(), |l| l.uuid()).to_string(),
            name: Some(name.clone()),
            is_configured: false,
            data_offset: 0,
            data_size: 0,
        }
    };
    let bases = params.base_bdevs.iter();
    let discovered = bases
        .clone()
        .filter(|name| plane.bdevs.lookup(name).is_some());
    Some(RaidReply {
        name: params.name,
        uuid: params.uuid.unwrap_or_default().to_string(),
        strip_size_kb: 0,
        state: RaidCategory::Configuring,
        raid_level: "raid1",
        superblock: params.superblock,
        num_base_bdevs: params.base_bdevs.len(),
        num_base_bdevs_discovered: discovered.count(),
        num_base_bdevs_operational: 0,
        process: None,
        base_bdevs_list: bases.map(base).collect(),
    })
}

fn describe(plane: &Plane, volume: &Listed) -> RaidReply {
    let record = &volume.record;
    let block = u64::from(record.block_size);
    let base = |device: &str, attached: bool, blocks: u64| {
        let layer = plane.bdevs.lookup(device).filter(|_| attached);
        BaseReply {
            uuid: layer.as_ref().map_or(Uuid::nil(), |l| l.uuid()).to_string(),
            name: layer.map(|layer| layer.name().to_owned()),
            is_configured: attached,
            data_offset: RESERVED / block,
            data_size: blocks,
        }
    };
    let Some(status) = volume.status() else {
        let replicas = record.replicas.iter();
        return RaidReply {
            name: record.name.clone(),
            uuid: record.id.to_string(),
            strip_size_kb: 0,
            state: RaidCategory::Configuring,
            raid_level: "raid1",
            superblock: true,
            num_base_bdevs: record.replicas.len(),
            num_base_bdevs_discovered: 0,
            num_base_bdevs_operational: 0,
            process: None,
            base_bdevs_list: replicas
                .map(|m| base(&m.device, false, record.blocks))
                .collect(),
        };
    };
    let copied = status.replicas.iter().find_map(|replica| {
        let resync = replica.resync.as_ref()?;
        (resync.kind != ResyncKind::Reconcile).then_some((replica, resync))
    });
    let process = copied.map(|(replica, resync)| {
        let done = resync.total_bytes.saturating_sub(resync.left_bytes);
        ProcessReply {
            kind: "rebuild",
            target: replica.device.clone(),
            progress: ProgressReply {
                blocks: done / block,
                percent: (done * 100).checked_div(resync.total_bytes).unwrap_or(100),
            },
        }
    });
    let there = |m: &&nacre_bdev_replica::handle::ReplicaStatus| m.attached;
    let in_sync = |m: &&nacre_bdev_replica::handle::ReplicaStatus| {
        m.attached && m.state == ReplicaState::InSync
    };
    RaidReply {
        name: status.name.clone(),
        uuid: status.id.to_string(),
        strip_size_kb: 0,
        state: match status.state {
            VolumeState::Healthy | VolumeState::Degraded | VolumeState::WritesHeld => {
                RaidCategory::Online
            }
            VolumeState::Frozen
            | VolumeState::Failing
            | VolumeState::Fenced
            | VolumeState::StoreLost
            | VolumeState::Closed
            | VolumeState::Standby => RaidCategory::Offline,
        },
        raid_level: "raid1",
        superblock: true,
        num_base_bdevs: status.replicas.len(),
        num_base_bdevs_discovered: status.replicas.iter().filter(there).count(),
        num_base_bdevs_operational: status.replicas.iter().filter(in_sync).count(),
        process,
        base_bdevs_list: status
            .replicas
            .iter()
            .map(|m| base(&m.device, m.attached, status.blocks))
            .collect(),
    }
}

struct AddBase;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct AddBaseParams {
    /// The device to add.
    base_bdev: String,
    /// The mirror.
    raid_bdev: String,
}

impl Method<Engine> for AddBase {
    const NAME: &'static str = "bdev_raid_add_base_bdev";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Adds a replica to a mirror, as volume_add_replica does.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = AddBaseParams;
    type Reply = bool;

    async fn apply(params: AddBaseParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.earlier_changes().await;
        let listed = engine.plane()?.bdevs.get(&params.base_bdev);
        let none = |_| crate::methods::replies::no_device(&params.base_bdev).field("base_bdev");
        let listed = listed.map_err(none)?;
        engine.volumes.find(&params.raid_bdev)?;
        if let Some((holder, _)) = listed.claims.first() {
            let cause = format!("\"{}\" is used by {holder}", params.base_bdev);
            return Err(RpcError::errno(Errno::EPERM, cause).field("base_bdev"));
        }
        let command = Command::Add {
            device: listed.layer.name().to_owned(),
            force: false,
        };
        engine.volumes.run(&params.raid_bdev, command).await?;
        Ok(true)
    }
}

struct RemoveBase;

impl Method<Engine> for RemoveBase {
    const NAME: &'static str = "bdev_raid_remove_base_bdev";
    const UNDECODABLE: i32 = PARSE_ERROR;
    const ABOUT: &'static str =
        "Takes a replica, named by its device, out of its mirror, as volume_remove_replica does.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = ByName;
    type Reply = bool;

    async fn apply(params: ByName, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.earlier_changes().await;
        let layer = engine.plane()?.bdevs.lookup(&params.name);
        let device = layer.map_or_else(|| params.name.clone(), |l| l.name().to_owned());
        let volume = engine.volumes.with_replica(&device).ok_or_else(|| {
            RpcError::errno(
                Errno::ENODEV,
                format!("no volume has a replica on \"{device}\""),
            )
            .field("name")
            .remedy("bdev_raid_get_bdevs lists them")
        })?;
        let command = Command::Remove {
            replica: device,
            force: None,
        };
        volume.handle.run(command).await.or_refuse()?;
        Ok(true)
    }
}

struct SetRaidOptions;

#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetRaidOptionsParams {
    /// Accepted: a resync proceeds by regions of the volume's dirty-region log.
    process_window_size_kb: Option<u32>,
    /// Resync limit in MiB per second; 0: no limit. Applies to every volume and to later ones.
    process_max_bandwidth_mb_sec: Option<u64>,
}

impl Method<Engine> for SetRaidOptions {
    const NAME: &'static str = "bdev_raid_set_options";
    const UNDECODABLE: i32 = PARSE_ERROR;
    const ABOUT: &'static str = "Sets the resync limit of all volumes.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = SetRaidOptionsParams;
    type Reply = bool;

    async fn apply(params: SetRaidOptionsParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.earlier_changes().await;
        let volumes = &engine.volumes;
        if params.process_window_size_kb == Some(0) {
            return Err(
                RpcError::errno(Errno::EINVAL, "it cannot be 0").field("process_window_size_kb")
            );
        }
        let window = params.process_window_size_kb;
        // SPDK's default.
        let window = window.unwrap_or_else(|| volumes.raid_window_kb.get().unwrap_or(1024));
        let bytes = match params.process_max_bandwidth_mb_sec {
            None => volumes.raid_bytes_per_s.get(),
            Some(mb) => mb.checked_mul(1 << 20).ok_or_else(|| {
                RpcError::errno(Errno::EINVAL, "that is more than 64 bits of bytes")
                    .field("process_max_bandwidth_mb_sec")
            })?,
        };
        if params.process_max_bandwidth_mb_sec.is_some() {
            for volume in volumes.list() {
                // A volume that is not open keeps its setting.
                let (OpenState::Open(_), Some(status)) = (&volume.open_state, volume.status())
                else {
                    continue;
                };
                let settings = Settings {
                    resync_bytes_per_s: bytes,
                    ..status.settings
                };
                let command = Command::Set {
                    settings: Box::new(settings),
                };
                volumes.run(&status.id.to_string(), command).await?;
            }
        }
        let record = json!({
            "process_window_size_kb": window,
            "process_max_bandwidth_mb_sec": bytes >> 20,
        });
        let change = Change::put(OPTIONS_KEY, Self::NAME, record);
        engine.journal.commit(change).await?;
        volumes.raid_window_kb.set(Some(window));
        volumes.raid_bytes_per_s.set(bytes);
        Ok(true)
    }
}
