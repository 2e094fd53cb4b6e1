//! The simulated connection manager: listeners, connect requests and their events between the
//! devices of one simulated fabric.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

use super::device::{Parents, SimCq, SimDomain, SimQp, SimSrq};
use super::{
    ConnectFault, EventDescriptor, Fabric, FabricId, FabricQp, IdState, MAX_INLINE, PostedSend,
    QpState, SimChannel, State, call,
};
use crate::provider::{ConnectionManager, QpInit, QueuePair};
use crate::types::*;

/// Bytes of private data in a request. Received data is padded to this length, as on InfiniBand.
const REQUEST_DATA: usize = 56;
/// The same for an accept.
const ACCEPT_DATA: usize = 196;
/// The same for a reject.
const REJECT_DATA: usize = 148;

/// The reject reason "consumer reject" of the InfiniBand connection manager: a program refused the
/// request.
const REJECTED_BY_CONSUMER: i32 = 28;

pub(super) fn open(fabric: &Fabric) -> Result<Box<dyn ConnectionManager>, VerbsError> {
    let mut state = fabric.state.lock();
    let number = state.number();
    let channel = SimChannel::new().map_err(|e| call("rdma_create_event_channel", e))?;
    let signal = channel.signal.clone();
    state.channels.insert(number, channel);
    Ok(Box::new(SimCm {
        fabric: fabric.clone(),
        number,
        signal,
    }))
}

struct SimCm {
    fabric: Fabric,
    number: u32,
    signal: EventDescriptor,
}

fn padded(data: &[u8], len: usize) -> PrivateData {
    let mut bytes = PrivateData::new();
    bytes.extend(data.iter().copied().take(len));
    while bytes.len() < len {
        bytes.push(0);
    }
    bytes
}

/// Parameters from the peer's view: READ depths swapped, private data padded to `len`.
fn turned(params: &ConnParams, len: usize) -> ConnParams {
    ConnParams {
        private_data: padded(&params.private_data, len),
        responder_resources: params.initiator_depth,
        initiator_depth: params.responder_resources,
        ..*params
    }
}

impl State {
    fn id(&mut self, id: CmId) -> Result<&mut FabricId, VerbsError> {
        self.ids.get_mut(&id).ok_or(VerbsError::NoSuchId(id))
    }

    fn new_id(&mut self, id: FabricId) -> CmId {
        let number = CmId(self.number().into());
        self.ids.insert(number, id);
        number
    }

    fn device_of(&self, address: IpAddr) -> Option<DeviceId> {
        let has = |addresses: &[IpAddr]| addresses.contains(&address);
        let found = self.devices.iter().find(|device| has(&device.addresses));
        found.map(|device| device.id)
    }

    /// Ends one side of a connection: its queue pair flushes. Both sides get the events
    /// `Disconnected` and `TimewaitExit`.
    fn part(&mut self, id: CmId) {
        let Some(ended) = self.ids.get_mut(&id) else {
            return;
        };
        let (was, qp, peer) = (ended.state, ended.qp, ended.peer.take());
        ended.state = IdState::Ended;
        if let Some(qp) = qp {
            self.flush(qp);
        }
        if was != IdState::Connected {
            return;
        }
        self.cm_event(id, CmEventKind::Disconnected);
        self.cm_event(id, CmEventKind::TimewaitExit);
        if let Some(peer) = peer
            && let Some(other) = self.ids.get_mut(&peer)
            && other.state == IdState::Connected
        {
            other.state = IdState::Ended;
            other.peer = None;
            self.cm_event(peer, CmEventKind::Disconnected);
            self.cm_event(peer, CmEventKind::TimewaitExit);
        }
        self.progress_all();
    }

    fn ready(&mut self, qp: Option<u32>, peer: Option<u32>, read_depth: u8, rnr_retry: u8) {
        if let Some(qp) = qp.and_then(|qp| self.qps.get_mut(&qp)) {
            if qp.state == QpState::Init {
                qp.state = QpState::Ready;
            }
            qp.peer = peer;
            qp.read_depth = read_depth;
            qp.rnr_retry = rnr_retry;
        }
    }
}

