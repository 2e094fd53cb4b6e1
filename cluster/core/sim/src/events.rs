//! Messages between the parts of the simulator, and the events of its queue.

use nacre_cluster_core::Holder;
use nacre_cluster_core::gate::Key;

use crate::client::Command;
use crate::node::{Answer, Request};
use crate::replica::{Io, IoResult};

/// An injected failure that ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trouble {
    StoreAway,
    StoreFull,
    StoreCut(usize),
    Watch(usize),
    /// The link from the first node to the second is cut; with true also the way back.
    Link(usize, usize, bool),
    Isolation(usize),
    /// Answers and events of the store arrive late at the node. Its end may begin an isolation.
    Slow(usize),
}

/// The cores of a node; each stalls separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Core {
    Management,
    Lanes,
    Gates,
}

/// A message to a core of a node.
#[derive(Debug)]
pub(crate) enum Message {
    Turn,
    Store(u64, Answer),
    Watch(usize),
    Granted {
        replica: usize,
        key: Key,
        session: u64,
    },
    GateRefused {
        replica: usize,
        key: Key,
        session: u64,
        current: Option<Key>,
    },
    /// No command is in flight, for the close with this number.
    Drained {
        number: u64,
    },
    IoDone {
        id: u64,
        result: IoResult,
    },
    LaneTurn,
    Close {
        number: u64,
    },
    Command(Command),
    /// Hands the collected answers on. The clock is that of the turn in which they were collected.
    Hand {
        clock: u64,
    },
    Confirmation {
        round: u64,
        replica: usize,
        key: Option<Key>,
    },
    Acquire {
        from: usize,
        life: u64,
        replica: usize,
        key: Key,
        session: u64,
    },
    Io {
        from: usize,
        life: u64,
        core: Core,
        id: u64,
        replica: usize,
        io: Io,
        key: Key,
        session: u64,
    },
    OnDisk {
        from: usize,
        life: u64,
        core: Core,
        id: u64,
        replica: usize,
    },
    KeyStored {
        replica: usize,
        key: Key,
    },
    Report {
        from: usize,
        life: u64,
        round: u64,
        replica: usize,
    },
}

#[derive(Debug)]
pub(crate) enum Event {
    Node {
        node: usize,
        life: u64,
        core: Core,
        message: Message,
    },
    Store {
        request: Request,
    },
    Host {
        client: usize,
        attempt: u64,
        value: Option<u64>,
    },
    HostTimer {
        client: usize,
        attempt: u64,
    },
    Trouble,
    Crash {
        node: usize,
        down_ms: u64,
    },
    /// Two nodes die at once, and stay down.
    LoseTwo,
    Start {
        node: usize,
    },
    FenceOff {
        dead: Holder,
    },
    /// The failure begins, and lasts this many milliseconds at most.
    Begin(Trouble, u64),
    Heal(Trouble),
}

/// An event in the queue. Events at one time keep their order.
pub(crate) struct Scheduled {
    pub at: u64,
    pub number: u64,
    pub event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}
