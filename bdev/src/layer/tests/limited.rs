//! A test module with the fewest features that the layer supports.
//!
//! It supports only flush, and reads and writes of a few blocks. It has a volatile cache, completes
//! out of order and with random delays, is busy at random, and records its requests.

use std::sync::Arc;

use nacre_hugepages::Pool;
use nacre_random::Random;
use nacre_reactor::Nanos;
use parking_lot::Mutex;
use uuid::Uuid;

use crate::device::{Bdev, Geometry, Limits, OpenError, Support};
use crate::io::{Flags, Io, Op, Status, Token};
use crate::pending::Pending;
use crate::queue::{Busy, Done, Queue};

/// A device for the layer's tests, with few native operations and injected faults.
#[derive(Debug, Clone)]
pub(super) struct LimitedDevice {
    pub limits: Limits,
    pub native: Vec<Op>,
    pub native_fua: bool,
    pub seed: u64,
    pub disk: Arc<Mutex<Disk>>,
}

/// The state shared by all queues of the device.
#[derive(Debug)]
pub(super) struct Disk {
    pub cache: Vec<u8>,
    pub media: Vec<u8>,
    pub requests: Vec<(Op, u64, u32)>,
    /// The next I/O to this block fails.
    pub bad_block: Option<u64>,
    /// Accepts I/O but completes none.
    pub stuck: bool,
    /// Fails this operation, although it reports support for it.
    pub refuses: Option<Op>,
}

pub(super) const BLOCKS: u64 = 1024;
pub(super) const BLOCK: usize = 512;

impl LimitedDevice {
    pub(super) fn new(seed: u64) -> Self {
        let limits = Limits {
            max_blocks: 3,
            optimal_boundary_blocks: 8,
            volatile_cache: true,
            ..Limits::unlimited(4)
        };
        let disk = Disk {
            cache: vec![0; BLOCKS as usize * BLOCK],
            media: vec![0; BLOCKS as usize * BLOCK],
            requests: Vec::new(),
            bad_block: None,
            stuck: false,
            refuses: None,
        };
        let native = vec![Op::Read, Op::Write, Op::Flush];
        Self {
            limits,
            native,
            native_fua: false,
            seed,
            disk: Arc::new(Mutex::new(disk)),
        }
    }

    /// The requests since the last call.
    pub(super) fn take_requests(&self) -> Vec<(Op, u64, u32)> {
        std::mem::take(&mut self.disk.lock().requests)
    }
}

impl Bdev for LimitedDevice {
    fn name(&self) -> &str {
        "limited"
    }

    fn product_name(&self) -> &'static str {
        "LimitedDevice disk"
    }

    fn uuid(&self) -> Uuid {
        Uuid::from_u128(7)
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: BLOCK as u32,
            blocks: BLOCKS,
            physical_block_size: BLOCK as u32,
        }
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn supports(&self, op: Op) -> Support {
        if self.native.contains(&op) {
            Support::Native
        } else {
            Support::No
        }
    }

    fn native_fua(&self) -> bool {
        self.native_fua
    }

    fn open(self: Arc<Self>, _pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        let random = Random::new(self.seed);
        Ok(Box::new(Channel {
            device: self,
            taken: Vec::new(),
            aborted: Vec::new(),
            random,
        }))
    }
}

struct Channel {
    device: Arc<LimitedDevice>,
    taken: Vec<(Pending, Io)>,
    aborted: Vec<(Pending, Io)>,
    random: Random,
}

impl Channel {
    fn perform(&self, io: &mut Io) -> Status {
        let mut disk = self.device.disk.lock();
        let disk = &mut *disk;
        disk.requests.push((io.op, io.lba, io.blocks));
        if io.op == Op::Flush {
            disk.media.copy_from_slice(&disk.cache);
            return Status::Ok;
        }
        if self.device.supports(io.op) == Support::No || disk.refuses == Some(io.op) {
            return Status::Unsupported;
        }
        let geometry = self.device.geometry();
        if !geometry.holds(io.lba, u64::from(io.blocks)) {
            return Status::OutOfRange;
        }
        let blocks = io.lba..io.lba + u64::from(io.blocks);
        if disk.bad_block.is_some_and(|bad| blocks.contains(&bad)) {
            disk.bad_block = None;
            return Status::medium_error(io.op);
        }
        let limits = &self.device.limits;
        // Operations without data have no boundaries.
        let (most, boundary) = match io.op {
            Op::Verify => (limits.max_verify_blocks, 0),
            _ => (limits.max_blocks, limits.optimal_boundary_blocks.into()),
        };
        assert!(io.blocks <= most, "larger than it takes");
        assert!(
            boundary == 0 || io.blocks == 0 || io.lba / boundary == (blocks.end - 1) / boundary,
            "crosses its boundary"
        );
        let mut at = io.lba as usize * BLOCK;
        for buf in &mut io.data {
            let range = at..at + buf.len();
            at = range.end;
            match io.op {
                Op::Read => {
                    let into = buf.bytes_mut().expect("a read owns its buffer");
                    into.copy_from_slice(&disk.cache[range]);
                }
                Op::Write => disk.cache[range].copy_from_slice(buf),
                Op::Compare if disk.cache[range.clone()] != **buf => return Status::Miscompare,
                _ => {}
            }
        }
        if self.device.native_fua && io.flags.contains(Flags::FUA) {
            disk.media.copy_from_slice(&disk.cache);
        }
        Status::Ok
    }
}

impl Queue for Channel {
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        let full = self.taken.len() >= self.device.limits.queue_depth as usize;
        if full || (!self.taken.is_empty() && self.random.below(4) == 0) {
            return Err((Busy, io));
        }
        self.taken.push((Pending::new(io.token), io));
        Ok(())
    }

    fn poll(&mut self, _now: Nanos, done: &mut Done) -> usize {
        let before = done.len();
        while done.has_room()
            && let Some((pending, io)) = self.aborted.pop()
        {
            done.push(pending.complete(Status::Aborted, io.data));
        }
        while done.has_room() && !self.taken.is_empty() && !self.device.disk.lock().stuck {
            if self.random.below(3) == 0 {
                break;
            }
            let at = self.random.below(self.taken.len() as u64) as usize;
            let (pending, mut io) = self.taken.swap_remove(at);
            let status = self.perform(&mut io);
            done.push(pending.complete(status, io.data));
        }
        done.len() - before
    }

    fn abort(&mut self, token: Token) -> bool {
        let at = self
            .taken
            .iter()
            .position(|(pending, _)| pending.token() == token);
        self.aborted.extend(at.map(|at| self.taken.swap_remove(at)));
        at.is_some()
    }

    fn inflight(&self) -> usize {
        self.taken.len() + self.aborted.len()
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        for (pending, _) in self.taken.drain(..).chain(self.aborted.drain(..)) {
            let _: Token = pending.abandon();
        }
    }
}
