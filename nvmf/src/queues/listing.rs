//! The Get LBA Status commands of a core whose bdev has not answered yet. An answer may come from
//! any thread, and wakes the core.

use std::sync::Arc;

use nacre_bdev::listing::{ListAnswer, ListQuery};
use nacre_bdev::{Bdev, Status};
use nacre_nvmf_wire::StatusCode;
use nacre_reactor::Nanos;
use parking_lot::Mutex;

use crate::controller::write_lba_status;
use crate::queues::command::Command;
use crate::queues::decode::status_code;
use crate::queues::queue_group::QueueGroup;
use crate::queues::request::Step;
use crate::subsystems::core_handle::ReqRef;

/// Asks the bdev. The command completes in a later turn.
pub(super) fn start(command: &mut Command, bdev: &Arc<dyn Bdev>, query: ListQuery) {
    if command.core.listings.is_full() {
        let association = command.queue.association.as_ref();
        let delays = association.is_some_and(|a| a.retry_delays());
        return command.finish(status_code(Status::Retry, delays));
    }
    command.request().step = Step::Deferred;
    let request = command.queue.name_of(command.index);
    let slot = Arc::new(Mutex::new(None));
    let core = &mut command.core;
    core.listings.add(request, Arc::clone(&slot));
    let owner = core.handle.clone();
    let answer = ListAnswer::new(move |answer| {
        *slot.lock() = Some(answer);
        owner.wake();
    });
    bdev.list_allocated(query, answer);
}

impl QueueGroup {
    /// Completes commands with an answer. Returns their number.
    pub(super) fn listing_turn(&mut self, now: Nanos) -> u32 {
        let (queues, listings) = (&self.queues, &mut self.core.listings);
        // A device that never answers keeps nothing of a queue that is gone.
        let is_there = |request: &ReqRef| queues.current(request).is_some();
        listings.retain(is_there);
        let answered = listings.take_answered();
        let count = answered.len() as u32;
        for (request, answer) in answered {
            let Some(mut command) = self.deferred(&request, now) else {
                continue;
            };
            let status = match answer {
                Ok(found) => {
                    let data = command.request().data.as_mut();
                    if let Some(data) = data.and_then(|data| data.bytes_mut()) {
                        write_lba_status(&found, data);
                    }
                    StatusCode::SUCCESS
                }
                Err(status) => {
                    let association = command.queue.association.as_ref();
                    status_code(status, association.is_some_and(|a| a.retry_delays()))
                }
            };
            command.finish(status);
        }
        count
    }
}
