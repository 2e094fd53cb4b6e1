//! Creates and imports pools, on the reactor that will be the pool's home.

use std::sync::Arc;

use nacre_bdev::{Bdev, Claim, Op, Support};
use nacre_bdev_pool_core::create::NewPool;
use nacre_bdev_pool_core::geometry::Geometry;
use nacre_bdev_pool_core::import::{self, Holder, ImportReport};
use nacre_bdev_pool_core::interface::Limits;
use nacre_hugepages::Pool;
use nacre_reactor::CoreHandle;
use tokio::sync::oneshot;
use uuid::Uuid;

use crate::EDGE;
use crate::fit::size_of;
use crate::handle::PoolHandle;
use crate::keeper::{Disks, Keeper, OpenAnswer, Opening};
use crate::model::{PoolError, PoolState, PoolStatus};
use crate::port::Shared;

/// The part of a new pool that lvols cannot use: one unit in this many, but at least
/// [`RESERVE_UNITS`] units or, in small pools, a sixteenth of the pool.
const RESERVE_DIVISOR: u64 = 100;
const RESERVE_UNITS: u64 = 1024;
/// Most units of the reserve: 64 GiB.
const MAX_RESERVE_UNITS: u64 = 1 << 20;

/// Units of a new pool that are kept for metadata.
fn reserve_of(units: u64) -> u64 {
    let share = (units / RESERVE_DIVISOR).min(MAX_RESERVE_UNITS);
    share.max(RESERVE_UNITS.min(units / 16))
}

/// The parameters of a new pool.
#[derive(Debug, Clone)]
pub struct Create {
    pub id: Uuid,
    pub name: String,
    /// Id of this daemon.
    pub holder: Uuid,
    /// Use a disk that is not empty. Its data is lost.
    pub force: bool,
}

/// The parameters of an import: the disks must have one pool, which fulfils them all.
#[derive(Debug, Clone)]
pub struct Import {
    /// The pool that must be on the disks; `None`: any.
    pub id: Option<Uuid>,
    /// Pools that are open in this daemon. A disk with one of them is refused: it is the same disk
    /// under another name, or a copy of it.
    pub open: Vec<Uuid>,
    /// Names that the pool must not have: open pools have them.
    pub taken_names: Vec<String>,
    /// Id of this daemon.
    pub holder: Uuid,
    /// Import the pool even if another daemon had it open last and did not export it.
    pub force: bool,
}

/// Creates a pool on the claimed device, which nothing else uses. Completes when the pool is on the
/// disk. The claim ends with the last handle, lvol and queue of the pool.
pub async fn create(
    core: &CoreHandle,
    memory: Pool,
    claim: Claim,
    new: Create,
) -> Result<PoolHandle, PoolError> {
    let disk_bytes = size_of(&claim)?;
    let geometry = Geometry::of_disk(disk_bytes);
    geometry.check().map_err(|error| PoolError::Unfit {
        what: "disk",
        why: error.to_string(),
    })?;
    let units = geometry.units();
    let reserve = reserve_of(units);
    let limits = limits_of(&[&claim]);
    let shared = shared(vec![claim], new.id, &new.name)?;
    let new_pool = NewPool {
        pool: new.id,
        disk: Uuid::new_v4(),
        holder: new.holder,
        name: new.name,
        geometry,
        reserve_units: reserve,
    };
    let opening = |answer| Opening::Probe {
        new: Box::new(new_pool),
        limits,
        force: new.force,
        answer: Some(answer),
        begun: false,
        left: 0,
        found: None,
    };
    Ok(start(core, memory, shared, opening).await?.0)
}

/// Imports the pool of the claimed devices, which come in any order. Completes when the pool is
/// recovered.
pub async fn import(
    core: &CoreHandle,
    memory: Pool,
    claims: Vec<Claim>,
    wanted: Import,
) -> Result<(PoolHandle, ImportReport), PoolError> {
    let sizes: Result<Vec<u64>, PoolError> = claims.iter().map(size_of).collect();
    let holder = Holder {
        id: wanted.holder,
        force: wanted.force,
    };
    let all: Vec<&Claim> = claims.iter().collect();
    let import = import::Import::new(&sizes?, EDGE, limits_of(&all), holder);
    // The id is known once the superblock is read, and no other thread sees the pool before.
    let shared = shared(claims, wanted.id.unwrap_or_default(), "")?;
    let opening = |answer| Opening::Import {
        import: Box::new(import),
        expected: wanted.id,
        open: wanted.open,
        taken_names: wanted.taken_names,
        answer: Some(answer),
        results: Default::default(),
    };
    start(core, memory, shared, opening).await
}

/// Most writes that wait for space in a full pool: a quarter of the requests that a pool takes.
pub(crate) const FULL_WRITES: usize = if cfg!(test) { 8 } else { 1024 };

/// Units of the smallest discard: 1 MiB, the alignment of the data area in new pools.
const DISCARD_UNITS: u64 = 16;

fn limits_of(claims: &[&Claim]) -> Limits {
    let mut all = claims.iter().map(|claim| claim.layer());
    let discards = (all.clone()).any(|layer| layer.supports(Op::Unmap) != Support::No);
    Limits {
        full_writes: FULL_WRITES,
        has_volatile_cache: all.any(|layer| layer.limits().volatile_cache),
        discard_units: if discards { DISCARD_UNITS } else { 0 },
        ..Limits::default()
    }
}

fn shared(claims: Vec<Claim>, id: Uuid, name: &str) -> Result<Arc<Shared>, PoolError> {
    let status = PoolStatus {
        id,
        name: name.to_owned(),
        disk: claims[0].layer().name().to_owned(),
        disks: Vec::new(),
        state: PoolState::Opening,
        unit_bytes: 0,
        total_bytes: 0,
        free_bytes: 0,
        reserved_bytes: 0,
        waiting_writes: 0,
        full_percent: 0,
        max_lvol_bytes: 0,
        unsettled_records: 0,
        versions: 0,
        imports: 0,
        externals: Vec::new(),
        external_claims: Vec::new(),
    };
    let shared = Shared::new(claims, status).map_err(|error| PoolError::Io {
        what: format!("cannot create an eventfd: {error}"),
    })?;
    Ok(Arc::new(shared))
}

async fn start(
    core: &CoreHandle,
    memory: Pool,
    shared: Arc<Shared>,
    opening: impl FnOnce(OpenAnswer) -> Opening,
) -> Result<(PoolHandle, ImportReport), PoolError> {
    let (sender, opened) = oneshot::channel();
    let handle = PoolHandle {
        shared: Arc::clone(&shared),
    };
    let answer = OpenAnswer {
        handle,
        report: ImportReport::default(),
        sender,
    };
    let disks = Disks::open(&shared, memory)?;
    let keeper = Keeper::new(core.clone(), shared, disks, opening(answer));
    let added = core.add_poller(Box::new(keeper));
    added.map_err(|error| PoolError::Io {
        what: format!("cannot watch its completions: {error}"),
    })?;
    opened.await.unwrap_or(Err(PoolError::Closed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserve_has_bounds() {
        const GIB: u64 = 1 << 14;
        for (units, reserve) in [
            (GIB / 2, GIB / 32),
            (GIB, RESERVE_UNITS),
            (1000 * GIB, 1000 * GIB / RESERVE_DIVISOR),
            (100 << 24, 64 * GIB),
        ] {
            assert_eq!(reserve_of(units), reserve, "{units}");
        }
    }
}
