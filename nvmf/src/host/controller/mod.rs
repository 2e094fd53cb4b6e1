//! The host's side of one controller: connects the admin queue, enables and identifies the
//! controller, reads its namespaces, keeps it alive, and reconnects after a loss.
//!
//! ```text
//! Dialling ─▶ Connecting ─▶ Enabling ─▶ Identifying ─▶ Live
//!    ▲            any failure, lost connection, timeout │
//!    └───────────── Waiting (back-off) ◀────────────────┘ ─▶ Failed (refused, or too long)
//! ```
//!
//! Each [`HostStep`] has at most one command. Keep Alive, Asynchronous Event Request and the
//! user's admin commands run at the same time.

mod access;
mod connecting;
mod ending;
mod events;
mod keep_alive;
mod moving;
mod scan;
mod step_data;
mod timing;
mod user_commands;

use std::sync::Arc;
use std::time::Duration;

use nacre_hugepages::{Buf, Pool};
use nacre_nvmf_wire::aen::AsyncEvent;
use nacre_nvmf_wire::commands::admin as commands;
use nacre_nvmf_wire::fabrics::InvalidParameter;
use nacre_nvmf_wire::features::NumberOfQueues;
use nacre_nvmf_wire::identify::IdentifyController;
use nacre_nvmf_wire::identify::controller::cntrltype;
use nacre_nvmf_wire::registers::{Cap, Csts};
use nacre_nvmf_wire::{Cqe, Sqe, StatusCode};
use nacre_reactor::Nanos;

use self::connecting::{dial_admin, step_after_authentication, step_after_connect};
use self::events::AsyncEventRequests;
use self::keep_alive::KeepAliveClock;
use self::scan::NamespaceScan;
use self::user_commands::{UserCommand, UserCommands};
use super::error::HostError;
use super::injection::InjectionQueues;
use super::link::Link;
use super::options::{Dial, HostOptions};
use super::paths::Paths;
use super::queue::{CommandQueue, Finished};
use super::step::HostStep;
use crate::transport::Closed;

/// Most namespaces of a controller; bounds the requests that a target can cause.
const MAX_NAMESPACES: usize = 65_536;
/// Most retries of a step's command after a transient failure.
const MAX_REPEATS: u8 = 3;
/// Interval at which CSTS is read while the controller is being enabled or shut down.
const READY_INTERVAL: Duration = Duration::from_millis(5);

/// The state of a controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControllerState {
    Connecting,
    Live,
    /// The association was lost. The next attempt to connect is at `until`.
    Waiting {
        attempt: u32,
        until: Nanos,
        error: HostError,
    },
    Failed(HostError),
    /// Disconnected by [`HostController::disconnect`].
    Closed,
}

/// The result of an admin command of the user.
#[derive(Debug)]
pub struct AdminResult {
    pub cqe: Cqe,
    /// The received data.
    pub data: Option<Buf>,
}

// Tokens of the controller's own commands.
const OWN: u64 = u64::MAX;
const KEEP_ALIVE: u64 = u64::MAX - 1;
const EVENT: u64 = u64::MAX - 2;

pub struct HostController {
    options: HostOptions,
    dial: Box<dyn Dial>,
    pool: Pool,
    link: Arc<Link>,
    state: ControllerState,
    queue: Option<CommandQueue>,
    step: HostStep,
    step_sent: bool,
    /// Number of retries of the step's command.
    repeats: u8,
    /// Earliest time of the step's command, for steps that poll a register.
    step_at: Nanos,
    /// Start of the present attempt to connect or to shut down.
    started: Nanos,
    /// Time of the first loss since the controller was live.
    lost_since: Option<Nanos>,
    attempts: u32,
    cap: Cap,
    /// CNTLID of the static controller that the target allocated for a request of any controller
    /// (FFFEh). Requested again after a loss (Base 3.1.3.3).
    had: Option<u16>,
    identify: Option<Box<IdentifyController>>,
    scan: NamespaceScan,
    events: AsyncEventRequests,
    keep_alive: KeepAliveClock,
    /// The previous association was closed without a loss, for a move to the other transport, and
    /// this one is not live yet.
    in_transit: bool,
    check_at: Nanos,
    user: UserCommands,
    /// The choice of the transport, if there are two.
    paths: Option<Paths>,
    better: Option<moving::Probe>,
}

