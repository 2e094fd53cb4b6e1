//! [`QueuePair`]: one queue of a controller on its core, with its connection, its association and
//! its requests.

use std::collections::VecDeque;
use std::sync::Arc;

use nacre_bdev::Op;
use nacre_nvmf_wire::opcode::admin;
use nacre_nvmf_wire::{Cqe, Sqe};
use nacre_reactor::Nanos;

use crate::controller::Controller;
use crate::queues::decode::{Plan, Transfer};
use crate::queues::queue_auth::QueueAuth;
use crate::queues::request::Requests;
use crate::subsystems::association::Association;
use crate::subsystems::authentication::QueueAuthState;
use crate::subsystems::config::IoLimits;
use crate::subsystems::core_handle::{QueueId, ReqIndex, ReqRef};
use crate::subsystems::namespace::{Namespace, View};
use crate::subsystems::places::{Place, UnprovenPlace};
use crate::subsystems::reservation::RightsCache;
use crate::subsystems::stats::QueueStats;
use crate::subsystems::subsystem::Subsystem;
use crate::transport::{Address, ConnId, ListenerId, ReqTag, Response};

/// The state of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The transport is connected; waits for the Connect command.
    Fresh,
    /// Connected; accepts only authentication commands.
    Authenticating,
    Live,
    /// Closed: accepts and completes no command. Removed when the devices have completed its I/O
    /// and the transport has released the connection.
    Ending,
}

pub(crate) struct QueuePair {
    pub id: QueueId,
    /// Index of the transport in the core's list.
    pub port: usize,
    pub conn: ConnId,
    pub ends: ConnectionEnds,
    pub stage: Stage,
    pub opening: Opening,
    pub closing: Closing,
    pub qid: u16,
    pub flow: Flow,
    /// The transport sends data of this connection from the device's own memory.
    pub takes_zero_copy: bool,
    pub in_place: InPlace,
    /// The subsystem of the association.
    pub subsystem: Option<Arc<Subsystem>>,
    pub association: Option<Arc<Association>>,
    pub admission: Admission,
    /// The controller, in admin queues only.
    pub controller: Option<Box<Controller>>,
    pub requests: Requests,
    pub limits: IoLimits,
    pub view: Arc<View>,
    pub view_version: u64,
    /// The host's access rights to reserved namespaces.
    pub rights: RightsCache,
    /// Number of device I/Os in flight, of all requests.
    pub inflight: u32,
    /// The first command of a fused pair, whose second command must be next.
    pub fused: Option<FusedFirst>,
    pub fetches: Fetches,
    pub stats: Arc<QueueStats>,
}

/// The addresses of a connection, and its listener.
pub(crate) struct ConnectionEnds {
    pub listener: ListenerId,
    pub local: Address,
    pub peer: Address,
}

/// The submission queue's size and head pointer (SQHD), for flow control.
pub(crate) struct Flow {
    pub entries: u16,
    pub head: u16,
    pub is_off: bool,
}

/// The state of a queue pair before the completion of its Connect.
pub(crate) struct Opening {
    pub since: Nanos,
    pub is_unanswered: bool,
    /// The Connect, while it waits for the end of an earlier controller of the host.
    pub waiting: Option<ReqIndex>,
}

/// The state of a queue pair that is being deleted.
#[derive(Default)]
pub(crate) struct Closing {
    /// The response to Disconnect, which is sent when devices have no I/O of the queue.
    pub response: Option<Box<Response>>,
    /// The transport reported the connection closed.
    pub is_closed: bool,
}

/// The queue's places in the target's limits, and its authentication.
#[derive(Default)]
pub(crate) struct Admission {
    /// The queue's place in the connection limit, from the accepted Connect on.
    pub place: Option<Place>,
    /// The queue's place in the limit of unauthenticated queues, until it is authenticated.
    pub unproven: Option<UnprovenPlace>,
    /// The state of the queue's authentication; `None` before the first transaction.
    pub auth: Option<Box<QueueAuth>>,
    pub auth_state: Arc<QueueAuthState>,
}

/// Permission for the transport to leave a command's data in the receive buffer.
#[derive(Default)]
pub(crate) struct InPlace {
    /// The last value of [`crate::transport::Transport::set_in_place`] for the transport.
    pub now: bool,
    /// The value was true earlier, so data of some commands may still be in receive buffers.
    pub before: bool,
}

/// Flow control of the data that the transport fetches from the host.
pub(crate) struct Fetches {
    /// Bytes being fetched.
    pub bytes: usize,
    /// Most bytes to fetch at the same time.
    pub window: usize,
    /// Requests that wait for a part of the window, oldest first.
    pub waiting: VecDeque<ReqIndex>,
}

