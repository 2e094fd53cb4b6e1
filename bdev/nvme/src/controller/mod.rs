//! [`Controller`]: the handle through which the engine manages an attached drive: status, health,
//! logs, firmware, admin commands, reset and detach. Admin commands, and the handling of events,
//! timeouts, resets and removal, run on one reactor; [`tasks`] has the overview. I/O does not pass
//! through here: each core has a queue pair ([`crate::queue_pair`]).

mod bring_up;
mod commands;
mod events;
mod firmware;
mod health;
mod logs;
mod namespaces;
mod queues;
mod recover;
mod shut_down;
mod tasks;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use nacre_bdev::injection::Injection;
use nacre_nvmf_wire::Sqe;
use nacre_reactor::{CallError, CoreHandle, PollerId, ReactorHandle};
use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, Notify};

use self::commands::Commands;
pub use self::firmware::{FirmwareUpdate, IMAGE_MAX};
use self::health::Alerts;
use crate::admin::Admin;
use crate::device::NvmeBdev;
use crate::error::{AttachError, ControlError};
use crate::event::{Event, Observer, ResetReason};
use crate::function::Function;
use crate::info::{ControllerInfo, ErrorEntry, FirmwareInfo, Health, QueuePairActivity, Status};
use crate::options::DriveOptions;
use crate::shared::Shared;

/// The data that an admin command of [`Controller::admin`] returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminData {
    None,
    /// This many bytes from the controller.
    Read(usize),
}

/// The result of a successful admin command of [`Controller::admin`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminReply {
    pub dword0: u32,
    pub data: Vec<u8>,
}

/// An attached controller. Any thread may use it; its commands run on the reactor that attached it
/// (its home). The controller stays attached until [`Controller::detach`].
pub struct Controller {
    this: Weak<Self>,
    shared: Arc<Shared>,
    observer: Arc<dyn Observer>,
    home: ReactorHandle,
    admin: Admin,
    namespaces: Mutex<BTreeMap<u32, Arc<NvmeBdev>>>,
    /// Notified when the tasks must check whether to end.
    stop: Notify,
    /// Serializes changes of the controller's state.
    lifecycle: AsyncMutex<()>,
    /// Locked during a firmware update.
    firmware: AsyncMutex<()>,
    alerts: Mutex<Alerts>,
    newest_health: Mutex<Option<Health>>,
    poller: Mutex<Option<PollerId>>,
}

