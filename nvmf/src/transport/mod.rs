//! The interface between the protocol and its transports. TCP, RDMA and loopback implement it.
//!
//! A *plug* (TCP, RDMA, loopback) has a control half, [`Plug`], shared by all threads, and one I/O
//! half per core, [`Transport`], that owns every connection of that core. The target drives the I/O
//! half once per turn, in this order:
//!
//! ```text
//! poll     bytes -> events (new connections, capsules, fetched data, closed connections)
//! fetch    host-to-controller data of a command, into a buffer     (R2T, or RDMA READ)
//! respond  controller-to-host data and completion   (C2HData/CapsuleResp, or WRITE + SEND)
//! flush    everything queued leaves in as few system calls or doorbells as possible
//! ```
//!
//! Payload crosses this interface as [`Buf`] handles, without a copy. The transport drops a handle
//! when its data is sent.
//!
//! The host side has the same shape, one object per queue pair: [`HostTransport`].

pub mod conformance;
mod load;
mod work_requests;

use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use nacre_bdev::Extents;
use nacre_hugepages::{Buf, MemoryView, Pool};
use nacre_nvmf_wire::cqe::Cqe;
use nacre_nvmf_wire::sqe::{SglDescriptor, Sqe};
use nacre_nvmf_wire::status::StatusCode;
use nacre_reactor::{EventSet, Idle, Interest, Nanos};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use load::{CoreLoad, QueueKind};
pub use work_requests::HostWorkRequests;

use crate::tls::SecureChannel;

/// A connection (one NVMe queue pair) of one transport on one core. `generation` differs from that
/// of earlier connections with the same index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConnId {
    pub index: u32,
    pub generation: u32,
}

/// Identifies a command on its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReqTag {
    /// The host's command identifier.
    pub cid: u16,
    /// The target's request index, below the queue's size. TCP uses it as transfer tag.
    pub index: u16,
}

/// Which transport a connection or listener uses (NVMe-oF TRTYPE).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TransportType {
    Rdma,
    Tcp,
    Loopback,
}

impl fmt::Display for TransportType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rdma => "RDMA",
            Self::Tcp => "TCP",
            Self::Loopback => "LOOPBACK",
        })
    }
}

/// Where a listener listens or a peer is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    Ip(SocketAddr),
    /// A named endpoint inside this process.
    Loopback(String),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(addr) => addr.fmt(f),
            Self::Loopback(name) => write!(f, "loopback:{name}"),
        }
    }
}

/// The buffers of one core. Admin and fabrics commands have a pool of their own, so that I/O data
/// cannot use up the buffers of a Connect.
#[derive(Clone)]
pub struct Pools {
    pub io: Pool,
    pub admin: Pool,
}

impl Pools {
    /// A buffer for an admin or fabrics command: from `admin`, or from `io` if `admin` has none
    /// free or none large enough.
    pub fn for_admin(&self, bytes: usize) -> Option<Buf> {
        let own = if bytes <= self.admin.max_len() {
            self.admin.acquire(bytes)
        } else {
            None
        };
        own.or_else(|| self.io.acquire(bytes))
    }
}

/// The limits and properties of a transport.
#[derive(Debug, Clone)]
pub struct TransportCaps {
    pub kind: TransportType,
    /// Largest in-capsule data of an I/O command, in bytes (IOCCSZ = (64 + this) / 16).
    pub in_capsule_bytes: u32,
    /// Largest in-capsule data of an admin or fabrics command, in bytes: at least 8192 on TCP.
    pub admin_in_capsule_bytes: u32,
    /// Largest transfer of one command, in bytes (MDTS).
    pub max_transfer_bytes: u32,
    /// Descriptors per keyed SGL (MSDBD).
    pub max_sgl_descriptors: u8,
    /// Hosts address their memory by keyed SGLs (RDMA); otherwise by transport SGLs.
    pub keyed_sgl: bool,
}

