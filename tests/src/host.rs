//! An NVMe/TCP host in the test's process: a controller and I/O queues over real TCP, polled by the
//! test's thread.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_bdev::{Completion, Done, Io, Op, Queue, Status};
use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_nvmf::host::{
    ControllerState, Dial, HostController, HostError, HostOptions, IoQueue, fetch_discovery_log,
};
use nacre_nvmf::tcp::HostConfig;
use nacre_nvmf::transport::HostTransport;
use nacre_nvmf_wire::commands::admin::GetLogPage;
use nacre_nvmf_wire::log::discovery::DiscoveryRecord;
use nacre_reactor::{Clock, Nanos};
use nacre_transport_tcp::{TcpHostOptions, connect_host};

use crate::target::nqn;

pub const HOSTNQN: &str = "nqn.2025-01.io.nacre:host";

/// Entries of the I/O queues of [`options`].
pub const ENTRIES: u16 = 33;

/// Limit for any step on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

/// Options of a host that reconnects quickly, and retries for longer than a test runs.
pub fn options(subnqn: &str) -> HostOptions {
    let mut options = HostOptions::new(nqn(HOSTNQN), [7; 16], nqn(subnqn));
    options.queue_entries = ENTRIES;
    options.reconnect_delay = Duration::from_millis(10);
    options.reconnect_delay_max = Duration::from_millis(50);
    options
}

/// A dialler to one address, for any queue.
pub fn dial(address: SocketAddr, entries: u16) -> Box<dyn Dial> {
    let machine = HostConfig {
        entries: entries.into(),
        ..HostConfig::default()
    };
    let options = TcpHostOptions {
        machine,
        // Small buffers, because a test may have many hosts.
        rx_buffer_size: 64 << 10,
        ..TcpHostOptions::default()
    };
    Box::new(move |_qid: u16| {
        let transport = connect_host(address, options.clone())?;
        Ok(Box::new(transport) as Box<dyn HostTransport>)
    })
}

/// One association. It makes progress only while the test polls it.
pub struct Host {
    pub controller: HostController,
    pub queues: Vec<IoQueue>,
    pool: Pool,
    address: SocketAddr,
    clock: Clock,
    done: Done,
    completions: BTreeMap<u64, Completion>,
    next_token: u64,
}

impl Host {
    /// Starts connecting, with memory for `large` buffers of 128 KiB.
    pub fn new(address: SocketAddr, options: HostOptions, large: usize) -> Self {
        let pool = Pool::heap(&[
            ClassSpec {
                size: 4096,
                count: 16 + 2 * usize::from(options.queue_entries),
            },
            ClassSpec {
                size: 128 << 10,
                count: large,
            },
        ]);
        let (clock, dial) = (Clock::real(), dial(address, options.queue_entries));
        Self {
            controller: HostController::new(options, dial, pool.clone(), clock.now()),
            queues: Vec::new(),
            pool,
            address,
            clock,
            done: Done::with_capacity(64),
            completions: BTreeMap::new(),
            next_token: 0,
        }
    }

    /// Connects a controller, and one I/O queue per entry of `nsids`, bound to that namespace.
    pub fn connected(address: SocketAddr, mut options: HostOptions, nsids: &[u32]) -> Self {
        options.io_queues = nsids.len().max(1) as u16;
        let mut host = Self::new(address, options, 4);
        host.until("a live controller", |h| h.controller.is_live());
        for nsid in nsids {
            host.open_queue(*nsid);
        }
        host.until("live queues", |h| h.queues.iter().all(IoQueue::is_live));
        host
    }

    /// Starts connecting the next I/O queue, for one namespace.
    pub fn open_queue(&mut self, nsid: u32) {
        let options = self.controller.options().clone();
        let qid = self.queues.len() as u16 + 1;
        let dial = dial(self.address, options.queue_entries);
        let (link, pool) = (Arc::clone(self.controller.link()), self.pool.clone());
        let queue = IoQueue::new(options, link, dial, pool, (qid, nsid), self.now());
        self.queues.push(queue.expect("an event set"));
    }

    pub fn now(&self) -> Nanos {
        self.clock.now()
    }

    /// Polls controller and queues once. Returns the amount of work done.
    pub fn turn(&mut self) -> usize {
        let now = self.clock.now();
        let mut did = self.controller.poll(now);
        for queue in &mut self.queues {
            did += queue.poll(now, &mut self.done);
            for completion in self.done.drain() {
                let token = completion.token;
                let before = self.completions.insert(token, completion);
                assert!(before.is_none(), "I/O {token} completed twice");
            }
        }
        did
    }

