//! Recovery: late commands, unexpected completions, fatal errors, and removed drives that return.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_nvmf_wire::commands::admin::Abort;
use nacre_nvmf_wire::registers::{Cc, Csts, offset};
use nacre_reactor::CoreHandle;

use super::Controller;
use super::commands::Commands;
use crate::error::{AttachError, ControlError};
use crate::event::{Event, ResetReason, Timeout, TimeoutAction};
use crate::function::{Function, GONE};
use crate::info::State;
use crate::link::{Link, Report, Request, count};
use crate::options::ActionOnTimeout;
use crate::phase::QueueState;
use crate::shared;

/// Interval at which CSTS is read.
const WATCH: Duration = Duration::from_millis(250);
/// Attempts of a reset. From the second one on, the function is reset first.
const ATTEMPTS: u32 = 3;
/// Delay between attempts to stop a controller's memory accesses.
const STOP_AGAIN: Duration = Duration::from_secs(1);
/// Time limit of the admin commands of a recovery.
const HURRY: Duration = Duration::from_secs(5);

impl Controller {
    /// Handles the reports of queue pair owners.
    pub(super) async fn serve_reports(self: Arc<Self>, core: CoreHandle) {
        loop {
            self.shared.reported.notified().await;
            while let Some(report) = self.shared.next_report() {
                if self.shared.is_detached() {
                    return;
                }
                self.serve(&core, report).await;
            }
            if self.shared.is_detached() {
                return;
            }
        }
    }

    async fn serve(self: &Arc<Self>, core: &CoreHandle, report: Report) {
        let link = self.shared.links.lock().get(report.qid);
        let Some(link) = link else {
            return;
        };
        let current = link.phase.state() == QueueState::Live(report.generation);
        match report.want {
            Request::Make => self.make_asked(core, &link).await,
            Request::Delete => self.delete_asked(core, &link).await,
            Request::Interrupts { on } if current => {
                self.switch_asked(core, &link, report, on).await
            }
            Request::Late {
                cid,
                opcode,
                stage,
                waited,
            } if current => {
                let action = self.action_for(stage);
                if stage == 0 {
                    count(&self.shared.counters.timeouts);
                }
                let qid = report.qid;
                tracing::warn!(
                    controller = self.name(),
                    qid,
                    cid,
                    opcode,
                    ?waited,
                    action = action.name(),
                    "NVMe command is late"
                );
                self.send_event(Event::Timeout(Timeout {
                    qid,
                    cid,
                    opcode,
                    waited,
                    action,
                }));
                self.act(core, &link, cid, action).await;
            }
            Request::Abort { cid } if current => self.abort(core, &link, cid).await,
            Request::UnknownCompletion { cid } if current => {
                tracing::error!(
                    controller = self.name(),
                    qid = report.qid,
                    cid,
                    "NVMe controller completed a command that it was not given"
                );
                let _ = self.reset_for(core, ResetReason::ProtocolError).await;
            }
            Request::Interrupts { .. }
            | Request::Late { .. }
            | Request::Abort { .. }
            | Request::UnknownCompletion { .. } => {}
        }
    }

    fn action_for(&self, stage: u8) -> TimeoutAction {
        match (self.shared.options.action_on_timeout, stage) {
            (ActionOnTimeout::None, _) => TimeoutAction::None,
            (ActionOnTimeout::Abort, 0) => TimeoutAction::Abort,
            (ActionOnTimeout::Abort, 1) => TimeoutAction::ResetQueue,
            _ => TimeoutAction::ResetController,
        }
    }

    async fn act(
        self: &Arc<Self>,
        core: &CoreHandle,
        link: &Arc<Link>,
        cid: u16,
        action: TimeoutAction,
    ) {
        match action {
            TimeoutAction::None => {}
            TimeoutAction::Abort => self.abort(core, link, cid).await,
            TimeoutAction::ResetQueue => self.reset_queue(core, link).await,
            TimeoutAction::ResetController => {
                let _ = self.reset_for(core, ResetReason::Timeout).await;
            }
        }
    }

