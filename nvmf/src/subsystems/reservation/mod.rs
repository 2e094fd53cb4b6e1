//! The reservations of a namespace (Base 8.19): registrants, the holder, and the access that each
//! host has.
//!
//! ```text
//! state.rs     the reservation, and the effect of each command on it; pure
//! report.rs    Reservation Report
//! notices.rs   the notifications for each controller's host (log 80h)
//! ```
//!
//! `queues/reservation.rs` runs the commands on a core: stores persistent state, aborts preempted
//! I/O, completes.
//!
//! A [`Reservation`] belongs to a namespace, and survives the removal of its bdev. Commands change
//! it under its lock, from the core of their queue. I/O takes the lock only after a change, and
//! when it is refused. While the namespace is not reserved, I/O reads one word,
//! [`Reservation::gate`], which is zero. Otherwise each queue pair caches its host's access rights,
//! and the word identifies the state for which they are valid. A command whose outcome must survive
//! a power loss is applied and completed when the [`ReservationStore`] has it on stable media;
//! later commands wait.

mod notices;
pub(crate) mod report;
pub(crate) mod state;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use nacre_bdev::Op;
use nacre_nvmf_wire::StatusCode;
use parking_lot::{Mutex, MutexGuard};

use crate::subsystems::core_handle::GroupHandle;

pub use notices::{MAX_NOTICES, NoticeLog};
pub use state::{
    Change, Effect, HeldReservation, HostId, MAX_REGISTRANTS, Notice, Registrant, ReservationState,
    Rights,
};

/// Storage for a namespace's state that persists through power loss.
pub trait ReservationStore: Send + Sync {
    /// Makes `state` durable in place of the earlier one (`None`: store nothing), then completes
    /// the ticket. Does not block. Of consecutive calls the last one takes effect.
    fn store(&self, state: Option<&ReservationState>, ticket: Ticket);

    /// True if states that do not persist through power loss are stored as well, because the
    /// namespace may move to another machine.
    fn stores_all(&self) -> bool {
        false
    }
}

/// The right of this machine to answer from a state that another machine may take over.
pub trait StateLease: Send + Sync {
    /// True if no other machine has changed the state before this call. The target calls this after
    /// it has read the state, on any core: it must be quick and not block.
    fn is_good(&self) -> bool;
}

/// NSIDs and their reservations.
pub(crate) type Several = Vec<(u32, Arc<Reservation>)>;

/// The initial state of a namespace's reservations.
#[derive(Clone, Default)]
pub struct Reservations {
    /// `None`: reservations do not persist through power loss, as RESCAP shows.
    pub store: Option<Arc<dyn ReservationStore>>,
    /// The stored state.
    pub stored: Option<ReservationState>,
}

/// Reports the outcome of storing a state. A dropped ticket reports a failure.
pub struct Ticket(Arc<StoreAnswer>);

pub(crate) struct StoreAnswer {
    pub(crate) outcome: AtomicU8,
    owner: GroupHandle,
}

pub(crate) const OPEN: u8 = 0;
pub(crate) const STORED: u8 = 1;
pub(crate) const FAILED: u8 = 2;

impl Ticket {
    pub(crate) fn new(owner: GroupHandle) -> (Self, Arc<StoreAnswer>) {
        let answer = Arc::new(StoreAnswer {
            outcome: AtomicU8::new(OPEN),
            owner,
        });
        (Self(Arc::clone(&answer)), answer)
    }

    /// Reports that the state is on stable media.
    pub fn stored(self) {
        self.answer(STORED);
    }

    /// Reports that the state could not be stored.
    pub fn failed(self) {
        self.answer(FAILED);
    }

