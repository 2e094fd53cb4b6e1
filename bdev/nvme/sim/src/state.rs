//! The state of the simulated controller, and one turn of it: fetch commands, execute them, post
//! completions.

use std::collections::{BinaryHeap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nacre_nvmf_wire::aen::AsyncEvent;
use nacre_nvmf_wire::registers::{Aqa, Cc, Csts};
use nacre_nvmf_wire::{Fuse, Sqe, StatusCode};
use nacre_random::Random;
use nacre_reactor::Nanos;
use rustix::event::{EventfdFlags, eventfd};

use crate::config::Config;
use crate::executor::Executor;
use crate::faults::{Action, Faults};
use crate::queues::{Cq, Post, Sq};
use crate::strict;

/// The progress of the controller from disabled to ready and back. The time in `Enabling` and
/// `Disabling` is the end of the transition; `None` until the first turn in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Disabled,
    Enabling(Option<Nanos>),
    Ready,
    Disabling(Option<Nanos>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShutDown {
    No,
    Under(Option<Nanos>),
    Done,
}

/// A command between its fetch and its completion.
pub(crate) struct Command {
    pub due: Nanos,
    /// Order of commands due at the same time.
    pub order: u64,
    pub sqid: u16,
    pub sqe: Sqe,
    /// The compare of a fused pair; this command is the write.
    pub first: Option<Sqe>,
    pub action: Option<Action>,
}

impl PartialEq for Command {
    fn eq(&self, other: &Self) -> bool {
        (self.due, self.order) == (other.due, other.order)
    }
}

impl Eq for Command {}

impl PartialOrd for Command {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Command {
    /// Reversed, so that the earliest command is the greatest.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.due, other.order).cmp(&(self.due, self.order))
    }
}

/// A descriptor that becomes readable when its interrupt vector fires.
pub(crate) struct Signal(Arc<OwnedFd>);

impl Signal {
    pub(crate) fn new() -> std::io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(Arc::new(eventfd(0, flags)?)))
    }

    pub(crate) fn set(&self) {
        // A full counter is readable already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Clears the signal. True if it was set.
    pub(crate) fn clear(&self) -> bool {
        rustix::io::read(&self.0, &mut [0u8; 8]).is_ok()
    }

    pub(crate) fn fd(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.0)
    }
}

pub(crate) struct State {
    pub exec: Executor,
    pub random: Random,
    pub now: Nanos,

    /// Incremented each time the drive is inserted; functions of an earlier insertion see no drive.
    pub seat: u64,
    pub present: bool,
    /// The system reports the removal of the drive.
    pub leaving: bool,
    pub bus_master: bool,
    pub given_back: bool,

    pub cc: Cc,
    pub csts: Csts,
    pub admin_queue: AdminQueue,
    pub mode: Mode,
    pub shutdown: ShutDown,

    pub sqs: Vec<Option<Sq>>,
    pub cqs: Vec<Option<Cq>>,
    pub waiting: BinaryHeap<Command>,
    pub stuck: Vec<Command>,
    pub posts: VecDeque<Post>,
    pub order: u64,

    pub async_requests: Vec<u16>,
    pub events: VecDeque<AsyncEvent>,
    /// Bitmap of the event types that are masked until the host reads their log page.
    pub masked: u8,
    pub vectors: Vec<Signal>,

    pub faults: Faults,
}

/// The registers of the admin queue: its sizes and addresses.
#[derive(Default)]
pub(crate) struct AdminQueue {
    pub aqa: Aqa,
    pub asq: u64,
    pub acq: u64,
}

impl State {
    pub(crate) fn new(config: Config) -> Self {
        let queues = usize::from(config.io_queues) + 1;
        Self {
            random: Random::new(config.seed),
            exec: Executor::new(config),
            now: Nanos::ZERO,
            seat: 0,
            present: false,
            leaving: false,
            bus_master: false,
            given_back: false,
            cc: Cc(0),
            csts: Csts(0),
            admin_queue: AdminQueue::default(),
            mode: Mode::Disabled,
            shutdown: ShutDown::No,
            sqs: (0..queues).map(|_| None).collect(),
            cqs: (0..queues).map(|_| None).collect(),
            waiting: BinaryHeap::new(),
            stuck: Vec::new(),
            posts: VecDeque::new(),
            order: 0,
            async_requests: Vec::new(),
            events: VecDeque::new(),
            masked: 0,
            vectors: Vec::new(),
            faults: Faults::default(),
        }
    }

