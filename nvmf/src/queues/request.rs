//! The table of a queue's outstanding commands ([`Request`]), with an index by command identifier.

use nacre_hugepages::{Buf, MemoryView};
use nacre_nvmf_wire::{Sqe, StatusCode};
use nacre_reactor::Nanos;

use crate::queues::decode::Plan;
use crate::subsystems::core_handle::ReqIndex;

const NONE: u16 = u16::MAX;

/// The state of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Free,
    /// The command waits for a buffer, in the group's list.
    Buffer,
    /// The transport transfers the data from the host.
    Fetching,
    /// First or second half of a fused pair, complete with data, waiting for the other half.
    Fused,
    /// The device executes the command, or the command waits for room in the device.
    Executing,
    /// The command completes later, by another event: Asynchronous Event Request, Abort on another
    /// core.
    Deferred,
}

pub(crate) struct Request {
    pub sqe: Sqe,
    pub step: Step,
    pub plan: Plan,
    /// `Namespace::serial` of the namespace that the plan is for. The NSID may belong to
    /// another namespace by the time of execution, which the command must not access.
    pub namespace: u64,
    pub started: Nanos,
    /// The command's data, unless a device has it.
    pub data: Option<Buf>,
    /// Memory of the device with the data, instead of a buffer.
    pub zero_copy: Option<MemoryView>,
    /// Device I/Os of the command: index of the next to submit, total (`children`), and number in
    /// flight.
    pub next_child: u32,
    pub children: u32,
    pub inflight: u32,
    /// The first failure of a child.
    pub status: StatusCode,
    /// The lowest index of a failed child.
    pub failed_child: u32,
    /// The last namespace that a Flush of all namespaces has flushed.
    pub flushed: u32,
    /// The first command of a fused pair, if this is the second one.
    pub partner: Option<ReqIndex>,
    /// The host has sent an Abort for it.
    pub abort: bool,
    /// It is in a device's waiting list.
    pub waiting: bool,
    /// A Preempt and Abort waits for its end.
    pub fenced: bool,
    /// Distinguishes commands that used the same place in the table.
    begun: u32,
    /// The next request in the same hash bucket of command identifiers.
    chain: u16,
}

/// A table of as many requests as the queue has entries, with an index by command identifier.
pub(crate) struct Requests {
    table: Vec<Request>,
    free: Vec<ReqIndex>,
    heads: Box<[u16]>,
}

/// The reason why a command cannot be accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// The host has more commands outstanding than the queue has entries.
    QueueOverrun,
    /// A command with this identifier is outstanding.
    DuplicateId,
}

impl Requests {
    pub(crate) fn new(entries: u16) -> Self {
        let buckets = (entries as usize * 2).next_power_of_two();
        Self {
            table: (0..entries).map(|_| Request::free()).collect(),
            free: (0..entries).rev().collect(),
            heads: vec![NONE; buckets].into_boxed_slice(),
        }
    }

    /// Adds a command to the table.
    pub(crate) fn begin(&mut self, sqe: Sqe, now: Nanos) -> Result<ReqIndex, NoRoom> {
        if self.find(sqe.cid()).is_some() {
            return Err(NoRoom::DuplicateId);
        }
        let index = self.free.pop().ok_or(NoRoom::QueueOverrun)?;
        let bucket = self.bucket(sqe.cid());
        let request = &mut self.table[index as usize];
        request.sqe = sqe;
        request.begun = request.begun.wrapping_add(1);
        request.started = now;
        request.step = Step::Executing;
        request.chain = self.heads[bucket];
        self.heads[bucket] = index;
        Ok(index)
    }

    /// True if [`Requests::begin`] would accept a command with this identifier.
    #[inline]
    pub(crate) fn would_take(&self, cid: u16) -> bool {
        !self.free.is_empty() && self.find(cid).is_none()
    }

    /// Removes a completed command.
    pub(crate) fn end(&mut self, index: ReqIndex) {
        let cid = self.table[index as usize].sqe.cid();
        let bucket = self.bucket(cid);
        let next = self.table[index as usize].chain;
        if self.heads[bucket] == index {
            self.heads[bucket] = next;
        } else {
            let mut at = self.heads[bucket];
            while self.table[at as usize].chain != index {
                at = self.table[at as usize].chain;
            }
            self.table[at as usize].chain = next;
        }
        self.table[index as usize].reset();
        self.free.push(index);
    }

