//! Goal: every reservation command has the outcome and the status that the specification requires,
//! and each host has the access that follows from it.
//!
//! Method: each rule by itself, and (in `model.rs`) random commands of four hosts against a model.

mod model;

use std::sync::Arc;

use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::commands::reservation::ReservationType::*;
use nacre_nvmf_wire::commands::reservation::{
    Acquire, AcquireAction, PersistChange, Register, RegisterAction, Release, ReleaseAction,
    ReservationType,
};
use nacre_nvmf_wire::features::ReservationMask;
use nacre_nvmf_wire::log::ReservationNotification;

use super::report::report;
use super::state::{
    Change, Effect, HostId, MAX_REGISTRANTS, Notice, Registrant, ReservationState, Rights,
    is_all_registrants,
};
use super::{
    Decision, HeldReservation, MAX_NOTICES, NoticeLog, Reservation, Reservations, RightsCache,
};
use crate::subsystems::GroupHandle;

const A: HostId = [0xa; 16];
const B: HostId = [0xb; 16];
const C: HostId = [0xc; 16];
const CONFLICT: StatusCode = StatusCode::RESERVATION_CONFLICT.with_dnr();
const INVALID: StatusCode = StatusCode::INVALID_FIELD.with_dnr();
const KINDS: [ReservationType; 6] = [
    WriteExclusive,
    ExclusiveAccess,
    WriteExclusiveRegistrantsOnly,
    ExclusiveAccessRegistrantsOnly,
    WriteExclusiveAllRegistrants,
    ExclusiveAccessAllRegistrants,
];

fn register_as(
    action: RegisterAction,
    ignore: bool,
    persist: PersistChange,
    current: u64,
    new: u64,
) -> Change {
    let what = Register {
        action,
        ignore_existing_key: ignore,
        persist,
    };
    Change::Register { what, current, new }
}

fn register(new: u64) -> Change {
    register_as(RegisterAction::Register, false, PersistChange::Keep, 0, new)
}

fn unregister(current: u64) -> Change {
    let action = RegisterAction::Unregister;
    register_as(action, false, PersistChange::Keep, current, 0)
}

fn replace(current: u64, new: u64) -> Change {
    let action = RegisterAction::Replace;
    register_as(action, false, PersistChange::Keep, current, new)
}

fn acquire_as(action: AcquireAction, kind: ReservationType, current: u64, preempt: u64) -> Change {
    let what = Acquire {
        action,
        ignore_existing_key: false,
        kind,
    };
    Change::Acquire {
        what,
        current,
        preempt,
    }
}

fn acquire(kind: ReservationType, current: u64) -> Change {
    acquire_as(AcquireAction::Acquire, kind, current, 0)
}

fn preempt(kind: ReservationType, current: u64, key: u64) -> Change {
    acquire_as(AcquireAction::Preempt, kind, current, key)
}

fn release_as(action: ReleaseAction, kind: Option<ReservationType>, current: u64) -> Change {
    let what = Release {
        action,
        ignore_existing_key: false,
        kind,
    };
    Change::Release { what, current }
}

fn release(kind: ReservationType, current: u64) -> Change {
    release_as(ReleaseAction::Release, Some(kind), current)
}

fn clear(current: u64) -> Change {
    release_as(ReleaseAction::Clear, None, current)
}

/// Carries out one command that must succeed.
fn step(state: &mut ReservationState, host: HostId, command: Change) -> Effect {
    let outcome = state.decide(&host, &command, true).unwrap();
    assert_eq!(outcome.next.clone().checked().as_ref(), Ok(&outcome.next));
    *state = outcome.next.clone();
    outcome
}

/// The commands in turn, each of which must succeed.
fn after(commands: &[(HostId, Change)]) -> ReservationState {
    let mut state = ReservationState::default();
    for (host, command) in commands {
        step(&mut state, *host, *command);
    }
    state
}

fn refused(state: &ReservationState, host: HostId, command: Change) -> StatusCode {
    state.decide(&host, &command, true).unwrap_err()
}

fn hosts(state: &ReservationState) -> Vec<(HostId, u64)> {
    state.registrants.iter().map(|r| (r.host, r.key)).collect()
}

