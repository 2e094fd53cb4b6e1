//! Loom test of the doorbell (`doorbell.rs`), under every interleaving and reordering that the
//! memory model allows.
//!
//! ```text
//! cargo test -p nacre-tests-models doorbell
//! ```
//!
//! Loom reports a sleeper that is never woken as a deadlock, which fails the test. The queue is
//! modelled twice: as a single atomic with only release and acquire ordering, which does not help
//! the handshake, and as a locked list, which carries values. The last two tests remove a part of
//! the handshake and expect a lost wake-up. They show that the model can detect that fault.

#[path = "../../../../reactor/src/doorbell.rs"]
#[allow(dead_code, unreachable_pub)]
mod source;

use std::collections::VecDeque;

use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use source::Doorbell;

/// A model of an eventfd: writes add up, a wait resets the sum.
struct EventFd {
    count: Mutex<u64>,
    changed: Condvar,
}

impl EventFd {
    fn new() -> Self {
        Self {
            count: Mutex::new(0),
            changed: Condvar::new(),
        }
    }

    fn write(&self) {
        *self.count.lock().unwrap() += 1;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut count = self.count.lock().unwrap();
        while *count == 0 {
            count = self.changed.wait(count).unwrap();
        }
        *count = 0;
    }
}

struct Reactor<Q> {
    doorbell: Doorbell,
    eventfd: EventFd,
    queue: Q,
}

/// A queue of messages to the sleeper. It returns at most as many as were pushed.
trait Queue {
    fn push(&self, item: usize);
    fn drain(&self) -> usize;
}

/// The number of items: release to push, acquire to look.
struct Bare(AtomicUsize);

impl Queue for Bare {
    fn push(&self, _: usize) {
        self.0.fetch_add(1, Ordering::Release);
    }

    fn drain(&self) -> usize {
        // Load first, as a real queue checks for items before it takes one. A lone
        // read-modify-write would always see the newest value and hide a missing fence.
        match self.0.load(Ordering::Acquire) {
            0 => 0,
            _ => self.0.swap(0, Ordering::Acquire),
        }
    }
}

struct Locked(Mutex<VecDeque<usize>>);

impl Queue for Locked {
    fn push(&self, item: usize) {
        self.0.lock().unwrap().push_back(item);
    }

    fn drain(&self) -> usize {
        self.0.lock().unwrap().drain(..).count()
    }
}

impl<Q: Queue> Reactor<Q> {
    fn new(queue: Q) -> Self {
        Self {
            doorbell: Doorbell::new(),
            eventfd: EventFd::new(),
            queue,
        }
    }

    fn send(&self, item: usize) {
        self.queue.push(item);
        self.doorbell.ring(|| self.eventfd.write());
    }

    /// The loop of `Core::run`: turn; if idle, announce, turn once more, and only then block.
    fn receive(&self, expected: usize) {
        let mut received = 0;
        while received < expected {
            received += self.queue.drain();
            if received >= expected {
                break;
            }
            self.doorbell.announce();
            let found = self.queue.drain();
            received += found;
            if found == 0 && self.doorbell.undisturbed() {
                self.eventfd.wait();
            }
            self.doorbell.awake();
        }
        assert_eq!(received, expected);
    }
}

fn check<Q: Queue + Send + Sync + 'static>(
    make: fn() -> Q,
    senders: usize,
    each: usize,
    preemption_bound: Option<usize>,
) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = preemption_bound;
    model.check(move || {
        let reactor = Arc::new(Reactor::new(make()));
        for sender in 0..senders {
            let reactor = Arc::clone(&reactor);
            thread::spawn(move || (0..each).for_each(|item| reactor.send(sender * each + item)));
        }
        reactor.receive(senders * each);
    });
}

// One message and one sleeper are tested in all interleavings. More of either would take hours; a
// limit of three preemptions finds the known bugs of this kind in seconds.

