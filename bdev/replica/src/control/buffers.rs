//! The source of the control's buffers when hosts have them all.
//!
//! Buffers for decisions (labels, pages of the log) are reserved: hosts' writes wait for a decision
//! with their buffers, so a decision that waited for a buffer would deadlock. Copying, comparing
//! and repairing hold stripes while they wait for a buffer, so they wait only briefly. Then they
//! release the stripes and retry later.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use nacre_hugepages::Buf;

use super::{Control, MOMENT};
use crate::format::BLOCK;
use crate::shared::Failure;

/// How long a task waits for a buffer with stripes in hand.
const PATIENCE: Duration = Duration::from_millis(100);
/// Time before a task that gave up for lack of a buffer is retried.
pub(super) const SHORTAGE_OVER: Duration = Duration::from_secs(1);
/// Reserved blocks: a label and a page for each of five replicas, and as many that a hanging device
/// has not returned.
const KEPT: usize = 20;

#[derive(Default)]
pub(super) struct Reserve {
    kept: RefCell<Vec<Buf>>,
    /// The shortage of buffers was reported.
    told: Cell<bool>,
}

impl Control {
    /// A block for a label or a page of the log. While the pool has some, refills the reserve to
    /// its size.
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

    /// Returns an unneeded block.
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
                        "no buffer is free: copies, comparisons and repairs of the volume wait"
                    );
                }
                return Err(Failure::Shortage);
            }
            self.core.after(MOMENT).await;
        }
    }
}
