//! One queue pair of the host: command identifiers, outstanding commands and their completions.
//! [`super::HostController`] and [`super::IoQueue`] use it.

mod authentication;

use std::cell::RefCell;
use std::rc::Rc;

use nacre_bdev::injection::{Injection, Injections};
use nacre_hugepages::{Buf, Pool};
use nacre_nvmf_wire::fabrics::AuthRequirements;
use nacre_nvmf_wire::{Cqe, Sqe};
use nacre_reactor::{Idle, Nanos};

pub use self::authentication::Proof;
use self::authentication::Transaction;
use super::error::HostError;
use super::injection::{InjectionQueues, Injector, Placeholder};
use super::link::Link;
use super::options::HostOptions;
use crate::transport::{Closed, HostCommand, HostEvent, HostTransport, HostWorkRequests};

/// The completion of a command.
#[derive(Debug)]
pub struct Finished {
    /// The token from [`CommandQueue::submit`].
    pub token: u64,
    pub cqe: Cqe,
    pub read: Option<Buf>,
    /// Number of bytes received in `read`.
    pub transferred: u32,
}

#[derive(Clone, Copy)]
struct Slot {
    token: u64,
    /// The time of submission; `None`: the slot is free.
    since: Option<Nanos>,
}

/// One queue pair of the host over its transport.
pub struct CommandQueue {
    transport: Box<dyn HostTransport>,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    events: Vec<HostEvent>,
    ready: bool,
    closed: Option<Closed>,
    /// The authentication transaction, from Connect until the queue is authenticated.
    transaction: Option<Box<Transaction>>,
    /// The rules of error injection; `Some` once the transport is an [`Injector`].
    injections: Option<Rc<RefCell<Injections>>>,
    /// Number of rule changes that were applied; `None`: before the first call.
    injections_seen: Option<u64>,
}

/// The token of authentication commands. No other command uses it.
const AUTHENTICATION: u64 = FORGOTTEN - 1;

/// The token of commands whose completions are dropped. No other command uses it.
const FORGOTTEN: u64 = u64::MAX - 1000;

/// Most events of the transport per poll.
const BATCH: usize = 256;

impl CommandQueue {
    /// Creates a queue of `entries` entries, of which all but one can be in use (Base 3.3.1.4).
    pub fn new(transport: Box<dyn HostTransport>, entries: u16) -> Self {
        let usable = entries.saturating_sub(1).max(1);
        Self {
            transport,
            slots: vec![
                Slot {
                    token: 0,
                    since: None
                };
                usable as usize
            ]
            .into_boxed_slice(),
            free: (0..usable).rev().collect(),
            events: Vec::with_capacity(BATCH),
            ready: false,
            closed: None,
            transaction: None,
            injections: None,
            injections_seen: None,
        }
    }

    /// Applies the rules of error injection that changed since the previous call. The first call
    /// applies none.
    #[inline]
    pub(super) fn take_injections(&mut self, queues: InjectionQueues, link: &Link) {
        let count = link.injections().count();
        let seen = self.injections_seen.replace(count).unwrap_or(count);
        if seen != count {
            self.inject(link.injections().after(queues, seen));
        }
    }

    fn inject(&mut self, rules: Vec<(u8, Option<Injection>)>) {
        if rules.is_empty() {
            return;
        }
        let injections = self.injections.get_or_insert_with(|| {
            let injections = Rc::default();
            let inner = std::mem::replace(&mut self.transport, Box::new(Placeholder));
            self.transport = Box::new(Injector::new(inner, Rc::clone(&injections)));
            injections
        });
        for (opcode, rule) in rules {
            injections.borrow_mut().set(opcode, rule);
        }
    }

    /// The RDMA device of the connection.
    pub(super) fn device(&self) -> Option<&str> {
        self.transport.device()
    }

    pub(super) fn work_requests(&self) -> HostWorkRequests {
        self.transport.work_requests()
    }

    /// True once the transport's handshake is complete.
    pub fn is_ready(&self) -> bool {
        self.ready
    }

