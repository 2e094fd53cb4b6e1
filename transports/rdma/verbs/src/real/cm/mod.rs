//! The connection manager over librdmacm. The transport's management thread uses it to listen,
//! connect and accept. Each `rdma_cm_id` has a [`CmId`] in its `context` field; events are copied
//! and acknowledged immediately.

mod marking;

use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_void;
use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::{Arc, Weak};
use std::time::Duration;

use nacre_transport_rdma_link::Roots;

use super::absence::Absence;
use super::cm_id::{EventChannel, RdmaCmId};
use super::domain::Domain;
use super::queue::{IbvCq, IbvQp, IbvSrq, Parts, within};
use super::{ProviderState, address, check_errno, set_nonblocking, would_block};
use crate::provider::{ConnectionManager, QpInit, QueuePair};
use crate::sys::Api;
use crate::sys::cm::*;
use crate::sys::verbs::*;
use crate::types::{
    CmEvent, CmEventKind, CmId, CmOptions, ConnParams, Listening, PrivateData, QpCaps, VerbsError,
};

/// The RNR NAK timer: how long a peer waits before it repeats a SEND that found no posted receive.
/// 14 means 1.28 ms (InfiniBand Architecture Specification, RNR NAK timer field encoding). The
/// library's default, 0, means 655 ms.
const MIN_RNR_TIMER: u8 = 14;

/// An event channel with its connections and listeners.
pub(super) struct Cm {
    provider: Arc<ProviderState>,
    channel: Arc<EventChannel>,
    /// Connections and listeners by the number of their [`CmId`].
    ids: HashMap<u64, Connection>,
    /// The most recent number given to an id.
    last: u64,
}

struct Connection {
    id: Arc<RdmaCmId>,
    qp: Weak<IbvQp>,
    /// Type of Service byte of a listener and of the connections that it accepts; 0: the default.
    tos: u8,
}

impl Cm {
    pub(super) fn new(provider: Arc<ProviderState>) -> Result<Self, VerbsError> {
        let api = provider.api;
        // SAFETY: the function has no arguments.
        let raw = unsafe { (api.rdma_create_event_channel)() };
        if raw.is_null() {
            let error = io::Error::last_os_error();
            return Err(match error.raw_os_error() {
                Some(
                    libc::ENOENT
                    | libc::ENODEV
                    | libc::ENXIO
                    | libc::ENOSYS
                    | libc::EACCES
                    | libc::EPERM,
                ) => Absence::of_cm(&Roots::real()).into_error(),
                _ => VerbsError::Call {
                    call: "rdma_create_event_channel",
                    source: error,
                },
            });
        }
        let channel = EventChannel::new(api, raw);
        // SAFETY: the channel was created above.
        set_nonblocking(unsafe { (*raw).fd })?;
        Ok(Self {
            provider,
            channel: Arc::new(channel),
            ids: HashMap::new(),
            last: 0,
        })
    }

