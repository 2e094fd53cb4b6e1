//! Creates and deletes I/O queue pairs, and assigns their identifiers. Meanwhile the cores that own
//! the queue pairs do not write doorbells.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_nvmf_wire::commands::admin::queues::{create_cq, create_sq, delete_cq, delete_sq};
use nacre_nvmf_wire::sqe::Psdt;
use nacre_nvmf_wire::{Sqe, StatusCode};
use nacre_reactor::CoreHandle;

use crate::controller::Controller;
use crate::error::ControlError;
use crate::link::Link;
use crate::phase::QueueState as Phase;
use crate::ring::Rings;

/// Interval of checks while waiting for the owner of a queue pair to stop writing doorbells.
const MOMENT: Duration = Duration::from_micros(20);

/// The existing queue pairs.
#[derive(Default)]
pub(crate) struct Links {
    list: Vec<Arc<Link>>,
    taken: BTreeSet<u16>,
    /// Number of queue creations so far.
    generation: u32,
}

impl Links {
    /// The lowest free identifier from 1 to `most`.
    pub fn take(&mut self, most: u16) -> Option<u16> {
        let qid = (1..=most).find(|qid| !self.taken.contains(qid))?;
        self.taken.insert(qid);
        Some(qid)
    }

    pub fn give_back(&mut self, qid: u16) {
        self.taken.remove(&qid);
    }

    pub fn add(&mut self, link: Arc<Link>) {
        self.list.push(link);
    }

    pub fn remove(&mut self, qid: u16) {
        self.list.retain(|link| link.qid != qid);
        self.taken.remove(&qid);
    }

    pub fn get(&self, qid: u16) -> Option<Arc<Link>> {
        self.list.iter().find(|link| link.qid == qid).cloned()
    }

    pub fn all(&self) -> Vec<Arc<Link>> {
        self.list.clone()
    }

    pub fn count(&self) -> u16 {
        self.list.len() as u16
    }

    fn next_generation(&mut self) -> u32 {
        self.generation = self.generation.wrapping_add(1) & 0x7fff_ffff;
        self.generation
    }
}

impl Controller {
    /// Creates a queue pair, and lets its owner use it. The phase is not live.
    pub(super) async fn make_queue(
        &self,
        core: &CoreHandle,
        link: &Arc<Link>,
    ) -> Result<(), ControlError> {
        let facts = self.facts();
        let function = self.function();
        let before = link.grant();
        let entries = before.rings.entries;
        if facts.entries < entries {
            return Err(ControlError::Failed {
                reason: format!(
                    "it takes queues of {} entries, not {entries} any more",
                    facts.entries
                ),
            });
        }
        // Memory registered with one function is not registered with another.
        let fits =
            Arc::ptr_eq(&before.function, &function) && before.rings.list_bytes >= facts.list_bytes;
        let rings = if fits {
            Arc::clone(&before.rings)
        } else {
            let list_bytes = before.rings.list_bytes.max(facts.list_bytes);
            let rings = Rings::allocate(&function, entries, list_bytes);
            Arc::new(rings.map_err(|error| ControlError::Failed {
                reason: crate::error::chain(&error),
            })?)
        };
        let mut grant = facts.regrant(&function, link.qid, rings);
        grant.vector = link
            .vector
            .filter(|vector| *vector < facts.vectors && link.interrupts.load(Ordering::Relaxed));
        if let Some(shadows) = &grant.shadows {
            grant.sq.clear(shadows);
            grant.cq.clear(shadows);
        }
        let (qid, entries) = (link.qid, u32::from(grant.rings.entries));
        let cq = create_cq(0, qid, entries, grant.rings.cq.address(0), grant.vector);
        let sq = create_sq(0, qid, entries, grant.rings.sq.address(0), qid);
        self.ask(core, plain(cq), &[], &mut []).await?;
        if let Err(error) = self.ask(core, plain(sq), &[], &mut []).await {
            let _ = self.ask(core, plain(delete_cq(0, qid)), &[], &mut []).await;
            return Err(error);
        }
        link.made.store(true, Ordering::Relaxed);
        link.set_grant(grant);
        let generation = self.links.lock().next_generation();
        link.set_phase(Phase::Live(generation));
        Ok(())
    }

    /// Deletes a queue pair. After success, the controller accesses neither its rings nor the
    /// buffers of its commands.
    pub(super) async fn delete_queue(
        &self,
        core: &CoreHandle,
        link: &Link,
        limit: Duration,
    ) -> Result<(), ControlError> {
        if !link.made.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        for sqe in [delete_sq(0, link.qid), delete_cq(0, link.qid)] {
            match self.ask_within(core, plain(sqe), limit, &[], &mut []).await {
                Ok(_) => {}
                // The controller has no such queue, so it is deleted.
                Err(ControlError::Status { status, .. })
                    if status.code() == StatusCode::INVALID_QUEUE_IDENTIFIER => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Waits until no owner of a queue pair writes doorbells, and prevents further writes.
    pub(super) async fn quiesce_all(&self, core: &CoreHandle) {
        let links = self.all_links();
        for link in &links {
            link.set_phase(Phase::Quiescing);
        }
        for link in &links {
            self.until_quiet(core, link).await;
        }
    }

    pub(super) async fn quiesce(&self, core: &CoreHandle, link: &Link) {
        link.set_phase(Phase::Quiescing);
        self.until_quiet(core, link).await;
    }

    async fn until_quiet(&self, core: &CoreHandle, link: &Link) {
        while link.phase.is_busy() {
            core.after(MOMENT).await;
        }
    }

    /// Ends all I/O in flight and waiting. The controller must be unable to access memory.
    pub(super) fn end_queues(&self) {
        for link in self.all_links() {
            link.made.store(false, Ordering::Relaxed);
            link.set_phase(Phase::Gone);
        }
    }
}

/// Clears PSDT: admin commands of PCIe controllers use PRPs.
fn plain(mut sqe: Sqe) -> Sqe {
    sqe.set_psdt(Psdt::Prp);
    sqe
}
