//! Tests of reservations that persist through power loss: stored before the command completes,
//! restored with the namespace.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use nacre_nvmf_wire::commands::admin::{GetFeatures, SetFeatures};
use nacre_nvmf_wire::commands::reservation::{
    PersistChange, Register, RegisterAction, RegisterData, ReservationType,
};
use nacre_nvmf_wire::features::fid;
use nacre_nvmf_wire::identify::nsid;
use nacre_nvmf_wire::log::ReservationNotification;
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Sgl, Sqe, StatusCode};
use parking_lot::Mutex;
use zerocopy::IntoBytes;

use super::super::host::INVALID;
use super::super::rig::*;
use super::{CONFLICT, Host, KEY_A, KEY_B, OK};
use crate::subsystems::reservation::{
    HeldReservation, Registrant, ReservationState, ReservationStore, Reservations, StateLease,
    Ticket,
};
use crate::subsystems::{ClearError, Clearing, NamespaceConfig, NamespaceIds, TargetConfig};

/// Stores each state when the test lets it.
#[derive(Default)]
struct Slow {
    asked: Mutex<Vec<(Option<ReservationState>, Ticket)>>,
    stores_all: AtomicBool,
}

impl ReservationStore for Slow {
    fn store(&self, state: Option<&ReservationState>, ticket: Ticket) {
        self.asked.lock().push((state.cloned(), ticket));
    }

    fn stores_all(&self) -> bool {
        self.stores_all.load(Ordering::Relaxed)
    }
}

/// A lease that a test puts in doubt.
#[derive(Default)]
struct Doubt(AtomicBool);

impl StateLease for Doubt {
    fn is_good(&self) -> bool {
        !self.0.load(Ordering::Relaxed)
    }
}

impl Slow {
    fn take(&self) -> (Option<ReservationState>, Ticket) {
        let mut asked = self.asked.lock();
        assert_eq!(asked.len(), 1, "one at a time");
        asked.pop().unwrap()
    }

    fn is_idle(&self) -> bool {
        self.asked.lock().is_empty()
    }
}

fn rig_stored(stored: Option<ReservationState>) -> (Rig, Arc<Slow>) {
    let rig = Rig::new(TargetConfig::default());
    let store = Arc::new(Slow::default());
    add_stored(&rig, ram(), &store, stored);
    (rig, store)
}

fn add_stored(
    rig: &Rig,
    bdev: Arc<dyn nacre_bdev::Bdev>,
    store: &Arc<Slow>,
    stored: Option<ReservationState>,
) -> u32 {
    let config = NamespaceConfig {
        nsid: None,
        bdev_name: bdev.name().to_string(),
        ids: NamespaceIds::from_uuid(bdev.uuid()),
        backing: backing(bdev),
        ana_group: None,
        auto_visible: true,
        reservations: Reservations {
            store: Some(Arc::clone(store) as Arc<dyn ReservationStore>),
            stored,
        },
    };
    rig.target.add_namespace(&nqn(SUBNQN), config).unwrap()
}

impl Rig {
    fn flush_all(&mut self, host: Host) -> StatusCode {
        let cid = self.cid();
        let flush = Sqe::for_namespace(opcode::FLUSH, cid, nsid::BROADCAST);
        self.status(host.io, flush, &[])
    }

    /// Gets the feature Reservation Persistence.
    fn is_persistent(&mut self, host: Host) -> Result<bool, StatusCode> {
        let cid = self.cid();
        let get = GetFeatures::new(fid::RESERVATION_PERSISTENCE);
        let cqe = self.call(host.admin, get.to_sqe(cid, 1), &[]).cqe;
        match cqe.status() {
            OK => Ok(cqe.dword0() == 1),
            status => Err(status),
        }
    }

    /// Sends a Register that turns persistence on, and leaves it waiting.
    fn persist(&mut self, host: Host) -> u16 {
        self.begin_register(host, PersistChange::Set)
    }

    fn begin_register(&mut self, host: Host, persist: PersistChange) -> u16 {
        let cid = self.cid();
        let register = Register {
            action: RegisterAction::Register,
            ignore_existing_key: false,
            persist,
        };
        let sgl = Sgl::Transport { length: 16 };
        let data = RegisterData {
            crkey: 0.into(),
            nrkey: host.key.into(),
        };
        self.send(host.io, register.to_sqe(cid, 1).with_sgl(sgl), None);
        self.turn();
        self.deliver(data.as_bytes());
        self.turn();
        cid
    }
}

