//! Moves a live controller from the fallback transport back to the preferred one.
//!
//! ```text
//! probe due ─▶ Dialling ─▶ Connecting ─▶ Connected: queues and admin commands drain ─▶ taken over
//!                 └────────────┴───────────┴─▶ probe failed: the fallback stays in use
//! ```
//!
//! The probe connects an admin queue of a second controller. So it also fails in a network that
//! carries handshakes but no data, and at a target that refuses this host on this transport.

use std::time::Duration;

use nacre_nvmf_wire::Cqe;
use nacre_nvmf_wire::fabrics::ConnectResponse;
use nacre_reactor::Nanos;

use super::connecting::{dial_admin, step_after_connect};
use super::{ControllerState, EVENT, HostController, OWN};
use crate::host::error::HostError;
use crate::host::options::ControllerId;
use crate::host::paths::Paths;
use crate::host::queue::CommandQueue;
use crate::host::step::HostStep;
use crate::transport::TransportType;

/// Interval at which a sleeping core polls the probe.
pub(super) const LOOK: Duration = Duration::from_millis(1);
/// Longest time to wait for the commands in flight before the move, unless half the keep-alive
/// timeout is shorter.
const DRAIN: Duration = Duration::from_secs(5);

/// The probe: an admin queue over the preferred transport.
pub(super) struct Probe {
    queue: CommandQueue,
    kind: TransportType,
    since: Nanos,
    stage: MoveStage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MoveStage {
    Dialling,
    Connecting,
    /// Connected; waits until the other transport has no command in flight.
    Connected {
        response: ConnectResponse,
        since: Nanos,
    },
}

impl HostController {
    /// Starts a probe when one is due, drives it, and moves to the preferred transport if it
    /// succeeds.
    pub(super) fn seek_better(&mut self, now: Nanos, did: &mut usize) {
        if !self.is_live() || self.step.is_shutting_down() {
            return;
        }
        // A static controller has one association at a time, so no probe can connect to it.
        if matches!(self.options.controller, ControllerId::Static(_)) {
            return;
        }
        if self.better.is_none() {
            let due = self
                .paths
                .as_mut()
                .is_some_and(|paths| paths.take_probe(now));
            if !due {
                return;
            }
            *did += 1;
            if let Err(error) = self.probe(now) {
                return self.stay_on_fallback(&error, now);
            }
        }
        let Some(mut better) = self.better.take() else {
            return;
        };
        match self.drive_better(&mut better, now) {
            Ok(false) => self.better = Some(better),
            Ok(true) => self.take_over(better, now),
            Err(error) => self.stay_on_fallback(&error, now),
        }
    }

    fn probe(&mut self, now: Nanos) -> Result<(), HostError> {
        let Some(kind) = self.paths.as_ref().map(|paths| paths.options().preferred) else {
            return Ok(());
        };
        self.better = Some(Probe {
            queue: dial_admin(self.dial.as_mut(), Some(kind))?,
            kind,
            since: now,
            stage: MoveStage::Dialling,
        });
        Ok(())
    }

    /// Drives the probe. Returns true when the move can happen now.
    fn drive_better(&mut self, better: &mut Probe, now: Nanos) -> Result<bool, HostError> {
        let mut answer: Option<Cqe> = None;
        better.queue.poll(now, |one| answer = Some(one.cqe));
        if let Some(why) = better.queue.closed() {
            return Err(HostError::Lost(why.clone()));
        }
        let limit = self.options.connect_timeout;
        match (better.stage, answer) {
            (MoveStage::Dialling, _) if better.queue.is_ready() => {
                let asked = self.options.controller.asked();
                let command = HostStep::Connect.command(&self.options, &self.pool, (asked, 0));
                if let Some((sqe, write, read)) = command {
                    better.queue.submit(sqe, write, read, OWN, now);
                    better.stage = MoveStage::Connecting;
                }
            }
            (MoveStage::Connecting, Some(cqe)) => {
                let response = admitted(&cqe)?;
                let since = now;
                better.stage = MoveStage::Connected { response, since };
                self.link.set_moving(true);
            }
            (MoveStage::Dialling, _) if now.since(better.since) > limit => {
                let step = HostStep::Dialling.name();
                return Err(HostError::TimedOut { step, limit });
            }
            (MoveStage::Connecting, _) if now.since(better.since) > limit => {
                let step = HostStep::Connect.name();
                return Err(HostError::TimedOut { step, limit });
            }
            (MoveStage::Connected { since, .. }, _) => {
                if self.is_drained(since) {
                    return Ok(true);
                }
                // No Keep Alive is sent to the probe's controller meanwhile.
                let limit = match self.options.keep_alive / 2 {
                    Duration::ZERO => DRAIN,
                    half => DRAIN.min(half),
                };
                if now.since(since) > limit {
                    return Err(HostError::NotDrained { limit });
                }
            }
            (MoveStage::Dialling | MoveStage::Connecting, _) => {}
        }
        Ok(false)
    }

    /// True when no command is in flight that would have to be sent again, and the target has
    /// proved that it did not restart.
    fn is_drained(&self, since: Nanos) -> bool {
        let admin = |queue: &CommandQueue| queue.oldest_of(|token| token < EVENT || token == OWN);
        let answered =
            self.options.keep_alive.is_zero() || self.keep_alive.is_answered_since(since);
        answered
            && self.link.connected() == 0
            && self.step == HostStep::Idle
            && self.queue.as_ref().and_then(admin).is_none()
    }

    /// True if the association over the fallback has not completed a Keep Alive after the probe's
    /// Connect. Such a completion proves that the target did not restart before the probe, so it
    /// has lost no data.
    pub(super) fn wants_answer(&self) -> bool {
        match self.better.as_ref().map(|better| better.stage) {
            Some(MoveStage::Connected { since, .. }) => !self.keep_alive.is_answered_since(since),
            _ => false,
        }
    }

    fn stay_on_fallback(&mut self, error: &HostError, now: Nanos) {
        if self.link.is_moving() {
            // The I/O queues have closed their connections, and connect again.
            self.link.count_loss();
        }
        self.link.set_moving(false);
        if let Some(paths) = &mut self.paths {
            paths.probe_failed(&error.to_string(), now);
        }
    }

    /// Replaces the association over the fallback by that of the probe.
    fn take_over(&mut self, better: Probe, now: Nanos) {
        let MoveStage::Connected { response, .. } = better.stage else {
            return;
        };
        let unbroken = !self.options.keep_alive.is_zero();
        if unbroken {
            self.link.set_up(false);
        }
        self.drop_connection(&HostError::Reset);
        self.in_transit = unbroken;
        self.paths.as_mut().map(Paths::returning);
        self.given(response.cntlid);
        self.link
            .change(|state| state.transport = Some(better.kind));
        self.queue = Some(better.queue);
        self.state = ControllerState::Connecting;
        self.started = now;
        // The new association needs its own authentication.
        match step_after_connect(self.queue.as_mut(), &self.options, response.auth) {
            Ok(step) => self.enter(step, now),
            Err(error) => self.lost(error, now),
        }
    }
}

/// Parses the probe's Connect response.
fn admitted(cqe: &Cqe) -> Result<ConnectResponse, HostError> {
    match cqe.status() {
        status if status.is_success() => Ok(ConnectResponse::from_cqe(cqe)),
        status => Err(HostStep::Connect.refused(status)),
    }
}
