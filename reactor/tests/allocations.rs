//! Goal: a turn in steady state allocates nothing.
//! Method: a counting allocator around turns that do everything a data path does: poll, read an
//! event set, run woken futures, fire and set timers, wake from another thread, arm and sleep.

use std::cell::Cell;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::Duration;

use nacre_reactor::{EventSet, Events, Idle, Interest, Nanos, Poller, TestCore, Work};

struct Sockets {
    set: EventSet,
    events: Events,
    near: UnixStream,
    seen: Rc<Cell<u64>>,
}

impl Poller for Sockets {
    fn name(&self) -> &str {
        "sockets"
    }

    fn poll(&mut self, _: Nanos, _: u32) -> Work {
        if self.set.wait(&mut self.events, Duration::ZERO).unwrap() == 0 {
            return Work::None;
        }
        let seen = self.near.read(&mut [0; 64]).unwrap();
        self.seen.set(self.seen.get() + seen as u64);
        Work::Did(1)
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        Idle::Until(now + Duration::from_secs(1))
    }

    fn wake_fds(&self) -> std::io::Result<Vec<OwnedFd>> {
        Ok(vec![self.set.wake_fd()?])
    }
}

#[test]
fn a_turn_allocates_nothing() {
    let mut core = TestCore::new();
    let (mut far, near) = UnixStream::pair().unwrap();
    let set = EventSet::new().unwrap();
    set.add(&near, 7, Interest::READ).unwrap();
    let (seen, ticks) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    let events = Events::with_capacity(8);
    let poller = Sockets {
        set,
        events,
        near,
        seen: Rc::clone(&seen),
    };
    core.add_poller(Box::new(poller)).unwrap();
    let (here, ours) = (core.core().clone(), Rc::clone(&ticks));
    drop(core.spawn_local(async move {
        loop {
            here.after(Duration::from_micros(10)).await;
            here.yield_now().await;
            ours.set(ours.get() + 1);
        }
    }));
    let mut round = |core: &mut TestCore| {
        far.write_all(b"x").unwrap();
        core.handle().waker().wake();
        core.clock().advance(Duration::from_micros(10));
        while core.turn() {}
        core.try_sleep();
        core.sleep_for_real(Duration::ZERO);
    };
    // The queues reach their size.
    (0..10).for_each(|_| round(&mut core));
    let before = (seen.get(), ticks.get());
    let counted = allocation_counter::measure(|| (0..1000).for_each(|_| round(&mut core)));
    assert!(
        seen.get() >= before.0 + 1000 && ticks.get() >= before.1 + 1000,
        "it did not work"
    );
    assert_eq!(counted.count_total, 0, "{counted:?}");
}