#[test]
fn registering() {
    let mut state = after(&[(A, register(1)), (B, register(1))]);
    assert_eq!(hosts(&state), [(A, 1), (B, 1)], "keys need not differ");
    assert_eq!(state.generation, 2);
    assert_eq!(
        refused(&state, A, register(2)),
        CONFLICT,
        "Replace is for that"
    );
    assert_eq!(refused(&state, C, register(0)), INVALID);
    step(&mut state, A, register(1));
    assert_eq!(
        (hosts(&state).len(), state.generation),
        (2, 3),
        "again, with its key"
    );

    assert_eq!(refused(&state, A, replace(9, 2)), CONFLICT);
    assert_eq!(refused(&state, A, replace(1, 0)), INVALID);
    assert_eq!(
        refused(&state, C, replace(0, 2)),
        CONFLICT,
        "not registered"
    );
    step(&mut state, A, replace(1, 2));
    let any = |action, new| register_as(action, true, PersistChange::Keep, 77, new);
    step(&mut state, B, any(RegisterAction::Replace, 3));
    step(&mut state, C, any(RegisterAction::Replace, 4));
    assert_eq!(hosts(&state), [(A, 2), (B, 3), (C, 4)]);
    assert_eq!(
        refused(&state, A, any(RegisterAction::Register, 9)),
        CONFLICT,
        "Register looks at no current key, so none can be ignored"
    );

    assert_eq!(refused(&state, A, unregister(1)), CONFLICT);
    step(&mut state, A, unregister(2));
    step(&mut state, B, any(RegisterAction::Unregister, 0));
    assert_eq!(hosts(&state), [(C, 4)]);
    assert_eq!(
        refused(&state, A, unregister(2)),
        CONFLICT,
        "not registered"
    );
    assert_eq!(state.generation, 8);
}

#[test]
fn registrants_are_bounded() {
    let mut state = ReservationState::default();
    let host = |n: usize| {
        let mut id = [1; 16];
        id[..8].copy_from_slice(&(n as u64).to_le_bytes());
        id
    };
    for n in 0..MAX_REGISTRANTS {
        step(&mut state, host(n), register(n as u64 + 1));
    }
    let full = StatusCode::INSUFFICIENT_RESOURCES;
    assert_eq!(refused(&state, A, register(1)), full);
    let ignoring = register_as(RegisterAction::Replace, true, PersistChange::Keep, 0, 1);
    assert_eq!(refused(&state, A, ignoring), full);
    step(&mut state, host(7), unregister(8));
    step(&mut state, A, register(1));
    assert_eq!(report(&state, true).len(), 64 + 64 * MAX_REGISTRANTS);
}

#[test]
fn acquiring() {
    for kind in KINDS {
        let two = after(&[(A, register(1)), (B, register(2))]);
        assert_eq!(
            refused(&two, C, acquire(kind, 1)),
            CONFLICT,
            "not registered"
        );
        assert_eq!(
            refused(&two, A, acquire(kind, 2)),
            CONFLICT,
            "another's key"
        );
        let mut state = two.clone();
        step(&mut state, A, acquire(kind, 1));
        assert_eq!(state.generation, 2, "Acquire is not counted");
        step(&mut state, A, acquire(kind, 1));
        let all = is_all_registrants(kind);
        let second = state.decide(&B, &acquire(kind, 2), true).map(drop);
        assert_eq!(second.is_ok(), all, "{kind:?}: all hold it, or one");
        for other in KINDS.into_iter().filter(|other| *other != kind) {
            assert_eq!(refused(&state, A, acquire(other, 1)), CONFLICT, "{other:?}");
        }
        let ignoring = Acquire {
            action: AcquireAction::Acquire,
            ignore_existing_key: true,
            kind,
        };
        let ignoring = Change::Acquire {
            what: ignoring,
            current: 1,
            preempt: 0,
        };
        assert_eq!(refused(&two, A, ignoring), INVALID, "IEKEY as of NVMe 1.3");
    }
}