#[test]
fn one_sender_always_wakes_the_reactor() {
    check(|| Bare(AtomicUsize::new(0)), 1, 1, None);
    check(|| Locked(Mutex::new(VecDeque::new())), 1, 1, None);
}

#[test]
fn one_sender_wakes_the_reactor_twice() {
    check(|| Bare(AtomicUsize::new(0)), 1, 2, Some(3));
    check(|| Locked(Mutex::new(VecDeque::new())), 1, 2, Some(3));
}

#[test]
fn two_senders_always_wake_the_reactor() {
    check(|| Bare(AtomicUsize::new(0)), 2, 1, Some(3));
    check(|| Locked(Mutex::new(VecDeque::new())), 2, 1, Some(3));
}

/// Goal: stopping (a flag, then the doorbell) wakes a sleeper, too.
#[test]
fn stop_always_wakes_the_reactor() {
    loom::model(|| {
        let reactor = Arc::new(Reactor::new(Bare(AtomicUsize::new(0))));
        let stop = Arc::new(AtomicBool::new(false));
        let theirs = (Arc::clone(&reactor), Arc::clone(&stop));
        thread::spawn(move || {
            theirs.1.store(true, Ordering::Relaxed);
            theirs.0.doorbell.ring(|| theirs.0.eventfd.write());
        });
        while !stop.load(Ordering::Relaxed) {
            reactor.doorbell.announce();
            if !stop.load(Ordering::Relaxed) && reactor.doorbell.undisturbed() {
                reactor.eventfd.wait();
            }
            reactor.doorbell.awake();
        }
    });
}

/// One attempt to sleep against one sender, with handshakes defined by the caller.
///
/// # Panics
/// When the sleeper would block, the sender has finished, and there is work.
fn one_attempt(
    sender: fn(&Reactor<Bare>, &AtomicBool),
    would_block: fn(&Reactor<Bare>, &AtomicBool) -> bool,
) {
    loom::model(move || {
        let shared = Arc::new((
            Reactor::new(Bare(AtomicUsize::new(0))),
            AtomicBool::new(false),
        ));
        let theirs = Arc::clone(&shared);
        let sending = thread::spawn(move || sender(&theirs.0, &theirs.1));
        let blocks = would_block(&shared.0, &shared.1);
        sending.join().unwrap();
        let woken = *shared.0.eventfd.count.lock().unwrap() > 0;
        let work = shared.0.queue.drain() > 0;
        assert!(!(blocks && work && !woken), "lost wake-up");
    });
}

/// Goal: the complete handshake passes the model that the two tests below fail.
#[test]
fn the_complete_handshake_loses_no_wake_up() {
    one_attempt(
        |reactor, _| reactor.send(0),
        |reactor, _| {
            reactor.doorbell.announce();
            reactor.queue.drain() == 0
        },
    );
}

/// Goal: the model detects a lost wake-up. Method: poll, then announce and sleep without a second
/// poll.
#[test]
#[should_panic(expected = "lost wake-up")]
fn without_the_second_poll_a_wake_up_is_lost() {
    one_attempt(
        |reactor, _| reactor.send(0),
        |reactor, _| {
            let nothing = reactor.queue.drain() == 0;
            reactor.doorbell.announce();
            nothing
        },
    );
}

/// Goal: the model detects a missing fence. Method: the same handshake with the strongest orderings
/// of loads and stores, but without the fences between them.
#[test]
#[should_panic(expected = "lost wake-up")]
fn without_the_fences_a_wake_up_is_lost() {
    one_attempt(
        |reactor, asleep| {
            reactor.queue.push(0);
            if asleep.load(Ordering::Acquire) && asleep.swap(false, Ordering::AcqRel) {
                reactor.eventfd.write();
            }
        },
        |reactor, asleep| {
            asleep.store(true, Ordering::Release);
            reactor.queue.drain() == 0
        },
    );
}
