//! The malloc module's queue: executes each I/O in `submit`, by copying or comparing memory.

use nacre_hugepages::{CoreShared, MemoryView};
use nacre_reactor::{Idle, Nanos};

use super::{Malloc, QUEUE_DEPTH};
use crate::device::Geometry;
use crate::immediate::Immediate;
use crate::io::{Completion, Io, Op, Status, Token};
use crate::queue::{Busy, Done, Queue};

pub(super) struct Channel {
    memory: CoreShared,
    geometry: Geometry,
    done: Immediate,
}

impl Channel {
    pub(super) fn new(malloc: &Malloc) -> Self {
        Self {
            memory: malloc.memory.on_core(),
            geometry: malloc.geometry,
            done: Immediate::new(QUEUE_DEPTH as usize),
        }
    }

    fn perform(&self, io: &mut Io) -> Status {
        if io.op == Op::Flush {
            return Status::Ok;
        }
        let blocks = u64::from(io.blocks);
        if !self.geometry.holds(io.lba, blocks) {
            return Status::OutOfRange;
        }
        let memory = self.memory.memory();
        let mut at = self.offset(io.lba);
        let bytes = self.offset(blocks);
        // The memory panics on a range outside; buffers longer than the blocks would make one.
        if io.data_len() as u64 > io.op.data_len(bytes as u64) {
            return Status::Unsupported;
        }
        match io.op {
            Op::Read => {
                for buf in &mut io.data {
                    // A shared buffer must not be read into.
                    let Some(into) = buf.bytes_mut() else {
                        return Status::DeviceError;
                    };
                    memory.read(at, into);
                    at += into.len();
                }
            }
            Op::Write => {
                for buf in &io.data {
                    memory.write(at, buf);
                    at += buf.len();
                }
            }
            Op::Compare => {
                for buf in &io.data {
                    if !memory.compare(at, buf) {
                        return Status::Miscompare;
                    }
                    at += buf.len();
                }
            }
            Op::WriteZeroes => memory.zero(at, bytes),
            Op::Unmap => memory.discard(at, bytes),
            Op::Copy => {
                if !self.geometry.holds(io.source_lba, blocks) {
                    return Status::OutOfRange;
                }
                memory.copy_within(self.offset(io.source_lba), at, bytes);
            }
            Op::CompareAndWrite => return Status::Unsupported,
            // Memory that can be reached can be read.
            Op::Flush | Op::Verify => {}
        }
        Status::Ok
    }

    #[inline]
    fn end(&self, io: &mut Io, zero_copy: &mut Option<MemoryView>) -> Status {
        *zero_copy = self.view(io);
        match zero_copy {
            Some(_) => Status::Ok,
            None => self.perform(io),
        }
    }

    /// The memory that completes a read without extents.
    #[inline]
    fn view(&self, io: &Io) -> Option<MemoryView> {
        let is_read = io.op == Op::Read && io.data.is_empty() && io.blocks > 0;
        let len = self.offset(u64::from(io.blocks));
        (is_read && self.geometry.holds(io.lba, u64::from(io.blocks)))
            .then(|| self.memory.view(self.offset(io.lba), len))
    }

    fn offset(&self, blocks: u64) -> usize {
        // Inside the device, which is inside the address space.
        blocks as usize * self.geometry.block_size as usize
    }
}

impl Queue for Channel {
    fn submit(&mut self, mut io: Io) -> Result<(), (Busy, Io)> {
        if self.done.is_full() {
            return Err((Busy, io));
        }
        let mut zero_copy = None;
        let status = self.end(&mut io, &mut zero_copy);
        self.done.push(Completion {
            zero_copy,
            ..io.complete(status)
        });
        Ok(())
    }

    #[inline]
    fn run_sync(&mut self, io: &mut Io, zero_copy: &mut Option<MemoryView>) -> Option<Status> {
        Some(self.end(io, zero_copy))
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
