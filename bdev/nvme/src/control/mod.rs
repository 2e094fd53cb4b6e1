//! The management of one controller, as tasks on its home reactor: initialisation, admin commands,
//! events, timeouts, resets and shutdown.
//!
//! ```text
//! AdminPoller ─ completions ─▶ futures of admin commands, events
//! reports ─▶ serve_reports   create and delete queues; late commands: abort ▶ queue ▶ controller
//! events ──▶ serve_events    read log pages, list the namespaces again          (events.rs)
//! time ────▶ watch           CSTS: gone, fatal                                  (recover.rs)
//!      ────▶ watch_health    SMART against thresholds                           (health.rs)
//! handle ──▶ reset, detach, lose, take_back …                       (recover.rs, shut_down.rs)
//! ```
//!
//! The lock `lifecycle` serialises all changes of the controller's state. The tasks have references
//! to the controller and end when it is detached.

mod bring_up;
mod events;
mod health;
mod logs;
mod namespaces;
mod queues;
mod recover;
mod shut_down;

use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use nacre_nvmf_wire::Sqe;
use nacre_nvmf_wire::registers::{Csts, offset};
use nacre_reactor::{CoreHandle, Idle, Nanos, Poller, Work};

pub(crate) use self::bring_up::Facts;
pub(crate) use self::health::Alerts;
pub(crate) use self::queues::Links;

use crate::admin::Answer;
use crate::controller::Controller;
use crate::error::{AttachError, ControlError};
use crate::event::Event;
use crate::function::GONE;
use crate::info::State;
use crate::options::Options;

/// Longest sleep of a reactor while a caller waits for a completion and there are no interrupts.
const AWAITED: Duration = Duration::from_micros(50);
/// Interval at which CSTS is read while a command is outstanding.
const LOOK: Duration = Duration::from_millis(100);
/// Longest sleep of a reactor with interrupts, because an interrupt may be lost.
const INTERRUPTED: Duration = Duration::from_millis(500);

impl Controller {
    pub(crate) async fn start(
        self: &Arc<Controller>,
        core: &CoreHandle,
    ) -> Result<(), AttachError> {
        let _one = self.lifecycle.lock().await;
        // The poller must exist before the first command, whose completion it processes.
        self.add_poller(core)?;
        let brought = self.bring_up(core).await;
        let outcome = match brought {
            Ok(facts) => {
                *self.facts.lock() = Arc::new(facts);
                self.add_poller(core)?;
                self.request_events();
                self.find_namespaces(core).await.map_err(AttachError::from)
            }
            Err(error) => Err(error),
        };
        if let Err(error) = outcome {
            *self.state.lock() = State::Detached;
            self.stop_all(core).await;
            return Err(error);
        }
        drop(core.spawn_local(Arc::clone(self).serve_reports(core.clone())));
        drop(core.spawn_local(Arc::clone(self).serve_events(core.clone())));
        drop(core.spawn_local(Arc::clone(self).watch(core.clone())));
        drop(core.spawn_local(Arc::clone(self).watch_health(core.clone())));
        let info = self.info();
        tracing::info!(
            controller = self.name(),
            address = info.address,
            model = info.drive.model,
            serial = info.drive.serial,
            queues = info.io_queues,
            depth = info.io_queue_depth,
            "NVMe controller attached"
        );
        Ok(())
    }

    pub(crate) fn is_detached(&self) -> bool {
        *self.state.lock() == State::Detached
    }

    pub(crate) fn set_state(&self, state: State) {
        let before = std::mem::replace(&mut *self.state.lock(), state.clone());
        if before != state {
            let name = self.name();
            match &state {
                State::Failed { reason } => {
                    tracing::error!(controller = name, reason, "NVMe controller failed");
                }
                state => {
                    tracing::info!(controller = name, state = state.name(), "NVMe controller");
                }
            }
            self.send_event(Event::State(self.status()));
        }
    }

    /// Sends an admin command and waits for success.
    pub(crate) async fn ask(
        &self,
        core: &CoreHandle,
        sqe: Sqe,
        data: &[u8],
        into: &mut [u8],
    ) -> Result<Answer, ControlError> {
        self.ask_within(core, sqe, self.admin_timeout(), data, into)
            .await
    }

    pub(crate) async fn ask_within(
        &self,
        core: &CoreHandle,
        sqe: Sqe,
        limit: Duration,
        data: &[u8],
        into: &mut [u8],
    ) -> Result<Answer, ControlError> {
        let mut command = pin!(self.admin.execute(core, sqe, limit, data, into));
        let answer = loop {
            match core.timeout(LOOK, command.as_mut()).await {
                Ok(answer) => break answer?,
                Err(_) => self.look_after_admin(),
            }
        };
        if answer.status.is_success() {
            Ok(answer)
        } else {
            Err(ControlError::Status {
                opcode: sqe.opcode,
                status: answer.status,
            })
        }
    }

    /// Fails the pending admin commands of a controller that was removed or has failed.
    fn look_after_admin(&self) {
        let csts = self.function().read32(offset::CSTS);
        if csts == GONE {
            self.admin.close(ControlError::Gone);
        } else if Csts(csts).is_fatal() || !Csts(csts).is_ready() {
            self.admin.close(ControlError::Fatal);
        }
    }

    pub(crate) fn admin_timeout(&self) -> Duration {
        self.options.admin_timeout.max(Options::ADMIN_TIMEOUT_MIN)
    }

    /// Adds the poller of the admin queue; again after a change of the vector's descriptor.
    pub(crate) fn add_poller(self: &Arc<Controller>, core: &CoreHandle) -> Result<(), AttachError> {
        self.remove_poller(core);
        let poller = AdminPoller {
            controller: Arc::downgrade(self),
            poll_admin: self.options.poll_admin,
        };
        let id = core
            .add_poller(Box::new(poller))
            .map_err(|_| ControlError::Stopped)?;
        *self.poller.lock() = Some(id);
        Ok(())
    }

    pub(crate) fn remove_poller(&self, core: &CoreHandle) {
        if let Some(id) = self.poller.lock().take() {
            core.remove_poller(id);
        }
    }
}

/// Polls the admin queue in every turn of the home reactor.
struct AdminPoller {
    controller: Weak<Controller>,
    poll_admin: Duration,
}

impl Poller for AdminPoller {
    fn name(&self) -> &str {
        "nvme-admin"
    }

    fn poll(&mut self, _now: Nanos, _budget: u32) -> Work {
        let Some(controller) = self.controller.upgrade() else {
            return Work::None;
        };
        match controller.admin.poll() {
            0 => Work::None,
            found => Work::Did(found),
        }
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        let Some(controller) = self.controller.upgrade() else {
            return Idle::Quiet;
        };
        if controller.admin.is_awaited() {
            return Idle::Until(now + AWAITED);
        }
        if controller.facts().vectors > 0 {
            controller.function().acknowledge(0);
            return Idle::Until(now + INTERRUPTED);
        }
        Idle::Until(now + self.poll_admin.max(AWAITED))
    }

    fn wake_fds(&self) -> std::io::Result<Vec<OwnedFd>> {
        let controller = self.controller.upgrade();
        let fd = controller.and_then(|controller| match controller.facts().vectors {
            0 => None,
            _ => controller.function().vector_fd(0),
        });
        fd.iter().map(|fd| fd.try_clone()).collect()
    }
}
