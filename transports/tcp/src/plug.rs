//! The control side of NVMe/TCP: adds and removes listeners, and registers the cores that receive
//! their connections. It moves no data.

use std::collections::{HashMap, HashSet};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use nacre_nvmf::tls::PskSource;
use nacre_nvmf::transport::{
    Address, ListenError, ListenerCounts, ListenerId, ListenerOptions, Plug, PlugCounts, TlsCounts,
    TlsPolicy, Transport, TransportType,
};

use crate::accept::{self, CoreSlot, IPV4_HALF, Listener, Shared};
use crate::config::{ConfigError, TcpConfig};
use crate::failure_kind::FailureKind;
use crate::socket;
use crate::stats::StatsSnapshot;
use crate::transport::TcpTransport;

/// The plug of the NVMe/TCP transport. Dropping the plug stops its accepting thread and its
/// listeners; connections stay with their cores.
pub struct TcpPlug {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl TcpPlug {
    /// Makes a plug without TLS; otherwise as [`TcpPlug::with_psks`].
    pub fn new(config: TcpConfig) -> std::io::Result<Self> {
        Self::start(config, None)
    }

    /// Validates `config` and starts the accepting thread. An invalid `config` is `InvalidInput`.
    /// TLS handshakes use the keys of `psks`.
    pub fn with_psks(config: TcpConfig, psks: Arc<dyn PskSource>) -> std::io::Result<Self> {
        Self::start(config, Some(psks))
    }

    fn start(config: TcpConfig, psks: Option<Arc<dyn PskSource>>) -> std::io::Result<Self> {
        config
            .validate()
            .map_err(|error| std::io::Error::new(std::io::ErrorKind::InvalidInput, error))?;
        let shared = Arc::new(Shared::new(config, psks)?);
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("tcp-accept".into())
            .spawn(move || accept::run(&theirs))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    pub fn config(&self) -> &TcpConfig {
        &self.shared.config
    }

    /// Number of connections on all cores, including those on their way to a core.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Acquire)
    }

    /// Connections refused since the start: (at `max_connections`, because no core took them).
    pub fn rejected(&self) -> (u64, u64) {
        (
            self.shared.rejected_limit.load(Ordering::Relaxed),
            self.shared.rejected_no_core.load(Ordering::Relaxed),
        )
    }

    /// The number and the counters of each core with an open transport.
    pub fn stats(&self) -> Vec<(usize, StatsSnapshot)> {
        self.shared
            .cores()
            .iter()
            .map(|core| (core.core, core.stats.snapshot()))
            .collect()
    }
}

type Opened = (Arc<OwnedFd>, SocketAddr);

impl TcpPlug {
    /// Opens a listening socket. The accepting thread watches the socket under epoll token
    /// `token`.
    fn open(
        &self,
        token: u64,
        address: SocketAddr,
        options: &ListenerOptions,
    ) -> Result<Opened, ListenError> {
        let config = &self.shared.config;
        let (socket, real) = socket::listen(address, config.backlog, config.marking(options))?;
        self.shared.watched.add(&socket, token, self.shared.interest()).map_err(|source| ListenError::Bind {
            address: address.to_string(),
            source,
            remedy: "raise `ulimit -n` or the number of watches (`sysctl fs.epoll.max_user_watches`)".into(),
        })?;
        Ok((Arc::new(socket), real))
    }

    fn close(&self, socket: &OwnedFd) {
        let _ = self.shared.watched.delete(socket);
        // The accepting thread may hold the socket for a moment longer: from here on it refuses.
        let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
    }

    /// Closes the additional IPv4 sockets of the listeners on `::` with this port.
    fn close_ipv4_halves(&self, listeners: &mut HashMap<ListenerId, Listener>, port: u16) {
        let of_port = listeners.values_mut().filter(|l| l.address.port() == port);
        for half in of_port.filter_map(|listener| listener.ipv4_half.take()) {
            self.close(&half);
        }
    }