impl ConnectionManager for SimCm {
    fn fd(&self) -> BorrowedFd<'_> {
        self.signal.fd()
    }

    fn next_event(&mut self) -> Result<Option<CmEvent>, VerbsError> {
        let mut state = self.fabric.state.lock();
        let event = state
            .channels
            .get_mut(&self.number)
            .and_then(SimChannel::pop);
        if let Some(CmEvent { id, kind }) = &event
            && *kind == CmEventKind::DeviceRemoval
            && let Some(device) = state.ids.get(id).and_then(|id| id.device)
        {
            state.silently_removed.retain(|known| known.id != device);
        }
        Ok(event)
    }

    fn listen(
        &mut self,
        mut address: SocketAddr,
        _backlog: i32,
        _options: CmOptions,
    ) -> Result<Listening, VerbsError> {
        let mut state = self.fabric.state.lock();
        let device = state.device_of(address.ip());
        if device.is_none() && !address.ip().is_unspecified() {
            return Err(call("rdma_bind_addr", Errno::NODEV));
        }
        let taken = |state: &State, wanted: SocketAddr| {
            let listens = |id: &FabricId| id.state == IdState::Listening && id.local == wanted;
            state.ids.values().any(listens)
        };
        if address.port() == 0 {
            let mut port = 40_000;
            while taken(&state, SocketAddr::new(address.ip(), port)) {
                port += 1;
            }
            address.set_port(port);
        } else if taken(&state, address) {
            return Err(call("rdma_bind_addr", Errno::ADDRINUSE));
        }
        let id = state.new_id(FabricId {
            channel: self.number,
            state: IdState::Listening,
            device,
            local: address,
            remote: None,
            peer: None,
            qp: None,
            params: ConnParams::default(),
        });
        Ok(Listening {
            id,
            address,
            device,
        })
    }

    fn resolve_address(
        &mut self,
        source: Option<IpAddr>,
        destination: SocketAddr,
        _timeout: Duration,
        _options: CmOptions,
    ) -> Result<CmId, VerbsError> {
        let mut state = self.fabric.state.lock();
        let device = match source {
            Some(source) => state.device_of(source),
            None => state
                .device_of(destination.ip())
                .or_else(|| state.devices.first().map(|device| device.id)),
        };
        let local = source.or_else(|| {
            let device = state.devices.iter().find(|known| Some(known.id) == device);
            device.and_then(|device| device.addresses.first().copied())
        });
        let local = SocketAddr::new(local.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)), 50_000);
        let id = state.new_id(FabricId {
            channel: self.number,
            state: IdState::Idle,
            device: None,
            local,
            remote: Some(destination),
            peer: None,
            qp: None,
            params: ConnParams::default(),
        });
        let fault = state.connect_faults.get(&destination.ip()).cloned();
        match (device, fault) {
            (_, Some(ConnectFault::Silent)) => {}
            (Some(device), fault) if fault != Some(ConnectFault::AddressError) => {
                let found = state.id(id)?;
                (found.device, found.state) = (Some(device), IdState::Resolved);
                state.cm_event(
                    id,
                    CmEventKind::AddressResolved {
                        device,
                        port: 1,
                        local,
                    },
                );
            }
            _ => state.cm_event(
                id,
                CmEventKind::AddressError {
                    status: -Errno::NODEV.raw_os_error(),
                },
            ),
        }
        Ok(id)
    }

    fn resolve_route(&mut self, id: CmId, _timeout: Duration) -> Result<(), VerbsError> {
        let mut state = self.fabric.state.lock();
        let found = state.id(id)?;
        if found.state != IdState::Resolved {
            return Err(call("rdma_resolve_route", Errno::INVAL));
        }
        let to = found.remote.map(|remote| remote.ip());
        let fault = to.and_then(|to| state.connect_faults.get(&to).cloned());
        match fault {
            Some(ConnectFault::Silent) => {}
            Some(ConnectFault::RouteError) => state.cm_event(
                id,
                CmEventKind::RouteError {
                    status: -Errno::HOSTUNREACH.raw_os_error(),
                },
            ),
            _ => {
                state.id(id)?.state = IdState::Routed;
                state.cm_event(id, CmEventKind::RouteResolved);
            }
        }
        Ok(())
    }

    fn create_qp(&mut self, id: CmId, init: QpInit<'_>) -> Result<Arc<dyn QueuePair>, VerbsError> {
        let invalid = || call("rdma_create_qp", Errno::INVAL);
        let domain = init
            .domain
            .as_any()
            .downcast_ref::<SimDomain>()
            .ok_or_else(invalid)?;
        let cq = |cq: &dyn std::any::Any| cq.downcast_ref::<SimCq>().map(|cq| cq.number);
        let send_cq = cq(init.send_cq.as_any()).ok_or_else(invalid)?;
        let recv_cq = cq(init.recv_cq.as_any()).ok_or_else(invalid)?;
        let srq = match init.srq {
            Some(srq) => {
                let srq = srq.as_any().downcast_ref::<SimSrq>().ok_or_else(invalid)?;
                Some(srq.number)
            }
            None => None,
        };
        let attributes = init.domain.attributes();
        let limit = |what, asked: u32, limit: u32| {
            if asked <= limit {
                return Ok(());
            }
            Err(VerbsError::Limit {
                what,
                asked: asked.into(),
                limit: limit.into(),
                device: attributes.name.clone(),
            })
        };
        let wanted = init.caps;
        limit(
            "work requests",
            wanted.max_send_wr.max(wanted.max_recv_wr),
            attributes.max_qp_wr,
        )?;
        limit(
            "scatter entries",
            wanted.max_send_sge.max(wanted.max_recv_sge),
            attributes.max_sge,
        )?;
        let mut state = self.fabric.state.lock();
        let on = state
            .qps
            .values()
            .filter(|qp| qp.device == domain.inner.device)
            .count();
        limit("queue pairs", on as u32 + 1, attributes.max_qp)?;
        state.device(domain.inner.device)?;
        let found = state.id(id)?;
        if found.device != Some(domain.inner.device) || found.qp.is_some() {
            return Err(invalid());
        }
        let own = state.number();
        state.id(id)?.qp = Some(own);
        let on = domain.inner.device;
        let mut devices = state.devices.iter_mut();
        let known = devices.find(|known| known.id == on).ok_or_else(invalid)?;
        let number = known.next_qp;
        known.next_qp += 1;
        state.qps.insert(
            own,
            FabricQp {
                device: on,
                number,
                domain: domain.inner.number,
                send_cq,
                recv_cq,
                srq,
                caps: QpCaps {
                    max_inline: wanted.max_inline.min(MAX_INLINE),
                    // Drivers grant the size of their queues, which seldom equals the request.
                    max_send_wr: (wanted.max_send_wr * 2).min(attributes.max_qp_wr),
                    ..wanted
                },
                state: QpState::Init,
                sq: std::collections::VecDeque::<PostedSend>::new(),
                rq: Default::default(),
                outstanding: 0,
                peer: None,
                read_depth: 0,
                rnr_retry: 7,
                rnr_attempts: 0,
                paused: false,
                injected: Vec::new(),
                begun: None,
            },
        );
        Ok(Arc::new(SimQp {
            domain: Arc::clone(&domain.inner),
            own,
            number,
            _parents: Parents {
                _cqs: [Arc::clone(init.send_cq), Arc::clone(init.recv_cq)],
                _srq: init.srq.map(Arc::clone),
            },
        }))
    }

    fn connect(&mut self, id: CmId, params: &ConnParams) -> Result<(), VerbsError> {
        let mut state = self.fabric.state.lock();
        let found = state.id(id)?;
        let Some(to) = found.remote.filter(|_| found.state == IdState::Routed) else {
            return Err(call("rdma_connect", Errno::INVAL));
        };
        found.state = IdState::Connecting;
        found.params = params.clone();
        let from = found.local;
        let listens = |listening: &FabricId| {
            listening.state == IdState::Listening
                && listening.local.port() == to.port()
                && (listening.local.ip() == to.ip() || listening.local.ip().is_unspecified())
        };
        let mut listeners = state.ids.iter().filter(|(_, id)| listens(id));
        let listener = listeners
            .next()
            .map(|(id, listening)| (*id, listening.channel));
        let port_up = |device: DeviceId| {
            state
                .device(device)
                .is_ok_and(|d| d.port == PortState::Active)
        };
        let device = state.device_of(to.ip()).filter(|device| port_up(*device));
        let event = match (state.connect_faults.get(&to.ip()), device, listener) {
            (Some(ConnectFault::Silent), ..) => return Ok(()),
            (Some(ConnectFault::ConnectError), ..) => CmEventKind::ConnectError {
                status: -Errno::IO.raw_os_error(),
            },
            (Some(ConnectFault::Unreachable), ..) | (_, None, _) => CmEventKind::Unreachable {
                status: -Errno::TIMEDOUT.raw_os_error(),
            },
            (_, Some(_), None) => CmEventKind::Rejected {
                // No listener: an invalid service id.
                status: 8,
                private_data: padded(&[], REJECT_DATA),
            },
            (_, Some(device), Some((listener, channel))) => {
                let theirs = turned(params, REQUEST_DATA);
                let new = state.new_id(FabricId {
                    channel,
                    state: IdState::Connecting,
                    device: Some(device),
                    local: to,
                    remote: Some(from),
                    peer: Some(id),
                    qp: None,
                    params: theirs.clone(),
                });
                state.id(id)?.peer = Some(new);
                state.cm_event(
                    new,
                    CmEventKind::ConnectRequest {
                        listener,
                        device,
                        port: 1,
                        local: to,
                        peer: from,
                        params: theirs,
                    },
                );
                return Ok(());
            }
        };
        state.cm_event(id, event);
        Ok(())
    }

    fn accept(&mut self, id: CmId, params: &ConnParams) -> Result<(), VerbsError> {
        let mut state = self.fabric.state.lock();
        let found = state.id(id)?;
        let (Some(peer), IdState::Connecting, Some(qp)) = (found.peer, found.state, found.qp)
        else {
            return Err(call("rdma_accept", Errno::INVAL));
        };
        let peer_params = found.params.clone();
        found.state = IdState::Connected;
        let Ok(other) = state.id(peer) else {
            state.part(id);
            return Ok(());
        };
        other.state = IdState::Connected;
        let other_qp = other.qp;
        let depth = |mine: u8, theirs: u8| mine.min(theirs);
        let ours = depth(params.initiator_depth, peer_params.initiator_depth);
        let theirs = depth(peer_params.responder_resources, params.responder_resources);
        state.ready(Some(qp), other_qp, ours, params.rnr_retry_count);
        state.ready(other_qp, Some(qp), theirs, peer_params.rnr_retry_count);
        let answer = turned(params, ACCEPT_DATA);
        state.cm_event(peer, CmEventKind::Established { params: answer });
        state.cm_event(
            id,
            CmEventKind::Established {
                params: ConnParams::default(),
            },
        );
        state.progress_all();
        Ok(())
    }

    fn gid_index(&self, id: CmId) -> Option<u16> {
        let state = self.fabric.state.lock();
        let connected = state.ids.get(&id)?.state == IdState::Connected;
        connected.then_some(0)
    }

    fn reject(&mut self, id: CmId, private_data: &[u8]) -> Result<(), VerbsError> {
        let mut state = self.fabric.state.lock();
        let found = state.id(id)?;
        found.state = IdState::Ended;
        if let Some(peer) = found.peer.take()
            && let Ok(other) = state.id(peer)
        {
            (other.state, other.peer) = (IdState::Ended, None);
            state.cm_event(
                peer,
                CmEventKind::Rejected {
                    status: REJECTED_BY_CONSUMER,
                    private_data: padded(private_data, REJECT_DATA),
                },
            );
        }
        Ok(())
    }

    fn disconnect(&mut self, id: CmId) -> Result<(), VerbsError> {
        let mut state = self.fabric.state.lock();
        state.id(id)?;
        state.part(id);
        Ok(())
    }

    fn destroy(&mut self, id: CmId) {
        let mut state = self.fabric.state.lock();
        let unanswered = state
            .ids
            .get(&id)
            .filter(|id| id.state == IdState::Connecting);
        if let Some(peer) = unanswered.and_then(|id| id.peer)
            && let Ok(other) = state.id(peer)
            && other.state == IdState::Connecting
        {
            (other.state, other.peer) = (IdState::Ended, None);
            state.cm_event(
                peer,
                CmEventKind::Rejected {
                    status: REJECTED_BY_CONSUMER,
                    private_data: padded(&[], REJECT_DATA),
                },
            );
        }
        state.part(id);
        state.ids.remove(&id);
        if let Some(channel) = state.channels.get_mut(&self.number) {
            channel.events.retain(|event| event.id != id);
            if channel.events.is_empty() {
                channel.signal.clear();
            }
        }
    }
}

impl Drop for SimCm {
    fn drop(&mut self) {
        let mine: Vec<CmId> = {
            let state = self.fabric.state.lock();
            let mine = state.ids.iter().filter(|(_, id)| id.channel == self.number);
            mine.map(|(id, _)| *id).collect()
        };
        for id in mine {
            self.destroy(id);
        }
        self.fabric.state.lock().channels.remove(&self.number);
    }
}
