//! The simulated [`Provider`]: RDMA devices, queue pairs and connections in one process, without
//! threads. Tests of the RDMA transport use it in place of hardware.
//!
//! ```text
//!   Fabric ── Provider ── Device a ─ domains, regions, queues ─┐
//!      │                  Device b ─ domains, regions, queues ─┤ bytes move when they are posted
//!      └ faults: any status on any request, any event on any connection at any moment
//! ```
//!
//! It has the visible behaviour of hardware: it checks keys and bounds, completes in order, flushes
//! later requests after an error, delays a sender whose receiver has no buffers, lets completion
//! queues overflow, and enforces the READ depth of an initiator. Tests inject the faults of a real
//! network through [`Fabric`].

mod cm;
mod device;
mod exec;

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use arrayvec::ArrayVec;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use crate::provider::{ConnectionManager, Device, Provider};
use crate::types::*;

/// A network of simulated devices, and the injection of its faults.
#[derive(Clone)]
pub struct Fabric {
    state: Arc<Mutex<State>>,
}

/// The injected failure of connection attempts to an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConnectFault {
    AddressError,
    RouteError,
    Unreachable,
    ConnectError,
    /// No event ever arrives.
    Silent,
}

/// The kind of request that an injected status applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    Send,
    Write,
    Read,
    Recv,
}

#[derive(Default)]
struct State {
    next: u32,
    devices: Vec<DeviceState>,
    /// Devices that were removed without an event. They stay until the next listing of the devices.
    silently_removed: Vec<DeviceState>,
    regions: HashMap<u32, Region>,
    domains: HashMap<u32, DomainState>,
    cqs: HashMap<u32, FabricCq>,
    srqs: HashMap<u32, FabricSrq>,
    /// Queue pairs by fabric-wide numbers: devices assign their numbers independently, so two queue
    /// pairs may have the same device number.
    qps: HashMap<u32, FabricQp>,
    ids: HashMap<CmId, FabricId>,
    channels: HashMap<u32, SimChannel<CmEvent>>,
    connect_faults: HashMap<IpAddr, ConnectFault>,
    /// Requests that were posted inline.
    inline_sends: u64,
    /// Vectors kept for reuse: the queue pairs of one round, and the bytes of one request.
    round: Vec<u32>,
    moving: Vec<u8>,
}

struct DeviceState {
    id: DeviceId,
    attributes: Arc<DeviceAttributes>,
    addresses: Vec<IpAddr>,
    port: PortState,
    events: Arc<Mutex<SimChannel<AsyncEvent>>>,
    /// The number of the device's next queue pair.
    next_qp: u32,
}

#[derive(Default)]
struct DomainState {
    registered: Registrations,
}

struct Region {
    domain: u32,
    address: u64,
    len: u64,
    lkey: u32,
    remote: bool,
}

struct FabricCq {
    device: DeviceId,
    capacity: u32,
    entries: VecDeque<WorkCompletion>,
    armed: bool,
    dead: bool,
    /// The queue failed, and a poll does not report the failure.
    silent: bool,
    signal: EventDescriptor,
}

/// Scatter/gather entries of one request. A fixed capacity avoids allocations.
type Sges = ArrayVec<Sge, 32>;

struct PostedRecv {
    wr_id: u64,
    sges: Sges,
}

struct FabricSrq {
    device: DeviceId,
    posted: VecDeque<PostedRecv>,
    capacity: u32,
    limit: u32,
}

