//! The poller of a remote controller: drives its admin queue on one reactor or thread, and
//! publishes its state to other threads.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use nacre_hugepages::Pool;
use nacre_nvmf::host::{ControllerState, HostController};
use nacre_reactor::{CoreHandle, EventSet, Idle, Interest, Nanos, Poller, Work};

use crate::shared::Shared;
use crate::status::{ControllerInfo, State};

/// Interval at which a busy core polls an idle admin queue, because each poll is a system call.
const LOOK: Duration = Duration::from_millis(1);

/// Polls the admin queue of one remote controller, on a reactor or on a thread of its own.
pub struct ControllerPoller {
    shared: Arc<Shared>,
    controller: HostController,
    pool: Pool,
    sleepers: EventSet,
    /// The reactor to remove this poller from at the end.
    core: Option<CoreHandle>,
    /// Time of the next poll.
    look_at: Nanos,
    /// Time of the next attempt after a permanent refusal.
    again_at: Option<Nanos>,
    resets: u64,
    seen: Option<Seen>,
    closing: bool,
    /// Disconnected until it is enabled again.
    disabled: bool,
}

/// The values whose changes are reported.
#[derive(Clone, PartialEq, Eq)]
struct Seen {
    state: ControllerState,
    version: u64,
    resets: u64,
    losses: u64,
    away: bool,
}

impl ControllerPoller {
    /// `pool` is the memory of the core that polls it: a few buffers of 4 KiB are needed.
    pub(crate) fn new(
        shared: &Arc<Shared>,
        pool: Pool,
        core: Option<CoreHandle>,
        now: Nanos,
    ) -> std::io::Result<Self> {
        Ok(Self {
            controller: begin(shared, &pool, now),
            shared: Arc::clone(shared),
            pool,
            sleepers: EventSet::new()?,
            core,
            look_at: now,
            again_at: None,
            resets: 0,
            seen: None,
            closing: false,
            disabled: false,
        })
    }

    /// True when the controller is closed and the poller has no more work.
    pub fn is_over(&self) -> bool {
        self.closing && self.has_ended()
    }

    fn obey(&mut self, now: Nanos) {
        if self.shared.is_closing() && !self.closing {
            self.closing = true;
            self.controller.disconnect(now);
        }
        if !self.shared.is_enabled() && !self.disabled && !self.closing {
            self.disabled = true;
            self.again_at = None;
            self.controller.disconnect(now);
        } else if self.is_enabled_again() && !self.closing {
            self.disabled = false;
            self.restart(now);
        }
        if self.shared.take_reset() && !self.closing && !self.disabled {
            match self.controller.state() {
                ControllerState::Live => self.shared.link.request_reset(),
                ControllerState::Failed(_) => self.restart(now),
                // Reconnect now, without the rest of the delay.
                _ => self.controller.hurry(now),
            }
            self.resets += 1;
        }
        if self.again_at.is_some_and(|at| now >= at) && !self.closing && !self.disabled {
            self.restart(now);
        }
    }

    /// True when it was disabled, is enabled, and the controller has ended.
    fn is_enabled_again(&self) -> bool {
        self.disabled && self.shared.is_enabled() && self.has_ended()
    }

    fn has_ended(&self) -> bool {
        matches!(
            self.controller.state(),
            ControllerState::Closed | ControllerState::Failed(_)
        )
    }

    fn restart(&mut self, now: Nanos) {
        self.again_at = None;
        self.controller = begin(&self.shared, &self.pool, now);
        self.seen = None;
    }

    /// Schedules another attempt after a permanent refusal, if the time to reconnect has no limit
    /// (`loss_timeout`). A target that has just restarted may not have its configuration yet.
    fn insist(&mut self, now: Nanos) {
        let options = self.controller.options();
        let given_up = matches!(self.controller.state(), ControllerState::Failed(_));
        if given_up && options.loss_timeout.is_none() && !self.closing && !self.disabled {
            self.again_at
                .get_or_insert(now + options.reconnect_delay_max);
        }
    }

