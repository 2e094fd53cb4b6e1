//! The accepting thread: accepts TCP connections on all listeners, performs TLS handshakes, and
//! hands each connection to a core.
//!
//! This thread is not a reactor: it blocks in epoll. No other code of this transport blocks.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use crossbeam_queue::ArrayQueue;
use nacre_nvmf::tls::PskSource;
use nacre_nvmf::transport::{CoreLoad, ListenerId, ListenerOptions, QueueKind, TlsPolicy};
use nacre_reactor::{Clock, EventSet, Events, Interest, Nanos, Origin, Repeats};
use nacre_transport_tls::Handshake;
use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use rustix::process::{Resource, getrlimit};

use crate::config::TcpConfig;
use crate::failure_kind::FailureKind;
use crate::limits::{Admission, Limits};
use crate::sealed::Sealed;
use crate::socket::{self, Tuning};
use crate::stats::Stats;

/// Most messages in a core's inbox, and the most attempts to find room in an inbox, 1 ms apart.
const INBOX: usize = 256;
const INBOX_RETRIES: usize = 1000;
/// Most connections accepted from one listener before the other listeners have their turn.
const ACCEPT_BATCH: usize = 64;
/// Sleep at `max_pending_connections` before the thread checks again.
const PENDING_WAIT: Duration = Duration::from_millis(1);
/// Shortest age at which a pending connection may be evicted for another.
const PENDING_GRACE: Duration = Duration::from_secs(1);
/// Shortest interval between two log lines with the same reason and peer.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// The epoll token of the eventfd that stops the thread.
const STOP: u64 = u64::MAX;
/// A flag in the epoll token; the other bits are the listener's id. The flag marks the IPv4
/// socket of a listener on `::`.
pub(crate) const IPV4_HALF: u64 = 1 << 63;
/// A flag in the epoll token of a connection before or in its TLS handshake.
pub(crate) const ARRIVING: u64 = 1 << 62;

/// An accepted connection on its way to a core.
pub(crate) struct Incoming {
    pub socket: OwnedFd,
    pub listener: ListenerId,
    /// The options of the listener that accepted the connection.
    pub options: ListenerOptions,
    pub local: SocketAddr,
    pub peer: SocketAddr,
    pub pending: Arc<Pending>,
    /// The records of a connection over TLS.
    pub sealed: Option<Box<Sealed>>,
}

/// The connections of listeners with TLS, from accept to the end of the handshake, by epoll token.
#[derive(Default)]
pub(crate) struct Arriving {
    pub connections: HashMap<u64, Arrival>,
    pub next: u64,
    /// Tokens of connections that waited for other handshakes, and whose handshake begins now.
    pub turns: VecDeque<u64>,
}

pub(crate) struct Arrival {
    pub incoming: Incoming,
    pub counts: Arc<ListenerCounters>,
    pub deadline: Nanos,
    /// When its handshake begins; `None` before the first byte.
    pub turn: Option<Admission>,
    /// `None` until the handshake begins.
    pub handshake: Option<Handshake>,
}

impl Arriving {
    pub(crate) fn count(&self) -> usize {
        self.connections.len()
    }
}

/// A connection whose queue is not connected yet: the core drops this when it accepts the Connect
/// command (NVMe Base 2.0, 6.3).
pub(crate) struct Pending {
    pub peer: IpAddr,
    pub since: Nanos,
    /// The core must close the connection, so that new ones can be accepted.
    pub evicted: AtomicBool,
    core: OnceLock<Arc<CoreSlot>>,
}

/// A message from the accepting thread to a core.
pub(crate) enum ToCore {
    Connection(Incoming),
    /// Close the pending connections whose `evicted` is set.
    Evict,
}

/// One core, as the accepting thread sees it.
pub(crate) struct CoreSlot {
    pub core: usize,
    pub inbox: ArrayQueue<ToCore>,
    pub load: CoreLoad,
    pub wake: Arc<dyn Fn() + Send + Sync>,
    pub stats: Stats,
}