#[test]
fn rights() {
    use Rights::{None as Nothing, Read, ReadWrite};
    let free = after(&[(A, register(1))]);
    assert_eq!((free.rights(&A), free.rights(&C)), (ReadWrite, ReadWrite));
    for (kind, holder, registrant, other) in [
        (WriteExclusive, ReadWrite, Read, Read),
        (ExclusiveAccess, ReadWrite, Nothing, Nothing),
        (WriteExclusiveRegistrantsOnly, ReadWrite, ReadWrite, Read),
        (
            ExclusiveAccessRegistrantsOnly,
            ReadWrite,
            ReadWrite,
            Nothing,
        ),
        (WriteExclusiveAllRegistrants, ReadWrite, ReadWrite, Read),
        (ExclusiveAccessAllRegistrants, ReadWrite, ReadWrite, Nothing),
    ] {
        let state = after(&[(A, register(1)), (B, register(2)), (A, acquire(kind, 1))]);
        assert_eq!(state.rights(&A), holder, "{kind:?}");
        assert_eq!(state.rights(&B), registrant, "{kind:?}");
        assert_eq!(state.rights(&C), other, "{kind:?}");
    }
}

/// A host that gives up its registration gives up its reservation, and hosts that lose rights by
/// that are notified.
#[test]
fn holders_that_leave() {
    for kind in KINDS {
        let start = [(A, register(1)), (B, register(2)), (A, acquire(kind, 1))];
        let mut state = after(&start);
        let left = step(&mut state, A, unregister(1));
        let all = is_all_registrants(kind);
        assert_eq!(state.held.is_some(), all, "{kind:?}");
        let registrants_only = matches!(
            kind,
            WriteExclusiveRegistrantsOnly | ExclusiveAccessRegistrantsOnly
        );
        let told = if registrants_only {
            vec![(B, Notice::Released)]
        } else {
            vec![]
        };
        assert_eq!(left.notices, told, "{kind:?}");
        step(&mut state, B, unregister(2));
        assert_eq!(state.held, None, "nobody is left to hold it");
        let mut state = after(&start);
        step(&mut state, B, unregister(2));
        assert!(state.holds(&A), "another left");
    }
}

#[test]
fn releasing() {
    for kind in KINDS {
        let mut state = after(&[(A, register(1)), (B, register(2))]);
        step(&mut state, A, release(kind, 1));
        step(&mut state, A, acquire(kind, 1));
        assert_eq!(refused(&state, A, release(kind, 2)), CONFLICT);
        assert_eq!(refused(&state, C, release(kind, 1)), CONFLICT);
        let wrong = KINDS.into_iter().find(|k| *k != kind).unwrap();
        assert_eq!(refused(&state, A, release(wrong, 1)), INVALID);
        let all = is_all_registrants(kind);
        if !all {
            let held = state.clone();
            step(&mut state, B, release(kind, 2));
            assert_eq!(state, held, "not the holder: nothing happens");
        }
        let done = step(&mut state, A, release(kind, 1));
        assert_eq!((state.held, state.generation), (None, 2));
        let alone = matches!(kind, WriteExclusive | ExclusiveAccess);
        assert_eq!(done.notices.is_empty(), alone, "{kind:?}");
        assert_eq!(hosts(&state).len(), 2);
        let ignoring = Release {
            action: ReleaseAction::Release,
            ignore_existing_key: true,
            kind: Some(kind),
        };
        let ignoring = Change::Release {
            what: ignoring,
            current: 1,
        };
        assert_eq!(refused(&state, A, ignoring), INVALID);
    }
}

#[test]
fn clearing() {
    let start = [
        (A, register(1)),
        (B, register(2)),
        (C, register(3)),
        (A, acquire(ExclusiveAccess, 1)),
    ];
    let mut state = after(&start);
    assert_eq!(refused(&state, B, clear(1)), CONFLICT);
    let done = step(&mut state, B, clear(2));
    assert_eq!(
        (hosts(&state), state.held, state.generation),
        (vec![], None, 4)
    );
    assert_eq!(
        done.notices,
        [(A, Notice::Preempted), (C, Notice::Preempted)]
    );
}