    /// Asks the controller to abort a command. The command's own completion reports the result.
    async fn abort(self: &Arc<Self>, core: &CoreHandle, link: &Link, cid: u16) {
        count(&self.shared.counters.aborts);
        let sqid = link.qid;
        let sqe = Abort { sqid, cid }.to_sqe(0);
        let limit = self.commands(core).hurry();
        let asked = self
            .commands(core)
            .ask_within(sqe, limit, &[], &mut [])
            .await;
        self.handle_outcome(core, asked.map(|_| ())).await;
    }

    /// Handles the result of an admin command of the recovery: resets the controller if the command
    /// did not complete.
    pub(super) async fn handle_outcome(
        self: &Arc<Self>,
        core: &CoreHandle,
        outcome: Result<(), ControlError>,
    ) {
        if let Err(ControlError::Timeout { opcode, .. }) = outcome {
            count(&self.shared.counters.admin_timeouts);
            tracing::warn!(
                controller = self.name(),
                opcode,
                "NVMe admin command was not answered"
            );
            let _ = self.reset_for(core, ResetReason::Timeout).await;
        }
    }

    async fn make_asked(self: &Arc<Self>, core: &CoreHandle, link: &Arc<Link>) {
        let guard = self.lifecycle.lock().await;
        let live = self.shared.is_live();
        if !live
            || link.phase.state() != QueueState::Waiting
            || link.deserted.load(Ordering::Acquire)
        {
            return;
        }
        let Err(error) = self.commands(core).make_queue(link).await else {
            return;
        };
        drop(guard);
        tracing::error!(controller = self.name(), qid = link.qid, %error, "NVMe queue pair not made");
        let _ = self.reset_for(core, ResetReason::AdminFailed).await;
    }

    async fn delete_asked(self: &Arc<Self>, core: &CoreHandle, link: &Arc<Link>) {
        let guard = self.lifecycle.lock().await;
        shared::quiesce(core, link).await;
        let limit = self.commands(core).hurry();
        let deleted = if self.shared.is_live() {
            self.commands(core).delete_queue(link, limit).await
        } else {
            Ok(())
        };
        drop(guard);
        if let Err(error) = &deleted {
            tracing::error!(controller = self.name(), qid = link.qid, %error, "NVMe queue pair not deleted");
            // Buffers may be released only when the controller cannot access them any more.
            let reset = self.reset_for(core, ResetReason::AdminFailed).await;
            if reset.is_err() && link.phase.state() != QueueState::Gone {
                return;
            }
        }
        link.set_phase(QueueState::Gone);
        self.shared.links.lock().remove(link.qid);
    }

    /// Deletes and recreates a queue pair, which ends its commands; its owner retries them. Resets
    /// the controller if that fails.
    async fn reset_queue(self: &Arc<Self>, core: &CoreHandle, link: &Arc<Link>) {
        let guard = self.lifecycle.lock().await;
        if !self.shared.is_live() {
            return;
        }
        count(&self.shared.counters.queue_resets);
        let outcome = self.remake(core, link).await;
        drop(guard);
        if let Err(error) = outcome {
            tracing::error!(controller = self.name(), qid = link.qid, %error, "NVMe queue pair not reset");
            let _ = self.reset_for(core, ResetReason::Timeout).await;
        }
    }

    async fn remake(&self, core: &CoreHandle, link: &Arc<Link>) -> Result<(), ControlError> {
        shared::quiesce(core, link).await;
        let commands = self.commands(core);
        commands.delete_queue(link, commands.hurry()).await?;
        self.commands(core).make_queue(link).await
    }

    /// Recreates an empty queue pair with or without interrupts. Only Create I/O Completion Queue
    /// can change that (IEN): INTMS does not apply to MSI-X, and the kernel owns the MSI-X table.
    async fn switch_asked(
        self: &Arc<Self>,
        core: &CoreHandle,
        link: &Arc<Link>,
        report: Report,
        on: bool,
    ) {
        let guard = self.lifecycle.lock().await;
        // If the queue was recreated meanwhile, its owner has begun to use it and repeats the
        // request.
        let current = link.phase.state() == QueueState::Live(report.generation);
        if !current || !self.shared.is_live() || link.deserted.load(Ordering::Acquire) {
            return;
        }
        link.interrupts.store(on, Ordering::Relaxed);
        let outcome = self.remake(core, link).await;
        drop(guard);
        tracing::debug!(
            controller = self.name(),
            qid = link.qid,
            on,
            "interrupts of an NVMe queue"
        );
        if let Err(error) = outcome {
            tracing::error!(controller = self.name(), qid = link.qid, %error, "NVMe queue pair not made again");
            let _ = self.reset_for(core, ResetReason::AdminFailed).await;
        }
    }

