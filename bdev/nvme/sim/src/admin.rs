//! Admin commands of the simulated controller (Base 5): queues, features, log pages, events,
//! aborts.

use nacre_nvmf_wire::commands::admin::Abort;
use nacre_nvmf_wire::opcode::admin;
use nacre_nvmf_wire::{Sqe, StatusCode};

use crate::faults::Action;
use crate::queues::{Cq, ShadowDoorbell, Sq};
use crate::state::{Command, State};

pub(crate) type Answer = (StatusCode, u32);

impl State {
    /// Executes an admin command. Returns `None` if it completes later.
    pub(crate) fn admin(&mut self, sqe: &Sqe) -> Option<Answer> {
        let plain = |status| Some((status, 0));
        match sqe.opcode {
            admin::CREATE_IO_CQ => {
                let status = self.create_cq(sqe);
                plain(self.record_violation(sqe, status))
            }
            admin::CREATE_IO_SQ => {
                let status = self.create_sq(sqe);
                plain(self.record_violation(sqe, status))
            }
            admin::DELETE_IO_SQ => {
                let status = self.delete_sq(sqe);
                plain(self.record_violation(sqe, status))
            }
            admin::DELETE_IO_CQ => {
                let status = self.delete_cq(sqe);
                plain(self.record_violation(sqe, status))
            }
            admin::DOORBELL_BUFFER_CONFIG if self.exec.config.shadow_doorbells => {
                let status = self.configure_doorbells(sqe);
                plain(self.record_violation(sqe, status))
            }
            admin::FIRMWARE_IMAGE_DOWNLOAD | admin::FIRMWARE_COMMIT => {
                plain(self.exec.update_firmware(sqe))
            }
            admin::IDENTIFY => plain(self.exec.identify(sqe)),
            admin::GET_LOG_PAGE => plain(self.get_log_page(sqe)),
            admin::SET_FEATURES => Some(self.set_features(sqe)),
            admin::GET_FEATURES => Some(self.exec.get_features(sqe)),
            admin::ABORT => Some(self.abort(sqe)),
            admin::ASYNC_EVENT_REQUEST => {
                if self.async_requests.len() >= usize::from(self.exec.config.limits.async_events) {
                    let status = StatusCode::ASYNC_EVENT_REQUEST_LIMIT_EXCEEDED;
                    return plain(self.record_violation(sqe, Err(status)));
                }
                self.async_requests.push(sqe.cid());
                None
            }
            _ => plain(StatusCode::INVALID_OPCODE.with_dnr()),
        }
    }

    /// Records a refused command as a violation. Returns the command's status, with Do Not Retry.
    fn record_violation(&mut self, sqe: &Sqe, outcome: Result<(), StatusCode>) -> StatusCode {
        match outcome {
            Ok(()) => StatusCode::SUCCESS,
            Err(status) => {
                self.exec.violations.note(format!("{status}: {sqe:?}"));
                status.with_dnr()
            }
        }
    }

    /// The parameters of a queue to be created: its identifier, number of entries and address.
    fn new_queue(
        &self,
        sqe: &Sqe,
        is_free: bool,
        granted: u32,
    ) -> Result<(u16, u16, u64), StatusCode> {
        let (qid, entries) = (sqe.cdw10.get() as u16, (sqe.cdw10.get() >> 16) + 1);
        let prp1 = u64::from_le_bytes(std::array::from_fn(|at| sqe.dptr[at]));
        if qid == 0 || u32::from(qid) > granted || !is_free {
            return Err(StatusCode::INVALID_QUEUE_IDENTIFIER);
        }
        if entries < 2 || entries > self.exec.config.queue_entries || entries > 0xffff {
            return Err(StatusCode::INVALID_QUEUE_SIZE);
        }
        // CAP.CQR requires physically contiguous queues.
        if sqe.cdw11.get() & 1 == 0 || sqe.dptr[8..] != [0; 8] {
            return Err(StatusCode::INVALID_FIELD);
        }
        if prp1 == 0 || !prp1.is_multiple_of(self.page()) {
            return Err(StatusCode::PRP_OFFSET_INVALID);
        }
        Ok((qid, entries as u16, prp1))
    }

    fn create_cq(&mut self, sqe: &Sqe) -> Result<(), StatusCode> {
        let granted = self
            .exec
            .features
            .queues
            .map_or(0, |queues| queues.completion);
        let place = usize::from(sqe.cdw10.get() as u16);
        let free = self.cqs.get(place).is_some_and(Option::is_none);
        let (qid, entries, base) = self.new_queue(sqe, free, granted)?;
        let (interrupts, vector) = (sqe.cdw11.get() & 2 != 0, (sqe.cdw11.get() >> 16) as u16);
        if vector >= self.exec.config.vectors.max(1) {
            return Err(StatusCode::INVALID_INTERRUPT_VECTOR);
        }
        let vector = interrupts.then_some(vector);
        let mut cq = Cq::new(qid, base, entries, vector);
        cq.shadow = self.shadow(place, true);
        self.cqs[place] = Some(cq);
        Ok(())
    }

    fn create_sq(&mut self, sqe: &Sqe) -> Result<(), StatusCode> {
        let granted = self
            .exec
            .features
            .queues
            .map_or(0, |queues| queues.submission);
        let place = usize::from(sqe.cdw10.get() as u16);
        let free = self.sqs.get(place).is_some_and(Option::is_none);
        let (qid, entries, base) = self.new_queue(sqe, free, granted)?;
        let cqid = (sqe.cdw11.get() >> 16) as u16;
        let known = |cqid| matches!(self.cqs.get(usize::from(cqid)), Some(Some(_)));
        if cqid == 0 || !known(cqid) {
            return Err(StatusCode::COMPLETION_QUEUE_INVALID);
        }
        let mut sq = Sq::new(qid, base, entries, cqid);
        sq.shadow = self.shadow(place, false);
        self.sqs[place] = Some(sq);
        Ok(())
    }

