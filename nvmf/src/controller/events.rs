//! Asynchronous events: occurrences, the host's configuration, and the requests that the controller
//! holds until it can complete them (Base 5.2).
//!
//! ```text
//!   happened ──(configured, a request is there, not masked)──▶ answered, masked
//!      ▲                                                          │
//!      └── noted, while masked too        log page read, RAE 0 ◀──┘
//! ```
//!
//! One event of a kind is outstanding at a time: after its report it is masked until the host has
//! read the log page that it names (without Retain Asynchronous Event). An occurrence before that
//! read is in the page, so it is not reported again.

use arrayvec::ArrayVec;
use nacre_nvmf_wire::aen::AsyncEvent;
use nacre_nvmf_wire::features::AsyncEvents;
use nacre_nvmf_wire::{Cqe, StatusCode};

use crate::subsystems::association::pending;
use crate::subsystems::subsystem::SubsystemKind;

/// Requests that one controller can hold.
const MAX_REQUESTS: usize = 16;

/// The events of [`pending`], with what allows each in the Asynchronous Event Configuration, and
/// how it is reported.
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
    // Disabled kinds of these are not even noted (feature 82h).
    (
        pending::RESERVATION,
        AsyncEvents::empty(),
        AsyncEvent::RESERVATION_LOG_AVAILABLE,
    ),
];

/// The critical warnings, which every controller that has a SMART log lets hosts choose among.
const SMART: AsyncEvents = AsyncEvents::SMART_SPARE
    .union(AsyncEvents::SMART_TEMPERATURE)
    .union(AsyncEvents::SMART_RELIABILITY)
    .union(AsyncEvents::SMART_READ_ONLY)
    .union(AsyncEvents::SMART_VOLATILE_BACKUP)
    .union(AsyncEvents::SMART_PERSISTENT_MEMORY);

/// Controllers with telemetry logs accept this notice, and never send it: they capture no data on
/// their own.
const TELEMETRY: AsyncEvents = AsyncEvents::TELEMETRY_LOG;

pub(crate) struct Events {
    /// Held requests by command identifier, oldest first.
    requests: ArrayVec<u16, MAX_REQUESTS>,
    limit: usize,
    /// Notices that this controller can send (OAES).
    optional: AsyncEvents,
    /// Asynchronous Event Configuration (feature 0Bh).
    configuration: AsyncEvents,
    default_configuration: AsyncEvents,
    happened: u32,
    /// Reported, and their log page not read since.
    masked: u32,
    aborted: ArrayVec<u16, MAX_REQUESTS>,
}

impl Events {
    /// `lasting`: the host has given a keep-alive timeout with its Connect.
    pub fn new(limit: u8, kind: SubsystemKind, ana_reporting: bool, lasting: bool) -> Events {
        let (optional, default_configuration) = match kind {
            SubsystemKind::Nvm => {
                let mut optional = AsyncEvents::NAMESPACE_ATTRIBUTE;
                optional.set(AsyncEvents::ANA_CHANGE, ana_reporting);
                // On unless the host disables them: missing a namespace is worse than an unwanted
                // event.
                (optional, optional)
            }
            // A host that reads the log once and leaves wants no events. A host whose Connect
            // announces that it stays gets them without a request (Base 3.1.3.3.1).
            SubsystemKind::Discovery if lasting => {
                (AsyncEvents::DISCOVERY_LOG, AsyncEvents::DISCOVERY_LOG)
            }
            SubsystemKind::Discovery => (AsyncEvents::DISCOVERY_LOG, AsyncEvents::empty()),
        };
        Events {
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
    pub fn optional(&self) -> AsyncEvents {
        self.optional
    }

    pub fn configuration(&self) -> AsyncEvents {
        self.configuration
    }

    pub fn default_configuration(&self) -> AsyncEvents {
        self.default_configuration
    }

    /// `None`: it asks for events that this controller does not have.
    pub fn configure(&mut self, dword: u32) -> Option<()> {
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

    pub fn request(&mut self, cid: u16) -> Result<(), StatusCode> {
        if self.requests.len() >= self.limit {
            return Err(StatusCode::ASYNC_EVENT_REQUEST_LIMIT_EXCEEDED.with_dnr());
        }
        self.requests.push(cid);
        Ok(())
    }

    /// Notes events (bits of [`pending`]).
    pub fn notice(&mut self, events: u32) {
        self.happened |= events;
    }

    /// The host reads the log page of these events, as it is now, and that clears them.
    pub fn clear(&mut self, events: u32) {
        self.masked &= !events;
        self.happened &= !events;
    }

    pub fn abort(&mut self, cid: u16) -> bool {
        let was_held = self.forget(cid);
        if was_held {
            self.aborted.push(cid);
        }
        was_held
    }

    /// Gives a held request up without an answer.
    pub fn forget(&mut self, cid: u16) -> bool {
        let at = self.requests.iter().position(|r| *r == cid);
        at.map(|at| self.requests.remove(at)).is_some()
    }

    /// A controller level reset: held requests end, nothing is masked, the configuration is the
    /// default one.
    pub fn reset(&mut self) {
        self.aborted.extend(self.requests.drain(..));
        self.configuration = self.default_configuration;
        self.happened = 0;
        self.masked = 0;
    }

    /// The next answer to a held request.
    pub fn next(&mut self) -> Option<Cqe> {
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

/// The requests that a controller holds at most, which is also the announced number (AERL).
pub(super) fn limit_of(configured: u8) -> usize {
    usize::from(configured).clamp(1, MAX_REQUESTS)
}