    /// Opens the additional IPv4 socket of each listener on `::`, unless another listener has the
    /// port on an IPv4 address. One socket for both families could not be split when a listener
    /// on an IPv4 address comes later.
    fn open_ipv4_halves(&self, listeners: &mut HashMap<ListenerId, Listener>) {
        let taken: HashSet<u16> = listeners
            .values()
            .filter(|listener| listener.address.is_ipv4())
            .map(|listener| listener.address.port())
            .collect();
        for (id, listener) in listeners.iter_mut() {
            let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, listener.address.port()));
            let port = any.port();
            if listener.address != any || listener.ipv4_half.is_some() || taken.contains(&port) {
                continue;
            }
            let ipv4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
            match self.open(id.0 | IPV4_HALF, ipv4, &listener.options) {
                Ok((socket, _)) => listener.ipv4_half = Some(socket),
                Err(error) => {
                    tracing::warn!(%error, "the listener on [::]:{port} takes IPv6 hosts only");
                }
            }
        }
    }
}

impl Plug for TcpPlug {
    fn kind(&self) -> TransportType {
        TransportType::Tcp
    }

    fn listen(
        &self,
        id: ListenerId,
        address: &Address,
        options: &ListenerOptions,
    ) -> Result<Address, ListenError> {
        self.shared
            .config
            .with(options)
            .validate()
            .map_err(|error| {
                let ConfigError::OutOfRange { option, .. } = error;
                ListenError::Option {
                    option,
                    why: error.to_string(),
                }
            })?;
        let most = self.shared.config.max_io_size;
        if let Some(bytes) = options.in_capsule_data_size.filter(|bytes| *bytes > most) {
            return Err(ListenError::Option {
                option: "in_capsule_data_size",
                why: format!(
                    "{bytes} bytes are more than one command may transfer, {most} bytes (max_io_size)"
                ),
            });
        }
        if options.tls() != TlsPolicy::Off && self.shared.psks.is_none() {
            return Err(ListenError::Option {
                option: "tls",
                why: "this transport was made without keys".into(),
            });
        }
        if options.tls() != TlsPolicy::Off {
            warm_up();
        }
        let Address::Ip(address) = *address else {
            return Err(ListenError::WrongKind {
                address: address.to_string(),
                kind: TransportType::Tcp,
            });
        };
        let mut listeners = self.shared.listeners();
        let known = listeners.values().any(|l| l.address == address);
        if listeners.contains_key(&id) || known {
            return Err(ListenError::InUse {
                address: address.to_string(),
            });
        }
        if listeners.len() >= self.shared.config.max_listeners {
            return Err(ListenError::TooMany {
                limit: self.shared.config.max_listeners,
            });
        }
        if address.is_ipv4() {
            self.close_ipv4_halves(&mut listeners, address.port());
        }
        let opened = self.open(id.0, address, options);
        if let Ok((socket, real)) = &opened {
            listeners.insert(
                id,
                Listener {
                    socket: Arc::clone(socket),
                    ipv4_half: None,
                    address: *real,
                    options: *options,
                    counts: Arc::default(),
                },
            );
        }
        self.open_ipv4_halves(&mut listeners);
        opened.map(|(_, real)| Address::Ip(real))
    }

    fn unlisten(&self, id: ListenerId) {
        let mut listeners = self.shared.listeners();
        if let Some(listener) = listeners.remove(&id) {
            self.close(&listener.socket);
            listener.ipv4_half.iter().for_each(|half| self.close(half));
            drop(listener);
            self.open_ipv4_halves(&mut listeners);
        }
    }

    fn hold(&self, held: bool) {
        let listeners = self.shared.listeners();
        self.shared.held.store(held, Ordering::Release);
        for (id, listener) in listeners.iter() {
            let interest = self.shared.interest();
            let half = listener
                .ipv4_half
                .iter()
                .map(|half| (half, id.0 | IPV4_HALF));
            for (socket, token) in std::iter::once((&listener.socket, id.0)).chain(half) {
                if let Err(error) = self.shared.watched.modify(&**socket, token, interest) {
                    tracing::error!(%error, address = %listener.address, "a listener cannot be held or released");
                }
            }
        }
    }

