//! The buffers of one core: its pools, and the commands that wait for a buffer.

use nacre_hugepages::Buf;

use crate::queues::decode::Plan;
use crate::queues::queue_pair::{QueuePair, Stage};
use crate::queues::waiting::WaitingList;
use crate::subsystems::core_handle::ReqIndex;
use crate::transport::{Pools, TransportCaps};

pub(crate) struct Buffers {
    pub pools: Pools,
    /// Largest in-capsule data of a queue that takes it into a buffer of the core, so far.
    in_capsule_bytes: usize,
    /// Bytes that transports are fetching for queue pairs that are not ending.
    fetching: usize,
    /// I/O commands that wait for a buffer.
    pub waiting: WaitingList,
    /// Admin and fabrics commands that do. They do not wait behind I/O commands.
    pub waiting_admin: WaitingList,
}

impl Buffers {
    pub fn new(pools: Pools) -> Buffers {
        Buffers {
            pools,
            in_capsule_bytes: 0,
            fetching: 0,
            waiting: WaitingList::new(),
            waiting_admin: WaitingList::new(),
        }
    }

    /// Notes the capabilities of a new connection.
    pub fn serve(&mut self, caps: &TransportCaps) {
        if !caps.keyed_sgl {
            let bytes = caps.in_capsule_bytes as usize;
            self.in_capsule_bytes = self.in_capsule_bytes.max(bytes);
        }
    }

    /// Commands that wait for a buffer.
    pub fn all_waiting(&self) -> usize {
        self.waiting.len() + self.waiting_admin.len()
    }

    /// Lets a command wait for a buffer.
    pub fn wait(&mut self, qp: &QueuePair, index: ReqIndex) {
        let is_admin = matches!(qp.requests[index].plan, Plan::Admin { .. });
        let list = if qp.takes_io() && !is_admin {
            &mut self.waiting
        } else {
            &mut self.waiting_admin
        };
        list.push(qp.name_of(index));
    }

    /// A buffer for data that a transport is to fetch. R2T data can queue behind in-capsule data
    /// on the same connection. Keep one buffer free for the latter, or both deadlock.
    pub fn to_fetch(&self, bytes: usize) -> Option<Buf> {
        let buf = self.pools.io.acquire_beside(bytes, self.in_capsule_bytes);
        match buf {
            // All others are with devices, and come back.
            None if self.fetching == 0 => self.pools.io.acquire(bytes),
            buf => buf,
        }
    }

    /// The transport begins to fetch data for a command of `qp`.
    pub fn fetch_begins(&mut self, qp: &mut QueuePair, bytes: usize) {
        debug_assert_ne!(qp.stage, Stage::Ending);
        qp.fetches.bytes += bytes;
        self.fetching += bytes;
    }

    /// The transport has fetched the data of a command, or has not and will not.
    pub fn fetch_ended(&mut self, qp: &mut QueuePair, index: ReqIndex) {
        let bytes = qp.bytes_from_host(index);
        qp.fetches.bytes -= bytes;
        self.fetching -= bytes;
    }

    /// A queue pair ends: its transport does not report the end of fetches any longer.
    pub fn abandon_fetches(&mut self, qp: &QueuePair) {
        self.fetching -= qp.fetches.bytes;
    }

    #[cfg(test)]
    pub fn is_fetching(&self) -> bool {
        self.fetching > 0
    }
}
