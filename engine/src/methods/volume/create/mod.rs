//! `volume_create`, `volume_delete`, `volume_rename`.

mod in_cluster;
pub mod options;

use std::rc::Rc;

use nacre_bdev::Bdev;
use nacre_bdev_replica::handle::{Command, CopiedFrom, NewVolume};
use nacre_bdev_replica::model::{MAX_REPLICAS, Settings};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use self::options::NewVolumeOptions;
use super::super::replies::refuse_nil;
use super::blocks;
use super::devices::FoundDevices;
use super::list::{VolumeReply, describe};
use super::on_pools::{self, PoolReplica, Source};
use crate::bdev_modules;
use crate::refusal::{OrRefuse, Refusal};
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::cluster;
use crate::services::volumes;
use crate::services::volumes::lvols;
use crate::store::{Change, Edit, Record};
use crate::values::{flattened, read};

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<Create>().add::<Delete>().add::<Rename>();
}

pub struct Create;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, remote = "Self")]
#[schemars(!remote)]
pub struct CreateParams {
    /// Name of the new volume and of its block device.
    pub name: String,
    /// One to five block devices, one per replica: by name, alias or UUID, or as the URI of a
    /// remote namespace (`auto://`, `tcp://`, `rdma://`, `rdma+tcp://`), which is attached. In a
    /// cluster: `NODE:DEVICE`, a device of a node, by the node's name or id.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
    /// Replicas on pools, after those on devices: an lvol of the volume's name is made for each,
    /// and volume_delete deletes it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<PoolReplica>,
    /// In MiB, or text such as "10GiB". Default: the largest size that fits the smallest device,
    /// less 1 MiB for the label and the dirty-region log.
    #[serde(default, deserialize_with = "read::some_mebibytes")]
    pub size_mb: Option<u64>,
    /// In blocks of the devices, instead of size_mb.
    pub num_blocks: Option<u64>,
    /// In bytes, or text such as "10GiB", instead of size_mb. Rounded up to whole blocks.
    #[serde(
        default,
        deserialize_with = "read::some_bytes",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<u64>")]
    pub size: Option<u64>,
    #[serde(skip)]
    #[schemars(!skip, flatten)]
    pub options: NewVolumeOptions,
}

flattened!(CreateParams, options, without nulls);

impl Method<Engine> for Create {
    const NAME: &'static str = "volume_create";
    const ABOUT: &'static str =
        "Makes a replicated volume on block devices and pools, and a block device of its name.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = CreateParams;
    type Reply = VolumeReply;

    async fn apply(params: CreateParams, engine: Rc<Engine>) -> Result<VolumeReply, RpcError> {
        engine.earlier_changes().await;
        refuse_nil(params.options.uuid)?;
        // A saved configuration makes this call for an existing volume.
        if let Some(id) = params.options.uuid
            && let Ok(there) = engine.volumes.find(&id.to_string())
            && there.name() == params.name
        {
            return describe(&engine, &there);
        }
        match params.devices.len() + params.replicas.len() {
            _ if in_cluster::is_placed(&params)? => {}
            // The replicas are on the pools of the snapshot.
            0 if params.options.snapshot.is_some() => {}
            0 => {
                return Err(RpcError::errno(Errno::EINVAL, "no device is named").field("devices"));
            }
            1..=MAX_REPLICAS => {}
            count => {
                let cause = format!("a volume has 1 to {MAX_REPLICAS} replicas, not {count}");
                return Err(RpcError::errno(Errno::EINVAL, cause).field("devices"));
            }
        }
        if engine.cluster.node().is_some() {
            if params.options.snapshot.is_some() && params.options.replica_count.is_none() {
                let cause = "a volume with the contents of a snapshot has replicas on pools";
                return Err(RpcError::errno(Errno::EINVAL, cause)
                    .field("snapshot")
                    .remedy(
                        "give replica_count instead of devices: the cluster chooses the pools",
                    ));
            }
            return in_cluster::create(&engine, params).await;
        }
        if params.options.replica_count.is_some() {
            let cause = "this daemon is in no cluster, which would choose the pools";
            return Err(RpcError::errno(Errno::ENOTSUP, cause)
                .field("replica_count")
                .remedy("name devices, or pools in replicas"));
        }
        let devices = FoundDevices::find(&engine, &params.devices, "devices").await?;
        let made = make(&engine, params, &devices.names).await;
        if made.is_err() {
            devices.detach_attached(&engine).await;
        }
        made
    }
}

