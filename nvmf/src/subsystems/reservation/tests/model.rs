//! Random commands of four hosts against a model that is a table of keys and a set of holders.

use std::collections::{BTreeMap, BTreeSet};

use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::commands::reservation::{
    Acquire, AcquireAction, PersistChange, RegisterAction, Release, ReleaseAction, ReservationType,
};
use proptest::prelude::*;

use super::{CONFLICT, INVALID, KINDS, hosts, register_as};
use crate::subsystems::reservation::state::{Change, HostId, ReservationState, Rights};

/// The model: keys by host, and the hosts that hold it.
#[derive(Debug, Default)]
struct Model {
    keys: BTreeMap<HostId, u64>,
    holders: BTreeSet<HostId>,
    kind: Option<ReservationType>,
    generation: u32,
    ptpl: bool,
}

impl Model {
    fn all(kind: ReservationType) -> bool {
        kind as u8 >= 5
    }

    /// After registrations changed: determines the holder.
    fn choose_holders(&mut self) {
        if self.kind.is_some_and(Self::all) {
            self.holders = self.keys.keys().copied().collect();
        }
        self.holders.retain(|host| self.keys.contains_key(host));
        if self.holders.is_empty() {
            self.kind = None;
        }
    }

    fn take(&mut self, kind: ReservationType, host: HostId) {
        self.kind = Some(kind);
        self.holders = BTreeSet::from([host]);
        self.choose_holders();
    }

    fn run(&mut self, host: HostId, command: Change) -> Result<(), StatusCode> {
        let mine = self.keys.get(&host).copied();
        match command {
            Change::Persist(on) => self.ptpl = on,
            Change::Register { what, current, new } => {
                let knows = mine.is_some() && (what.ignore_existing_key || mine == Some(current));
                let joins = what.ignore_existing_key && mine.is_none();
                match what.action {
                    RegisterAction::Unregister if knows => drop(self.keys.remove(&host)),
                    RegisterAction::Unregister => return Err(CONFLICT),
                    _ if new == 0 => return Err(INVALID),
                    RegisterAction::Register if mine.is_some_and(|key| key != new) => {
                        return Err(CONFLICT);
                    }
                    RegisterAction::Replace if !knows && !joins => return Err(CONFLICT),
                    _ => drop(self.keys.insert(host, new)),
                }
                match what.persist {
                    PersistChange::Keep => {}
                    PersistChange::Clear => self.ptpl = false,
                    PersistChange::Set => self.ptpl = true,
                }
                self.generation += 1;
                self.choose_holders();
            }
            Change::Acquire {
                what,
                current,
                preempt,
            } => {
                if what.ignore_existing_key {
                    return Err(INVALID);
                }
                if mine != Some(current) {
                    return Err(CONFLICT);
                }
                if what.action == AcquireAction::Acquire {
                    return match self.kind {
                        None => {
                            self.take(what.kind, host);
                            Ok(())
                        }
                        Some(kind) if kind == what.kind && self.holders.contains(&host) => Ok(()),
                        Some(_) => Err(CONFLICT),
                    };
                }
                let all = self.kind.is_some_and(Self::all);
                let holder_named = !all
                    && self
                        .holders
                        .iter()
                        .any(|holder| self.keys[holder] == preempt);
                if all && preempt == 0 {
                    self.keys.retain(|other, _| *other == host);
                    self.take(what.kind, host);
                } else if holder_named {
                    self.keys
                        .retain(|other, key| *other == host || *key != preempt);
                    self.take(what.kind, host);
                } else if self.kind.is_some() && preempt == 0 {
                    return Err(INVALID);
                } else if self.keys.values().all(|key| *key != preempt) {
                    return Err(CONFLICT);
                } else {
                    self.keys.retain(|_, key| *key != preempt);
                    self.choose_holders();
                }
                self.generation += 1;
            }
            Change::Release { what, current } => {
                if what.ignore_existing_key {
                    return Err(INVALID);
                }
                if mine != Some(current) {
                    return Err(CONFLICT);
                }
                if what.action == ReleaseAction::Clear {
                    self.keys.clear();
                    self.choose_holders();
                    self.generation += 1;
                } else if self.holders.contains(&host) && self.kind != what.kind {
                    return Err(INVALID);
                } else if self.holders.contains(&host) {
                    self.kind = None;
                    self.holders.clear();
                }
            }
        }
        Ok(())
    }

