//! The [`Queue`] of a namespace on one core: one lane of the core's NVMe queue pair.

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use nacre_bdev::{Busy, Done, Io, Queue, Token};
use nacre_hugepages::Pool;
use nacre_reactor::{EventSet, Idle, Interest, Nanos};

use crate::namespace::Namespace;
use crate::queue_pair::{Pair, Start};
use crate::table;

pub(crate) struct Channel {
    pair: Rc<RefCell<Pair>>,
    lane: usize,
    /// An epoll set with the descriptor of the queue pair's interrupt vector, which may change, and
    /// with the control's bell. `None` if the queue pair can only be polled.
    sleeper: Option<Sleeper>,
}

struct Sleeper {
    set: EventSet,
    watched: Option<Arc<OwnedFd>>,
}

impl Channel {
    pub(crate) fn open(
        pair: Rc<RefCell<Pair>>,
        namespace: Arc<Namespace>,
        pool: &Pool,
    ) -> std::io::Result<Self> {
        let vector = pair.borrow().link().vector;
        let sleeper = match vector {
            None => None,
            Some(_) => {
                let set = EventSet::new()?;
                set.add(pair.borrow().link().bell(), 0, Interest::READ)?;
                Some(Sleeper { set, watched: None })
            }
        };
        let lane = pair.borrow_mut().open_lane(namespace, pool.clone());
        let mut channel = Self {
            pair,
            lane,
            sleeper,
        };
        channel.watch();
        Ok(channel)
    }

    /// Watches the vector's present descriptor. Returns false if there is none, or it cannot be
    /// watched.
    fn watch(&mut self) -> bool {
        let Some(sleeper) = &mut self.sleeper else {
            return false;
        };
        let now = self.pair.borrow().vector_fd();
        let is_watched = match (&now, &sleeper.watched) {
            (Some(now), Some(watched)) => Arc::ptr_eq(now, watched),
            (now, watched) => now.is_none() && watched.is_none(),
        };
        if !is_watched {
            if let Some(old) = sleeper.watched.take()
                && let Err(error) = sleeper.set.delete(&*old)
            {
                tracing::error!(%error, "cannot stop watching a former vector");
            }
            sleeper.watched = now.filter(|fd| sleeper.set.add(fd, 0, Interest::READ).is_ok());
        }
        sleeper.watched.is_some()
    }
}

impl Queue for Channel {
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        let mut pair = self.pair.borrow_mut();
        match pair.start(self.lane, &io) {
            Start::Sent(slot) => *slot = Some(io),
            Start::Other => pair.submit(self.lane, io),
            Start::Full => return Err((Busy, io)),
        }
        Ok(())
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        self.pair.borrow_mut().poll(self.lane, now, done)
    }

    fn abort(&mut self, token: Token) -> bool {
        self.pair.borrow_mut().abort(self.lane, token)
    }

    fn inflight(&self) -> usize {
        self.pair.borrow().inflight(self.lane)
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        table::sweep();
        let idle = self.pair.borrow_mut().arm(self.lane, now);
        match idle {
            Idle::Until(_) if !self.watch() => Idle::Busy,
            idle => idle,
        }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        let sleeper = self.sleeper.as_ref()?;
        Some(sleeper.set.as_fd())
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.pair.borrow_mut().close_lane(self.lane);
        table::left(&self.pair);
    }
}
