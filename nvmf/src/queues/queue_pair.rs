//! A queue pair on its core: the connection, its place in an association, and its requests.

use std::collections::VecDeque;
use std::sync::Arc;

use nacre_bdev::Op;
use nacre_nvmf_wire::opcode::admin;
use nacre_nvmf_wire::{Cqe, Sqe};
use nacre_reactor::Nanos;

use crate::controller::Controller;
use crate::queues::authentication::QueueAuth;
use crate::queues::decode::{Plan, Transfer};
use crate::queues::request::Requests;
use crate::subsystems::association::Association;
use crate::subsystems::authentication::QueueAuthState;
use crate::subsystems::config::IoLimits;
use crate::subsystems::core_handle::{ReqIndex, ReqRef};
use crate::subsystems::namespace::{Namespace, View};
use crate::subsystems::places::{Place, UnprovenPlace};
use crate::subsystems::reservation::RightsCache;
use crate::subsystems::stats::QueueStats;
use crate::transport::{Address, ConnId, ListenerId, ReqTag, Response};

/// Where a queue pair is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Connected by the transport; the fabrics Connect has to come.
    Fresh,
    /// Connected; until its host has authenticated itself it has only the commands for that.
    Authenticating,
    Live,
    /// Ending: accepts and completes no command; it goes when its device I/Os are finished and the
    /// transport has released it.
    Ending,
}

/// A queue pair of this core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueueId {
    /// Its place in the core's table.
    pub index: u32,
    /// Distinguishes this queue pair from an earlier one in its place.
    pub generation: u32,
}

pub(crate) struct QueuePair {
    pub id: QueueId,
    /// The transport, by its place in the core's list.
    pub port: usize,
    pub conn: ConnId,
    pub ends: Ends,
    pub stage: Stage,
    pub opening: Opening,
    /// The answer to its Disconnect, which waits until no device has anything of it.
    pub farewell: Option<Box<Response>>,
    /// The transport reported the connection closed.
    pub closed: bool,
    pub qid: u16,
    pub flow: Flow,
    /// The transport sends data of this connection from the device's own memory.
    pub takes_lent: bool,
    pub in_place: InPlace,
    pub association: Option<Arc<Association>>,
    pub admission: Admission,
    /// The controller, in admin queues only.
    pub controller: Option<Box<Controller>>,
    pub requests: Requests,
    pub limits: IoLimits,
    pub view: Arc<View>,
    pub view_version: u64,
    /// What its host may do with namespaces that are reserved.
    pub rights: RightsCache,
    /// Device I/Os under way, of all requests.
    pub inflight: u32,
    /// A fused pair whose second half has to come next.
    pub fused: Option<FusedFirst>,
    pub fetches: Fetches,
    pub stats: Arc<QueueStats>,
}

/// Where a connection comes from and where it leads.
pub(crate) struct Ends {
    pub listener: ListenerId,
    pub local: Address,
    pub peer: Address,
}

/// The submission queue, as the host's flow control sees it.
pub(crate) struct Flow {
    pub entries: u16,
    pub head: u16,
    pub is_off: bool,
}

/// The time until the Connect is answered.
pub(crate) struct Opening {
    pub since: Nanos,
    pub is_unanswered: bool,
    /// The Connect waits until an earlier controller of the host is gone.
    pub waiting: Option<ReqIndex>,
}

/// The places that a queue takes at its Connect, and the authentication of its host.
#[derive(Default)]
pub(crate) struct Admission {
    /// The queue's place in the connection limit, from the accepted Connect on.
    pub place: Option<Place>,
    /// The queue's place among unauthenticated queues, while its host must authenticate itself.
    pub unproven: Option<UnprovenPlace>,
    /// State of the queue's authentication, from the first one on.
    pub auth: Option<Box<QueueAuth>>,
    pub auth_state: Arc<QueueAuthState>,
}

/// True for a connection whose data may stay in a receive buffer.
#[derive(Default)]
pub(crate) struct InPlace {
    /// The last value of [`crate::transport::Transport::set_in_place`] for the transport.
    pub now: bool,
    /// The value was true before: some data may still be in place.
    pub before: bool,
}

/// The data that the transport fetches from the host.
pub(crate) struct Fetches {
    /// Bytes that it is fetching.
    pub bytes: usize,
    /// How many it should fetch at most.
    pub window: usize,
    /// The requests that wait for that, oldest first.
    pub waiting: VecDeque<ReqIndex>,
}

/// The first half of a fused pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FusedFirst {
    Waiting(ReqIndex),
    /// It was refused and answered; its second half is to be aborted.
    Failed,
}

/// Requests of a connection before its Connect: the Connect itself and one to refuse.
const FRESH_ENTRIES: u16 = 2;

