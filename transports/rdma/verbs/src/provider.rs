//! The verbs and connection manager interface: traits that the `verbs` provider (rdma-core) and the
//! simulated provider implement. The RDMA target and host use devices only through these traits.
//!
//! No call blocks for longer than a system call. Several threads may use a shared object at once,
//! as verbs allow; the data path uses each object from one thread only.
//!
//! An object keeps its parents alive: a queue pair keeps its completion queues, shared receive
//! queue and domain, and those keep the device. So the order of dropping does not matter.

use std::any::Any;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use nacre_hugepages::RegisterHook;

use crate::types::*;

/// A source of RDMA devices.
pub trait Provider: Send + Sync {
    /// `verbs` or `simulated`.
    fn name(&self) -> &'static str;

    /// The devices that exist now. Call this periodically: only a call adds new devices, and
    /// releases devices that disappeared without an event. The removal of such a device may wait
    /// for this.
    fn devices(&self) -> Result<Vec<Arc<dyn Device>>, VerbsError>;

    /// The device with this id.
    fn device(&self, id: DeviceId) -> Result<Arc<dyn Device>, VerbsError>;

    /// Creates a connection manager with its own event channel. Fails if the kernel has no RDMA
    /// connection manager, or if this process may not open it.
    fn connection_manager(&self) -> Result<Box<dyn ConnectionManager>, VerbsError>;
}

/// One device, opened.
pub trait Device: Send + Sync {
    fn id(&self) -> DeviceId;

    fn attributes(&self) -> &DeviceAttributes;

    /// The present state of a port; the first port is 1.
    fn port_state(&self, port: u8) -> Result<PortState, VerbsError>;

    /// Creates a protection domain.
    fn protection_domain(&self, access: Access) -> Result<Arc<dyn ProtectionDomain>, VerbsError>;

    /// A descriptor that is readable when an asynchronous event is pending.
    fn async_fd(&self) -> BorrowedFd<'_>;

    /// The next asynchronous event, or `None` if none is pending. Call this from one thread only.
    fn next_async_event(&self) -> Result<Option<AsyncEvent>, VerbsError>;

    /// Lets the provider downcast to its own type.
    fn as_any(&self) -> &dyn Any;
}

/// A protection domain: memory regions and queues of one device that may be used together.
pub trait ProtectionDomain: Send + Sync {
    fn device(&self) -> DeviceId;

    fn attributes(&self) -> &DeviceAttributes;

    fn access(&self) -> Access;

    /// Registers arenas with this domain; pass it to `nacre_hugepages::register_all`. Its keys are
    /// [`MrKey::to_bits`].
    fn hook(&self) -> Arc<dyn RegisterHook>;

    /// The number and size of the domain's memory regions.
    fn registrations(&self) -> Registrations;

    /// Creates a completion queue of at least `entries`, with its own completion channel.
    fn completion_queue(&self, entries: u32) -> Result<Arc<dyn CompletionQueue>, VerbsError>;

    /// Creates a shared receive queue. The device raises [`AsyncEvent::SrqLimitReached`] when fewer
    /// than `limit` requests are posted; 0: never.
    fn shared_receive_queue(
        &self,
        entries: u32,
        max_sge: u32,
        limit: u32,
    ) -> Result<Arc<dyn SharedReceiveQueue>, VerbsError>;

    /// Lets the provider downcast to its own type.
    fn as_any(&self) -> &dyn Any;
}

/// A completion queue of one or more queue pairs, with its completion channel.
pub trait CompletionQueue: Send + Sync {
    /// Polls completions, oldest first, into `into`, and returns their number. After an error
    /// (overflow, removed device) the queue is unusable: close every queue pair on it.
    fn poll(&self, into: &mut [WorkCompletion]) -> Result<usize, VerbsError>;

    /// Arms the notification: the next completion makes [`CompletionQueue::fd`] readable. An
    /// earlier completion may not: poll again after arming.
    fn arm(&self) -> Result<(), VerbsError>;

    /// Consumes and acknowledges pending notifications, without blocking.
    fn disarm(&self);

    /// The descriptor of the completion channel.
    fn fd(&self) -> BorrowedFd<'_>;

    fn capacity(&self) -> u32;

    /// The number in [`AsyncEvent::CqError`], unique among the device's completion queues.
    fn number(&self) -> u32;

    /// Enlarges the queue to at least `entries`; queued completions stay.
    fn resize(&self, entries: u32) -> Result<(), VerbsError>;

    /// Lets the provider downcast to its own type.
    fn as_any(&self) -> &dyn Any;
}

/// Receive requests shared by several queue pairs.
pub trait SharedReceiveQueue: Send + Sync {
    /// Posts a batch, with one doorbell (`verbs`: one per 32 requests).
    ///
    /// # Safety
    ///
    /// The memory of every entry stays valid, and no other code touches it, until the request has
    /// completed, or this queue and every queue pair made with it is dropped.
    unsafe fn post_recv(&self, requests: &[RecvWr], sges: &[Sge]) -> Result<(), PostError>;

    fn capacity(&self) -> u32;