    fn answer(&self, outcome: u8) {
        let first =
            self.0
                .outcome
                .compare_exchange(OPEN, outcome, Ordering::AcqRel, Ordering::Relaxed);
        if first.is_ok() {
            self.0.owner.wake();
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.answer(FAILED);
    }
}

/// The reservation of one namespace, shared by all cores.
///
/// A namespace that may move to another machine has its reservation's state only while this
/// machine serves it: from [`Reservation::take_over`] to [`Reservation::leave`]. Otherwise the
/// state is unknown. While it is unknown, or its lease is in doubt, commands that depend on it end
/// with Asymmetric Access Transition.
pub struct Reservation {
    /// Zero while the state is known and the namespace is not reserved. Otherwise a number that no
    /// other state of any namespace has.
    gate: AtomicU64,
    inner: Mutex<Inner>,
    conflicts: AtomicU64,
    store: Option<Arc<dyn ReservationStore>>,
}

/// The decision about a reservation command.
pub(crate) enum Decision {
    /// Another command's outcome is being stored: retry after that.
    Wait,
    Refused(StatusCode),
    /// The caller must store the outcome, if there is a store, and then install it.
    Accepted(Effect, Option<Arc<dyn ReservationStore>>),
}

struct Inner {
    /// `None`: another machine may change the state.
    known: Option<Known>,
    /// The next state is decided but not installed: other commands wait.
    busy: bool,
    /// The cores whose commands wait, and administrators' calls, each with its own number.
    waiters: Vec<GroupHandle>,
}

struct Known {
    state: ReservationState,
    /// `None`: the namespace does not move.
    lease: Option<Arc<dyn StateLease>>,
}

impl Known {
    fn may_answer(&self) -> bool {
        self.lease.as_ref().is_none_or(|lease| lease.is_good())
    }
}

/// The latest value of a gate.
static GATES: AtomicU64 = AtomicU64::new(0);

impl Reservation {
    pub(crate) fn new(from: Reservations) -> Self {
        let moves = from.store.as_ref().is_some_and(|store| store.stores_all());
        let known = Known {
            state: from.stored.unwrap_or_default(),
            lease: None,
        };
        let inner = Inner {
            known: (!moves).then_some(known),
            busy: false,
            waiters: Vec::new(),
        };
        Self {
            gate: AtomicU64::new(inner.new_gate()),
            inner: Mutex::new(inner),
            conflicts: AtomicU64::new(0),
            store: from.store,
        }
    }

    /// Zero while the namespace is not reserved. Relaxed: a host that knows of a reservation has
    /// received a response since the gate was written.
    #[inline]
    pub(crate) fn gate(&self) -> u64 {
        self.gate.load(Ordering::Relaxed)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// `None`: the state is unknown, or another machine may have changed it.
    pub fn state(&self) -> Option<ReservationState> {
        let inner = self.inner();
        let known = inner.known.as_ref()?;
        let state = known.state.clone();
        known.may_answer().then_some(state)
    }

    /// True if this machine has the state. For a namespace that may move: from
    /// [`Reservation::take_over`] to [`Reservation::leave`]; for others always.
    pub fn is_known(&self) -> bool {
        self.inner().known.is_some()
    }

    /// True if this machine has the state, and its lease shows that no other machine has changed
    /// it.
    pub(crate) fn may_answer(&self) -> bool {
        self.inner().known.as_ref().is_some_and(Known::may_answer)
    }

    pub fn can_persist(&self) -> bool {
        self.store.is_some()
    }

    /// Number of I/O commands refused because of the reservation.
    pub fn conflicts(&self) -> u64 {
        self.conflicts.load(Ordering::Relaxed)
    }

    pub(crate) fn count_conflict(&self) {
        self.conflicts.fetch_add(1, Ordering::Relaxed);
    }

    fn rights(&self, host: &HostId) -> (u64, Rights) {
        let inner = self.inner();
        let rights = inner.known.as_ref().map(|known| known.state.rights(host));
        (self.gate(), rights.unwrap_or(Rights::Unknown))
    }

    /// Decides a command. One decision at a time is pending, until it is installed or given up.
    /// Other commands get [`Decision::Wait`], and their core is woken when they may retry.
    pub(crate) fn decide(&self, host: &HostId, command: &Change, core: &GroupHandle) -> Decision {
        let can_persist = self.can_persist();
        let decided = self.decide_by(core, |state| Some(state.decide(host, command, can_persist)));
        decided.expect("a command is always decided")
    }

    /// Decides by a function of the current state. `Err`: the function returned `None`.
    pub(crate) fn decide_by(
        &self,
        core: &GroupHandle,
        outcome: impl FnOnce(&ReservationState) -> Option<Result<Effect, StatusCode>>,
    ) -> Result<Decision, ()> {
        let mut inner = self.inner();
        let Inner {
            known: Some(known),
            busy,
            waiters,
        } = &mut *inner
        else {
            return Ok(Decision::Refused(StatusCode::ANA_TRANSITION));
        };
        if *busy {
            // A core may ask every turn.
            if waiters.iter().all(|waiter| waiter.core != core.core) {
                waiters.push(core.clone());
            }
            return Ok(Decision::Wait);
        }
        let outcome = outcome(&known.state).ok_or(())?;
        // Also before an answer that needs no store: a conflict, or a command without an effect.
        if !known.may_answer() {
            return Ok(Decision::Refused(StatusCode::ANA_TRANSITION));
        }
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(status) => return Ok(Decision::Refused(status)),
        };
        *busy = true;
        let lasts = known.state.ptpl || outcome.next.ptpl;
        let changes = known.state != outcome.next;
        let is_stored = |store: &&Arc<dyn ReservationStore>| lasts || store.stores_all();
        let store = self.store.as_ref().filter(|_| changes).filter(is_stored);
        Ok(Decision::Accepted(outcome, store.cloned()))
    }

