//! The controller's asynchronous events (Base 5.2): which events have happened, which ones the host
//! has enabled, and the outstanding Asynchronous Event Requests.
//!
//! ```text
//!   happened ──(configured, a request is there, not masked)──▶ answered, masked
//!      ▲                                                          │
//!      └── noted, while masked too        log page read, RAE 0 ◀──┘
//! ```
//!
//! After an event is reported, its type is masked until the host reads the log page of the event
//! with RAE cleared. The page contains everything that happened until then, so no second report is
//! needed.

use arrayvec::ArrayVec;
use nacre_nvmf_wire::aen::AsyncEvent;
use nacre_nvmf_wire::features::AsyncEvents;
use nacre_nvmf_wire::{Cqe, StatusCode};

use crate::subsystems::association::pending;
use crate::subsystems::subsystem_config::SubsystemKind;

/// Most outstanding Asynchronous Event Requests of one controller.
const MAX_REQUESTS: usize = 16;

/// The events of [`pending`]: each with its bit in the Asynchronous Event Configuration (feature
/// 0Bh) and its completion dword 0.
const EVENTS: [(u32, AsyncEvents, AsyncEvent); 4] = [
    (
        pending::NAMESPACES,
        AsyncEvents::NAMESPACE_ATTRIBUTE,
        AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED,
    ),
    (
        pending::ANA,
        AsyncEvents::ANA_CHANGE,
        AsyncEvent::ANA_CHANGE,
    ),
    (
        pending::DISCOVERY,
        AsyncEvents::DISCOVERY_LOG,
        AsyncEvent::DISCOVERY_LOG_CHANGE,
    ),
    // Masked notification types are not recorded (Reservation Notification Mask, feature 82h).
    (
        pending::RESERVATION,
        AsyncEvents::empty(),
        AsyncEvent::RESERVATION_LOG_AVAILABLE,
    ),
];

/// The SMART / Health critical warnings, which every controller with that log must support.
const SMART: AsyncEvents = AsyncEvents::SMART_SPARE
    .union(AsyncEvents::SMART_TEMPERATURE)
    .union(AsyncEvents::SMART_RELIABILITY)
    .union(AsyncEvents::SMART_READ_ONLY)
    .union(AsyncEvents::SMART_VOLATILE_BACKUP)
    .union(AsyncEvents::SMART_PERSISTENT_MEMORY);

/// The Telemetry Log Changed notice: supported, because there is a telemetry log, but never sent,
/// because the controller captures no data by itself.
const TELEMETRY: AsyncEvents = AsyncEvents::TELEMETRY_LOG;

pub(crate) struct AsyncEventState {
    /// Command identifiers of the outstanding requests, oldest first.
    requests: ArrayVec<u16, MAX_REQUESTS>,
    limit: usize,
    /// Notices that this controller can send (OAES).
    optional: AsyncEvents,
    /// Asynchronous Event Configuration (feature 0Bh).
    configuration: AsyncEvents,
    default_configuration: AsyncEvents,
    happened: u32,
    /// Events that were reported and whose log page was not read since.
    masked: u32,
    aborted: ArrayVec<u16, MAX_REQUESTS>,
}

impl AsyncEventState {
    /// `lasting`: the host's Connect has a keep-alive timeout.
    pub(super) fn new(limit: u8, kind: SubsystemKind, ana_reporting: bool, lasting: bool) -> Self {
        let (optional, default_configuration) = match kind {
            SubsystemKind::Nvm => {
                let mut optional = AsyncEvents::NAMESPACE_ATTRIBUTE;
                optional.set(AsyncEvents::ANA_CHANGE, ana_reporting);
                // Enabled by default: a missed namespace is worse than an unwanted event.
                (optional, optional)
            }
            // A host that reads the log once and disconnects needs no events. A host with an
            // explicit persistent connection gets them enabled (Base 2.1, 3.1.3.3.1).
            SubsystemKind::Discovery if lasting => {
                (AsyncEvents::DISCOVERY_LOG, AsyncEvents::DISCOVERY_LOG)
            }
            SubsystemKind::Discovery => (AsyncEvents::DISCOVERY_LOG, AsyncEvents::empty()),
        };
        Self {
            requests: ArrayVec::new(),
            limit: limit_of(limit),
            optional,
            configuration: default_configuration,
            default_configuration,
            happened: 0,
            masked: 0,
            aborted: ArrayVec::new(),
        }
    }

    /// Notices that this controller can send: OAES.
    pub(super) fn optional(&self) -> AsyncEvents {
        self.optional
    }

    pub(super) fn configuration(&self) -> AsyncEvents {
        self.configuration
    }

    pub(super) fn default_configuration(&self) -> AsyncEvents {
        self.default_configuration
    }

    /// Sets the Asynchronous Event Configuration. `None`: it has a bit that is not supported.
    pub(super) fn configure(&mut self, dword: u32) -> Option<()> {
        let wanted = AsyncEvents::from_bits(dword)?;
        let of_logs = if self.optional.contains(AsyncEvents::DISCOVERY_LOG) {
            AsyncEvents::empty()
        } else {
            SMART | TELEMETRY
        };
        if !(self.optional | of_logs).contains(wanted) {
            return None;
        }
        self.configuration = wanted;
        Some(())
    }

    pub(super) fn request(&mut self, cid: u16) -> Result<(), StatusCode> {
        if self.requests.len() >= self.limit {
            return Err(StatusCode::ASYNC_EVENT_REQUEST_LIMIT_EXCEEDED.with_dnr());
        }
        self.requests.push(cid);
        Ok(())
    }

    /// Records events (bits of [`pending`]).
    pub(super) fn notice(&mut self, events: u32) {
        self.happened |= events;
    }

    /// Clears and unmasks events whose log page the host reads.
    pub(super) fn clear(&mut self, events: u32) {
        self.masked &= !events;
        self.happened &= !events;
    }

    pub(super) fn abort(&mut self, cid: u16) -> bool {
        let was_held = self.forget(cid);
        if was_held {
            self.aborted.push(cid);
        }
        was_held
    }

    /// Removes an outstanding request without a completion.
    pub(super) fn forget(&mut self, cid: u16) -> bool {
        let at = self.requests.iter().position(|r| *r == cid);
        at.map(|at| self.requests.remove(at)).is_some()
    }

    /// A Controller Level Reset: removes the requests and masks, and restores the default
    /// configuration.
    pub(super) fn reset(&mut self) {
        self.aborted.extend(self.requests.drain(..));
        self.configuration = self.default_configuration;
        self.happened = 0;
        self.masked = 0;
    }

    /// The next completion of an outstanding request, if an event is pending.
    pub(super) fn next(&mut self) -> Option<Cqe> {
        if let Some(cid) = self.aborted.pop() {
            return Some(Cqe::new(cid, StatusCode::ABORT_REQUESTED));
        }
        if self.requests.is_empty() {
            return None;
        }
        let (bit, _, event) = *EVENTS.iter().find(|(bit, allowed, _)| {
            self.happened & bit != 0
                && self.masked & bit == 0
                && self.configuration.contains(*allowed)
        })?;
        let cid = self.requests.remove(0);
        self.happened &= !bit;
        self.masked |= bit;
        Some(Cqe::success(cid).with_dword0(event.dword0()))
    }
}

/// Most outstanding requests, as announced in AERL.
pub(super) fn limit_of(configured: u8) -> usize {
    usize::from(configured).clamp(1, MAX_REQUESTS)
}
