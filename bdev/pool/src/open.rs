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

use crate::handle::PoolHandle;
use crate::keeper::{Keeper, OpenAnswer, Opening, new_disk};
use crate::model::{PoolError, PoolState, PoolStatus};
use crate::port::{Shared, disk_bytes};
use crate::{BLOCK, EDGE};

/// Units of the reserve: a hundredth, and in small pools at most a sixteenth.
const RESERVE_DIVISOR: u64 = 100;
const RESERVE_UNITS: u64 = 1024;

/// A new pool.
#[derive(Debug, Clone)]
pub struct Create {
    pub id: Uuid,
    pub name: String,
    /// Id of this daemon.
    pub holder: Uuid,
    /// Use a disk that is not empty. Its data is lost.
    pub force: bool,
}

/// A pool that is on the disk.
#[derive(Debug, Clone)]
pub struct Import {
    /// The pool that must be on the disk; `None`: any.
    pub id: Option<Uuid>,
    /// Pools that must not be on the disk: they are open, on this disk under another name or on the
    /// disk that this one is a copy of.
    pub open: Vec<Uuid>,
    /// Names that the pool must not have: open pools have them.
    pub taken_names: Vec<String>,
    pub holder: Uuid,
    /// Import the pool although another holder did not export it.
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
    let reserve = (units / RESERVE_DIVISOR).max(RESERVE_UNITS.min(units / 16));
    let limits = limits_of(&claim);
    let shared = shared(claim, new.id, &new.name)?;
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

/// Imports the pool of the claimed device.
pub async fn import(
    core: &CoreHandle,
    memory: Pool,
    claim: Claim,
    wanted: Import,
) -> Result<(PoolHandle, ImportReport), PoolError> {
    let disk_bytes = size_of(&claim)?;
    let holder = Holder {
        id: wanted.holder,
        force: wanted.force,
    };
    let import = import::Import::new(disk_bytes, EDGE, limits_of(&claim), holder);
    // The id is known once the superblock is read, and no other thread sees the pool before.
    let shared = shared(claim, wanted.id.unwrap_or_default(), "")?;
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

fn size_of(claim: &Claim) -> Result<u64, PoolError> {
    let geometry = claim.layer().geometry();
    if geometry.block_size > BLOCK {
        return Err(PoolError::Unfit {
            what: "disk",
            why: format!(
                "its blocks have {} bytes, and a pool needs blocks of at most {BLOCK}",
                geometry.block_size
            ),
        });
    }
    if claim.layer().limits().read_only {
        return Err(PoolError::Unfit {
            what: "disk",
            why: "it is read-only".to_owned(),
        });
    }
    let bytes = disk_bytes(claim);
    if bytes < 4 * EDGE {
        return Err(PoolError::Unfit {
            what: "disk",
            why: format!("{bytes} bytes are too few for a pool"),
        });
    }
    Ok(bytes)
}

/// Writes that wait for space in a full pool: a quarter of the requests that a pool takes.
pub(crate) const FULL_WRITES: usize = if cfg!(test) { 8 } else { 1024 };

/// Units of the smallest discard: 1 MiB, as units of new pools are aligned.
const DISCARD_UNITS: u64 = 16;

fn limits_of(claim: &Claim) -> Limits {
    let discards = claim.layer().supports(Op::Unmap) != Support::No;
    Limits {
        full_writes: FULL_WRITES,
        has_volatile_cache: claim.layer().limits().volatile_cache,
        discard_units: if discards { DISCARD_UNITS } else { 0 },
        ..Limits::default()
    }
}

fn shared(claim: Claim, id: Uuid, name: &str) -> Result<Arc<Shared>, PoolError> {
    let status = PoolStatus {
        id,
        name: name.to_owned(),
        disk: claim.layer().name().to_owned(),
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
    };
    let shared = Shared::new(claim, status).map_err(|error| PoolError::Io {
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
    let disk = new_disk(&shared, memory)?;
    let keeper = Keeper::new(core.clone(), shared, disk, opening(answer));
    let added = core.add_poller(Box::new(keeper));
    added.map_err(|error| PoolError::Io {
        what: format!("cannot watch its completions: {error}"),
    })?;
    opened.await.unwrap_or(Err(PoolError::Closed))
}
