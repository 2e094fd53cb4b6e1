//! The shallow copies, by number, with their progress.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use nacre_bdev::registry::Usage;
use nacre_bdev::{Bdev, Holder};
use nacre_bdev_pool::Lvol;

use super::copy::{self, CopiedUnits, CopyDevices};
use super::{OpenPool, least_loaded};
use crate::refusal::Refusal;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;

/// Most copies in the list: running ones, and ended ones whose result was not read.
const COPIES: usize = 64;

#[derive(Default)]
pub struct Copies {
    last: Cell<u32>,
    known: RefCell<BTreeMap<u32, Rc<OneCopy>>>,
}

struct OneCopy {
    total: u64,
    progress: Arc<CopiedUnits>,
    state: RefCell<CopyState>,
}

#[derive(Debug, Clone)]
pub enum CopyState {
    Runs,
    Complete,
    Failed(RpcError),
}

/// The progress of a copy, in units of the pool.
pub struct CopyProgress {
    pub copied: u64,
    pub total: u64,
    pub state: CopyState,
}

impl Copies {
    /// Begins a copy of a snapshot. Returns its number.
    pub async fn start(
        &self,
        engine: &Rc<Engine>,
        pool: Rc<OpenPool>,
        lvol: Arc<Lvol>,
        to: &str,
    ) -> Result<u32, RpcError> {
        if self.known.borrow().len() >= COPIES {
            let cause = format!("{COPIES} copies run, or their ends were not asked for");
            return Err(RpcError::errno(Errno::EBUSY, cause)
                .remedy("ask for them with bdev_lvol_check_shallow_copy"));
        }
        // As in SPDK, an error of the lvols is the outcome of the copy, not of the call.
        if !lvol.info().is_snapshot {
            let cause = "the lvol is not read-only";
            let refused = RpcError::errno(Errno::EPERM, cause).field("src_lvol_name");
            return Ok(self.add(0, CopyState::Failed(refused)).0);
        }
        let plane = engine.plane()?;
        let refuse = |field: &'static str| {
            move |error: nacre_bdev::RegistryError| error.refusal().field(field)
        };
        let (id, name) = (lvol.uuid(), lvol.name().to_owned());
        let holder = || Holder::User(format!("shallow copy of {name}"));
        let to = plane.bdevs.claim(to, holder(), Usage::Exclusive);
        let to = to.map_err(refuse("dst_bdev_name"))?;
        let from = plane.bdevs.claim(&name, holder(), Usage::Shared);
        let from = from.map_err(refuse("src_lvol_name"))?;
        let (source, target) = (from.layer().geometry(), to.layer().geometry());
        let unfit = if source.bytes() > target.bytes() {
            let (has, needs) = (target.bytes(), source.bytes());
            Some(format!("the device has {has} bytes, and the lvol {needs}"))
        } else if source.block_size % target.block_size != 0 {
            let block = target.block_size;
            Some(format!("the device has blocks of {block} bytes"))
        } else {
            None
        };
        if let Some(cause) = unfit {
            let refused = RpcError::errno(Errno::EINVAL, cause).field("dst_bdev_name");
            return Ok(self.add(0, CopyState::Failed(refused)).0);
        }
        let (mut total, mut from_place) = (0, Some(0));
        while let Some(place) = from_place {
            let (places, next) = copy::places(&pool, id, place).await.map_err(io_error)?;
            total += places.len() as u64;
            from_place = next;
        }
        let reactor = least_loaded(engine, &plane)
            .ok_or_else(|| RpcError::errno(Errno::EAGAIN, "there is no reactor"))?;
        let (number, copy) = self.add(total, CopyState::Runs);
        let devices = CopyDevices {
            from: Arc::new(from),
            to: Arc::new(to),
        };
        tokio::task::spawn_local(async move {
            let progress = Arc::clone(&copy.progress);
            let copied = copy::run(&pool, id, devices, reactor, progress).await;
            copy.state.replace(match copied {
                Ok(()) => CopyState::Complete,
                Err(status) => CopyState::Failed(io_error(status)),
            });
        });
        Ok(number)
    }

    fn add(&self, total: u64, state: CopyState) -> (u32, Rc<OneCopy>) {
        let number = self.last.get().wrapping_add(1);
        self.last.set(number);
        let copy = Rc::new(OneCopy {
            total,
            progress: Arc::default(),
            state: RefCell::new(state),
        });
        self.known.borrow_mut().insert(number, Rc::clone(&copy));
        (number, copy)
    }

    /// The progress of a copy. An ended copy is removed from the list. `None`: no such copy.
    pub fn check(&self, number: u32) -> Option<CopyProgress> {
        let copy = self.known.borrow().get(&number).cloned()?;
        let state = copy.state.borrow().clone();
        if !matches!(state, CopyState::Runs) {
            self.known.borrow_mut().remove(&number);
        }
        Some(CopyProgress {
            copied: copy.progress.copied(),
            total: copy.total,
            state,
        })
    }
}

fn io_error(status: nacre_bdev::Status) -> RpcError {
    RpcError::errno(Errno::EIO, format!("an I/O ended with {status:?}"))
}
