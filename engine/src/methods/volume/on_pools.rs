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
use crate::services::pools::{OpenPool, find_lvol};
use crate::services::volumes::lvols::{self, NewLvol, PoolLvol};
use crate::services::volumes::snapshots::{self, VolumeSnapshot};
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

/// The snapshot with which a volume begins.
pub(super) enum Source {
    /// A snapshot of a replica's lvol, of which the first replica is a clone.
    Lvol(Rc<OpenPool>, Arc<Lvol>),
    /// A snapshot of a volume. Each replica on a pool with one of its lvols is a clone of that.
    Volume(VolumeSnapshot, Vec<(Rc<OpenPool>, Arc<Lvol>)>),
}

impl Source {
    /// Finds it by name or UUID. A name with `/` is that of an lvol.
    pub(super) fn find(engine: &Engine, text: &str) -> Result<Self, RpcError> {
        let of_volume = match snapshots::find(engine, text) {
            Err(error) if error.code == -(Errno::ENODEV as i32) => None,
            found => Some(found?),
        };
        let Some(found) = of_volume else {
            let is_lvol = text.contains('/') || Uuid::parse_str(text).is_ok();
            return if is_lvol {
                Self::find_lvol(engine, text)
            } else {
                Err(snapshots::absent(text))
            };
        };
        found.must_be_ready()?;
        let lvols = found.lvols.iter();
        let lvols =
            lvols.filter_map(|one| find_lvol(engine, "snapshot", &one.lvol.to_string()).ok());
        let lvols = lvols.collect();
        Ok(Self::Volume(found, lvols))
    }

    fn find_lvol(engine: &Engine, text: &str) -> Result<Self, RpcError> {
        let (pool, found) = find_lvol(engine, "snapshot", text)?;
        if found.info().is_snapshot {
            return Ok(Self::Lvol(pool, found));
        }
        let cause = format!("\"{text}\" is not a snapshot");
        Err(RpcError::errno(Errno::EINVAL, cause)
            .field("snapshot")
            .remedy("make one with volume_snapshot_create or lvol_snapshot"))
    }

    /// The replicas of a volume for which none are named: on the pools of the snapshot.
    pub(super) fn replicas(&self) -> Vec<PoolReplica> {
        let Self::Volume(_, lvols) = self else {
            return Vec::new();
        };
        let on = |(pool, _): &(Rc<OpenPool>, Arc<Lvol>)| PoolReplica {
            pool: pool.handle.id().to_string(),
            size: None,
            thin: false,
        };
        lvols.iter().map(on).collect()
    }

    /// The size of the volume. `bytes`: the wanted one, if any.
    pub(super) fn size(&self, bytes: Option<u64>) -> Result<Option<u64>, RpcError> {
        match self {
            Self::Lvol(..) => Ok(bytes),
            Self::Volume(snapshot, _) => snapshot.size_for(bytes).map(Some),
        }
    }

    /// The snapshots of which the first lvols are clones. Moves these lvols to the front.
    pub(super) fn clones(&self, lvols: &mut [NewLvol]) -> Result<Vec<Arc<Lvol>>, RpcError> {
        let refused =
            |cause: String| RpcError::errno(Errno::EINVAL, cause).field("replicas[0].pool");
        let sources = match self {
            Self::Lvol(pool, found) => {
                let first = lvols.first();
                if first.is_some_and(|first| Rc::ptr_eq(&first.pool, pool)) {
                    return Ok(vec![Arc::clone(found)]);
                }
                let cause = format!("the snapshot is on pool \"{}\"", pool.name());
                return Err(refused(cause)
                    .remedy("name this pool first: a clone shares the space of its snapshot"));
            }
            Self::Volume(_, sources) => sources,
        };
        let source = |lvol: &NewLvol| {
            let mut all = sources.iter();
            all.find(|(pool, _)| Rc::ptr_eq(pool, &lvol.pool))
        };
        lvols.sort_by_key(|lvol| source(lvol).is_none());
        let clones: Vec<_> = lvols.iter().map_while(source).collect();
        if clones.is_empty() {
            let pools: Vec<_> = sources.iter().map(|(pool, _)| pool.name()).collect();
            let cause = format!("none has the snapshot, which is on {}", pools.join(", "));
            return Err(refused(cause).remedy("name at least one of these pools"));
        }
        Ok(clones
            .into_iter()
            .map(|(_, lvol)| Arc::clone(lvol))
            .collect())
    }

    /// The snapshot, in the form of the volume's record.
    pub(super) fn origin(&self) -> Origin {
        match self {
            Self::Lvol(_, lvol) => {
                let info = lvol.info();
                Origin {
                    snapshot: info.id,
                    name: info.name,
                }
            }
            Self::Volume(snapshot, _) => Origin {
                snapshot: snapshot.id,
                name: snapshot.name.clone(),
            },
        }
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
