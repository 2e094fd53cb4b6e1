//! The traits that both providers implement.
//!
//! Nothing here blocks for longer than a system call. What is shared by reference may be used by
//! several threads at once, as verbs objects may; the data path uses each from one thread only.
//!
//! An object keeps alive what it was made of: a queue pair its completion queues, shared receive
//! queue and domain, those the device. So the order in which they are dropped does not matter.

use std::any::Any;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use nacre_hugepages::RegisterHook;

use crate::types::*;

/// Where RDMA comes from.
pub trait Provider: Send + Sync {
    /// `verbs` or `simulated`.
    fn name(&self) -> &'static str;

    /// The devices that are there now. A device that appears is in it from the next call on. To be
    /// called now and then: that also lets go of devices that went away without an event, for which
    /// whoever removes them may wait.
    fn devices(&self) -> Result<Vec<Arc<dyn Device>>, VerbsError>;

    /// The device of an event.
    fn device(&self, id: DeviceId) -> Result<Arc<dyn Device>, VerbsError>;

    /// A connection manager with an event channel of its own.
    fn connection_manager(&self) -> Result<Box<dyn ConnectionManager>, VerbsError>;
}

/// One device, opened.
pub trait Device: Send + Sync {
    fn id(&self) -> DeviceId;

    fn attributes(&self) -> &DeviceAttributes;

    fn port_state(&self, port: u8) -> Result<PortState, VerbsError>;

    /// A new protection domain.
    fn protection_domain(&self, access: Access) -> Result<Arc<dyn ProtectionDomain>, VerbsError>;

    /// Readable when there is an asynchronous event.
    fn async_fd(&self) -> RawFd;

    /// The next asynchronous event, `None` when there is none now. For one reader.
    fn next_async_event(&self) -> Result<Option<AsyncEvent>, VerbsError>;

    /// For the provider itself.
    fn as_any(&self) -> &dyn Any;
}

/// Memory and queues of one device that belong together.
pub trait ProtectionDomain: Send + Sync {
    fn device(&self) -> DeviceId;

    fn attributes(&self) -> &DeviceAttributes;

    fn access(&self) -> Access;

    /// Registers arenas with this domain: to be given to `nacre_hugepages::register_all`. Its keys
    /// are [`MrKey::to_bits`].
    fn hook(&self) -> Arc<dyn RegisterHook>;

    fn registrations(&self) -> Registrations;

    /// A completion queue of at least `entries`, with a completion channel of its own.
    fn completion_queue(&self, entries: u32) -> Result<Arc<dyn CompletionQueue>, VerbsError>;

    /// A shared receive queue. `limit`: an [`AsyncEvent::SrqLimitReached`] is due when fewer
    /// requests are posted; 0: never.
    fn shared_receive_queue(
        &self,
        entries: u32,
        max_sge: u32,
        limit: u32,
    ) -> Result<Arc<dyn SharedReceiveQueue>, VerbsError>;

    /// For the provider itself.
    fn as_any(&self) -> &dyn Any;
}

/// Completions of the queue pairs that were made with it.
pub trait CompletionQueue: Send + Sync {
    /// Takes completions, oldest first, as many as there are and have room in `into`. An error is
    /// the end of the queue (overflow, device gone): every queue pair on it is to be given up.
    fn poll(&self, into: &mut [WorkCompletion]) -> Result<usize, VerbsError>;

    /// From now on the next completion makes [`CompletionQueue::fd`] readable. One that came before
    /// may not: poll again after arming.
    fn arm(&self) -> Result<(), VerbsError>;

    /// Takes and acknowledges the notifications that came, without blocking.
    fn disarm(&self);

    /// The completion channel.
    fn fd(&self) -> RawFd;

    fn capacity(&self) -> u32;

    /// As [`AsyncEvent::CqError`] tells it, of no other completion queue of the device.
    fn number(&self) -> u32;

    /// Makes room for at least `entries`; what is in it stays.
    fn resize(&self, entries: u32) -> Result<(), VerbsError>;

    /// For the provider itself.
    fn as_any(&self) -> &dyn Any;
}

/// Receive requests that several queue pairs take from.
pub trait SharedReceiveQueue: Send + Sync {
    /// Posts a batch, with one doorbell.
    ///
    /// # Safety
    /// The memory of every entry stays valid and is not touched by anybody else until the request
    /// has completed, or this queue and every queue pair made with it is dropped.
    unsafe fn post_recv(&self, requests: &[RecvWr], sges: &[Sge]) -> Result<(), PostError>;

    fn capacity(&self) -> u32;

    /// As [`AsyncEvent::SrqError`] tells it, of no other such queue of the device.
    fn number(&self) -> u32;

