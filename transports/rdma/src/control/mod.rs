//! The management thread of the target side: handles the events of the connection manager and of
//! devices.
//!
//! ```text
//!   ConnectRequest ─▶ offered to a core ─▶ Ready ─▶ accept ─▶ Established ─▶ … ─▶ Done ─▶ destroy
//!                  └▶ reject
//! ```
//!
//! The core decides when a connection is over: the thread reports the cause to the core, which
//! drains the connection and sends `Done`. Devices are in [`devices`].

mod devices;

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nacre_nvmf::transport::{ListenerCounts, ListenerId};
use nacre_nvmf_wire::rdma::{RejectData, RejectStatus};
use nacre_reactor::{Clock, EventSet, Events, Interest, Repeats};
use nacre_transport_rdma_verbs::{
    CmEvent, CmEventKind, CmId, CmOptions, ConnectionManager, DeviceId, VerbsError,
};
use parking_lot::Mutex;
use zerocopy::IntoBytes;

use self::devices::Used;
use crate::accept::{self, ConnectRequest, Offered, Refused};
use crate::incident::Incident;
use crate::shared::{Ended, QueuePairInfo, QueuePairState, Shared, ToControl, ToCore};
use crate::stats::{ControlCounts, event_name};

/// Shortest interval between log lines about refusals of the same host for the same reason.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Interval of attempts to restore a listener that lost its device.
const RELISTEN: Duration = Duration::from_millis(500);

pub(crate) struct Listener {
    /// Address with the port in use.
    pub address: SocketAddr,
    pub options: CmOptions,
    /// Most in-capsule data of an I/O command, in bytes.
    pub in_capsule: u32,
    /// `None` while its device is gone: listening is retried every [`RELISTEN`].
    pub id: Option<CmId>,
    pub device: Option<DeviceId>,
    pub counts: ListenerCounts,
}

impl Offered {
    fn end(&mut self, id: CmId, ended: Ended) {
        self.info.state = QueuePairState::Ending;
        self.core.send(ToCore::Ended(id, ended));
    }
}

pub(crate) struct Control {
    pub cm: Box<dyn ConnectionManager>,
    pub listeners: HashMap<ListenerId, Listener>,
    conns: HashMap<CmId, Offered>,
    devices: HashMap<DeviceId, Used>,
    /// Devices whose loss was reported.
    gone: Vec<DeviceId>,
    /// Time of the last check for devices that were removed without an event.
    looked_at: Option<Instant>,
    /// Connection requests received while `held` is true.
    waiting: VecDeque<CmEvent>,
    /// New connections are held back.
    pub held: bool,
    pub counts: ControlCounts,
    /// Refusals by peer and cause, for the log.
    log_limit: Repeats<(IpAddr, String)>,
    watched: EventSet,
}

impl Control {
    pub(crate) fn new(shared: &Shared) -> Result<Self, VerbsError> {
        let call = |source| VerbsError::Call {
            call: "epoll_ctl",
            source,
        };
        let cm = shared.provider.connection_manager()?;
        let watched = EventSet::new().map_err(call)?;
        watched.add(cm.fd(), 0, Interest::READ).map_err(call)?;
        watched
            .add(&shared.mailbox.wake, 1, Interest::READ)
            .map_err(call)?;
        Ok(Self {
            cm,
            listeners: HashMap::new(),
            conns: HashMap::new(),
            devices: HashMap::new(),
            gone: Vec::new(),
            looked_at: None,
            waiting: VecDeque::new(),
            held: false,
            counts: ControlCounts::default(),
            log_limit: Repeats::new(LOG_INTERVAL),
            watched,
        })
    }

    pub(crate) fn connections(&self) -> usize {
        self.conns.len()
    }

    pub(crate) fn queue_pairs(&self) -> Vec<QueuePairInfo> {
        let mut all: Vec<QueuePairInfo> =
            self.conns.values().map(|conn| conn.info.clone()).collect();
        all.sort_by(|a, b| (a.number, &a.device).cmp(&(b.number, &b.device)));
        all
    }

    /// Options of a connection. `tos`: the listener's own type of service.
    pub(crate) fn options(shared: &Shared, tos: Option<u8>) -> CmOptions {
        CmOptions {
            tos: tos.unwrap_or(shared.config.tos),
            ack_timeout: shared.config.ack_timeout,
        }
    }

    /// Handles all pending events.
    pub(crate) fn turn(&mut self, shared: &Shared) {
        shared.mailbox.quiet();
        while let Some(message) = shared.mailbox.take() {
            self.message(shared, message);
        }
        loop {
            match self.cm.next_event() {
                Ok(Some(event)) => self.event(shared, event),
                Ok(None) => break,
                Err(error) => {
                    tracing::error!(%error, "the connection manager gives no events");
                    break;
                }
            }
        }
        while !self.held
            && let Some(event) = self.waiting.pop_front()
        {
            self.event(shared, event);
        }
        self.device_events(shared);
        self.relisten(shared);
        self.release_idle_devices(shared);
    }

