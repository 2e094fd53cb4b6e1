//! `volume_verify`, `volume_grow`, `volume_set`, `volume_thaw`, `volume_fail_io`.

use std::rc::Rc;

use nacre_bdev::Bdev;
use nacre_bdev_replica::handle::Command;
use nacre_bdev_replica::model::SettingsPatch;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::list::{VolumeReply, describe};
use super::{NameParams, blocks};
use crate::rpc::access;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::cluster;
use crate::services::volumes::{OpenState, RESERVED};
use crate::services::volumes::{lvols, paths};
use crate::values::read;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<Verify>()
        .add::<Grow>()
        .add::<Set>()
        .add::<Thaw>()
        .add::<FailIo>();
}

async fn run(engine: &Rc<Engine>, name: &str, command: Command) -> Result<VolumeReply, RpcError> {
    engine.earlier_changes().await;
    let opened = engine.volumes.run(name, command).await?;
    let id = opened.handle.status().id;
    describe(engine, &engine.volumes.find(&id.to_string())?)
}

pub struct Verify;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VerifyParams {
    /// The volume: its name or UUID.
    pub name: String,
    /// Repair differences: write the content that most replicas have to the others. In a tie, the
    /// first replica in sync wins.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub repair: bool,
    /// Stop the running verification.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stop: bool,
}

impl Method<Engine> for Verify {
    const NAME: &'static str = "volume_verify";
    const ABOUT: &'static str = "Compares the replicas that are in sync, while the volume is in use; volume_get returns the progress and the findings.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Free;
    type Params = VerifyParams;
    type Reply = VolumeReply;

    async fn apply(params: VerifyParams, engine: Rc<Engine>) -> Result<VolumeReply, RpcError> {
        let command = match (params.stop, params.repair) {
            (true, true) => {
                return Err(RpcError::errno(
                    Errno::EINVAL,
                    "a verification that is stopped repairs nothing",
                )
                .field("repair"));
            }
            (true, false) => Command::StopVerify,
            (false, repair) => Command::Verify { repair },
        };
        run(&engine, &params.name, command).await
    }
}

pub struct Grow;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GrowParams {
    /// The volume: its name or UUID.
    pub name: String,
    /// The new size in MiB; default: the largest that fits the smallest device. Lvols that
    /// volume_create made grow to it.
    #[serde(default, deserialize_with = "read::some_mebibytes")]
    pub size_mb: Option<u64>,
    /// In blocks, instead of size_mb.
    pub num_blocks: Option<u64>,
    /// In bytes, or text such as "10GiB", instead of size_mb. Rounded up to whole blocks.
    #[serde(
        default,
        deserialize_with = "read::some_bytes",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<u64>")]
    pub size: Option<u64>,
}

impl Method<Engine> for Grow {
    const NAME: &'static str = "volume_grow";
    const ABOUT: &'static str = "Makes a volume larger, and its own lvols; other devices must be larger already. Hosts see the new size at once.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = GrowParams;
    type Reply = VolumeReply;

    async fn apply(params: GrowParams, engine: Rc<Engine>) -> Result<VolumeReply, RpcError> {
        engine.earlier_changes().await;
        let opened = engine.volumes.opened(&params.name)?;
        let status = opened.handle.status();
        let plane = engine.plane()?;
        let most = || {
            let room = |m: &nacre_bdev_replica::handle::ReplicaStatus| {
                let layer = plane.bdevs.lookup(&m.device).ok_or_else(|| {
                    RpcError::errno(
                        Errno::ENODEV,
                        format!("the replica on \"{}\" is not there to be asked", m.device),
                    )
                    .field("num_blocks")
                    .remedy("give the size, or bring the replica back")
                })?;
                let bytes = layer.geometry().bytes().saturating_sub(RESERVED);
                Ok(bytes / u64::from(status.block_size))
            };
            let rooms: Result<Vec<u64>, RpcError> = status.replicas.iter().map(room).collect();
            Ok::<u64, RpcError>(rooms?.into_iter().min().unwrap_or(status.blocks))
        };
        let GrowParams {
            num_blocks,
            size_mb,
            size,
            ..
        } = params;
        let blocks = match blocks(num_blocks, size_mb, size, status.block_size)? {
            Some(blocks) => blocks,
            None => most()?,
        };
        if blocks == status.blocks {
            return unchanged(&engine, &params.name);
        }
        let limit = opened.handle.most_blocks();
        if blocks > limit {
            // Known before any device is enlarged.
            let cause = format!("regions of this size allow {limit} blocks, not {blocks}");
            return Err(RpcError::errno(Errno::EINVAL, cause)
                .field("num_blocks")
                .remedy("make a new volume with larger regions"));
        }
        if engine.cluster.node().is_some() && blocks > status.blocks {
            let bytes = blocks.saturating_mul(u64::from(status.block_size));
            cluster::grow_lvols(&engine, status.id, bytes).await?;
        }
        let former = lvols::grow(&engine, &status, blocks).await?;
        let grown = run(&engine, &params.name, Command::Grow { blocks }).await;
        if grown.is_err() {
            lvols::shrink(&engine, former).await;
        }
        grown
    }
}

