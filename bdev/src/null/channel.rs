//! The null module's queue: each I/O completes in `submit`.

use std::sync::Arc;

use nacre_hugepages::MemoryView;
use nacre_reactor::{Idle, Nanos};

use super::{Null, QUEUE_DEPTH, Reads};
use crate::immediate::Immediate;
use crate::io::{Io, Op, Status, Token};
use crate::queue::{Busy, Done, Queue};
use crate::size::Size;

pub(super) struct Channel {
    size: Arc<Size>,
    reads: Reads,
    done: Immediate,
}

impl Channel {
    pub(super) fn new(null: &Null) -> Self {
        Self {
            size: Arc::clone(&null.size),
            reads: null.config.reads,
            done: Immediate::new(QUEUE_DEPTH as usize),
        }
    }

    fn perform(&self, io: &mut Io) -> Status {
        let total = self.size.blocks();
        let inside = io
            .lba
            .checked_add(u64::from(io.blocks))
            .is_some_and(|end| end <= total);
        match io.op {
            Op::Flush => Status::Ok,
            Op::Compare | Op::CompareAndWrite | Op::Copy => Status::Unsupported,
            _ if !inside => Status::OutOfRange,
            Op::Read if self.reads == Reads::Zeroes => {
                for buf in &mut io.data {
                    // A shared buffer must not be read into.
                    let Some(bytes) = buf.bytes_mut() else {
                        return Status::DeviceError;
                    };
                    bytes.fill(0);
                }
                Status::Ok
            }
            Op::Read | Op::Write | Op::Unmap | Op::WriteZeroes | Op::Verify => Status::Ok,
        }
    }
}

impl Queue for Channel {
    fn submit(&mut self, mut io: Io) -> Result<(), (Busy, Io)> {
        if self.done.is_full() {
            return Err((Busy, io));
        }
        let status = self.perform(&mut io);
        self.done.push(io.complete(status));
        Ok(())
    }

    fn run_sync(&mut self, io: &mut Io, _zero_copy: &mut Option<MemoryView>) -> Option<Status> {
        Some(self.perform(io))
    }

    fn poll(&mut self, _now: Nanos, done: &mut Done) -> usize {
        self.done.hand_over(done)
    }

    /// Never: each I/O has ended in `submit`.
    fn abort(&mut self, _token: Token) -> bool {
        false
    }

    fn inflight(&self) -> usize {
        self.done.len()
    }

    fn arm(&mut self, _now: Nanos) -> Idle {
        self.done.arm()
    }
}
