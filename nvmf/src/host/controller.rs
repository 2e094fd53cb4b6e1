//! The admin queue of a controller as its host drives it.
//!
//! ```text
//! Dialling ─▶ Connecting ─▶ Enabling ─▶ Identifying ─▶ Live
//!    ▲            any failure, lost connection, timeout │
//!    └───────────── Waiting (back-off) ◀────────────────┘ ─▶ Failed (refused, or too long)
//! ```
//!
//! One command of its own at a time leads from step to step ([`Step`]). Keep-alives, event requests
//! and the user's admin commands run beside it.

mod access;
mod connecting;
mod ending;
mod events;
mod keep_alive;
mod learn;
mod moving;
mod scan;
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

use self::connecting::{dial_admin, step_after_connect};
use self::events::Events;
use self::keep_alive::KeepAlive;
use self::scan::NamespaceScan;
use self::user_commands::{UserCommand, UserCommands};
use super::link::Link;
use super::options::{Dial, HostError, HostOptions};
use super::paths::Paths;
use super::queue::{CommandQueue, Finished};
use super::step::Step;
use crate::transport::Closed;

/// Most namespaces of a controller; bounds the requests that a target can cause.
const MAX_NAMESPACES: usize = 65_536;
/// How often a step's command is sent again that did not fail by itself.
const MAX_REPEATS: u8 = 3;
/// Between two questions whether the controller is ready.
const READY_INTERVAL: Duration = Duration::from_millis(5);

/// Where a controller is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControllerState {
    Connecting,
    Live,
    /// Lost; the next attempt is at `until`.
    Waiting {
        attempt: u32,
        until: Nanos,
        error: HostError,
    },
    Failed(HostError),
    /// Disconnected on request.
    Closed,
}

/// The answer to an admin command of the user.
#[derive(Debug)]
pub struct AdminResult {
    pub cqe: Cqe,
    /// The data, as much of it as arrived.
    pub data: Option<Buf>,
}

/// Tokens of commands that are not the user's.
const OWN: u64 = u64::MAX;
const KEEP_ALIVE: u64 = u64::MAX - 1;
const EVENT: u64 = u64::MAX - 2;

pub struct Controller {
    options: HostOptions,
    dial: Box<dyn Dial>,
    pool: Pool,
    link: Arc<Link>,
    state: ControllerState,
    queue: Option<CommandQueue>,
    step: Step,
    step_sent: bool,
    /// How often its command was sent again.
    repeats: u8,
    /// Not before: where the step asks again and again.
    step_at: Nanos,
    /// When the current attempt to connect began, or to shut down.
    started: Nanos,
    /// When the connection was lost for the first time since it was live.
    lost_since: Option<Nanos>,
    attempts: u32,
    cap: Cap,
    /// The static controller that the target chose for a request for any controller, to ask for
    /// again (Base 3.1.3.3).
    had: Option<u16>,
    identify: Option<Box<IdentifyController>>,
    scan: NamespaceScan,
    events: Events,
    keep_alive: KeepAlive,
    /// The association before this one was left in order, and this one has not lived yet.
    in_transit: bool,
    check_at: Nanos,
    user: UserCommands,
    /// Where there are several transports to choose from.
    paths: Option<Paths>,
    better: Option<moving::Better>,
}

impl Controller {
    /// Starts to connect; `pool` is the memory of the core that polls it.
    pub fn new(options: HostOptions, dial: Box<dyn Dial>, pool: Pool, now: Nanos) -> Controller {
        Controller::linked(options, dial, pool, Arc::default(), now)
    }