fn unchanged(engine: &Engine, name: &str) -> Result<VolumeReply, RpcError> {
    describe(engine, &engine.volumes.find(name)?)
}

pub struct Set;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SetParams {
    /// The volume: its name or UUID.
    pub name: String,
    pub settings: SettingsPatch,
}

impl Method<Engine> for Set {
    const NAME: &'static str = "volume_set";
    const ABOUT: &'static str =
        "Changes settings of a volume, live; settings left out keep their value.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = SetParams;
    type Reply = VolumeReply;

    async fn apply(params: SetParams, engine: Rc<Engine>) -> Result<VolumeReply, RpcError> {
        engine.earlier_changes().await;
        let id = engine.volumes.find(&params.name)?.id();
        // Serialised per volume: settings left out must keep the values of a simultaneous call.
        let altering = engine.volumes.altering(id);
        let _one = altering.lock().await;
        let name = id.to_string();
        let status = engine.volumes.opened(&name)?.handle.status();
        let mut settings = status.settings.clone();
        params.settings.merge(&mut settings);
        let policy = settings.transport_policy;
        let policy_changed = policy != status.settings.transport_policy;
        if policy_changed {
            paths::check_policy(&engine, status.id, policy)?;
        }
        let command = Command::Set {
            settings: Box::new(settings),
        };
        let reply = run(&engine, &name, command).await?;
        if policy_changed {
            paths::policy_changed(&engine, status.id).await?;
        }
        Ok(reply)
    }
}

pub struct Thaw;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ThawParams {
    /// The volume: its name or UUID.
    pub name: String,
    /// The volume's name again, to serve from a replica that lacks acknowledged writes.
    pub force: Option<String>,
    /// The replica to serve from, by id or by its device. Default: the present replica that left
    /// last. Required for a volume that is not open.
    #[serde(alias = "member")]
    pub replica: Option<String>,
}

impl Method<Engine> for Thaw {
    const NAME: &'static str = "volume_thaw";
    const ABOUT: &'static str = "Has a frozen volume serve again, from the replicas that are there; and ends volume_fail_io.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Free;
    type Params = ThawParams;
    type Reply = VolumeReply;

    async fn apply(params: ThawParams, engine: Rc<Engine>) -> Result<VolumeReply, RpcError> {
        // Acknowledged writes may be given up.
        if params.force.is_some() {
            access::require(Class::Admin, "force")?;
        }
        engine.earlier_changes().await;
        let listed = engine.volumes.find(&params.name)?;
        let chosen = params
            .replica
            .map(|name| super::replicas::replica(&engine, &params.name, &name));
        match (&listed.open_state, chosen) {
            (OpenState::Open(_), replica) => {
                let force = params.force;
                run(&engine, &params.name, Command::Thaw { replica, force }).await
            }
            (_, None) if engine.cluster.node().is_some() => {
                engine.volumes.must_be_here(&listed)?;
                engine.volumes.opened(&params.name)?;
                describe(&engine, &listed)
            }
            // The volume was failing I/O; ending that is all there was to do.
            (_, None) if crate::services::volumes::thaw(&engine, &params.name)? => {
                describe(&engine, &engine.volumes.find(&params.name)?)
            }
            (_, None) => Err(RpcError::errno(
                Errno::EAGAIN,
                "the volume is not open, as none of its replicas that are in sync is there",
            )
            .field("replica")
            .remedy("bring one back; or name the replica to serve from, whatever it missed")),
            (_, Some(chosen)) => {
                let force = params.force.unwrap_or_default();
                crate::services::volumes::force_in_sync(&engine, &params.name, chosen, force)
                    .await?;
                describe(&engine, &engine.volumes.find(&params.name)?)
            }
        }
    }
}

pub struct FailIo;

impl Method<Engine> for FailIo {
    const NAME: &'static str = "volume_fail_io";
    const ABOUT: &'static str =
        "Fails the I/O that waits for a volume, and all that comes, until volume_thaw.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Free;
    type Params = NameParams;
    type Reply = VolumeReply;

    async fn apply(params: NameParams, engine: Rc<Engine>) -> Result<VolumeReply, RpcError> {
        engine.earlier_changes().await;
        engine
            .volumes
            .must_be_here(&engine.volumes.find(&params.name)?)?;
        if crate::services::volumes::fail_io(&engine, &params.name)? {
            describe(&engine, &engine.volumes.find(&params.name)?)
        } else {
            run(&engine, &params.name, Command::FailIo).await
        }
    }
}