/// Goal: where the namespace may move to another machine, each change is stored before its answer,
/// and the next machine begins with it, but not during a command.
#[test]
fn reservations_move_with_the_namespace() {
    let (mut rig, store) = rig_stored(None);
    store.stores_all.store(true, Ordering::Relaxed);
    let (a, b) = (rig.host(0xa, KEY_A), rig.host(0xb, KEY_B));
    let cid = rig.begin_register(a, PersistChange::Keep);
    let (asked, ticket) = store.take();
    let asked = asked.expect("a state");
    assert_eq!((asked.registrants.len(), asked.ptpl), (1, false));
    let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
    let reservation = Arc::clone(&subsystem.namespaces()[0].namespace.reservation);
    assert!(!reservation.take_over(ReservationState::default(), None));
    ticket.stored();
    rig.turn();
    rig.turn();
    assert_eq!(rig.statuses(), [(cid, OK)]);

    let mut moved = asked;
    moved.held = Some(HeldReservation {
        kind: ReservationType::WriteExclusive,
        holder: Some(moved.registrants[0].host),
    });
    assert!(reservation.take_over(moved, None));
    assert_eq!(rig.write(b), CONFLICT);
    assert_eq!(rig.write(a), OK);
    assert!(reservation.take_over(ReservationState::default(), None));
    assert_eq!(rig.write(b), OK);
}

/// Goal: a machine that does not serve the namespace decides nothing by a reservation that another
/// machine may have changed. Hosts get a status with which they try again.
#[test]
fn an_unknown_reservation_decides_nothing() {
    const TRANSITION: StatusCode = StatusCode::ANA_TRANSITION;
    let mut rig = Rig::new(TargetConfig::default());
    let store = Arc::new(Slow::default());
    store.stores_all.store(true, Ordering::Relaxed);
    add_stored(&rig, ram(), &store, None);
    let (a, b) = (rig.host(0xa, KEY_A), rig.host(0xb, KEY_B));
    let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
    let reservation = Arc::clone(&subsystem.namespaces()[0].namespace.reservation);
    let refused = |rig: &mut Rig| {
        assert!(!reservation.is_known());
        assert_eq!(reservation.state(), None);
        assert_eq!(rig.is_persistent(a), Err(TRANSITION));
        assert_eq!((rig.write(a), rig.write(b)), (TRANSITION, TRANSITION));
        assert_eq!(rig.report(a, 64), Err(TRANSITION));
        assert_eq!(rig.acquire(a, ReservationType::WriteExclusive), TRANSITION);
        assert!(store.is_idle());
    };
    refused(&mut rig);
    assert!(reservation.take_over(ReservationState::default(), None));
    assert_eq!((rig.write(a), rig.write(b)), (OK, OK));
    reservation.leave();
    refused(&mut rig);
    let host = [0xa; 16];
    let held = ReservationState {
        registrants: vec![Registrant { host, key: KEY_A }],
        held: Some(HeldReservation {
            kind: ReservationType::WriteExclusive,
            holder: Some(host),
        }),
        ..ReservationState::default()
    };
    assert!(reservation.take_over(held, None));
    assert_eq!((rig.write(a), rig.write(b)), (OK, CONFLICT));
    assert_eq!(
        reservation.conflicts(),
        1,
        "no refusal without a state counts"
    );
    // A command that is being stored is answered by its outcome.
    let cid = rig.begin_register(b, PersistChange::Keep);
    let (_, ticket) = store.take();
    reservation.leave();
    ticket.stored();
    rig.turn();
    rig.turn();
    assert_eq!(rig.statuses(), [(cid, OK)]);
    refused(&mut rig);
}