    fn api(&self) -> &'static Api {
        self.channel.api
    }

    fn next_token(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Creates an id with these options. The caller adds it to the table with [`Cm::insert`].
    fn create(&mut self, options: CmOptions) -> Result<(CmId, Arc<RdmaCmId>), VerbsError> {
        let token = self.next_token();
        let mut raw = null_mut();
        // SAFETY: the channel is alive. The context is a number to the library.
        check_errno("rdma_create_id", unsafe {
            (self.api().rdma_create_id)(self.channel.raw, &mut raw, context_of(token), RDMA_PS_TCP)
        })?;
        let id = Arc::new(RdmaCmId::new(Arc::clone(&self.channel), raw));
        if options.tos != 0 {
            id.set(RDMA_OPTION_ID_TOS, options.tos)?;
        }
        if let Some(exponent) = options.ack_timeout {
            id.set(RDMA_OPTION_ID_ACK_TIMEOUT, exponent)?;
        }
        Ok((CmId(token), id))
    }

    fn insert(&mut self, token: CmId, id: Arc<RdmaCmId>, tos: u8) {
        let qp = Weak::new();
        self.ids.insert(token.0, Connection { id, qp, tos });
    }

    fn find(&self, id: CmId) -> Result<&Connection, VerbsError> {
        self.ids.get(&id.0).ok_or(VerbsError::NoSuchId(id))
    }

    /// Receives and acknowledges one event. The caller drops `drop_after` afterwards: its
    /// destructor locks the channel, as this function does.
    fn receive(
        &mut self,
        drop_after: &mut Option<Arc<RdmaCmId>>,
    ) -> Result<ReceivedEvent, VerbsError> {
        let channel = Arc::clone(&self.channel);
        let _turn = channel.take_turn();
        let mut event = null_mut();
        // SAFETY: the channel is alive and does not block.
        let result = unsafe { (channel.api.rdma_get_cm_event)(channel.raw, &mut event) };
        if result != 0 {
            let error = io::Error::last_os_error();
            return match error {
                error if would_block(&error) => Ok(ReceivedEvent::Nothing),
                source => Err(VerbsError::Call {
                    call: "rdma_get_cm_event",
                    source,
                }),
            };
        }
        // SAFETY: the call wrote an event, which is valid until acknowledged, as are its ids:
        // destroying them takes a turn.
        let copy = self.copy(unsafe { &*event }, drop_after);
        // SAFETY: received above, and acknowledged once.
        unsafe { (channel.api.rdma_ack_cm_event)(event) };
        Ok(copy.map_or(ReceivedEvent::Ignored, ReceivedEvent::Event))
    }

    /// Copies an event. Returns `None` for a destroyed id, and for a connect request whose listener
    /// was destroyed.
    fn copy(
        &mut self,
        event: &rdma_cm_event,
        drop_after: &mut Option<Arc<RdmaCmId>>,
    ) -> Option<CmEvent> {
        if event.event == RDMA_CM_EVENT_CONNECT_REQUEST {
            return self.request(event, drop_after);
        }
        // SAFETY: the id is alive until the event is acknowledged, and this manager set its
        // context.
        let (token, verbs, qp) = unsafe {
            let id = &*event.id;
            (id.context.addr() as u64, id.verbs, id.qp)
        };
        let id = CmId(token);
        if event.event == RDMA_CM_EVENT_DEVICE_REMOVAL {
            // Also for a destroyed id: queue pairs and domains may still use the device.
            self.provider.forget(verbs);
        }
        let connection = self.ids.get(&token)?;
        let status = event.status;
        let kind = match event.event {
            RDMA_CM_EVENT_ADDR_RESOLVED => match self.provider.device_of(verbs) {
                Some(device) => CmEventKind::AddressResolved {
                    device,
                    port: connection.id.port(),
                    local: connection.id.local()?,
                },
                // The device was removed in the meantime.
                None => CmEventKind::AddressError {
                    status: -libc::ENODEV,
                },
            },
            RDMA_CM_EVENT_ADDR_ERROR => CmEventKind::AddressError { status },
            RDMA_CM_EVENT_ROUTE_RESOLVED => CmEventKind::RouteResolved,
            RDMA_CM_EVENT_ROUTE_ERROR => CmEventKind::RouteError { status },
            RDMA_CM_EVENT_CONNECT_ERROR => CmEventKind::ConnectError { status },
            RDMA_CM_EVENT_UNREACHABLE => CmEventKind::Unreachable { status },
            RDMA_CM_EVENT_REJECTED => CmEventKind::Rejected {
                status,
                // SAFETY: events of connections carry connection parameters.
                private_data: unsafe { params(&event.param.conn) }.private_data,
            },
            RDMA_CM_EVENT_ESTABLISHED => {
                if !qp.is_null() {
                    self.shorten_rnr_timer(qp);
                }
                CmEventKind::Established {
                    // SAFETY: as above.
                    params: unsafe { params(&event.param.conn) },
                }
            }
            RDMA_CM_EVENT_DISCONNECTED => CmEventKind::Disconnected,
            RDMA_CM_EVENT_DEVICE_REMOVAL => CmEventKind::DeviceRemoval,
            RDMA_CM_EVENT_ADDR_CHANGE => CmEventKind::AddressChange,
            RDMA_CM_EVENT_TIMEWAIT_EXIT => CmEventKind::TimewaitExit,
            event => CmEventKind::Other { event, status },
        };
        Some(CmEvent { id, kind })
    }

    /// Copies a connect request, and takes ownership of its new id.
    fn request(
        &mut self,
        event: &rdma_cm_event,
        drop_after: &mut Option<Arc<RdmaCmId>>,
    ) -> Option<CmEvent> {
        let token = self.next_token();
        // SAFETY: both ids are alive until the event is acknowledged. The new one has the context
        // of its listener, and no other code knows it yet.
        let listener = unsafe {
            (*event.id).context = context_of(token);
            (*event.listen_id).context.addr() as u64
        };
        let id = Arc::new(RdmaCmId::new(Arc::clone(&self.channel), event.id));
        let device = self.provider.device_of(id.verbs());
        let tos = self.ids.get(&listener).map(|listener| listener.tos);
        let (Some(device), Some(local), Some(peer), Some(tos)) =
            (device, id.local(), id.peer(), tos)
        else {
            // The listener or the device is gone. Destroying the id rejects the request.
            *drop_after = Some(id);
            return None;
        };
        let kind = CmEventKind::ConnectRequest {
            listener: CmId(listener),
            device,
            port: id.port(),
            local,
            peer,
            // SAFETY: connect requests carry connection parameters.
            params: unsafe { params(&event.param.conn) },
        };
        self.insert(CmId(token), id, tos);
        Some(CmEvent {
            id: CmId(token),
            kind,
        })
    }

    /// Sets [`MIN_RNR_TIMER`]. Ignores an error: the peer then waits for the default time.
    fn shorten_rnr_timer(&self, qp: *mut ibv_qp) {
        let mut attr = ibv_qp_attr {
            min_rnr_timer: MIN_RNR_TIMER,
            ..Default::default()
        };
        // SAFETY: called in a turn, in which the queue pair is not destroyed, or by its holder.
        unsafe { (self.api().ibv_modify_qp)(qp, &mut attr, IBV_QP_MIN_RNR_TIMER) };
    }
}

