//! The data path of the NVMe driver: one queue pair per core and controller, shared by the core's
//! bdev queues to the namespaces of that controller.
//!
//! ```text
//!   start ─▶ send_simple: SQE into the ring      nearly always
//!   else submit ─▶ place ─▶ send: the same      waiting ◀─ no slot, buffer or queue yet
//!   poll:  ready ─▶ done
//!          reap: CQE ─▶ succeeded ─▶ done        nearly always
//!                else verdict ─┬─ done ─▶ finish ─▶ done, or another lane's ready
//!                              └─ again ─▶ send
//!          waiting ─▶ place
//!          flush: one doorbell for everything
//! ```
//!
//! The queue is created without interrupts, and stays so as long as its core polls. `interrupts.rs`
//! handles a core that wants to sleep.
//!
//! A slot holds an I/O and its buffers from `place` to `finish`; no other code ends it.
//! `recover.rs` handles a recreated queue and a removed drive; `place.rs` prepares the data
//! pointer.

pub(crate) mod inject;
mod interrupts;
mod lanes;
mod place;
mod recover;
mod slot;

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Completion, Done, Io, Op, Status};
use nacre_hugepages::Pool;
use nacre_reactor::Nanos;

use self::inject::Injector;
use self::interrupts::Switch;
use self::lanes::Lanes;
pub(crate) use self::place::Placed;
use self::slot::{NO_LANE, Slot, Stage};
use crate::command::{self, Verdict};
use crate::link::{Grant, Link, Report, Request, count};
use crate::namespace::Namespace;
use crate::phase::Word;
use crate::ring::{Answer, Head, Tail};
use crate::shared::Shared;

/// Longest sleep of a core with I/O in flight, in case an interrupt was lost.
const LOOK: Duration = Duration::from_millis(100);
/// Sleep time when the core must poll again without a wake-up.
const LOOK_SOON: Duration = Duration::from_micros(500);
/// Time without a completion after which the driver also writes the doorbell registers of a
/// controller with shadow doorbells.
const NUDGE: Duration = Duration::from_millis(10);
/// Number of checks of the commands in flight per timeout.
const TICKS: u32 = 8;

/// Upper bound of yields while the controller finishes its commands: some milliseconds.
const PATIENCE: u32 = 4096;

pub(crate) struct Pair {
    controller: Arc<Shared>,
    link: Arc<Link>,
    grant: Arc<Grant>,
    /// The phase at the last check, and whether it is live.
    word: Word,
    live: bool,
    /// I/O can take the usual path: the pair is live, and has no error injection.
    usual: bool,
    injector: Option<Box<Injector>>,
    tail: Tail,
    head: Head,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    cids: slot::Cids,
    /// Commands sent and not completed.
    sent: u32,
    /// Commands to send again: due time and slot index.
    again: Vec<(Nanos, u16)>,
    lanes: Lanes,
    /// Memory for building a PRP list or an SGL segment.
    scratch: Box<[u8; crate::data::PAGE]>,
    now: Nanos,
    tick: Option<Duration>,
    next_scan: Nanos,
    /// Time of the next check for late commands; a scan may come earlier.
    next_look: Nanos,
    /// Position in the completion queue at the last scan, if commands were in flight then.
    still: Option<u32>,
    switch: Switch,
}

/// Result of [`Pair::start`].
pub(crate) enum Start<'a> {
    Full,
    /// The command is in the ring. Put the I/O into this empty slot.
    Sent(&'a mut Option<Io>),
    /// The I/O is accepted; call [`Pair::submit`].
    Other,
}

