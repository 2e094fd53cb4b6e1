//! The host side: queue pairs to a controller, and the thread that connects them.
//!
//! ```text
//!   RdmaHosts   resolve, connect, time out, try again          (management thread)
//!     │  Link: a mailbox and a descriptor per queue pair
//!   RdmaHost    commands out, completions in                   (one core)
//! ```
//!
//! The controller reads and writes a command's buffers by RDMA, with an rkey. So the buffers stay
//! in the table of the queue pair until the command completes, or the queue pair is destroyed.

mod connect;
mod queue;

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nacre_hugepages::{Arena, ArenaOptions, ClassSpec, Pool};
use nacre_nvmf::host::PathOptions;
use nacre_nvmf::transport::{Closed, TransportType};
use nacre_nvmf_wire::{Cqe, Sqe};
use nacre_reactor::{EventSet, Interest};
use nacre_transport_rdma_verbs::{Access, CmId, Endpoint, ProtectionDomain, Provider, VerbsError};
use parking_lot::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};

use crate::shared::{Mailbox, Memory};
use connect::Connects;
pub use queue::RdmaHost;

/// Options of one queue pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaHostOptions {
    /// 0: the admin queue.
    pub qid: u16,
    /// Entries of the queue: 2 to those of the dialer.
    pub entries: u16,
    /// The controller ID of an I/O queue; 0 for the admin queue.
    pub cntlid: u16,
    /// The local address; `None`: the route decides.
    pub source: Option<IpAddr>,
    /// Time limit of each attempt: address, route and connection together.
    pub cm_timeout: Duration,
    /// Attempts after the first, and the delay before each.
    pub connection_retries: u32,
    pub retry_delay: Duration,
    /// RDMA READs of the controller that this side answers at the same time.
    pub read_depth: u8,
    /// Capsules of up to this number of bytes, in-capsule data included, are sent inline. Devices
    /// lower it to their limit.
    pub max_inline: u32,
    /// Type of Service byte (DSCP << 2); 0: the system's default.
    pub tos: u8,
    /// Time for an ending queue pair to flush.
    pub drain_timeout: Duration,
}

impl RdmaHostOptions {
    /// The default of `max_inline`: bytes of a command capsule without in-capsule data.
    pub const MAX_INLINE: u32 = Sqe::SIZE as u32;

    pub fn new(qid: u16, entries: u16) -> Self {
        let paths = PathOptions::new(TransportType::Rdma, None);
        Self {
            qid,
            entries,
            cntlid: 0,
            source: None,
            cm_timeout: Duration::from_secs(5),
            connection_retries: paths.connection_retries,
            retry_delay: paths.retry_delay,
            read_depth: 16,
            max_inline: Self::MAX_INLINE,
            tos: 0,
            drain_timeout: Duration::from_secs(2),
        }
    }
}

/// Messages to a queue pair.
enum QueueMessage {
    /// The queue pair was created: post receives, then report [`ManagerRequest::Ready`].
    Endpoint(Box<(Endpoint, usize, CmId)>),
    Established,
    /// This attempt failed; another one begins.
    Again,
    Ended(Closed),
}

/// Messages from the management thread to one queue pair.
struct Link {
    news: Mutex<VecDeque<QueueMessage>>,
    wake: std::os::fd::OwnedFd,
    /// The queue pair is closed: no caller waits for the result.
    abandoned: AtomicBool,
}

impl Link {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            news: Mutex::default(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            abandoned: AtomicBool::new(false),
        })
    }

    fn news(&self) -> MutexGuard<'_, VecDeque<QueueMessage>> {
        self.news.lock()
    }

    fn send(&self, news: QueueMessage) {
        self.news().push_back(news);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn take(&self) -> Option<QueueMessage> {
        let mut news = self.news();
        let first = news.pop_front();
        if news.is_empty() {
            let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        }
        first
    }
}

/// Messages to the management thread.
enum ManagerRequest {
    Connect(SocketAddr, RdmaHostOptions, Arc<Link>),
    /// Receives are posted.
    Ready(CmId),
    /// Returns the queue pair, unless it is destroyed already.
    Done(CmId, Option<Endpoint>),
    /// No queue pair uses this memory any longer.
    Forget(Arena),
}

struct HostShared {
    provider: Arc<dyn Provider>,
    memory: Memory,
    mailbox: Mailbox<ManagerRequest>,
    stopping: AtomicBool,
}

/// The host side of RDMA in this process: connects queue pairs to controllers. Dropping it stops
/// the management thread.
pub struct RdmaHosts {
    shared: Arc<HostShared>,
    connects: Arc<Mutex<Connects>>,
    thread: Option<JoinHandle<()>>,
}

