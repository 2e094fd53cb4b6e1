//! Holds writes back for a moment in which the replicas in sync have the same contents. Snapshots
//! of all of them are taken in that moment.
//!
//! A hold owns all stripes ([`crate::stripes`]): the writes that had begun have ended on every
//! replica, and later ones wait in their lanes. Reads go on. A hold ends with
//! [`Command::ReleaseWrites`](crate::handle::Command::ReleaseWrites), at its time limit, or with
//! the volume, whichever comes first.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_reactor::Nanos;
use uuid::Uuid;

use super::MOMENT;
use super::chunk::Copier;
use super::context::Context;
use crate::handle::VolumeError;
use crate::model::MAX_REPLICAS;
use crate::mutation::Mutation;
use crate::shared::Shared;

/// Longest time for which writes may wait.
pub const MAX_HOLD: Duration = Duration::from_secs(10);

pub(super) struct WriteHold {
    pub context: Rc<Context>,
    pub copier: Rc<Copier>,
    pub held: RefCell<Option<Held>>,
}

pub(super) struct Held {
    /// The caller's id, so that no caller ends the hold of another one.
    id: Uuid,
    until: Nanos,
    /// Slot and incarnation of the replicas in sync.
    replicas: Vec<(usize, u64)>,
    _stripes: AllStripes,
}

/// The stripes of the volume, as many as were acquired. Lanes write to none of them while this
/// value exists.
struct AllStripes {
    shared: Arc<Shared>,
    /// Words of the table that are not acquired yet, in ascending order.
    left: Vec<u64>,
}

impl Drop for AllStripes {
    fn drop(&mut self) {
        self.shared.stripes.release_words(&self.left);
        self.shared.ring_all();
    }
}

impl WriteHold {
    /// Waits until no write is in flight, and holds later ones back. `limit`: the time from now
    /// after which the writes go on, held or not.
    pub(super) async fn begin(
        self: &Rc<Self>,
        id: Uuid,
        limit: Duration,
    ) -> Result<(), VolumeError> {
        if self.held.borrow().is_some() {
            return Err(VolumeError::Running {
                what: "a hold of the writes",
            });
        }
        if limit.is_zero() || limit > MAX_HOLD {
            return Err(VolumeError::Invalid {
                what: "limit",
                why: format!("is between 1 ms and {} s", MAX_HOLD.as_secs()),
            });
        }
        // Without need, no write waits.
        self.equal_replicas()?;
        let until = self.context.core.now() + limit;
        let acquired = self
            .context
            .core
            .timeout(limit, self.acquire(until))
            .await
            .ok()
            .flatten();
        let Some(stripes) = acquired else {
            return Err(self.not_held("writes in flight did not end in time"));
        };
        let replicas = self.equal_replicas()?;
        *self.held.borrow_mut() = Some(Held {
            id,
            until,
            replicas,
            _stripes: stripes,
        });
        self.context.spawn(Rc::clone(self).end_at(id, until));
        Ok(())
    }

    /// Acquires all stripes. `None`: not until this time.
    async fn acquire(&self, until: Nanos) -> Option<AllStripes> {
        // Other tasks of the control wait for stripes while they have some.
        let _one = self.copier.turn.lock().await;
        let shared = Arc::clone(&self.context.shared);
        let left = (0..shared.stripes.words()).collect();
        let mut stripes = AllStripes { shared, left };
        loop {
            let AllStripes { shared, left } = &mut stripes;
            // All that are free first: the marks on the others keep new writes out of them.
            shared.stripes.acquire_words(left);
            if left.is_empty() || Mutation::HoldEarly.is_active() {
                return Some(stripes);
            }
            if self.context.core.now() >= until {
                return None;
            }
            self.context.core.after(MOMENT).await;
        }
    }

    /// The replicas in sync, if no block of theirs may differ.
    fn equal_replicas(&self) -> Result<Vec<(usize, u64)>, VolumeError> {
        self.context.must_not_be_fenced()?;
        let replicas = self.in_sync();
        let state = self.context.state.borrow();
        let is_equal = |(slot, live): (usize, &Rc<super::state::Live>)| {
            live.resync.borrow().is_none() && self.context.shared.missing[slot].is_empty()
        };
        let recorded = (0..MAX_REPLICAS).filter(|slot| state.is_in_sync(*slot));
        let why = if replicas.is_empty() || state.closed {
            "no replica is in sync and attached"
        } else if recorded.count() > replicas.len() {
            "a replica in sync is not attached"
        } else if !state.in_sync().all(is_equal) {
            "blocks of its replicas are being made equal"
        } else if !state.in_sync().all(|(_, live)| live.is_whole()) {
            // The control has not decided about that replica yet, so it counts as in sync.
            "the device of a replica was gone, or has lost data"
        } else {
            return Ok(replicas);
        };
        drop(state);
        Err(VolumeError::NotEqual {
            name: self.context.name(),
            why: why.to_owned(),
        })
    }

    fn in_sync(&self) -> Vec<(usize, u64)> {
        let state = self.context.state.borrow();
        let all = state.in_sync();
        all.map(|(slot, live)| (slot, live.incarnation)).collect()
    }

    async fn end_at(self: Rc<Self>, id: Uuid, until: Nanos) {
        let now = self.context.core.now();
        self.context.core.after(until.since(now)).await;
        let is_this = |held: &Held| (held.id, held.until) == (id, until);
        if self.held.borrow().as_ref().is_some_and(is_this) {
            self.end();
        }
    }

    /// Lets writes go on.
    pub(super) fn end(&self) {
        drop(self.held.take());
    }

    fn is_held_by(&self, id: Uuid) -> bool {
        self.held
            .borrow()
            .as_ref()
            .is_some_and(|held| held.id == id)
    }

    /// Lets writes go on, if this hold has not ended. An error: they went on before, or the
    /// replicas in sync have changed, so the contents may have.
    pub(super) fn release(&self, id: Uuid) -> Result<(), VolumeError> {
        let held = self.is_held_by(id).then(|| self.held.take()).flatten();
        let Some(held) = held else {
            return Err(self.not_held("the time limit was over"));
        };
        if self.context.core.now() >= held.until {
            return Err(self.not_held("the time limit was over"));
        }
        if self.equal_replicas()? != held.replicas {
            return Err(self.not_held("its replicas in sync have changed"));
        }
        Ok(())
    }

    fn not_held(&self, why: &str) -> VolumeError {
        VolumeError::NotHeld {
            name: self.context.name(),
            why: why.to_owned(),
        }
    }
}
