//! The removal of a reservation by the administrator: the effect of a host's Clear (Base 7.4),
//! without a host that sends it.
//!
//! ```text
//! decide ─▶ store (if it is kept) ─▶ install ─▶ notify every former registrant ─▶ done
//!   ▲            │ a host's command is being stored
//!   └── wait ◀───┘
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::subsystems::core_handle::GroupHandle;
use crate::subsystems::reservation::{
    Decision, Effect, FAILED, OPEN, Reservation, ReservationState, StoreAnswer, Ticket,
};
use crate::subsystems::subsystem::Subsystem;

/// The next core number of an administrator's call. A reservation distinguishes its waiters by core
/// number, so each call has a number of its own, far above those of cores.
static NEXT_NUMBER: AtomicUsize = AtomicUsize::new(usize::MAX);

/// A removal in progress. Poll it to the end: commands of hosts wait until then.
pub struct Clearing {
    subsystem: Arc<Subsystem>,
    nsid: u32,
    reservation: Arc<Reservation>,
    handle: GroupHandle,
    /// The only state to clear; `None`: any.
    seen: Option<ReservationState>,
    storing: Option<(Arc<StoreAnswer>, ReservationState, Effect)>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClearError {
    #[error("another node of the cluster serves the volume, or may have taken it over")]
    Elsewhere,
    /// The generation may be the same: it does not count Acquire and Release (Base 8.19).
    #[error("hosts have changed the reservation: its generation was {seen}, and is {now} now")]
    Changed { seen: u32, now: u32 },
    #[error("no host is registered, so there is nothing to clear")]
    Nothing,
    #[error("the cleared state could not be stored, so the former one stays")]
    NotStored,
}

impl Clearing {
    /// `seen`: the state that the caller has checked; a changed one is not cleared. `None`: any
    /// state is cleared. `wake`: called from any thread when [`Clearing::poll`] can continue.
    pub fn new(
        subsystem: Arc<Subsystem>,
        (nsid, reservation): (u32, Arc<Reservation>),
        seen: Option<ReservationState>,
        wake: Arc<dyn Fn() + Send + Sync>,
    ) -> Self {
        Self {
            subsystem,
            nsid,
            reservation,
            handle: GroupHandle::new(NEXT_NUMBER.fetch_sub(1, Ordering::Relaxed), wake),
            seen,
            storing: None,
        }
    }

    /// Continues. `None`: not finished; poll again after the next wake-up. `Ok`: the state before
    /// the removal.
    pub fn poll(&mut self) -> Option<Result<ReservationState, ClearError>> {
        if let Some((answer, ..)) = &self.storing {
            let outcome = answer.outcome.load(Ordering::Acquire);
            if outcome == OPEN {
                return None;
            }
            let (_, before, effect) = self.storing.take()?;
            if outcome == FAILED {
                self.reservation.give_up();
                return Some(Err(if self.reservation.may_answer() {
                    ClearError::NotStored
                } else {
                    ClearError::Elsewhere
                }));
            }
            return Some(Ok(self.install(before, effect)));
        }
        let Some(before) = self.reservation.state() else {
            return Some(Err(ClearError::Elsewhere));
        };
        let refused = match &self.seen {
            Some(seen) if *seen != before => Some(ClearError::Changed {
                seen: seen.generation,
                now: before.generation,
            }),
            _ if before.registrants.is_empty() => Some(ClearError::Nothing),
            _ => None,
        };
        if let Some(refused) = refused {
            return Some(Err(refused));
        }
        // A state that is not `before` any more is not cleared: the next poll reads and checks it.
        let decision = self.reservation.decide_by(&self.handle, |state| {
            (*state == before).then(|| Ok(state.cleared()))
        });
        match decision {
            Err(()) => {
                self.handle.wake();
                None
            }
            Ok(Decision::Wait) => None,
            Ok(Decision::Refused(_)) => Some(Err(ClearError::Elsewhere)),
            Ok(Decision::Accepted(effect, None)) => Some(Ok(self.install(before, effect))),
            Ok(Decision::Accepted(effect, Some(store))) => {
                let (ticket, answer) = Ticket::new(self.handle.clone());
                let is_kept = effect.next.ptpl || store.stores_all();
                // Set first: whatever happens in the store, `drop` gives up.
                let (.., effect) = self.storing.insert((answer, before, effect));
                store.store(is_kept.then_some(&effect.next), ticket);
                self.poll()
            }
        }
    }

    fn install(&self, before: ReservationState, effect: Effect) -> ReservationState {
        self.reservation.install(effect.next);
        for (host, notice) in effect.notices {
            self.subsystem.notify_reservation(&host, self.nsid, notice);
        }
        before
    }
}

/// Dropping an unfinished removal keeps the former state and lets commands of hosts continue.
impl Drop for Clearing {
    fn drop(&mut self) {
        if self.storing.is_some() {
            self.reservation.give_up();
        }
    }
}