struct PostedSend {
    wr: SendWr,
    sges: Sges,
    inline: ArrayVec<u8, { MAX_INLINE as usize }>,
    /// The status to complete with, if the request exceeded a limit when it was posted.
    refused: Option<WcStatus>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QpState {
    Init,
    Ready,
    Error,
}

struct Injected {
    target: Target,
    /// Number of requests of this kind that complete normally before the fault.
    skip: u32,
    status: WcStatus,
}

struct FabricQp {
    device: DeviceId,
    /// Queue pair number assigned by its device.
    number: u32,
    domain: u32,
    send_cq: u32,
    recv_cq: u32,
    srq: Option<u32>,
    caps: QpCaps,
    state: QpState,
    sq: VecDeque<PostedSend>,
    rq: VecDeque<PostedRecv>,
    /// Posted requests, signaled or not, that neither completed nor are covered by a completion.
    outstanding: u32,
    peer: Option<u32>,
    read_depth: u8,
    rnr_retry: u8,
    rnr_attempts: u32,
    paused: bool,
    injected: Vec<Injected>,
    /// The receive of a message in transfer.
    begun: Option<PostedRecv>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IdState {
    Listening,
    Idle,
    Resolved,
    Routed,
    /// Connect was sent or received; waits for the other side.
    Connecting,
    Connected,
    Ended,
}

struct FabricId {
    channel: u32,
    state: IdState,
    device: Option<DeviceId>,
    local: std::net::SocketAddr,
    remote: Option<std::net::SocketAddr>,
    peer: Option<CmId>,
    qp: Option<u32>,
    params: ConnParams,
}

/// A descriptor that is readable while events are pending.
#[derive(Clone)]
struct EventDescriptor {
    fd: Arc<OwnedFd>,
}

impl EventDescriptor {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            fd: Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?),
        })
    }

    fn set(&self) {
        // A full counter is readable already.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    fn clear(&self) {
        let _ = rustix::io::read(&self.fd, &mut [0u8; 8]);
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

struct SimChannel<E> {
    signal: EventDescriptor,
    events: VecDeque<E>,
    /// All senders are gone: the channel is readable, and reading it returns an error.
    closed: bool,
}

impl<E> SimChannel<E> {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            signal: EventDescriptor::new()?,
            events: VecDeque::new(),
            closed: false,
        })
    }

    fn close(&mut self) {
        self.closed = true;
        self.signal.set();
    }

    fn push(&mut self, event: E) {
        self.events.push_back(event);
        self.signal.set();
    }

    fn pop(&mut self) -> Option<E> {
        let event = self.events.pop_front();
        if self.events.is_empty() && !self.closed {
            self.signal.clear();
        }
        event
    }
}

fn call(call: &'static str, source: impl Into<std::io::Error>) -> VerbsError {
    VerbsError::Call {
        call,
        source: source.into(),
    }
}

impl State {
    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// The queue pair with this device number; of several, the oldest.
    fn numbered(&self, number: u32) -> Option<u32> {
        let found = self.qps.iter().filter(|(_, qp)| qp.number == number);
        found.map(|(own, _)| *own).min()
    }

    fn device(&self, id: DeviceId) -> Result<&DeviceState, VerbsError> {
        let found = self.devices.iter().find(|device| device.id == id);
        found.ok_or(VerbsError::NoSuchDevice(id))
    }

    fn device_event(&self, id: DeviceId, event: AsyncEvent) {
        if let Ok(device) = self.device(id) {
            device.events.lock().push(event);
        }
    }

    fn take_out(&mut self, device: DeviceId) {
        let on_it = self.qps.iter().filter(|(_, qp)| qp.device == device);
        let qps: Vec<u32> = on_it.map(|(own, _)| *own).collect();
        for qp in qps {
            self.flush(qp);
        }
        let on_it = self.ids.iter().filter(|(_, id)| id.device == Some(device));
        let mut ids: Vec<CmId> = on_it.map(|(id, _)| *id).collect();
        ids.sort_unstable();
        for id in ids {
            self.cm_event(id, CmEventKind::DeviceRemoval);
        }
        let gone = self.devices.extract_if(.., |known| known.id == device);
        self.silently_removed.extend(gone);
    }

    fn cm_event(&mut self, id: CmId, kind: CmEventKind) {
        if let Some(found) = self.ids.get(&id)
            && let Some(channel) = self.channels.get_mut(&found.channel)
        {
            channel.push(CmEvent { id, kind });
        }
    }
}

/// Attributes of a typical RoCE adapter, for [`Fabric::add_device`].
pub fn attributes(name: &str) -> DeviceAttributes {
    DeviceAttributes {
        name: name.into(),
        wire: Wire::Roce,
        node_guid: 0x5000_0000_0000_0000,
        sys_image_guid: 0x5000_0000_0000_0000,
        firmware: "simulated".into(),
        vendor: (0, 0),
        ports: 1,
        numa_node: None,
        max_qp: 65_536,
        max_qp_wr: 16_384,
        max_sge: 30,
        max_sge_rd: 30,
        max_cq: 65_536,
        max_cqe: 4 << 20,
        max_mr: 65_536,
        max_mr_size: u64::MAX,
        max_pd: 65_536,
        max_responder_resources: 16,
        max_initiator_depth: 16,
        max_srq: 65_536,
        max_srq_wr: 32_767,
        max_srq_sge: 30,
        send_with_invalidate: true,
        on_demand_paging: None,
        software: true,
    }
}