impl Pair {
    pub(crate) fn new(controller: Arc<Shared>, link: Arc<Link>) -> Self {
        let grant = link.grant();
        let entries = grant.rings.entries;
        let timeout = controller.options.timeout;
        let slots = entries - 1;
        Self {
            controller,
            word: crate::phase::encode(crate::phase::QueueState::Waiting),
            live: false,
            usual: false,
            injector: None,
            tail: Tail::new(entries),
            head: Head::new(entries),
            slots: (0..slots).map(Slot::new).collect(),
            // The lowest slots are reused first, and stay in the caches.
            free: (0..slots).rev().collect(),
            cids: slot::Cids::for_slots(slots),
            sent: 0,
            again: Vec::with_capacity(slots.into()),
            lanes: Lanes::default(),
            scratch: Box::new([0; crate::data::PAGE]),
            now: Nanos::ZERO,
            tick: (!timeout.is_zero()).then(|| timeout / TICKS),
            next_scan: Nanos::ZERO,
            next_look: Nanos::ZERO,
            still: None,
            switch: Switch::default(),
            link,
            grant,
        }
    }

    pub(crate) fn link(&self) -> &Arc<Link> {
        &self.link
    }

    pub(crate) fn open_lane(&mut self, namespace: Arc<Namespace>, pool: Pool) -> usize {
        self.lanes.open(namespace, pool, self.slots.len())
    }

    /// Closes a lane. Its I/O in flight stays in its slots until the controller has completed it.
    pub(crate) fn close_lane(&mut self, at: usize) {
        inject::drop_held(self, at);
        if !self.lanes.close(at) {
            return;
        }
        for index in 0..self.slots.len() as u16 {
            let slot = &mut self.slots[usize::from(index)];
            if slot.lane != at as u32 || slot.io.is_none() {
                continue;
            }
            slot.lane = NO_LANE;
            if slot.stage == Stage::Again {
                self.again.retain(|(_, again)| *again != index);
                self.end(index, Status::Aborted);
            }
        }
        let_finish(self);
    }

    pub(crate) fn has_lanes(&self) -> bool {
        self.lanes.count() > 0
    }

    /// True while a slot is in use: its command is in flight, or waits for a retry.
    pub(crate) fn holds(&self) -> bool {
        self.free.len() < self.slots.len()
    }

    pub(crate) fn inflight(&self, at: usize) -> usize {
        self.lanes.get(at).inflight as usize
    }

