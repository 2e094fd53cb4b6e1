//! Authentication Send and Authentication Receive of a queue (Base 6.1, 6.2), and the refusal of
//! other commands before the queue is authenticated.
//!
//! ```text
//!   Send ────▶ ControllerEnd ──▶ job ──▶ helper thread
//!   Receive ─▶ held until ◀── GroupMessage::Computed ◀──┘
//! ```
//!
//! A Send completes successfully even if its message is wrong: the host gets the failure with the
//! next Receive. A queue that needs authentication becomes `Live` when the transaction succeeds. A
//! later transaction on a live queue runs at the same time as its I/O. Its failure ends the queue;
//! its timeout ends only the transaction.

use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf_wire::fabrics::Authentication as Fields;
use nacre_nvmf_wire::opcode::fabrics as fctype;
use nacre_nvmf_wire::{Sqe, StatusCode};
use nacre_reactor::Nanos;

use crate::auth::{
    Answer, ChannelPolicy, Concatenation, ControllerEnd, Names, Progress, Reason, Received,
    SystemRandom,
};
use crate::queues::command::Command;
use crate::queues::decode::{self, Plan, STRUCTURE_MOST};
use crate::queues::queue_auth::QueueAuth;
use crate::queues::queue_pair::{QueuePair, Stage};
use crate::queues::request::Step;
use crate::queues::resources::Resources;
use crate::subsystems::association::{Association, Teardown};
use crate::subsystems::authentication::{AuthFailure, of_peer, origin};
use crate::subsystems::config::IoLimits;
use crate::subsystems::core_handle::GroupMessage;
use crate::subsystems::nvmf_target::Target;
use crate::tls::{Psk, SecureChannel};
use crate::transport::{CloseWhy, TlsPolicy, TransportType};

/// SPSP0 and SPSP1 of in-band authentication.
const PROTOCOL: (u8, u8) = (1, 1);
/// Most bytes of data of a Send or Receive; Linux hosts use buffers of 4096 bytes.
const MOST: u32 = 4096;
/// Time for a host to close its connection after a failure.
const LEAVE_TIME: Duration = Duration::from_millis(100);
/// Longest wait for each message of a host, unless its keep-alive timeout is shorter.
const PATIENCE: Duration = Duration::from_secs(120);
/// Attempts of the helper thread, one per millisecond, to send a result to a core whose message
/// list is full.
const ATTEMPTS: u32 = 10_000;

/// True for the two commands of authentication.
pub(super) fn is_authentication(sqe: &Sqe) -> bool {
    let types = [fctype::AUTHENTICATION_SEND, fctype::AUTHENTICATION_RECEIVE];
    sqe.is_fabrics() && types.contains(&sqe.fctype())
}

/// The plan of a new Authentication Send or Receive.
pub(super) fn plan(sqe: &Sqe, limits: &IoLimits) -> Result<Plan, StatusCode> {
    let bytes = data_bytes(sqe, limits)?;
    Ok(Plan::Admin { bytes })
}

fn data_bytes(sqe: &Sqe, limits: &IoLimits) -> Result<u32, StatusCode> {
    let fields = Fields::parse(sqe);
    let invalid = Err(StatusCode::INVALID_FIELD.with_dnr());
    let protocol = (fields.spsp0, fields.spsp1);
    if fields.secp != Fields::SECP_NVME || protocol != PROTOCOL || fields.length == 0 {
        return invalid;
    }
    if sqe.fctype() == fctype::AUTHENTICATION_SEND {
        if fields.length > MOST {
            return invalid;
        }
        decode::check_sgl(sqe, (fields.length, STRUCTURE_MOST), true, limits)?;
        return Ok(fields.length);
    }
    decode::check_sgl(sqe, (fields.length, u32::MAX), false, limits)?;
    Ok(fields.length.min(MOST))
}

/// Executes a Send or Receive that has its buffer and data.
pub(super) fn run(command: &mut Command) {
    if command.sqe().fctype() == fctype::AUTHENTICATION_SEND {
        send(command);
    } else {
        receive(command);
    }
}

