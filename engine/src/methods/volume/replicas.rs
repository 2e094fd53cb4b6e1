//! `volume_*_replica`, `volume_resync`: the replicas of a volume.

use std::rc::Rc;

use nacre_bdev::Bdev;
use nacre_bdev_replica::handle::Command;
use nacre_bdev_replica::model::ReplicaState;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::devices::FoundDevices;
use super::list::{VolumeReply, describe};
use crate::rpc::access;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::cluster;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<AddReplica>()
        .add::<RemoveReplica>()
        .add::<Offline>()
        .add::<Online>()
        .add::<Replace>()
        .add::<Move>()
        .add::<Resync>();
}

/// The registered name of the bdev that `name` refers to; a replica id is returned unchanged. In a
/// cluster, also accepts `NODE:DEVICE`.
pub fn replica(engine: &Engine, volume: &str, name: &str) -> String {
    let of_node = engine.volumes.find(volume).ok();
    let of_node = of_node.and_then(|volume| engine.cluster.device_of(volume.id(), name));
    if let Some(device) = of_node {
        return device;
    }
    let plane = engine.plane().ok();
    let layer = plane.and_then(|plane| plane.bdevs.lookup(name));
    match (super::parse_id(name), layer) {
        (None, Some(layer)) => layer.name().to_owned(),
        _ => name.to_owned(),
    }
}

/// Runs a command, and returns the state of the volume after it.
async fn run(engine: &Rc<Engine>, name: &str, command: Command) -> Result<VolumeReply, RpcError> {
    engine.earlier_changes().await;
    let opened = engine.volumes.run(name, command).await?;
    let id = opened.handle.status().id;
    describe(engine, &engine.volumes.find(&id.to_string())?)
}

/// As [`run`], for a command with a device. Attaches the device first if `device` is a URI. In a
/// cluster, the device's node exports it first.
async fn run_on(
    engine: &Rc<Engine>,
    name: &str,
    device: &str,
    command: impl FnOnce(String) -> Command,
) -> Result<VolumeReply, RpcError> {
    if engine.cluster.node().is_some() {
        let id = engine.volumes.opened(name)?.handle.status().id;
        let on = async |device| run(engine, &id.to_string(), command(device)).await;
        return cluster::change_replicas(engine, id, device, "device", on).await;
    }
    let devices = FoundDevices::one(engine, device, "device").await?;
    let outcome = run(engine, name, command(devices.names[0].clone())).await;
    if outcome.is_err() {
        devices.detach_attached(engine).await;
    }
    outcome
}

pub struct AddReplica;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AddReplicaParams {
    /// The volume: its name or UUID.
    pub name: String,
    /// The block device of the new replica, or a URI as in volume_create. In a cluster:
    /// NODE:DEVICE.
    pub device: String,
    /// Use a device that holds data. The data is lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

impl Method<Engine> for AddReplica {
    const NAME: &'static str = "volume_add_replica";
    const ABOUT: &'static str =
        "Adds a replica to a volume; it is filled while the volume is in use.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = AddReplicaParams;
    type Reply = VolumeReply;

    async fn apply(params: AddReplicaParams, engine: Rc<Engine>) -> Result<VolumeReply, RpcError> {
        engine.earlier_changes().await;
        let force = params.force;
        let add = |device| Command::Add { device, force };
        run_on(&engine, &params.name, &params.device, add).await
    }
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ForcedParams {
    /// The volume: its name or UUID.
    pub name: String,
    /// The replica, by id or by its device; in a cluster also NODE:DEVICE. The older name `member`
    /// is also accepted.
    #[serde(alias = "member")]
    pub replica: String,
    /// The volume's name again, if this would remove the last good replica.
    pub force: Option<String>,
}

pub struct RemoveReplica;

impl Method<Engine> for RemoveReplica {
    const NAME: &'static str = "volume_remove_replica";
    const ABOUT: &'static str = "Takes a replica out of a volume for good; its device is free.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = ForcedParams;
    type Reply = VolumeReply;

    async fn apply(params: ForcedParams, engine: Rc<Engine>) -> Result<VolumeReply, RpcError> {
        let command = Command::Remove {
            replica: replica(&engine, &params.name, &params.replica),
            force: params.force,
        };
        let reply = run(&engine, &params.name, command).await?;
        if let Ok(volume) = engine.volumes.find(&params.name) {
            cluster::end_exports_of_former(&engine, volume.id()).await;
        }
        Ok(reply)
    }
}

pub struct Offline;

impl Method<Engine> for Offline {
    const NAME: &'static str = "volume_offline_replica";
    const ABOUT: &'static str = "Stops using a replica until volume_online_replica. Missed regions are logged; the resync then copies only these.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Free;
    type Params = ForcedParams;
    type Reply = VolumeReply;

