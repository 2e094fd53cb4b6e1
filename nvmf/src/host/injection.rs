//! Error injection into the queues of a controller: [`Injector`] is a transport around the one of
//! a queue.
//!
//! ```text
//!   submit ─▶ Injector ─────────────▶ transport
//!                 └▶ held: completes with the status after its delay
//!   poll   ◀─ Injector ◀ a success becomes the status ◀─ transport
//! ```
//!
//! A queue gets its injector with its first rule, so a queue without rules has no cost. Rules end
//! with the connection of the queue.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nacre_bdev::injection::{Injection, Injections};
use nacre_nvmf_wire::{Cqe, Fuse, StatusCode};
use nacre_reactor::{EventSet, Idle, Nanos};
use parking_lot::Mutex;

use crate::transport::{HostCommand, HostEvent, HostTransport, HostWorkRequests};

/// The queues that a rule is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum InjectionQueues {
    Admin,
    Io,
}

/// The number of a change, and the rule after it.
type Change = (u64, Option<Injection>);

/// The last change of each rule of a controller. The queues take changes from here.
#[derive(Debug, Default)]
pub(super) struct InjectionChanges {
    /// Number of changes.
    count: AtomicU64,
    last: Mutex<BTreeMap<(InjectionQueues, u8), Change>>,
}

impl InjectionChanges {
    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    pub(super) fn set(&self, queues: InjectionQueues, opcode: u8, injection: Option<Injection>) {
        let mut last = self.last.lock();
        let count = self.count() + 1;
        last.insert((queues, opcode), (count, injection));
        self.count.store(count, Ordering::Release);
    }

    /// The rules that changed after the first `seen` changes, by opcode.
    pub(super) fn after(&self, queues: InjectionQueues, seen: u64) -> Vec<(u8, Option<Injection>)> {
        let last = self.last.lock();
        let of_queues = last.range((queues, 0)..=(queues, u8::MAX));
        let new = of_queues.filter(|(_, (count, _))| *count > seen);
        new.map(|((_, opcode), (_, rule))| (*opcode, *rule))
            .collect()
    }
}

/// A transport that applies the rules to the commands of its queue.
pub(super) struct Injector {
    inner: Box<dyn HostTransport>,
    rules: Rc<RefCell<Injections>>,
    /// Opcodes of the commands that were submitted here, by identifier.
    opcodes: Vec<Option<u8>>,
    held: Vec<Held>,
}

/// A command that is not sent.
struct Held {
    command: HostCommand,
    status: StatusCode,
    delay: Duration,
    /// Time of the completion; set by the first poll.
    due: Option<Nanos>,
}

impl Injector {
    pub(super) fn new(inner: Box<dyn HostTransport>, rules: Rc<RefCell<Injections>>) -> Self {
        Self {
            inner,
            rules,
            opcodes: Vec::new(),
            held: Vec::new(),
        }
    }

    /// Replaces the success of a command by the status of its rule.
    fn replaced(&mut self, cqe: Cqe) -> Cqe {
        let slot = self.opcodes.get_mut(usize::from(cqe.cid()));
        let opcode = slot.and_then(Option::take);
        let Some(opcode) = opcode.filter(|_| cqe.status().is_success()) else {
            return cqe;
        };
        match self.rules.borrow_mut().fail(opcode) {
            Some((sct, sc)) => Cqe::new(cqe.cid(), StatusCode::new(sct, sc)),
            None => cqe,
        }
    }
}

impl HostTransport for Injector {
    fn device(&self) -> Option<&str> {
        self.inner.device()
    }

    fn work_requests(&self) -> HostWorkRequests {
        self.inner.work_requests()
    }

    fn submit(&mut self, command: HostCommand) {
        let (opcode, cid) = (command.sqe.opcode, command.sqe.cid());
        // Half of a fused pair would leave the other half at the target.
        let is_single = command.sqe.fuse() == Fuse::Normal;
        let held = is_single.then(|| self.rules.borrow_mut().withhold(opcode));
        if let Some((sct, sc, delay)) = held.flatten() {
            self.held.push(Held {
                command,
                status: StatusCode::new(sct, sc),
                delay,
                due: None,
            });
            return;
        }
        let at = usize::from(cid);
        if self.opcodes.len() <= at {
            self.opcodes.resize(at + 1, None);
        }
        self.opcodes[at] = Some(opcode);
        self.inner.submit(command);
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<HostEvent>, limit: usize) {
        let first = events.len();
        self.inner.poll(now, events, limit);
        let mut is_closed = false;
        for event in &mut events[first..] {
            match event {
                HostEvent::Completion { cqe, .. } => *cqe = self.replaced(*cqe),
                HostEvent::Closed(_) => is_closed = true,
                HostEvent::Ready => {}
            }
        }
        // The held commands of a closed connection are reclaimed.
        let mut at = 0;
        while at < self.held.len() && !is_closed && events.len() - first < limit {
            let held = &mut self.held[at];
            let due = *held.due.get_or_insert(now + held.delay);
            if due > now {
                at += 1;
                continue;
            }
            let Held {
                command, status, ..
            } = self.held.remove(at);
            events.push(HostEvent::Completion {
                cqe: Cqe::new(command.sqe.cid(), status),
                read: command.read,
                transferred: 0,
            });
        }
    }

    fn set_in_capsule_bytes(&mut self, bytes: u32) {
        self.inner.set_in_capsule_bytes(bytes);
    }

    fn reclaim(&mut self) -> Option<HostCommand> {
        let held = self.held.pop().map(|held| held.command);
        held.or_else(|| self.inner.reclaim())
    }

    fn close(&mut self) {
        self.inner.close();
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        let idle = self.inner.arm(now);
        let held = self.held.iter();
        held.fold(idle, |idle, held| match held.due {
            Some(due) => idle.and(Idle::Until(due)),
            None => Idle::Busy,
        })
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }

    fn watch_in(&mut self, set: &EventSet) -> std::io::Result<()> {
        self.inner.watch_in(set)
    }

    fn leave(&mut self, set: &EventSet) {
        self.inner.leave(set);
    }
}

/// The transport of a queue while its injector is made.
pub(super) struct Placeholder;

impl HostTransport for Placeholder {
    fn submit(&mut self, _: HostCommand) {}

    fn poll(&mut self, _: Nanos, _: &mut Vec<HostEvent>, _: usize) {}

    fn set_in_capsule_bytes(&mut self, _: u32) {}

    fn reclaim(&mut self) -> Option<HostCommand> {
        None
    }

    fn close(&mut self) {}

    fn arm(&mut self, _: Nanos) -> Idle {
        Idle::Quiet
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