    fn may(&self, host: &HostId) -> (bool, bool) {
        let Some(kind) = self.kind else {
            return (true, true);
        };
        let number = kind as u8;
        let inside = match number {
            1 | 2 => self.holders.contains(host),
            _ => self.keys.contains_key(host),
        };
        // The types take turns: write exclusive, exclusive access.
        (inside || number % 2 == 1, inside)
    }
}

fn any_command() -> impl Strategy<Value = Change> {
    let kind = proptest::sample::select(KINDS.to_vec());
    let key = 0u64..4;
    let rarely = proptest::bool::weighted(0.1);
    (0u8..10, kind, key.clone(), key, rarely, 0u8..4).prop_map(
        |(what, kind, current, other, ignore, persist)| {
            let persist = match persist {
                0 => PersistChange::Set,
                1 => PersistChange::Clear,
                _ => PersistChange::Keep,
            };
            let register = |action| register_as(action, ignore, persist, current, other);
            let acquire = |action| Change::Acquire {
                what: Acquire {
                    action,
                    ignore_existing_key: ignore,
                    kind,
                },
                current,
                preempt: other,
            };
            let release = |action| Change::Release {
                what: Release {
                    action,
                    ignore_existing_key: ignore,
                    kind: Some(kind),
                },
                current,
            };
            match what {
                0..=2 => register(RegisterAction::Register),
                3 => register(RegisterAction::Unregister),
                4 => register(RegisterAction::Replace),
                5 => acquire(AcquireAction::Acquire),
                6 => acquire(AcquireAction::Preempt),
                7 => acquire(AcquireAction::PreemptAndAbort),
                8 => release(ReleaseAction::Release),
                _ if current == 3 => release(ReleaseAction::Clear),
                _ => Change::Persist(ignore),
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Goal: status, registrants, holders, rights and generation are the model's after every
    /// command; notices go to other hosts only, and to each host that lost something.
    #[test]
    fn as_the_model(steps in proptest::collection::vec((0u8..4, any_command()), 0..60)) {
        let mut state = ReservationState::default();
        let mut model = Model::default();
        for (host, command) in steps {
            let host = [host + 1; 16];
            let before = state.clone();
            let outcome = state.decide(&host, &command, true);
            let expected = model.run(host, command);
            let answered = outcome.as_ref().map(drop).map_err(|status| *status);
            prop_assert_eq!(answered, expected, "{:?} of {:?}", command, host);
            let Ok(outcome) = outcome else { continue };
            state = outcome.next.clone();
            prop_assert_eq!(state.clone().checked(), Ok(state.clone()));
            let keys: BTreeMap<HostId, u64> = hosts(&state).into_iter().collect();
            prop_assert_eq!(&keys, &model.keys);
            prop_assert_eq!(state.held.map(|held| held.kind), model.kind);
            prop_assert_eq!((state.generation, state.ptpl), (model.generation, model.ptpl));
            for host in (1u8..5).map(|n| [n; 16]) {
                prop_assert_eq!(state.holds(&host), model.holders.contains(&host));
                let rights = state.rights(&host);
                let may = (rights >= Rights::Read, rights >= Rights::ReadWrite);
                prop_assert_eq!(may, model.may(&host));
            }
            let told: BTreeSet<HostId> = outcome.notices.iter().map(|(host, _)| *host).collect();
            prop_assert_eq!(told.len(), outcome.notices.len(), "one notice each");
            prop_assert!(!told.contains(&host), "never the host itself");
            for lost in before.registrants.iter().filter(|r| r.host != host) {
                if state.key_of(&lost.host).is_none() {
                    prop_assert!(told.contains(&lost.host), "a registration went unnoticed");
                }
            }
            let lost = |host: &HostId| before.key_of(host).is_some() && state.key_of(host).is_none();
            prop_assert!(outcome.aborted.iter().all(|other| lost(other) && *other != host));
        }
    }
}
