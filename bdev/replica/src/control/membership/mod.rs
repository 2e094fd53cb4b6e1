//! Changes the record of an open volume (replicas, their states, settings): in the store, in the
//! labels, and in the control's state. Only this module changes the record of an open volume.

mod cuts;

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::Mutex as AsyncMutex;
use uuid::Uuid;

use super::context::Context;
use super::media::Media;
use crate::handle::{VolumeError, VolumeEventKind};
use crate::model::VolumeRecord;
use crate::mutation::Mutation;
use crate::store::{StoreError, VolumeStore};

/// First and longest delay between attempts to reach an unreachable store.
const FIRST_DELAY: Duration = Duration::from_millis(50);
const LAST_DELAY: Duration = Duration::from_secs(5);

pub(super) struct Membership {
    pub context: Rc<Context>,
    pub media: Rc<Media>,
    pub store: Arc<dyn VolumeStore>,
    pub holder: Uuid,
    /// Lock that serializes changes.
    pub turn: AsyncMutex<()>,
}

impl Membership {
    /// Changes the record in the store, durably, and then in the labels of the present replicas.
    /// Call this under `Membership::turn`. Waits as long as the store is unreachable: no I/O that
    /// depends on the change is acknowledged meanwhile. An error means that this holder is fenced.
    ///
    /// Replicas whose label could not be written are reported to the failure handler; the change
    /// stands.
    pub(super) async fn commit(
        &self,
        change: impl FnOnce(&mut VolumeRecord),
    ) -> Result<(), VolumeError> {
        let keep = |record: &mut VolumeRecord| {
            change(record);
            record.holder = Some(self.holder);
        };
        self.change(false, keep, || false, || ()).await.map(drop)
    }

    /// Commits a change like [`Membership::commit`], for a decision that another event may
    /// overtake while the store is unreachable. Returns `false` without a change if it is
    /// `overtaken`. Calls `decided` when the store has the change, before any label has it.
    pub(super) async fn commit_unless(
        &self,
        overtaken: impl Fn() -> bool,
        change: impl FnOnce(&mut VolumeRecord),
        decided: impl FnOnce(),
    ) -> Result<bool, VolumeError> {
        let keep = |record: &mut VolumeRecord| {
            change(record);
            record.holder = Some(self.holder);
        };
        self.change(false, keep, overtaken, decided).await
    }

    /// Commits the last change of a holder. `clean`: the replicas are equal, and all data is on
    /// their media.
    pub(super) async fn sign_off(&self, clean: bool) -> Result<(), VolumeError> {
        let leave = |record: &mut VolumeRecord| record.holder = None;
        self.change(clean, leave, || false, || ()).await.map(drop)
    }

    async fn change(
        &self,
        clean: bool,
        change: impl FnOnce(&mut VolumeRecord),
        overtaken: impl Fn() -> bool,
        decided: impl FnOnce(),
    ) -> Result<bool, VolumeError> {
        let before = self.context.state.borrow().record.clone();
        let mut next = before.clone();
        change(&mut next);
        next.revision = before.revision + 1;
        let in_sync = next.in_sync().map(|replica| replica.id);
        self.context.state.borrow_mut().attempted.extend(in_sync);
        if !self.swap(&before, &next, overtaken).await? {
            return Ok(false);
        }
        decided();
        {
            let mut state = self.context.state.borrow_mut();
            state.record = next;
            state.attempted.clear();
        }
        self.stamp(clean).await;
        Ok(true)
    }