/// An event that a transport reports to the target.
#[derive(Debug)]
pub enum Event {
    /// A host connected; its first capsule has to be a fabrics Connect.
    Opened {
        conn: ConnId,
        listener: ListenerId,
        local: Address,
        peer: Address,
    },
    /// A command arrived, with its in-capsule data if it had any. `data` is `Some` if and only if
    /// the SGL is [`nacre_nvmf_wire::Sgl::InCapsule`] of non-zero length, with its range (offset
    /// and length) inside the capsule. `data` is exactly that range. A command that needs data and
    /// has an in-capsule SGL without `data` fails with SGL Offset Invalid.
    Capsule {
        conn: ConnId,
        sqe: Sqe,
        data: Option<Buf>,
    },
    /// A command whose in-capsule data had a wrong data digest. The target answers it with
    /// Transient Transport Error and does not execute it.
    CapsuleDamaged { conn: ConnId, sqe: Sqe },
    /// All data requested by [`Transport::fetch`] has arrived.
    Fetched {
        conn: ConnId,
        tag: ReqTag,
        data: Buf,
    },
    /// The data requested by [`Transport::fetch`] had a wrong data digest and was dropped. The
    /// target answers with Transient Transport Error.
    FetchDamaged { conn: ConnId, tag: ReqTag },
    /// The command's data pointer does not allow the requested [`Transport::fetch`]: the target
    /// answers with `status`.
    FetchRefused {
        conn: ConnId,
        tag: ReqTag,
        status: StatusCode,
    },
    /// The connection ended; no event of it follows. The transport has dropped every buffer that it
    /// held for it.
    Closed { conn: ConnId, why: Closed },
}

impl Event {
    /// The connection of the event.
    #[inline]
    pub fn conn(&self) -> ConnId {
        match self {
            Self::Opened { conn, .. }
            | Self::Capsule { conn, .. }
            | Self::CapsuleDamaged { conn, .. }
            | Self::Fetched { conn, .. }
            | Self::FetchDamaged { conn, .. }
            | Self::FetchRefused { conn, .. }
            | Self::Closed { conn, .. } => *conn,
        }
    }
}

/// Why a connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Closed {
    /// The peer closed it between two PDUs.
    Peer,
    /// The peer closed it in the middle of a PDU or of the handshake, or the network failed. The
    /// text is the cause.
    Broken(String),
    /// The peer violated the protocol. The text says how.
    Protocol(String),
    /// A time limit of the transport expired.
    TimedOut,
    /// The peer refused the connection. The text is the reason.
    Refused(String),
    /// This side closed it.
    Local,
}

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Peer => f.write_str("closed by the peer"),
            Self::Broken(why) | Self::Refused(why) => f.write_str(why),
            Self::Protocol(what) => write!(f, "protocol error: {what}"),
            Self::TimedOut => f.write_str("no answer in time"),
            Self::Local => f.write_str("closed by this side"),
        }
    }
}

/// A completed command, for the transport to send.
#[derive(Debug)]
pub struct Response {
    pub tag: ReqTag,
    pub cqe: Cqe,
    /// Controller-to-host data, sent before the completion if the status is success. Empty: none.
    pub data: Extents,
    /// The command's data pointer: where a transport that writes to the host's memory puts `data`.
    /// If it is invalid, the completion gets an error status.
    pub sgl: SglDescriptor,
    /// Controller-to-host data in the device's memory, instead of `data`. Only for connections
    /// whose [`Transport::takes_zero_copy`] is true.
    pub zero_copy: Option<MemoryView>,
}

/// The parameters of a connection's queue, from its accepted Connect.
#[derive(Debug, Clone, Copy)]
pub struct QueueParams {
    /// 0: the admin queue.
    pub qid: u16,
    /// Entries of the submission queue (1-based).
    pub entries: u16,
    /// SQ flow control is disabled: over TCP a successful read may have no completion capsule.
    pub flow_control_off: bool,
}

/// The reason why the target closes a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseWhy {
    /// After the queued responses are sent (Disconnect, a refused Connect).
    Drained,
    /// At once (keep-alive timeout, deleted subsystem, removed host).
    Now,
}

/// A list of events with a fixed capacity, which is reused every turn.
pub struct Events {
    items: Vec<Event>,
}

impl Events {
    pub fn with_capacity(capacity: usize) -> Self {
        Self {
            items: Vec::with_capacity(capacity),
        }
    }

    /// Number of events that still fit.
    pub fn room(&self) -> usize {
        self.items.capacity() - self.items.len()
    }

    pub fn has_room(&self) -> bool {
        self.items.len() < self.items.capacity()
    }

    /// # Panics
    /// When there is no room: ask [`Events::has_room`] first.
    pub fn push(&mut self, event: Event) {
        assert!(self.has_room(), "event list overrun");
        self.items.push(event);
    }

    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    pub fn len(&self) -> usize {
        self.items.len()
    }

    pub fn drain(&mut self) -> std::vec::Drain<'_, Event> {
        self.items.drain(..)
    }
}

/// The I/O half of a plug on one core: owns that core's connections.
///
/// Invariants: `Opened` is the first event of a connection and `Closed` the last. Each fetch ends
/// in one `Fetched`, `FetchDamaged` or `FetchRefused`, or in the connection's `Closed`. A call for
/// a connection that has ended is ignored (its `Closed` is on the way).
pub trait Transport {
    fn caps(&self) -> &TransportCaps;