impl HostController {
    /// Starts to connect. `pool`: the buffers of the core that polls the controller.
    pub fn new(options: HostOptions, dial: Box<dyn Dial>, pool: Pool, now: Nanos) -> Self {
        Self::linked(options, dial, pool, Arc::default(), now)
    }

    /// Like [`HostController::new`], with an existing link. The I/O queues of that link continue
    /// with this controller.
    pub fn linked(
        options: HostOptions,
        dial: Box<dyn Dial>,
        pool: Pool,
        link: Arc<Link>,
        now: Nanos,
    ) -> Self {
        link.revive();
        Self {
            paths: options.paths.clone().map(Paths::new),
            better: None,
            options,
            dial,
            pool,
            link,
            state: ControllerState::Connecting,
            queue: None,
            step: HostStep::Dialling,
            step_sent: false,
            repeats: 0,
            step_at: now,
            started: now,
            lost_since: None,
            attempts: 0,
            cap: Cap(0),
            had: None,
            identify: None,
            scan: NamespaceScan::default(),
            events: AsyncEventRequests::new(),
            keep_alive: KeepAliveClock::new(now),
            in_transit: false,
            check_at: now,
            user: UserCommands::new(),
        }
    }

    pub fn state(&self) -> &ControllerState {
        &self.state
    }

    pub fn is_live(&self) -> bool {
        self.state == ControllerState::Live
    }

    pub fn options(&self) -> &HostOptions {
        &self.options
    }

    /// The choice of the transport; `None` with one transport.
    pub fn paths(&self) -> Option<&Paths> {
        self.paths.as_ref()
    }

    /// The state shared with the I/O queues.
    pub fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// The Identify Controller data; `None` until they were read.
    pub fn identify(&self) -> Option<&IdentifyController> {
        self.identify.as_deref()
    }

    pub fn cap(&self) -> Cap {
        self.cap
    }

    pub fn is_discovery(&self) -> bool {
        self.identify
            .as_ref()
            .is_some_and(|i| i.cntrltype == cntrltype::DISCOVERY)
    }

    /// Removes and returns the oldest asynchronous event.
    pub fn take_event(&mut self) -> Option<AsyncEvent> {
        self.events.take()
    }

    /// Submits an admin command and returns the ticket for [`HostController::take_result`]. The
    /// command is sent at most once: a lost connection is its result. `None`: too many commands or
    /// results are pending.
    pub fn submit(&mut self, sqe: Sqe, write: Option<Buf>, read: Option<Buf>) -> Option<u64> {
        let error = match &self.state {
            ControllerState::Failed(error) => Some(error.clone()),
            ControllerState::Closed => Some(HostError::Lost(Closed::Local)),
            _ => None,
        };
        self.user.submit(sqe, write, read, error)
    }

    /// Removes and returns the result of a command; `None` until it has completed.
    pub fn take_result(&mut self, ticket: u64) -> Option<Result<AdminResult, HostError>> {
        self.user.take_result(ticket)
    }

    /// Shuts a live controller down (CC.SHN) and then closes the connection; otherwise closes it at
    /// once. The state becomes [`ControllerState::Closed`].
    pub fn disconnect(&mut self, now: Nanos) {
        if self.is_live() && !self.step.is_shutting_down() {
            self.link.set_up(false);
            // Drop the completion of the present step's command, which would be taken for the
            // completion of the shutdown step.
            if let Some(queue) = &mut self.queue {
                queue.forget(OWN);
            }
            self.started = now;
            self.enter(HostStep::ShutDown, now);
        } else if !self.is_live() && !self.is_over() {
            self.finish(ControllerState::Closed, HostError::Lost(Closed::Local));
        }
    }

    /// Starts a pending attempt to connect now, without the rest of its delay.
    pub fn hurry(&mut self, now: Nanos) {
        if let ControllerState::Waiting { until, .. } = &mut self.state {
            *until = now;
        }
    }

    fn is_over(&self) -> bool {
        matches!(
            self.state,
            ControllerState::Failed(_) | ControllerState::Closed
        )
    }