/// Goal: a machine whose lease is in doubt answers nothing from a reservation that another machine
/// may have changed: no report, no feature, no conflict, no command without an effect. It goes on
/// when the lease is good again.
#[test]
fn a_lease_in_doubt_answers_nothing() {
    const TRANSITION: StatusCode = StatusCode::ANA_TRANSITION;
    let mut rig = Rig::new(TargetConfig::default());
    let store = Arc::new(Slow::default());
    store.stores_all.store(true, Ordering::Relaxed);
    add_stored(&rig, ram(), &store, None);
    let (a, b) = (rig.host(0xa, KEY_A), rig.host(0xb, KEY_B));
    let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
    let reservation = Arc::clone(&subsystem.namespaces()[0].namespace.reservation);
    let lease = Arc::new(Doubt::default());
    let kind = ReservationType::WriteExclusive;
    let holder = Some([0xa; 16]);
    let held = ReservationState {
        registrants: vec![Registrant {
            host: [0xa; 16],
            key: KEY_A,
        }],
        held: Some(HeldReservation { kind, holder }),
        ..ReservationState::default()
    };
    assert!(reservation.take_over(held.clone(), Some(Arc::clone(&lease) as _)));
    let mut conflicts = 0;
    for is_good in [true, false, true] {
        lease.0.store(!is_good, Ordering::Relaxed);
        let or_transition = |status| if is_good { status } else { TRANSITION };
        assert_eq!(rig.report(a, 64).err(), (!is_good).then_some(TRANSITION));
        assert_eq!(rig.is_persistent(b).ok(), is_good.then_some(false));
        assert_eq!(reservation.state(), is_good.then(|| held.clone()));
        assert_eq!(rig.write(b), or_transition(CONFLICT));
        assert_eq!(rig.flush_all(b), or_transition(CONFLICT));
        conflicts += 2 * u64::from(is_good);
        assert_eq!(reservation.conflicts(), conflicts, "only conflicts count");
        assert_eq!(rig.acquire(b, kind), or_transition(CONFLICT));
        assert_eq!(rig.acquire(a, kind), or_transition(OK), "it has it already");
        assert_eq!(rig.write(a), OK, "the device decides");
    }
    assert!(store.is_idle(), "no command had an effect");

    // A command that a node could not store, because its lease is over.
    let cid = rig.begin_register(b, PersistChange::Keep);
    lease.0.store(true, Ordering::Relaxed);
    store.take().1.failed();
    rig.turn();
    rig.turn();
    assert_eq!(rig.statuses(), [(cid, TRANSITION)]);
}

/// Goal: the administrator clears a reservation after its state is stored. Every registrant is
/// notified, a host's command waits meanwhile, and a failure of the store changes nothing.
#[test]
fn the_administrator_clears_a_reservation() {
    let (mut rig, store) = rig_stored(None);
    let (a, b) = (rig.host(0xa, KEY_A), rig.host(0xb, KEY_B));
    let cid = rig.persist(a);
    store.take().1.stored();
    rig.turn();
    rig.turn();
    assert_eq!(rig.statuses(), [(cid, OK)]);
    let kind = ReservationType::ExclusiveAccess;
    let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
    let reservation = Arc::clone(&subsystem.namespaces()[0].namespace.reservation);
    let mut held = reservation.state().unwrap();
    held.held = Some(HeldReservation {
        kind,
        holder: Some([0xa; 16]),
    });
    assert!(reservation.take_over(held.clone(), None));
    assert_eq!((rig.write(a), rig.write(b)), (OK, CONFLICT));
    let clear = |seen: Option<ReservationState>| {
        let of = (1, Arc::clone(&reservation));
        Clearing::new(Arc::clone(&subsystem), of, seen, Arc::new(|| {}))
    };
    let now = held.generation;
    let registered = ReservationState {
        generation: now.wrapping_sub(1),
        ..held.clone()
    };
    // Before an Acquire, which the generation does not count.
    let acquired = ReservationState {
        held: None,
        ..held.clone()
    };
    for former in [registered, acquired] {
        let seen = former.generation;
        let refused = clear(Some(former)).poll();
        assert_eq!(refused, Some(Err(ClearError::Changed { seen, now })));
    }

    let mut failing = clear(Some(held.clone()));
    assert_eq!(failing.poll(), None);
    let (asked, ticket) = store.take();
    let asked = asked.expect("it persists");
    assert_eq!((asked.registrants.len(), asked.held), (0, None));
    let waiting = rig.begin_register(b, PersistChange::Keep);
    assert!(rig.statuses().is_empty() && store.is_idle());
    ticket.failed();
    assert_eq!(failing.poll(), Some(Err(ClearError::NotStored)));
    rig.turn();
    store.take().1.stored();
    rig.turn();
    rig.turn();
    assert_eq!(rig.statuses(), [(waiting, OK)]);
    assert_eq!(rig.write(b), CONFLICT, "as before");

    let mut clearing = clear(None);
    assert_eq!(clearing.poll(), None);
    store.take().1.stored();
    let former = clearing.poll().unwrap().unwrap();
    assert_eq!((former.registrants.len(), former.held), (2, held.held));
    drop(clearing);
    assert_eq!((rig.write(a), rig.write(b)), (OK, OK));
    for host in [a, b] {
        let notice = rig.notice(host, false);
        assert_eq!(notice.log_page_type, ReservationNotification::PREEMPTED);
        assert_eq!(notice.nsid.get(), 1);
    }
    assert_eq!(clear(None).poll(), Some(Err(ClearError::Nothing)));
    reservation.leave();
    assert_eq!(clear(None).poll(), Some(Err(ClearError::Elsewhere)));
}