    pub(crate) fn find(&self, cid: u16) -> Option<ReqIndex> {
        let mut at = self.heads[self.bucket(cid)];
        while at != NONE {
            if self.table[at as usize].sqe.cid() == cid {
                return Some(at);
            }
            at = self.table[at as usize].chain;
        }
        None
    }

    /// The second command of the fused pair whose first command this is.
    pub(crate) fn second_of(&self, first: ReqIndex) -> Option<ReqIndex> {
        self.active().find(|i| self[*i].partner == Some(first))
    }

    /// Separates a fused pair. Returns the other command of it.
    pub(crate) fn unpair(&mut self, half: ReqIndex) -> Option<ReqIndex> {
        if let Some(first) = self[half].partner.take() {
            return Some(first);
        }
        let second = self.second_of(half)?;
        self[second].partner = None;
        Some(second)
    }

    /// Number of commands in the table.
    pub(crate) fn outstanding(&self) -> usize {
        self.table.len() - self.free.len()
    }

    /// The indexes of the commands that are in the table.
    pub(crate) fn active(&self) -> impl Iterator<Item = ReqIndex> + '_ {
        (0..self.table.len() as u16).filter(|i| self.table[*i as usize].step != Step::Free)
    }

    fn bucket(&self, cid: u16) -> usize {
        cid as usize & (self.heads.len() - 1)
    }
}

impl std::ops::Index<ReqIndex> for Requests {
    type Output = Request;

    fn index(&self, index: ReqIndex) -> &Request {
        &self.table[index as usize]
    }
}

impl std::ops::IndexMut<ReqIndex> for Requests {
    fn index_mut(&mut self, index: ReqIndex) -> &mut Request {
        &mut self.table[index as usize]
    }
}

impl Request {
    fn free() -> Self {
        Self {
            sqe: Sqe::zeroed(),
            step: Step::Free,
            plan: Plan::None,
            namespace: 0,
            started: Nanos::ZERO,
            data: None,
            zero_copy: None,
            next_child: 0,
            children: 0,
            inflight: 0,
            status: StatusCode::SUCCESS,
            failed_child: u32::MAX,
            flushed: 0,
            partner: None,
            abort: false,
            waiting: false,
            fenced: false,
            begun: 0,
            chain: NONE,
        }
    }

    /// The number of the command among those that used this place in the table.
    pub(crate) fn begun(&self) -> u32 {
        self.begun
    }

    fn reset(&mut self) {
        self.step = Step::Free;
        self.plan = Plan::None;
        self.namespace = 0;
        self.data = None;
        self.zero_copy = None;
        self.next_child = 0;
        self.children = 0;
        self.inflight = 0;
        self.status = StatusCode::SUCCESS;
        self.failed_child = u32::MAX;
        self.flushed = 0;
        self.partner = None;
        self.abort = false;
        self.waiting = false;
        self.fenced = false;
        self.chain = NONE;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Goal: the table finds each outstanding command by its identifier and nothing else.
        /// Method: random begins and ends against a map.
        #[test]
        fn the_table_finds_outstanding_commands(ops in proptest::collection::vec((any::<bool>(), 0u16..64), 0..400)) {
            let mut requests = Requests::new(8);
            let mut oracle: HashMap<u16, ReqIndex> = HashMap::new();
            for (begin, cid) in ops {
                // Identifiers that collide in the hash, as those of Linux hosts do not.
                let cid = cid * 16;
                if begin {
                    match requests.begin(Sqe::new(2, cid), Nanos::ZERO) {
                        Ok(index) => prop_assert!(oracle.insert(cid, index).is_none()),
                        Err(NoRoom::DuplicateId) => prop_assert!(oracle.contains_key(&cid)),
                        Err(NoRoom::QueueOverrun) => prop_assert_eq!(oracle.len(), 8),
                    }
                } else if let Some(index) = oracle.remove(&cid) {
                    requests.end(index);
                }
                prop_assert_eq!(requests.outstanding(), oracle.len());
                for cid in 0..64 {
                    prop_assert_eq!(requests.find(cid * 16), oracle.get(&(cid * 16)).copied());
                }
            }
        }
    }
}
