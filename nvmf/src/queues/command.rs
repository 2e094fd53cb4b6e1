//! [`Command`]: access to the current command, its queue pair and the core's resources.

use nacre_nvmf_wire::Sqe;
use nacre_reactor::Nanos;

use crate::queues::queue_pair::QueuePair;
use crate::queues::request::Request;
use crate::queues::resources::Resources;
use crate::subsystems::core_handle::ReqIndex;

/// The current command, with its queue pair, its index in the queue's table, and the core's
/// resources.
pub(crate) struct Command<'a> {
    pub queue: &'a mut QueuePair,
    pub index: ReqIndex,
    pub core: &'a mut Resources,
    pub now: Nanos,
}

impl Command<'_> {
    #[inline]
    pub(crate) fn request(&mut self) -> &mut Request {
        &mut self.queue.requests[self.index]
    }

    #[inline]
    pub(crate) fn sqe(&self) -> &Sqe {
        &self.queue.requests[self.index].sqe
    }

    /// Another command of the same queue pair, by its index.
    pub(crate) fn other(&mut self, index: ReqIndex) -> Command<'_> {
        self.core.command(self.queue, index, self.now)
    }
}

impl Resources {
    /// Access to a command in the queue pair's table.
    #[inline]
    pub(crate) fn command<'a>(
        &'a mut self,
        queue: &'a mut QueuePair,
        index: ReqIndex,
        now: Nanos,
    ) -> Command<'a> {
        Command {
            queue,
            index,
            core: self,
            now,
        }
    }
}