impl Controller {
    /// Initialises the controller on the calling reactor, which becomes its home. Reports each
    /// namespace to the observer.
    pub async fn attach(
        core: &CoreHandle,
        function: Arc<dyn Function>,
        options: DriveOptions,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<Self>, AttachError> {
        let controller = Arc::new_cyclic(|this| Self {
            this: this.clone(),
            shared: Arc::new(Shared::new(function, options)),
            observer,
            home: core.handle(),
            admin: Admin::new(),
            namespaces: Mutex::default(),
            stop: Notify::new(),
            lifecycle: AsyncMutex::new(()),
            firmware: AsyncMutex::new(()),
            alerts: Mutex::default(),
            newest_health: Mutex::default(),
            poller: Mutex::new(None),
        });
        controller.start(core).await?;
        Ok(controller)
    }

    pub fn name(&self) -> &str {
        self.shared.name()
    }

    pub fn options(&self) -> &DriveOptions {
        &self.shared.options
    }

    pub fn info(&self) -> ControllerInfo {
        self.shared.info()
    }

    pub fn status(&self) -> Status {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.shared.counters;
        Status {
            state: self.shared.state(),
            resets: read(&counters.resets),
            function_resets: read(&counters.function_resets),
            queue_resets: read(&counters.queue_resets),
            aborts: read(&counters.aborts),
            timeouts: read(&counters.timeouts),
            admin_timeouts: read(&counters.admin_timeouts),
            resubmitted: read(&counters.resubmitted),
            protocol_errors: read(&counters.protocol_errors) + self.admin.unmatched(),
            events: read(&counters.events),
            losses: read(&counters.losses),
            nudges: read(&counters.nudges),
            queues: self.shared.links.lock().count(),
        }
    }

    /// The counters of the I/O queue pairs, in the order of their creation.
    pub fn queue_pairs(&self) -> Vec<QueuePairActivity> {
        let links = self.shared.all_links();
        links
            .iter()
            .map(|link| QueuePairActivity::of(link))
            .collect()
    }

    /// Returns the namespaces in the order of their NSIDs.
    pub fn namespaces(&self) -> Vec<Arc<NvmeBdev>> {
        self.namespaces.lock().values().cloned().collect()
    }

    /// Resets the controller (CC.EN), and the PCI function if that fails. Pending admin commands
    /// fail. I/O commands in flight are sent again, each at most [`DriveOptions::retry_limit`]
    /// times; compares and compare-and-writes complete with [`nacre_bdev::Status::Aborted`]
    /// instead.
    pub async fn reset(&self) -> Result<(), ControlError> {
        self.at_home(
            |this, core| async move { this.reset_for(&core, ResetReason::UserRequest).await },
        )
        .await
    }

    /// The last SMART / Health log that was read: every [`DriveOptions::health_period`], after a
    /// SMART event, or by [`Controller::health`]. Does not access the drive. `None` before the
    /// first reading.
    pub fn last_health(&self) -> Option<Health> {
        self.newest_health.lock().clone()
    }

    /// Reads the SMART / Health log now.
    pub async fn health(&self) -> Result<Health, ControlError> {
        self.at_home(|this, core| async move { this.read_health(&core).await })
            .await
    }

    /// Reads the newest entries of the Error Information log, the newest first. It reads at most
    /// `entries`, and no more than the drive keeps or fit in a page (64).
    pub async fn error_log(&self, entries: usize) -> Result<Vec<ErrorEntry>, ControlError> {
        self.at_home(
            move |this, core| async move { this.commands(&core).read_errors(entries).await },
        )
        .await
    }

    pub async fn firmware_slots(&self) -> Result<FirmwareInfo, ControlError> {
        self.at_home(|this, core| async move { this.commands(&core).read_firmware().await })
            .await
    }

    /// Executes a read-only admin command: Identify, Get Log Page or Get Features. The driver sets
    /// the command identifier and the data pointer. At most 128 KiB of data, or MDTS if that is
    /// less; read longer data in parts (Get Log Page has an offset).
    pub async fn admin(&self, sqe: Sqe, data: AdminData) -> Result<AdminReply, ControlError> {
        self.at_home(
            move |this, core| async move { this.commands(&core).pass_through(sqe, data).await },
        )
        .await
    }

    /// Sets the rule of error injection for an opcode of admin commands; `None` removes it.
    pub fn inject_admin(&self, opcode: u8, injection: Option<Injection>) {
        self.admin.inject(opcode, injection);
    }

    /// Sets the rule of error injection for an opcode of I/O in the queue pair of the calling core;
    /// `None` removes the rule. Without a queue pair on this core, does nothing. Call this on each
    /// core that uses the controller.
    pub fn inject_io(&self, opcode: u8, injection: Option<Injection>) {
        crate::table::inject_into(self.shared.id(), opcode, injection);
    }

    /// Detaches the controller: deletes its queues, shuts it down and disables it. I/O in flight,
    /// and later I/O, completes with [`nacre_bdev::Status::Gone`]. A failed step is only logged.
    pub async fn detach(&self) {
        let ended = self.at_home(|this, core| async move {
            this.shut_down(&core).await;
            Ok(())
        });
        if let Err(error) = ended.await {
            tracing::warn!(controller = self.name(), %error, "NVMe controller was not shut down");
        }
    }

    /// Handles the system's report that the drive was removed.
    pub fn removed(&self) {
        if let Some(this) = self.this.upgrade() {
            drop(self.home.run_future(move |core| async move {
                this.lose(&core).await;
            }));
        }
    }

    /// Handles the return of a drive that was removed or has failed; its namespaces become usable
    /// again. Fails if the drive at `function` has another serial number.
    pub async fn returned(&self, function: Arc<dyn Function>) -> Result<(), AttachError> {
        let Some(this) = self.this.upgrade() else {
            return Err(ControlError::Stopped.into());
        };
        let answer = self
            .home
            .run_future(move |core| async move { this.take_back(&core, function).await });
        answer.await.unwrap_or(Err(ControlError::Stopped.into()))
    }

    async fn at_home<R, F>(
        &self,
        work: impl FnOnce(Arc<Self>, CoreHandle) -> F + Send + 'static,
    ) -> Result<R, ControlError>
    where
        R: Send + 'static,
        F: Future<Output = Result<R, ControlError>> + 'static,
    {
        let this = self.this.upgrade().ok_or(ControlError::Stopped)?;
        let answer = self.home.run_future(move |core| work(this, core));
        match answer.await {
            Ok(answer) => answer,
            Err(CallError::NotSent(nacre_reactor::SendError::Full(_))) => Err(ControlError::Busy),
            Err(_) => Err(ControlError::Stopped),
        }
    }

    /// The admin queue, for a task on the home reactor.
    fn commands<'a>(&'a self, core: &'a CoreHandle) -> Commands<'a> {
        Commands {
            core,
            admin: &self.admin,
            shared: &self.shared,
        }
    }

    fn send_event(&self, event: Event) {
        self.observer.event(event);
    }
}
