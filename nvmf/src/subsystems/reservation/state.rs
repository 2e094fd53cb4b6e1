//! The state of a namespace's reservation, and the effect of each command on it (Base 8.19, 7.2 to
//! 7.5).
//!
//! Pure functions: from a state and a command to the next state, its notifications, and the hosts
//! whose commands are aborted. The state always obeys these rules:
//!
//! - no host is registered twice, no key is zero, and there are at most [`MAX_REGISTRANTS`];
//! - a reservation has one registered holder. Reservations of the all-registrants types are held by
//!   every registrant, and there is at least one.

use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::commands::reservation::{
    Acquire, AcquireAction, PersistChange, Register, RegisterAction, Release, ReleaseAction,
    ReservationType,
};

/// Host identifier. Hosts over fabrics have 128 bits.
pub type HostId = [u8; 16];

/// Most hosts registered with one namespace.
pub const MAX_REGISTRANTS: usize = 256;

const CONFLICT: StatusCode = StatusCode::RESERVATION_CONFLICT.with_dnr();
const INVALID: StatusCode = StatusCode::INVALID_FIELD.with_dnr();

/// A registered host and its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registrant {
    pub host: HostId,
    pub key: u64,
}

/// The reservation of a namespace: its type and holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldReservation {
    pub kind: ReservationType,
    /// The holder; `None`: every registrant.
    pub holder: Option<HostId>,
}

/// The registrants and the reservation of a namespace, and further fields of a report.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReservationState {
    /// Registrants in the order of their registration.
    pub registrants: Vec<Registrant>,
    pub held: Option<HeldReservation>,
    /// Number of successful Register, Preempt and Clear commands (GEN), modulo 2^32.
    pub generation: u32,
    /// Persist Through Power Loss.
    pub ptpl: bool,
}

/// The access of a host to the namespace's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rights {
    /// The reservation is not known.
    Unknown,
    None,
    Read,
    ReadWrite,
}

/// A command that changes the state, with its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    Register {
        what: Register,
        current: u64,
        new: u64,
    },
    Acquire {
        what: Acquire,
        current: u64,
        preempt: u64,
    },
    Release {
        what: Release,
        current: u64,
    },
    /// Set Features, Reservation Persistence.
    Persist(bool),
}

/// The type of a reservation notification (log page 80h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    RegistrationPreempted,
    Released,
    Preempted,
}

/// The effect of a successful command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Effect {
    pub next: ReservationState,
    pub notices: Vec<(HostId, Notice)>,
    /// Hosts whose commands must be aborted before this one completes.
    pub aborted: Vec<HostId>,
}

pub(crate) const fn is_all_registrants(kind: ReservationType) -> bool {
    matches!(
        kind,
        ReservationType::WriteExclusiveAllRegistrants
            | ReservationType::ExclusiveAccessAllRegistrants
    )
}

/// True for the types under which every registrant has the holder's rights, so that the end of the
/// reservation affects all of them.
const fn is_for_registrants(kind: ReservationType) -> bool {
    !matches!(
        kind,
        ReservationType::WriteExclusive | ReservationType::ExclusiveAccess
    )
}

const fn excludes_reads(kind: ReservationType) -> bool {
    matches!(
        kind,
        ReservationType::ExclusiveAccess
            | ReservationType::ExclusiveAccessRegistrantsOnly
            | ReservationType::ExclusiveAccessAllRegistrants
    )
}

impl HeldReservation {
    fn by(kind: ReservationType, host: HostId) -> Self {
        Self {
            kind,
            holder: (!is_all_registrants(kind)).then_some(host),
        }
    }
}

impl ReservationState {
    pub fn key_of(&self, host: &HostId) -> Option<u64> {
        let mine = |r: &&Registrant| r.host == *host;
        self.registrants.iter().find(mine).map(|r| r.key)
    }

    /// True if the host is registered and holds the reservation.
    pub fn holds(&self, host: &HostId) -> bool {
        self.held
            .is_some_and(|held| held.holder.is_none_or(|holder| holder == *host))
            && self.key_of(host).is_some()
    }

    pub fn rights(&self, host: &HostId) -> Rights {
        let Some(held) = self.held else {
            return Rights::ReadWrite;
        };
        let inside = if is_for_registrants(held.kind) {
            self.key_of(host).is_some()
        } else {
            held.holder == Some(*host)
        };
        match (inside, excludes_reads(held.kind)) {
            (true, _) => Rights::ReadWrite,
            (false, false) => Rights::Read,
            (false, true) => Rights::None,
        }
    }