    /// Sends and receives. Returns the number of events handled, 0 if there were none.
    pub fn poll(&mut self, now: Nanos) -> usize {
        match &self.state {
            ControllerState::Failed(_) | ControllerState::Closed => return 0,
            _ => self.check_away(now),
        }
        match &self.state {
            ControllerState::Waiting { until, .. } if now < *until => return 0,
            ControllerState::Waiting { .. } => {
                self.state = ControllerState::Connecting;
                self.enter(HostStep::Dialling, now);
            }
            _ => {}
        }
        let mut did = 0;
        if let Err(error) = self.turn(now, &mut did) {
            self.lost(error, now);
        }
        did
    }

    fn turn(&mut self, now: Nanos, did: &mut usize) -> Result<(), HostError> {
        if self.queue.is_none() {
            let kind = self.paths.as_ref().map(Paths::current);
            self.queue = Some(dial_admin(self.dial.as_mut(), kind)?);
            self.link.change(|state| state.transport = kind);
            self.started = now;
            *did += 1;
        }
        if self.link.take_reset() && self.is_live() && !self.step.is_shutting_down() {
            return Err(match self.link.take_unreachable() {
                Some(why) => HostError::IoQueues { why },
                None => HostError::Reset,
            });
        }
        let mut finished = Vec::new();
        let queue = self.queue.as_mut().expect("just made");
        queue.take_injections(InjectionQueues::Admin, &self.link);
        *did += queue.poll(now, |f| finished.push(f));
        for one in finished {
            self.finished(one, now)?;
            if self.is_over() {
                return Ok(());
            }
        }
        let queue = self.queue.as_mut().expect("the queue has not ended");
        if let Some(why) = queue.closed() {
            let authenticating = self.step == HostStep::Authenticate;
            return Err(HostError::closed(why.clone(), authenticating));
        }
        if self.step == HostStep::Dialling && queue.is_ready() {
            self.enter(HostStep::Connect, now);
        } else if let Some(result) = queue.authenticate(&self.pool, now) {
            let next = step_after_authentication(result?, &mut self.queue);
            self.link.change(|state| state.is_authenticated = true);
            self.enter(next, now);
        }
        self.check_time(now)?;
        self.seek_better(now, did);
        self.send(now);
        Ok(())
    }

    /// Sends pending commands while the queue has room.
    fn send(&mut self, now: Nanos) {
        if self.is_live() && self.step == HostStep::Idle && self.events.rescan {
            self.events.rescan = false;
            self.enter(HostStep::ReadChangedList, now);
        } else if self.is_live() && self.step == HostStep::Idle && self.events.access_changed {
            self.events.access_changed = false;
            let next = self.after_namespaces();
            self.scan.access_only = next != HostStep::Idle;
            self.enter(next, now);
        }
        self.send_step(now);
        let listing = !self.is_live() && self.step.is_listing();
        if !self.is_live() && !listing || self.step.is_shutting_down() {
            return;
        }
        let Some(queue) = &mut self.queue else { return };
        if !listing && self.events.wants_request() && queue.has_room() {
            queue.submit(commands::async_event_request(0), None, None, EVENT, now);
            self.events.requested();
        }
        // Half the timeout, so that one delay does not end the association.
        let period = self.options.keep_alive / 2;
        let due = self.keep_alive.is_due(period, now);
        let due = due || !period.is_zero() && self.wants_answer();
        let Some(queue) = &mut self.queue else { return };
        if due && !self.keep_alive.is_sent() && queue.has_room() {
            queue.submit(commands::keep_alive(0), None, None, KEEP_ALIVE, now);
            self.keep_alive.sent(now);
        }
        if listing {
            return;
        }
        // Reserve two entries: for a step's command and for Keep Alive. The user's commands wait
        // while the association is about to end.
        while queue.room() > 2
            && !self.link.is_moving()
            && let Some(command) = self.user.next_waiting()
        {
            let UserCommand {
                ticket,
                sqe,
                write,
                read,
            } = command;
            queue.submit(sqe, write, read, ticket, now);
        }
    }

    fn enter(&mut self, step: HostStep, now: Nanos) {
        // Delay the next read of the register.
        let again =
            self.step == step && matches!(step, HostStep::WaitReady | HostStep::WaitShutDown);
        self.step_at = if again { now + READY_INTERVAL } else { now };
        if !self.is_live() && step.is_listing() {
            // The time limit holds for each namespace.
            self.started = now;
        }
        self.step = step;
        self.step_sent = false;
        self.repeats = 0;
    }

