//! Records in the store that a replica's device was truncated. The rules are in
//! [`truncation`](super::super::truncation).

use super::Membership;
use crate::control::truncation::{Checked, Cut};
use crate::handle::{VolumeError, VolumeEventKind};
use crate::model::{ReplicaRecord, ReplicaState, VolumeRecord};

impl Membership {
    /// Records, under `turn`, that a replica that is not used was cut. An error: there is none to
    /// fill it from, or the volume is another holder's.
    pub(in crate::control) async fn record_cut(
        &self,
        slot: usize,
        cut: &Cut,
        checked: &Checked,
    ) -> Result<(), VolumeError> {
        let Some(replica) = self.context.state.borrow().record.replica(slot).cloned() else {
            return Ok(());
        };
        if replica.is_empty() && !replica.cut {
            return Ok(());
        }
        let why = cut.to_string();
        let is_partial = matches!(replica.state, ReplicaState::Filling { .. });
        if !is_partial && self.context.state.borrow().in_sync().next().is_none() {
            self.mark_cut(slot, cut, checked).await?;
            return Err(VolumeError::Cut {
                name: self.context.name(),
                device: replica.device,
                what: why,
            });
        }
        self.commit(|record| {
            if let Some(replica) = record.replica_mut(slot) {
                replica.fill_anew(why.clone());
            }
        })
        .await?;
        self.context.emit(VolumeEventKind::ReplicaOut {
            replica: replica.id,
            device: replica.device,
            why,
        });
        Ok(())
    }

    /// Records the cut of a replica that lanes do not use any more, without a source for a resync.
    pub(in crate::control) async fn mark_cut(
        &self,
        slot: usize,
        cut: &Cut,
        checked: &Checked,
    ) -> Result<(), VolumeError> {
        let marked = self
            .context
            .state
            .borrow()
            .record
            .replica(slot)
            .is_some_and(|m| m.cut);
        if marked {
            return Ok(());
        }
        self.commit(|record| {
            if let Some(replica) = record.replica_mut(slot) {
                replica.cut = true;
                replica.why = Some(cut.to_string());
            }
        })
        .await?;
        checked.forget();
        Ok(())
    }

    /// Records the cut replicas of a volume that cannot be opened. That fences a holder that has it
    /// open. So another holder keeps the volume, unless no replica is left to serve.
    pub(in crate::control) async fn record_cut_unopened(
        &self,
        record: &VolumeRecord,
        cut: &[(usize, Cut, Checked)],
    ) {
        let mut next = record.clone();
        for (slot, cut, _) in cut {
            match next.replica_mut(*slot) {
                Some(replica) if matches!(replica.state, ReplicaState::Filling { .. }) => {
                    replica.fill_anew(cut.to_string());
                }
                Some(replica) if !replica.cut => {
                    replica.cut = true;
                    replica.why = Some(cut.to_string());
                }
                _ => {}
            }
        }
        let mine = record.holder.is_none_or(|holder| holder == self.holder);
        let is_cut = |replica: &ReplicaRecord| next.in_sync().any(|m| m.id == replica.id && m.cut);
        let all_cut = record.in_sync().all(is_cut);
        let stored = if next.replicas == record.replicas {
            // Unless the operator thawed the volume meanwhile, the record holds all of it.
            let found = self.store.load(self.context.id).await;
            found.is_ok_and(|found| found.version() == record.version())
        } else if mine || all_cut {
            next.revision += 1;
            let swapped = self.store.swap(record.version(), next).await;
            if let Err(error) = &swapped {
                // The next attempt to open it finds the same.
                tracing::warn!(
                    volume = record.name,
                    %error,
                    "cannot record that a replica was cut"
                );
            }
            swapped.is_ok()
        } else {
            false
        };
        if stored {
            cut.iter().for_each(|(_, _, checked)| checked.forget());
        }
    }
}
