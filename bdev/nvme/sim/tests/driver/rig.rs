//! Set-up for the tests: a simulated drive and the driver on a [`TestCore`], in virtual time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Bdev, Completion, Done, Io, Op, Queue, Status, Token};
use nacre_bdev_nvme::{
    AttachError, Controller, DriveOptions, Event, Function, NvmeBdev, Observer, State,
};
use nacre_bdev_nvme_sim::{Config, Drive, Iommu, Ticker};
use nacre_hugepages::{Arena, ArenaOptions, Buf, ClassSpec, HugepagePolicy, Pool};
use nacre_reactor::TestCore;
use parking_lot::Mutex;

/// Every expected event occurs within this virtual time.
const PATIENCE: Duration = Duration::from_secs(600);
/// Step of virtual time while waiting for I/O.
const STEP: Duration = Duration::from_millis(5);

const CLASSES: [ClassSpec; 3] = [
    ClassSpec {
        size: 4096,
        count: 512,
    },
    ClassSpec {
        size: 64 << 10,
        count: 24,
    },
    ClassSpec {
        size: 1 << 20,
        count: 4,
    },
];

/// All events of the driver.
#[derive(Default)]
pub(crate) struct Recorder(Mutex<Vec<Event>>);

impl Observer for Recorder {
    fn event(&self, event: Event) {
        self.0.lock().push(event);
    }
}

impl Recorder {
    /// Events since the last call.
    pub(crate) fn take(&self) -> Vec<Event> {
        std::mem::take(&mut self.0.lock())
    }
}

/// Memory that is registered with a drive, and buffers on it.
pub(crate) struct Memory {
    pub pool: Pool,
    _arena: Arena,
}

impl Memory {
    pub(crate) fn new(classes: &[ClassSpec], slot: usize, iommu: &Arc<Iommu>) -> Self {
        let arena = Arena::allocate(ArenaOptions {
            hugepages: HugepagePolicy::Off,
            ..ArenaOptions::new(Pool::bytes_for(classes) as u64)
        })
        .expect("memory for buffers");
        arena.register(slot, iommu.clone()).expect("a new slot");
        Self {
            pool: Pool::on_arena(&arena, classes).expect("just as much"),
            _arena: arena,
        }
    }
}

pub(crate) struct Rig {
    pub core: TestCore,
    pub drive: Drive,
    pub memory: Memory,
    pub events: Arc<Recorder>,
    done: Done,
    next: Token,
    pub ended: HashMap<Token, Completion>,
}

impl Rig {
    pub(crate) fn new(config: Config) -> Self {
        let core = TestCore::new();
        // Time 0 means that no poll has happened yet.
        core.clock().advance(Duration::from_secs(1));
        let memory = Memory::new(&CLASSES, config.slot, &config.iommu);
        let drive = Drive::new(config);
        core.add_poller(Box::new(Ticker(drive.clone()))).unwrap();
        Self {
            core,
            drive,
            memory,
            events: Arc::default(),
            done: Done::with_capacity(64),
            next: 0x8000_0000_0000_0001,
            ended: HashMap::new(),
        }
    }

    pub(crate) fn try_attach(
        &mut self,
        options: DriveOptions,
    ) -> Result<Arc<Controller>, AttachError> {
        let function: Arc<dyn Function> = self.drive.plug();
        let events: Arc<dyn Observer> = self.events.clone();
        let core = self.core.core().clone();
        let attach = async move { Controller::attach(&core, function, options, events).await };
        self.core.block_on(attach)
    }

    pub(crate) fn attach(&mut self) -> Arc<Controller> {
        self.attach_with(DriveOptions::new("nvme0"))
    }

    pub(crate) fn attach_with(&mut self, options: DriveOptions) -> Arc<Controller> {
        let controller = self.try_attach(options).expect("the drive is attached");
        assert_eq!(controller.status().state, State::Live);
        controller
    }

    /// Attaches; returns the only namespace, and a queue to it.
    pub(crate) fn one(
        &mut self,
        options: DriveOptions,
    ) -> (Arc<Controller>, Arc<NvmeBdev>, Box<dyn Queue>) {
        let controller = self.attach_with(options);
        let bdev = controller.namespaces().remove(0);
        let queue = self.open(&bdev);
        (controller, bdev, queue)
    }

    pub(crate) fn open(&mut self, bdev: &Arc<NvmeBdev>) -> Box<dyn Queue> {
        let queue = Arc::clone(bdev).open(&self.memory.pool);
        queue.expect("a queue is opened")
    }