    /// The capabilities of one connection. They differ if its listener has options of its own.
    fn caps_of(&self, conn: ConnId) -> &TransportCaps {
        let _ = conn;
        self.caps()
    }

    /// Receives, while `events` has room. Returns the number of new events. Without a buffer in
    /// `pools` for a capsule's data, the connection stops reading until a later turn.
    fn poll(&mut self, now: Nanos, pools: &Pools, events: &mut Events) -> usize;

    /// Requests `into.len()` bytes of the command's data from the host.
    fn fetch(&mut self, conn: ConnId, tag: ReqTag, sqe: &Sqe, into: Buf);

    /// Most bytes of host-to-controller data to request from one connection at a time. A value
    /// below the total of its commands lets the same few buffers serve them in turn, which suits
    /// the processor's caches. A larger command is requested alone.
    fn fetch_window(&self) -> usize {
        usize::MAX
    }

    /// The TLS channel of a connection. `None`: it does not use TLS.
    fn secure_channel(&self, conn: ConnId) -> Option<Arc<SecureChannel>> {
        let _ = conn;
        None
    }

    /// Queues the data and the completion of a command.
    fn respond(&mut self, conn: ConnId, response: Response);

    /// The Connect of this connection was accepted.
    fn established(&mut self, conn: ConnId, params: QueueParams);

    /// True if data of this connection may be sent from the device's own memory, where it can still
    /// change. False with a data digest. Called once, when the connection is established.
    fn takes_zero_copy(&self, conn: ConnId) -> bool {
        let _ = conn;
        false
    }

    /// Sets whether data of a capsule may stay in the transport's receive memory: the commands of
    /// this connection release it soon, whatever the host does. Initially false: a transport uses
    /// buffers of the core's pools. Transports that always or never keep data in place ignore this.
    fn set_in_place(&mut self, conn: ConnId, in_place: bool) {
        let _ = (conn, in_place);
    }

    fn close(&mut self, conn: ConnId, why: CloseWhy);

    /// Sends queued data.
    fn flush(&mut self, now: Nanos);

    /// Prepares for sleep; see [`nacre_reactor::Poller::arm`].
    fn arm(&mut self, now: Nanos) -> Idle;

    fn disarm(&mut self) {}

    /// Descriptors whose readability means work; fixed for the transport's life.
    fn wake_fds(&self) -> Vec<BorrowedFd<'_>>;

    /// Number of connections on this core.
    fn connections(&self) -> usize;
}

/// Identifies a listener for the life of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ListenerId(pub u64);

/// Why a listener could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("cannot listen on {address}: {source}; {remedy}")]
    Bind {
        address: String,
        source: std::io::Error,
        remedy: String,
    },
    #[error("{address} is already served by this process")]
    InUse { address: String },
    #[error("{address} is not an address of transport {kind}")]
    WrongKind {
        address: String,
        kind: TransportType,
    },
    #[error("more than {limit} listeners")]
    TooMany { limit: usize },
    #[error("{option}: {why}")]
    Option { option: &'static str, why: String },
}

/// Allowed numbers of entries of an I/O queue.
pub const QUEUE_DEPTHS: RangeInclusive<u16> = 2..=4096;

/// Most bytes of in-capsule data of a command; they are a multiple of 16.
pub const MAX_IN_CAPSULE_DATA: u32 = 1 << 20;

/// True if a transport supports this size of in-capsule data.
pub const fn is_in_capsule_size(bytes: u32) -> bool {
    bytes.is_multiple_of(16) && bytes <= MAX_IN_CAPSULE_DATA
}