    /// Starts an I/O. It stays with the caller until its slot is known: moving it costs as much as
    /// all the checks here.
    #[inline]
    pub(crate) fn start(&mut self, at: usize, io: &Io) -> Start<'_> {
        let hungry = self.lanes.hungry;
        let lane = self.lanes.get_mut(at);
        if lane.inflight as usize >= self.slots.len() {
            return Start::Full;
        }
        lane.inflight += 1;
        if self.usual
            && hungry == 0
            && let Some(simple) = place::simple(&lane.namespace, &self.grant, io)
            && let Some(index) = self.free.pop()
        {
            lane.placed += 1;
            return Start::Sent(self.send_simple(at, index, &simple));
        }
        Start::Other
    }

    /// Continues with an I/O for which [`Pair::start`] returned [`Start::Other`].
    #[inline(never)]
    pub(crate) fn submit(&mut self, at: usize, io: Io) {
        if !self.live || self.lanes.hungry > 0 {
            self.link.activity.queued.add(1);
            return self.lanes.wait(at, io);
        }
        match self.place(at, io) {
            Placed::Sent => {}
            Placed::Ended(completion) => self.lanes.get_mut(at).ready.push_back(completion),
            Placed::Later(io) => {
                self.link.activity.queued.add(1);
                self.lanes.wait(at, io);
            }
        }
    }

    #[inline]
    pub(crate) fn poll(&mut self, at: usize, now: Nanos, done: &mut Done) -> usize {
        let before = done.len();
        self.now = now;
        self.link.activity.polls.add(1);
        if self.link.phase.word() != self.word {
            self.follow();
        }
        let lane = self.lanes.get_mut(at);
        if !lane.ready.is_empty() {
            lane.hand_over(done);
        }
        if self.sent > 0
            && let Some(answer) = self.head.peek(&self.grant.rings.cq)
            && done.has_room()
        {
            self.reap(answer, at as u32, done);
        }
        if self.lanes.hungry > 0 || !self.again.is_empty() {
            self.resume(at);
        }
        self.flush();
        if now >= self.next_scan {
            self.scan();
        }
        done.len() - before
    }

    /// Processes waiting I/O: commands to retry, and I/O that was never sent.
    #[inline(never)]
    fn resume(&mut self, at: usize) {
        if self.is_switching() {
            return self.go_on_switching();
        }
        if !self.again.is_empty() {
            self.send_again();
        }
        if self.lanes.hungry > 0 {
            self.start_waiting(at);
        }
    }

    /// Processes completions, starting with `first`, while `done` has room.
    #[inline(never)]
    fn reap(&mut self, first: Answer, at: u32, done: &mut Done) {
        let mut next = Some(first);
        let mut count = 0;
        while let Some(answer) = next
            && count < self.slots.len() as u64
        {
            count += 1;
            self.head.advance();
            let answer = inject::replaced(self, answer);
            if !self.succeeded(answer, at, done) {
                self.answered(answer, at, done);
            }
            if self.sent == 0 || (at != NO_LANE && !done.has_room()) {
                break;
            }
            next = self.head.peek(&self.grant.rings.cq);
        }
        self.link.activity.busy_polls.add(1);
        self.link.activity.completions.add(count);
    }

    /// Processes completions like [`Pair::reap`], for lanes that are not polled: each completion
    /// waits in its lane.
    fn reap_unseen(&mut self) {
        if let Some(answer) = self.head.peek(&self.grant.rings.cq) {
            self.reap(answer, NO_LANE, &mut Done::with_capacity(0));
        }
    }

    /// Handles the usual completion: the command was a whole I/O of the polled lane, and succeeded.
    /// Returns false without side effects for any other completion.
    #[inline]
    fn succeeded(&mut self, answer: Answer, at: u32, done: &mut Done) -> bool {
        let index = self.cids.index(answer.cid);
        let Some(slot) = self.slots.get_mut(usize::from(index)) else {
            return false;
        };
        let usual = slot.cid == answer.cid
            && slot.stage == Stage::Sent
            && answer.status == 0
            && slot.lane == at
            && !slot.is_half()
            && slot.bounce.is_none();
        let Some(lane) = self.lanes.find_mut(at as usize) else {
            return false;
        };
        if !usual || !done.has_room() {
            return false;
        }
        let Some(io) = slot.io.take_if(|io| io.op != Op::Copy) else {
            return false;
        };
        slot.stage = Stage::Free;
        self.free.push(index);
        self.sent -= 1;
        lane.placed -= 1;
        lane.inflight -= 1;
        done.push(io.complete(Status::Ok));
        true
    }

    /// Handles any completion, also one without a command.
    #[inline(never)]
    fn answered(&mut self, answer: Answer, at: u32, done: &mut Done) {
        let index = self.cids.index(answer.cid);
        match self.slots.get_mut(usize::from(index)) {
            Some(slot) if slot.cid == answer.cid && slot.stage == Stage::Sent => {
                self.sent -= 1;
                if slot.is_half() {
                    return self.half_answered(index, answer.status, at, done);
                }
                let Some(io) = &slot.io else {
                    return;
                };
                match command::verdict(answer.status, io.op) {
                    Verdict::Done(status) if io.op != Op::Copy => {
                        self.finish(index, status, at, done);
                    }
                    other => self.unfinished(index, other, at, done),
                }
            }
            _ => unknown_completion(self, answer.cid),
        }
    }

    fn finish(&mut self, index: u16, status: Status, at: u32, done: &mut Done) {
        let Some((owner, completion)) = self.release(index, status) else {
            return;
        };
        let lane = self.lanes.get_mut(owner as usize);
        if owner == at && done.has_room() {
            lane.inflight -= 1;
            done.push(completion);
        } else {
            lane.ready.push_back(completion);
        }
    }

    /// Ends a command like [`Pair::finish`]; the lane's next poll returns the completion.
    fn end(&mut self, index: u16, status: Status) {
        if let Some((owner, completion)) = self.release(index, status) {
            self.lanes
                .get_mut(owner as usize)
                .ready
                .push_back(completion);
        }
    }

    /// Frees a slot, as [`Pair::succeeded`] also does. Returns `None` if its lane is closed.
    fn release(&mut self, index: u16, status: Status) -> Option<(u32, Completion)> {
        let slot = &mut self.slots[usize::from(index)];
        slot.stage = Stage::Free;
        self.free.push(index);
        let mut io = slot.io.take()?;
        let mut status = status;
        if let Some(bounce) = slot.bounce.take() {
            status = place::unbounce(&mut io, &bounce, status);
        }
        let owner = slot.lane;
        let lane = self.lanes.find_mut(owner as usize)?;
        lane.placed -= 1;
        Some((owner, io.complete(status)))
    }

    /// Starts the waiting I/O of a lane; while other lanes wait too, at most the lane's share.
    fn start_waiting(&mut self, at: usize) {
        if !self.live {
            return self.refuse_waiting();
        }
        let lanes = self.lanes.count().max(1) as u32;
        let share = (self.slots.len() as u32 / lanes).max(1);
        loop {
            let alone = self.lanes.hungry == 1;
            let lane = self.lanes.get_mut(at);
            if !alone && lane.placed >= share {
                return;
            }
            let Some(io) = lane.waiting.pop_front() else {
                return;
            };
            match self.place(at, io) {
                Placed::Sent => {}
                Placed::Ended(completion) => self.lanes.get_mut(at).ready.push_back(completion),
                Placed::Later(io) => {
                    self.lanes.get_mut(at).waiting.push_front(io);
                    return;
                }
            }
            if self.lanes.get(at).waiting.is_empty() {
                self.lanes.hungry -= 1;
                return;
            }
        }
    }

    /// Notifies the controller of new entries. Reports the completion head rarely: it only frees
    /// entries, and a register write costs more than the rest of this function.
    #[inline]
    fn flush(&mut self) {
        if (self.tail.is_rung() && !self.head.is_pressing()) || !self.live {
            return;
        }
        self.ring_doorbells(self.head.is_pressing());
    }

    #[inline]
    fn ring_doorbells(&mut self, head_too: bool) {
        if !self.link.phase.enter(self.word) {
            // The next poll detects the reason.
            return;
        }
        let grant = &*self.grant;
        let shadows = grant.shadows.as_deref();
        let (function, activity) = (&*grant.function, &self.link.activity);
        if head_too {
            let step = self.head.ring();
            grant.cq.ring(function, shadows, step, &activity.completion);
        }
        if !self.tail.is_rung() {
            let step = self.tail.ring();
            grant.sq.ring(function, shadows, step, &activity.submission);
        }
        self.link.phase.leave();
    }

    /// The last user has left: requests deletion of the queues.
    pub(crate) fn desert(&self) {
        self.report(Request::Delete);
    }

    /// Processes completions of a pair without users, whose buffers wait for the controller.
    pub(crate) fn reap_left(&mut self) {
        if self.link.phase.word() != self.word {
            self.follow();
        }
        self.again.clear();
        self.reap_unseen();
    }

    fn report(&self, want: Request) {
        let generation = match crate::phase::decode(self.word) {
            crate::phase::QueueState::Live(generation) => generation,
            _ => 0,
        };
        self.controller.report(Report {
            qid: self.link.qid,
            generation,
            want,
        });
    }
}

#[cold]
fn unknown_completion(pair: &Pair, cid: u16) {
    count(&pair.controller.counters.protocol_errors);
    pair.report(Request::UnknownCompletion { cid });
}

/// Waits briefly for the commands of a closed lane, so that their buffers are usually free
/// afterwards. A slow controller completes them later.
fn let_finish(pair: &mut Pair) {
    let left = |pair: &Pair| {
        let mut slots = pair.slots.iter();
        slots.any(|slot| slot.lane == NO_LANE && slot.io.is_some())
    };
    if !pair.live || !left(pair) {
        return;
    }
    pair.flush();
    for _ in 0..PATIENCE {
        let before = pair.sent;
        pair.reap_unseen();
        if pair.sent != before && !left(pair) {
            return;
        }
        std::thread::yield_now();
    }
}
