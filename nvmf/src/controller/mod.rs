//! The controller of one association: registers, keep-alive and admin commands. It lives on the
//! core of its admin queue. That core's queue group ([`crate::queues`]) passes it the commands.
//!
//! ```text
//! registers.rs   CAP VS CC CSTS CRTO: enable, disable, shutdown (Base 3.5, 3.6)
//! events.rs      Asynchronous Event Requests and their events (Base 5.2)
//! identify.rs    the data of the controller and its namespaces (Base 5.17)
//! features.rs    Get and Set Features (Base 5.15, 5.27)
//! logs.rs        Get Log Page (Base 5.16)
//! lba_status.rs  Get LBA Status (NVM Command Set 4.2.1)
//! ```
//!
//! It does no I/O: the input is an admin command with its buffer, the result an [`Outcome`]. The
//! announced limits equal the enforced ones, because both come from [`IoLimits`].

mod events;
mod features;
mod identify;
mod lba_status;
mod logs;
mod registers;

pub(crate) use self::lba_status::write as write_lba_status;

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::Bdev;
use nacre_bdev::listing::ListQuery;
use nacre_nvmf_wire::commands::admin as commands;
use nacre_nvmf_wire::commands::lba_status::GetLbaStatus;
use nacre_nvmf_wire::features::{HostBehavior, fid};
use nacre_nvmf_wire::opcode::{admin, fabrics as fctype};
use nacre_nvmf_wire::{Cqe, Fuse, Sqe, StatusCode, identify as structures};
use nacre_reactor::Nanos;

use self::events::AsyncEventState;
use self::features::Features;
use self::logs::Logs;
use self::registers::{Registers, Written};
use crate::subsystems::association::{Association, Phase, Teardown};
use crate::subsystems::config::IoLimits;
use crate::subsystems::nvmf_target::Target;
use crate::subsystems::reservation::Several;
use crate::subsystems::subsystem::Subsystem;
use crate::subsystems::subsystem_config::SubsystemKind;
use crate::transport::{Address, TransportCaps};

/// Time without a command after which a discovery controller without keep-alive is removed (the
/// discovery controller activity timeout).
const DISCOVERY_ACTIVITY_TIMEOUT: Duration = Duration::from_secs(120);

/// The next step for an admin command.
pub(crate) enum Outcome {
    Done(Cqe),
    /// The command completes later, like Asynchronous Event Request, or never.
    Deferred,
    /// The group aborts command `cid` of I/O queue `sqid`, and then completes the Abort.
    Abort {
        sqid: u16,
        cid: u16,
    },
    /// Set Features, Reservation Persistence (83h). The group sets or clears Persist Through Power
    /// Loss (`on`) for the reservations of these namespaces. Then it completes the command.
    Persist {
        on: bool,
        namespaces: Several,
    },
    /// Get LBA Status. The group asks the bdev. Then it completes the command.
    ListAllocated {
        bdev: Arc<dyn Bdev>,
        query: ListQuery,
    },
}

pub(crate) struct Controller {
    target: Arc<Target>,
    subsystem: Arc<Subsystem>,
    association: Arc<Association>,
    caps: TransportCaps,
    limits: IoLimits,
    /// The local address of the host's connection. The discovery log reports it for listeners on
    /// all addresses.
    local: Address,
    registers: Registers,
    events: AsyncEventState,
    features: Features,
    keep_alive: KeepAliveTimer,
    idle_timer: IdleTimer,
    logs: Logs,
    aborts: u8,
}

/// The keep-alive timer (Base 3.9). Any command of any queue restarts it (TBKAS).
struct KeepAliveTimer {
    /// The granted keep-alive timeout (KATO); zero: disabled.
    granted: Duration,
    /// Time without a command after which the association ends; zero: never.
    timeout: Duration,
    last: Nanos,
}

/// The idle timer of the host's listener. Any command of any queue restarts it.
struct IdleTimer {
    /// Zero: never.
    timeout: Duration,
    since: Nanos,
}