fn send(command: &mut Command) {
    let now = command.now;
    let length = Fields::parse(command.sqe()).length as usize;
    let data = command.request().data.take();
    let (core, qp) = (&mut *command.core, &mut *command.queue);
    let auth = core.authentication_of(qp);
    if auth.waiting.is_some() {
        return command.finish(StatusCode::COMMAND_SEQUENCE_ERROR.with_dnr());
    }
    if auth.end.as_ref().is_none_or(ControllerEnd::is_completed) {
        core.begin_transaction(qp, now);
    }
    let bytes = data.as_deref().unwrap_or(&[]);
    if let Some(end) = transaction(qp) {
        end.send(&bytes[..bytes.len().min(length)], now);
    }
    core.start_job(qp);
    command.finish(StatusCode::SUCCESS);
    command.core.authentication_moved(command.queue, now);
}

fn receive(command: &mut Command) {
    let now = command.now;
    let room = Fields::parse(command.sqe()).length.min(MOST) as usize;
    let (qp, index) = (&mut *command.queue, command.index);
    let sequence_error = StatusCode::COMMAND_SEQUENCE_ERROR.with_dnr();
    let Some(QueueAuth {
        end: Some(end),
        waiting,
        report_at,
        ..
    }) = qp.admission.auth.as_deref_mut()
    else {
        return command.finish(sequence_error);
    };
    if waiting.is_some_and(|other| other != index) {
        return command.finish(sequence_error);
    }
    let must_wait = end.progress() == Progress::Failure1 && now < *report_at;
    let received = if must_wait {
        Received::Wait
    } else {
        end.receive(room, now)
    };
    *waiting = None;
    match received {
        Received::Message(bytes) => {
            let data = &mut command.request().data;
            if let Some(buf) = data {
                buf.truncate(bytes.len());
                if let Some(into) = buf.bytes_mut() {
                    into.copy_from_slice(&bytes);
                }
            }
            command.finish(StatusCode::SUCCESS);
        }
        Received::Wait => {
            *waiting = Some(index);
            command.request().step = Step::Deferred;
        }
        Received::TooShort => {
            command.finish(StatusCode::INVALID_FIELD.with_dnr());
            command.core.authentication_moved(command.queue, now);
            return command.core.end_unauthenticated(command.queue);
        }
        Received::Unexpected => command.finish(sequence_error),
    }
    command.core.authentication_moved(command.queue, now);
}

fn transaction(qp: &mut QueuePair) -> Option<&mut ControllerEnd> {
    qp.admission.auth.as_mut()?.end.as_mut()
}

/// The time to wait for each message of a host. A host that is not authenticated can only shorten
/// it with its keep-alive timeout.
fn patience(association: &Association) -> Duration {
    match association.keep_alive() {
        Duration::ZERO => PATIENCE,
        keep_alive => keep_alive.min(PATIENCE),
    }
}