/// The result of [`Cm::receive`].
#[expect(
    clippy::large_enum_variant,
    reason = "it lives on the stack, for one call"
)]
enum ReceivedEvent {
    /// No event is pending.
    Nothing,
    /// The event belongs to no id of this manager.
    Ignored,
    Event(CmEvent),
}

impl ConnectionManager for Cm {
    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is open as long as `self`, and so is its descriptor. Only the call
        // that created the channel writes the field.
        unsafe { BorrowedFd::borrow_raw((*self.channel.raw).fd) }
    }

    fn next_event(&mut self) -> Result<Option<CmEvent>, VerbsError> {
        loop {
            let mut drop_after = None;
            let received = self.receive(&mut drop_after)?;
            drop(drop_after);
            match received {
                ReceivedEvent::Nothing => return Ok(None),
                ReceivedEvent::Ignored => {}
                ReceivedEvent::Event(event) => return Ok(Some(event)),
            }
        }
    }

    fn listen(
        &mut self,
        address: SocketAddr,
        backlog: i32,
        options: CmOptions,
    ) -> Result<Listening, VerbsError> {
        let (token, id) = self.create(options)?;
        if address.is_ipv6() {
            // IPv4 needs its own listener, as with the TCP transport.
            id.set(RDMA_OPTION_ID_AFONLY, 1_i32)?;
        }
        let mut storage = address::to_storage(address);
        // SAFETY: the id is alive, the address is read during the call.
        check_errno("rdma_bind_addr", unsafe {
            (self.api().rdma_bind_addr)(id.raw, (&raw mut storage).cast())
        })?;
        // SAFETY: the id is alive and bound.
        check_errno("rdma_listen", unsafe {
            (self.api().rdma_listen)(id.raw, backlog)
        })?;
        let listening = Listening {
            id: token,
            address: id.local().unwrap_or(address),
            device: self.provider.device_of(id.verbs()),
        };
        self.insert(token, id, options.tos);
        Ok(listening)
    }

    fn resolve_address(
        &mut self,
        source: Option<IpAddr>,
        destination: SocketAddr,
        timeout: Duration,
        options: CmOptions,
    ) -> Result<CmId, VerbsError> {
        let (token, id) = self.create(options)?;
        let mut from = source.map(|ip| address::to_storage(SocketAddr::new(ip, 0)));
        let mut to = address::to_storage(destination);
        let from = from
            .as_mut()
            .map_or(null_mut(), |from| std::ptr::from_mut(from).cast());
        // Insert it before the call, so that every event finds its id.
        self.insert(token, Arc::clone(&id), 0);
        // SAFETY: the id is alive, the addresses are read during the call.
        let result = check_errno("rdma_resolve_addr", unsafe {
            (self.api().rdma_resolve_addr)(id.raw, from, (&raw mut to).cast(), millis(timeout))
        });
        if result.is_err() {
            self.ids.remove(&token.0);
        }
        result.map(|()| token)
    }

    fn resolve_route(&mut self, id: CmId, timeout: Duration) -> Result<(), VerbsError> {
        let raw = self.find(id)?.id.raw;
        // SAFETY: the id is alive.
        check_errno("rdma_resolve_route", unsafe {
            (self.api().rdma_resolve_route)(raw, millis(timeout))
        })
    }

    fn create_qp(&mut self, id: CmId, init: QpInit<'_>) -> Result<Arc<dyn QueuePair>, VerbsError> {
        let connection = self.find(id)?;
        let cm_id = Arc::clone(&connection.id);
        let foreign = || VerbsError::Call {
            call: "rdma_create_qp",
            source: io::Error::from_raw_os_error(libc::EINVAL),
        };
        let domain = init.domain.as_any().downcast_ref::<Domain>();
        let send_cq = init.send_cq.as_any().downcast_ref::<IbvCq>();
        let recv_cq = init.recv_cq.as_any().downcast_ref::<IbvCq>();
        let srq = init.srq.map(|srq| srq.as_any().downcast_ref::<IbvSrq>());
        let (Some(domain), Some(send_cq), Some(recv_cq)) = (domain, send_cq, recv_cq) else {
            return Err(foreign());
        };
        let srq = match srq {
            None => null_mut(),
            Some(Some(srq)) => srq.raw,
            Some(None) => return Err(foreign()),
        };
        let pd = Arc::clone(&domain.pd);
        // SAFETY: the id is alive.
        let has_qp = unsafe { !(*cm_id.raw).qp.is_null() };
        if has_qp || pd.device.context.raw != cm_id.verbs() {
            return Err(foreign());
        }
        let attributes = &pd.device.attributes;
        let caps = init.caps;
        for (what, asked, limit) in [
            (
                "send requests of a queue pair",
                caps.max_send_wr,
                attributes.max_qp_wr,
            ),
            (
                "receive requests of a queue pair",
                caps.max_recv_wr,
                attributes.max_qp_wr,
            ),
            (
                "entries of a send request",
                caps.max_send_sge,
                attributes.max_sge,
            ),
            (
                "entries of a receive request",
                caps.max_recv_sge,
                attributes.max_sge,
            ),
        ] {
            within(what, asked, limit, &pd.device)?;
        }
        // No device attribute reports the limit of inline data, so halve it until the call
        // succeeds.
        let mut inline = caps.max_inline;
        let granted = loop {
            let mut attr = ibv_qp_init_attr {
                qp_context: null_mut(),
                send_cq: send_cq.raw,
                recv_cq: recv_cq.raw,
                srq,
                cap: ibv_qp_cap {
                    max_send_wr: caps.max_send_wr,
                    max_recv_wr: caps.max_recv_wr,
                    max_send_sge: caps.max_send_sge,
                    max_recv_sge: caps.max_recv_sge,
                    max_inline_data: inline,
                },
                qp_type: IBV_QPT_RC,
                sq_sig_all: 0,
            };
            // SAFETY: all parts are alive and of one device (or the library refuses); the struct is
            // read and written during the call.
            let result = check_errno("rdma_create_qp", unsafe {
                (self.api().rdma_create_qp)(cm_id.raw, pd.raw, &mut attr)
            });
            match result {
                Ok(()) => break attr.cap,
                Err(error) if inline == 0 => return Err(error),
                Err(_) => inline /= 2,
            }
        };
        let caps = QpCaps {
            max_send_wr: granted.max_send_wr,
            max_recv_wr: granted.max_recv_wr,
            max_send_sge: granted.max_send_sge,
            max_recv_sge: granted.max_recv_sge,
            max_inline: granted.max_inline_data,
        };
        let mut others: Vec<Arc<dyn Any + Send + Sync>> = vec![
            Arc::new(Arc::clone(init.send_cq)),
            Arc::new(Arc::clone(init.recv_cq)),
        ];
        if let Some(srq) = init.srq {
            others.push(Arc::new(Arc::clone(srq)));
        }
        let parts = Parts {
            pd,
            _others: others,
        };
        let qp = match IbvQp::new(Arc::clone(&cm_id), caps, parts) {
            Ok(qp) => Arc::new(qp),
            Err(error) => {
                cm_id.destroy_qp();
                return Err(error);
            }
        };
        if let Some(connection) = self.ids.get_mut(&id.0) {
            connection.qp = Arc::downgrade(&qp);
        }
        Ok(qp)
    }

    fn connect(&mut self, id: CmId, params: &ConnParams) -> Result<(), VerbsError> {
        let raw = self.find(id)?.id.raw;
        let mut raw_params = conn_param(params);
        // SAFETY: the id is alive; the parameters and the data they point to are read during the
        // call.
        check_errno("rdma_connect", unsafe {
            (self.api().rdma_connect)(raw, &mut raw_params)
        })
    }

    fn accept(&mut self, id: CmId, params: &ConnParams) -> Result<(), VerbsError> {
        let connection = self.find(id)?;
        let mut raw_params = conn_param(params);
        let qp = connection.qp.upgrade();
        match &qp {
            Some(qp) if connection.tos != 0 => {
                self.accept_marked(&connection.id, qp.raw, connection.tos, &mut raw_params)?;
            }
            // SAFETY: as above.
            _ => check_errno("rdma_accept", unsafe {
                (self.api().rdma_accept)(connection.id.raw, &mut raw_params)
            })?,
        }
        if let Some(qp) = qp {
            self.shorten_rnr_timer(qp.raw);
        }
        Ok(())
    }

    fn gid_index(&self, id: CmId) -> Option<u16> {
        let qp = self.find(id).ok()?.qp.upgrade()?;
        let mut attr = ibv_qp_attr::default();
        let mut init = MaybeUninit::<ibv_qp_init_attr>::zeroed();
        // SAFETY: `qp` keeps the queue pair alive; the call writes to local structs.
        let result =
            unsafe { (self.api().ibv_query_qp)(qp.raw, &mut attr, IBV_QP_AV, init.as_mut_ptr()) };
        let global = result == 0 && attr.ah_attr.is_global != 0;
        global.then(|| attr.ah_attr.grh.sgid_index.into())
    }

    fn reject(&mut self, id: CmId, private_data: &[u8]) -> Result<(), VerbsError> {
        let raw = self.find(id)?.id.raw;
        let len = u8::try_from(private_data.len()).unwrap_or(u8::MAX);
        // SAFETY: the id is alive; the call reads at most `len` bytes of the data.
        check_errno("rdma_reject", unsafe {
            (self.api().rdma_reject)(raw, private_data.as_ptr().cast(), len)
        })
    }

    fn disconnect(&mut self, id: CmId) -> Result<(), VerbsError> {
        let raw = self.find(id)?.id.raw;
        // SAFETY: the id is alive.
        check_errno("rdma_disconnect", unsafe {
            (self.api().rdma_disconnect)(raw)
        })
    }

    fn destroy(&mut self, id: CmId) {
        let Some(connection) = self.ids.remove(&id.0) else {
            return;
        };
        if let Some(qp) = connection.qp.upgrade() {
            // The queue pair has a reference to the id, so the id is not destroyed yet: disconnect
            // explicitly, or the peer gets no event. If that fails (there is no connection), move
            // the queue pair to the error state. SAFETY: the id is alive.
            if unsafe { (self.api().rdma_disconnect)(connection.id.raw) } != 0 {
                let _ = qp.set_error();
            }
        }
    }
}

