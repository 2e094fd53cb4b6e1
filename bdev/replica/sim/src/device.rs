//! The block device through which a simulated holder reaches a simulated disk. The volume's code
//! does its I/O on it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use nacre_bdev::reservation::Reserve;
use nacre_bdev::{
    Bdev, Busy, Done, Extents, Geometry, Io, Limits, Op, OpenError, Pending, Queue, Status,
    Support, Token,
};
use nacre_hugepages::{MemoryView, Pool};
use nacre_reactor::{Idle, Nanos};
use uuid::Uuid;

use crate::disk::{Inner, Order, SimDisk};
use crate::gate::{Ask, Outcome};

/// How long an I/O of a closed queue can still arrive; volumes are set to wait longer.
pub(crate) const LINGER: Duration = Duration::from_millis(4);

pub(crate) struct Device {
    disk: Arc<SimDisk>,
    holder: u64,
    queues: Arc<AtomicU64>,
    lacks: Arc<AtomicBool>,
}

impl Device {
    /// `lacks`: the holder has no descriptor for one more queue.
    pub(crate) fn new(
        disk: Arc<SimDisk>,
        holder: u64,
        queues: Arc<AtomicU64>,
        lacks: Arc<AtomicBool>,
    ) -> Self {
        disk.inner.lock().opened_by(holder);
        Self {
            disk,
            holder,
            queues,
            lacks,
        }
    }
}

impl Bdev for Device {
    fn name(&self) -> &str {
        &self.disk.name
    }

    fn product_name(&self) -> &'static str {
        "Simulated disk"
    }

    fn uuid(&self) -> Uuid {
        Uuid::from_u128(0x51u128 << 64 | self.disk.name.len() as u128)
    }

    /// The original geometry, also of a truncated disk.
    fn geometry(&self) -> Geometry {
        let inner = self.disk.inner.lock();
        let block = inner.media.format.block as u32;
        Geometry {
            block_size: block,
            blocks: inner.media.full(),
            physical_block_size: block,
        }
    }

    fn limits(&self) -> Limits {
        self.disk.inner.lock().traits.limits
    }

    fn supports(&self, op: Op) -> Support {
        let inner = self.disk.inner.lock();
        let native = match op {
            Op::Read | Op::Write | Op::Flush => true,
            Op::Unmap => inner.traits.unmaps,
            Op::WriteZeroes => inner.traits.writes_zeroes,
            Op::Compare | Op::CompareAndWrite | Op::Copy | Op::Verify => false,
        };
        if native { Support::Native } else { Support::No }
    }

    fn native_fua(&self) -> bool {
        self.disk.inner.lock().traits.native_fua
    }

    fn losses(&self) -> u64 {
        self.disk.inner.lock().losses()
    }

    fn present_blocks(&self) -> u64 {
        self.disk.inner.lock().media.blocks()
    }

    fn reserves(&self) -> bool {
        self.disk.inner.lock().has_gate()
    }

    fn least_blocks(&self) -> u64 {
        self.disk.inner.lock().least(self.holder)
    }

    fn forget_least(&self) -> u64 {
        let mut inner = self.disk.inner.lock();
        let least = inner.least(self.holder);
        inner.opened_by(self.holder);
        least
    }

    fn open(self: Arc<Self>, _pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        let refused = |source: std::io::Error| OpenError {
            bdev: self.disk.name.clone(),
            what: "connect".to_owned(),
            source,
        };
        if !self.disk.inner.lock().reaches(self.holder) {
            return Err(refused(std::io::ErrorKind::NotConnected.into()));
        }
        if self.lacks.load(Ordering::Relaxed) {
            // EMFILE.
            return Err(refused(std::io::Error::from_raw_os_error(24)));
        }
        Ok(Box::new(SimQueue {
            id: self.queues.fetch_add(1, Ordering::Relaxed),
            holder: self.holder,
            depth: self.limits().queue_depth as usize,
            disk: Arc::clone(&self.disk),
            requests: BTreeMap::new(),
            ready: Vec::new(),
            asked: Vec::new(),
        }))
    }
}

struct SimQueue {
    disk: Arc<SimDisk>,
    holder: u64,
    id: u64,
    depth: usize,
    /// Requests in flight, keyed by the number that the disk gave them.
    requests: BTreeMap<u64, Request>,
    /// Completed requests for which the caller's list had no room yet.
    ready: Vec<(u64, Status)>,
    /// Requests about reservations, by the number that the disk gave them.
    asked: Vec<(u64, Answer)>,
}

/// Called with the outcome of a request.
type Answer = Box<dyn FnOnce(Outcome) + Send>;

struct Request {
    pending: Pending,
    lba: u64,
    data: Extents,
}