impl RdmaHosts {
    /// Starts the management thread. `arenas` is all memory that data is sent from or received
    /// into; [`RdmaHosts::add_arena`] adds more.
    pub fn new(provider: Arc<dyn Provider>, arenas: Vec<Arena>) -> std::io::Result<Self> {
        let mut hosts = Self::without_thread(provider, arenas)?;
        let (shared, connects) = (Arc::clone(&hosts.shared), Arc::clone(&hosts.connects));
        let run = move || connect::run(&shared, &connects);
        hosts.thread = Some(
            std::thread::Builder::new()
                .name("rdma-cm-host".into())
                .spawn(run)?,
        );
        Ok(hosts)
    }

    /// Creates the hosts without a thread; see [`crate::RdmaPlug::without_thread`].
    pub fn without_thread(
        provider: Arc<dyn Provider>,
        arenas: Vec<Arena>,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(HostShared {
            provider,
            memory: Memory::new(Access::Remote, u64::MAX, arenas),
            mailbox: Mailbox::new()?,
            stopping: AtomicBool::new(false),
        });
        let connects = Connects::new(&shared).map_err(std::io::Error::other)?;
        Ok(Self {
            shared,
            connects: Arc::new(Mutex::new(connects)),
            thread: None,
        })
    }

    /// Handles events since the last call, as of `now`.
    pub fn turn(&self, now: Instant) {
        let mut connects = self.connects.lock();
        connects.turn(&self.shared, now);
    }

    pub fn add_arena(&self, arena: &Arena) -> Result<(), VerbsError> {
        self.shared.memory.add(arena)
    }

    /// Creates a dialer for the calling core, with memory for `queues` queue pairs of up to
    /// `entries` entries.
    pub fn dialer(&self, queues: usize, entries: u16) -> std::io::Result<RdmaDialer> {
        let class = |size: usize| {
            [ClassSpec {
                size,
                count: queues.max(1),
            }]
        };
        let messages = class(queue::send_entries(entries) as usize * Sqe::SIZE);
        let headers = class(usize::from(entries) * Cqe::SIZE);
        let bytes = Pool::bytes_for(&messages) + Pool::bytes_for(&headers);
        let arena =
            Arena::allocate(ArenaOptions::new(bytes as u64)).map_err(std::io::Error::other)?;
        self.shared
            .memory
            .add(&arena)
            .map_err(std::io::Error::other)?;
        let carve = |class| Pool::on_arena(&arena, class).map_err(std::io::Error::other);
        // Created first, so that the memory is deregistered if carving it fails.
        let registered = RegisteredArena {
            shared: Arc::clone(&self.shared),
            arena: arena.clone(),
        };
        Ok(RdmaDialer {
            shared: Arc::clone(&self.shared),
            memory: Rc::new(RingMemory {
                messages: carve(&messages)?,
                headers: carve(&headers)?,
                _registered: registered,
            }),
            entries,
        })
    }

    /// All arenas. Each is registered with every device in use.
    pub fn arenas(&self) -> Vec<Arena> {
        self.shared.memory.arenas()
    }

    /// The protection domains in use, with the memory registered in each.
    pub fn domains(&self) -> Vec<Arc<dyn ProtectionDomain>> {
        self.shared.memory.domains()
    }
}

impl Drop for RdmaHosts {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.mailbox.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The memory of the rings of a dialer's queue pairs. It exists until the last of
/// them and the dialer are dropped.
struct RingMemory {
    messages: Pool,
    headers: Pool,
    _registered: RegisteredArena,
}

/// An arena that is registered with all devices until this is dropped.
struct RegisteredArena {
    shared: Arc<HostShared>,
    arena: Arena,
}

impl Drop for RegisteredArena {
    fn drop(&mut self) {
        // The management thread destroys earlier returned queue pairs first, and has time to wait
        // for devices.
        self.shared
            .mailbox
            .send(ManagerRequest::Forget(self.arena.clone()));
    }
}

/// Connects the queue pairs of one core, and has the memory of their rings.
pub struct RdmaDialer {
    shared: Arc<HostShared>,
    memory: Rc<RingMemory>,
    entries: u16,
}

impl RdmaDialer {
    /// Begins to connect. The first event of the queue pair is the result: `Ready` or `Closed`.
    /// `options.entries` out of range is `InvalidInput`.
    pub fn connect(
        &self,
        address: SocketAddr,
        options: RdmaHostOptions,
    ) -> std::io::Result<RdmaHost> {
        if options.entries < 2 || options.entries > self.entries {
            let why = format!(
                "{} entries; 2 to {} are possible",
                options.entries, self.entries
            );
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, why));
        }
        let link = Arc::new(Link::new()?);
        let wakes = EventSet::new()?;
        wakes.add(link.wake.as_fd(), 0, Interest::READ)?;
        let ask = ManagerRequest::Connect(address, options.clone(), Arc::clone(&link));
        self.shared.mailbox.send(ask);
        Ok(RdmaHost::new(
            Arc::clone(&self.shared),
            link,
            wakes,
            Rc::clone(&self.memory),
            options,
        ))
    }
}
