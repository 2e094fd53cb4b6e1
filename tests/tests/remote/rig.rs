//! The harness of the tests: an attached controller that its own thread polls, and queues of its
//! bdevs.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nacre_bdev::reservation::{ReservationReport, ReservationRequest, Reserve};
use nacre_bdev::{Bdev, Completion, Done, Flags, Io, Op, Queue, Registry, Status};
use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_nvmf::address::Select;
use nacre_nvmf::host::Connector;
use nacre_nvmf::host::HostOptions;
use nacre_nvmf::transport::TransportType;
use nacre_nvmf_remote::{Attachment, Changes, Config, Path, State};
use nacre_nvmf_wire::tcp::Digests;
use nacre_reactor::{Clock, Poller};
use nacre_tests::target::{SUBNQN, nqn};
use nacre_transport_connect::TcpConnector;

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const ENTRIES: u16 = 65;
pub(crate) const NAME: &str = "there";

pub(crate) struct AttachedRemote {
    pub attachment: Arc<Attachment>,
    pub registry: Registry,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// Options of a host that reconnects quickly and never gives up.
pub(crate) fn options() -> HostOptions {
    let mut options = HostOptions::new(nqn("nqn.2025-01.io.nacre:host"), [9; 16], nqn(SUBNQN));
    options.io_queues = 8;
    options.queue_entries = ENTRIES;
    options.reconnect_delay = Duration::from_millis(10);
    options.reconnect_delay_max = Duration::from_millis(50);
    options.loss_timeout = None;
    options.wait_for_access = true;
    options
}

pub(crate) fn config(options: HostOptions) -> Config {
    Config {
        name: NAME.into(),
        address: ("127.0.0.1".into(), "4420".into()),
        select: Select::All,
        max_devices: 16,
        transport: TransportType::Tcp,
        options,
    }
}

pub(crate) fn tcp(address: SocketAddr) -> Arc<dyn Connector> {
    Arc::new(TcpConnector::new(address, Digests::NONE, ENTRIES))
}

impl AttachedRemote {
    /// Starts attaching without waiting for it.
    pub(crate) fn begin(config: Config, connector: Arc<dyn Connector>) -> Self {
        let memory = Arc::clone(&connector);
        let mut attached = Self {
            attachment: Arc::new(Attachment::new(config, connector, || {})),
            registry: Registry::new(),
            stop: Arc::new(AtomicBool::new(false)),
            threads: Vec::new(),
        };
        attached.poll(attached.attachment.path(), memory);
        attached
    }

    /// Adds a path without waiting for its connection.
    pub(crate) fn begin_path(&mut self, config: Config, connector: Arc<dyn Connector>) -> Path {
        let memory = Arc::clone(&connector);
        let path = self.attachment.add_path(config, connector);
        let path = path.expect("room for a path");
        self.poll(path.clone(), memory);
        path
    }

    /// Adds a path and waits for its connection.
    pub(crate) fn add_path(&mut self, config: Config, connector: Arc<dyn Connector>) -> Path {
        let path = self.begin_path(config, connector);
        self.until("live", |_| path.status().state == State::Live);
        self.sync();
        path
    }

    fn poll(&mut self, path: Path, memory: Arc<dyn Connector>) {
        let stopped = Arc::clone(&self.stop);
        self.threads.push(std::thread::spawn(move || {
            let memory = memory.memory(&[ClassSpec {
                size: 4096,
                count: 16,
            }]);
            let memory = memory.expect("memory for a core");
            let clock = Clock::real();
            let poller = path.poller(memory, None, || {}, clock.now());
            let mut poller = poller.expect("an event set");
            while !stopped.load(Ordering::Acquire) && !poller.is_over() {
                poller.poll(clock.now(), 64);
                std::thread::sleep(Duration::from_micros(100));
            }
        }));
    }

    /// Attaches and registers the bdevs.
    pub(crate) fn to(config: Config, connector: Arc<dyn Connector>) -> Self {
        let attached = Self::begin(config, connector);
        attached.until("live", |a| a.attachment.status().state == State::Live);
        attached.sync();
        attached
    }

    pub(crate) fn sync(&self) -> Changes {
        self.attachment.sync(&self.registry, Instant::now())
    }

