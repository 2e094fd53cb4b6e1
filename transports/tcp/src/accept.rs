//! The accepting thread: takes connections from the listeners and gives each to a core.
//!
//! It is no reactor: it blocks, and it is the only place that does.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossbeam_queue::ArrayQueue;
use nacre_nvmf::transport::{CoreLoad, ListenerId, ListenerOptions, QueueKind};
use nacre_reactor::{EventSet, Events, Interest};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use crate::config::TcpConfig;
use crate::socket::{self, Tuning};
use crate::stats::Stats;

/// Connections on their way to a core, and how long (in ms) to wait for room there.
const INBOX: usize = 256;
const INBOX_RETRIES: usize = 1000;
/// Connections taken from one listener before the others have their turn.
const ACCEPT_BATCH: usize = 64;
/// Between two looks at whether fewer connections are pending.
const PENDING_WAIT: Duration = Duration::from_millis(1);
/// The token of the descriptor that ends the thread.
const STOP: u64 = u64::MAX;

/// A connection that a core is to take over.
pub(crate) struct Incoming {
    pub socket: OwnedFd,
    pub listener: ListenerId,
    /// What its listener does differently.
    pub options: ListenerOptions,
    pub local: SocketAddr,
    pub peer: SocketAddr,
}

/// One core, as the accepting thread sees it.
pub(crate) struct CoreSlot {
    pub core: usize,
    pub inbox: ArrayQueue<Incoming>,
    pub load: CoreLoad,
    pub wake: Arc<dyn Fn() + Send + Sync>,
    pub stats: Stats,
}

impl CoreSlot {
    pub fn new(core: usize, wake: Arc<dyn Fn() + Send + Sync>) -> CoreSlot {
        CoreSlot {
            core,
            inbox: ArrayQueue::new(INBOX),
            load: CoreLoad::default(),
            wake,
            stats: Stats::default(),
        }
    }
}

pub(crate) struct Listener {
    pub socket: Arc<OwnedFd>,
    pub address: SocketAddr,
    pub options: ListenerOptions,
    pub counts: Arc<ListenerCounters>,
}

/// Written by the accepting thread only.
#[derive(Default)]
pub(crate) struct ListenerCounters {
    pub accepted: AtomicU64,
    pub refused: AtomicU64,
}

/// What the plug, the thread and the cores share.
pub(crate) struct Shared {
    pub config: TcpConfig,
    pub listeners: Mutex<HashMap<ListenerId, Listener>>,
    pub cores: Mutex<Vec<Arc<CoreSlot>>>,
    pub connections: AtomicUsize,
    /// Those of them whose Connect has not been accepted yet.
    pub pending: AtomicUsize,
    /// Connections refused: at the limit, or with no core to take them.
    pub rejected_limit: AtomicU64,
    pub rejected_no_core: AtomicU64,
    /// Connections that could not even be accepted (no descriptors left).
    pub accept_errors: AtomicU64,
    pub watched: EventSet,
    pub stop: OwnedFd,
    pub stopping: AtomicBool,
    /// The kernel's backlog keeps whoever comes. Changed under the lock of the listeners.
    pub held: AtomicBool,
}

impl Shared {
    pub fn new(config: TcpConfig) -> std::io::Result<Shared> {
        let stop = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
        let watched = EventSet::new()?;
        watched.add(&stop, STOP, Interest::READ)?;
        Ok(Shared {
            config,
            listeners: Mutex::default(),
            cores: Mutex::default(),
            connections: AtomicUsize::new(0),
            pending: AtomicUsize::new(0),
            rejected_limit: AtomicU64::new(0),
            rejected_no_core: AtomicU64::new(0),
            accept_errors: AtomicU64::new(0),
            watched,
            stop,
            stopping: AtomicBool::new(false),
            held: AtomicBool::new(false),
        })
    }

    /// Nothing here is left half done by a panic, so a poisoned lock is as good as any.
    pub fn listeners(&self) -> MutexGuard<'_, HashMap<ListenerId, Listener>> {
        self.listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub fn cores(&self) -> MutexGuard<'_, Vec<Arc<CoreSlot>>> {
        self.cores.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is waited for on a listening socket.
    pub fn interest(&self) -> Interest {
        match self.held.load(Ordering::Acquire) {
            true => Interest::empty(),
            false => Interest::READ,
        }
    }

    pub fn tuning(&self, options: &ListenerOptions) -> Tuning {
        Tuning {
            tos: options.tos.unwrap_or(self.config.tos),
            send_buffer: self.config.send_buffer,
            receive_buffer: self.config.receive_buffer,
            ack_timeout: self.config.ack_timeout,
        }
    }
}