    pub(crate) fn page(&self) -> u64 {
        4096 << self.cc.mps()
    }

    /// Runs one turn. Returns true if it did anything.
    pub(crate) fn tick(&mut self, now: Nanos) -> bool {
        self.now = self.now.max(now);
        if !self.present {
            return false;
        }
        let mut worked = self.turn_registers();
        if self.csts.is_ready() && !self.csts.is_fatal() && self.bus_master {
            worked |= self.fetch_all();
            worked |= self.run_due();
            worked |= self.deliver_events();
            worked |= self.post_due();
        }
        worked
    }

    /// When the next action is due, or `None`. Actions that wait for the driver (for queue space,
    /// for a reset) do not count.
    pub(crate) fn next(&self) -> Option<Nanos> {
        let now = self.now;
        let mode = match self.mode {
            Mode::Enabling(at) if !self.faults.never_ready => Some(at.unwrap_or(now)),
            Mode::Disabling(at) if !self.faults.never_disabled => Some(at.unwrap_or(now)),
            _ => None,
        };
        let shutdown = match self.shutdown {
            ShutDown::Under(at) if !self.faults.never_shut_down => Some(at.unwrap_or(now)),
            _ => None,
        };
        let registers = [mode, shutdown].into_iter().flatten().min();
        if !self.csts.is_ready() || self.csts.is_fatal() || !self.bus_master {
            return registers.filter(|at| *at > now || !self.csts.is_fatal());
        }
        let command = self.waiting.peek().map(|command| command.due);
        let posts = self.posts.iter().map(|post| post.due);
        let post = posts.filter(|due| *due > now).min();
        [registers, command, post].into_iter().flatten().min()
    }

    fn fetch_all(&mut self) -> bool {
        let mut worked = false;
        for qid in 0..self.sqs.len() {
            if self.sqs[qid].is_none() {
                continue;
            }
            if !self.read_shadow_doorbell(qid) {
                return true;
            }
            while self.sqs[qid].as_ref().is_some_and(|sq| !sq.is_empty()) {
                worked = true;
                self.fetch(qid);
                // The fetched command may have failed, reset or removed the controller.
                if !self.csts.is_ready() || self.csts.is_fatal() || !self.present {
                    return true;
                }
            }
        }
        worked
    }

    /// Reads the shadow doorbell of the submission queue. Returns false if the controller failed.
    fn read_shadow_doorbell(&mut self, qid: usize) -> bool {
        let Some(sq) = &mut self.sqs[qid] else {
            return true;
        };
        match sq.read_shadow_doorbell(&self.exec.iommu, self.faults.careless) {
            Ok(Ok(())) => true,
            Ok(Err(wrong)) => {
                self.exec
                    .violations
                    .note(format!("shadow doorbell in memory: {wrong}"));
                true
            }
            Err(outside) => {
                self.fail(format!("shadow doorbell of queue {qid}: {outside}"));
                false
            }
        }
    }

    fn fetch(&mut self, qid: usize) {
        let Some(sq) = &mut self.sqs[qid] else { return };
        let sqe = match sq.fetch(&self.exec.iommu) {
            Ok(sqe) => sqe,
            Err(outside) => return self.fail(format!("entry of queue {qid}: {outside}")),
        };
        let sqid = sq.id;
        let taken = sq.take(sqe.cid());
        let first = sq.fused.take();
        let counts = if sqid == 0 {
            &mut self.exec.stats.admin
        } else {
            &mut self.exec.stats.io
        };
        counts[usize::from(sqe.opcode)] += 1;
        if !taken {
            self.exec.violations.note(format!(
                "queue {sqid}: identifier {:#x} is in flight already: {sqe:?}",
                sqe.cid()
            ));
        }
        if let Some(what) = strict::reserved(sqid == 0, &sqe) {
            self.exec
                .violations
                .note(format!("queue {sqid}: {what}: {sqe:?}"));
        }
        match (first, sqe.fuse()) {
            (None, Fuse::Normal | Fuse::Reserved) => self.accept(sqid, sqe, None),
            (None, Fuse::First) => {
                let sq = self.sqs[qid].as_mut();
                let alone = sq.as_ref().is_none_or(|sq| sq.is_empty());
                if let Some(sq) = sq {
                    sq.fused = Some(sqe);
                }
                if alone {
                    self.exec.violations.note(format!(
                        "queue {sqid}: half of a fused pair, submitted without the other: {sqe:?}"
                    ));
                }
            }
            (Some(first), Fuse::Second) => self.accept(sqid, sqe, Some(first)),
            (first, _) => {
                self.exec.violations.note(format!(
                    "queue {sqid}: half of a fused pair: {first:?} {sqe:?}"
                ));
                let status = StatusCode::ABORTED_MISSING_FUSED;
                if let Some(first) = first {
                    self.answer(sqid, first.cid(), status, 0);
                }
                self.answer(sqid, sqe.cid(), status, 0);
            }
        }
    }