/// What one listener does differently from its transport; `None`: as the transport.
///
/// The only declaration of these options: the parameter `options` of the RPC method that adds a
/// listener, and the keys of `[[nvmf.listener]]`, have these names, ranges and descriptions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
#[serde(default, deny_unknown_fields)]
pub struct ListenerOptions {
    /// Bytes of in-capsule data per command, a multiple of 16. TCP: at most max_io_size. RDMA: at
    /// most the size of the transport's receive buffers; nvmf_subsystem_get_listeners shows the
    /// result.
    #[serde(
        deserialize_with = "nacre_units::read::some_bytes",
        skip_serializing_if = "Option::is_none"
    )]
    #[cfg_attr(feature = "clap", arg(long, value_name = "BYTES"))]
    pub in_capsule_data_size: Option<u32>,
    /// Entries of an I/O queue, 2 to 4096.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "ENTRIES"))]
    pub max_queue_depth: Option<u16>,
    /// Type of service of outgoing packets (DSCP << 2).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "TOS"))]
    pub tos: Option<u8>,
    /// Seconds without a command from the host, after which its connections are closed; 0: never.
    /// Keep Alive is a command; an I/O command in progress stops the timer.
    #[serde(
        deserialize_with = "nacre_units::read::some_seconds",
        skip_serializing_if = "Option::is_none"
    )]
    #[cfg_attr(feature = "clap", arg(long, value_name = "SECONDS"))]
    pub idle_timeout_s: Option<u32>,
    /// RDMA only, shown in the discovery log: `infiniband`, `roce`, `roce_v2` (default) or `iwarp`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "FABRIC"))]
    pub fabric: Option<RdmaProviderType>,
    /// TCP only: `off` (default), `allow` or `require` TLS 1.3 with pre-shared keys. A host that
    /// has a psk must use TLS in any case.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "POLICY"))]
    pub tls: Option<TlsPolicy>,
}

/// Whether connections of a listener use TLS.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum TlsPolicy {
    /// Connections are in clear.
    #[default]
    Off,
    /// The first byte of a connection decides.
    Allow,
    /// Connections in clear are closed.
    Require,
}

impl ListenerOptions {
    /// Allowed range of each number. A transport may allow less: see [`Plug::listen`].
    pub const RANGES: &[(&str, u64, u64)] = &[
        ("in_capsule_data_size", 0, MAX_IN_CAPSULE_DATA as u64),
        (
            "max_queue_depth",
            *QUEUE_DEPTHS.start() as u64,
            *QUEUE_DEPTHS.end() as u64,
        ),
        ("tos", 0, 255),
        ("idle_timeout_s", 0, 86_400),
    ];

    pub fn tls(&self) -> TlsPolicy {
        self.tls.unwrap_or_default()
    }

    /// Refuses the options that need support of the transport (`tos`, `in_capsule_data_size`, `tls`
    /// other than `off`), for a transport that supports none of them.
    pub fn refuse(&self, kind: TransportType) -> Result<(), ListenError> {
        let option = match self {
            Self { tos: Some(_), .. } => "tos",
            Self {
                in_capsule_data_size: Some(_),
                ..
            } => "in_capsule_data_size",
            options if options.tls() != TlsPolicy::Off => "tls",
            _ => return Ok(()),
        };
        Err(ListenError::Option {
            option,
            why: format!("listeners of {kind} have none of their own"),
        })
    }
}

/// The RDMA provider type in the discovery log entries of a listener (RDMA_PRTYPE).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum RdmaProviderType {
    #[serde(rename = "infiniband")]
    #[cfg_attr(feature = "clap", value(name = "infiniband"))]
    InfiniBand,
    #[serde(rename = "roce")]
    #[cfg_attr(feature = "clap", value(name = "roce"))]
    RoceV1,
    #[default]
    #[serde(rename = "roce_v2")]
    #[cfg_attr(feature = "clap", value(name = "roce_v2"))]
    RoceV2,
    #[serde(rename = "iwarp")]
    #[cfg_attr(feature = "clap", value(name = "iwarp"))]
    Iwarp,
}

/// The error of an invalid transport option.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("{option} is {actual}, but must be {allowed}")]
    OutOfRange {
        option: &'static str,
        actual: u64,
        allowed: String,
    },
}

/// An allowed range as text: `from 2 to 4096`.
pub fn words<N: fmt::Display>(range: &RangeInclusive<N>) -> String {
    format!("from {} to {}", range.start(), range.end())
}

