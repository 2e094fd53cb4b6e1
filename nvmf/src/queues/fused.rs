//! Fused operations (Base 3.4.4): pairs a Compare with the Write that follows it, and executes both
//! as one compare-and-write.

use nacre_nvmf_wire::{Fuse, Sqe, StatusCode};
use nacre_reactor::Nanos;

use crate::queues::command::Command;
use crate::queues::decode::Plan;
use crate::queues::queue_pair::{FusedFirst, QueuePair, Stage};
use crate::queues::request::Step;
use crate::queues::resources::Resources;

impl Command<'_> {
    /// Checks the FUSE field of a new command and pairs it; `valid`: it was decoded. Returns true
    /// if the command continues.
    pub(crate) fn pair(&mut self, valid: bool) -> bool {
        let (fuse, index) = (self.sqe().fuse(), self.index);
        let first = self.queue.fused.take();
        match (first, fuse) {
            (Some(FusedFirst::Waiting(first)), Fuse::Second) if valid => {
                let requests = &mut self.queue.requests;
                let (a, b) = (&requests[first], &requests[index]);
                let same = a.sqe.nsid == b.sqe.nsid
                    && a.namespace == b.namespace
                    && span(&a.plan) == span(&b.plan);
                if !same {
                    self.other(first).fail(StatusCode::INVALID_FIELD.with_dnr());
                    self.finish(StatusCode::INVALID_FIELD.with_dnr());
                    return false;
                }
                requests[index].partner = Some(first);
                true
            }
            (Some(FusedFirst::Waiting(first)), Fuse::Second) => {
                self.other(first).fail(StatusCode::ABORTED_FAILED_FUSED);
                true
            }
            (Some(FusedFirst::Failed), Fuse::Second) => {
                self.finish(StatusCode::ABORTED_FAILED_FUSED);
                false
            }
            (None, Fuse::Second) => {
                self.finish(StatusCode::ABORTED_MISSING_FUSED);
                false
            }
            (first, fuse) => {
                if let Some(FusedFirst::Waiting(first)) = first {
                    self.other(first).fail(StatusCode::ABORTED_MISSING_FUSED);
                }
                if fuse == Fuse::First {
                    let half = if valid {
                        FusedFirst::Waiting(index)
                    } else {
                        FusedFirst::Failed
                    };
                    self.queue.fused = Some(half);
                }
                true
            }
        }
    }

    /// Handles one command of a fused pair that has its data. Executes the pair when both have.
    pub(crate) fn run_fused(&mut self) {
        let (requests, index) = (&mut self.queue.requests, self.index);
        requests[index].step = Step::Fused;
        let second = match requests[index].sqe.fuse() {
            Fuse::Second => Some(index),
            _ => requests.second_of(index),
        };
        let Some(second) = second else { return };
        let Some(first) = requests[second].partner else {
            return;
        };
        if requests[first].step != Step::Fused || requests[second].step != Step::Fused {
            return;
        }
        requests[first].step = Step::Deferred;
        requests[second].step = Step::Executing;
        self.other(second).run_children();
    }
}

impl Resources {
    /// Handles a command that was refused before it got a place in the table. Fails the other
    /// command of its pair, or a preceding first command without a second one.
    #[cold]
    pub(crate) fn fused_half_refused(&mut self, qp: &mut QueuePair, sqe: &Sqe, now: Nanos) {
        if qp.is_admin() || qp.stage != Stage::Live {
            return;
        }
        let first = qp.fused.take();
        if sqe.fuse() == Fuse::First {
            qp.fused = Some(FusedFirst::Failed);
        }
        if let Some(FusedFirst::Waiting(first)) = first {
            let status = match sqe.fuse() {
                Fuse::Second => StatusCode::ABORTED_FAILED_FUSED,
                _ => StatusCode::ABORTED_MISSING_FUSED,
            };
            self.command(qp, first, now).fail(status);
        }
    }
}

fn span(plan: &Plan) -> Option<(u64, u32)> {
    match *plan {
        Plan::Single { lba, blocks, .. } => Some((lba, blocks)),
        _ => None,
    }
}
