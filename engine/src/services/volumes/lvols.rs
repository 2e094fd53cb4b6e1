//! The lvols that `volume_create` makes for the replicas of a volume, one on each pool.
//!
//! ```text
//!   create   record ▸ lvols ▸ volume ▸ record removed
//!   delete   record ▸ volume ▸ lvols ▸ record removed
//! ```
//!
//! The record names the lvols. If a start finds the record and no such volume, it deletes the
//! lvols. The UUIDs of the lvols are derived from that of the volume, so the record need not last.

use std::rc::Rc;
use std::sync::Arc;

use nacre_bdev::Bdev;
use nacre_bdev_pool::{Command, Lvol, PoolError};
use nacre_bdev_replica::handle::VolumeStatus;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tracing::warn;
use uuid::Uuid;

use super::{Listed, RESERVED, lifecycle};
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::device_records;
use crate::services::pools::{self, OpenPool};
use crate::store::Change;

/// The method of the journal record for lvols whose volume is being made or deleted.
pub const DROP: &str = "volume_drop_lvols";

/// Most replicas of a volume.
const REPLICAS: usize = 5;

/// An lvol of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolLvol {
    /// UUID of the pool.
    #[schemars(with = "String")]
    pub pool: Uuid,
    #[schemars(with = "String")]
    pub lvol: Uuid,
}

/// An lvol to be made for a replica.
pub struct NewLvol {
    pub pool: Rc<OpenPool>,
    /// Bytes of the volume; the lvol gets [`RESERVED`] more.
    pub bytes: u64,
    pub is_thick: bool,
}

fn key(volume: Uuid) -> String {
    format!("volume/lvols/{volume}")
}