    pub(super) async fn swap(
        &self,
        before: &VolumeRecord,
        next: &VolumeRecord,
        overtaken: impl Fn() -> bool,
    ) -> Result<bool, VolumeError> {
        if let Some(why) = self.context.state.borrow().fenced.clone() {
            let name = before.name.clone();
            return Err(VolumeError::Fenced { name, why });
        }
        let mut delay = FIRST_DELAY;
        // An attempt without a reply may have succeeded. A conflict of the next attempt is then
        // this holder's own change.
        let mut unsure = false;
        // The result of the last attempt is unknown. It must be found out before another attempt:
        // later events may have overtaken the change.
        let mut open = false;
        loop {
            let mut silent = None;
            if !open {
                if overtaken() {
                    return Ok(false);
                }
                match self.store.swap(before.version(), next.clone()).await {
                    Ok(()) => {
                        self.store_replied();
                        return Ok(true);
                    }
                    Err(StoreError::Conflict { .. }) if Mutation::ForgetFence.is_active() => {
                        return Ok(true);
                    }
                    // It stays refused, whatever earlier attempts did.
                    Err(error @ (StoreError::Owned { .. } | StoreError::Fenced { .. })) => {
                        return Err(self.fenced_by(error));
                    }
                    Err(error @ StoreError::Unavailable { .. }) => {
                        (unsure, open) = (true, true);
                        silent = Some(error);
                    }
                    Err(_) if unsure => open = true,
                    Err(error) if is_final(&error) => return Err(self.fenced_by(error)),
                    Err(error) => silent = Some(error),
                }
            }
            if open {
                match self.store.load(self.context.id).await {
                    Ok(found) if found == *next => {
                        self.store_replied();
                        return Ok(true);
                    }
                    Ok(found) if found.version() == before.version() => open = false,
                    Ok(found) => {
                        return Err(self.fenced_by(StoreError::Conflict {
                            id: self.context.id,
                            expected: before.version(),
                            found: found.version(),
                        }));
                    }
                    Err(error) if is_final(&error) => return Err(self.fenced_by(error)),
                    Err(error) => silent = Some(error),
                }
            }
            if let Some(error) = silent {
                self.store_silent(&error);
            }
            self.context.core.after(delay).await;
            delay = (delay * 2).min(LAST_DELAY);
        }
    }

    fn fenced_by(&self, error: StoreError) -> VolumeError {
        self.context.fence(error.to_string());
        error.into()
    }

    /// Verifies that this holder still owns the volume. Called before a write to a device that may
    /// belong to a later holder as a replica.
    pub(super) async fn must_hold(&self) -> Result<(), VolumeError> {
        let record = self.context.state.borrow().record.clone();
        if let Some(why) = self.context.state.borrow().fenced.clone() {
            let name = record.name;
            return Err(VolumeError::Fenced { name, why });
        }
        let found = self.store.load(self.context.id).await?;
        // Other differences come from a change of this holder that is in progress.
        if (found.epoch, found.holder) == (record.epoch, record.holder) {
            return Ok(());
        }
        let error = StoreError::Conflict {
            id: self.context.id,
            expected: record.version(),
            found: found.version(),
        };
        self.context.fence(error.to_string());
        Err(error.into())
    }

    fn store_replied(&self) {
        if self.context.state.borrow_mut().store_lost.take().is_some() {
            self.context.emit(VolumeEventKind::StoreBack);
            self.context.refresh_status();
        }
    }

    fn store_silent(&self, error: &StoreError) {
        let why = error.to_string();
        let news = self.context.state.borrow().store_lost.as_ref() != Some(&why);
        if news {
            self.context.state.borrow_mut().store_lost = Some(why.clone());
            self.context.emit(VolumeEventKind::StoreLost { why });
            self.context.refresh_status();
        }
    }

    /// Writes the record's stamp into the labels of the attached replicas.
    pub(super) async fn stamp(&self, clean: bool) {
        let (record, present) = {
            let state = self.context.state.borrow();
            (state.record.clone(), state.present())
        };
        let writes = present.iter().map(|(slot, live)| {
            let record = &record;
            async move {
                let outcome = self.write_label(*slot, live, record, clean).await;
                (*slot, live.incarnation, outcome)
            }
        });
        for (slot, incarnation, outcome) in join_all(writes).await {
            if let Err(failure) = outcome {
                self.context.suspect(slot, incarnation, failure);
            }
        }
    }
}

/// The volume belongs to another holder, or was deleted.
fn is_final(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::Conflict { .. } | StoreError::NotFound { .. }
    )
}