impl Resources {
    fn authentication_of<'a>(&mut self, qp: &'a mut QueuePair) -> &'a mut QueueAuth {
        let state = &qp.admission.auth_state;
        qp.admission
            .auth
            .get_or_insert_with(|| Box::new(QueueAuth::new(Arc::clone(state))))
    }

    /// Starts a transaction with the host's current keys, which apply until its end.
    fn begin_transaction(&mut self, qp: &mut QueuePair, now: Nanos) {
        let channel = self.ports.secure_channel_of(qp);
        let (Some(auth), Some(association), Some(subsystem)) =
            (&mut qp.admission.auth, &qp.association, &qp.subsystem)
        else {
            return;
        };
        let names = Names {
            host: association.hostnqn.clone(),
            subsystem: association.subnqn.clone(),
        };
        auth.transaction += 1;
        let end = ControllerEnd::new(
            names,
            subsystem.keys_of(&association.hostnqn),
            self.target.authentication.offer(),
            Box::new(SystemRandom),
            patience(association),
            now,
        );
        let must_concat = subsystem.host_must_concat(&association.hostnqn);
        let policy = channel_policy(
            &self.target,
            qp.qid,
            association,
            must_concat,
            channel.as_deref(),
        );
        auth.end = Some(end.with_channel(policy));
    }

    /// Stores the PSK that the transaction generated, for the TLS handshakes of this host.
    fn keep_generated(&self, qp: &mut QueuePair, now: Nanos) {
        let Some(end) = transaction(qp) else { return };
        let (generated, keys) = (end.take_generated(), end.used_keys().cloned());
        let (Some(generated), Some(association), Some(subsystem)) =
            (generated, &qp.association, &qp.subsystem)
        else {
            return;
        };
        let names = Names {
            host: association.hostnqn.clone(),
            subsystem: association.subnqn.clone(),
        };
        let psk = Arc::new(Psk::generated(&generated));
        let channel = self.ports.secure_channel_of(qp);
        let replaced = channel.as_ref().map(|channel| &channel.psk);
        let kept = &self.target.authentication.generated;
        kept.add(&names, &psk, replaced, now);
        // They may have ended since the transaction began.
        let in_force = subsystem.keys_of(&names.host);
        match keys.filter(|keys| in_force.iter().any(|one| Arc::ptr_eq(one, keys))) {
            Some(keys) => kept.note_keys(&psk, keys),
            None => kept.remove(&psk),
        }
        if let Some(before) = association.set_generated(psk)
            && channel.is_some()
        {
            kept.remove(&before);
        }
    }

    fn start_job(&mut self, qp: &mut QueuePair) {
        let (id, owner) = (qp.id, origin(&qp.ends.peer));
        let Some(auth) = &mut qp.admission.auth else {
            return;
        };
        let Some(end) = &mut auth.end else { return };
        let Some(job) = end.take_job() else { return };
        let (group, transaction) = (self.handle.clone(), auth.transaction);
        let computed = move || {
            let mut message = GroupMessage::Computed {
                queue: id,
                transaction,
                answer: Box::new(job.run()),
            };
            for _ in 0..ATTEMPTS {
                match group.send(message) {
                    Ok(()) => return,
                    Err(back) => message = back,
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            tracing::warn!("the answer to an authentication is lost: its core takes no messages");
        };
        let helper = self.target.authentication.helper();
        if helper.submit(&owner, computed).is_err() {
            end.abandon(Reason::Overloaded);
        }
    }

    /// Handles a change of the transaction's state: success, failure, or a message for the host.
    fn authentication_moved(&mut self, qp: &mut QueuePair, now: Nanos) {
        let Some(auth) = &mut qp.admission.auth else {
            return;
        };
        let Some(end) = &mut auth.end else { return };
        auth.state.store(end.progress(), end.agreed());
        let (is_completed, is_over) = (end.is_completed(), end.is_over());
        if let Some(reason) = end.take_failure() {
            let delay = self.authentication_failed(qp, reason, now);
            if let Some(auth) = &mut qp.admission.auth {
                auth.report_at = now + delay;
            }
        }
        if is_completed {
            self.keep_generated(qp, now);
            return self.authenticated(qp);
        }
        if is_over && let Some(auth) = &mut qp.admission.auth {
            auth.close_at.get_or_insert(now + LEAVE_TIME);
        }
    }

    fn authenticated(&mut self, qp: &mut QueuePair) {
        let Some(agreed) = transaction(qp).and_then(|end| end.agreed()) else {
            return;
        };
        let Some(association) = &qp.association else {
            return;
        };
        if let Some(auth) = &mut qp.admission.auth {
            let end = auth.end.take();
            auth.state
                .set_keys(end.and_then(|end| end.used_keys().cloned()));
        }
        let host = &association.hostnqn;
        let authentication = &self.target.authentication;
        authentication.note_success(host, &qp.ends.peer);
        authentication.note_access(&association.subnqn, host, &qp.ends.peer);
        let (hash, group) = (agreed.hash, agreed.group);
        let (qid, mutual) = (qp.qid, agreed.mutual);
        tracing::debug!(%host, qid, %hash, %group, mutual, "host authenticated");
        association.touch();
        if qp.stage == Stage::Authenticating {
            qp.stage = Stage::Live;
            qp.admission.unproven = None;
            qp.admission.auth_state.set_pending(false);
            if qid == 0 {
                association.set_authenticated();
            }
            qp.refresh_view();
            self.view_changed(qp);
        }
    }

    /// Counts and logs a failure. Returns the delay before its report to the host.
    fn authentication_failed(&mut self, qp: &QueuePair, reason: Reason, now: Nanos) -> Duration {
        let Some(association) = &qp.association else {
            return Duration::ZERO;
        };
        let (host, peer, qid) = (&association.hostnqn, &qp.ends.peer, qp.qid);
        let authentication = &self.target.authentication;
        let delay = authentication.note_failure(host, peer, &reason, now);
        let subsystem = &association.subnqn;
        let fact = format!("authentication of {host} at {subsystem}: {reason}");
        if let Some(left_out) = self.refusals.admit((of_peer(peer), fact), now) {
            let times = left_out + 1;
            tracing::warn!(%peer, %subsystem, %host, qid, times, "authentication failed: {reason}");
            authentication.report(AuthFailure {
                subsystem: subsystem.clone(),
                host: host.clone(),
                peer: peer.clone(),
                qid,
                reason,
                times,
            });
        }
        delay
    }

    /// The periodic work of a transaction: time limits, and delayed failures.
    pub(super) fn authentication_upkeep(&mut self, qp: &mut QueuePair, now: Nanos) {
        let Some(auth) = &mut qp.admission.auth else {
            return;
        };
        if auth.close_at.is_some_and(|at| now >= at) {
            return self.end_unauthenticated(qp);
        }
        let Some(end) = &mut auth.end else {
            return self.check_silence(qp, now);
        };
        if end.check_time(now) {
            self.authentication_moved(qp, now);
            if qp.stage == Stage::Authenticating {
                return self.end_unauthenticated(qp);
            }
            // The queue is authenticated already: drop only the new transaction.
            if let Some(auth) = &mut qp.admission.auth {
                (auth.end, auth.close_at) = (None, None);
                if let Some(index) = auth.waiting.take() {
                    let status = StatusCode::COMMAND_SEQUENCE_ERROR.with_dnr();
                    self.command(qp, index, now).finish(status);
                }
            }
            return;
        }
        let is_due = end.progress() == Progress::Failure1 && now >= auth.report_at;
        if let Some(index) = auth.waiting.filter(|_| is_due) {
            receive(&mut self.command(qp, index, now));
        }
    }

    /// Ends a queue whose host has not started to authenticate in time.
    fn check_silence(&mut self, qp: &mut QueuePair, now: Nanos) {
        let Some(association) = &qp.association else {
            return;
        };
        let patience = patience(association);
        if qp.stage == Stage::Authenticating && now.since(qp.opening.since) >= patience {
            self.authentication_failed(qp, Reason::TimedOut(patience), now);
            self.end_unauthenticated(qp);
        }
    }

    fn end_unauthenticated(&mut self, qp: &mut QueuePair) {
        if let Some(association) = qp.association.as_ref().filter(|_| qp.qid == 0) {
            association.tear_down(Teardown::NotAuthenticated);
        }
        self.close(qp, CloseWhy::Drained);
    }
}

/// The secure channel concatenation that a queue supports. A queue without TLS generates a PSK for
/// TLS connections, which its listener must accept.
fn channel_policy(
    target: &Target,
    qid: u16,
    association: &Association,
    must_concat: bool,
    channel: Option<&SecureChannel>,
) -> ChannelPolicy {
    if qid != 0 {
        return ChannelPolicy::default();
    }
    let has_tls = association.transport != TransportType::Rdma;
    let options = target.listener_options(association.listener);
    ChannelPolicy {
        possible: match channel {
            None if has_tls && options.tls() == TlsPolicy::Allow => Concatenation::New,
            Some(channel) if channel.identity.is_generated => Concatenation::Replace,
            _ => Concatenation::None,
        },
        required: channel.is_none() && must_concat,
    }
}

/// Handles a result of the helper thread for a queue pair. Drops a result of an earlier
/// transaction.
pub(super) fn computed(
    core: &mut Resources,
    qp: &mut QueuePair,
    transaction: u64,
    answer: Answer,
    now: Nanos,
) {
    let Some(auth) = &mut qp.admission.auth else {
        return;
    };
    if auth.transaction != transaction {
        return;
    }
    let Some(end) = &mut auth.end else { return };
    end.answered(answer, now);
    let waiting = auth.waiting;
    core.authentication_moved(qp, now);
    if let Some(request) = waiting {
        receive(&mut core.command(qp, request, now));
    }
}