/// Largest inline data in bytes.
const MAX_INLINE: u32 = 220;

impl Fabric {
    #[expect(clippy::new_without_default, reason = "a network is made on purpose")]
    pub fn new() -> Self {
        Self {
            state: Arc::default(),
        }
    }

    pub fn provider(&self) -> Arc<dyn Provider> {
        Arc::new(self.clone())
    }

    /// Adds a device with these addresses.
    pub fn add_device(
        &self,
        attributes: DeviceAttributes,
        addresses: &[IpAddr],
    ) -> std::io::Result<DeviceId> {
        let mut state = self.state.lock();
        let id = DeviceId(state.number());
        state.devices.push(DeviceState {
            id,
            attributes: Arc::new(attributes),
            addresses: addresses.to_vec(),
            port: PortState::Active,
            events: Arc::new(Mutex::new(SimChannel::new()?)),
            // A distinct range per device, so that a number identifies a queue pair.
            next_qp: id.0 << 16,
        });
        Ok(id)
    }

    /// Sets the number of a device's next queue pair. Queue pairs of several devices can then have
    /// the same number, as on a real machine. A call with an ambiguous number means the oldest.
    pub fn number_from(&self, device: DeviceId, first: u32) {
        let mut state = self.state.lock();
        if let Some(known) = state.devices.iter_mut().find(|known| known.id == device) {
            known.next_qp = first;
        }
    }

    /// Removes a device: everything on it fails, and every connection and listener gets an event.
    pub fn remove_device(&self, device: DeviceId) {
        let mut state = self.state.lock();
        if let Ok(known) = state.device(device) {
            let mut events = known.events.lock();
            events.push(AsyncEvent::DeviceFatal);
            events.close();
        }
        state.take_out(device);
    }

    /// Removes a device without an asynchronous event, as rxe and siw do. Only connections and
    /// listeners get an event, [`CmEventKind::DeviceRemoval`].
    pub fn remove_device_silently(&self, device: DeviceId) {
        self.state.lock().take_out(device);
    }

    /// The number of requests that were posted inline, on all devices.
    pub fn inline_sends(&self) -> u64 {
        self.state.lock().inline_sends
    }

    /// Sets the state of a device's port, and raises [`AsyncEvent::PortActive`] or
    /// [`AsyncEvent::PortError`]. Messages pass only active ports.
    pub fn set_port(&self, device: DeviceId, port: PortState) {
        let mut state = self.state.lock();
        if let Some(known) = state.devices.iter_mut().find(|known| known.id == device) {
            known.port = port;
        }
        let event = match port {
            PortState::Active => AsyncEvent::PortActive { port: 1 },
            _ => AsyncEvent::PortError { port: 1 },
        };
        state.device_event(device, event);
        state.progress_all();
    }

    /// Replaces the addresses of a device, and raises [`AsyncEvent::GidChange`].
    pub fn set_addresses(&self, device: DeviceId, addresses: &[IpAddr]) {
        let mut state = self.state.lock();
        if let Some(known) = state.devices.iter_mut().find(|known| known.id == device) {
            known.addresses = addresses.to_vec();
        }
        state.device_event(device, AsyncEvent::GidChange { port: 1 });
    }

    /// Raises an asynchronous event.
    pub fn inject_async(&self, device: DeviceId, event: AsyncEvent) {
        self.state.lock().device_event(device, event);
    }

    /// Raises any event on a connection or listener.
    pub fn inject_event(&self, id: CmId, kind: CmEventKind) {
        self.state.lock().cm_event(id, kind);
    }

    /// Completes a request of this kind on queue pair `qp` with `status`, after `skip` others.
    pub fn inject_status(&self, qp: u32, target: Target, skip: u32, status: WcStatus) {
        let mut state = self.state.lock();
        if let Some(own) = state.numbered(qp)
            && let Some(qp) = state.qps.get_mut(&own)
        {
            qp.injected.push(Injected {
                target,
                skip,
                status,
            });
        }
        state.progress_all();
    }

    /// Moves a queue pair to the error state without an event, as a connection manager does for a
    /// refused connection before it reports the refusal.
    pub fn flush(&self, qp: u32) {
        let mut state = self.state.lock();
        if let Some(own) = state.numbered(qp) {
            state.flush(own);
        }
    }

