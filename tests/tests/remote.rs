//! A remote namespace is a block device like any other: it passes the devices' own suite, over real
//! TCP, with what the target and the layer above it do natively.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nacre_bdev::conformance::Suite;
use nacre_bdev::{
    Bdev, Busy, Completion, Done, Geometry, Io, Limits, Op, OpenError, Queue, Status, Support,
    Token,
};
use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf::host::{Controller, Dial, HostOptions, IoQueue, Link, NamespaceInfo};
use nacre_nvmf::tcp::HostConfig;
use nacre_nvmf::transport::HostTransport;
use nacre_reactor::{Clock, Idle, Nanos};
use nacre_tests::target::{SUBNQN, TestTarget, nqn, ram};
use nacre_transport_tcp::{HostOptions as TcpOptions, connect_host};
use uuid::Uuid;

const QUEUES: u16 = 8;

/// A namespace as a device. The controller lives on a thread of its own.
struct Remote {
    options: HostOptions,
    address: SocketAddr,
    link: Arc<Link>,
    namespace: NamespaceInfo,
    /// Identifiers of queues that are not open.
    qids: Arc<Mutex<Vec<u16>>>,
}

fn dial(address: SocketAddr, entries: u16) -> Box<dyn Dial> {
    let machine = HostConfig {
        entries: entries.into(),
        ..HostConfig::default()
    };
    let options = TcpOptions {
        machine,
        ..TcpOptions::default()
    };
    Box::new(move |_qid: u16| {
        let host = connect_host(address, options.clone())?;
        Ok(Box::new(host) as Box<dyn HostTransport>)
    })
}

impl Bdev for Remote {
    fn name(&self) -> &str {
        "remote"
    }

    fn product_name(&self) -> &'static str {
        "Remote namespace"
    }

    fn uuid(&self) -> Uuid {
        self.namespace.uuid.expect("ours have one")
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: self.namespace.block_size,
            blocks: self.namespace.blocks,
            physical_block_size: self.namespace.block_size,
        }
    }

    fn limits(&self) -> Limits {
        let state = self.link.state();
        let block_size = self.namespace.block_size;
        Limits {
            max_blocks: (state.max_transfer_bytes / block_size).min(1 << 16),
            max_unmap_blocks: (state.write_zeroes_bytes / u64::from(block_size)).min(1 << 16),
            volatile_cache: state.volatile_cache,
            unmap_zeroes: self.namespace.unmap_zeroes,
            ..Limits::unlimited(u32::from(self.options.queue_entries) - 1)
        }
    }

    fn supports(&self, op: Op) -> Support {
        match op {
            // A controller may refuse to copy blocks onto part of themselves; devices here must not.
            Op::Copy => Support::No,
            _ => Support::Native,
        }
    }

    fn native_fua(&self) -> bool {
        true
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        let fail = |source: std::io::Error| OpenError {
            bdev: "remote".into(),
            what: "connecting an I/O queue".into(),
            source,
        };
        let none = || fail(std::io::Error::other("all queues are open"));
        let qid = self.qids.lock().unwrap().pop().ok_or_else(none)?;
        let dial = dial(self.address, self.options.queue_entries);
        let (options, link) = (self.options.clone(), Arc::clone(&self.link));
        let ids = (qid, self.namespace.nsid);
        // Whoever polls it has the clock.
        let queue = IoQueue::new(options, link, dial, pool.clone(), ids, Nanos::ZERO);
        Ok(Box::new(RemoteQueue {
            queue: queue.map_err(fail)?,
            refused: Vec::new(),
            qids: Arc::clone(&self.qids),
        }))
    }
}

/// Gives its identifier back, and refuses copies.
struct RemoteQueue {
    queue: IoQueue,
    refused: Vec<Completion>,
    qids: Arc<Mutex<Vec<u16>>>,
}

impl Queue for RemoteQueue {
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        if io.op == Op::Copy {
            self.refused.push(io.complete(Status::Unsupported));
            return Ok(());
        }
        self.queue.submit(io)
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        let before = done.len();
        while done.has_room()
            && let Some(refused) = self.refused.pop()
        {
            done.push(refused);
        }
        self.queue.poll(now, done);
        done.len() - before
    }

    fn abort(&mut self, token: Token) -> bool {
        self.queue.abort(token)
    }

    fn inflight(&self) -> usize {
        self.refused.len() + self.queue.inflight()
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        self.queue.arm(now)
    }
}

impl Drop for RemoteQueue {
    fn drop(&mut self) {
        // At the other end, so that the target has time to notice that the last one is gone.
        self.qids.lock().unwrap().insert(0, self.queue.qid());
    }
}

/// Polls a controller until told to stop; answers the link when it is live.
fn drive(
    address: SocketAddr,
    options: HostOptions,
    stop: Arc<AtomicBool>,
) -> (Arc<Link>, std::thread::JoinHandle<()>) {
    let (send, receive) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let pool = Pool::heap(&[ClassSpec {
            size: 4096,
            count: 16,
        }]);
        let clock = Clock::real();
        let dial = dial(address, 32);
        let mut controller = Controller::new(options, dial, pool, clock.now());
        send.send(Arc::clone(controller.link())).unwrap();
        while !stop.load(Ordering::Acquire) {
            if controller.poll(clock.now()) == 0 {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    });
    let link = receive.recv().unwrap();
    let start = Instant::now();
    while link.generation().is_none() {
        assert!(start.elapsed() < Duration::from_secs(30), "never live");
        std::thread::sleep(Duration::from_millis(1));
    }
    (link, thread)
}

#[test]
fn a_remote_namespace_conforms() {
    let target = TestTarget::start();
    for block_size in [512, 4096] {
        target.add_namespace(ram(&format!("ram{block_size}"), block_size, 8 << 20));
    }
    let mut options = HostOptions::new(nqn("nqn.2025-01.io.nacre:host"), [9; 16], nqn(SUBNQN));
    options.io_queues = QUEUES;
    options.queue_entries = 65;
    let stop = Arc::new(AtomicBool::new(false));
    let (link, thread) = drive(target.address, options.clone(), Arc::clone(&stop));
    let qids = Arc::new(Mutex::new((1..=QUEUES).collect::<Vec<u16>>()));
    for nsid in [1, 2] {
        let make = || -> Arc<dyn Bdev> {
            Arc::new(Remote {
                options: options.clone(),
                address: target.address,
                link: Arc::clone(&link),
                namespace: link.namespace(nsid).expect("it was added before"),
                qids: Arc::clone(&qids),
            })
        };
        Suite::new(make).run();
    }
    stop.store(true, Ordering::Release);
    thread.join().unwrap();
}