impl Controller {
    pub(crate) fn new(
        target: &Arc<Target>,
        (subsystem, association): (Arc<Subsystem>, Arc<Association>),
        caps: &TransportCaps,
        local: Address,
        kato_ms: u32,
        now: Nanos,
    ) -> Self {
        let config = &target.config;
        let kind = subsystem.kind;
        let ana = subsystem.config.ana_reporting;
        let options = target.listener_options(association.listener);
        let mut controller = Self {
            registers: Registers::new(
                &target.listener_limits(caps.kind, association.listener),
                kind,
            ),
            events: AsyncEventState::new(config.async_event_requests, kind, ana, kato_ms != 0),
            features: Features::default(),
            keep_alive: KeepAliveTimer {
                granted: Duration::ZERO,
                timeout: Duration::ZERO,
                last: now,
            },
            idle_timer: IdleTimer {
                timeout: Duration::from_secs(options.idle_timeout_s.unwrap_or(0).into()),
                since: now,
            },
            limits: IoLimits::new(config, caps),
            caps: caps.clone(),
            local,
            logs: Logs::default(),
            target: Arc::clone(target),
            subsystem,
            association,
            aborts: 0,
        };
        controller.set_keep_alive_ms(kato_ms, now);
        controller
    }

    fn is_discovery(&self) -> bool {
        self.subsystem.kind == SubsystemKind::Discovery
    }

    /// Bytes of data that a command transfers, in the direction of its opcode. The error is the
    /// status to complete with immediately.
    pub(crate) fn data_bytes(&self, sqe: &Sqe) -> Result<u32, StatusCode> {
        if sqe.fuse() != Fuse::Normal {
            return Err(StatusCode::INVALID_FIELD.with_dnr());
        }
        if sqe.is_fabrics() {
            return Ok(0);
        }
        match self.association.phase() {
            Phase::Ready => {}
            // The command is not executed; see `execute`.
            Phase::Closing => return Ok(0),
            Phase::Connected if sqe.opcode == admin::KEEP_ALIVE => {}
            Phase::Connected => return Err(StatusCode::COMMAND_SEQUENCE_ERROR.with_dnr()),
        }
        match sqe.opcode {
            admin::ABORT | admin::ASYNC_EVENT_REQUEST | admin::KEEP_ALIVE => Ok(0),
            admin::IDENTIFY => Ok(structures::SIZE as u32),
            admin::GET_LOG_PAGE => {
                let command =
                    commands::GetLogPage::parse(sqe).map_err(|e| e.status().with_dnr())?;
                // The caller refuses a transfer above the limit.
                Ok(u32::try_from(command.bytes()).unwrap_or(u32::MAX))
            }
            admin::GET_FEATURES => features::data_bytes_of_get(sqe),
            admin::GET_LBA_STATUS if !self.is_discovery() => {
                let bytes = GetLbaStatus::parse(sqe).bytes();
                Ok(u32::try_from(bytes).unwrap_or(u32::MAX))
            }
            admin::SET_FEATURES => Ok(match commands::SetFeatures::parse(sqe).fid {
                fid::HOST_BEHAVIOR_SUPPORT => HostBehavior::SIZE as u32,
                _ => 0,
            }),
            _ => Err(StatusCode::INVALID_OPCODE.with_dnr()),
        }
    }

    /// Executes a command. `data`: the host's data, or a zeroed buffer for the result.
    pub(crate) fn execute(&mut self, sqe: &Sqe, data: &mut [u8], now: Nanos) -> Outcome {
        let cid = sqe.cid();
        if sqe.is_fabrics() {
            return Outcome::Done(self.fabrics(sqe));
        }
        // Do not complete commands of a connection that is being closed: the host repeats them on
        // the next one. It could take an error here for a permanent state of the namespace.
        if self.association.phase() == Phase::Closing {
            return Outcome::Deferred;
        }
        let result = match sqe.opcode {
            admin::ABORT => return self.abort(sqe),
            admin::ASYNC_EVENT_REQUEST => match self.events.request(cid) {
                Ok(()) => return Outcome::Deferred,
                Err(status) => Err(status),
            },
            admin::KEEP_ALIVE => {
                self.keep_alive.last = now;
                Ok(0)
            }
            admin::IDENTIFY => self.identify(sqe, data).map(|()| 0),
            admin::GET_LOG_PAGE => self.log_page(sqe, data, now).map(|()| 0),
            admin::GET_FEATURES => self.get_features(sqe, data),
            admin::SET_FEATURES
                if commands::SetFeatures::parse(sqe).fid == fid::RESERVATION_PERSISTENCE =>
            {
                match self.set_reservation_persistence(sqe) {
                    Ok((on, namespaces)) => return Outcome::Persist { on, namespaces },
                    Err(status) => Err(status),
                }
            }
            admin::SET_FEATURES => self.set_features(sqe, data, now),
            admin::GET_LBA_STATUS => match self.lba_status(sqe) {
                Ok((bdev, query)) => return Outcome::ListAllocated { bdev, query },
                Err(status) => Err(status),
            },
            _ => Err(StatusCode::INVALID_OPCODE.with_dnr()),
        };
        Outcome::Done(match result {
            Ok(dword0) => Cqe::success(cid).with_dword0(dword0),
            Err(status) => Cqe::new(cid, status),
        })
    }

