//! The conformance tests of [`VolumeStore`]. Each implementation runs them with a function that
//! makes an empty store.
//!
//! Versions decide which swap wins, names and ids belong to one volume, order is that of creation,
//! a conflict reports the stored version, and acknowledged changes survive closing and reopening
//! the store.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use uuid::Uuid;

use super::{StoreError, VolumeStore};
use crate::model::{KeptLimits, ReplicaRecord, ReplicaState, Settings, Stamp, VolumeRecord};

/// A store under test.
pub trait Subject {
    fn store(&self) -> Arc<dyn VolumeStore>;

    /// Closes the store and reopens it with its durable state. No handle of [`Subject::store`]
    /// exists any longer.
    fn reopen(&mut self);
}

/// # Panics
/// When the store breaks a rule.
pub fn run<S: Subject>(mut make: impl FnMut() -> S) {
    create_load_list(&mut make());
    uniqueness(&mut make());
    swaps(&mut make());
    renames(&mut make());
    deletes(&mut make());
    one_swap_wins(&mut make());
    make_no_promise_when_dropped(&mut make());
}

/// A record for tests: its name, and everything else derived from it.
pub fn record(name: &str) -> VolumeRecord {
    let mut id = [0x40; 16];
    for (place, byte) in id.iter_mut().zip(name.bytes()) {
        *place = byte;
    }
    let replica = |slot, state| ReplicaRecord {
        id: Uuid::from_bytes([0xb0 + slot; 16]),
        slot,
        device: format!("{name}-{slot}"),
        node: None,
        node_device: None,
        state,
        cut: false,
        replaces: None,
        offline: slot == 2,
        why: (slot > 0).then(|| "it went \"away\"".to_owned()),
    };
    let last_label = Stamp {
        epoch: 1,
        revision: u64::MAX,
    };
    VolumeRecord {
        id: Uuid::from_bytes(id),
        name: name.to_owned(),
        block_size: 4096,
        blocks: 1 << 40,
        region_shift: 22,
        epoch: 1,
        serving: 0,
        revision: 1,
        holder: Some(Uuid::from_bytes([7; 16])),
        replicas: vec![
            replica(0, ReplicaState::InSync),
            replica(1, ReplicaState::Out { last_label }),
            replica(
                2,
                ReplicaState::Filling {
                    watermark: 77,
                    last_label: Stamp {
                        epoch: 1,
                        revision: 2,
                    },
                },
            ),
        ],
        settings: Settings::default(),
        limits: Some(KeptLimits {
            max_blocks: 256,
            max_unmap_blocks: u64::MAX,
            atomic_blocks: 1,
            zero_copy_blocks: 0,
            read_only: false,
        }),
        restored: None,
        origin: None,
    }
}

/// The record one revision later.
fn next(record: &VolumeRecord) -> VolumeRecord {
    VolumeRecord {
        revision: record.revision + 1,
        ..record.clone()
    }
}

/// Waits for a future of a store on this thread, whichever thread completes it.
pub fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

fn list(subject: &dyn Subject) -> Vec<VolumeRecord> {
    block_on(subject.store().list()).expect("a list")
}

fn create(subject: &dyn Subject, names: &[&str]) -> Vec<VolumeRecord> {
    let make = |name: &&str| {
        block_on(subject.store().create(record(name))).expect("created");
        record(name)
    };
    names.iter().map(make).collect()
}

fn exists(name: &str) -> Result<(), StoreError> {
    Err(StoreError::Exists {
        name: name.to_owned(),
    })
}

fn create_load_list(subject: &mut dyn Subject) {
    assert_eq!(list(subject), []);
    let made = create(subject, &["zebra", "ant", "mole"]);
    for _ in 0..2 {
        assert_eq!(list(subject), made, "in the order of creation");
        for record in &made {
            let found = block_on(subject.store().load(record.id));
            assert_eq!(found.as_ref(), Ok(record));
        }
        subject.reopen();
    }
    let id = Uuid::from_bytes([0xee; 16]);
    let missing = block_on(subject.store().load(id));
    assert_eq!(missing, Err(StoreError::NotFound { id }));
}

fn uniqueness(subject: &mut dyn Subject) {
    let made = create(subject, &["ant", "mole"]);
    let same_name = VolumeRecord {
        id: Uuid::from_bytes([0xee; 16]),
        ..record("ant")
    };
    let same_id = VolumeRecord {
        name: "zebra".to_owned(),
        ..record("ant")
    };
    for refused in [same_name, same_id, record("ant")] {
        let answer = block_on(subject.store().create(refused));
        assert_eq!(answer, exists("ant"));
    }
    assert_eq!(list(subject), made);
}