impl CoreSlot {
    pub(crate) fn new(core: usize, wake: Arc<dyn Fn() + Send + Sync>) -> Self {
        Self {
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
    /// The socket that accepts IPv4 hosts for a listener on `::`. `None` for other listeners, and
    /// while another listener has the port on an IPv4 address.
    pub ipv4_half: Option<Arc<OwnedFd>>,
    pub address: SocketAddr,
    pub options: ListenerOptions,
    pub counts: Arc<ListenerCounters>,
}

/// Connections of one listener. Only the accepting thread writes the counters.
#[derive(Default)]
pub(crate) struct ListenerCounters {
    pub accepted: AtomicU64,
    pub refused: AtomicU64,
}

/// Connections of listeners with TLS, by the result of their handshake. Only the accepting thread
/// writes the counters.
#[derive(Default)]
pub(crate) struct HandshakeCounters {
    pub succeeded: AtomicU64,
    /// By [`FailureKind`]. Also connections in clear where TLS is required.
    pub failed: [AtomicU64; FailureKind::ALL.len()],
    /// Not begun: too many connections of the address wait, or too many failed.
    pub limited: AtomicU64,
}

/// The state that the plug, the thread and the cores share.
pub(crate) struct Shared {
    pub config: TcpConfig,
    /// The keys of TLS; without them no listener can use TLS.
    pub psks: Option<Arc<dyn PskSource>>,
    pub listeners: Mutex<HashMap<ListenerId, Listener>>,
    pub cores: Mutex<Vec<Arc<CoreSlot>>>,
    pub connections: AtomicUsize,
    /// The connections among `connections` whose Connect command has not been accepted yet.
    pub pending: AtomicUsize,
    /// Pending connections closed to make room for others.
    pub evicted: AtomicU64,
    /// Connections refused at `max_connections`, and those that no core took.
    pub rejected_limit: AtomicU64,
    pub rejected_no_core: AtomicU64,
    pub handshakes: HandshakeCounters,
    /// Accepts that failed or were undone: no file descriptor, or no memory left.
    pub accept_errors: AtomicU64,
    pub watched: EventSet,
    pub stop: OwnedFd,
    pub stopping: AtomicBool,
    /// True while accepting is suspended: new connections stay in the kernel's backlog. The lock
    /// of `listeners` guards changes.
    pub held: AtomicBool,
}

impl Shared {
    pub(crate) fn new(
        config: TcpConfig,
        psks: Option<Arc<dyn PskSource>>,
    ) -> std::io::Result<Self> {
        let stop = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
        let watched = EventSet::new()?;
        watched.add(&stop, STOP, Interest::READ)?;
        Ok(Self {
            config,
            psks,
            listeners: Mutex::default(),
            cores: Mutex::default(),
            connections: AtomicUsize::new(0),
            pending: AtomicUsize::new(0),
            evicted: AtomicU64::new(0),
            rejected_limit: AtomicU64::new(0),
            rejected_no_core: AtomicU64::new(0),
            handshakes: HandshakeCounters::default(),
            accept_errors: AtomicU64::new(0),
            watched,
            stop,
            stopping: AtomicBool::new(false),
            held: AtomicBool::new(false),
        })
    }

    /// Locks the list of listeners. A panic leaves no listener half changed, so the lock needs no
    /// poisoning.
    pub(crate) fn listeners(&self) -> MutexGuard<'_, HashMap<ListenerId, Listener>> {
        self.listeners.lock()
    }

    pub(crate) fn cores(&self) -> MutexGuard<'_, Vec<Arc<CoreSlot>>> {
        self.cores.lock()
    }

    /// The epoll events to wait for on a listening socket: none while accepting is suspended.
    pub(crate) fn interest(&self) -> Interest {
        if self.held.load(Ordering::Acquire) {
            Interest::empty()
        } else {
            Interest::READ
        }
    }