#[test]
fn preempting() {
    let three = [(A, register(1)), (B, register(2)), (C, register(3))];
    // Nothing is reserved: registrations go, one's own too.
    let mut state = after(&three);
    let done = step(&mut state, A, preempt(WriteExclusive, 1, 2));
    assert_eq!((hosts(&state), state.held), (vec![(A, 1), (C, 3)], None));
    assert_eq!(done.notices, [(B, Notice::RegistrationPreempted)]);
    assert!(done.aborted.is_empty(), "only if asked to");
    assert_eq!(
        refused(&state, A, preempt(WriteExclusive, 1, 2)),
        CONFLICT,
        "nobody has it"
    );
    assert_eq!(refused(&state, A, preempt(WriteExclusive, 1, 0)), CONFLICT);
    let done = step(&mut state, A, preempt(WriteExclusive, 1, 1));
    assert_eq!((hosts(&state), done.notices), (vec![(C, 3)], vec![]));

    // The holder's key: the reservation changes hands.
    let mut state = after(&three);
    step(&mut state, A, acquire(WriteExclusive, 1));
    let generation = state.generation;
    assert_eq!(refused(&state, B, preempt(ExclusiveAccess, 2, 0)), INVALID);
    assert_eq!(refused(&state, B, preempt(ExclusiveAccess, 2, 9)), CONFLICT);
    let done = step(&mut state, B, preempt(ExclusiveAccess, 2, 1));
    assert_eq!(hosts(&state), [(B, 2), (C, 3)]);
    let held = HeldReservation {
        kind: ExclusiveAccess,
        holder: Some(B),
    };
    assert_eq!((state.held, state.generation), (Some(held), generation + 1));
    let told = [(A, Notice::RegistrationPreempted), (C, Notice::Released)];
    assert_eq!(done.notices, told, "the type changed");
    // The same type: no other host loses anything.
    let done = step(&mut state, C, preempt(ExclusiveAccess, 3, 2));
    assert_eq!(done.notices, [(B, Notice::RegistrationPreempted)]);

    // Another registrant's key: the reservation stays.
    let mut state = after(&three);
    step(&mut state, A, acquire(WriteExclusive, 1));
    step(&mut state, A, preempt(ExclusiveAccess, 1, 2));
    assert!(state.holds(&A) && state.held.unwrap().kind == WriteExclusive);
    assert_eq!(hosts(&state), [(A, 1), (C, 3)]);

    // The holder preempts itself: the type changes, the registration stays.
    let done = step(&mut state, A, preempt(ExclusiveAccess, 1, 1));
    assert!(state.holds(&A) && state.held.unwrap().kind == ExclusiveAccess);
    assert_eq!(done.notices, [(C, Notice::Released)]);

    // HeldReservation by all: zero names all others, a key those who have it.
    let mut state = after(&three);
    step(&mut state, A, acquire(WriteExclusiveAllRegistrants, 1));
    let mut other = state.clone();
    step(&mut state, B, preempt(ExclusiveAccess, 2, 0));
    assert_eq!(hosts(&state), [(B, 2)]);
    assert!(state.holds(&B) && state.held.unwrap().kind == ExclusiveAccess);
    step(&mut other, B, preempt(ExclusiveAccess, 2, 1));
    assert_eq!(hosts(&other), [(B, 2), (C, 3)]);
    assert_eq!(other.held.unwrap().kind, WriteExclusiveAllRegistrants);
    step(&mut other, B, preempt(ExclusiveAccess, 2, 3));
    step(&mut other, B, preempt(ExclusiveAccess, 2, 2));
    assert_eq!((hosts(&other), other.held), (vec![], None), "the last one");
}

#[test]
fn preempting_and_aborting() {
    let mut state = after(&[
        (A, register(1)),
        (B, register(1)),
        (C, register(3)),
        (A, acquire(WriteExclusive, 1)),
    ]);
    let abort = acquire_as(AcquireAction::PreemptAndAbort, WriteExclusive, 3, 1);
    let done = step(&mut state, C, abort);
    assert_eq!(done.aborted, [A, B]);
    let own = acquire_as(AcquireAction::PreemptAndAbort, WriteExclusive, 3, 3);
    assert!(
        step(&mut state, C, own).aborted.is_empty(),
        "never one's own"
    );
}