fn bytes_of(blocks: Option<u64>, block_size: u32) -> Result<Option<u64>, RpcError> {
    let bytes = blocks.map(|blocks| {
        blocks.checked_mul(u64::from(block_size)).ok_or_else(|| {
            RpcError::errno(Errno::EINVAL, "that is more than 64 bits of bytes").field("num_blocks")
        })
    });
    bytes.transpose()
}

async fn make(
    engine: &Rc<Engine>,
    params: CreateParams,
    devices: &[String],
) -> Result<VolumeReply, RpcError> {
    let plane = engine.plane()?;
    let block_size = match devices.first() {
        Some(first) => plane
            .bdevs
            .lookup(first)
            .map_or(512, |layer| layer.geometry().block_size),
        None => nacre_bdev_pool::BLOCK,
    };
    let blocks = blocks(params.num_blocks, params.size_mb, params.size, block_size)?;
    let bytes = bytes_of(blocks, block_size)?;
    let source = match &params.options.snapshot {
        Some(snapshot) if devices.is_empty() => Some(Source::find(engine, snapshot)?),
        Some(_) => {
            let cause = "a volume with the contents of a snapshot has all replicas on pools";
            return Err(RpcError::errno(Errno::EINVAL, cause).field("devices"));
        }
        None => None,
    };
    let (mut replicas, mut bytes) = (params.replicas, bytes);
    if let Some(source) = &source {
        bytes = source.size(bytes)?;
        if replicas.is_empty() {
            replicas = source.replicas();
        }
    }
    let mut on_pools = on_pools::wanted(engine, &replicas, bytes)?;
    let clones = match &source {
        Some(source) => source.clones(&mut on_pools)?,
        None => Vec::new(),
    };
    let mut settings = Settings::default();
    params.options.settings.merge(&mut settings);
    let id = params.options.uuid.unwrap_or_else(Uuid::new_v4);
    let made = async {
        let mut devices = devices.to_vec();
        if !on_pools.is_empty() {
            devices.extend(lvols::make(engine, id, &params.name, &on_pools, &clones).await?);
        }
        let new = NewVolume {
            name: params.name,
            id: Some(id),
            bytes,
            devices,
            settings,
            force: params.options.force,
            copied_from: source.as_ref().map(|source| CopiedFrom {
                origin: source.origin(),
                devices: clones.len(),
            }),
        };
        volumes::create(engine, new).await
    };
    let made = made.await;
    lvols::delete_unused(engine, id).await;
    made?;
    describe(engine, &engine.volumes.find(&id.to_string())?)
}

pub(super) fn config(engine: &Engine) -> Vec<Value> {
    // The volumes of a cluster are in etcd.
    if engine.cluster.node().is_some() {
        return Vec::new();
    }
    let call = |listed: volumes::Listed| {
        let record = &listed.record;
        let (settings, replicas, blocks) = match listed.status() {
            Some(s) => (
                s.settings,
                s.replicas.into_iter().map(|m| m.device).collect(),
                s.blocks,
            ),
            None => (
                record.settings.clone(),
                record.replicas.iter().map(|m| m.device.clone()).collect(),
                record.blocks,
            ),
        };
        let replicas: Vec<String> = replicas;
        json!({
            "method": Create::NAME,
            "params": {
                "name": listed.name(),
                "uuid": record.id,
                "devices": replicas,
                "num_blocks": blocks,
                "settings": settings,
            },
        })
    };
    engine.volumes.list().into_iter().map(call).collect()
}