    pub(crate) fn until(&self, what: &str, mut done: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !done(self) {
            let status = self.attachment.status();
            assert!(Instant::now() < end, "never: {what}; {status:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A core's queue on namespace `nsid`.
    pub(crate) fn user(&self, nsid: u32) -> User {
        User::of(&self.registry, &format!("{NAME}n{nsid}"))
    }
}

impl Drop for AttachedRemote {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            assert!(thread.join().is_ok() || std::thread::panicking());
        }
    }
}

/// A user of a bdev through the layer, like a core.
pub(crate) struct User {
    pub device: Arc<dyn Bdev>,
    queue: Box<dyn Queue>,
    pool: Pool,
    clock: Clock,
    done: Done,
    next: u64,
    ended: Vec<Completion>,
}

impl User {
    pub(crate) fn of(registry: &Registry, name: &str) -> Self {
        let pool = Pool::heap(&[ClassSpec {
            size: 64 << 10,
            count: 64,
        }]);
        Self::with(registry, name, pool)
    }

    pub(crate) fn with(registry: &Registry, name: &str, pool: Pool) -> Self {
        Self {
            device: registry.lookup(name).expect("it is registered"),
            queue: Box::new(registry.open(name, &pool).expect("a queue")),
            pool,
            clock: Clock::real(),
            done: Done::with_capacity(64),
            next: 0,
            ended: Vec::new(),
        }
    }

    pub(crate) fn buf(&self, fill: u8) -> Buf {
        let mut buf = self.pool.acquire(4096).expect("memory enough");
        buf.bytes_mut().expect("new").fill(fill);
        buf
    }

    /// Submits 4096 bytes at block `lba`.
    pub(crate) fn submit(&mut self, op: Op, lba: u64, fill: u8) -> u64 {
        self.next += 1;
        let blocks = 4096 / self.device.geometry().block_size;
        let io = Io::new(self.next, op, lba, blocks).with(self.buf(fill));
        assert!(self.queue.submit(io).is_ok(), "room in the queue");
        self.next
    }

    /// Zeroes 4096 bytes at block `lba`.
    pub(crate) fn zero(&mut self, lba: u64, flags: Flags) -> Status {
        self.next += 1;
        let blocks = 4096 / self.device.geometry().block_size;
        let mut io = Io::new(self.next, Op::WriteZeroes, lba, blocks);
        io.flags = flags;
        assert!(self.queue.submit(io).is_ok(), "room in the queue");
        self.wait(self.next).status
    }

    pub(crate) fn turn(&mut self) {
        if self.queue.poll(self.clock.now(), &mut self.done) == 0 {
            std::thread::sleep(Duration::from_micros(50));
        }
        self.ended.extend(self.done.drain());
    }

    pub(crate) fn has_ended(&self, token: u64) -> bool {
        self.ended.iter().any(|c| c.token == token)
    }

    pub(crate) fn wait(&mut self, token: u64) -> Completion {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.ended.iter().position(|c| c.token == token) {
                return self.ended.swap_remove(at);
            }
            assert!(Instant::now() < end, "I/O {token} does not end");
            self.turn();
        }
    }

    pub(crate) fn reserve(&mut self, ask: ReservationRequest) -> Result<ReservationReport, Status> {
        let (answer, answered) = std::sync::mpsc::channel();
        let answer = Box::new(move |outcome| answer.send(outcome).expect("the caller waits"));
        assert!(
            self.queue.reserve(Reserve { ask, answer }).is_ok(),
            "{ask:?} is taken"
        );
        let end = Instant::now() + PATIENCE;
        loop {
            if let Ok(outcome) = answered.try_recv() {
                return outcome;
            }
            assert!(Instant::now() < end, "{ask:?} does not end");
            self.turn();
        }
    }

    pub(crate) fn write(&mut self, lba: u64, fill: u8) -> Status {
        let token = self.submit(Op::Write, lba, fill);
        self.wait(token).status
    }

    /// Reads 4096 bytes, which must all be equal, and returns that byte.
    pub(crate) fn read(&mut self, lba: u64) -> Result<u8, Status> {
        let token = self.submit(Op::Read, lba, 0xEE);
        let read = self.wait(token);
        match read.status {
            Status::Ok => {
                let data = &read.data[0];
                assert!(data.iter().all(|byte| *byte == data[0]), "a torn block");
                Ok(data[0])
            }
            status => Err(status),
        }
    }
}