/// Counters of a plug over all cores, for metrics.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlugCounts {
    pub accepted: u64,
    /// Connections that ended, by cause.
    pub closed: Vec<(&'static str, u64)>,
    /// Connections that were refused before a core took them over, by cause.
    pub refused: Vec<(&'static str, u64)>,
    pub bytes_received: u64,
    pub bytes_sent: u64,
    /// Costly operations, by name.
    pub work: Vec<(&'static str, u64)>,
    /// `None`: the plug has no TLS.
    pub tls: Option<TlsCounts>,
}

/// Counts of the TLS of a plug's listeners.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsCounts {
    /// Handshakes by result, and failed ones by reason.
    pub handshakes: Vec<(&'static str, u64)>,
    pub failures: Vec<(&'static str, u64)>,
    /// Connections over TLS at present.
    pub connections: u64,
    pub key_updates_sent: u64,
    pub key_updates_received: u64,
    /// Number of keys that have sealed more records than AES-GCM allows.
    pub keys_past_limit: u64,
}

/// Connections to one listener since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ListenerCounts {
    /// Connections that a core took over.
    pub accepted: u64,
    /// Connections that were refused before that.
    pub refused: u64,
}

/// The control half of a plug.
pub trait Plug: Send + Sync {
    fn kind(&self) -> TransportType;

    /// `None`: there is no such listener, or this plug does not count.
    fn listener_counts(&self, _id: ListenerId) -> Option<ListenerCounts> {
        None
    }

    /// Largest in-capsule data of I/O queues of a listener, in bytes. `None`: there is no such
    /// listener, or this plug has one size for all.
    fn in_capsule_data_size(&self, _id: ListenerId) -> Option<u32> {
        None
    }

    /// Starts to accept on `address` (port 0: any free port). Returns the bound address. Accepted
    /// connections go to the least loaded core. A plug without options of listeners refuses them by
    /// [`ListenerOptions::refuse`].
    fn listen(
        &self,
        id: ListenerId,
        address: &Address,
        options: &ListenerOptions,
    ) -> Result<Address, ListenError>;

    /// Stops accepting; accepted connections stay.
    fn unlisten(&self, id: ListenerId);

    /// While `held`, new connections wait to be accepted. Ignored where connections cannot wait.
    fn hold(&self, held: bool) {
        let _ = held;
    }

    /// Counters since the plug's creation.
    fn counts(&self) -> PlugCounts {
        PlugCounts::default()
    }

    /// The I/O half for the calling core. `core` counts from 0; `wake` wakes that core's reactor.
    fn open(
        &self,
        core: usize,
        wake: Arc<dyn Fn() + Send + Sync>,
    ) -> std::io::Result<Box<dyn Transport>>;
}

/// A command of the host side.
#[derive(Debug)]
pub struct HostCommand {
    /// The submission queue entry; the transport fills in its data pointer.
    pub sqe: Sqe,
    /// Host-to-controller data.
    pub write: Option<Buf>,
    /// Where controller-to-host data goes; comes back with the completion.
    pub read: Option<Buf>,
}

/// An event that a transport reports to the host side.
#[derive(Debug)]
pub enum HostEvent {
    /// The transport's handshake is complete: commands may follow (Connect first).
    Ready,
    Completion {
        cqe: Cqe,
        /// The command's read buffer.
        read: Option<Buf>,
        /// Bytes of controller-to-host data that arrived.
        transferred: u32,
    },
    /// The connection ended. [`HostTransport::reclaim`] returns the commands without a completion.
    Closed(Closed),
}

/// One queue pair of the host side.
pub trait HostTransport {
    /// Queues a command. The caller must keep at most the queue's entries less one outstanding. A
    /// command after the end of the connection, of which the caller may not know yet, waits for
    /// [`HostTransport::reclaim`].
    fn submit(&mut self, command: HostCommand);

    /// Sends queued commands now rather than in the next [`HostTransport::poll`]: for a caller that
    /// polls other queues in between.
    fn flush(&mut self) {}

    /// Sends queued commands and receives, at most `limit` events.
    fn poll(&mut self, now: Nanos, events: &mut Vec<HostEvent>, limit: usize);

    /// Largest in-capsule data of the queue (from the controller's IOCCSZ, or the transport's
    /// default before that is known), in bytes.
    fn set_in_capsule_bytes(&mut self, bytes: u32);

    /// After `Closed` or [`HostTransport::close`]: returns the commands that will not complete, one
    /// by one, with their buffers. Of `sqe` only the command identifier is valid. Commands that are
    /// not reclaimed are dropped with the transport.
    fn reclaim(&mut self) -> Option<HostCommand>;

    fn close(&mut self);

    fn arm(&mut self, now: Nanos) -> Idle;

    fn wake_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Adds the descriptors that wake a sleeping core to `set`, before the first poll. A transport
    /// with an epoll set of its own uses `set` instead, because Linux limits the nesting of sets.
    fn watch_in(&mut self, set: &EventSet) -> std::io::Result<()> {
        match self.wake_fd() {
            Some(fd) => set.add(fd, 0, Interest::READ),
            None => Ok(()),
        }
    }

    /// The RDMA device of the queue pair; `None`: it has none, or is not connected.
    fn device(&self) -> Option<&str> {
        None
    }

    fn work_requests(&self) -> HostWorkRequests {
        HostWorkRequests::default()
    }

    /// Removes from `set` everything that [`HostTransport::watch_in`] added.
    fn leave(&mut self, set: &EventSet) {
        if let Some(fd) = self.wake_fd() {
            // The transport may have closed it, which took it out of the set.
            let _ = set.delete(fd);
        }
    }
}