    /// Resets the controller, and the function if that fails. The owners of the queue pairs then
    /// retry the commands in flight.
    pub(crate) async fn reset_for(
        self: &Arc<Self>,
        core: &CoreHandle,
        reason: ResetReason,
    ) -> Result<(), ControlError> {
        let before = self.shared.counters.resets.load(Ordering::Relaxed);
        let _one = self.lifecycle.lock().await;
        let asked = reason == ResetReason::UserRequest;
        let state = self.shared.state();
        match state {
            State::Detached => return Err(ControlError::Detached),
            State::Removed => return Err(ControlError::Gone),
            State::Failed { reason } if !asked => return Err(ControlError::Failed { reason }),
            _ => {}
        }
        if !asked && before != self.shared.counters.resets.load(Ordering::Relaxed) {
            // Another task noticed the same failure and has reset the controller meanwhile.
            return Ok(());
        }
        count(&self.shared.counters.resets);
        tracing::warn!(
            controller = self.name(),
            reason = reason.name(),
            "resetting NVMe controller"
        );
        self.send_event(Event::Reset { reason });
        self.set_state(State::Resetting);
        self.shared.quiesce_all(core).await;
        self.admin.close(ControlError::Reset { opcode: 0 });
        let mut last = None;
        for attempt in 0..ATTEMPTS {
            match self.revive(core, attempt > 0).await {
                Ok(()) => {
                    self.set_state(State::Live);
                    self.request_events();
                    return Ok(());
                }
                Err(_) if is_gone(&*self.shared.function()) => {
                    self.lose_locked(core).await;
                    return Err(ControlError::Gone);
                }
                Err(error) => {
                    tracing::error!(controller = self.name(), attempt, %error, "NVMe controller not reset");
                    last = Some(error);
                }
            }
        }
        let reason = last.map_or_else(String::new, |error| crate::error::chain(&error));
        self.fail(core, reason.clone()).await;
        Err(ControlError::Failed { reason })
    }

    /// Initialises the controller and its queues again.
    async fn revive(
        self: &Arc<Self>,
        core: &CoreHandle,
        function_first: bool,
    ) -> Result<(), AttachError> {
        self.shared.quiesce_all(core).await;
        if function_first {
            count(&self.shared.counters.function_resets);
            self.shared.function().reset()?;
        }
        let properties = self.commands(core).bring_up().await?;
        self.shared.set_properties(properties);
        self.add_poller(core)?;
        // Read the namespaces before commands are sent again: they must not reach a namespace that
        // was formatted or replaced.
        self.find_namespaces(core).await?;
        for link in self.shared.all_links() {
            link.made.store(false, Ordering::Relaxed);
            if link.deserted.load(Ordering::Acquire) {
                continue;
            }
            self.commands(core).make_queue(&link).await?;
        }
        Ok(())
    }

    async fn fail(self: &Arc<Self>, core: &CoreHandle, reason: String) {
        self.set_state(State::Failed { reason });
        self.shared.quiesce_all(core).await;
        self.admin.close(ControlError::Failed {
            reason: "it could not be reset".to_owned(),
        });
        self.commands(core).stop_memory_access().await;
        self.shared.end_queues();
    }

    /// Checks periodically whether the controller is present and has no fatal error.
    pub(super) async fn watch(self: Arc<Self>, core: CoreHandle) {
        let mut unmatched = 0;
        loop {
            let _ = core.timeout(WATCH, self.stop.notified()).await;
            if self.shared.is_detached() {
                return;
            }
            if !self.shared.is_live() {
                continue;
            }
            let function = self.shared.function();
            let csts = function.read32(offset::CSTS);
            let now = self.admin.unmatched();
            if is_gone(&*function) {
                self.lose(&core).await;
            } else if Csts(csts).is_fatal() || !Csts(csts).is_ready() {
                let _ = self.reset_for(&core, ResetReason::ControllerFatal).await;
            } else if now != unmatched {
                let _ = self.reset_for(&core, ResetReason::ProtocolError).await;
            }
            unmatched = now;
        }
    }