    /// Validates a stored state. The error names the violated rule.
    pub fn checked(self) -> Result<Self, &'static str> {
        let hosts = self.registrants.iter().map(|r| r.host);
        let distinct: std::collections::BTreeSet<HostId> = hosts.collect();
        if distinct.len() != self.registrants.len() {
            return Err("a host is registered twice");
        }
        if self.registrants.len() > MAX_REGISTRANTS {
            return Err("more registrants than there can be");
        }
        if self.registrants.iter().any(|r| r.key == 0) {
            return Err("a key is zero");
        }
        if let Some(held) = self.held {
            if held.holder.is_none() != is_all_registrants(held.kind) {
                return Err("the holder does not go with the type");
            }
            match held.holder {
                Some(holder) if !distinct.contains(&holder) => {
                    return Err("the holder is not registered");
                }
                None if distinct.is_empty() => return Err("held by all, but there is none"),
                _ => {}
            }
        }
        Ok(self)
    }

    /// The effect of a host's command, or the status that refuses it. `can_persist`: the namespace
    /// can store its state through power loss.
    pub fn decide(
        &self,
        host: &HostId,
        command: &Change,
        can_persist: bool,
    ) -> Result<Effect, StatusCode> {
        let mut outcome = Effect {
            next: self.clone(),
            notices: Vec::new(),
            aborted: Vec::new(),
        };
        match *command {
            Change::Register { what, current, new } => {
                if what.persist == PersistChange::Set && !can_persist {
                    return Err(INVALID);
                }
                self.register(host, what, current, new, &mut outcome)?;
                outcome.next.ptpl = match what.persist {
                    PersistChange::Keep => self.ptpl,
                    PersistChange::Clear => false,
                    PersistChange::Set => true,
                };
            }
            Change::Acquire {
                what,
                current,
                preempt,
            } => {
                self.check_key(host, current, what.ignore_existing_key)?;
                match what.action {
                    AcquireAction::Acquire => self.acquire(host, what.kind, &mut outcome)?,
                    AcquireAction::Preempt => {
                        self.preempt(host, what.kind, preempt, &mut outcome)?;
                    }
                    AcquireAction::PreemptAndAbort => {
                        let gone = self.preempt(host, what.kind, preempt, &mut outcome)?;
                        outcome.aborted = gone;
                    }
                }
            }
            Change::Release { what, current } => {
                self.check_key(host, current, what.ignore_existing_key)?;
                match what.action {
                    ReleaseAction::Release => self.release(host, what.kind, &mut outcome)?,
                    ReleaseAction::Clear => {
                        outcome.tell_others(host, Notice::Preempted);
                        outcome.next.registrants.clear();
                        outcome.next.held = None;
                        outcome.next.count();
                    }
                }
            }
            Change::Persist(true) if !can_persist => return Err(INVALID),
            Change::Persist(on) => outcome.next.ptpl = on,
        }
        Ok(outcome)
    }

    /// The effect of a Clear by the administrator: all registrants are notified, because none of
    /// them sent it.
    pub(crate) fn cleared(&self) -> Effect {
        let mut outcome = Effect {
            next: self.clone(),
            notices: Vec::new(),
            aborted: Vec::new(),
        };
        let notices = self.registrants.iter();
        let notices = notices.map(|r| (r.host, Notice::Preempted));
        outcome.notices.extend(notices);
        outcome.next.registrants.clear();
        outcome.next.held = None;
        outcome.next.count();
        outcome
    }

    /// Checks that the host is registered with the key `current`. Refuses IEKEY (`ignore`) with
    /// Invalid Field, as of NVMe 1.3 (RESCAP bit 7).
    fn check_key(&self, host: &HostId, current: u64, ignore: bool) -> Result<(), StatusCode> {
        if ignore {
            return Err(INVALID);
        }
        match self.key_of(host) {
            Some(key) if key == current => Ok(()),
            _ => Err(CONFLICT),
        }
    }

    fn register(
        &self,
        host: &HostId,
        what: Register,
        current: u64,
        new: u64,
        outcome: &mut Effect,
    ) -> Result<(), StatusCode> {
        // A key of zero could never be preempted: as a PRKEY it stands for all.
        if what.action != RegisterAction::Unregister && new == 0 {
            return Err(INVALID);
        }
        let known = self.key_of(host);
        let matches = what.ignore_existing_key || known == Some(current);
        match (what.action, known) {
            (RegisterAction::Register, Some(key)) if key != new => return Err(CONFLICT),
            (RegisterAction::Register, Some(_)) => {}
            (RegisterAction::Register, None) => outcome.next.add(*host, new)?,
            (RegisterAction::Unregister, Some(_)) if matches => outcome.leave(host),
            (RegisterAction::Replace, Some(_)) if matches => outcome.next.set_key(host, new),
            // "Without regard to its registration status".
            (RegisterAction::Replace, None) if what.ignore_existing_key => {
                outcome.next.add(*host, new)?
            }
            (RegisterAction::Unregister | RegisterAction::Replace, _) => return Err(CONFLICT),
        }
        outcome.next.count();
        Ok(())
    }

    fn acquire(
        &self,
        host: &HostId,
        kind: ReservationType,
        outcome: &mut Effect,
    ) -> Result<(), StatusCode> {
        match self.held {
            None => outcome.next.held = Some(HeldReservation::by(kind, *host)),
            Some(held) if held.kind == kind && self.holds(host) => {}
            Some(_) => return Err(CONFLICT),
        }
        Ok(())
    }

    /// Returns the other hosts that lost their registration.
    fn preempt(
        &self,
        host: &HostId,
        kind: ReservationType,
        preempt: u64,
        outcome: &mut Effect,
    ) -> Result<Vec<HostId>, StatusCode> {
        let with_key = |r: &Registrant| r.key == preempt;
        let is_other = |r: &Registrant| r.host != *host;
        let next = &mut outcome.next;
        match self.held.map(|held| held.holder) {
            // All hold it, and all others are to go.
            Some(None) if preempt == 0 => {
                next.registrants.retain(|r| !is_other(r));
                next.held = Some(HeldReservation::by(kind, *host));
            }
            // The key names the holder: other hosts with that key go with it. The host that sends
            // the command stays, even if it is the holder.
            Some(Some(holder)) if self.key_of(&holder) == Some(preempt) => {
                next.registrants.retain(|r| !(with_key(r) && is_other(r)));
                next.held = Some(HeldReservation::by(kind, *host));
            }
            Some(Some(_)) if preempt == 0 => return Err(INVALID),
            // Registrations only, of any host.
            _ => {
                if !self.registrants.iter().any(with_key) {
                    return Err(CONFLICT);
                }
                next.registrants.retain(|r| !with_key(r));
                if next.registrants.is_empty() {
                    next.held = None;
                }
            }
        }
        next.count();
        let left = |r: &&Registrant| next.key_of(&r.host).is_none() && is_other(r);
        let gone: Vec<HostId> = self
            .registrants
            .iter()
            .filter(left)
            .map(|r| r.host)
            .collect();
        let changed = match (self.held, next.held) {
            (Some(before), Some(after)) => before.kind != after.kind,
            _ => false,
        };
        let told = gone.iter().map(|h| (*h, Notice::RegistrationPreempted));
        outcome.notices.extend(told);
        if changed {
            outcome.tell_others(host, Notice::Released);
        }
        Ok(gone)
    }

    fn release(
        &self,
        host: &HostId,
        kind: Option<ReservationType>,
        outcome: &mut Effect,
    ) -> Result<(), StatusCode> {
        let Some(held) = self.held.filter(|_| self.holds(host)) else {
            return Ok(());
        };
        if Some(held.kind) != kind {
            return Err(INVALID);
        }
        outcome.next.held = None;
        if is_for_registrants(held.kind) {
            outcome.tell_others(host, Notice::Released);
        }
        Ok(())
    }

    fn add(&mut self, host: HostId, key: u64) -> Result<(), StatusCode> {
        if self.registrants.len() >= MAX_REGISTRANTS {
            // Another time there may be room.
            return Err(StatusCode::INSUFFICIENT_RESOURCES);
        }
        self.registrants.push(Registrant { host, key });
        Ok(())
    }

    fn set_key(&mut self, host: &HostId, key: u64) {
        for registrant in self.registrants.iter_mut().filter(|r| r.host == *host) {
            registrant.key = key;
        }
    }

    fn count(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }
}

impl Effect {
    /// Notifies every remaining registrant except one.
    fn tell_others(&mut self, host: &HostId, notice: Notice) {
        let others = self.next.registrants.iter().filter(|r| r.host != *host);
        self.notices.extend(others.map(|r| (r.host, notice)));
    }

    /// Unregisters a host. The reservation ends if the host alone holds it.
    fn leave(&mut self, host: &HostId) {
        self.next.registrants.retain(|r| r.host != *host);
        let Some(held) = self.next.held else { return };
        match held.holder {
            Some(holder) if holder == *host => {
                self.next.held = None;
                if is_for_registrants(held.kind) {
                    self.tell_others(host, Notice::Released);
                }
            }
            None if self.next.registrants.is_empty() => self.next.held = None,
            _ => {}
        }
    }
}