fn swaps(subject: &mut dyn Subject) {
    let made = create(subject, &["ant", "mole"]);
    let before = made[0].version();
    let mut second = next(&made[0]);
    second.replicas.pop();
    second.settings.min_in_sync = 2;
    assert_eq!(
        block_on(subject.store().swap(before, second.clone())),
        Ok(())
    );
    // A conflict names the stored and the expected version, and changes nothing.
    let mut third = next(&second);
    third.epoch = 9;
    let conflict = StoreError::Conflict {
        id: second.id,
        expected: before,
        found: second.version(),
    };
    let late = block_on(subject.store().swap(before, third.clone()));
    assert_eq!(late, Err(conflict.clone()));
    let again = block_on(subject.store().swap(before, second.clone()));
    assert_eq!(again, Err(conflict), "not even to the present version");
    for _ in 0..2 {
        assert_eq!(list(subject), [second.clone(), made[1].clone()]);
        subject.reopen();
    }
    let answer = block_on(subject.store().swap(second.version(), third.clone()));
    assert_eq!(answer, Ok(()));
    assert_eq!(block_on(subject.store().load(third.id)), Ok(third));
    let stranger = record("stranger");
    let id = stranger.id;
    let answer = block_on(subject.store().swap(stranger.version(), next(&stranger)));
    assert_eq!(answer, Err(StoreError::NotFound { id }));
    assert_eq!(list(subject).len(), 2);
}

fn renames(subject: &mut dyn Subject) {
    let made = create(subject, &["ant", "mole"]);
    let renamed = |name: &str| VolumeRecord {
        name: name.to_owned(),
        ..next(&made[0])
    };
    let version = made[0].version();
    let taken = block_on(subject.store().swap(version, renamed("mole")));
    assert_eq!(taken, exists("mole"));
    let expected = Stamp::default();
    let stale = block_on(subject.store().swap(expected, renamed("mole")));
    let found = version;
    let id = made[0].id;
    let conflict = StoreError::Conflict {
        id,
        expected,
        found,
    };
    assert_eq!(stale, Err(conflict), "before anything else");
    let answer = block_on(subject.store().swap(version, renamed("zebra")));
    assert_eq!(answer, Ok(()));
    subject.reopen();
    let again = VolumeRecord {
        id: Uuid::from_bytes([0xee; 16]),
        ..record("ant")
    };
    assert_eq!(
        block_on(subject.store().create(again)),
        Ok(()),
        "it is free"
    );
    let names: Vec<String> = list(subject).into_iter().map(|r| r.name).collect();
    assert_eq!(names, ["zebra", "mole", "ant"], "a rename keeps its place");
}

fn deletes(subject: &mut dyn Subject) {
    let made = create(subject, &["ant", "mole"]);
    let id = made[0].id;
    let expected = Stamp::default();
    let found = made[0].version();
    let answer = block_on(subject.store().delete(id, expected));
    let conflict = StoreError::Conflict {
        id,
        expected,
        found,
    };
    assert_eq!(answer, Err(conflict));
    assert_eq!(list(subject).len(), 2);
    assert_eq!(block_on(subject.store().delete(id, found)), Ok(()));
    let missing = Err(StoreError::NotFound { id });
    assert_eq!(block_on(subject.store().delete(id, found)), missing);
    subject.reopen();
    assert_eq!(list(subject), &made[1..]);
    create(subject, &["ant"]);
    let names: Vec<String> = list(subject).into_iter().map(|r| r.name).collect();
    assert_eq!(names, ["mole", "ant"], "its place is not kept");
}

/// Exactly one of the swaps with the same expected version succeeds, from any number of threads.
fn one_swap_wins(subject: &mut dyn Subject) {
    const THREADS: u64 = 4;
    const WINS: u64 = 16;
    let made = create(subject, &["ant"]);
    let (id, first) = (made[0].id, made[0].revision);
    let won = AtomicU64::new(0);
    let start = Barrier::new(THREADS as usize);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            let store = subject.store();
            scope.spawn(|| {
                let store = store;
                start.wait();
                let mut wins = 0;
                while wins < WINS {
                    let now = block_on(store.load(id)).expect("the record");
                    match block_on(store.swap(now.version(), next(&now))) {
                        Ok(()) => wins += 1,
                        Err(StoreError::Conflict { found, .. }) => {
                            assert!(
                                found > now.version(),
                                "a conflict reports the newer version"
                            );
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
                won.fetch_add(wins, Ordering::Relaxed);
            });
        }
    });
    subject.reopen();
    let last = block_on(subject.store().load(id)).expect("the record");
    assert_eq!(last.revision, first + THREADS * WINS);
    assert_eq!(won.into_inner(), THREADS * WINS);
}

/// A call is made even if its future is dropped.
fn make_no_promise_when_dropped(subject: &mut dyn Subject) {
    drop(subject.store().create(record("ant")));
    drop(
        subject
            .store()
            .swap(record("ant").version(), next(&record("ant"))),
    );
    assert_eq!(list(subject), [next(&record("ant"))]);
}