    fn accept(&mut self, sqid: u16, sqe: Sqe, first: Option<Sqe>) {
        let action = self
            .faults
            .strike(sqid, sqe.opcode, sqe.nsid(), &mut self.random);
        match action {
            Some(Action::Fatal) => return self.csts = self.csts.with_cfs(1),
            Some(Action::ResetItself) => return self.reset_controller(),
            Some(Action::Pulled) => return self.pull(crate::media::CacheSurvival::Some),
            _ => {}
        }
        let (least, most) = self.exec.config.pace.latency;
        let (delay, order) = if least == most {
            (least, 0)
        } else {
            let span = (most - least).as_nanos() as u64;
            let more = std::time::Duration::from_nanos(self.random.below(span + 1));
            (least + more, self.random.draw() >> 32)
        };
        self.order += 1;
        self.waiting.push(Command {
            due: self.now + delay,
            order: order << 32 | (self.order & 0xffff_ffff),
            sqid,
            sqe,
            first,
            action,
        });
    }

    fn run_due(&mut self) -> bool {
        let mut worked = false;
        while self
            .waiting
            .peek()
            .is_some_and(|command| command.due <= self.now)
        {
            let Some(command) = self.waiting.pop() else {
                break;
            };
            worked = true;
            self.run(command);
        }
        worked
    }

    fn run(&mut self, command: Command) {
        let Command {
            sqid,
            sqe,
            first,
            action,
            ..
        } = command;
        match action {
            Some(Action::Hold | Action::Never { done: false, .. }) => {
                return self.stuck.push(command);
            }
            Some(Action::Status(status)) => {
                if let Some(first) = first {
                    self.answer(sqid, first.cid(), StatusCode::ABORTED_FAILED_FUSED, 0);
                }
                return self.answer(sqid, sqe.cid(), status, 0);
            }
            _ => {}
        }
        self.exec.page = self.page();
        let answer = match (sqid, first) {
            (0, _) => self.admin(&sqe),
            (_, None) => Some((self.exec.io(&sqe), 0)),
            (_, Some(first)) => {
                let (compared, written) = self.exec.compare_and_write(&first, &sqe);
                self.answer(sqid, first.cid(), compared, 0);
                Some((written, 0))
            }
        };
        if let Some(Action::Never { .. }) = action {
            return self.stuck.push(command);
        }
        // `None`: an Asynchronous Event Request, or its queue was deleted with the command.
        if let Some((status, dword0)) = answer {
            let status = match action {
                Some(Action::DoneButStatus(status)) => status,
                _ => status,
            };
            if !status.is_success() {
                self.exec.log_error(sqid, &sqe, status);
            }
            self.answer_by(sqid, sqe.cid(), status, dword0, action);
        }
    }

    /// Sets CSTS.CFS, and records a violation: an address that is not registered, or registers with
    /// which the controller cannot be enabled.
    pub(crate) fn fail(&mut self, what: String) {
        self.exec.violations.note(what);
        self.csts = self.csts.with_cfs(1);
    }

    /// Commands fetched and not completed, other than Asynchronous Event Requests.
    pub(crate) fn in_flight(&self) -> usize {
        self.waiting.len() + self.stuck.len() + self.posts.len()
    }
}