    fn delete_sq(&mut self, sqe: &Sqe) -> Result<(), StatusCode> {
        let qid = sqe.cdw10.get() as u16;
        let place = usize::from(qid);
        if qid == 0 || !matches!(self.sqs.get(place), Some(Some(_))) {
            return Err(StatusCode::INVALID_QUEUE_IDENTIFIER);
        }
        // Commands that the controller has not fetched are aborted too, like those in flight.
        if self.exec.config.deletion_completes {
            while let Some(Some(sq)) = self.sqs.get_mut(place) {
                if sq.is_empty() {
                    break;
                }
                let Ok(left) = sq.fetch(&self.exec.iommu) else {
                    break;
                };
                sq.take(left.cid());
                self.answer(qid, left.cid(), StatusCode::ABORTED_SQ_DELETION, 0);
            }
        }
        let mut taken = self.take(|command| command.sqid == qid);
        taken.sort();
        for command in taken.into_iter().rev() {
            if !self.exec.config.deletion_completes {
                continue;
            }
            if let Some(first) = command.first {
                self.answer(qid, first.cid(), StatusCode::ABORTED_SQ_DELETION, 0);
            }
            let cid = command.sqe.cid();
            self.answer(qid, cid, StatusCode::ABORTED_SQ_DELETION, 0);
        }
        // Pending completions are posted first. Delayed ones are posted now or dropped.
        let keep = self.exec.config.deletion_completes;
        let now = self.now;
        self.posts
            .retain(|post| post.sqid != qid || post.due <= now || keep);
        for post in self.posts.iter_mut().filter(|post| post.sqid == qid) {
            post.due = now;
        }
        self.post_due();
        self.posts.retain(|post| post.sqid != qid);
        self.sqs[place] = None;
        Ok(())
    }

    fn delete_cq(&mut self, sqe: &Sqe) -> Result<(), StatusCode> {
        let qid = sqe.cdw10.get() as u16;
        let place = usize::from(qid);
        if qid == 0 || !matches!(self.cqs.get(place), Some(Some(_))) {
            return Err(StatusCode::INVALID_QUEUE_IDENTIFIER);
        }
        if self.sqs.iter().flatten().any(|sq| sq.cqid == qid) {
            return Err(StatusCode::INVALID_QUEUE_DELETION);
        }
        self.cqs[place] = None;
        Ok(())
    }

    /// Configures shadow doorbells for existing I/O queues and those created later.
    fn configure_doorbells(&mut self, sqe: &Sqe) -> Result<(), StatusCode> {
        let prp = |from: usize| u64::from_le_bytes(std::array::from_fn(|at| sqe.dptr[from + at]));
        let (values, events) = (prp(0), prp(8));
        let page = self.page();
        let right = |prp: u64| prp != 0 && prp.is_multiple_of(page);
        if !right(values) || !right(events) {
            return Err(StatusCode::INVALID_FIELD);
        }
        self.exec.features.doorbells = Some((values, events));
        for place in 1..self.sqs.len() {
            let (tail, head) = (self.shadow(place, false), self.shadow(place, true));
            if let Some(sq) = &mut self.sqs[place] {
                sq.shadow = tail;
            }
            if let Some(cq) = &mut self.cqs[place] {
                cq.shadow = head;
            }
        }
        Ok(())
    }

    /// The address of a queue's shadow doorbell, if configured.
    fn shadow(&self, qid: usize, is_head: bool) -> Option<ShadowDoorbell> {
        let (values, events) = self.exec.features.doorbells?;
        let stride = 4 << self.exec.config.doorbell_stride;
        let at = (2 * qid as u64 + u64::from(is_head)) * stride;
        Some(ShadowDoorbell {
            value: values + at,
            event: events + at,
        })
    }

    fn abort(&mut self, sqe: &Sqe) -> Answer {
        let Abort { sqid, cid } = Abort::parse(sqe);
        let not_aborted = (StatusCode::SUCCESS, 1);
        if self.faults.aborts_fail {
            return not_aborted;
        }
        let is_it = |command: &Command| {
            let first = command.first.is_some_and(|first| first.cid() == cid);
            let deaf = matches!(command.action, Some(Action::Never { deaf: true, .. }));
            command.sqid == sqid && (command.sqe.cid() == cid || first) && !deaf
        };
        let Some(command) = self.take(is_it).pop() else {
            return not_aborted;
        };
        for half in command.first.iter().chain([&command.sqe]) {
            let status = if half.cid() == cid {
                StatusCode::ABORT_REQUESTED
            } else {
                StatusCode::ABORTED_FAILED_FUSED
            };
            self.answer(sqid, half.cid(), status, 0);
        }
        (StatusCode::SUCCESS, 0)
    }

    /// Removes commands in flight.
    fn take(&mut self, which: impl Fn(&Command) -> bool) -> Vec<Command> {
        let mut taken = Vec::new();
        let mut rest = std::mem::take(&mut self.waiting).into_vec();
        for list in [&mut rest, &mut self.stuck] {
            let mut at = 0;
            while at < list.len() {
                if which(&list[at]) {
                    taken.push(list.swap_remove(at))
                } else {
                    at += 1
                }
            }
        }
        self.waiting = rest.into();
        taken
    }
}