    pub(crate) fn tuning(&self, options: &ListenerOptions) -> Tuning {
        Tuning {
            marking: self.config.marking(options),
            send_buffer: self.config.send_buffer,
            receive_buffer: self.config.receive_buffer,
            ack_timeout: self.config.ack_timeout,
        }
    }
}

/// The thread's main function: accepts connections until `stopping` is set.
pub(crate) fn run(shared: &Shared) {
    let mut events = Events::with_capacity(64);
    let mut acceptor = Acceptor {
        shared,
        clock: Clock::real(),
        pending: Vec::new(),
        arriving: Arriving::default(),
        limits: Limits::new(shared.config.max_pending_connections),
        log_lines: Repeats::new(LOG_INTERVAL),
    };
    while !shared.stopping.load(Ordering::Acquire) {
        let patience = acceptor.patience();
        if let Err(error) = shared.watched.wait(&mut events, patience) {
            tracing::error!(%error, "waiting for connections failed");
            std::thread::sleep(Duration::from_millis(100));
        }
        for event in events.iter() {
            if event.token == STOP {
                continue;
            }
            if event.token & ARRIVING != 0 && event.token & IPV4_HALF == 0 {
                acceptor.arrived(event.token);
                continue;
            }
            let id = ListenerId(event.token & !IPV4_HALF);
            // The lock is not held while accepting: if a listener is removed meanwhile, only that
            // connection is lost.
            let listener = shared.listeners().get(&id).and_then(|listener| {
                let socket = match event.token & IPV4_HALF {
                    0 => Arc::clone(&listener.socket),
                    _ => Arc::clone(listener.ipv4_half.as_ref()?),
                };
                Some((socket, listener.options, Arc::clone(&listener.counts)))
            });
            if let Some((socket, options, counts)) = listener {
                acceptor.accept_some(id, &socket, options, &counts);
            }
        }
    }
}

/// The accepting thread's own state.
pub(crate) struct Acceptor<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) clock: Clock,
    /// The pending connections. A dead entry's queue is connected, or its connection is closed.
    pending: Vec<Weak<Pending>>,
    /// Connections of listeners with TLS, before they are handed to a core.
    pub(crate) arriving: Arriving,
    pub(crate) limits: Limits,
    log_lines: Repeats<LogKey>,
}

/// The kind of a log line about connections. Each is written at most once per [`LOG_INTERVAL`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum LogKey {
    /// A connection of this address failed because of TLS, for a reason of this kind.
    Tls(IpAddr, &'static str),
    NoDescriptors,
    Limit(IpAddr),
    NoCore,
    Evicted(IpAddr),
}

