//! Opens a pool: imports it from its disks, or creates it on a disk that is empty or may be
//! overwritten.

use std::collections::HashMap;
use std::sync::Arc;

use nacre_bdev::Bdev;
use nacre_bdev_pool_core::create::NewPool;
use nacre_bdev_pool_core::format::Page;
use nacre_bdev_pool_core::format::superblock::Superblock;
use nacre_bdev_pool_core::geometry::{PAGE, superblock_offsets};
use nacre_bdev_pool_core::import::leftovers::Leftover;
use nacre_bdev_pool_core::import::{Import, ImportIntent, ImportReport};
use nacre_bdev_pool_core::interface::{IoFailed, Limits};
use nacre_bdev_pool_core::pool::Pool;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::disk::{Disk, Ended, Tag};
use super::disks::Disks;
use super::{Keeper, Stage};
use crate::EDGE;
use crate::handle::PoolHandle;
use crate::model::PoolError;

/// Bytes at the start of a disk that say whether it is in use.
const START: usize = 64 << 10;

pub(crate) enum Opening {
    /// Looks whether the disk is empty.
    Probe {
        new: Box<NewPool>,
        limits: Limits,
        force: bool,
        answer: Option<OpenAnswer>,
        begun: bool,
        left: usize,
        found: Option<PoolError>,
    },
    Import {
        import: Box<Import>,
        expected: Option<Uuid>,
        open: Vec<Uuid>,
        taken_names: Vec<String>,
        answer: Option<OpenAnswer>,
        results: HashMap<Tag, Ended>,
    },
}

/// The answer to the caller that opens a pool.
pub(crate) struct OpenAnswer {
    pub handle: PoolHandle,
    pub report: ImportReport,
    pub sender: OpenSender,
}

pub(crate) type OpenSender = oneshot::Sender<Result<(PoolHandle, ImportReport), PoolError>>;

/// Queues on disks that have left the pool, by their first numbers.
type Leftovers = Vec<(usize, Leftover, Disk)>;

/// The next step of an opening.
enum Advance {
    Wait,
    Open(Box<Pool>, OpenAnswer, Leftovers),
    Failed(OpenAnswer, PoolError),
}

impl OpenAnswer {
    // The caller may no longer wait.
    pub(crate) fn opened(self) {
        let _ = self.sender.send(Ok((self.handle, self.report)));
    }

    pub(crate) fn fail(self, error: PoolError) {
        let _ = self.sender.send(Err(error));
    }
}

impl Opening {
    pub(crate) fn ended(&mut self, io: Ended) {
        match self {
            Self::Probe { left, found, .. } => {
                *left -= 1;
                if let Ended::Read(tag, result) = io {
                    let fault = match result {
                        Ok(bytes) => contents(tag, &bytes),
                        Err(status) => Some(PoolError::Io {
                            what: format!("a read ended with {status:?}"),
                        }),
                    };
                    let is_better = matches!(fault, Some(PoolError::NotEmpty { .. }));
                    if found.is_none() || is_better && tag > 0 {
                        *found = fault.or_else(|| found.take());
                    }
                }
            }
            Self::Import { results, .. } => {
                let (Ended::Written(tag, _)
                | Ended::Flushed(tag, _)
                | Ended::Discarded(tag, _)
                | Ended::Read(tag, _)) = &io;
                results.insert(*tag, io);
            }
        }
    }

    pub(crate) fn give_up(&mut self) {
        let (Self::Probe { answer, .. } | Self::Import { answer, .. }) = self;
        if let Some(answer) = answer.take() {
            answer.fail(PoolError::Closed);
        }
    }