pub struct Delete;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeleteParams {
    /// The volume: its name or UUID.
    pub name: String,
    /// The volume's name again, to delete it although some replicas cannot be reached; their labels
    /// stay.
    pub force: Option<String>,
}

impl Method<Engine> for Delete {
    const NAME: &'static str = "volume_delete";
    const ABOUT: &'static str = "Deletes a volume that is not in use. The devices of its replicas are free again; their data is given up. \
         Lvols that volume_create made are deleted.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = DeleteParams;
    type Reply = bool;

    async fn apply(params: DeleteParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.earlier_changes().await;
        if engine.cluster.node().is_some() {
            let id = engine.volumes.find(&params.name)?.id();
            cluster::delete(&engine, id, params.force).await?;
        } else {
            volumes::delete(&engine, &params.name, params.force).await?;
        }
        Ok(true)
    }
}

pub struct Rename;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RenameParams {
    /// The volume: its name or UUID.
    pub name: String,
    /// The new name.
    pub new_name: String,
}

impl Method<Engine> for Rename {
    const NAME: &'static str = "volume_rename";
    const ABOUT: &'static str = "Gives a volume another name. Its block device has it as an alias at once, and as its name from the next start on; \
         hosts notice nothing.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = RenameParams;
    type Reply = bool;

    async fn apply(params: RenameParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.earlier_changes().await;
        let id = engine.volumes.find(&params.name)?.id();
        let altering = engine.volumes.altering(id);
        let _one = altering.lock().await;
        let opened = engine.volumes.opened(&id.to_string())?;
        let (plane, before) = (engine.plane()?, opened.handle.status());
        let (bdev, new) = (opened.bdev.as_str(), params.new_name.as_str());
        if before.name == new {
            return Ok(true);
        }
        let taken = |refused: nacre_bdev::RegistryError| refused.refusal().field("new_name");
        // Reserve the name first, so that no other object takes it.
        let aliased = new != bdev;
        if aliased {
            plane.bdevs.add_alias(bdev, new).map_err(taken)?;
        }
        let undo = || {
            if aliased {
                let _ = plane.bdevs.remove_alias(bdev, new);
            }
        };
        // Records in the journal must match the device under either name.
        let stored = engine
            .journal
            .commit(refer_by_uuid(&engine, &before.name, bdev, before.id))
            .await;
        stored.inspect_err(|_| undo())?;
        let renamed = Command::Rename {
            name: new.to_owned(),
        };
        opened
            .handle
            .run(renamed)
            .await
            .inspect_err(|_| undo())
            .or_refuse()?;
        if before.name != bdev {
            // The alias of the previous rename.
            let _ = plane.bdevs.remove_alias(bdev, &before.name);
        }
        let text = format!("volume \"{}\" is called \"{new}\" now", before.name);
        engine.notes.report(
            "volume_rename",
            new.to_owned(),
            text,
            json!({ "id": before.id }),
        );
        Ok(true)
    }
}

/// Edits that make namespaces, limits and stacked bdevs refer to the bdev by its UUID, which never
/// changes.
fn refer_by_uuid(engine: &Engine, name: &str, bdev: &str, id: Uuid) -> Change {
    let ours = |value: Option<&Value>| {
        let value = value.and_then(Value::as_str);
        value == Some(name) || value == Some(bdev)
    };
    let mut edits = Vec::new();
    for entry in engine.journal.select(|e| e.durable) {
        let Record {
            key,
            method,
            mut params,
        } = entry.record;
        let own_limits = key.starts_with("qos/") && ours(params.get("name"));
        let mut changed = false;
        if ours(params.pointer("/namespace/bdev_name")) {
            params["namespace"]["bdev_name"] = id.to_string().into();
            changed = true;
        }
        if let Some(base) = bdev_modules::base_mut(&method, &mut params)
            && ours(Some(base))
        {
            *base = id.to_string().into();
            changed = true;
        }
        if own_limits {
            params["name"] = id.to_string().into();
            changed = true;
        }
        if changed {
            edits.push(Edit::Put(Record {
                key,
                method,
                params,
            }));
        }
    }
    Change(edits)
}