    /// Handles the removal of the drive.
    pub(crate) async fn lose(self: &Arc<Self>, core: &CoreHandle) {
        // End the pending admin commands first, so that they do not delay the removal.
        self.admin.close(ControlError::Gone);
        let _one = self.lifecycle.lock().await;
        if !self.shared.is_detached() {
            self.lose_locked(core).await;
        }
    }

    async fn lose_locked(self: &Arc<Self>, core: &CoreHandle) {
        self.set_state(State::Removed);
        self.admin.close(ControlError::Gone);
        self.shared.quiesce_all(core).await;
        self.commands(core).stop_memory_access().await;
        self.shared.end_queues();
        // The kernel completes the removal only when no process has the function open.
        self.shared.function().release();
    }

    /// Attaches a drive that returned after a removal or a failure, if it is the same drive.
    pub(crate) async fn take_back(
        self: &Arc<Self>,
        core: &CoreHandle,
        function: Arc<dyn Function>,
    ) -> Result<(), AttachError> {
        let _one = self.lifecycle.lock().await;
        if !matches!(self.shared.state(), State::Removed | State::Failed { .. }) {
            return Err(AttachError::NotRemoved {
                name: self.name().to_owned(),
            });
        }
        let expected = self.shared.properties().info.drive.serial.clone();
        let before = self.shared.function();
        self.shared.set_function(function);
        match self.come_back(core, &expected).await {
            Ok(()) => {
                self.set_state(State::Live);
                self.request_events();
                Ok(())
            }
            Err(error) => {
                self.admin.close(ControlError::Gone);
                self.shared.quiesce_all(core).await;
                self.commands(core).stop_memory_access().await;
                self.shared.end_queues();
                self.shared.function().release();
                self.shared.set_function(before);
                Err(error)
            }
        }
    }

    async fn come_back(
        self: &Arc<Self>,
        core: &CoreHandle,
        expected: &str,
    ) -> Result<(), AttachError> {
        let properties = self.commands(core).bring_up().await?;
        if properties.info.drive.serial != expected {
            return Err(AttachError::OtherDrive {
                address: properties.info.address.clone(),
                expected: expected.to_owned(),
                found: properties.info.drive.serial.clone(),
            });
        }
        // Unflushed data may be lost: count that before the first completion.
        self.shared.counters.losses.fetch_add(1, Ordering::AcqRel);
        self.shared.set_properties(properties);
        self.add_poller(core)?;
        self.find_namespaces(core).await?;
        for link in self.shared.all_links() {
            if !link.deserted.load(Ordering::Acquire) {
                self.commands(core).make_queue(&link).await?;
            }
        }
        Ok(())
    }
}

impl Commands<'_> {
    fn hurry(self) -> Duration {
        self.timeout().min(HURRY)
    }

    /// Stops the controller's memory accesses. Retries until that succeeds.
    pub(super) async fn stop_memory_access(self) {
        loop {
            let function = self.shared.function();
            match stopped(&*function) {
                Ok(()) => return self.admin.release_memory(),
                Err(error) => {
                    tracing::error!(controller = self.name(), %error, "NVMe controller cannot be kept from memory");
                }
            }
            self.core.after(STOP_AGAIN).await;
        }
    }
}

fn is_gone(function: &dyn Function) -> bool {
    function.read32(offset::CSTS) == GONE || !function.is_present()
}

/// Stops a controller's memory accesses: disables bus mastering, or resets the function.
fn stopped(function: &dyn Function) -> Result<(), crate::function::FunctionError> {
    if function.read32(offset::CSTS) != GONE {
        let cc = Cc(function.read32(offset::CC));
        function.write32(offset::CC, cc.with_en(0).0);
    }
    let Err(error) = function.set_bus_master(false) else {
        return Ok(());
    };
    if function.reset().is_ok() {
        return Ok(());
    }
    // A removed drive accesses no memory.
    if is_gone(function) {
        Ok(())
    } else {
        Err(error)
    }
}
