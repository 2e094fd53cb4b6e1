//! Opens one connection of the client: resolves address and route, creates the queue pair,
//! connects.
//!
//! ```text
//!   ADDR_RESOLVE ─▶ ROUTE_RESOLVE ─▶ (queue pair, receives) ─▶ CONNECT ─▶ established
//! ```
//!
//! `cm_timeout` limits the sum of all stages.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nacre_transport_rdma_verbs::{
    CmEvent, CmEventKind, CmId, CmOptions, ConnParams, ConnectionManager, DeviceId,
};

use crate::endpoint::Waiter;
use crate::error::PerfError;
use crate::wire::{Reject, WireError};

/// Interval at which the stop flag is checked.
const TICK: Duration = Duration::from_millis(50);

/// Where to connect to, and how.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Destination {
    pub peer: SocketAddr,
    pub source: Option<IpAddr>,
    pub timeout: Duration,
    pub options: CmOptions,
}

/// A connection attempt.
pub(crate) struct Dial<'a> {
    pub cm: &'a mut dyn ConnectionManager,
    pub waiter: &'a mut Waiter,
    pub stop: &'a AtomicBool,
    /// Events of other connections.
    pub others: &'a mut Vec<CmEvent>,
    pub destination: Destination,
    deadline: Instant,
    stage: &'static str,
}

/// The route to the peer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    pub id: CmId,
    pub device: DeviceId,
    pub port: u8,
    pub local: SocketAddr,
}

impl<'a> Dial<'a> {
    pub(crate) fn new(
        cm: &'a mut dyn ConnectionManager,
        waiter: &'a mut Waiter,
        stop: &'a AtomicBool,
        others: &'a mut Vec<CmEvent>,
        destination: Destination,
    ) -> Self {
        let deadline = Instant::now() + destination.timeout;
        Dial {
            cm,
            waiter,
            stop,
            others,
            destination,
            deadline,
            stage: "ADDR_RESOLVE",
        }
    }

    /// Finds the device and its route. The caller must destroy the id in the result.
    pub(crate) fn find(&mut self) -> Result<Found, PerfError> {
        let Destination {
            peer,
            source,
            timeout,
            options,
        } = self.destination;
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
    pub(crate) fn connect(
        &mut self,
        id: CmId,
        params: &ConnParams,
    ) -> Result<ConnParams, PerfError> {
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
            peer: self.destination.peer,
            what: "an event of another stage of connecting",
        }
    }

    /// The next event of this connection. An event that ends the connection is returned as an
    /// error.
    fn next(&mut self, id: CmId) -> Result<CmEventKind, PerfError> {
        let peer = self.destination.peer;
        loop {
            while let Some(event) = self.cm.next_event()? {
                if event.id == id {
                    return self.check_event(event.kind);
                }
                self.others.push(event);
            }
            if self.stop.load(Ordering::Relaxed) {
                return Err(PerfError::Interrupted);
            }
            let left = self.left();
            if left.is_zero() {
                let (stage, after) = (self.stage, self.destination.timeout);
                return Err(PerfError::Timeout { stage, peer, after });
            }
            self.waiter.wait(left.min(TICK))?;
        }
    }

    fn check_event(&self, kind: CmEventKind) -> Result<CmEventKind, PerfError> {
        let (peer, stage) = (self.destination.peer, self.stage);
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
                // Only padding: the peer sent no private data.
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