    pub(crate) fn detach(&mut self, controller: &Arc<Controller>) {
        let controller = Arc::clone(controller);
        self.core.block_on(async move { controller.detach().await });
    }

    pub(crate) fn io(&mut self, op: Op, lba: u64, blocks: u32) -> Io {
        self.next += 2;
        Io::new(self.next, op, lba, blocks)
    }

    /// A write of `blocks` blocks of 512 bytes, filled with one value.
    pub(crate) fn write(&mut self, lba: u64, blocks: u32, value: u8) -> Io {
        let buf = self.buf(blocks as usize * 512, value);
        self.io(Op::Write, lba, blocks).with(buf)
    }

    pub(crate) fn read(&mut self, lba: u64, blocks: u32) -> Io {
        let buf = self.buf(blocks as usize * 512, 0xa5);
        self.io(Op::Read, lba, blocks).with(buf)
    }

    pub(crate) fn buf(&self, len: usize, value: u8) -> Buf {
        let mut buf = self.memory.pool.acquire(len).expect("a buffer");
        buf.bytes_mut().expect("a new one").fill(value);
        buf
    }

    pub(crate) fn submit(&mut self, queue: &mut dyn Queue, io: Io) -> Token {
        let token = io.token;
        assert!(queue.submit(io).is_ok(), "the queue is full");
        token
    }

    /// Runs one turn of all parts. Returns true if an I/O completed.
    pub(crate) fn turn(&mut self, queue: &mut dyn Queue) -> bool {
        self.core.turn();
        let now = self.core.now();
        let collected = queue.poll(now, &mut self.done);
        assert_eq!(collected, self.done.len());
        for completion in self.done.drain() {
            let token = completion.token;
            let before = self.ended.insert(token, completion);
            assert!(before.is_none(), "{token:#x} completed twice");
        }
        self.core.turn();
        collected > 0
    }

    /// Advances time while polling.
    pub(crate) fn pass(&mut self, queue: &mut dyn Queue, time: Duration) {
        let end = self.core.clock().now() + time;
        while self.core.clock().now() < end {
            if !self.turn(queue) {
                self.core.advance(STEP);
            }
        }
        self.turn(queue);
    }

    /// Runs until the condition is true.
    pub(crate) fn until(&mut self, queue: &mut dyn Queue, mut what: impl FnMut(&Self) -> bool) {
        let end = self.core.clock().now() + PATIENCE;
        while !what(self) {
            assert!(self.core.clock().now() < end, "it does not come to pass");
            if !self.turn(queue) {
                self.core.advance(STEP);
            }
        }
    }

    pub(crate) fn wait(&mut self, queue: &mut dyn Queue, token: Token) -> Completion {
        self.until(queue, |rig| rig.ended.contains_key(&token));
        self.ended.remove(&token).expect("just seen")
    }

    pub(crate) fn run(&mut self, queue: &mut dyn Queue, io: Io) -> Completion {
        let token = self.submit(queue, io);
        self.wait(queue, token)
    }

    pub(crate) fn status(&mut self, queue: &mut dyn Queue, io: Io) -> Status {
        self.run(queue, io).status
    }

    /// Waits for all I/O in flight.
    pub(crate) fn run_until_idle(&mut self, queue: &mut dyn Queue) -> Vec<Status> {
        let end = self.core.clock().now() + PATIENCE;
        while queue.inflight() > 0 {
            assert!(
                self.core.clock().now() < end,
                "{} I/Os do not complete",
                queue.inflight()
            );
            if !self.turn(queue) {
                self.core.advance(STEP);
            }
        }
        let ended = self.ended.drain();
        ended.map(|(_, completion)| completion.status).collect()
    }

    /// Reads through the driver; returns the first byte of each block.
    pub(crate) fn values(&mut self, queue: &mut dyn Queue, lba: u64, blocks: u32) -> Vec<u8> {
        let io = self.read(lba, blocks);
        let completion = self.run(queue, io);
        assert_eq!(completion.status, Status::Ok);
        let bytes = &completion.data[0];
        bytes.chunks(512).map(|block| block[0]).collect()
    }

    /// Checks that no rule was broken, and releases everything.
    #[track_caller]
    pub(crate) fn end(&mut self, controller: &Arc<Controller>, queue: Box<dyn Queue>) {
        drop(queue);
        self.detach(controller);
        self.core.run_until_idle();
        self.drive.check();
        let used: usize = self
            .memory
            .pool
            .stats()
            .iter()
            .map(|class| class.count - class.free)
            .sum();
        assert_eq!(used, 0, "buffers were not returned");
    }
}
