//! Replicas on pools: `volume_create` makes their lvols, `volume_drop_lvols` deletes them.

use std::rc::Rc;
use std::sync::Arc;

use nacre_bdev_pool::Lvol;
use nacre_bdev_replica::model::Origin;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::pools::find_lvol;
use crate::services::volumes::lvols::{self, NewLvol, PoolLvol};
use crate::values::read;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<DropLvols>();
}

/// A replica on a pool.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolReplica {
    /// Name or UUID of the pool.
    pub pool: String,
    /// Room for data, in bytes, or text such as "10GiB". Default: the size of the volume.
    #[serde(
        default,
        deserialize_with = "read::some_bytes",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<u64>")]
    pub size: Option<u64>,
    /// Take space as it is written. Default: the pool keeps room for the whole size.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub thin: bool,
}

/// The lvols to be made for the replicas of a volume of this size.
pub(super) fn wanted(
    engine: &Engine,
    replicas: &[PoolReplica],
    bytes: Option<u64>,
) -> Result<Vec<NewLvol>, RpcError> {
    let mut lvols: Vec<NewLvol> = Vec::new();
    for (at, replica) in replicas.iter().enumerate() {
        let field = |name: &str| format!("replicas[{at}].{name}");
        let found = engine.devices.pools.find(&replica.pool);
        let pool = found.map_err(|refused| refused.field(field("pool")))?;
        if lvols.iter().any(|other| Rc::ptr_eq(&other.pool, &pool)) {
            let cause = format!(
                "\"{}\" is named twice: each replica has its own pool",
                pool.name()
            );
            return Err(RpcError::errno(Errno::EINVAL, cause).field(field("pool")));
        }
        let Some(bytes) = replica.size.or(bytes).filter(|bytes| *bytes > 0) else {
            let cause = "a replica on a pool needs a size";
            return Err(RpcError::errno(Errno::EINVAL, cause)
                .field(field("size"))
                .remedy("give it, or size_mb"));
        };
        if bytes > pool.handle.status().max_lvol_bytes {
            let cause = format!("{bytes} bytes are too many for one volume");
            return Err(RpcError::errno(Errno::EINVAL, cause).field(field("size")));
        }
        lvols.push(NewLvol {
            pool,
            bytes,
            is_thick: !replica.thin,
        });
    }
    Ok(lvols)
}

/// The snapshot from which the first of these lvols is cloned.
pub(super) fn source(
    engine: &Engine,
    snapshot: &str,
    lvols: &[NewLvol],
) -> Result<Arc<Lvol>, RpcError> {
    let (pool, found) = find_lvol(engine, "snapshot", snapshot)?;
    if !found.info().is_snapshot {
        let cause = format!("\"{snapshot}\" is not a snapshot");
        return Err(RpcError::errno(Errno::EINVAL, cause)
            .field("snapshot")
            .remedy("make one with lvol_snapshot"));
    }
    if lvols
        .first()
        .is_some_and(|first| Rc::ptr_eq(&first.pool, &pool))
    {
        return Ok(found);
    }
    let cause = format!("the snapshot is on pool \"{}\"", pool.name());
    Err(RpcError::errno(Errno::EINVAL, cause)
        .field("replicas[0].pool")
        .remedy("name this pool first: a clone shares the space of its snapshot"))
}

/// The snapshot, in the form of the volume's record.
pub(super) fn origin(source: &Lvol) -> Origin {
    let info = source.info();
    Origin {
        snapshot: info.id,
        name: info.name,
    }
}

struct DropLvols;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DropParams {
    /// UUID of the volume.
    #[schemars(with = "String")]
    volume: Uuid,
    /// The lvols to delete, each with its pool.
    lvols: Vec<PoolLvol>,
}

impl Method<Engine> for DropLvols {
    const NAME: &'static str = lvols::DROP;
    const ABOUT: &'static str = "Deletes lvols that volume_create made for a volume, unless the volume exists; the daemon's own \
         call, when a creation or deletion was interrupted.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = DropParams;
    type Reply = bool;

    async fn apply(params: DropParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        if !crate::journal::is_replaying() {
            engine.earlier_changes().await;
        }
        lvols::drop_unused(&engine, params.volume, params.lvols).await?;
        Ok(true)
    }
}