    /// As in [`ProtectionDomain::shared_receive_queue`]; the event is due once.
    fn set_limit(&self, limit: u32) -> Result<(), VerbsError>;

    /// For the provider itself.
    fn as_any(&self) -> &dyn Any;
}

/// One reliable-connected queue pair. Dropping it destroys it: the device touches no memory for it
/// from then on, and no completion of it follows.
pub trait QueuePair: Send + Sync {
    fn number(&self) -> u32;

    /// What it really has.
    fn caps(&self) -> QpCaps;

    /// Posts a chain, with one doorbell. In order, also the completions of it.
    ///
    /// # Safety
    /// The memory of every entry (but of inline requests) stays valid until the request has
    /// completed, or a later one of this queue has, or the queue pair is dropped; until then nobody
    /// writes to it, and of a READ's nobody reads it either.
    unsafe fn post_send(&self, requests: &[SendWr], sges: &[Sge]) -> Result<(), PostError>;

    /// Posts to the receive queue, of a queue pair that has one of its own.
    ///
    /// # Safety
    /// As [`SharedReceiveQueue::post_recv`].
    unsafe fn post_recv(&self, requests: &[RecvWr], sges: &[Sge]) -> Result<(), PostError>;

    /// Ends it: what is posted, and what is posted from now on, completes as flushed.
    fn set_error(&self) -> Result<(), VerbsError>;

    /// For the provider itself.
    fn as_any(&self) -> &dyn Any;
}

/// What a queue pair is made of.
#[derive(Clone, Copy)]
pub struct QpInit<'a> {
    pub domain: &'a Arc<dyn ProtectionDomain>,
    pub send_cq: &'a Arc<dyn CompletionQueue>,
    pub recv_cq: &'a Arc<dyn CompletionQueue>,
    pub srq: Option<&'a Arc<dyn SharedReceiveQueue>>,
    /// Wanted; the provider refuses what the device cannot do, but for `max_inline`, which it
    /// lowers to what there is.
    pub caps: QpCaps,
}

/// Connections: asynchronous, of one thread. What fails at once is an error of the call, what fails
/// later an event.
///
/// ```text
///   listen ─▶ ConnectRequest ─▶ create_qp, accept ─▶ Established ─▶ Disconnected ─▶ destroy
///                            └▶ reject                                    ▲
///   resolve_address ─▶ AddressResolved ─▶ resolve_route ─▶ RouteResolved ─┤
///        ─▶ create_qp, connect ─▶ Established | Rejected | Unreachable | ConnectError
/// ```
pub trait ConnectionManager: Send {
    /// Readable when there is an event.
    fn fd(&self) -> RawFd;

    /// The next event, `None` when there is none now.
    fn next_event(&mut self) -> Result<Option<CmEvent>, VerbsError>;

    /// Port 0: any free one.
    fn listen(
        &mut self,
        address: SocketAddr,
        backlog: i32,
        options: CmOptions,
    ) -> Result<Listening, VerbsError>;

    /// Begins a connection: finds the device for `destination`.
    fn resolve_address(
        &mut self,
        source: Option<IpAddr>,
        destination: SocketAddr,
        timeout: Duration,
        options: CmOptions,
    ) -> Result<CmId, VerbsError>;

    fn resolve_route(&mut self, id: CmId, timeout: Duration) -> Result<(), VerbsError>;

    /// Makes the queue pair of a connection whose device is known. Receives may be posted before
    /// connect or accept.
    fn create_qp(&mut self, id: CmId, init: QpInit<'_>) -> Result<Arc<dyn QueuePair>, VerbsError>;

    fn connect(&mut self, id: CmId, params: &ConnParams) -> Result<(), VerbsError>;

    fn accept(&mut self, id: CmId, params: &ConnParams) -> Result<(), VerbsError>;

    /// The place in its port's table of the GID that a connection goes by, once it is accepted or established; `None`: it
    /// has none, or it cannot be told.
    fn gid_index(&self, id: CmId) -> Option<u16>;

    /// Refuses a connect request. The id is still to be destroyed.
    fn reject(&mut self, id: CmId, private_data: &[u8]) -> Result<(), VerbsError>;

    /// Ends a connection in order; the queue pair flushes. The peer answers its event with the same
    /// call, or with `destroy`: only then (or after a long time) is there an event on this side.
    fn disconnect(&mut self, id: CmId) -> Result<(), VerbsError>;

    /// Forgets a connection or listener; no event of it follows. A queue pair of it that is still
    /// there stays valid until it is dropped, but can be used for nothing any more.
    fn destroy(&mut self, id: CmId);
}