    fn message(&mut self, shared: &Shared, message: ToControl) {
        match message {
            ToControl::Ready(id) => {
                let Some(offered) = self.conns.get_mut(&id) else {
                    return;
                };
                if let Err(error) = self.cm.accept(id, &offered.params) {
                    tracing::warn!(%error, "a connection could not be accepted");
                    let why = Ended::Failed("it could not be accepted");
                    offered.core.send(ToCore::Ended(id, why));
                } else {
                    offered.info.gid_index = self.cm.gid_index(id);
                }
            }
            ToControl::Refused(id, why) => {
                let Some(Offered { info, .. }) = self.withdraw(id) else {
                    return self.cm.destroy(id);
                };
                let refused = Refused(RejectStatus::NoResources, why);
                self.refuse(shared, id, info.listener, (info.local, info.peer), refused);
                self.forget_gone(shared);
            }
            ToControl::Done(id, endpoint) => {
                drop(endpoint);
                self.cm.destroy(id);
                if self.withdraw(id).is_some() {
                    self.forget_gone(shared);
                }
            }
        }
    }

    /// Forgets a connection that its core has released, and subtracts it from the core's load.
    fn withdraw(&mut self, id: CmId) -> Option<Offered> {
        let offered = self.conns.remove(&id)?;
        offered.core.load.remove(offered.kind);
        // The queues of the reservation may have failed and been replaced.
        let reserved = match offered.core.queues().get_mut(&offered.device) {
            Some((queues, used)) if queues.id() == offered.queues => {
                *used -= offered.completions;
                true
            }
            _ => false,
        };
        if !reserved {
            offered.core.send(ToCore::DeviceGone);
        }
        Some(offered)
    }

    fn event(&mut self, shared: &Shared, event: CmEvent) {
        let id = event.id;
        if self.held && matches!(event.kind, CmEventKind::ConnectRequest { .. }) {
            if self.waiting.len() < shared.config.max_qpairs as usize {
                self.waiting.push_back(event);
            } else {
                self.reject(id, RejectStatus::NoResources, "connections are held back");
            }
            return;
        }
        self.counts.event(&event.kind);
        let mut end = |ended| {
            if let Some(conn) = self.conns.get_mut(&id) {
                conn.end(id, ended);
            }
        };
        match event.kind {
            CmEventKind::ConnectRequest {
                listener,
                device,
                local,
                peer,
                ref params,
                ..
            } => {
                let by_id = |found: &&Listener| found.id == Some(listener);
                let known = self.listeners.iter().find(|(_, found)| by_id(found));
                let known = known.map(|(id, found)| (*id, found.in_capsule));
                let Some((listener, in_capsule)) = known else {
                    return self.reject(id, RejectStatus::NoResources, "no listener any more");
                };
                let request = ConnectRequest {
                    id,
                    listener,
                    in_capsule,
                    device,
                    local,
                    peer,
                    params,
                };
                let open = self.conns.len();
                let offered = self
                    .use_device(shared, device)
                    .map_err(Refused::from)
                    .and_then(|()| {
                        accept::offer(shared, &mut *self.cm, &mut self.counts, open, request)
                    });
                match offered {
                    Ok(offered) => {
                        self.conns.insert(id, offered);
                    }
                    // Not an NVMe host: `nacre doctor --peer` checks whether a target answers, or a
                    // scanner does.
                    Err(Refused(status, _)) if params.private_data.iter().all(|b| *b == 0) => {
                        if let Some(listener) = self.listeners.get_mut(&listener) {
                            listener.counts.refused += 1;
                        }
                        tracing::info!(%peer, %local, "an RDMA connection that says nothing of NVMe was answered: a probe");
                        self.reject(id, status, "a probe");
                    }
                    Err(refused) => self.refuse(shared, id, listener, (local, peer), refused),
                }
            }
            CmEventKind::Established { .. } => {
                if let Some(conn) = self.conns.get_mut(&id) {
                    conn.info.state = QueuePairState::Established;
                    conn.core.send(ToCore::Established(id));
                    if let Some(listener) = self.listeners.get_mut(&conn.info.listener) {
                        listener.counts.accepted += 1;
                    }
                }
            }
            CmEventKind::Disconnected => end(Ended::Peer),
            CmEventKind::DeviceRemoval => {
                end(Ended::DeviceRemoved);
                self.lose(shared, id, "its device was removed");
                shared.notify_changed();
                let device = self.conns.get(&id).map(|conn| conn.device);
                if let Some(device) = device {
                    self.device_gone(shared, device, "its device was removed");
                }
            }
            CmEventKind::AddressChange => {
                end(Ended::AddressChanged);
                self.lose(shared, id, "its address moved to another device");
                shared.notify_changed();
            }
            // The other side did not complete the connection.
            CmEventKind::ConnectError { .. }
            | CmEventKind::Unreachable { .. }
            | CmEventKind::Rejected { .. } => end(Ended::Failed(event_name(&event.kind))),
            // The queue pair's number may be reused: nothing here depends on it.
            CmEventKind::TimewaitExit => {}
            // Events of the connecting side.
            CmEventKind::AddressResolved { .. }
            | CmEventKind::AddressError { .. }
            | CmEventKind::RouteResolved
            | CmEventKind::RouteError { .. } => {}
            CmEventKind::Other { event, status } => {
                tracing::debug!(event, status, "an event that nothing depends on");
            }
        }
    }