    /// The reason why the connection was closed; `None` while it is open.
    pub fn closed(&self) -> Option<&Closed> {
        self.closed.as_ref()
    }

    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Number of commands that can be submitted now.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    pub fn outstanding(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Submits a command and returns its command identifier, which this function assigns.
    ///
    /// # Panics
    /// When the queue is full: check [`CommandQueue::has_room`] first.
    pub fn submit(
        &mut self,
        mut sqe: Sqe,
        write: Option<Buf>,
        read: Option<Buf>,
        token: u64,
        now: Nanos,
    ) -> u16 {
        let cid = self.free.pop().expect("room in the queue");
        self.slots[cid as usize] = Slot {
            token,
            since: Some(now),
        };
        sqe.cid = cid.into();
        self.transport.submit(HostCommand { sqe, write, read });
        cid
    }

    /// Sends submitted commands without receiving completions.
    #[inline]
    pub fn flush(&mut self) {
        self.transport.flush();
    }

    /// Sends and receives. Calls `finished` for each completion, except those of authentication
    /// commands and of forgotten ones. Returns the number of all completions.
    pub fn poll(&mut self, now: Nanos, mut finished: impl FnMut(Finished)) -> usize {
        if self.closed.is_some() {
            return 0;
        }
        self.transport.poll(now, &mut self.events, BATCH);
        let mut count = 0;
        for event in self.events.drain(..) {
            match event {
                HostEvent::Completion {
                    cqe,
                    read,
                    transferred,
                } => {
                    let cid = cqe.cid();
                    // The transport passes only completions of outstanding commands.
                    let Some(slot) = self.slots.get_mut(cid as usize) else {
                        continue;
                    };
                    if slot.since.take().is_none() {
                        continue;
                    }
                    self.free.push(cid);
                    count += 1;
                    let one = Finished {
                        token: slot.token,
                        cqe,
                        read,
                        transferred,
                    };
                    match slot.token {
                        FORGOTTEN => {}
                        AUTHENTICATION => {
                            if let Some(transaction) = &mut self.transaction {
                                transaction.finished(&one);
                            }
                        }
                        _ => finished(one),
                    }
                }
                HostEvent::Ready => self.ready = true,
                HostEvent::Closed(why) => self.closed = Some(why),
            }
        }
        count
    }

    /// The submission time of the oldest outstanding command.
    pub fn oldest(&self) -> Option<Nanos> {
        self.oldest_of(|_| true)
    }

    /// The submission time of the oldest outstanding command whose token is `wanted`.
    pub fn oldest_of(&self, wanted: impl Fn(u64) -> bool) -> Option<Nanos> {
        let slots = self.slots.iter().filter(|slot| wanted(slot.token));
        slots.filter_map(|slot| slot.since).min()
    }

    /// Makes the queue drop the completions of the outstanding commands with this token.
    pub fn forget(&mut self, token: u64) {
        for slot in &mut self.slots {
            if slot.token == token && slot.since.is_some() {
                slot.token = FORGOTTEN;
            }
        }
    }

    /// Starts the authentication of queue `qid` after Connect. Returns false if none is needed.
    pub fn begin_authentication(
        &mut self,
        options: &HostOptions,
        required: AuthRequirements,
        qid: u16,
    ) -> Result<bool, HostError> {
        let transaction = authentication::after_connect(options, required, qid)?;
        self.transaction = transaction.map(Box::new);
        Ok(self.transaction.is_some())
    }

    /// Continues the authentication. `Some`: it has ended with this result.
    pub fn authenticate(&mut self, pool: &Pool, now: Nanos) -> Option<Result<Proof, HostError>> {
        let mut transaction = self.transaction.take()?;
        let result = transaction.drive(self, pool, AUTHENTICATION, now);
        if result.is_none() {
            self.transaction = Some(transaction);
        }
        result
    }

    /// See [`nacre_reactor::Poller::arm`].
    pub fn arm(&mut self, now: Nanos) -> Idle {
        let idle = self.transport.arm(now);
        match &self.transaction {
            Some(transaction) => idle.and(transaction.idle(now)),
            None => idle,
        }
    }

    /// Tokens of the outstanding commands, except authentication commands and forgotten ones.
    pub fn tokens(&self) -> impl Iterator<Item = u64> + '_ {
        self.slots
            .iter()
            .filter(|slot| slot.since.is_some())
            .map(|slot| slot.token)
            .filter(|token| ![FORGOTTEN, AUTHENTICATION].contains(token))
    }

    /// The token of the outstanding command with this identifier.
    pub fn token_of(&self, cid: u16) -> Option<u64> {
        let slot = self.slots.get(usize::from(cid))?;
        slot.since.map(|_| slot.token)
    }

    pub fn transport(&mut self) -> &mut dyn HostTransport {
        self.transport.as_mut()
    }
}

impl Drop for CommandQueue {
    fn drop(&mut self) {
        self.transport.close();
    }
}