    /// Sends the step's command, or retries in the next turn if there is no buffer or no free
    /// entry.
    fn send_step(&mut self, now: Nanos) {
        if self.step_sent || !self.step.has_command() || now < self.step_at {
            return;
        }
        let asked = self.asked();
        let Some(queue) = &mut self.queue else { return };
        if !queue.has_room() {
            return;
        }
        let offered = self.identify.as_ref().map_or(0, |i| i.oaes.get());
        let command = self
            .step
            .command(&self.options, &self.pool, (asked, offered));
        let Some((sqe, write, read)) = command else {
            return;
        };
        queue.submit(sqe, write, read, OWN, now);
        if self.step == HostStep::Enable {
            self.keep_alive.controller_enabled(now);
        }
        self.step_sent = true;
    }

    fn finished(&mut self, one: Finished, now: Nanos) -> Result<(), HostError> {
        let status = one.cqe.status();
        match one.token {
            OWN if status.is_success() => self.step_done(one, now),
            OWN => self.step_refused(&one.cqe, now),
            KEEP_ALIVE => {
                self.keep_alive.completed();
                if status.is_success() {
                    Ok(())
                } else {
                    Err(HostError::Refused {
                        step: "keep alive",
                        status,
                        fabrics: false,
                    })
                }
            }
            EVENT => {
                self.events.completed(&one.cqe);
                Ok(())
            }
            ticket => {
                let mut data = one.read;
                if let Some(data) = &mut data {
                    data.truncate(one.transferred as usize);
                }
                let result = AdminResult { cqe: one.cqe, data };
                self.user.answer(ticket, Ok(result));
                Ok(())
            }
        }
    }

    /// Handles the completion of the step's command: its data, and the next step.
    fn step_done(&mut self, one: Finished, now: Nanos) -> Result<(), HostError> {
        let read: &[u8] = one.read.as_deref().unwrap_or(&[]);
        let data = &read[..read.len().min(one.transferred as usize)];
        let next = match self.step {
            HostStep::Connect => {
                let required = self.take_connect(&one.cqe)?;
                step_after_connect(self.queue.as_mut(), &self.options, required)?
            }
            HostStep::ReadCap => {
                self.cap = Cap(one.cqe.result());
                HostStep::Enable
            }
            HostStep::Enable => HostStep::WaitReady,
            HostStep::WaitReady => match Csts(one.cqe.result() as u32) {
                csts if csts.is_fatal() => {
                    return Err(HostError::Misbehaved {
                        what: "the controller failed (CSTS.CFS)".into(),
                    });
                }
                csts if csts.is_ready() => HostStep::IdentifyController,
                _ => HostStep::WaitReady,
            },
            HostStep::IdentifyController => {
                self.take_identify(data)?;
                if self.is_discovery() {
                    HostStep::ConfigureEvents
                } else {
                    HostStep::IdentifyNvm
                }
            }
            HostStep::IdentifyNvm => {
                self.take_nvm(data);
                HostStep::NumberOfQueues
            }
            HostStep::NumberOfQueues => {
                let granted = NumberOfQueues::from_dword(one.cqe.dword0());
                let granted = granted.map_or(1, |n| n.submission.min(n.completion));
                let granted = granted.min(u32::from(self.options.io_queues)) as u16;
                self.link.change(|state| state.io_queues = granted);
                HostStep::ConfigureEvents
            }
            HostStep::ConfigureEvents => self.after_events(),
            HostStep::ListNamespaces(after) => self.take_list(after, data)?,
            HostStep::IdentifyNamespace(nsid) => self.take_namespace(nsid, data)?,
            HostStep::DescribeNamespace(nsid) => {
                if let Some(info) = self.scan.found.get_mut(&nsid)
                    && let Err(error) = info.add_descriptors(data)
                {
                    tracing::warn!(nsid, %error, "the descriptors of a namespace are ignored");
                }
                self.next_namespace()
            }
            HostStep::ReadChangedList => self.take_changed(data)?,
            HostStep::ReadAccess(_) => self.take_access(data),
            HostStep::ShutDown => HostStep::WaitShutDown,
            HostStep::WaitShutDown => {
                let csts = Csts(one.cqe.result() as u32);
                if csts.shst() == Csts::SHST_COMPLETE || csts.is_fatal() {
                    self.finish(ControllerState::Closed, HostError::Lost(Closed::Local));
                    return Ok(());
                }
                HostStep::WaitShutDown
            }
            HostStep::Dialling | HostStep::Authenticate | HostStep::Idle => HostStep::Idle,
        };
        self.proceed(next, now);
        Ok(())
    }

