//! Set-up for the tests: an attached controller that its own thread polls, and queues of its bdevs.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nacre_bdev::reservation::{Ask, ReservationReport, Reserve};
use nacre_bdev::{Bdev, Completion, Done, Flags, Io, Op, Queue, Registry, Status};
use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_nvmf::address::Select;
use nacre_nvmf::host::Connector;
use nacre_nvmf::host::HostOptions;
use nacre_nvmf::transport::TransportType;
use nacre_nvmf_remote::{Attachment, Changes, Config, State};
use nacre_nvmf_wire::tcp::Digests;
use nacre_reactor::{Clock, Poller};
use nacre_tests::target::{SUBNQN, nqn};
use nacre_transport_connect::TcpConnector;

pub const PATIENCE: Duration = Duration::from_secs(60);
pub const ENTRIES: u16 = 65;
pub const NAME: &str = "there";

pub struct AttachedRemote {
    pub attachment: Arc<Attachment>,
    pub registry: Registry,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Options of a host that reconnects quickly and never gives up.
pub fn options() -> HostOptions {
    let mut options = HostOptions::new(nqn("nqn.2025-01.io.nacre:host"), [9; 16], nqn(SUBNQN));
    options.io_queues = 8;
    options.queue_entries = ENTRIES;
    options.reconnect_delay = Duration::from_millis(10);
    options.reconnect_delay_max = Duration::from_millis(50);
    options.loss_timeout = None;
    options.wait_for_access = true;
    options
}

pub fn config(options: HostOptions) -> Config {
    Config {
        name: NAME.into(),
        address: ("127.0.0.1".into(), "4420".into()),
        select: Select::All,
        max_devices: 16,
        transport: TransportType::Tcp,
        options,
    }
}

pub fn tcp(address: SocketAddr) -> Arc<dyn Connector> {
    Arc::new(TcpConnector::new(address, Digests::NONE, ENTRIES))
}

impl AttachedRemote {
    /// Starts attaching without waiting for it.
    pub fn begin(config: Config, connector: Arc<dyn Connector>) -> AttachedRemote {
        let memory = Arc::clone(&connector);
        let attachment = Arc::new(Attachment::new(config, connector, || {}));
        let stop = Arc::new(AtomicBool::new(false));
        let (theirs, stopped) = (Arc::clone(&attachment), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let memory = memory
                .memory(&[ClassSpec {
                    size: 4096,
                    count: 16,
                }])
                .expect("memory for a core");
            let clock = Clock::real();
            let poller = theirs.poller(memory, None, || {}, clock.now());
            let mut poller = poller.expect("an event set");
            while !stopped.load(Ordering::Acquire) && !poller.is_over() {
                poller.poll(clock.now(), 64);
                std::thread::sleep(Duration::from_micros(100));
            }
        });
        AttachedRemote {
            attachment,
            registry: Registry::new(),
            stop,
            thread: Some(thread),
        }
    }

    /// Attaches and registers the bdevs.
    pub fn to(config: Config, connector: Arc<dyn Connector>) -> AttachedRemote {
        let attached = AttachedRemote::begin(config, connector);
        attached.until("live", |a| a.attachment.status().state == State::Live);
        attached.sync();
        attached
    }

    pub fn sync(&self) -> Changes {
        self.attachment.sync(&self.registry, Instant::now())
    }

    pub fn until(&self, what: &str, mut done: impl FnMut(&AttachedRemote) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !done(self) {
            let status = self.attachment.status();
            assert!(Instant::now() < end, "never: {what}; {status:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A core's queue on namespace `nsid`.
    pub fn user(&self, nsid: u32) -> User {
        User::of(&self.registry, &format!("{NAME}n{nsid}"))
    }
}

impl Drop for AttachedRemote {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            assert!(thread.join().is_ok() || std::thread::panicking());
        }
    }
}

/// A user of a bdev through the layer, like a core.
pub struct User {
    pub device: Arc<dyn Bdev>,
    queue: Box<dyn Queue>,
    pool: Pool,
    clock: Clock,
    done: Done,
    next: u64,
    ended: Vec<Completion>,
}

impl User {
    pub fn of(registry: &Registry, name: &str) -> User {
        let pool = Pool::heap(&[ClassSpec {
            size: 64 << 10,
            count: 64,
        }]);
        User {
            device: registry.lookup(name).expect("it is registered"),
            queue: Box::new(registry.open(name, &pool).expect("a queue")),
            pool,
            clock: Clock::real(),
            done: Done::with_capacity(64),
            next: 0,
            ended: Vec::new(),
        }
    }

    pub fn buf(&self, fill: u8) -> Buf {
        let mut buf = self.pool.acquire(4096).expect("memory enough");
        buf.bytes_mut().expect("new").fill(fill);
        buf
    }

    /// Submits 4096 bytes at block `lba`.
    pub fn submit(&mut self, op: Op, lba: u64, fill: u8) -> u64 {
        self.next += 1;
        let blocks = 4096 / self.device.geometry().block_size;
        let io = Io::new(self.next, op, lba, blocks).with(self.buf(fill));
        assert!(self.queue.submit(io).is_ok(), "room in the queue");
        self.next
    }

    /// Zeroes 4096 bytes at block `lba`.
    pub fn zero(&mut self, lba: u64, flags: Flags) -> Status {
        self.next += 1;
        let blocks = 4096 / self.device.geometry().block_size;
        let mut io = Io::new(self.next, Op::WriteZeroes, lba, blocks);
        io.flags = flags;
        assert!(self.queue.submit(io).is_ok(), "room in the queue");
        self.wait(self.next).status
    }

    pub fn turn(&mut self) {
        if self.queue.poll(self.clock.now(), &mut self.done) == 0 {
            std::thread::sleep(Duration::from_micros(50));
        }
        self.ended.extend(self.done.drain());
    }

    pub fn has_ended(&self, token: u64) -> bool {
        self.ended.iter().any(|c| c.token == token)
    }

    pub fn wait(&mut self, token: u64) -> Completion {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.ended.iter().position(|c| c.token == token) {
                return self.ended.swap_remove(at);
            }
            assert!(Instant::now() < end, "I/O {token} does not end");
            self.turn();
        }
    }

    pub fn reserve(&mut self, ask: Ask) -> Result<ReservationReport, Status> {
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

    pub fn write(&mut self, lba: u64, fill: u8) -> Status {
        let token = self.submit(Op::Write, lba, fill);
        self.wait(token).status
    }

    /// Reads 4096 bytes, which must all be equal, and returns that byte.
    pub fn read(&mut self, lba: u64) -> Result<u8, Status> {
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
