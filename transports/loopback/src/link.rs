//! One loopback connection: the queues of messages between host and target, the commands in
//! progress, and the end of the connection.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use nacre_hugepages::Buf;
use nacre_nvmf::transport::{Closed, HostEvent, ReqTag};
use nacre_nvmf_wire::sqe::Sqe;

/// A command that the host has submitted and that is not complete: the data to write, or the buffer
/// to read into.
pub(crate) struct Command {
    pub write: Option<Buf>,
    pub read: Option<Buf>,
}

/// The end of a connection, as one of its sides sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum End {
    Open,
    /// The end is to be reported after every earlier message.
    Due(Closed),
    Reported,
}

/// The state that both ends share.
pub(crate) struct Link {
    /// Identifiers and submission queue entries of commands in transit to the target; `commands`
    /// has their buffers.
    pub capsules: VecDeque<(u16, Sqe)>,
    /// Buffers of commands that are not complete, indexed by command identifier.
    pub commands: Vec<Option<Command>>,
    /// Data of commands in transit to the target.
    pub fetched: VecDeque<(ReqTag, Buf)>,
    pub to_host: VecDeque<HostEvent>,
    /// Number of commands that the target received and has not completed.
    pub outstanding: usize,
    /// Size of the submission queue, from its Connect command; 32 before that.
    pub entries: usize,
    /// True while [`Faults::stall`] holds all messages back.
    pub stalled: bool,
    pub host: End,
    pub target: End,
}

impl Link {
    pub(crate) fn new() -> Self {
        Self {
            capsules: VecDeque::new(),
            commands: Vec::new(),
            fetched: VecDeque::new(),
            to_host: VecDeque::from([HostEvent::Ready]),
            outstanding: 0,
            entries: 32,
            stalled: false,
            host: End::Open,
            target: End::Open,
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.host == End::Open && self.target == End::Open
    }

    /// Ends the connection; `host` and `target` are the reasons that the two sides report. Messages
    /// in transit to the target are dropped. If `drained`, those to the host still arrive. If not,
    /// they are dropped too, and the host can reclaim the buffers of its commands.
    pub(crate) fn end(&mut self, host: Closed, target: Closed, drained: bool) {
        if !self.is_open() {
            return;
        }
        self.capsules.clear();
        self.fetched.clear();
        if !drained {
            // An answer that does not arrive leaves its command open, for the host to reclaim.
            for event in self.to_host.drain(..) {
                if let HostEvent::Completion { cqe, read, .. } = event {
                    let slot = self.commands.get_mut(usize::from(cqe.cid()));
                    if let Some(slot) = slot {
                        *slot = Some(Command { write: None, read });
                    }
                }
            }
        }
        self.host = End::Due(host);
        self.target = End::Due(target);
    }
}

/// Injects network faults into one loopback connection, for tests.
#[derive(Clone)]
pub struct Faults {
    pub(crate) link: Rc<RefCell<Link>>,
    pub(crate) notify: Rc<dyn Fn()>,
}

impl Faults {
    /// Breaks the connection; both ends get an error.
    pub fn break_now(&self) {
        let why = Closed::Broken("the loopback connection was broken on purpose".into());
        self.link.borrow_mut().end(why.clone(), why, false);
        (self.notify)();
    }

    /// While `stalled` is true, neither end receives anything, not even the end of the connection;
    /// only the target's own close completes.
    pub fn stall(&self, stalled: bool) {
        self.link.borrow_mut().stalled = stalled;
        (self.notify)();
    }
}