/// Goal: removals that wait for another one are all woken, and each ends. Method: three removals;
/// the store fails for the first and saves the second. A waiting one polls twice.
#[test]
fn removals_that_wait_are_all_woken() {
    let (rig, store) = rig_stored(Some(ReservationState {
        registrants: vec![Registrant {
            host: [0xa; 16],
            key: KEY_A,
        }],
        held: None,
        generation: 1,
        ptpl: true,
    }));
    let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
    let reservation = Arc::clone(&subsystem.namespaces()[0].namespace.reservation);
    let clear = |seen: Option<ReservationState>| {
        let wakes = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&wakes);
        let wake = Arc::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        let of = (1, Arc::clone(&reservation));
        let clearing = Clearing::new(Arc::clone(&subsystem), of, seen, wake);
        (clearing, move || wakes.load(Ordering::Relaxed))
    };
    let seen = reservation.state().unwrap();
    let (mut first, _) = clear(None);
    let (mut second, second_wakes) = clear(None);
    let (mut third, third_wakes) = clear(Some(seen));
    assert_eq!(first.poll(), None);
    let (_, ticket) = store.take();
    for _ in 0..2 {
        assert_eq!((second.poll(), third.poll()), (None, None));
    }
    assert!(store.is_idle(), "one at a time");
    assert_eq!((second_wakes(), third_wakes()), (0, 0));
    ticket.failed();
    assert_eq!(first.poll(), Some(Err(ClearError::NotStored)));
    assert_eq!((second_wakes(), third_wakes()), (1, 1));

    assert_eq!((second.poll(), third.poll()), (None, None));
    store.take().1.stored();
    let former = second.poll().unwrap().unwrap();
    assert_eq!(former.registrants.len(), 1);
    assert_eq!(third_wakes(), 2);
    let changed = ClearError::Changed { seen: 1, now: 2 };
    assert_eq!(third.poll(), Some(Err(changed)));
    assert!(store.is_idle());
}

/// Goal: a command whose outcome persists is applied and answered when it is kept; commands after
/// it wait; one that cannot be kept has changed nothing.
#[test]
fn persistent_outcomes_are_stored_before_the_answer() {
    let (mut rig, store) = rig_stored(None);
    let (a, b) = (rig.host(0xa, KEY_A), rig.host(0xb, KEY_B));
    assert_eq!(rig.identify_namespace(a.admin, 1).rescap, 0xff);
    let cid = rig.persist(a);
    let (asked, ticket) = store.take();
    let asked = asked.expect("something to keep");
    assert_eq!(asked.registrants.len(), 1);
    assert!(asked.ptpl);
    let second = rig.persist(b);
    for _ in 0..4 {
        rig.turn();
    }
    assert!(rig.answers().is_empty() && store.is_idle(), "one at a time");
    assert_eq!(rig.report(a, 64).unwrap()[5], 0, "not yet");
    ticket.stored();
    rig.turn();
    rig.turn();
    let done = rig.statuses();
    assert_eq!(done, [(cid, OK)]);
    let (asked, ticket) = store.take();
    assert_eq!(asked.map(|state| state.registrants.len()), Some(2));
    ticket.failed();
    rig.turn();
    rig.turn();
    let done = rig.statuses();
    assert_eq!(done, [(second, StatusCode::INTERNAL_ERROR)]);
    assert_eq!(rig.report(a, 64).unwrap()[5], 1, "as before");

    // The feature shows the same, and clears the stored state.
    let feature = fid::RESERVATION_PERSISTENCE;
    let get = GetFeatures::new(feature);
    let now = rig.cid();
    assert_eq!(rig.call(b.admin, get.to_sqe(now, 1), &[]).cqe.dword0(), 1);
    let set = SetFeatures::new(feature, 0);
    let cid = rig.cid();
    rig.send(b.admin, set.to_sqe(cid, nsid::BROADCAST), None);
    rig.turn();
    let (asked, ticket) = store.take();
    assert_eq!(asked, None, "nothing is to be kept any more");
    // A promise that is dropped is a failure.
    drop(ticket);
    rig.turn();
    assert_eq!(rig.answer().cqe.status(), StatusCode::INTERNAL_ERROR);
    let cid = rig.cid();
    rig.send(b.admin, set.to_sqe(cid, 1), None);
    rig.turn();
    store.take().1.stored();
    rig.turn();
    assert_eq!(rig.answer().cqe.status(), OK);
    let now = rig.cid();
    assert_eq!(rig.call(b.admin, get.to_sqe(now, 1), &[]).cqe.dword0(), 0);
    rig.register(b);
    assert!(store.is_idle(), "nothing persists, nothing is kept");
    let mut saved = SetFeatures::new(feature, 1);
    saved.save = true;
    for (set, nsid, expected) in [
        (saved, 1, StatusCode::FEATURE_NOT_SAVEABLE.with_dnr()),
        (SetFeatures::new(feature, 2), 1, INVALID),
        (
            SetFeatures::new(feature, 1),
            9,
            StatusCode::INVALID_NAMESPACE_OR_FORMAT.with_dnr(),
        ),
    ] {
        let cid = rig.cid();
        assert_eq!(rig.status(b.admin, set.to_sqe(cid, nsid), &[]), expected);
    }
}