    /// The same with an existing link: of a failed controller, whose I/O queues continue with this
    /// one, or of a future one.
    pub fn linked(
        options: HostOptions,
        dial: Box<dyn Dial>,
        pool: Pool,
        link: Arc<Link>,
        now: Nanos,
    ) -> Controller {
        link.revive();
        Controller {
            paths: options.paths.clone().map(Paths::new),
            better: None,
            options,
            dial,
            pool,
            link,
            state: ControllerState::Connecting,
            queue: None,
            step: Step::Dialling,
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
            events: Events::new(),
            keep_alive: KeepAlive::new(now),
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

    /// The choice of the transport, where there is one.
    pub fn paths(&self) -> Option<&Paths> {
        self.paths.as_ref()
    }

    /// Shared with the I/O queues.
    pub fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// Identify Controller, once it was read.
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

    /// The next event that the controller reported.
    pub fn take_event(&mut self) -> Option<AsyncEvent> {
        self.events.take()
    }

    /// Submits an admin command; the answer comes under the ticket. It is sent once: when its
    /// connection is lost, that is the answer. `None`: too many wait, or their answers do.
    pub fn submit(&mut self, sqe: Sqe, write: Option<Buf>, read: Option<Buf>) -> Option<u64> {
        let error = match &self.state {
            ControllerState::Failed(error) => Some(error.clone()),
            ControllerState::Closed => Some(HostError::Lost(Closed::Local)),
            _ => None,
        };
        self.user.submit(sqe, write, read, error)
    }

    /// The answer to a command, when it is there.
    pub fn take_result(&mut self, ticket: u64) -> Option<Result<AdminResult, HostError>> {
        self.user.take_result(ticket)
    }

    /// Shuts the controller down and closes the connection; [`ControllerState::Closed`] when done.
    pub fn disconnect(&mut self, now: Nanos) {
        if self.is_live() && !self.step.is_shutting_down() {
            self.link.set_up(false);
            // The completion of the present step would be taken for this one's: its command
            // identifier stays in use, but no step waits for it.
            if let Some(queue) = &mut self.queue {
                queue.forget(OWN);
            }
            self.started = now;
            self.enter(Step::ShutDown, now);
        } else if !self.is_live() && !self.is_over() {
            self.finish(ControllerState::Closed, HostError::Lost(Closed::Local));
        }
    }

    /// The next attempt to connect is not to wait.
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

    /// Does the pending work. Returns its amount.
    pub fn poll(&mut self, now: Nanos) -> usize {
        match &self.state {
            ControllerState::Failed(_) | ControllerState::Closed => return 0,
            _ => self.check_away(now),
        }
        match &self.state {
            ControllerState::Waiting { until, .. } if now < *until => return 0,
            ControllerState::Waiting { .. } => {
                self.state = ControllerState::Connecting;
                self.enter(Step::Dialling, now);
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
        *did += queue.poll(now, |f| finished.push(f));
        for one in finished {
            self.finished(one, now)?;
            if self.is_over() {
                return Ok(());
            }
        }
        let queue = self.queue.as_mut().expect("the queue has not ended");
        if let Some(why) = queue.closed() {
            let authenticating = self.step == Step::Authenticate;
            return Err(HostError::closed(why.clone(), authenticating));
        }
        if self.step == Step::Dialling && queue.is_ready() {
            self.enter(Step::Connect, now);
        } else if let Some(result) = queue.authenticate(&self.pool, now) {
            result?;
            self.enter(Step::ReadCap, now);
        }
        self.check_time(now)?;
        self.seek_better(now, did);
        self.send(now);
        Ok(())
    }

    /// Sends pending commands while the queue has room.
    fn send(&mut self, now: Nanos) {
        if self.is_live() && self.step == Step::Idle && self.events.rescan {
            self.events.rescan = false;
            self.enter(Step::ReadChangedList, now);
        } else if self.is_live() && self.step == Step::Idle && self.events.access_changed {
            self.events.access_changed = false;
            let next = self.after_namespaces();
            self.scan.access_only = next != Step::Idle;
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
        // Keep room for a step of our own and for a keep-alive. The user's commands shortly before
        // the association ends wait for the next one.
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

    fn enter(&mut self, step: Step, now: Nanos) {
        // Asked again: not at once.
        let again = self.step == step && matches!(step, Step::WaitReady | Step::WaitShutDown);
        self.step_at = if again { now + READY_INTERVAL } else { now };
        if !self.is_live() && step.is_listing() {
            // The limit is for each of them.
            self.started = now;
        }
        self.step = step;
        self.step_sent = false;
        self.repeats = 0;
    }

    /// Sends the step's command; tried again in the next turn when a buffer or room is short.
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
        if self.step == Step::Enable {
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
            Step::Connect => {
                let required = self.take_connect(&one.cqe)?;
                step_after_connect(self.queue.as_mut(), &self.options, required)?
            }
            Step::ReadCap => {
                self.cap = Cap(one.cqe.result());
                Step::Enable
            }
            Step::Enable => Step::WaitReady,
            Step::WaitReady => match Csts(one.cqe.result() as u32) {
                csts if csts.is_fatal() => {
                    return Err(HostError::Misbehaved {
                        what: "the controller failed (CSTS.CFS)".into(),
                    });
                }
                csts if csts.is_ready() => Step::IdentifyController,
                _ => Step::WaitReady,
            },
            Step::IdentifyController => {
                self.take_identify(data)?;
                if self.is_discovery() {
                    Step::ConfigureEvents
                } else {
                    Step::IdentifyNvm
                }
            }
            Step::IdentifyNvm => {
                self.take_nvm(data);
                Step::NumberOfQueues
            }
            Step::NumberOfQueues => {
                let granted = NumberOfQueues::from_dword(one.cqe.dword0());
                let granted = granted.map_or(1, |n| n.submission.min(n.completion));
                let granted = granted.min(u32::from(self.options.io_queues)) as u16;
                self.link.change(|state| state.io_queues = granted);
                Step::ConfigureEvents
            }
            Step::ConfigureEvents => self.after_events(),
            Step::ListNamespaces(after) => self.take_list(after, data)?,
            Step::IdentifyNamespace(nsid) => self.take_namespace(nsid, data)?,
            Step::DescribeNamespace(nsid) => {
                if let Some(info) = self.scan.found.get_mut(&nsid)
                    && let Err(error) = info.add_descriptors(data)
                {
                    tracing::warn!(nsid, %error, "the descriptors of a namespace are ignored");
                }
                self.next_namespace()
            }
            Step::ReadChangedList => self.take_changed(data)?,
            Step::ReadAccess(_) => self.take_access(data),
            Step::ShutDown => Step::WaitShutDown,
            Step::WaitShutDown => {
                let csts = Csts(one.cqe.result() as u32);
                if csts.shst() == Csts::SHST_COMPLETE || csts.is_fatal() {
                    self.finish(ControllerState::Closed, HostError::Lost(Closed::Local));
                    return Ok(());
                }
                Step::WaitShutDown
            }
            Step::Dialling | Step::Authenticate | Step::Idle => Step::Idle,
        };
        self.proceed(next, now);
        Ok(())
    }

    fn step_refused(&mut self, cqe: &Cqe, now: Nanos) -> Result<(), HostError> {
        let (status, step) = (cqe.status(), self.step);
        if is_passing(status) {
            // The status does not answer the question: a namespace, say, is unchanged.
            if self.repeats < MAX_REPEATS {
                self.repeats += 1;
                self.step_sent = false;
                return Ok(());
            }
            return Err(HostError::Refused {
                step: step.name(),
                status,
                fabrics: step.is_fabrics(),
            });
        }
        let next = match step {
            Step::Connect if status.code() == StatusCode::CONNECT_INVALID_PARAMETERS => {
                let parameter = InvalidParameter::from_dword0(cqe.dword0());
                // The one that it had is no more: another will do.
                let another = parameter == InvalidParameter::CNTLID && self.had.take().is_some();
                let dnr = status.dnr() && !another;
                return Err(HostError::InvalidParameter { parameter, dnr });
            }
            // Optional: a controller without it has the defaults.
            Step::IdentifyNvm => Step::NumberOfQueues,
            Step::ConfigureEvents => self.after_events(),
            Step::ReadChangedList => self.start_listing(),
            // It went between the list and the question.
            Step::IdentifyNamespace(nsid) => {
                self.scan.found.remove(&nsid);
                self.next_namespace()
            }
            Step::DescribeNamespace(_) => self.next_namespace(),
            Step::ReadAccess(_) => self.no_access(),
            step => {
                if step == Step::Connect && status.code() == StatusCode::CONNECT_CONTROLLER_BUSY {
                    // Another host has it, or the remains of a lost association.
                    self.had = None;
                }
                return Err(HostError::Refused {
                    step: step.name(),
                    status,
                    fabrics: step.is_fabrics(),
                });
            }
        };
        self.proceed(next, now);
        Ok(())
    }

    fn proceed(&mut self, next: Step, now: Nanos) {
        self.enter(next, now);
        if next == Step::Idle {
            self.live(now);
        }
    }

    /// A discovery controller has no namespaces.
    fn after_events(&mut self) -> Step {
        if self.is_discovery() {
            Step::Idle
        } else {
            self.start_listing()
        }
    }

    fn live(&mut self, now: Nanos) {
        // A namespace whose access alone was read has no new list.
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

impl Drop for Controller {
    fn drop(&mut self) {
        // No association will return: I/O queues must not wait for it. A controller that was over
        // has reported it, and another may own its link by now.
        if !self.is_over() {
            self.link.fail();
        }
    }
}

/// Damaged on the way, or interrupted: the same command may well succeed.
fn is_passing(status: StatusCode) -> bool {
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