    fn advance(&mut self, disks: &mut Disks) -> Advance {
        match self {
            Self::Probe {
                new,
                limits,
                force,
                answer,
                begun,
                left,
                found,
            } => {
                if !*begun {
                    *begun = true;
                    *left = disks
                        .first()
                        .map_or(0, |disk| probe(disk, new.geometry.disk_bytes));
                }
                if *left > 0 || !disks.is_idle() {
                    return Advance::Wait;
                }
                let Some(answer) = answer.take() else {
                    return Advance::Wait;
                };
                if let Some(fault) = found.take()
                    && !(*force && matches!(fault, PoolError::NotEmpty { .. }))
                {
                    return Advance::Failed(answer, fault);
                }
                match (**new).clone().create(limits.clone()) {
                    Ok(pool) => Advance::Open(Box::new(pool), answer, Vec::new()),
                    Err(error) => {
                        let why = error.to_string();
                        Advance::Failed(answer, PoolError::Unfit { what: "disk", why })
                    }
                }
            }
            Self::Import {
                import,
                expected,
                open,
                taken_names,
                answer,
                results,
            } => {
                for (_, io) in results.drain() {
                    match io {
                        Ended::Read(tag, result) => {
                            let bytes = result.as_deref().map_err(|_| IoFailed);
                            import.read(tag, bytes);
                        }
                        Ended::Flushed(tag, status)
                        | Ended::Written(tag, status)
                        | Ended::Discarded(tag, status) => {
                            let outcome = status.is_ok().then_some(()).ok_or(IoFailed);
                            import.flushed(tag, outcome);
                        }
                    }
                }
                while let Some(intent) = import.poll() {
                    match intent {
                        ImportIntent::Read { io, at, len } => disks.read(io, at, len),
                        ImportIntent::Flush { io, disk } => disks.flush(io, disk),
                    }
                }
                let Some(outcome) = import.outcome() else {
                    return Advance::Wait;
                };
                let Some(mut answer) = answer.take() else {
                    return Advance::Wait;
                };
                match (outcome, *expected) {
                    (Err(error), _) => Advance::Failed(answer, error.into()),
                    (Ok((pool, _)), Some(expected)) if pool.superblock().pool != expected => {
                        let found = pool.superblock().pool;
                        Advance::Failed(answer, PoolError::OtherPool { expected, found })
                    }
                    (Ok((pool, _)), _) if open.contains(&pool.superblock().pool) => {
                        let id = pool.superblock().pool;
                        Advance::Failed(answer, PoolError::AlreadyOpen { id })
                    }
                    (Ok((pool, _)), _) if taken_names.contains(&pool.superblock().name) => {
                        let (id, name) = (pool.superblock().pool, pool.superblock().name.clone());
                        Advance::Failed(answer, PoolError::NameTaken { id, name })
                    }
                    (Ok((pool, report)), _) => {
                        let others = import.leftovers();
                        let others = disks.reorder(import.order(), others);
                        answer.report = report;
                        Advance::Open(Box::new(pool), answer, others)
                    }
                }
            }
        }
    }
}

/// Reads the start of the disk and the places of superblocks. Returns the number of reads.
pub(super) fn probe(disk: &mut Disk, disk_bytes: u64) -> usize {
    disk.read(0, 0, START);
    for (at, offset) in superblock_offsets(disk_bytes, EDGE).into_iter().enumerate() {
        disk.read(at as Tag + 1, offset, PAGE);
    }
    5
}

/// What these bytes of the disk say, if they are not empty.
pub(super) fn contents(tag: Tag, bytes: &[u8]) -> Option<PoolError> {
    let page: Option<&Page> = bytes.first_chunk();
    let superblock = page.and_then(|page| Superblock::decode(page).ok());
    let what = match superblock {
        Some(superblock) => format!("pool \"{}\" ({})", superblock.name, superblock.pool),
        None if bytes.iter().all(|byte| *byte == 0) => return None,
        None if tag == 0 => "data in its first 64 KiB".to_owned(),
        None => "data where a pool has its superblocks".to_owned(),
    };
    Some(PoolError::NotEmpty { what })
}

impl Keeper {
    pub(super) fn advance_opening(&mut self) {
        let Stage::Opening(opening) = &mut self.stage else {
            return;
        };
        let (mut pool, answer, others) = match opening.advance(&mut self.disks) {
            Advance::Wait => return,
            Advance::Open(pool, answer, others) => (pool, answer, others),
            Advance::Failed(answer, error) => {
                self.commands.failed = Some((answer, error));
                return;
            }
        };
        pool.follow().take_changes(&mut Vec::new());
        let order = self.disks.order().to_vec();
        let claims = self.shared.claims.load();
        let ordered: Vec<_> = order.iter().map(|at| claims[*at].clone()).collect();
        for (at, known, disk) in others {
            if let Some(claim) = &claims[at] {
                self.shared.losses.remove(claim);
                let claim = Arc::clone(claim);
                self.departures.erase_leftover(&known, disk, claim);
            }
        }
        drop(claims);
        self.shared.claims.store(Arc::new(ordered));
        let superblock = pool.superblock();
        let geometry = superblock.geometry;
        {
            let first = self.shared.first();
            let mut status = self.shared.status.lock();
            if let Some(first) = first {
                first.layer().name().clone_into(&mut status.disk);
            }
            status.id = superblock.pool;
            status.name.clone_from(&superblock.name);
            status.unit_bytes = geometry.unit_bytes();
            status.max_lvol_bytes = geometry
                .max_volume_units()
                .saturating_mul(geometry.unit_bytes());
            status.imports = superblock.imports;
        }
        // A second opening cannot happen: a keeper opens one pool.
        let _ = self.shared.geometry.set(geometry);
        self.stage = Stage::Open(pool);
        self.publish_table();
        self.answer_opening(answer);
    }
}