/// A host that leaves while its command is being kept: the command is carried through, and those
/// of others go on.
#[test]
fn a_host_leaves_while_its_command_is_kept() {
    let (mut rig, store) = rig_stored(None);
    let (a, b) = (rig.host(0xa, KEY_A), rig.host(0xb, KEY_B));
    rig.persist(a);
    let cid = rig.persist(b);
    rig.hang_up(a.io);
    store.take().1.stored();
    rig.turn();
    rig.turn();
    let (asked, ticket) = store.take();
    assert_eq!(asked.map(|state| state.registrants.len()), Some(2));
    ticket.stored();
    rig.turn();
    let done = rig.statuses();
    assert_eq!(done, [(cid, OK)]);
}

/// The stored state is in force from the first command on. A device that goes and comes back finds
/// its reservation; a removed namespace does not.
#[test]
fn stored_reservations_are_in_force_again() {
    let stored = ReservationState {
        registrants: vec![Registrant {
            host: [0xa; 16],
            key: KEY_A,
        }],
        held: Some(HeldReservation {
            kind: ReservationType::ExclusiveAccess,
            holder: Some([0xa; 16]),
        }),
        generation: 41,
        ptpl: true,
    };
    let (mut rig, store) = rig_stored(Some(stored));
    let (a, b) = (rig.host(0xa, KEY_A), rig.host(0xb, KEY_B));
    assert_eq!(rig.write(b), CONFLICT);
    assert_eq!(rig.write(a), OK);
    assert_eq!(rig.report(b, 64).unwrap()[..6], [41, 0, 0, 0, 2, 1]);

    let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
    let entry = subsystem.namespaces()[0].clone();
    let again = || NamespaceConfig {
        nsid: Some(1),
        bdev_name: entry.bdev_name.clone(),
        ids: entry.namespace.ids,
        backing: entry.namespace.backing.clone(),
        ana_group: None,
        auto_visible: true,
        reservations: Reservations {
            store: Some(Arc::clone(&store) as Arc<dyn ReservationStore>),
            stored: None,
        },
    };
    assert_eq!(subsystem.bdev_removed(&entry.bdev_name), [1]);
    rig.pass(std::time::Duration::from_millis(200));
    subsystem.add_namespace(again()).unwrap();
    assert_eq!(rig.write(b), CONFLICT, "the device was away, no more");
    subsystem.bdev_removed(&entry.bdev_name);
    subsystem.forget_reservation(1);
    subsystem.add_namespace(again()).unwrap();
    assert_eq!(rig.write(b), OK, "it was given up in the meantime");
    subsystem.remove_namespace(1).unwrap();
    subsystem.add_namespace(again()).unwrap();
    assert_eq!(rig.write(b), OK);
}