    /// The number in [`AsyncEvent::SrqError`], unique among the device's shared receive queues.
    fn number(&self) -> u32;

    /// Sets the limit, as in [`ProtectionDomain::shared_receive_queue`]. The event is raised once.
    fn set_limit(&self, limit: u32) -> Result<(), VerbsError>;

    /// Lets the provider downcast to its own type.
    fn as_any(&self) -> &dyn Any;
}

/// A reliable-connected queue pair. Dropping it destroys it: afterwards the device accesses no
/// memory for it, and no completion of it follows.
pub trait QueuePair: Send + Sync {
    fn number(&self) -> u32;

    /// The actual limits, at least as large as requested.
    fn caps(&self) -> QpCaps;

    /// Posts a batch, with one doorbell (`verbs`: one per 32 requests). The requests and their
    /// completions stay in order.
    ///
    /// # Safety
    ///
    /// The memory of every entry (except of inline requests) stays valid until the request has
    /// completed, or a later one of this queue has, or the queue pair is dropped. Until then no
    /// code writes to it, and no code reads the memory of a READ.
    unsafe fn post_send(&self, requests: &[SendWr], sges: &[Sge]) -> Result<(), PostError>;

    /// Posts to the queue pair's own receive queue.
    ///
    /// # Safety
    /// As [`SharedReceiveQueue::post_recv`].
    unsafe fn post_recv(&self, requests: &[RecvWr], sges: &[Sge]) -> Result<(), PostError>;

    /// Moves the queue pair to the error state: posted and future requests complete as flushed.
    fn set_error(&self) -> Result<(), VerbsError>;

    /// Lets the provider downcast to its own type.
    fn as_any(&self) -> &dyn Any;
}

/// Parameters of a new queue pair.
#[derive(Clone, Copy)]
pub struct QpInit<'a> {
    pub domain: &'a Arc<dyn ProtectionDomain>,
    pub send_cq: &'a Arc<dyn CompletionQueue>,
    pub recv_cq: &'a Arc<dyn CompletionQueue>,
    pub srq: Option<&'a Arc<dyn SharedReceiveQueue>>,
    /// The requested limits. The provider refuses limits that the device cannot meet, except that
    /// it lowers `max_inline` to the possible value.
    pub caps: QpCaps,
}

/// Manages connections asynchronously, for one thread. A call returns the errors that occur
/// immediately; later errors arrive as events.
///
/// ```text
///   listen ─▶ ConnectRequest ─▶ create_qp, accept ─▶ Established ─▶ Disconnected ─▶ destroy
///                            └▶ reject                                    ▲
///   resolve_address ─▶ AddressResolved ─▶ resolve_route ─▶ RouteResolved ─┤
///        ─▶ create_qp, connect ─▶ Established | Rejected | Unreachable | ConnectError
/// ```
pub trait ConnectionManager: Send {
    /// A descriptor that is readable when an event is pending.
    fn fd(&self) -> BorrowedFd<'_>;

    /// The next event, or `None` if none is pending.
    fn next_event(&mut self) -> Result<Option<CmEvent>, VerbsError>;

    /// Listens on an address; port 0 selects any free port.
    fn listen(
        &mut self,
        address: SocketAddr,
        backlog: i32,
        options: CmOptions,
    ) -> Result<Listening, VerbsError>;

    /// Starts a connection: finds the device for `destination`.
    fn resolve_address(
        &mut self,
        source: Option<IpAddr>,
        destination: SocketAddr,
        timeout: Duration,
        options: CmOptions,
    ) -> Result<CmId, VerbsError>;

    /// Finds the path to the destination, after [`CmEventKind::AddressResolved`].
    fn resolve_route(&mut self, id: CmId, timeout: Duration) -> Result<(), VerbsError>;

    /// Creates the queue pair of a connection whose device is known. Receives may be posted before
    /// connect or accept.
    fn create_qp(&mut self, id: CmId, init: QpInit<'_>) -> Result<Arc<dyn QueuePair>, VerbsError>;

    /// Sends a connect request with `params`, after [`CmEventKind::RouteResolved`].
    fn connect(&mut self, id: CmId, params: &ConnParams) -> Result<(), VerbsError>;

    /// Accepts a connect request. The connection is usable from [`CmEventKind::Established`].
    fn accept(&mut self, id: CmId, params: &ConnParams) -> Result<(), VerbsError>;

    /// The index of the connection's GID in its port's table, once the connection is accepted or
    /// established. `None` if it has no GID or the index is unknown.
    fn gid_index(&self, id: CmId) -> Option<u16>;

    /// Refuses a connect request. The caller must destroy the id.
    fn reject(&mut self, id: CmId, private_data: &[u8]) -> Result<(), VerbsError>;

    /// Disconnects; the queue pair flushes. The peer answers its event with the same call, or with
    /// `destroy`. Only then, or after a long time, this side gets an event.
    fn disconnect(&mut self, id: CmId) -> Result<(), VerbsError>;

    /// Destroys a connection or listener; no event of it follows. Its queue pair, if it still
    /// exists, stays valid until dropped but is unusable.
    fn destroy(&mut self, id: CmId);
}
