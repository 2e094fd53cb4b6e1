//! Creates and deletes I/O queue pairs. Meanwhile the cores that own them do not write doorbells.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_nvmf_wire::commands::admin::queues::{create_cq, create_sq, delete_cq, delete_sq};
use nacre_nvmf_wire::sqe::Psdt;
use nacre_nvmf_wire::{Sqe, StatusCode};

use super::commands::Commands;
use crate::error::ControlError;
use crate::link::Link;
use crate::phase::QueueState;
use crate::ring::Rings;

impl Commands<'_> {
    /// Creates a queue pair, and lets its owner use it. The phase of `link` must not be `Live`.
    pub(super) async fn make_queue(self, link: &Arc<Link>) -> Result<(), ControlError> {
        let properties = self.shared.properties();
        let function = self.shared.function();
        let before = link.grant();
        let entries = before.rings.entries;
        if properties.entries < entries {
            return Err(ControlError::Failed {
                reason: format!(
                    "it takes queues of {} entries, not {entries} any more",
                    properties.entries
                ),
            });
        }
        // Memory registered with one function is not registered with another.
        let fits = Arc::ptr_eq(&before.function, &function)
            && before.rings.list_bytes >= properties.list_bytes;
        let rings = if fits {
            Arc::clone(&before.rings)
        } else {
            let list_bytes = before.rings.list_bytes.max(properties.list_bytes);
            let rings = Rings::allocate(&function, entries, list_bytes);
            Arc::new(rings.map_err(|error| ControlError::Failed {
                reason: crate::error::chain(&error),
            })?)
        };
        let mut grant = properties.regrant(&function, link.qid, rings);
        grant.vector = link.vector.filter(|vector| {
            *vector < properties.vectors && link.interrupts.load(Ordering::Relaxed)
        });
        if let Some(shadows) = &grant.shadows {
            grant.sq.clear(shadows);
            grant.cq.clear(shadows);
        }
        let (qid, entries) = (link.qid, u32::from(grant.rings.entries));
        let cq = create_cq(0, qid, entries, grant.rings.cq.address(0), grant.vector);
        let sq = create_sq(0, qid, entries, grant.rings.sq.address(0), qid);
        self.ask(plain(cq), &[], &mut []).await?;
        if let Err(error) = self.ask(plain(sq), &[], &mut []).await {
            let _ = self.ask(plain(delete_cq(0, qid)), &[], &mut []).await;
            return Err(error);
        }
        link.made.store(true, Ordering::Relaxed);
        link.set_grant(grant);
        let generation = self.shared.links.lock().next_generation();
        link.set_phase(QueueState::Live(generation));
        Ok(())
    }

    /// Deletes a queue pair. After success, the controller accesses neither its rings nor the
    /// buffers of its commands.
    pub(super) async fn delete_queue(
        self,
        link: &Link,
        limit: Duration,
    ) -> Result<(), ControlError> {
        if !link.made.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        for sqe in [delete_sq(0, link.qid), delete_cq(0, link.qid)] {
            match self.ask_within(plain(sqe), limit, &[], &mut []).await {
                Ok(_) => {}
                // The controller has no such queue, so it is deleted.
                Err(ControlError::Status { status, .. })
                    if status.code() == StatusCode::INVALID_QUEUE_IDENTIFIER => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Clears PSDT: admin commands of PCIe controllers use PRPs.
fn plain(mut sqe: Sqe) -> Sqe {
    sqe.set_psdt(Psdt::Prp);
    sqe
}