    fn report_changes(&mut self) {
        let link = &self.shared.link;
        let now = Seen {
            state: self.controller.state().clone(),
            version: link.version(),
            resets: self.resets,
            losses: link.losses(),
            away: link.is_away(),
        };
        if self.seen.as_ref() == Some(&now) {
            return;
        }
        let was_live = matches!(&self.seen, Some(seen) if seen.state == ControllerState::Live);
        let state = match &now.state {
            ControllerState::Connecting => State::Connecting,
            ControllerState::Live => State::Live,
            ControllerState::Closed | ControllerState::Failed(_)
                if self.disabled && !self.closing =>
            {
                State::Disabled
            }
            ControllerState::Closed => State::Closed,
            ControllerState::Waiting { error, .. } => State::Waiting {
                error: error.clone(),
                refused: false,
            },
            ControllerState::Failed(error) if self.again_at.is_some() => State::Waiting {
                error: error.clone(),
                refused: true,
            },
            ControllerState::Failed(error) => State::Failed(error.clone()),
        };
        let (controller, is_live) = (&self.controller, state == State::Live);
        let of_link = link.state();
        self.shared.change(|status| {
            status.connects += u64::from(is_live && !was_live);
            status.resets = self.resets;
            status.losses = now.losses;
            status.away = now.away;
            if let Some(error) = state.error() {
                status.causes = error.to_string();
            }
            match controller.paths() {
                Some(paths) => {
                    status.transport = of_link.transport.unwrap_or_else(|| paths.current());
                    status.exhausted = !is_live && paths.all_failed();
                    if status.exhausted {
                        status.causes = paths.causes();
                    }
                    status.paths = Some(paths.counts().clone());
                }
                None => status.exhausted = state.error().is_some(),
            }
            if is_live {
                status.io_queues = of_link.io_queues;
                if let Some(identify) = controller.identify() {
                    status.info = ControllerInfo::of(identify);
                }
            }
            status.state = state;
        });
        self.seen = Some(now);
    }
}

fn begin(shared: &Shared, pool: &Pool, now: Nanos) -> HostController {
    let (options, dial) = (shared.config.options.clone(), shared.connector.dialer());
    HostController::linked(options, dial, pool.clone(), Arc::clone(&shared.link), now)
}

impl Poller for ControllerPoller {
    fn name(&self) -> &str {
        "remote"
    }

    fn poll(&mut self, now: Nanos, _budget: u32) -> Work {
        if now < self.look_at && !self.shared.is_asked() {
            return Work::None;
        }
        self.obey(now);
        let did = self.controller.poll(now);
        while self.controller.take_event().is_some() {}
        self.insist(now);
        self.report_changes();
        let idle = did == 0 && self.controller.is_live();
        self.look_at = if idle { now + LOOK } else { now };
        if self.is_over()
            && let Some(core) = &self.core
            && let Some(id) = core.current_poller()
        {
            core.remove_poller(id);
        }
        match u32::try_from(did) {
            Ok(0) => Work::None,
            did => Work::Did(did.unwrap_or(u32::MAX)),
        }
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        self.look_at = now;
        if self.shared.is_asked() || self.is_enabled_again() {
            return Idle::Busy;
        }
        let idle = self.controller.arm(now);
        if let Some(fd) = self.controller.wake_fd() {
            // The new connection may reuse the descriptor number of the previous one: make sure of
            // the watch.
            let _ = self.sleepers.delete(fd);
            if let Err(error) = self.sleepers.add(fd, 0, Interest::READ) {
                tracing::error!(%error, "cannot watch a connection");
                return Idle::Busy;
            }
        }
        match self.again_at {
            Some(at) => idle.and(Idle::Until(at)),
            None => idle,
        }
    }

    fn disarm(&mut self) {
        self.look_at = Nanos::ZERO;
    }

    fn wake_fds(&self) -> std::io::Result<Vec<OwnedFd>> {
        Ok(vec![self.sleepers.wake_fd()?])
    }
}