impl Acceptor<'_> {
    pub(crate) fn log(&mut self, key: LogKey, write: impl FnOnce(u64)) {
        if let Some(left_out) = self.log_lines.admit(key, self.clock.now()) {
            write(left_out + 1);
        }
    }

    fn accept_some(
        &mut self,
        id: ListenerId,
        listening: &OwnedFd,
        options: ListenerOptions,
        counts: &Arc<ListenerCounters>,
    ) {
        let shared = self.shared;
        let limit = getrlimit(Resource::Nofile).current;
        let reserved = shared.config.reserved_descriptors;
        for accepted in 0..ACCEPT_BATCH {
            let pending = shared.pending.load(Ordering::Relaxed) + self.arriving.count();
            if pending >= shared.config.max_pending_connections {
                // The kernel's backlog keeps new connections until others have connected or made
                // room. After a restart a thousand hosts come at once, and none of them may be
                // refused. Only the first look proves that a connection waits.
                if accepted == 0 {
                    self.evict();
                    std::thread::sleep(PENDING_WAIT);
                }
                return;
            }
            match rustix::net::acceptfrom_with(
                listening,
                SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            ) {
                Ok((socket, _)) if is_reserved(socket.as_raw_fd(), limit, reserved) => {
                    drop(socket);
                    shared.accept_errors.fetch_add(1, Ordering::Relaxed);
                    counts.refused.fetch_add(1, Ordering::Relaxed);
                    self.log_no_descriptors("only descriptors reserved for management are left");
                }
                Ok((socket, peer)) => {
                    let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
                    let local = rustix::net::getsockname(&socket).and_then(SocketAddr::try_from);
                    // Gone again already when it has no addresses.
                    if let (Some(peer), Ok(local)) = (peer, local) {
                        let pending = Arc::new(Pending {
                            peer: peer.ip(),
                            since: self.clock.now(),
                            evicted: AtomicBool::new(false),
                            core: OnceLock::new(),
                        });
                        let incoming = Incoming {
                            socket,
                            listener: id,
                            options,
                            local,
                            peer,
                            pending,
                            sealed: None,
                        };
                        match options.tls() {
                            TlsPolicy::Off => self.hand_over(incoming, counts),
                            _ => self.await_first_byte(incoming, counts),
                        }
                    }
                }
                Err(Errno::AGAIN) => return,
                // Removed meanwhile.
                Err(Errno::INVAL | Errno::BADF) => return,
                Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                    // The listener stays readable, so wait a little.
                    shared.accept_errors.fetch_add(1, Ordering::Relaxed);
                    self.log_no_descriptors(&socket::describe(errno));
                    std::thread::sleep(Duration::from_millis(100));
                    return;
                }
                // An error of the connection, which broke before it was accepted: the kernel
                // reports it here.
                Err(errno) => {
                    tracing::debug!(error = %socket::describe(errno), "a connection broke before it was accepted");
                }
            }
        }
    }

    fn log_no_descriptors(&mut self, error: &str) {
        self.log(LogKey::NoDescriptors, |times| {
            tracing::warn!(
                error,
                times,
                "cannot accept hosts; raise the limit of open files (LimitNOFILE= of a unit, ulimit -n)"
            );
        });
    }

    /// Evicts one pending connection older than [`PENDING_GRACE`]: the oldest of the [`Origin`]
    /// with the most pending connections. So a host that connects and sends nothing cannot keep
    /// other hosts out. Connections in their TLS handshake and those with a core count alike: a
    /// slow handshake loses its place no sooner than a slow Connect.
    fn evict(&mut self) {
        let now = self.clock.now();
        let mut pending: Vec<Arc<Pending>> = Vec::with_capacity(self.pending.len());
        self.pending.retain(|weak| {
            let alive = weak.upgrade();
            let is_alive = alive.is_some();
            pending.extend(alive);
            is_alive
        });
        // One eviction at a time: the core closes the connection in its next turn.
        if pending
            .iter()
            .any(|one| one.evicted.load(Ordering::Relaxed))
        {
            return;
        }
        let arriving = self.arriving.connections.iter();
        let arriving = arriving.map(|(token, arrival)| (*token, &arrival.incoming.pending));
        let tokens: HashMap<*const Pending, u64> = arriving
            .map(|(token, one)| {
                pending.push(Arc::clone(one));
                (Arc::as_ptr(one), token)
            })
            .collect();
        let mut of_origin = HashMap::<Origin, usize>::new();
        for one in &pending {
            *of_origin.entry(one.peer.into()).or_default() += 1;
        }
        let is_late = |one: &&Arc<Pending>| now.since(one.since) >= PENDING_GRACE;
        let rank = |one: &&Arc<Pending>| {
            let of_origin = of_origin[&Origin::from(one.peer)];
            (std::cmp::Reverse(of_origin), one.since)
        };
        let Some(victim) = pending.iter().filter(is_late).min_by_key(rank) else {
            return;
        };
        if let Some(token) = tokens.get(&Arc::as_ptr(victim)) {
            return self.evict_arriving(*token);
        }
        // A core whose inbox is full has no time for it anyway.
        if let Some(core) = victim.core.get()
            && core.inbox.push(ToCore::Evict).is_ok()
        {
            victim.evicted.store(true, Ordering::Release);
            (core.wake)();
            self.log_eviction(victim.peer);
        }
    }

    pub(crate) fn log_eviction(&mut self, peer: IpAddr) {
        self.shared.evicted.fetch_add(1, Ordering::Relaxed);
        let limit = self.shared.config.max_pending_connections;
        self.log(LogKey::Evicted(peer), |times| {
            tracing::warn!(
                %peer,
                limit,
                times,
                "connection closed: it has not connected a queue, and others wait ([nvmf] max_pending_connections)"
            );
        });
    }

    /// Hands the connection to the core with the least load; among equals, to the lowest core. So
    /// the placement of a host's queues does not depend on the order in which cores started. Only
    /// the Connect command will say whether the queue is an admin or an I/O queue. Closes the
    /// connection if no core takes it or if `max_connections` is reached.
    pub(crate) fn hand_over(&mut self, incoming: Incoming, counts: &ListenerCounters) {
        let shared = self.shared;
        let peer = incoming.peer;
        if shared.connections.fetch_add(1, Ordering::AcqRel) >= shared.config.max_connections {
            shared.connections.fetch_sub(1, Ordering::AcqRel);
            shared.rejected_limit.fetch_add(1, Ordering::Relaxed);
            counts.refused.fetch_add(1, Ordering::Relaxed);
            let limit = shared.config.max_connections;
            self.log(LogKey::Limit(peer.ip()), |times| {
                tracing::warn!(%peer, limit, times, "connection refused: the limit of connections is reached");
            });
            return;
        }
        let tuned = socket::tune(
            &incoming.socket,
            &incoming.peer,
            &shared.tuning(&incoming.options),
        );
        if let Err(error) = tuned {
            tracing::debug!(%error, %peer, "a connection broke before it was taken over");
            shared.connections.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        let pending = Arc::clone(&incoming.pending);
        let mut incoming = ToCore::Connection(incoming);
        for _ in 0..INBOX_RETRIES {
            let mut cores = shared.cores().clone();
            cores.sort_by_key(|core| (core.load.rank(), core.core));
            shared.pending.fetch_add(1, Ordering::Relaxed);
            for core in &cores {
                core.load.add(QueueKind::Io);
                // Count before the core knows of it: an observer of the connection sees it counted.
                counts.accepted.fetch_add(1, Ordering::Relaxed);
                match core.inbox.push(incoming) {
                    Ok(()) => {
                        let _ = pending.core.set(Arc::clone(core));
                        self.pending.push(Arc::downgrade(&pending));
                        if self.pending.len() >= 2 * shared.config.max_pending_connections {
                            self.pending.retain(|one| one.strong_count() > 0);
                        }
                        return (core.wake)();
                    }
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
        self.log(LogKey::NoCore, |times| {
            tracing::warn!(%peer, times, "connection refused: no core takes it");
        });
    }
}

/// True if `descriptor` is one of the last, which are reserved for management: `reserved` of
/// them, and at most a quarter of `limit`. The kernel hands out the lowest free descriptor, so
/// all lower ones are in use.
fn is_reserved(descriptor: RawFd, limit: Option<u64>, reserved: u64) -> bool {
    let first = limit.map(|limit| limit - reserved.min(limit / 4));
    first.is_some_and(|first| descriptor as u64 >= first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_descriptors_are_reserved_and_no_more_than_a_quarter() {
        assert!(!is_reserved(895, Some(1024), 128));
        assert!(is_reserved(896, Some(1024), 128));
        assert!(!is_reserved(95, Some(128), 128));
        assert!(is_reserved(96, Some(128), 128));
        assert!(!is_reserved(1 << 20, None, 128));
    }
}
