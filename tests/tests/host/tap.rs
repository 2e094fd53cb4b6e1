//! A test bdev: a RAM disk that records its requests and can be paused.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nacre_bdev::{Bdev, Busy, Done, Geometry, Io, Limits, Op, OpenError, Queue, Support, Token};
use nacre_hugepages::Pool;
use nacre_reactor::Nanos;
use nacre_tests::target::ram;
use parking_lot::Mutex;
use uuid::Uuid;

pub(crate) struct Tap {
    disk: Arc<dyn Bdev>,
    blocks: AtomicU64,
    hold: AtomicBool,
    log: Mutex<Vec<(Op, u64)>>,
}

impl Tap {
    pub(crate) fn new(name: &str, block_size: u32, blocks: u64) -> Arc<Self> {
        Arc::new(Self {
            disk: ram(name, block_size, blocks * u64::from(block_size)),
            blocks: AtomicU64::new(blocks),
            hold: AtomicBool::new(false),
            log: Mutex::default(),
        })
    }

    /// While paused, no request is executed.
    pub(crate) fn hold(&self, on: bool) {
        self.hold.store(on, Ordering::Relaxed);
    }

    /// Shrinks the disk, or restores its size.
    pub(crate) fn resize(&self, blocks: u64) {
        assert!(blocks <= self.disk.geometry().blocks);
        self.blocks.store(blocks, Ordering::Relaxed);
    }

    /// The requests since the last call, in order.
    pub(crate) fn take_log(&self) -> Vec<(Op, u64)> {
        std::mem::take(&mut self.log.lock())
    }
}

impl Bdev for Tap {
    fn name(&self) -> &str {
        self.disk.name()
    }

    fn product_name(&self) -> &'static str {
        "Tap"
    }

    fn uuid(&self) -> Uuid {
        self.disk.uuid()
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            blocks: self.blocks.load(Ordering::Relaxed),
            ..self.disk.geometry()
        }
    }

    fn limits(&self) -> Limits {
        Limits {
            zero_copy_blocks: 0,
            immediate: false,
            ..self.disk.limits()
        }
    }

    fn supports(&self, op: Op) -> Support {
        self.disk.supports(op)
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        let disk = Arc::clone(&self.disk).open(pool)?;
        Ok(Box::new(TapQueue {
            tap: self,
            disk,
            held: VecDeque::new(),
        }))
    }
}

struct TapQueue {
    tap: Arc<Tap>,
    disk: Box<dyn Queue>,
    held: VecDeque<Io>,
}

impl Queue for TapQueue {
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        self.tap.log.lock().push((io.op, io.lba));
        self.held.push_back(io);
        Ok(())
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        while !self.tap.hold.load(Ordering::Relaxed)
            && let Some(io) = self.held.pop_front()
        {
            if let Err((Busy, io)) = self.disk.submit(io) {
                self.held.push_front(io);
                break;
            }
        }
        self.disk.poll(now, done)
    }

    fn abort(&mut self, token: Token) -> bool {
        self.disk.abort(token)
    }

    fn inflight(&self) -> usize {
        self.held.len() + self.disk.inflight()
    }
}