    fn fabrics(&mut self, sqe: &Sqe) -> Cqe {
        let cid = sqe.cid();
        match sqe.fctype() {
            fctype::PROPERTY_GET => self.registers.get(sqe, &self.association),
            fctype::PROPERTY_SET => match self.registers.set(sqe, &self.association) {
                Ok(Written::Nothing) => Cqe::success(cid),
                Ok(Written::Disabled) => {
                    self.reset();
                    Cqe::success(cid)
                }
                Err(status) => Cqe::new(cid, status),
            },
            // Disconnect is for I/O queues only (Base 6.4).
            fctype::DISCONNECT => Cqe::new(cid, StatusCode::INVALID_QUEUE_TYPE.with_dnr()),
            _ => Cqe::new(cid, StatusCode::INVALID_OPCODE.with_dnr()),
        }
    }

    /// A Controller Level Reset (Base 3.7.2): resets the features, except the keep-alive timer,
    /// which Connect has started.
    fn reset(&mut self) {
        self.features = Features::default();
        self.events.reset();
        self.association.reservations().reset();
        self.association.set_retry_delays(false);
        self.association.set_io_queues(u16::MAX);
    }

    fn abort(&mut self, sqe: &Sqe) -> Outcome {
        let commands::Abort { sqid, cid } = commands::Abort::parse(sqe);
        if sqid == 0 {
            // On this queue only event requests can be aborted; other commands complete
            // immediately.
            let aborted = self.events.abort(cid);
            return Outcome::Done(Cqe::success(sqe.cid()).with_dword0(u32::from(!aborted)));
        }
        if self.aborts >= self.target.config.aborts.max(1) {
            return Outcome::Done(Cqe::new(
                sqe.cid(),
                StatusCode::ABORT_COMMAND_LIMIT_EXCEEDED,
            ));
        }
        self.aborts += 1;
        Outcome::Abort { sqid, cid }
    }

    /// Records that the group has completed an Abort.
    pub(crate) fn abort_finished(&mut self) {
        self.aborts = self.aborts.saturating_sub(1);
    }

    /// Removes an outstanding event request without a completion. Returns false if there is none.
    pub(crate) fn forget_event_request(&mut self, cid: u16) -> bool {
        self.events.forget(cid)
    }

    /// The completion of an outstanding event request, if an event is pending.
    pub(crate) fn next_event(&mut self) -> Option<Cqe> {
        self.events.notice(self.association.take_pending());
        self.events.next()
    }

    /// Grants a keep-alive timeout: the host's KATO, rounded up to a multiple of the granularity
    /// (KAS), and at least the target's minimum. 0 disables the timer; a discovery controller then
    /// has [`DISCOVERY_ACTIVITY_TIMEOUT`].
    fn set_keep_alive_ms(&mut self, kato_ms: u32, now: Nanos) {
        let limits = self.target.queue_limits(self.caps.kind);
        let granularity = u32::from(limits.keep_alive_granularity.max(1)) * 100;
        let rounded = kato_ms.div_ceil(granularity).saturating_mul(granularity);
        let granted = if kato_ms == 0 {
            0
        } else {
            rounded.max(limits.min_keep_alive_ms)
        };
        let granted = Duration::from_millis(u64::from(granted));
        let timeout = match (granted.is_zero(), self.is_discovery()) {
            (true, true) => DISCOVERY_ACTIVITY_TIMEOUT,
            _ => granted,
        };
        self.keep_alive = KeepAliveTimer {
            granted,
            timeout,
            last: now,
        };
    }

    fn keep_alive_ms(&self) -> u32 {
        self.keep_alive.granted.as_millis() as u32
    }

    /// The reason to end the association if one of its timers has expired.
    pub(crate) fn expired(&mut self, now: Nanos) -> Option<Teardown> {
        if self.association.take_touched() {
            self.keep_alive.last = now;
            self.idle_timer.since = now;
        }
        let timeout = self.keep_alive.timeout;
        if !timeout.is_zero() && now.since(self.keep_alive.last) > timeout {
            return Some(Teardown::KeepAliveExpired);
        }
        self.idle_timer_expired(now).then_some(Teardown::Idle)
    }

    fn idle_timer_expired(&mut self, now: Nanos) -> bool {
        let IdleTimer { timeout, since } = &mut self.idle_timer;
        if timeout.is_zero() {
            return false;
        }
        if self.association.has_io_in_progress() {
            *since = now;
        }
        now.since(*since) > *timeout
    }
}
