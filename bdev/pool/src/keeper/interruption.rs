//! The end of a pool's work because a disk may have lost writes ([`crate::loss`]). Records may be
//! settled, or confirmed to hosts, although their data is gone. Only an import finds out what is
//! there, as after a crash.
//!
//! ```text
//!   lanes     I/O that begins, or ends from now on, fails
//!   keeper    no completion reaches the core; commands and requests fail
//!   then      the owner of the pool sees the state, closes the pool, and imports it again
//! ```

use nacre_bdev_pool_core::interface::Refusal;

use super::lanes::LaneRequest;
use super::{Keeper, Stage};
use crate::model::PoolState;
use crate::port::ToKeeper;

/// Looks for losses. Call this after I/O was collected from the disks, and before its outcome has
/// an effect.
pub(super) fn look_at_losses(keeper: &mut Keeper) {
    // A keeper that ends confirms nothing any more.
    let is_open = matches!(keeper.stage, Stage::Open(_)) && !keeper.commands.is_last();
    if is_open && keeper.shared.losses.has_lost() {
        interrupt(keeper);
    }
}

#[cold]
fn interrupt(keeper: &mut Keeper) {
    keeper.stage = Stage::Interrupted;
    {
        let mut status = keeper.shared.status.lock();
        tracing::error!(
            pool = status.name,
            disk = keeper.shared.losses.disk(),
            "the disk's connection was lost, and perhaps writes that were not flushed: the pool \
             confirms nothing until it is imported again"
        );
        status.state = PoolState::Interrupted;
    }
    keeper.maps.values().for_each(|map| _ = map.set_gone());
    keeper.shared.announce_external();
    keeper.backlog.clear();
    keeper.grace.awaited = None;
    // A lane whose I/O is in flight reports its end, and gets its answer then.
    for (token, state) in std::mem::take(&mut keeper.lanes.requests) {
        if state == LaneRequest::Waits {
            keeper.refuse((token >> 32) as u32, token as u32, Refusal::Exported);
        }
    }
    keeper.additions.close();
    keeper.commands.interrupt();
    keeper.shared.news.notify_one();
}

/// Returns the message unless the pool is interrupted, which refuses it.
pub(super) fn unless_interrupted(
    keeper: &mut Keeper,
    lane: u32,
    message: ToKeeper,
) -> Option<ToKeeper> {
    if !matches!(keeper.stage, Stage::Interrupted) {
        return Some(message);
    }
    match message {
        ToKeeper::Load { request, .. }
        | ToKeeper::Write { request, .. }
        | ToKeeper::Unmap { request, .. }
        | ToKeeper::DataWritten { request, .. }
        | ToKeeper::SourceRead { request, .. } => {
            keeper.refuse(lane, request, Refusal::Exported);
            None
        }
        ToKeeper::Disks { .. } | ToKeeper::Closed => Some(message),
    }
}