    fn step_refused(&mut self, cqe: &Cqe, now: Nanos) -> Result<(), HostError> {
        let (status, step) = (cqe.status(), self.step);
        if is_transient(status) {
            // The status is transient and says nothing about the controller: retry.
            if self.repeats < MAX_REPEATS {
                self.repeats += 1;
                self.step_sent = false;
                return Ok(());
            }
            return Err(step.refused(status));
        }
        let next = match step {
            HostStep::Connect if status.code() == StatusCode::CONNECT_INVALID_PARAMETERS => {
                let parameter = InvalidParameter::from_dword0(cqe.dword0());
                // The previous static controller does not exist any more: request any other.
                let another = parameter == InvalidParameter::CNTLID && self.had.take().is_some();
                let dnr = status.dnr() && !another;
                return Err(HostError::InvalidParameter { parameter, dnr });
            }
            // Optional: without it, the defaults apply.
            HostStep::IdentifyNvm => HostStep::NumberOfQueues,
            HostStep::ConfigureEvents => self.after_events(),
            HostStep::ReadChangedList => self.start_listing(),
            // The namespace was removed after it was listed.
            HostStep::IdentifyNamespace(nsid) => {
                self.scan.found.remove(&nsid);
                self.next_namespace()
            }
            HostStep::DescribeNamespace(_) => self.next_namespace(),
            HostStep::ReadAccess(_) => self.no_access(),
            step => {
                if step == HostStep::Connect && status.code() == StatusCode::CONNECT_CONTROLLER_BUSY
                {
                    // The static controller is in use by another host or by the lost association.
                    self.had = None;
                }
                return Err(step.refused(status));
            }
        };
        self.proceed(next, now);
        Ok(())
    }

    fn proceed(&mut self, next: HostStep, now: Nanos) {
        self.enter(next, now);
        if next == HostStep::Idle {
            self.live(now);
        }
    }

    /// The step after the events are enabled. A discovery controller has no namespaces.
    fn after_events(&mut self) -> HostStep {
        if self.is_discovery() {
            HostStep::Idle
        } else {
            self.start_listing()
        }
    }

    fn live(&mut self, now: Nanos) {
        // Without a new list of namespaces, only their ANA states changed.
        if !self.scan.access_only {
            self.link
                .set_namespaces(std::mem::take(&mut self.scan.found));
        }
        self.scan.access_only = false;
        self.link.set_access(self.scan.access.clone());
        if self.state == ControllerState::Live {
            return;
        }
        self.state = ControllerState::Live;
        self.attempts = 0;
        self.lost_since = None;
        if let Some(paths) = &mut self.paths {
            paths.connected(now);
        }
        self.link.take_reset();
        self.link.take_unreachable();
        self.in_transit = false;
        self.link.set_away(false);
        self.link.set_up(true);
        let transport = self.link.state().transport.map(|kind| kind.to_string());
        tracing::info!(subsystem = %self.options.subnqn, transport, "connected");
    }
}

impl Drop for HostController {
    fn drop(&mut self) {
        // Notify the I/O queues that no association will follow. A closed or failed controller has
        // done that already, and another controller may use its link by now.
        if !self.is_over() {
            self.link.fail();
        }
    }
}

/// True for transient statuses: a transport error, or an interrupted command. A retry may succeed.
fn is_transient(status: StatusCode) -> bool {
    let passing = [
        StatusCode::TRANSIENT_TRANSPORT_ERROR,
        StatusCode::COMMAND_INTERRUPTED,
    ];
    passing.contains(&status.code()) && !status.dnr()
}

fn short(what: &'static str, data: &[u8]) -> HostError {
    HostError::Misbehaved {
        what: format!("{} bytes of {what}", data.len()),
    }
}
