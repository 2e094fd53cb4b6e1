//! Messages to a core: Abort commands and Preempt and Abort from other cores, results of the helper
//! thread, and wake-ups by management.

use std::sync::Arc;

use nacre_nvmf_wire::{Cqe, StatusCode};
use nacre_reactor::Nanos;

use crate::auth::Answer;
use crate::queues::authentication;
use crate::queues::command::Command;
use crate::queues::queue_group::QueueGroup;
use crate::queues::queue_pair::Stage;
use crate::queues::request::Step;
use crate::queues::reservation;
use crate::queues::resources::Abort;
use crate::subsystems::core_handle::{AbortReply, Fence, GroupMessage, QueueId, ReqIndex, ReqRef};

impl QueueGroup {
    pub(super) fn take_messages(&mut self, now: Nanos) -> u32 {
        let mut did = 0;
        if self.core.handle.take_attention() {
            did += 1;
            let core = &mut self.core;
            core.ports
                .open(&core.target, core.handle.core, &core.sleepers);
            self.upkeep(now);
            for fence in self.core.handle.take_fences() {
                self.take_fence(fence, now);
            }
        }
        // A message that is put back below waits for the next turn.
        for _ in 0..self.core.handle.messages() {
            let Some(message) = self.core.handle.take_message() else {
                break;
            };
            did += 1;
            match message {
                GroupMessage::Abort { queue, cid, reply } => {
                    let aborted = self.abort_command(queue, cid, now);
                    self.send_abort_reply(reply, aborted);
                }
                GroupMessage::Aborted { reply, aborted }
                    if reply.group.core == self.core.handle.core =>
                {
                    self.abort_answered(&reply, aborted, now)
                }
                GroupMessage::Aborted { reply, aborted } => self.send_abort_reply(reply, aborted),
                GroupMessage::Computed {
                    queue,
                    transaction,
                    answer,
                } => self.computed(queue, transaction, *answer, now),
            }
        }
        did
    }

    /// Sends the reply to an abort. If the other core's list is full, stores it and retries in a
    /// later turn, because the Abort command waits for it.
    fn send_abort_reply(&mut self, reply: AbortReply, aborted: bool) {
        let group = reply.group.clone();
        let message = GroupMessage::Aborted { reply, aborted };
        if let Err(message) = group.send(message)
            && self.core.handle.send(message).is_err()
        {
            tracing::warn!(
                core = self.core.handle.core,
                "an answer to Abort is lost: the message lists of two cores are full"
            );
        }
    }

    /// A deferred command of this core, if it still waits.
    pub(super) fn deferred(&mut self, name: &ReqRef, now: Nanos) -> Option<Command<'_>> {
        if self.queues.current(name)?.step != Step::Deferred {
            return None;
        }
        let qp = self.queues.get_mut(name.queue)?;
        Some(self.core.command(qp, name.request, now))
    }

    // Abort.

    /// Sends each new Abort command to the core of the command to abort.
    #[cold]
    pub(super) fn start_aborts(&mut self, now: Nanos) {
        while let Some(Abort { admin, sqid, cid }) = self.core.aborts.pop_front() {
            let reply = AbortReply {
                group: self.core.handle.clone(),
                request: admin,
            };
            let qp = self.queues.present(admin.queue);
            let association = qp.association.as_ref().expect("admin queue");
            let Some(info) = association.queue(sqid) else {
                self.abort_answered(&reply, false, now);
                continue;
            };
            if info.group.core == self.core.handle.core {
                let aborted = self.abort_command(info.id, cid, now);
                self.abort_answered(&reply, aborted, now);
                continue;
            }
            let message = GroupMessage::Abort {
                queue: info.id,
                cid,
                reply: reply.clone(),
            };
            if info.group.send(message).is_err() {
                self.abort_answered(&reply, false, now);
            }
        }
    }

    fn abort_answered(&mut self, reply: &AbortReply, aborted: bool, now: Nanos) {
        let Some(mut command) = self.deferred(&reply.request, now) else {
            return;
        };
        // Dword 0 bit 0: the command was not aborted (Base 5.1.1).
        let cqe = Cqe::success(command.sqe().cid()).with_dword0(u32::from(!aborted));
        if let Some(controller) = &mut command.queue.controller {
            controller.abort_finished();
        }
        command.complete(cqe);
    }

    /// Aborts a command of a queue of this core. Returns true if it completes with Command Abort
    /// Requested.
    fn abort_command(&mut self, queue: QueueId, cid: u16, now: Nanos) -> bool {
        let Some(qp) = self.queues.find(queue) else {
            return false;
        };
        if qp.stage != Stage::Live {
            return false;
        }
        let Some(index) = qp.requests.find(cid) else {
            return false;
        };
        self.core.command(qp, index, now).abort()
    }

    /// Handles a result of the helper thread for the authentication of a queue of this group.
    fn computed(&mut self, queue: QueueId, transaction: u64, answer: Answer, now: Nanos) {
        let Some(qp) = self.queues.find(queue) else {
            return;
        };
        if qp.stage == Stage::Ending {
            return;
        }
        authentication::computed(&mut self.core, qp, transaction, answer, now);
        self.after_access(queue.index, now);
    }

    // Preempt and Abort.

    /// Aborts the commands of this core that a Preempt and Abort applies to.
    fn take_fence(&mut self, fence: Arc<Fence>, now: Nanos) {
        let mut requests = Vec::new();
        for qp in self.queues.iter_mut().filter(|qp| fence.is_about(qp)) {
            let active: Vec<ReqIndex> = qp.requests.active().collect();
            for index in active {
                let mut command = self.core.command(qp, index, now);
                if reservation::preempt(&mut command, fence.nsid) {
                    requests.push(qp.name_of(index));
                }
            }
        }
        self.core.reserving.drain(fence, requests);
    }
}

impl Command<'_> {
    /// Aborts the command. Returns true if it completes with Command Abort Requested.
    fn abort(&mut self) -> bool {
        let index = self.index;
        let request = self.request();
        match request.step {
            Step::Buffer => {
                self.queue
                    .fetches
                    .waiting
                    .retain(|waiting| *waiting != index);
                self.finish(StatusCode::ABORT_REQUESTED);
                true
            }
            Step::Fetching => {
                request.abort = true;
                true
            }
            Step::Executing | Step::Fused if request.inflight == 0 => {
                self.finish(StatusCode::ABORT_REQUESTED);
                true
            }
            Step::Executing => {
                let aborted = self.core.devices.abort_children(self.queue, index);
                self.request().abort |= aborted;
                aborted
            }
            // Includes the first command of a fused pair in execution.
            Step::Free | Step::Fused | Step::Deferred => false,
        }
    }
}
