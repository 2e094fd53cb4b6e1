//! One connection of the client: address, route, queue pair, connect.
//!
//! ```text
//!   ADDR_RESOLVE ─▶ ROUTE_RESOLVE ─▶ (queue pair, receives) ─▶ CONNECT ─▶ established
//! ```
//!
//! All of them together have the time of `cm_timeout`.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nacre_transport_rdma_verbs::{
    CmEvent, CmEventKind, CmId, CmOptions, ConnParams, ConnectionManager, DeviceId,
};

use crate::end::Waiter;
use crate::error::PerfError;
use crate::wire::{Reject, WireError};

/// How often interruption is looked for.
const TICK: Duration = Duration::from_millis(50);

/// Where to and how.
#[derive(Debug, Clone, Copy)]
pub struct Way {
    pub peer: SocketAddr,
    pub source: Option<IpAddr>,
    pub timeout: Duration,
    pub options: CmOptions,
}

/// A connection that is made.
pub struct Dial<'a> {
    pub cm: &'a mut dyn ConnectionManager,
    pub waiter: &'a mut Waiter,
    pub stop: &'a AtomicBool,
    /// Events of other connections.
    pub others: &'a mut Vec<CmEvent>,
    pub way: Way,
    deadline: Instant,
    stage: &'static str,
}

/// The route to the peer.
#[derive(Debug, Clone, Copy)]
pub struct Found {
    pub id: CmId,
    pub device: DeviceId,
    pub port: u8,
    pub local: SocketAddr,
}

impl<'a> Dial<'a> {
    pub fn new(
        cm: &'a mut dyn ConnectionManager,
        waiter: &'a mut Waiter,
        stop: &'a AtomicBool,
        others: &'a mut Vec<CmEvent>,
        way: Way,
    ) -> Dial<'a> {
        let deadline = Instant::now() + way.timeout;
        Dial {
            cm,
            waiter,
            stop,
            others,
            way,
            deadline,
            stage: "ADDR_RESOLVE",
        }
    }

    /// Finds the device and its route. The caller must destroy the result.
    pub fn find(&mut self) -> Result<Found, PerfError> {
        let Way {
            peer,
            source,
            timeout,
            options,
        } = self.way;
        let id = self.cm.resolve_address(source, peer, timeout, options)?;
        let found = self.resolve(id);
        if found.is_err() {
            self.cm.destroy(id);
        }
        found
    }

    fn resolve(&mut self, id: CmId) -> Result<Found, PerfError> {
        let CmEventKind::AddressResolved {
            device,
            port,
            local,
        } = self.next(id)?
        else {
            return Err(self.confused());
        };
        self.stage = "ROUTE_RESOLVE";
        self.cm.resolve_route(id, self.left())?;
        match self.next(id)? {
            CmEventKind::RouteResolved => Ok(Found {
                id,
                device,
                port,
                local,
            }),
            _ => Err(self.confused()),
        }
    }

    /// Connects, once the queue pair exists.
    pub fn connect(&mut self, id: CmId, params: &ConnParams) -> Result<ConnParams, PerfError> {
        self.stage = "CONNECT";
        self.cm.connect(id, params)?;
        match self.next(id)? {
            CmEventKind::Established { params } => Ok(params),
            _ => Err(self.confused()),
        }
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    fn confused(&self) -> PerfError {
        PerfError::Confused {
            peer: self.way.peer,
            what: "an event of another stage of connecting",
        }
    }

    /// The next event of this connection that is not the end of it.
    fn next(&mut self, id: CmId) -> Result<CmEventKind, PerfError> {
        let peer = self.way.peer;
        loop {
            while let Some(event) = self.cm.next_event()? {
                if event.id == id {
                    return self.judge(event.kind);
                }
                self.others.push(event);
            }
            if self.stop.load(Ordering::Relaxed) {
                return Err(PerfError::Interrupted);
            }
            let left = self.left();
            if left.is_zero() {
                let (stage, after) = (self.stage, self.way.timeout);
                return Err(PerfError::Timeout { stage, peer, after });
            }
            self.waiter.wait(left.min(TICK))?;
        }
    }

    fn judge(&self, kind: CmEventKind) -> Result<CmEventKind, PerfError> {
        let (peer, stage) = (self.way.peer, self.stage);
        let failed = |event, status| PerfError::Connect {
            stage,
            peer,
            event,
            status,
        };
        Err(match kind {
            CmEventKind::AddressError { status } => failed("RDMA_CM_EVENT_ADDR_ERROR", status),
            CmEventKind::RouteError { status } => failed("RDMA_CM_EVENT_ROUTE_ERROR", status),
            CmEventKind::ConnectError { status } => failed("RDMA_CM_EVENT_CONNECT_ERROR", status),
            CmEventKind::Unreachable { status } => failed("RDMA_CM_EVENT_UNREACHABLE", status),
            CmEventKind::Rejected {
                status,
                private_data,
            } => match Reject::parse(&private_data) {
                Ok(reject) => PerfError::Refused { peer, reject },
                // Padding alone: the peer wrote nothing.
                Err(WireError::Magic | WireError::Short { .. })
                    if private_data.iter().all(|byte| *byte == 0) =>
                {
                    PerfError::NobodyListens { peer, status }
                }
                Err(source) => PerfError::Foreign { peer, source },
            },
            CmEventKind::Disconnected => PerfError::Disconnected {
                peer,
                during: "connecting",
            },
            CmEventKind::DeviceRemoval => PerfError::DeviceRemoved {
                device: "that leads there".into(),
                during: "connecting",
            },
            CmEventKind::AddressChange => PerfError::AddressMoved {
                during: "connecting",
            },
            CmEventKind::AddressResolved { .. }
            | CmEventKind::RouteResolved
            | CmEventKind::Established { .. } => return Ok(kind),
            CmEventKind::ConnectRequest { .. }
            | CmEventKind::TimewaitExit
            | CmEventKind::Other { .. } => self.confused(),
        })
    }
}