impl SimQueue {
    /// Delivers the outcomes of requests about reservations.
    fn answer_asked(&mut self) {
        let mut arrived = Vec::new();
        {
            let mut inner = self.disk.inner.lock();
            let (now, reached) = (inner.now(), inner.reaches(self.holder));
            let Some(gate) = inner.gate() else { return };
            for index in (0..self.asked.len()).rev() {
                if let Some(outcome) = gate.arrived(self.asked[index].0, now) {
                    let outcome = if reached { outcome } else { Err(Status::Gone) };
                    arrived.push((self.asked.swap_remove(index).1, outcome));
                }
            }
        }
        for (answer, outcome) in arrived {
            answer(outcome);
        }
    }

    fn order(&self, inner: &mut Inner, io: &Io) -> Order {
        let mut contents = Vec::new();
        if io.op == Op::Write {
            let mut block = io.lba;
            let size = inner.media.format.block;
            for bytes in io.data.iter().flat_map(|buf| buf.chunks_exact(size)) {
                inner.media.intern(block, bytes, &mut contents);
                block += 1;
            }
            assert_eq!(block, io.lba + u64::from(io.blocks), "buffers of a write");
        }
        Order {
            queue: self.id,
            holder: self.holder,
            op: io.op,
            flags: io.flags,
            lba: io.lba,
            blocks: u64::from(io.blocks),
            contents,
        }
    }
}

/// Copies the data of a read into its buffers.
fn fill(inner: &Inner, lba: u64, data: &mut Extents, found: &[u64]) {
    let (mut block, mut contents) = (lba, found);
    for buf in data {
        if found.is_empty() {
            break;
        }
        let bytes = buf
            .bytes_mut()
            .expect("a read's buffer is the reader's alone");
        for bytes in bytes.chunks_exact_mut(inner.media.format.block) {
            let cells = inner.media.format.cells(block).len();
            if contents.len() < cells {
                break;
            }
            let (own, rest) = contents.split_at(cells);
            inner.media.bytes(block, own, bytes);
            contents = rest;
            block += 1;
        }
    }
}

impl Queue for SimQueue {
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        if self.requests.len() >= self.depth {
            return Err((Busy, io));
        }
        let mut inner = self.disk.inner.lock();
        let order = self.order(&mut inner, &io);
        let number = inner.submit(order);
        let request = Request {
            pending: Pending::new(io.token),
            lba: io.lba,
            data: io.data,
        };
        self.requests.insert(number, request);
        Ok(())
    }

    fn run_sync(&mut self, io: &mut Io, _zero_copy: &mut Option<MemoryView>) -> Option<Status> {
        let mut inner = self.disk.inner.lock();
        let order = self.order(&mut inner, io);
        let answer = inner.run_sync(order)?;
        fill(&inner, io.lba, &mut io.data, &answer.contents);
        Some(answer.status)
    }

    fn poll(&mut self, _now: Nanos, done: &mut Done) -> usize {
        self.answer_asked();
        let mut inner = self.disk.inner.lock();
        for answer in inner.answers(self.id) {
            let Some(request) = self.requests.get_mut(&answer.number) else {
                continue;
            };
            fill(&inner, request.lba, &mut request.data, &answer.contents);
            self.ready.push((answer.number, answer.status));
        }
        let count = self.ready.len().min(done.room());
        for (number, status) in self.ready.drain(..count) {
            if let Some(request) = self.requests.remove(&number) {
                done.push(request.pending.complete(status, request.data));
            }
        }
        count
    }

    fn abort(&mut self, token: Token) -> bool {
        let mut requests = self.requests.iter();
        let found = requests.find(|(_, request)| request.pending.token() == token);
        let number = found.map(|(number, _)| *number);
        number.is_some_and(|number| self.disk.inner.lock().abort(number))
    }

    fn reserve(&mut self, request: Reserve) -> Result<(), Reserve> {
        let mut inner = self.disk.inner.lock();
        let now = inner.now();
        let Some(gate) = inner.gate() else {
            return Err(request);
        };
        let ask = Ask {
            holder: self.holder,
            request: request.ask,
        };
        self.asked.push((gate.ask(ask, now), request.answer));
        Ok(())
    }

    fn inflight(&self) -> usize {
        self.requests.len()
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        /// A due time can move forward: the disk may disappear, or be claimed.
        const LOOK: Duration = Duration::from_millis(2);
        if self.requests.is_empty() && self.asked.is_empty() {
            return Idle::Quiet;
        }
        let due = self.disk.inner.lock().next_of(self.id);
        // Without a due time there are completions to collect, or only an outcome to wait for.
        let ready = if self.requests.is_empty() {
            now + LOOK
        } else {
            now
        };
        Idle::Until(due.unwrap_or(ready).min(now + LOOK))
    }
}

impl Drop for SimQueue {
    fn drop(&mut self) {
        let mut inner = self.disk.inner.lock();
        inner.close(self.id, LINGER);
        if let Some(gate) = inner.gate() {
            self.asked
                .iter()
                .for_each(|(number, _)| gate.forget(*number));
        }
        drop(inner);
        for (_, request) in std::mem::take(&mut self.requests) {
            request.pending.abandon();
        }
    }
}