/// The thread's life.
pub(crate) fn run(shared: &Shared) {
    let mut events = Events::with_capacity(64);
    while !shared.stopping.load(Ordering::Acquire) {
        if let Err(error) = shared.watched.wait(&mut events, Duration::from_secs(3600)) {
            tracing::error!(%error, "waiting for connections failed");
            std::thread::sleep(Duration::from_millis(100));
        }
        for event in events.iter() {
            if event.token == STOP {
                continue;
            }
            let id = ListenerId(event.token);
            // The lock is not held while accepting: a listener removed meanwhile only loses us nothing.
            let listener = shared.listeners().get(&id).map(|listener| {
                let counts = Arc::clone(&listener.counts);
                (Arc::clone(&listener.socket), listener.options, counts)
            });
            if let Some((socket, options, counts)) = listener {
                accept_some(shared, id, &socket, options, &counts);
            }
        }
    }
}

fn accept_some(
    shared: &Shared,
    id: ListenerId,
    listening: &OwnedFd,
    options: ListenerOptions,
    counts: &ListenerCounters,
) {
    for _ in 0..ACCEPT_BATCH {
        if shared.pending.load(Ordering::Relaxed) >= shared.config.max_pending_connections {
            // The kernel's backlog keeps whoever comes until others have connected or timed out:
            // after a restart a thousand hosts come at once, and none of them is to be refused.
            std::thread::sleep(PENDING_WAIT);
            return;
        }
        match rustix::net::acceptfrom_with(listening, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
        {
            Ok((socket, peer)) => {
                let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
                let local = rustix::net::getsockname(&socket).and_then(SocketAddr::try_from);
                // Gone again already when it has no addresses.
                if let (Some(peer), Ok(local)) = (peer, local) {
                    hand_over(
                        shared,
                        Incoming {
                            socket,
                            listener: id,
                            options,
                            local,
                            peer,
                        },
                        counts,
                    );
                }
            }
            Err(Errno::AGAIN) => return,
            // Removed meanwhile.
            Err(Errno::INVAL | Errno::BADF) => return,
            Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                // The listener stays readable, so wait a little.
                shared.accept_errors.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(error = %socket::describe(errno), "cannot accept; raise `ulimit -n` if descriptors ran out");
                std::thread::sleep(Duration::from_millis(100));
                return;
            }
            // Of the connection, which broke before it was accepted: the kernel tells it here.
            Err(errno) => {
                tracing::debug!(error = %socket::describe(errno), "a connection broke before it was accepted");
            }
        }
    }
}

/// To the core that carries least, of several the first: where the queues of a host lie does not depend on which core was
/// there first. What the connection is for its Connect will say. Closed when there is none or the limit is reached.
fn hand_over(shared: &Shared, mut incoming: Incoming, counts: &ListenerCounters) {
    if shared.connections.fetch_add(1, Ordering::AcqRel) >= shared.config.max_connections {
        shared.connections.fetch_sub(1, Ordering::AcqRel);
        shared.rejected_limit.fetch_add(1, Ordering::Relaxed);
        counts.refused.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(peer = %incoming.peer, limit = shared.config.max_connections, "connection refused: limit reached");
        return;
    }
    if let Err(error) = socket::tune(
        &incoming.socket,
        &incoming.peer,
        &shared.tuning(&incoming.options),
    ) {
        tracing::debug!(%error, peer = %incoming.peer, "a connection broke before it was taken over");
        shared.connections.fetch_sub(1, Ordering::AcqRel);
        return;
    }
    for _ in 0..INBOX_RETRIES {
        let mut cores = shared.cores().clone();
        cores.sort_by_key(|core| (core.load.rank(), core.core));
        shared.pending.fetch_add(1, Ordering::Relaxed);
        for core in &cores {
            core.load.add(QueueKind::Io);
            // Before the core knows of it: whoever sees the connection sees it counted.
            counts.accepted.fetch_add(1, Ordering::Relaxed);
            match core.inbox.push(incoming) {
                Ok(()) => return (core.wake)(),
                Err(back) => {
                    core.load.remove(QueueKind::Io);
                    counts.accepted.fetch_sub(1, Ordering::Relaxed);
                    incoming = back;
                }
            }
        }
        shared.pending.fetch_sub(1, Ordering::Relaxed);
        if cores.is_empty() || shared.stopping.load(Ordering::Acquire) {
            break;
        }
        // All full: the kernel's backlog keeps the others meanwhile.
        std::thread::sleep(Duration::from_millis(1));
    }
    shared.connections.fetch_sub(1, Ordering::AcqRel);
    shared.rejected_no_core.fetch_add(1, Ordering::Relaxed);
    counts.refused.fetch_add(1, Ordering::Relaxed);
    tracing::warn!(peer = %incoming.peer, "connection refused: no core takes it");
}
