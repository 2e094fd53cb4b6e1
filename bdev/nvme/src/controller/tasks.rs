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

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use nacre_reactor::{CoreHandle, Idle, Nanos, Poller, Work};

use crate::controller::Controller;
use crate::error::{AttachError, ControlError};
use crate::event::Event;
use crate::info::State;

/// Longest sleep of a reactor while a caller waits for a completion, with or without interrupts,
/// and shortest sleep without interrupts.
const AWAITED: Duration = Duration::from_micros(50);
/// Longest sleep of a reactor with interrupts and no waiting caller: an interrupt may be lost.
const INTERRUPTED: Duration = Duration::from_millis(500);

impl Controller {
    pub(crate) async fn start(self: &Arc<Self>, core: &CoreHandle) -> Result<(), AttachError> {
        let _one = self.lifecycle.lock().await;
        // The poller must exist before the first command, whose completion it processes.
        self.add_poller(core)?;
        let brought = self.commands(core).bring_up().await;
        let outcome = match brought {
            Ok(properties) => {
                self.shared.set_properties(properties);
                self.add_poller(core)?;
                self.request_events();
                self.find_namespaces(core).await.map_err(AttachError::from)
            }
            Err(error) => Err(error),
        };
        if let Err(error) = outcome {
            self.shared.set_state(State::Detached);
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

    pub(crate) fn set_state(&self, state: State) {
        let before = self.shared.set_state(state.clone());
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

    /// Adds the poller of the admin queue; again after a change of the vector's descriptor.
    pub(crate) fn add_poller(self: &Arc<Self>, core: &CoreHandle) -> Result<(), AttachError> {
        self.remove_poller(core);
        let poller = AdminPoller {
            controller: Arc::downgrade(self),
            poll_admin: self.shared.options.poll_admin,
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
        if controller.shared.properties().vectors > 0 {
            controller.shared.function().acknowledge(0);
            return Idle::Until(now + INTERRUPTED);
        }
        Idle::Until(now + self.poll_admin.max(AWAITED))
    }

    fn wake_fds(&self) -> std::io::Result<Vec<OwnedFd>> {
        let controller = self.controller.upgrade();
        let fd = controller.and_then(|controller| match controller.shared.properties().vectors {
            0 => None,
            _ => controller.shared.function().vector_fd(0),
        });
        fd.iter().map(|fd| fd.try_clone()).collect()
    }
}
