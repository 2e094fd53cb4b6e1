//! Where the control's buffers come from when hosts have them all.
//!
//! What decisions need (labels, pages of the log) is kept back: hosts' writes wait for a decision with their
//! buffers, so a decision that waited for a buffer would wait for ever. What copying, comparing and
//! repairing need is waited for briefly, for they have stripes meanwhile: then they let go, and try again later.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use nacre_hugepages::Buf;

use super::{Control, MOMENT};
use crate::format::BLOCK;
use crate::shared::Failure;

/// How long somebody waits for a buffer with stripes in hand.
const PATIENCE: Duration = Duration::from_millis(100);
/// Before what was given up for want of one is tried again.
pub(super) const SHORTAGE_OVER: Duration = Duration::from_secs(1);
/// Blocks that are kept back: a label and a page for each of five members, and as many that a device that hangs has
/// not given back.
const KEPT: usize = 20;

#[derive(Default)]
pub(super) struct Reserve {
    kept: RefCell<Vec<Buf>>,
    /// It was told that buffers are short.
    told: Cell<bool>,
}

impl Control {
    /// A block for a label or a page of the log. As long as the pool has some, as many are kept back as there are
    /// to be.
    pub(super) async fn block(&self) -> Buf {
        loop {
            if let Some(buf) = self.block_now() {
                return buf;
            }
            self.core.after(MOMENT).await;
        }
    }

    fn block_now(&self) -> Option<Buf> {
        let mut kept = self.reserve.kept.borrow_mut();
        while kept.len() < KEPT
            && let Some(buf) = self.pool.acquire(BLOCK)
        {
            kept.push(buf);
        }
        self.pool.acquire(BLOCK).or_else(|| kept.pop())
    }

    /// A block that is not needed any more.
    pub(super) fn keep(&self, buf: Option<Buf>) {
        let mut kept = self.reserve.kept.borrow_mut();
        if let Some(buf) = buf.filter(|buf| buf.is_unshared() && kept.len() < KEPT) {
            kept.push(buf);
        }
    }

    /// A buffer for a part of the volume, if one becomes free soon: the caller has stripes.
    pub(super) async fn buffer(&self, len: usize) -> Result<Buf, Failure> {
        let patience = self.core.now() + PATIENCE;
        loop {
            if let Some(buf) = self.pool.acquire(len) {
                self.reserve.told.set(false);
                return Ok(buf);
            }
            if self.core.now() >= patience {
                if !self.reserve.told.replace(true) {
                    let volume = &self.state.borrow().record.name;
                    tracing::warn!(
                        volume,
                        len,
                        "no buffer is free: what the volume copies, compares or repairs waits"
                    );
                }
                return Err(Failure::Shortage);
            }
            self.core.after(MOMENT).await;
        }
    }
}