#[test]
fn persistence() {
    let set = |persist| register_as(RegisterAction::Register, false, persist, 0, 1);
    let state = ReservationState::default();
    let cannot = state.decide(&A, &set(PersistChange::Set), false);
    assert_eq!(cannot, Err(INVALID));
    assert_eq!(
        state.decide(&A, &Change::Persist(true), false),
        Err(INVALID)
    );
    assert!(state.decide(&A, &set(PersistChange::Clear), false).is_ok());
    let mut state = after(&[(A, set(PersistChange::Set))]);
    assert!(state.ptpl);
    step(&mut state, A, register(1));
    assert!(state.ptpl, "kept");
    assert_eq!(
        refused(
            &state,
            A,
            register_as(RegisterAction::Replace, false, PersistChange::Clear, 9, 2)
        ),
        CONFLICT
    );
    assert!(state.ptpl, "a command that fails changes nothing");
    step(&mut state, A, set(PersistChange::Clear));
    assert!(!state.ptpl);
    let generation = state.generation;
    step(&mut state, B, Change::Persist(true));
    assert_eq!((state.ptpl, state.generation), (true, generation));
}

#[test]
fn stored_reservations_are_checked() {
    let with = |hosts: &[(HostId, u64)], held| ReservationState {
        registrants: hosts
            .iter()
            .map(|&(host, key)| Registrant { host, key })
            .collect(),
        held,
        generation: 3,
        ptpl: true,
    };
    let by = |kind, holder| Some(HeldReservation { kind, holder });
    assert!(
        with(&[(A, 1)], by(WriteExclusive, Some(A)))
            .checked()
            .is_ok()
    );
    for damaged in [
        with(&[(A, 1), (A, 2)], None),
        with(&[(A, 0)], None),
        with(&[(A, 1)], by(WriteExclusive, Some(B))),
        with(&[(A, 1)], by(WriteExclusive, None)),
        with(&[(A, 1)], by(WriteExclusiveAllRegistrants, Some(A))),
        with(&[], by(WriteExclusiveAllRegistrants, None)),
    ] {
        assert!(damaged.clone().checked().is_err(), "{damaged:?}");
    }
}

