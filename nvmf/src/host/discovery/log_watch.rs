//! Follows a discovery controller: reads its log after each connection, and after each event that
//! reports a change.

use std::time::Duration;

use std::os::fd::BorrowedFd;

use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf_wire::log::lid;
use nacre_reactor::{Idle, Nanos};

use super::super::controller::{AdminResult, ControllerState, HostController};
use super::super::error::HostError;
use super::super::options::{Dial, HostOptions};
use super::{DiscoveryLog, LogReading};

/// Attempts to read a log that changes meanwhile.
const ATTEMPTS: u32 = 8;
/// Delay before a log that could not be read is read again.
const AGAIN: Duration = Duration::from_secs(5);

/// A connection to a discovery controller, which reconnects after a loss as its [`HostOptions`]
/// define.
pub struct DiscoveryWatch {
    controller: HostController,
    pool: Pool,
    /// The partly read log, and the ticket of its command; no ticket: the command is not sent yet.
    reading: Option<(LogReading, Option<u64>)>,
    /// The log must be read.
    is_stale: bool,
    /// The time of the next attempt after an error.
    again: Option<Nanos>,
    was_live: bool,
}

impl DiscoveryWatch {
    /// The buffers that a watch needs in its pool.
    pub const MEMORY: [ClassSpec; 1] = [ClassSpec {
        size: 4096,
        count: 16,
    }];

    /// Starts to connect. `options` must name the discovery subsystem and a keep-alive timeout.
    pub fn new(options: HostOptions, dial: Box<dyn Dial>, pool: Pool, now: Nanos) -> Self {
        Self {
            controller: HostController::new(options, dial, pool.clone(), now),
            pool,
            reading: None,
            is_stale: false,
            again: None,
            was_live: false,
        }
    }

    pub fn state(&self) -> &ControllerState {
        self.controller.state()
    }

    /// True while a log is being read, or a connection being made.
    pub fn is_active(&self) -> bool {
        let must_read = self.reading.is_some() || self.is_stale;
        must_read && self.was_live || *self.state() == ControllerState::Connecting
    }

    /// Shuts the controller down. The state becomes [`ControllerState::Closed`].
    pub fn disconnect(&mut self, now: Nanos) {
        self.controller.disconnect(now);
    }

    /// Arms the wake source before a sleep. Any value but [`Idle::Busy`] allows a sleep until
    /// [`DiscoveryWatch::wake_fd`] is readable, or until the time in [`Idle::Until`].
    pub fn arm(&mut self, now: Nanos) -> Idle {
        if self.is_active() {
            return Idle::Busy;
        }
        let (idle, was_live) = (self.controller.arm(now), self.controller.is_live());
        // Data that arrived before the source was armed makes it readable no more.
        if self.controller.poll(now) > 0 || self.controller.is_live() != was_live {
            return Idle::Busy;
        }
        self.again.map_or(idle, |at| idle.and(Idle::Until(at)))
    }

    /// The descriptor to wait on; changes with every connection.
    pub fn wake_fd(&mut self) -> Option<BorrowedFd<'_>> {
        self.controller.wake_fd()
    }

    /// Sends and receives. Returns a completely read log, or the reason why it could not be read. A
    /// log is read again only after a change, a new connection, or an error.
    pub fn poll(&mut self, now: Nanos) -> Option<Result<DiscoveryLog, HostError>> {
        self.controller.poll(now);
        while let Some(event) = self.controller.take_event() {
            self.is_stale |= event.log_page == lid::DISCOVERY;
        }
        let is_live = self.controller.is_live();
        let is_again = self.again.take_if(|at| now >= *at).is_some();
        self.is_stale |= is_live && !self.was_live || is_again;
        self.was_live = is_live;
        if let Some(ended) = self.received() {
            self.again = ended.is_err().then(|| now + AGAIN);
            return Some(ended);
        }
        if is_live {
            self.send();
        }
        None
    }

    /// Takes the answer of the command in flight.
    fn received(&mut self) -> Option<Result<DiscoveryLog, HostError>> {
        let (reading, ticket) = self.reading.as_mut()?;
        let Some(sent) = *ticket else {
            // A log is never read in part over each of two connections.
            self.reading.take_if(|_| !self.was_live);
            return None;
        };
        let answer = self.controller.take_result(sent)?;
        *ticket = None;
        let taken = match answer {
            // The next connection reads the log from its beginning.
            Err(_) if !self.was_live => {
                self.reading = None;
                return None;
            }
            Err(error) => Err(error),
            Ok(answer) => data(answer).and_then(|data| reading.accept(&data)),
        };
        let ended = taken.transpose()?;
        self.reading = None;
        Some(ended)
    }

    /// Sends the next command, if none is in flight.
    fn send(&mut self) {
        if self.reading.is_none() && std::mem::take(&mut self.is_stale) {
            self.reading = Some((LogReading::new(ATTEMPTS), None));
        }
        let Some((reading, ticket @ None)) = &mut self.reading else {
            return;
        };
        let page = reading.command();
        // Without a buffer or a place in the queue, the next turn tries again.
        if let Some(buf) = self.pool.acquire(page.bytes() as usize) {
            *ticket = self.controller.submit(page.to_sqe(0, 0), None, Some(buf));
        }
    }
}

fn data(answer: AdminResult) -> Result<Vec<u8>, HostError> {
    match answer.cqe.status() {
        status if status.is_success() => Ok(answer.data.map_or_else(Vec::new, |b| b.to_vec())),
        status => Err(HostError::Refused {
            step: "discovery log",
            status,
            fabrics: false,
        }),
    }
}