impl QueuePair {
    /// True if `sqe` has the identifier of an event request that its host gave up; the request is
    /// dropped then.
    ///
    /// SPDK's host ends its event requests by itself when it leaves, and uses their identifiers for
    /// the register accesses that shut the controller down. The controller chooses how many
    /// commands it searches for a conflict (Base, Command ID Conflict). Leaving these out lets such
    /// a host leave in order, and the host gets no response to a dropped request. The transport
    /// still counts the request: a host that does this as often as the queue has entries has
    /// overrun it.
    #[cold]
    pub fn forget_event_request(&mut self, sqe: &Sqe) -> bool {
        // An event request with the identifier of another one is a conflict, not a departure.
        if !sqe.is_fabrics() && sqe.opcode == admin::ASYNC_EVENT_REQUEST {
            return false;
        }
        let Some(controller) = &mut self.controller else {
            return false;
        };
        let (cid, found) = (sqe.cid(), self.requests.find(sqe.cid()));
        match found {
            Some(index) if controller.forget_event_request(cid) => {
                self.requests.end(index);
                true
            }
            _ => false,
        }
    }

    pub fn new(
        id: QueueId,
        (port, conn): (usize, ConnId),
        ends: Ends,
        limits: IoLimits,
        now: Nanos,
    ) -> QueuePair {
        QueuePair {
            id,
            port,
            conn,
            ends,
            stage: Stage::Fresh,
            opening: Opening {
                since: now,
                is_unanswered: true,
                waiting: None,
            },
            farewell: None,
            closed: false,
            qid: 0,
            flow: Flow {
                entries: FRESH_ENTRIES,
                head: 0,
                is_off: false,
            },
            takes_lent: false,
            in_place: InPlace::default(),
            association: None,
            admission: Admission::default(),
            controller: None,
            requests: Requests::new(FRESH_ENTRIES),
            limits,
            view: Arc::new(View::default()),
            view_version: 0,
            rights: RightsCache::default(),
            inflight: 0,
            fused: None,
            fetches: Fetches {
                bytes: 0,
                window: usize::MAX,
                waiting: VecDeque::new(),
            },
            stats: Arc::new(QueueStats::default()),
        }
    }

    pub fn is_admin(&self) -> bool {
        self.controller.is_some()
    }

    /// True for an I/O queue, false for an admin queue or before the Connect.
    pub fn takes_io(&self) -> bool {
        !self.is_admin() && self.stage != Stage::Fresh
    }

    pub fn name_of(&self, index: ReqIndex) -> ReqRef {
        ReqRef {
            queue: self.id.index,
            generation: self.id.generation,
            request: index,
            begun: self.requests[index].begun(),
        }
    }

    /// Takes the association's current view if it changed, and says whether it did.
    pub fn refresh_view(&mut self) -> bool {
        let Some(association) = &self.association else {
            return false;
        };
        let version = association.view_version();
        let changed = version != self.view_version;
        if changed {
            self.view = association.view();
            self.view_version = version;
        }
        changed
    }

    /// The namespace that a request was decoded for, if it still exists: never another namespace
    /// with its id.
    #[inline]
    pub fn namespace_of(&self, index: ReqIndex) -> Option<&Arc<Namespace>> {
        let request = &self.requests[index];
        let namespace = self.view.get(request.sqe.nsid())?;
        (namespace.serial == request.namespace).then_some(namespace)
    }

    /// Whether a request is a read that the device answers with its own memory.
    #[inline]
    pub fn lends(&self, index: ReqIndex) -> bool {
        let request = &self.requests[index];
        let Plan::Single {
            op: Op::Read,
            blocks,
            ..
        } = request.plan
        else {
            return false;
        };
        self.takes_lent
            && self
                .namespace_of(index)
                .is_some_and(|namespace| blocks <= namespace.lend_blocks)
    }

    /// True if a command that has just arrived needs neither a buffer nor data.
    #[inline]
    pub fn has_all(&self, index: ReqIndex) -> bool {
        let request = &self.requests[index];
        match request.plan {
            Plan::Single { op: Op::Read, .. } => self.lends(index),
            Plan::Single { op: Op::Write, .. } => {
                request.data.is_some() && (self.in_place.now || !self.in_place.before)
            }
            _ => false,
        }
    }

    /// Whether the transport may fetch so much more now.
    #[inline]
    pub fn may_fetch(&self, bytes: usize) -> bool {
        self.fetches.bytes == 0 || self.fetches.bytes.saturating_add(bytes) <= self.fetches.window
    }

    /// The bytes of a command that the host has to send.
    pub fn bytes_from_host(&self, index: ReqIndex) -> usize {
        let request = &self.requests[index];
        match request.plan.transfer(&request.sqe) {
            Transfer::FromHost(bytes) => bytes as usize,
            _ => 0,
        }
    }

    pub fn tag(&self, index: ReqIndex) -> ReqTag {
        ReqTag {
            cid: self.requests[index].sqe.cid(),
            index,
        }
    }

    /// Fills in the fields that every completion of this queue has. The head moves with
    /// completions, so that a host with flow control never has more commands outstanding than the
    /// queue has entries.
    pub fn seal(&mut self, cqe: Cqe) -> Cqe {
        self.flow.head = if self.flow.head + 1 >= self.flow.entries {
            0
        } else {
            self.flow.head + 1
        };
        // Without flow control the head means nothing, but for saying so in the answer to Connect.
        let head = match self.flow.is_off {
            false => self.flow.head,
            true if self.opening.is_unanswered => Cqe::SQHD_NO_FLOW_CONTROL,
            true => 0,
        };
        let mut cqe = cqe.with_sqhd(head);
        cqe.sqid = 0.into();
        cqe
    }
}
