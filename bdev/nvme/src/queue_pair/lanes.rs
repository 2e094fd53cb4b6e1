//! The lanes of a queue pair. A lane is one bdev queue: all bdev queues of a core to namespaces
//! of one controller share an NVMe queue pair. I/O that finds no free slot waits in its lane.

use std::collections::VecDeque;
use std::sync::Arc;

use nacre_bdev::{Completion, Done, Io, Status, Token};
use nacre_hugepages::Pool;

use crate::namespace::Namespace;

/// One bdev queue to a namespace.
pub(super) struct Lane {
    pub namespace: Arc<Namespace>,
    pub pool: Pool,
    /// Completions not yet handed to the caller.
    pub ready: VecDeque<Completion>,
    pub waiting: VecDeque<Io>,
    /// Number of accepted I/Os whose completion the caller does not have yet.
    pub inflight: u32,
    /// Number of the I/Os in `inflight` that occupy a slot of the NVMe queue pair.
    pub placed: u32,
}

/// The lanes by number, from 0. The number of a closed lane is reused.
#[derive(Default)]
pub(super) struct Lanes {
    lanes: Vec<Option<Lane>>,
    /// Lanes with waiting I/O, plus one while all lanes must wait: new I/O never overtakes waiting
    /// I/O.
    pub hungry: u32,
}

impl Lanes {
    /// Opens a lane and returns its number. `depth` is the most I/Os in flight of the lane.
    pub(super) fn open(&mut self, namespace: Arc<Namespace>, pool: Pool, depth: usize) -> usize {
        let lane = Lane {
            namespace,
            pool,
            ready: VecDeque::with_capacity(depth),
            waiting: VecDeque::with_capacity(depth),
            inflight: 0,
            placed: 0,
        };
        match self.lanes.iter().position(Option::is_none) {
            Some(at) => {
                self.lanes[at] = Some(lane);
                at
            }
            None => {
                self.lanes.push(Some(lane));
                self.lanes.len() - 1
            }
        }
    }

    /// Closes a lane. Returns false if the lane is closed already.
    pub(super) fn close(&mut self, at: usize) -> bool {
        let Some(lane) = self.lanes[at].take() else {
            return false;
        };
        self.hungry -= u32::from(!lane.waiting.is_empty());
        true
    }

    /// Number of open lanes.
    pub(super) fn count(&self) -> usize {
        self.lanes.iter().flatten().count()
    }

    #[inline]
    pub(super) fn get(&self, at: usize) -> &Lane {
        self.lanes[at].as_ref().expect("a lane that is open")
    }

    #[inline]
    pub(super) fn get_mut(&mut self, at: usize) -> &mut Lane {
        self.lanes[at].as_mut().expect("a lane that is open")
    }

    #[inline]
    pub(super) fn find(&self, at: usize) -> Option<&Lane> {
        self.lanes.get(at).and_then(Option::as_ref)
    }

    #[inline]
    pub(super) fn find_mut(&mut self, at: usize) -> Option<&mut Lane> {
        self.lanes.get_mut(at).and_then(Option::as_mut)
    }

    pub(super) fn wait(&mut self, at: usize, io: Io) {
        let lane = self.get_mut(at);
        let is_first = lane.waiting.is_empty();
        lane.waiting.push_back(io);
        self.hungry += u32::from(is_first);
    }

    /// Completes the waiting I/O `token` with status `Aborted`. Returns false if no such I/O
    /// waits.
    pub(super) fn abort(&mut self, at: usize, token: Token) -> bool {
        let lane = self.get_mut(at);
        let Some(place) = lane.waiting.iter().position(|io| io.token == token) else {
            return false;
        };
        if let Some(io) = lane.waiting.remove(place) {
            lane.ready.push_back(io.complete(Status::Aborted));
        }
        self.hungry -= u32::from(lane.waiting.is_empty());
        true
    }

    /// Completes all waiting I/O with status `Gone`, after the drive's removal.
    pub(super) fn refuse_all(&mut self) {
        for lane in self.lanes.iter_mut().flatten() {
            let refused = lane.waiting.drain(..).map(|io| io.complete(Status::Gone));
            lane.ready.extend(refused);
        }
        self.hungry = 0;
    }
}

impl Lane {
    /// Moves completions to `done` while it has room.
    #[inline(never)]
    pub(super) fn hand_over(&mut self, done: &mut Done) {
        while done.has_room()
            && let Some(completion) = self.ready.pop_front()
        {
            self.inflight -= 1;
            done.push(completion);
        }
    }
}