    fn in_capsule_data_size(&self, id: ListenerId) -> Option<u32> {
        let listeners = self.shared.listeners();
        let listener = listeners.get(&id)?;
        Some(
            self.shared
                .config
                .with(&listener.options)
                .in_capsule_data_size,
        )
    }

    fn listener_counts(&self, id: ListenerId) -> Option<ListenerCounts> {
        let counts = Arc::clone(&self.shared.listeners().get(&id)?.counts);
        Some(ListenerCounts {
            accepted: counts.accepted.load(Ordering::Relaxed),
            refused: counts.refused.load(Ordering::Relaxed),
        })
    }

    fn counts(&self) -> PlugCounts {
        let cores = self.stats().into_iter().map(|(_, stats)| stats);
        let all = cores.fold(StatsSnapshot::default(), |sum, core| sum + core);
        let (limit, no_core) = self.rejected();
        let counters = &self.shared.handshakes;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let failures = FailureKind::ALL.map(|kind| {
            let count = read(&counters.failed[kind as usize]);
            (kind.name(), count)
        });
        let failed = failures.iter().map(|(_, count)| count).sum();
        let handshakes = [
            ("succeeded", read(&counters.succeeded)),
            ("failed", failed),
            ("limited", read(&counters.limited)),
        ];
        let accept_errors = self.shared.accept_errors.load(Ordering::Relaxed);
        PlugCounts {
            accepted: all.accepted,
            closed: vec![
                ("peer", all.closed_by_peer),
                ("broken", all.closed_broken),
                ("protocol", all.closed_protocol),
                ("timeout", all.closed_timeout),
                ("local", all.closed_local),
            ],
            refused: vec![
                ("limit", limit),
                ("no_core", no_core),
                ("no_descriptor", accept_errors),
                ("tls", handshakes[1].1),
                ("tls_limit", handshakes[2].1),
            ],
            tls: Some(TlsCounts {
                handshakes: handshakes.to_vec(),
                failures: failures.to_vec(),
                connections: all.tls_opened - all.tls_closed,
                key_updates_sent: all.key_updates_sent,
                key_updates_received: all.key_updates_received,
                keys_past_limit: all.keys_past_limit,
            }),
            bytes_received: all.bytes_received,
            bytes_sent: all.bytes_sent,
            work: vec![
                ("receive", all.receives),
                ("receive_empty", all.receives_empty),
                ("send", all.sends),
                ("send_partial", all.sends_partial),
                ("epoll", all.looks),
                ("pdu_received", all.pdus_received),
                ("pdu_sent", all.pdus_sent),
                ("buffer_wait", all.waits),
            ],
        }
    }

    fn open(
        &self,
        core: usize,
        wake: Arc<dyn Fn() + Send + Sync>,
    ) -> std::io::Result<Box<dyn Transport>> {
        let slot = Arc::new(CoreSlot::new(core, wake));
        let transport = TcpTransport::new(Arc::clone(&self.shared), Arc::clone(&slot))?;
        self.shared.cores().push(slot);
        Ok(Box::new(transport))
    }
}

/// Prepares the TLS library for the first handshake, on a separate thread: this takes 60 ms, once
/// per process.
fn warm_up() {
    let work = || {
        if let Err(error) = nacre_transport_tls::warm_up() {
            tracing::error!(%error, "TLS cannot be used");
        }
    };
    let thread = std::thread::Builder::new().name("tls-warm-up".into());
    // Without it the first handshake takes longer.
    let _ = thread.spawn(work);
}

impl Drop for TcpPlug {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.shared.stop, &1u64.to_ne_bytes());
        // The accepting thread drops the plug itself if it holds the target for the last time,
        // while it looks up a key. A thread must not join itself.
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
        self.shared.listeners().clear();
    }
}