    /// Makes the completion queue of a queue pair fail: its entries are lost, polling it returns an
    /// error, and its device reports it. With `silently`, polling finds nothing, as on devices that
    /// report the failure by the event only.
    pub fn break_completion_queue(&self, qp: u32, silently: bool) {
        let mut state = self.state.lock();
        let own = state.numbered(qp);
        let cq = own.and_then(|own| state.qps.get(&own)).map(|qp| qp.send_cq);
        if let Some(cq) = cq {
            state.break_cq(cq, silently);
        }
    }

    /// Starts the arrival of a message, which takes a shared receive. The receive completes when
    /// the queue pair has ended and [`Fabric::finish_message`] is called, like on devices that are
    /// slow to complete it.
    pub fn begin_message(&self, qp: u32) {
        let mut state = self.state.lock();
        let Some(own) = state.numbered(qp) else {
            return;
        };
        let srq = state.qps.get(&own).and_then(|qp| qp.srq);
        let recv = srq.and_then(|srq| state.srqs.get_mut(&srq)?.posted.pop_front());
        if let Some(qp) = state.qps.get_mut(&own) {
            qp.begun = recv;
        }
    }

    /// Completes the receive of [`Fabric::begin_message`].
    pub fn finish_message(&self, qp: u32) {
        let mut state = self.state.lock();
        if let Some(own) = state.numbered(qp) {
            state.finish_message(own);
        }
    }

    /// [`crate::SharedReceiveQueue::number`] of the shared receive queue of a queue pair.
    pub fn shared_receives_of(&self, qp: u32) -> Option<u32> {
        let state = self.state.lock();
        state.qps.get(&state.numbered(qp)?)?.srq
    }

    /// Stops or continues the send queue of a queue pair.
    pub fn pause(&self, qp: u32, paused: bool) {
        let mut state = self.state.lock();
        if let Some(own) = state.numbered(qp)
            && let Some(qp) = state.qps.get_mut(&own)
        {
            qp.paused = paused;
        }
        state.progress_all();
    }

    /// Sets the result of later connections to an address; `None`: they succeed.
    pub fn fault_connects(&self, to: IpAddr, fault: Option<ConnectFault>) {
        let mut state = self.state.lock();
        match fault {
            Some(fault) => state.connect_faults.insert(to, fault),
            None => state.connect_faults.remove(&to),
        };
    }

    /// Numbers of the existing queue pairs, oldest first.
    pub fn queue_pairs(&self) -> Vec<u32> {
        let state = self.state.lock();
        let mut all: Vec<(&u32, &FabricQp)> = state.qps.iter().collect();
        all.sort_unstable_by_key(|(own, _)| **own);
        all.into_iter().map(|(_, qp)| qp.number).collect()
    }

    /// The other end of a queue pair.
    pub fn peer_of(&self, qp: u32) -> Option<u32> {
        let state = self.state.lock();
        let peer = state.qps.get(&state.numbered(qp)?)?.peer?;
        Some(state.qps.get(&peer)?.number)
    }

    /// The connection of a queue pair.
    pub fn id_of(&self, qp: u32) -> Option<CmId> {
        let state = self.state.lock();
        let own = state.numbered(qp)?;
        let found = state.ids.iter().find(|(_, id)| id.qp == Some(own));
        found.map(|(id, _)| *id)
    }

    /// Number of existing completion queues, of all devices.
    pub fn completion_queues(&self) -> usize {
        self.state.lock().cqs.len()
    }

    /// Receives posted to shared receive queues.
    pub fn posted_receives(&self) -> usize {
        self.state
            .lock()
            .srqs
            .values()
            .map(|srq| srq.posted.len())
            .sum()
    }

    /// Connections and listeners that are not destroyed.
    pub fn ids(&self) -> Vec<CmId> {
        let mut ids: Vec<CmId> = self.state.lock().ids.keys().copied().collect();
        ids.sort_unstable();
        ids
    }
}

impl Provider for Fabric {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn devices(&self) -> Result<Vec<Arc<dyn Device>>, VerbsError> {
        let mut state = self.state.lock();
        state.silently_removed.clear();
        let ids: Vec<DeviceId> = state.devices.iter().map(|device| device.id).collect();
        drop(state);
        ids.into_iter()
            .map(|id| Provider::device(self, id))
            .collect()
    }

    fn device(&self, id: DeviceId) -> Result<Arc<dyn Device>, VerbsError> {
        device::open(self, id)
    }

    fn connection_manager(&self) -> Result<Box<dyn ConnectionManager>, VerbsError> {
        cm::open(self)
    }
}
