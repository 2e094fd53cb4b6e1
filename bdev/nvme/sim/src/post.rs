//! Posts completion queue entries of the simulated controller, and raises the interrupt of their
//! queue.

use nacre_nvmf_wire::{Cqe, StatusCode};

use crate::faults::Action;
use crate::queues::Post;
use crate::state::State;

impl State {
    /// Queues the completion of a command, to be posted when its queue has room.
    pub(crate) fn answer(&mut self, sqid: u16, cid: u16, status: StatusCode, dword0: u32) {
        self.answer_by(sqid, cid, status, dword0, None);
    }

    /// Like [`State::answer`], but with an injected fault, which may also delay the completion.
    pub(crate) fn answer_by(
        &mut self,
        sqid: u16,
        cid: u16,
        status: StatusCode,
        dword0: u32,
        action: Option<Action>,
    ) {
        let Some(sq) = self.sqs.get(usize::from(sqid)).and_then(Option::as_ref) else {
            return;
        };
        let late = match action {
            Some(Action::Late(by)) => by,
            _ => std::time::Duration::ZERO,
        };
        let post = Post {
            due: self.now + late,
            sqid,
            cqid: sq.cqid,
            cid,
            status,
            dword0,
            action,
        };
        self.posts.push_back(post);
    }

    /// Posts the completions that are due and whose queues have room. True if it posted one.
    pub(crate) fn post_due(&mut self) -> bool {
        let mut worked = false;
        let mut at = 0;
        while at < self.posts.len() {
            if self.posts[at].due > self.now || !self.has_room(self.posts[at].cqid) {
                at += 1;
                continue;
            }
            if let Some(post) = self.posts.remove(at) {
                worked = true;
                let twice = post.action == Some(Action::Duplicate);
                self.post(&post);
                if twice && self.has_room(post.cqid) {
                    self.post(&post);
                }
            }
            if self.csts.is_fatal() {
                break;
            }
        }
        worked
    }

    fn has_room(&mut self, cqid: u16) -> bool {
        let Some(Some(cq)) = self.cqs.get_mut(usize::from(cqid)) else {
            // Completions of a deleted queue are dropped.
            return true;
        };
        match cq.has_room(&self.exec.iommu) {
            Ok(Ok(room)) => {
                self.exec.stats.full_completion_queues += u64::from(!room);
                room
            }
            Ok(Err(wrong)) => {
                self.exec
                    .violations
                    .note(format!("shadow doorbell in memory: {wrong}"));
                false
            }
            Err(outside) => {
                let id = cq.id;
                self.fail(format!(
                    "shadow doorbell of completion queue {id}: {outside}"
                ));
                false
            }
        }
    }

    fn post(&mut self, post: &Post) {
        let mut cqe = Cqe::new(post.cid, post.status).with_dword0(post.dword0);
        let mut sqid = post.sqid;
        let mut head = 0;
        if let Some(Some(sq)) = self.sqs.get_mut(usize::from(post.sqid)) {
            sq.give_back(post.cid);
            sq.reported_head = sq.head;
            head = sq.head;
        }
        let (mut wrong_phase, mut silent) = (false, false);
        match post.action {
            Some(Action::WrongCid(off)) => cqe.cid.set(post.cid.wrapping_add(off)),
            Some(Action::WrongSqid(off)) => sqid = sqid.wrapping_add(off),
            Some(Action::WrongHead(off)) => head = head.wrapping_add(off),
            Some(Action::WrongPhase) => wrong_phase = true,
            Some(Action::LoseInterrupt) => silent = true,
            _ => {}
        }
        cqe.sqid.set(sqid);
        cqe.sqhd.set(head);
        let Some(Some(cq)) = self.cqs.get_mut(usize::from(post.cqid)) else {
            return;
        };
        let (id, vector) = (cq.id, cq.vector);
        if let Err(outside) = cq.post(cqe, wrong_phase, &self.exec.iommu) {
            return self.fail(format!("entry of completion queue {id}: {outside}"));
        }
        self.exec.stats.completions += 1;
        if let Some(vector) = vector
            && !silent
            && let Some(signal) = self.vectors.get(usize::from(vector))
        {
            self.exec.stats.interrupts += 1;
            signal.set();
        }
    }
}
