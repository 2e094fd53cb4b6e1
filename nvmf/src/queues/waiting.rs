//! References to commands that wait: for a buffer in their core's lists, for room in a device's.

use std::collections::VecDeque;

use crate::queues::queue_pair::{QueuePair, Stage};
use crate::queues::request::{Request, Step};
use crate::subsystems::core_handle::ReqRef;

/// A request that was named, if it is still there and its queue takes and answers commands.
pub(super) fn current<'a>(
    queues: &'a [Option<Box<QueuePair>>],
    name: &ReqRef,
) -> Option<&'a Request> {
    let qp = queues.get(name.queue as usize)?.as_ref()?;
    if qp.generation != name.generation || qp.stage == Stage::Ending {
        return None;
    }
    let request = &qp.requests[name.request];
    (request.step != Step::Free && request.begun() == name.begun).then_some(request)
}

pub(super) fn waits_for_buffer(queues: &[Option<Box<QueuePair>>], name: &ReqRef) -> bool {
    current(queues, name).is_some_and(|request| request.step == Step::Buffer)
}

/// Before a waiting list grows, it drops entries that no longer wait: commands that were aborted,
/// or whose queue has gone. So it is as long as the number of waiting commands, however often a
/// host gives up and comes again.
pub(super) fn make_room(list: &mut VecDeque<ReqRef>, waits: impl Fn(&ReqRef) -> bool) {
    if list.len() < list.capacity() {
        return;
    }
    list.retain(waits);
    // Not again for a while.
    list.reserve(list.len().max(16));
}
