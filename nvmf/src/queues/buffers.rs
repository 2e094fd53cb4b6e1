//! The buffers of one core: its pools, and the commands that wait for a buffer.

use nacre_hugepages::Buf;

use crate::queues::decode::Plan;
use crate::queues::queue_pair::{QueuePair, Stage};
use crate::queues::waiting::WaitingList;
use crate::subsystems::core_handle::ReqIndex;
use crate::transport::{Pools, TransportCaps};

pub(crate) struct Buffers {
    pub pools: Pools,
    /// The largest in-capsule data size of all queues that receive it in buffers of this core.
    in_capsule_bytes: usize,
    /// Bytes that transports are transferring from hosts, for queue pairs that are not ending.
    fetching: usize,
    /// I/O commands that wait for a buffer.
    pub waiting: WaitingList,
    /// Admin and fabrics commands that wait for a buffer, in a list of their own.
    pub waiting_admin: WaitingList,
}

impl Buffers {
    pub(crate) fn new(pools: Pools) -> Self {
        Self {
            pools,
            in_capsule_bytes: 0,
            fetching: 0,
            waiting: WaitingList::new(),
            waiting_admin: WaitingList::new(),
        }
    }

    /// Records the capabilities of a new connection.
    pub(crate) fn serve(&mut self, caps: &TransportCaps) {
        if !caps.keyed_sgl {
            let bytes = caps.in_capsule_bytes as usize;
            self.in_capsule_bytes = self.in_capsule_bytes.max(bytes);
        }
    }

    /// Number of commands that wait for a buffer.
    pub(crate) fn all_waiting(&self) -> usize {
        self.waiting.len() + self.waiting_admin.len()
    }

    /// Adds a command to the list of those that wait for a buffer.
    pub(crate) fn wait(&mut self, qp: &QueuePair, index: ReqIndex) {
        let is_admin = matches!(qp.requests[index].plan, Plan::Admin { .. });
        let list = if qp.takes_io() && !is_admin {
            &mut self.waiting
        } else {
            &mut self.waiting_admin
        };
        list.push(qp.name_of(index));
    }

    /// Allocates a buffer for data that a transport must fetch. R2T data can queue behind
    /// in-capsule data on the same connection. Keep one buffer free for the latter, or both
    /// deadlock.
    pub(crate) fn to_fetch(&self, bytes: usize) -> Option<Buf> {
        let buf = self.pools.io.acquire_beside(bytes, self.in_capsule_bytes);
        match buf {
            // Devices have all other buffers, and will return them.
            None if self.fetching == 0 => self.pools.io.acquire(bytes),
            buf => buf,
        }
    }

    /// Counts the start of a data transfer for a command of `qp`.
    pub(crate) fn fetch_begins(&mut self, qp: &mut QueuePair, bytes: usize) {
        debug_assert_ne!(qp.stage, Stage::Ending);
        qp.fetches.bytes += bytes;
        self.fetching += bytes;
    }

    /// Counts the end of a command's data transfer, successful or not.
    pub(crate) fn fetch_ended(&mut self, qp: &mut QueuePair, index: ReqIndex) {
        let bytes = qp.bytes_from_host(index);
        qp.fetches.bytes -= bytes;
        self.fetching -= bytes;
    }

    /// Removes the transfers of an ending queue pair, whose transport no longer reports their end.
    pub(crate) fn abandon_fetches(&mut self, qp: &QueuePair) {
        self.fetching -= qp.fetches.bytes;
    }

    #[cfg(test)]
    pub(crate) fn is_fetching(&self) -> bool {
        self.fetching > 0
    }
}