/// The first command of a fused pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FusedFirst {
    Waiting(ReqIndex),
    /// It was refused and completed; the second command must be aborted.
    Failed,
}

/// Requests of a connection before its Connect: the Connect itself, and one that is refused.
const FRESH_ENTRIES: u16 = 2;

impl QueuePair {
    /// Drops an outstanding Asynchronous Event Request whose command identifier `sqe` uses again.
    /// Returns true if there was one.
    ///
    /// SPDK's host does this when it disconnects: it reuses these identifiers for the Property Set
    /// commands of the shutdown. A controller need not check every command for a Command ID
    /// Conflict, so accept it, and such a host can shut down in order. The dropped request gets no
    /// response. The transport still counts it, so a host that does this once per queue entry
    /// overruns the queue.
    #[cold]
    pub(crate) fn forget_event_request(&mut self, sqe: &Sqe) -> bool {
        // Two event requests with the same identifier are a conflict.
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

    pub(crate) fn new(
        id: QueueId,
        (port, conn): (usize, ConnId),
        ends: ConnectionEnds,
        limits: IoLimits,
        now: Nanos,
    ) -> Self {
        Self {
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
            closing: Closing::default(),
            qid: 0,
            flow: Flow {
                entries: FRESH_ENTRIES,
                head: 0,
                is_off: false,
            },
            takes_zero_copy: false,
            in_place: InPlace::default(),
            subsystem: None,
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

    pub(crate) fn is_admin(&self) -> bool {
        self.controller.is_some()
    }

    /// True for an I/O queue, false for an admin queue or before the Connect.
    pub(crate) fn takes_io(&self) -> bool {
        !self.is_admin() && self.stage != Stage::Fresh
    }

    pub(crate) fn name_of(&self, index: ReqIndex) -> ReqRef {
        ReqRef {
            queue: self.id.index,
            generation: self.id.generation,
            request: index,
            begun: self.requests[index].begun(),
        }
    }

    /// Adopts the association's current view. Returns true if it changed.
    pub(crate) fn refresh_view(&mut self) -> bool {
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

    /// The namespace that a request was decoded for, if it still exists. Never another namespace
    /// with the same NSID.
    #[inline]
    pub(crate) fn namespace_of(&self, index: ReqIndex) -> Option<&Arc<Namespace>> {
        let request = &self.requests[index];
        let namespace = self.view.get(request.sqe.nsid())?;
        (namespace.serial == request.namespace).then_some(namespace)
    }

    /// True for a read that completes with a view of the device's memory.
    #[inline]
    pub(crate) fn is_zero_copy(&self, index: ReqIndex) -> bool {
        let request = &self.requests[index];
        let Plan::Single {
            op: Op::Read,
            blocks,
            ..
        } = request.plan
        else {
            return false;
        };
        self.takes_zero_copy
            && self
                .namespace_of(index)
                .is_some_and(|namespace| blocks <= namespace.zero_copy_blocks)
    }

    /// True if a new command needs no buffer and no data, or has them already.
    #[inline]
    pub(crate) fn has_all(&self, index: ReqIndex) -> bool {
        let request = &self.requests[index];
        match request.plan {
            Plan::Single { op: Op::Read, .. } => self.is_zero_copy(index),
            Plan::Single { op: Op::Write, .. } => {
                request.data.is_some() && (self.in_place.now || !self.in_place.before)
            }
            _ => false,
        }
    }

    /// True if the transport may fetch this many bytes more now.
    #[inline]
    pub(crate) fn may_fetch(&self, bytes: usize) -> bool {
        self.fetches.bytes == 0 || self.fetches.bytes.saturating_add(bytes) <= self.fetches.window
    }

    /// Bytes of a command's data that the host must still send.
    pub(crate) fn bytes_from_host(&self, index: ReqIndex) -> usize {
        let request = &self.requests[index];
        match request.plan.transfer(&request.sqe) {
            Transfer::FromHost(bytes) => bytes as usize,
            _ => 0,
        }
    }

    pub(crate) fn tag(&self, index: ReqIndex) -> ReqTag {
        ReqTag {
            cid: self.requests[index].sqe.cid(),
            index,
        }
    }

    /// Fills in the common fields of a completion, such as SQHD. SQHD advances with completions, so
    /// that a host with flow control never has more commands outstanding than the queue has
    /// entries.
    pub(crate) fn seal(&mut self, cqe: Cqe) -> Cqe {
        self.flow.head = if self.flow.head + 1 >= self.flow.entries {
            0
        } else {
            self.flow.head + 1
        };
        // Without flow control SQHD is reserved, except in the completion of Connect: FFFFh.
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