    /// Like [`Host::turn`], but yields the CPU if there was no work.
    pub fn turn_or_nap(&mut self) {
        if self.turn() == 0 {
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    pub fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !done(self) {
            let state = self.controller.state();
            assert!(Instant::now() < end, "never: {what}; controller {state:?}");
            self.turn_or_nap();
        }
    }

    /// Polls for this long.
    pub fn pass(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.turn_or_nap();
        }
    }

    /// Waits for a connection attempt to fail permanently, and returns the error.
    pub fn refusal(&mut self) -> HostError {
        self.until("refused", |h| {
            matches!(h.controller.state(), ControllerState::Failed(_))
        });
        match self.controller.state() {
            ControllerState::Failed(error) => error.clone(),
            state => panic!("{state:?}"),
        }
    }

    /// Shuts the association down in order.
    pub fn disconnect(mut self) {
        let now = self.now();
        self.controller.disconnect(now);
        self.until("closed", |h| {
            *h.controller.state() == ControllerState::Closed
        });
    }

    /// Reads the discovery log of a discovery controller.
    pub fn discovery_log(&mut self) -> Vec<DiscoveryRecord> {
        let read = |page: GetLogPage| {
            let read = self.pool.acquire(page.bytes() as usize);
            let ticket = self.controller.submit(page.to_sqe(0, 0), None, read);
            let ticket = ticket.expect("room for a command");
            let mut answer = None;
            self.until("a log page", |h| {
                answer = h.controller.take_result(ticket);
                answer.is_some()
            });
            let answer = answer.expect("just seen")?;
            assert!(answer.cqe.status().is_success(), "{}", answer.cqe.status());
            Ok(answer.data.map_or_else(Vec::new, |data| data.to_vec()))
        };
        fetch_discovery_log(read, 8)
            .expect("a discovery log")
            .records
    }

    // I/O.

    pub fn buf(&self, len: usize) -> Option<Buf> {
        self.pool.acquire(len)
    }

    /// Submits an I/O. `None`: the queue is full, and the I/O is dropped.
    pub fn submit(&mut self, queue: usize, io: impl FnOnce(u64) -> Io) -> Option<u64> {
        self.next_token += 1;
        let token = self.next_token;
        self.queues[queue].submit(io(token)).ok().map(|()| token)
    }

    /// A completion of any queue.
    pub fn take_completion(&mut self) -> Option<Completion> {
        self.completions.pop_first().map(|(_, c)| c)
    }

    /// Runs one I/O to completion.
    pub fn run(&mut self, queue: usize, io: impl FnOnce(u64) -> Io) -> Completion {
        let token = self.submit(queue, io).expect("room in the queue");
        self.until("a completion", |h| h.completions.contains_key(&token));
        self.completions.remove(&token).expect("just seen")
    }

    pub fn write(&mut self, queue: usize, lba: u64, blocks: u32, data: &[u8]) -> Status {
        let mut buf = self.buf(data.len()).expect("memory enough");
        let bytes = buf.bytes_mut().expect("the buffer is not shared");
        bytes.copy_from_slice(data);
        let io = |token| Io::new(token, Op::Write, lba, blocks).with(buf);
        self.run(queue, io).status
    }

    pub fn read(&mut self, queue: usize, lba: u64, blocks: u32, len: usize) -> Vec<u8> {
        let buf = self.buf(len).expect("memory enough");
        let io = |token| Io::new(token, Op::Read, lba, blocks).with(buf);
        let completion = self.run(queue, io);
        assert_eq!(completion.status, Status::Ok, "read of {lba}+{blocks}");
        completion.data.iter().flat_map(|b| b.to_vec()).collect()
    }

    pub fn flush(&mut self, queue: usize) -> Status {
        self.run(queue, |token| Io::new(token, Op::Flush, 0, 0))
            .status
    }

    /// Number of pool buffers in use.
    pub fn buffers_in_use(&self) -> usize {
        self.pool.stats().iter().map(|c| c.count - c.free).sum()
    }
}

/// Bytes that differ at every offset and for every `seed`.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let word = |at: usize| nacre_random::mix(seed ^ (at as u64 / 8)).to_le_bytes()[at % 8];
    (0..len).map(word).collect()
}