    /// Refuses a host, and records the refusal for the operators of this target.
    fn refuse(
        &mut self,
        shared: &Shared,
        id: CmId,
        listener: ListenerId,
        (local, peer): (SocketAddr, SocketAddr),
        Refused(status, why): Refused,
    ) {
        if let Some(listener) = self.listeners.get_mut(&listener) {
            listener.counts.refused += 1;
        }
        self.reject(id, status, &why);
        let incident = Incident::Refused {
            local,
            peer,
            status,
            why,
        };
        // A refused host retries, often several times a second.
        let cause = (peer.ip(), incident.cause());
        if let Some(left_out) = self.log_limit.admit(cause, Clock::real().now()) {
            let times = left_out + 1;
            tracing::warn!(times, "{incident}");
        }
        shared.incidents.add(incident);
    }

    fn reject(&mut self, id: CmId, status: RejectStatus, why: &str) {
        self.counts.reject(status);
        if let Err(error) = self.cm.reject(id, RejectData::new(status).as_bytes()) {
            tracing::debug!(%error, why, "a host got no reason for its refusal");
        }
        self.cm.destroy(id);
    }

    /// Handles the loss of a listener's device or address.
    fn lose(&mut self, shared: &Shared, id: CmId, why: &'static str) {
        let mut listeners = self.listeners.values_mut();
        if let Some(lost) = listeners.find(|listener| listener.id == Some(id)) {
            tracing::warn!(address = %lost.address, "an RDMA listener is down, {why}; it comes back with it");
            lost.id = None;
            let device = lost.device.take();
            self.cm.destroy(id);
            if let Some(device) = device {
                self.note_gone(shared, device, why);
            }
        }
    }

    fn relisten(&mut self, shared: &Shared) {
        let lost = self
            .listeners
            .iter()
            .filter(|(_, listener)| listener.id.is_none());
        let place =
            |(id, listener): (&ListenerId, &Listener)| (*id, listener.address, listener.options);
        let lost: Vec<(ListenerId, SocketAddr, CmOptions)> = lost.map(place).collect();
        for (id, address, options) in lost {
            let Ok(listening) = self
                .cm
                .listen(address, shared.config.backlog.into(), options)
            else {
                continue;
            };
            if let Some(device) = listening.device
                && let Err(error) = self.use_listeners_device(shared, address, device)
            {
                tracing::debug!(%error, %address, "an RDMA listener waits for its device");
                self.cm.destroy(listening.id);
                continue;
            }
            tracing::info!(%address, "an RDMA listener is up again");
            shared.notify_changed();
            if let Some(listener) = self.listeners.get_mut(&id) {
                listener.id = Some(listening.id);
                listener.device = listening.device;
            }
        }
        self.forget_gone(shared);
    }

    fn patience(&self) -> Duration {
        let lost = |listener: &Listener| listener.id.is_none();
        if self.listeners.values().any(lost) {
            RELISTEN
        } else if self.idle_devices().next().is_some() {
            devices::LOOK
        } else {
            Duration::from_secs(3600)
        }
    }

    /// True if the thread has no work now.
    #[cfg(test)]
    pub(crate) fn is_quiet(&self) -> bool {
        let mut fds = [rustix::event::PollFd::new(
            &self.watched,
            rustix::event::PollFlags::IN,
        )];
        rustix::event::poll(&mut fds, Some(&rustix::event::Timespec::default())) == Ok(0)
    }
}

/// The function of the management thread.
pub(crate) fn run(shared: &Shared, control: &Mutex<Control>) {
    let lock = || control.lock();
    let Ok(watched) = rustix::io::dup(&lock().watched) else {
        tracing::error!("no descriptor for the RDMA management thread; raise `ulimit -n`");
        return;
    };
    let mut events = Events::with_capacity(16);
    while !shared.stopping.load(Ordering::Acquire) {
        let patience = {
            let mut control = lock();
            control.turn(shared);
            control.patience()
        };
        // Waits without the lock, on the descriptor of the same set.
        let mut fds = [rustix::event::PollFd::new(
            &watched,
            rustix::event::PollFlags::IN,
        )];
        let timeout = rustix::event::Timespec::try_from(patience).ok();
        let _ = rustix::event::poll(&mut fds, timeout.as_ref());
        let _ = lock().watched.wait(&mut events, Duration::ZERO);
    }
}