    async fn apply(params: ForcedParams, engine: Rc<Engine>) -> Result<VolumeReply, RpcError> {
        if params.force.is_some() {
            access::require(Class::Admin, "force")?;
        }
        let command = Command::Offline {
            replica: replica(&engine, &params.name, &params.replica),
            force: params.force,
        };
        run(&engine, &params.name, command).await
    }
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplicaParams {
    /// The volume: its name or UUID.
    pub name: String,
    /// The replica, by id or by its device; in a cluster also NODE:DEVICE. The older name `member`
    /// is also accepted.
    #[serde(alias = "member")]
    pub replica: String,
}

pub struct Online;

impl Method<Engine> for Online {
    const NAME: &'static str = "volume_online_replica";
    const ABOUT: &'static str = "Uses a replica again that was taken offline.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Free;
    type Params = ReplicaParams;
    type Reply = VolumeReply;

    async fn apply(params: ReplicaParams, engine: Rc<Engine>) -> Result<VolumeReply, RpcError> {
        let command = Command::Online {
            replica: replica(&engine, &params.name, &params.replica),
        };
        run(&engine, &params.name, command).await
    }
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplaceParams {
    /// The volume: its name or UUID.
    pub name: String,
    /// The replica to replace, by id or by its device; in a cluster also NODE:DEVICE. The older
    /// name `member` is also accepted.
    #[serde(alias = "member")]
    pub replica: String,
    /// The block device of the new replica, or a URI as in volume_create. In a cluster:
    /// NODE:DEVICE.
    pub device: String,
    /// Use a device that holds data. The data is lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

impl ReplaceParams {
    async fn run(self, engine: &Rc<Engine>) -> Result<VolumeReply, RpcError> {
        let (replica, force) = (replica(engine, &self.name, &self.replica), self.force);
        let replace = |device| Command::Replace {
            replica,
            device,
            force,
        };
        run_on(engine, &self.name, &self.device, replace).await
    }
}

pub struct Replace;

impl Method<Engine> for Replace {
    const NAME: &'static str = "volume_replace_replica";
    const ABOUT: &'static str =
        "Puts a new replica in the place of one, which goes when the new one is in sync.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = ReplaceParams;
    type Reply = VolumeReply;

    async fn apply(params: ReplaceParams, engine: Rc<Engine>) -> Result<VolumeReply, RpcError> {
        engine.earlier_changes().await;
        params.run(&engine).await
    }
}

pub struct Move;

impl Method<Engine> for Move {
    const NAME: &'static str = "volume_move_replica";
    const ABOUT: &'static str = "Moves a replica that is in sync to another device; it is used until the new one is in sync, so that there is never one less.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = ReplaceParams;
    type Reply = VolumeReply;

    async fn apply(params: ReplaceParams, engine: Rc<Engine>) -> Result<VolumeReply, RpcError> {
        engine.earlier_changes().await;
        let wanted = replica(&engine, &params.name, &params.replica);
        let status = engine.volumes.opened(&params.name)?.handle.status();
        let ours = status
            .replicas
            .iter()
            .find(|m| m.device == wanted || m.id.to_string() == wanted);
        if let Some(replica) = ours.filter(|m| m.state != ReplicaState::InSync) {
            return Err(RpcError::errno(
                Errno::EINVAL,
                format!(
                    "the replica on \"{}\" is not in sync: there is nothing to move",
                    replica.device
                ),
            )
            .field("replica")
            .remedy("replace it with volume_replace_replica"));
        }
        params.run(&engine).await
    }
}

pub struct Resync;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResyncParams {
    /// The volume: its name or UUID.
    pub name: String,
    /// Only this replica, by id or by its device; default: all that are out of sync.
    #[serde(alias = "member")]
    pub replica: Option<String>,
    /// Copy everything, not only the missed writes. Requires `replica`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub full: bool,
}

impl Method<Engine> for Resync {
    const NAME: &'static str = "volume_resync";
    const ABOUT: &'static str =
        "Tries to bring replicas in sync now, without waiting for their next turn.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Free;
    type Params = ResyncParams;
    type Reply = VolumeReply;

    async fn apply(params: ResyncParams, engine: Rc<Engine>) -> Result<VolumeReply, RpcError> {
        if params.full && params.replica.is_none() {
            return Err(
                RpcError::errno(Errno::EINVAL, "full needs to know which replica")
                    .field("replica")
                    .remedy("name it"),
            );
        }
        let command = Command::Resync {
            replica: params
                .replica
                .map(|name| replica(&engine, &params.name, &name)),
            full: params.full,
        };
        run(&engine, &params.name, command).await
    }
}