/// Both forms of the report, byte by byte.
#[test]
fn reports() {
    let mut state = after(&[
        (A, register(0x0102)),
        (B, register(0x0304)),
        (B, acquire(ExclusiveAccess, 0x0304)),
        (A, Change::Persist(true)),
    ]);
    let page = report(&state, true);
    assert_eq!(page.len(), 64 + 2 * 64);
    assert_eq!(page[..10], [2, 0, 0, 0, 2, 2, 0, 0, 0, 1]);
    assert!(page[10..64].iter().all(|b| *b == 0));
    assert_eq!(page[64..67], [0xff, 0xff, 0]);
    assert_eq!(page[72..80], [2, 1, 0, 0, 0, 0, 0, 0]);
    assert_eq!(page[80..96], A);
    assert_eq!(page[128..131], [0xff, 0xff, 1], "the holder");
    assert_eq!(page[144..160], B);
    let page = report(&state, false);
    assert_eq!(page.len(), 24 + 2 * 24);
    assert_eq!(page[..10], [2, 0, 0, 0, 2, 2, 0, 0, 0, 1]);
    assert_eq!(page[24..27], [0xff, 0xff, 0]);
    assert_eq!(page[32..40], [0xa; 8]);
    assert_eq!(page[40..48], [2, 1, 0, 0, 0, 0, 0, 0]);
    step(&mut state, B, clear(0x0304));
    assert_eq!(report(&state, true)[..10], [3, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    let all = after(&[
        (A, register(1)),
        (B, register(2)),
        (B, acquire(ExclusiveAccessAllRegistrants, 2)),
    ]);
    let page = report(&all, true);
    assert_eq!((page[66], page[130]), (1, 1), "all hold it");
}

#[test]
fn notices_wait_in_line() {
    let mut log = NoticeLog::default();
    assert_eq!(log.page(false), ReservationNotification::zeroed());
    log.set_mask(2, ReservationMask::RELEASED);
    assert!(!log.add(2, Notice::Released), "masked");
    assert!(log.add(2, Notice::Preempted) && log.add(1, Notice::Released));
    for retain in [true, false] {
        let page = log.page(retain);
        assert_eq!((page.log_page_count.get(), page.nsid.get()), (1, 2));
        assert_eq!((page.log_page_type, page.available), (3, 1), "{retain}");
    }
    let page = log.page(false);
    assert_eq!((page.log_page_count.get(), page.nsid.get()), (2, 1));
    assert_eq!((page.log_page_type, page.available), (2, 0));
    assert!(log.is_empty());
    for _ in 0..MAX_NOTICES + 5 {
        log.add(1, Notice::RegistrationPreempted);
    }
    let page = log.page(false);
    assert_eq!(page.log_page_count.get(), 8, "five were lost: 3 to 7");
    assert_eq!(
        (page.log_page_type, page.available),
        (1, MAX_NOTICES as u8 - 1)
    );
    log.reset();
    assert!(log.is_empty() && log.mask(2).is_empty());
    log.add(1, Notice::Released);
    assert_eq!(
        log.page(false).log_page_count.get(),
        1,
        "counts from the start"
    );
}

/// Cores that decide at the same moment lose nothing of each other's.
#[test]
fn cores_decide_one_after_the_other() {
    const CORES: u8 = 4;
    const HOSTS: u8 = 50;
    let reservation = Reservation::new(Reservations::default());
    std::thread::scope(|scope| {
        for core in 0..CORES {
            let reservation = &reservation;
            scope.spawn(move || {
                let handle = GroupHandle::new(usize::from(core), Arc::new(|| ()));
                for host in 0..HOSTS {
                    let host = [core * HOSTS + host + 1; 16];
                    loop {
                        match reservation.decide(&host, &register(1), &handle) {
                            Decision::Wait => std::thread::yield_now(),
                            Decision::Refused(status) => panic!("{status}"),
                            Decision::Accepted(outcome, store) => {
                                assert!(store.is_none());
                                std::thread::yield_now();
                                reservation.install(outcome.next);
                                break;
                            }
                        }
                    }
                }
            });
        }
    });
    let state = reservation.state().expect("it does not move");
    let all = u32::from(CORES) * u32::from(HOSTS);
    assert_eq!(state.generation, all);
    assert_eq!(state.checked().unwrap().registrants.len(), all as usize);
}

/// Goal: I/O asks for its host's rights once after each change, whatever else is reserved: asking
/// takes a lock that all cores share. Method: many namespaces, used in turn.
#[test]
fn rights_are_read_once_after_each_change() {
    let core = GroupHandle::new(0, Arc::new(|| {}));
    let reserve = |of: &Reservation, command: &Change| match of.decide(&A, command, &core) {
        Decision::Accepted(outcome, None) => of.install(outcome.next),
        _ => panic!("not taken"),
    };
    let all: Vec<Reservation> = (0..40)
        .map(|_| {
            let of = Reservation::new(Reservations::default());
            reserve(&of, &register(7));
            reserve(&of, &acquire(WriteExclusive, 7));
            of
        })
        .collect();
    let asked = std::cell::Cell::new(0);
    let mut cache = RightsCache::default();
    let mut use_all = |need| {
        asked.set(0);
        for (of, nsid) in all.iter().zip(1..) {
            let host = || {
                asked.set(asked.get() + 1);
                B
            };
            assert_eq!(
                cache.allows(of.gate(), nsid, of, host, need),
                need == Rights::Read
            );
        }
        asked.get()
    };
    assert_eq!(use_all(Rights::Read), 40);
    assert_eq!(use_all(Rights::ReadWrite), 0);
    reserve(
        &all[17],
        &register_as(RegisterAction::Replace, true, PersistChange::Keep, 0, 8),
    );
    assert_eq!(use_all(Rights::Read), 1, "of the one that changed");
    assert_eq!(use_all(Rights::Read), 0);
}
