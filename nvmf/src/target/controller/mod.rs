//! A controller: registers, keep-alive and admin commands of one association, on its admin core.
//!
//! ```text
//!   registers.rs   CAP VS CC CSTS: enable, disable, shutdown (Base 3.5, 3.6)
//!   events.rs      Asynchronous Event Requests and what they wait for (Base 5.2)
//!   identify.rs    what the controller and its namespaces say about themselves (Base 5.17)
//!   features.rs    Get and Set Features (Base 5.27)
//!   logs.rs        Get Log Page (Base 5.16)
//! ```
//!
//! Sans-IO: an admin command and its buffer in, an [`Outcome`] out.

mod events;
mod registers;

use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf_wire::opcode::{admin, fabrics as fctype};
use nacre_nvmf_wire::{Cqe, Sqe, StatusCode};
use nacre_reactor::Nanos;

use self::events::Events;
use self::registers::Registers;
use super::association::{Association, Phase};
use super::target::Target;
use crate::transport::TransportCaps;

/// What is to be done about an admin command.
#[derive(Debug)]
pub(crate) enum Outcome {
    Done(Cqe),
    /// Answered later: an event request.
    Held,
    /// The group finds and aborts the command, then answers.
    Abort {
        sqid: u16,
        cid: u16,
    },
}

pub(crate) struct Controller {
    target: Arc<Target>,
    association: Arc<Association>,
    caps: TransportCaps,
    registers: Registers,
    events: Events,
    keep_alive: KeepAlive,
    aborts: u8,
}

/// The keep-alive timer (Base 3.9). Any command of any queue restarts it (TBKAS), so that a host
/// that is busy is never declared dead.
struct KeepAlive {
    /// Zero: off.
    timeout: Duration,
    last: Nanos,
}

impl Controller {
    pub fn new(
        target: &Arc<Target>,
        association: Arc<Association>,
        caps: &TransportCaps,
        kato_ms: u32,
        now: Nanos,
    ) -> Controller {
        let config = &target.config;
        let mut controller = Controller {
            registers: Registers::new(config, &association),
            events: Events::new(config.async_event_requests),
            keep_alive: KeepAlive {
                timeout: Duration::ZERO,
                last: now,
            },
            caps: caps.clone(),
            target: Arc::clone(target),
            association,
            aborts: 0,
        };
        controller.set_keep_alive_ms(kato_ms, now);
        controller
    }

    /// How many bytes of data the command moves; the direction is in its opcode. `Err`: what to
    /// answer without looking further.
    pub fn data_bytes(&self, sqe: &Sqe) -> Result<u32, StatusCode> {
        if sqe.is_fabrics() {
            return Ok(0);
        }
        if self.association.phase() != Phase::Ready && sqe.opcode != admin::KEEP_ALIVE {
            return Err(StatusCode::COMMAND_SEQUENCE_ERROR.with_dnr());
        }
        match sqe.opcode {
            admin::ABORT | admin::ASYNC_EVENT_REQUEST | admin::KEEP_ALIVE => Ok(0),
            _ => Err(StatusCode::INVALID_OPCODE.with_dnr()),
        }
    }

    /// Runs a command. `data` is its buffer: what the host sent, or zeroes to be filled.
    pub fn execute(&mut self, sqe: &Sqe, data: &mut [u8], now: Nanos) -> Outcome {
        let _ = data;
        if sqe.is_fabrics() {
            return Outcome::Done(self.fabrics(sqe));
        }
        let cid = sqe.cid();
        match sqe.opcode {
            admin::ABORT => self.abort(sqe),
            admin::ASYNC_EVENT_REQUEST => match self.events.request(cid) {
                Ok(()) => Outcome::Held,
                Err(status) => Outcome::Done(Cqe::new(cid, status)),
            },
            admin::KEEP_ALIVE => {
                self.keep_alive.last = now;
                Outcome::Done(Cqe::success(cid))
            }
            _ => Outcome::Done(Cqe::new(cid, StatusCode::INVALID_OPCODE.with_dnr())),
        }
    }

    fn fabrics(&mut self, sqe: &Sqe) -> Cqe {
        match sqe.fctype() {
            fctype::PROPERTY_GET => self.registers.get(sqe),
            fctype::PROPERTY_SET => self.registers.set(sqe, &self.association),
            // Disconnect deletes I/O queues only; there is nothing to authenticate.
            _ => Cqe::new(sqe.cid(), StatusCode::INVALID_OPCODE.with_dnr()),
        }
    }

    fn abort(&mut self, sqe: &Sqe) -> Outcome {
        let (sqid, cid) = (sqe.cdw10.get() as u16, (sqe.cdw10.get() >> 16) as u16);
        if sqid == 0 {
            // Of the commands of this queue only event requests last long enough to be aborted.
            let aborted = self.events.abort(cid);
            return Outcome::Done(Cqe::success(sqe.cid()).with_dword0(u32::from(!aborted)));
        }
        if self.aborts >= self.target.config.aborts {
            return Outcome::Done(Cqe::new(
                sqe.cid(),
                StatusCode::ABORT_COMMAND_LIMIT_EXCEEDED,
            ));
        }
        self.aborts += 1;
        Outcome::Abort { sqid, cid }
    }

    /// The group answered an abort.
    pub fn abort_finished(&mut self) {
        self.aborts = self.aborts.saturating_sub(1);
    }

    /// The answer to a held event request, if something happened that it waited for.
    pub fn next_event(&mut self) -> Option<Cqe> {
        self.events.notice(self.association.take_pending());
        self.events.next()
    }

    /// Sets the keep-alive timeout, 0 for none, rounded up to the granularity.
    fn set_keep_alive_ms(&mut self, kato_ms: u32, now: Nanos) {
        let config = &self.target.config;
        let granularity = u32::from(config.keep_alive_granularity.max(1)) * 100;
        let rounded = kato_ms.div_ceil(granularity).saturating_mul(granularity);
        let granted = if kato_ms == 0 {
            0
        } else {
            rounded.max(config.min_keep_alive_ms)
        };
        self.keep_alive = KeepAlive {
            timeout: Duration::from_millis(u64::from(granted)),
            last: now,
        };
    }

    fn keep_alive_ms(&self) -> u32 {
        self.keep_alive.timeout.as_millis() as u32
    }

    pub fn keep_alive_expired(&mut self, now: Nanos) -> bool {
        if self.association.take_touched() {
            self.keep_alive.last = now;
        }
        let timeout = self.keep_alive.timeout;
        !timeout.is_zero() && now.since(self.keep_alive.last) > timeout
    }
}