/// UUID of the lvol that is made for a replica of a volume.
fn lvol_id(volume: Uuid, replica: usize) -> Uuid {
    const MARK: [u8; 16] = *b"replica on pool ";
    let mut bytes = volume.into_bytes();
    bytes
        .iter_mut()
        .zip(MARK)
        .for_each(|(byte, mark)| *byte ^= mark);
    bytes[15] ^= replica as u8;
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

/// True if the device is an lvol that `volume_create` made for this volume.
fn is_own(volume: Uuid, device: &str) -> bool {
    let id = Uuid::parse_str(device).ok();
    id.is_some_and(|id| (0..REPLICAS).any(|replica| lvol_id(volume, replica) == id))
}

async fn note(engine: &Engine, volume: Uuid, lvols: &[PoolLvol]) -> Result<(), RpcError> {
    let params = json!({ "volume": volume, "lvols": lvols });
    engine
        .journal
        .commit(Change::put(key(volume), DROP, params))
        .await
}

/// Makes lvols with the volume's name, and returns the names of their bdevs. The first ones are
/// clones of the snapshots `sources`, each on the pool of its snapshot.
///
/// The caller must call [`delete_unused`] afterwards, whether the volume was made or not.
pub async fn make(
    engine: &Rc<Engine>,
    volume: Uuid,
    name: &str,
    replicas: &[NewLvol],
    sources: &[Arc<Lvol>],
) -> Result<Vec<String>, RpcError> {
    pools::check_name("name", name)?;
    let ids = (0..replicas.len()).map(|replica| lvol_id(volume, replica));
    let lvols = replicas.iter().zip(ids).map(|(replica, lvol)| PoolLvol {
        pool: replica.pool.handle.id(),
        lvol,
    });
    let lvols: Vec<PoolLvol> = lvols.collect();
    note(engine, volume, &lvols).await?;
    for (at, (replica, lvol)) in replicas.iter().zip(&lvols).enumerate() {
        let field = |refused: RpcError| refused.field(format!("replicas[{at}]"));
        let bytes = replica.bytes.saturating_add(RESERVED);
        let (id, name) = (lvol.lvol, name.to_owned());
        match sources.get(at) {
            Some(source) => {
                let clone = Command::Clone {
                    source: source.uuid(),
                    id,
                    name,
                    thick: replica.is_thick,
                };
                replica.pool.run(clone).await.map_err(field)?;
                if source.geometry().bytes() < bytes {
                    let grow = Command::Resize { lvol: id, bytes };
                    replica.pool.run(grow).await.map_err(field)?;
                }
            }
            None => {
                let create = Command::Create {
                    id,
                    name,
                    bytes,
                    thick: replica.is_thick,
                };
                replica.pool.run(create).await.map_err(field)?;
            }
        }
        let made = pools::register_new(engine, &replica.pool, lvol.lvol).await;
        made.map_err(field)?;
    }
    Ok(lvols.iter().map(|lvol| lvol.lvol.to_string()).collect())
}

/// Deletes a volume that is not in use, with the lvols that [`make`] made for it.
pub async fn delete(
    engine: &Rc<Engine>,
    name: &str,
    force: Option<String>,
) -> Result<(), RpcError> {
    let volume = engine.volumes.find(name)?;
    begin_deletion(engine, &volume).await?;
    let deleted = lifecycle::delete(engine, &volume.id().to_string(), force).await;
    delete_unused(engine, volume.id()).await;
    deleted
}

/// Stores a record of the lvols that [`make`] made for the volume and that are still its replicas.
pub async fn begin_deletion(engine: &Engine, volume: &Listed) -> Result<(), RpcError> {
    let devices: Vec<String> = match volume.status() {
        Some(status) => status.replicas.into_iter().map(|m| m.device).collect(),
        None => {
            let replicas = volume.record.replicas.iter();
            replicas.map(|m| m.device.clone()).collect()
        }
    };
    let own = devices.iter().filter(|device| is_own(volume.id(), device));
    let lvols = own.filter_map(|device| {
        // A lost pool has no devices: its lvol goes when the pool is back.
        let lvol = device_records::find::<Lvol>(engine, device);
        let id = Uuid::parse_str(device).ok()?;
        Some(PoolLvol {
            pool: lvol.map(|lvol| lvol.pool()).unwrap_or_default(),
            lvol: id,
        })
    });
    let lvols: Vec<PoolLvol> = lvols.collect();
    if lvols.is_empty() {
        return Ok(());
    }
    note(engine, volume.id(), &lvols).await
}

/// Deletes the recorded lvols if the volume does not exist, and removes the record. After a failure
/// the record stays, and is replayed later.
pub async fn delete_unused(engine: &Rc<Engine>, volume: Uuid) {
    let Some(entry) = engine.journal.find(&key(volume)) else {
        return;
    };
    let lvols = serde_json::from_value(entry.record.params["lvols"].clone());
    if let Err(error) = drop_unused(engine, volume, lvols.unwrap_or_default()).await {
        engine.journal.restored(&key(volume), Err(error));
    }
}

/// Deletes lvols of a volume that does not exist, and removes their record.
pub async fn drop_unused(
    engine: &Rc<Engine>,
    volume: Uuid,
    lvols: Vec<PoolLvol>,
) -> Result<(), RpcError> {
    if engine.volumes.find(&volume.to_string()).is_err() {
        let mut first = Ok(());
        for lvol in lvols {
            let dropped = drop_one(engine, volume, lvol).await;
            first = first.and(dropped);
        }
        first?;
    }
    engine.journal.commit(Change::remove(key(volume))).await
}

async fn drop_one(engine: &Rc<Engine>, volume: Uuid, lvol: PoolLvol) -> Result<(), RpcError> {
    let PoolLvol { pool, lvol } = lvol;
    if !is_own(volume, &lvol.to_string()) {
        let cause = format!("{lvol} is no lvol that volume_create made for volume {volume}");
        return Err(RpcError::errno(Errno::EINVAL, cause).field("lvols"));
    }
    if let Ok((pool, found)) = pools::find_lvol(engine, "lvols", &lvol.to_string()) {
        return pools::delete(engine, &pool, found).await;
    }
    let pool = engine.devices.pools.find(&pool.to_string()).map_err(|_| {
        let cause = format!("lvol {lvol} is left of a deleted volume, and its pool is not open");
        RpcError::errno(Errno::EAGAIN, cause)
            .field("lvols")
            .remedy("import the pool; or give the lvol up with state_forget")
    })?;
    // The lvol may have no device, or was never made.
    match pool.handle.run(Command::Delete { lvol }).await {
        Ok(_) | Err(PoolError::Unknown { .. }) => Ok(()),
        Err(refused) => Err(refused).or_refuse(),
    }
}

/// The former size of an lvol that was enlarged.
pub struct Former {
    pool: Rc<OpenPool>,
    lvol: Arc<Lvol>,
    bytes: u64,
}

/// Enlarges the volume's own lvols for `blocks` blocks of data. Returns the former sizes of the
/// enlarged ones.
pub async fn grow(
    engine: &Rc<Engine>,
    volume: &VolumeStatus,
    blocks: u64,
) -> Result<Vec<Former>, RpcError> {
    let bytes = blocks.checked_mul(u64::from(volume.block_size));
    let Some(bytes) = bytes.and_then(|bytes| bytes.checked_add(RESERVED)) else {
        let cause = "that is more than 64 bits of bytes";
        return Err(RpcError::errno(Errno::EINVAL, cause).field("num_blocks"));
    };
    let mut former = Vec::new();
    for replica in &volume.replicas {
        if !is_own(volume.id, &replica.device) {
            continue;
        }
        // A replica that is away fails the growth of the volume, which names it.
        let Ok((pool, lvol)) = pools::find_lvol(engine, "name", &replica.device) else {
            continue;
        };
        let present = lvol.geometry().bytes();
        if present >= bytes {
            continue;
        }
        if let Err(refused) = pools::resize(engine, &pool, &lvol, bytes).await {
            shrink(engine, former).await;
            return Err(refused);
        }
        former.push(Former {
            pool,
            lvol,
            bytes: present,
        });
    }
    Ok(former)
}

/// Gives lvols their former sizes back.
pub async fn shrink(engine: &Rc<Engine>, former: Vec<Former>) {
    for Former { pool, lvol, bytes } in former {
        if let Err(error) = pools::undo_growth(engine, &pool, &lvol, bytes).await {
            warn!(lvol = lvol.name(), %error, "grown for a volume that did not grow, and kept");
        }
    }
}