    /// Installs a new state, and resumes the commands that waited for it.
    pub(crate) fn install(&self, next: ReservationState) {
        let mut inner = self.inner();
        if let Some(known) = &mut inner.known {
            known.state = next;
        }
        self.gate.store(inner.new_gate(), Ordering::SeqCst);
        release(inner);
    }

    /// Installs the state that another machine had, while it is unknown here. `lease`: of this
    /// machine, taken before it read the state. Returns false while a command is being decided: try
    /// again.
    pub fn take_over(&self, state: ReservationState, lease: Option<Arc<dyn StateLease>>) -> bool {
        let mut inner = self.inner();
        if inner.busy {
            return false;
        }
        inner.known = Some(Known { state, lease });
        self.gate.store(inner.new_gate(), Ordering::SeqCst);
        true
    }

    /// Forgets the state, because another machine may serve the namespace from now on. A command
    /// whose state is being stored completes with the outcome of the store.
    pub fn leave(&self) {
        let mut inner = self.inner();
        inner.known = None;
        self.gate.store(inner.new_gate(), Ordering::SeqCst);
    }

    /// Drops a state that could not be stored: the previous one stays in effect.
    pub(crate) fn give_up(&self) {
        release(self.inner());
    }
}

impl std::fmt::Debug for Reservation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reservation")
            .field("state", &self.state())
            .field("can_persist", &self.can_persist())
            .finish_non_exhaustive()
    }
}

fn release(mut inner: MutexGuard<'_, Inner>) {
    inner.busy = false;
    let waiters = std::mem::take(&mut inner.waiters);
    drop(inner);
    waiters.iter().for_each(GroupHandle::wake);
}

impl Inner {
    fn new_gate(&self) -> u64 {
        let is_free = |known: &Known| known.state.held.is_none();
        if self.known.as_ref().is_some_and(is_free) {
            return 0;
        }
        GATES.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// A queue pair's cache of its host's rights: for each reserved namespace that it has used, the
/// gate and the rights valid for it. So only the first I/O after a change takes the lock, however
/// many namespaces are reserved.
#[derive(Default)]
pub(crate) struct RightsCache {
    /// The latest answer.
    last: Option<(u64, Rights)>,
    /// Gate and rights by namespace id.
    known: BTreeMap<u32, (u64, Rights)>,
}

impl RightsCache {
    /// True if the host may execute `op` on the namespace `nsid` under the current reservation.
    #[inline]
    pub(crate) fn may(
        &mut self,
        nsid: u32,
        reservation: &Reservation,
        host: impl FnOnce() -> HostId,
        op: Op,
    ) -> bool {
        let gate = reservation.gate();
        if gate == 0 {
            return true;
        }
        let required = match op {
            Op::Read | Op::Compare | Op::Verify => Rights::Read,
            _ => Rights::ReadWrite,
        };
        self.allows(gate, nsid, reservation, host, required)
    }

    /// True if the host has the right `required`. `gate`: the value just read, not zero.
    #[inline]
    pub(crate) fn allows(
        &mut self,
        gate: u64,
        nsid: u32,
        of: &Reservation,
        host: impl FnOnce() -> HostId,
        required: Rights,
    ) -> bool {
        let (known, rights) = match self.last {
            Some((known, rights)) if known == gate => (known, rights),
            _ => match self.known.get(&nsid) {
                Some(&(known, rights)) if known == gate => (known, rights),
                _ => {
                    let (gate, rights) = of.rights(&host());
                    if gate == 0 {
                        return true;
                    }
                    self.known.insert(nsid, (gate, rights));
                    (gate, rights)
                }
            },
        };
        self.last = Some((known, rights));
        rights >= required
    }

    /// The status of a command that the latest answer, about `of`, forbids.
    pub(crate) fn refusal(&self, of: &Reservation) -> StatusCode {
        match self.last {
            // Without DNR: it may succeed on another path, or here later.
            Some((_, Rights::Unknown)) => StatusCode::ANA_TRANSITION,
            _ if !of.may_answer() => StatusCode::ANA_TRANSITION,
            _ => StatusCode::RESERVATION_CONFLICT.with_dnr(),
        }
    }
}
