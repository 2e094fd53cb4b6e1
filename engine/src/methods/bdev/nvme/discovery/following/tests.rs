//! Tests of the task of a discovery service.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::config::Settings;
use crate::methods::bdev::nvme::tests::start;
use crate::methods::testing::TestDaemon;
use crate::store::{Record, StateStore, Store, StoreError};

fn place(at: usize) -> SubsystemAddress {
    SubsystemAddress {
        trtype: "TCP",
        adrfam: "IPv4",
        traddr: "127.0.0.1".into(),
        trsvcid: "1".into(),
        subnqn: format!("nqn.2026-01.org.example:{at}"),
    }
}

fn path(at: usize) -> DiscoveredPath {
    DiscoveredPath {
        name: format!("d{at}"),
        place: place(at),
        missing_since: None,
    }
}

/// Goal: a path is gone after the grace, unless it returns or the service is away; attached
/// paths have priority within the limit.
#[test]
fn logs_are_compared() {
    let start = Instant::now();
    let after = |part: f64| start + GRACE.mul_f64(part);
    let attached = || vec![path(0), path(1)];
    let first = compare(attached(), &[place(1), place(2)], false, start);
    assert_eq!((first.new, first.gone), (vec![place(2)], vec![]));
    assert_eq!(first.due, Some(after(1.0)));
    let missing = first.stay;
    assert_eq!(missing[0].missing_since, Some(start));
    let back = compare(missing.clone(), &[place(0), place(1)], false, after(0.9));
    assert_eq!((back.stay, back.due), (attached(), None));
    let away = compare(missing.clone(), &[place(1)], true, after(9.0));
    assert_eq!((away.gone.len(), away.due), (0, Some(after(10.0))));
    let gone = compare(missing.clone(), &[place(1)], false, after(1.0));
    assert_eq!((gone.gone, gone.due), (vec![missing[0].clone()], None));
    let many: Vec<SubsystemAddress> = (2..2 * MAX_PATHS).map(place).collect();
    let full = compare(attached(), &many, false, start);
    assert_eq!(full.stay.len() + full.new.len(), MAX_PATHS);
    assert_eq!(full.new.len() + full.excess.len(), many.len());
}

/// Goal: the grace begins again with the first log of a connection, and only with that one.
#[test]
fn a_connection_begins_the_grace_again() {
    let discovery = Discovery::new("d".into(), place(9), BTreeMap::new());
    let missing = || DiscoveredPath {
        missing_since: Some(Instant::now()),
        ..path(0)
    };
    discovery.listed.borrow_mut().push(missing());
    discovery.log_was_read();
    assert_eq!(*discovery.listed.borrow(), [path(0)]);
    let since = missing();
    discovery.listed.replace(vec![since.clone()]);
    discovery.log_was_read();
    assert_eq!(*discovery.listed.borrow(), std::slice::from_ref(&since));
    discovery.is_current.set(false);
    discovery.log_was_read();
    assert_eq!(*discovery.listed.borrow(), [path(0)]);
}

/// Goal: each of many subsystems gets a name of its own in little time, by one change of the
/// state; the address of a log is never looked up as a name.
#[test]
fn names_and_addresses() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = start(folder.path());
    let place_of_service = place(0);
    let discovery = Discovery::new("d".into(), place_of_service, BTreeMap::new());
    let service = Service {
        engine: Rc::clone(&daemon.engine),
        discovery: Rc::new(discovery),
        params: StartDiscoveryParams::default(),
    };
    let places: Vec<SubsystemAddress> = (0..MAX_PATHS).map(place).collect();
    let begun = Instant::now();
    let names = daemon.run(service.names(&places, &places));
    assert!(
        begun.elapsed() < Duration::from_secs(30),
        "{:?}",
        begun.elapsed()
    );
    let names: HashSet<&String> = names.values().collect();
    assert_eq!(names.len(), MAX_PATHS);

    assert!(!service.discovery.has_unstored_names.get());

    let mut named = place(0);
    named.traddr = "localhost".into();
    let refused = daemon.run(service.attach("d0", &named)).unwrap_err();
    assert_eq!(refused.code, -22, "{refused}");
    assert!(daemon.engine.remotes.find("d0").is_none());
}

/// A store in memory that refuses changes while the flag is set.
struct Failing(Arc<AtomicBool>, Vec<Record>);

impl StateStore for Failing {
    fn load(&mut self) -> Result<Vec<Record>, StoreError> {
        Ok(self.1.clone())
    }

    fn commit(&mut self, _: &Change) -> Result<(), StoreError> {
        if self.0.load(Ordering::Relaxed) {
            Err(StoreError::Gone)
        } else {
            Ok(())
        }
    }
}

/// Goal: names that could not be stored are stored by the next attempt.
#[test]
fn names_are_stored_at_last() {
    let fails = Arc::new(AtomicBool::new(false));
    let store = Failing(Arc::clone(&fails), Vec::new());
    let folder = tempfile::tempdir().unwrap();
    let store = Store::on(store, folder.path());
    let daemon = TestDaemon::with(Settings::default(), Some(store));
    let discovery = Discovery::new("d".into(), place(0), BTreeMap::new());
    let service = Service {
        engine: Rc::clone(&daemon.engine),
        discovery: Rc::new(discovery),
        params: StartDiscoveryParams::default(),
    };
    fails.store(true, Ordering::Relaxed);
    let stored = || daemon.engine.journal.find(&discovery_key("d"));
    let names = daemon.run(service.names(&[place(1)], &[place(1)]));
    assert!(stored().is_none());
    assert!(service.next_attempt().is_some());
    fails.store(false, Ordering::Relaxed);
    assert_eq!(daemon.run(service.names(&[], &[place(1)])), names);
    let params = stored().unwrap().record.params;
    assert_eq!(params["controllers"], serde_json::json!(names));
    assert!(service.next_attempt().is_none());
}

/// Goal: a long log is attached in batches, between which other calls get the lock; refused
/// paths are tried again at growing intervals.
#[test]
fn other_calls_come_between_batches() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = start(folder.path());
    let engine = &daemon.engine;
    let service = Service {
        engine: Rc::clone(engine),
        discovery: Rc::new(Discovery::new("d".into(), place(0), BTreeMap::new())),
        params: StartDiscoveryParams::default(),
    };
    let discovery = Rc::clone(&service.discovery);
    discovery.is_current.set(true);
    // Names are refused, so no path connects.
    let named = |at| SubsystemAddress {
        traddr: "localhost".into(),
        ..place(at)
    };
    let log = Rc::new(DiscoveryLogPage {
        places: (0..3 * BATCH).map(named).collect(),
        referrals: Vec::new(),
    });
    daemon.run(async {
        // The call waits for the lock behind the first batch.
        let held = engine.changing().await;
        let other = async {
            let mut changing = std::pin::pin!(engine.changing());
            assert!(futures_util::poll!(&mut changing).is_pending());
            drop(held);
            drop(changing.await);
            discovery.is_complete.get()
        };
        let (next, was_complete) =
            futures_util::join!(apply(service.clone(), Rc::clone(&log)), other);
        assert!(!was_complete, "the other call waited for all batches");
        let pause = |next: Option<Instant>| next.unwrap() - Instant::now();
        assert!(pause(next) <= AGAIN);
        assert_eq!(discovery.refused.borrow().len(), 3 * BATCH);
        let next = apply(service.clone(), Rc::clone(&log)).await;
        assert!(pause(next) > AGAIN, "{next:?}");
    });
}