fn context_of(token: u64) -> *mut c_void {
    without_provenance_mut(token as usize)
}

fn millis(timeout: Duration) -> i32 {
    i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX)
}

fn conn_param(params: &ConnParams) -> rdma_conn_param {
    rdma_conn_param {
        private_data: params.private_data.as_ptr().cast(),
        private_data_len: params.private_data.len() as u8,
        responder_resources: params.responder_resources,
        initiator_depth: params.initiator_depth,
        flow_control: 1,
        retry_count: params.retry_count,
        rnr_retry_count: params.rnr_retry_count,
        // The library fills in both from the id's queue pair.
        srq: 0,
        qp_num: 0,
    }
}

/// The parameters of the peer's connect or accept, from this side's view: the kernel has swapped
/// the READ depths, so that they can be passed on unchanged (`rdma_get_cm_event(3)`).
///
/// # Safety
///
/// `raw` belongs to an event that is not acknowledged yet.
unsafe fn params(raw: &rdma_conn_param) -> ConnParams {
    let mut private_data = PrivateData::new();
    if !raw.private_data.is_null() {
        let len = usize::from(raw.private_data_len).min(private_data.capacity());
        // SAFETY: the event's private data has that many bytes.
        let bytes = unsafe { std::slice::from_raw_parts(raw.private_data.cast::<u8>(), len) };
        private_data
            .try_extend_from_slice(bytes)
            .expect("cut to the capacity");
    }
    ConnParams {
        private_data,
        // Already swapped by the kernel (`cm_format_req_event`).
        responder_resources: raw.responder_resources,
        initiator_depth: raw.initiator_depth,
        retry_count: raw.retry_count,
        rnr_retry_count: raw.rnr_retry_count,
    }
}
