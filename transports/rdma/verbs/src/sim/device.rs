//! The simulated devices, protection domains and queues: implementations of the traits in
//! [`crate::provider`] over the shared fabric state.

use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use nacre_hugepages::{HookError, RegionInfo, RegisterHook};
use parking_lot::Mutex;

use arrayvec::ArrayVec;
use rustix::io::Errno;

use super::{
    EventDescriptor, Fabric, FabricCq, FabricSrq, PostedRecv, PostedSend, QpState, Region, Sges,
    SimChannel, call,
};
use crate::provider::{CompletionQueue, Device, ProtectionDomain, QueuePair, SharedReceiveQueue};
use crate::types::*;

pub(super) fn open(fabric: &Fabric, id: DeviceId) -> Result<Arc<dyn Device>, VerbsError> {
    let state = fabric.state.lock();
    let mut known = state.devices.iter().chain(&state.silently_removed);
    let device = known.find(|known| known.id == id);
    let device = device.ok_or(VerbsError::NoSuchDevice(id))?;
    Ok(Arc::new(SimDevice {
        fabric: fabric.clone(),
        id,
        attributes: Arc::clone(&device.attributes),
        events: Arc::clone(&device.events),
        signal: device.events.lock().signal.clone(),
    }))
}

struct SimDevice {
    fabric: Fabric,
    id: DeviceId,
    attributes: Arc<DeviceAttributes>,
    events: Arc<Mutex<SimChannel<AsyncEvent>>>,
    signal: EventDescriptor,
}

impl Device for SimDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    fn port_state(&self, _port: u8) -> Result<PortState, VerbsError> {
        Ok(self.fabric.state.lock().device(self.id)?.port)
    }

    fn protection_domain(&self, access: Access) -> Result<Arc<dyn ProtectionDomain>, VerbsError> {
        let mut state = self.fabric.state.lock();
        state.device(self.id)?;
        let number = state.number();
        state.domains.insert(number, super::DomainState::default());
        Ok(Arc::new(SimDomain {
            inner: Arc::new(DomainInner {
                fabric: self.fabric.clone(),
                number,
                device: self.id,
                attributes: Arc::clone(&self.attributes),
                access,
            }),
        }))
    }

    fn async_fd(&self) -> BorrowedFd<'_> {
        self.signal.fd()
    }

    fn next_async_event(&self) -> Result<Option<AsyncEvent>, VerbsError> {
        let mut events = self.events.lock();
        match events.pop() {
            None if events.closed => Err(call("ibv_get_async_event", Errno::IO)),
            event => Ok(event),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

pub(super) struct DomainInner {
    pub fabric: Fabric,
    pub number: u32,
    pub device: DeviceId,
    attributes: Arc<DeviceAttributes>,
    access: Access,
}

impl RegisterHook for DomainInner {
    fn register(&self, region: &RegionInfo) -> Result<u64, HookError> {
        let limit = self.attributes.max_mr_size;
        if region.len() as u64 > limit {
            return Err(Box::new(VerbsError::Limit {
                what: "a memory region",
                asked: region.len() as u64,
                limit,
                device: self.attributes.name.clone(),
            }));
        }
        let mut state = self.fabric.state.lock();
        state.device(self.device)?;
        // lkey and rkey differ, so that code that confuses them fails.
        let (lkey, rkey) = (state.number() << 1, state.number() << 1 | 1);
        let known = Region {
            domain: self.number,
            address: region.as_ptr().expose_provenance() as u64,
            len: region.len() as u64,
            lkey,
            remote: self.access == Access::Remote,
        };
        state.regions.insert(rkey, known);
        if let Some(domain) = state.domains.get_mut(&self.number) {
            domain.registered.regions += 1;
            domain.registered.bytes += region.len() as u64;
            domain.registered.registered_total += 1;
        }
        Ok(MrKey { lkey, rkey }.to_bits())
    }

    fn unregister(&self, region: &RegionInfo, key: u64) {
        let mut state = self.fabric.state.lock();
        let known = state.regions.remove(&MrKey::from_bits(key).rkey);
        if let (Some(_), Some(domain)) = (known, state.domains.get_mut(&self.number)) {
            domain.registered.regions -= 1;
            domain.registered.bytes -= region.len() as u64;
        }
    }
}

pub(super) struct SimDomain {
    pub inner: Arc<DomainInner>,
}

impl ProtectionDomain for SimDomain {
    fn device(&self) -> DeviceId {
        self.inner.device
    }

    fn attributes(&self) -> &DeviceAttributes {
        &self.inner.attributes
    }

    fn access(&self) -> Access {
        self.inner.access
    }

    fn hook(&self) -> Arc<dyn RegisterHook> {
        Arc::clone(&self.inner) as Arc<dyn RegisterHook>
    }

    fn registrations(&self) -> Registrations {
        let state = self.inner.fabric.state.lock();
        let domain = state.domains.get(&self.inner.number);
        domain.map(|domain| domain.registered).unwrap_or_default()
    }

    fn completion_queue(&self, entries: u32) -> Result<Arc<dyn CompletionQueue>, VerbsError> {
        self.limit(
            "completion queue entries",
            entries,
            self.inner.attributes.max_cqe,
        )?;
        let mut state = self.inner.fabric.state.lock();
        state.device(self.inner.device)?;
        let number = state.number();
        let cq = FabricCq {
            device: self.inner.device,
            capacity: entries,
            entries: Default::default(),
            armed: false,
            dead: false,
            silent: false,
            signal: EventDescriptor::new().map_err(|e| call("ibv_create_comp_channel", e))?,
        };
        let signal = cq.signal.clone();
        state.cqs.insert(number, cq);
        Ok(Arc::new(SimCq {
            domain: Arc::clone(&self.inner),
            number,
            signal,
        }))
    }

    fn shared_receive_queue(
        &self,
        entries: u32,
        max_sge: u32,
        limit: u32,
    ) -> Result<Arc<dyn SharedReceiveQueue>, VerbsError> {
        let attributes = &self.inner.attributes;
        self.limit("shared receive queues", 1, attributes.max_srq)?;
        self.limit(
            "shared receive queue entries",
            entries,
            attributes.max_srq_wr,
        )?;
        self.limit("scatter entries", max_sge, attributes.max_srq_sge)?;
        let mut state = self.inner.fabric.state.lock();
        state.device(self.inner.device)?;
        let number = state.number();
        state.srqs.insert(
            number,
            FabricSrq {
                device: self.inner.device,
                posted: Default::default(),
                capacity: entries,
                limit,
            },
        );
        Ok(Arc::new(SimSrq {
            domain: Arc::clone(&self.inner),
            number,
        }))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl SimDomain {
    fn limit(&self, what: &'static str, asked: u32, limit: u32) -> Result<(), VerbsError> {
        if asked <= limit {
            return Ok(());
        }
        Err(VerbsError::Limit {
            what,
            asked: asked.into(),
            limit: limit.into(),
            device: self.inner.attributes.name.clone(),
        })
    }
}

pub(super) struct SimCq {
    domain: Arc<DomainInner>,
    pub number: u32,
    signal: EventDescriptor,
}

impl CompletionQueue for SimCq {
    fn poll(&self, into: &mut [WorkCompletion]) -> Result<usize, VerbsError> {
        let mut state = self.domain.fabric.state.lock();
        let gone = state.device(self.domain.device).is_err();
        let Some(cq) = state.cqs.get_mut(&self.number) else {
            return Ok(0);
        };
        if cq.dead && cq.silent {
            return Ok(0);
        }
        if cq.dead || (gone && cq.entries.is_empty()) {
            return Err(call("ibv_poll_cq", Errno::IO));
        }
        let count = into.len().min(cq.entries.len());
        for (place, entry) in into.iter_mut().zip(cq.entries.drain(..count)) {
            *place = entry;
        }
        Ok(count)
    }

    fn arm(&self) -> Result<(), VerbsError> {
        if let Some(cq) = self.domain.fabric.state.lock().cqs.get_mut(&self.number) {
            cq.armed = true;
        }
        Ok(())
    }

    fn disarm(&self) {
        if let Some(cq) = self.domain.fabric.state.lock().cqs.get_mut(&self.number) {
            cq.armed = false;
            cq.signal.clear();
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.signal.fd()
    }

    fn capacity(&self) -> u32 {
        let state = self.domain.fabric.state.lock();
        state.cqs.get(&self.number).map_or(0, |cq| cq.capacity)
    }

    fn number(&self) -> u32 {
        self.number
    }

    fn resize(&self, entries: u32) -> Result<(), VerbsError> {
        let attributes = &self.domain.attributes;
        if entries > attributes.max_cqe {
            return Err(VerbsError::Limit {
                what: "completion queue entries",
                asked: entries.into(),
                limit: attributes.max_cqe.into(),
                device: attributes.name.clone(),
            });
        }
        let mut state = self.domain.fabric.state.lock();
        if let Some(cq) = state.cqs.get_mut(&self.number) {
            if (entries as usize) < cq.entries.len() {
                return Err(call("ibv_resize_cq", Errno::INVAL));
            }
            cq.capacity = entries;
        }
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for SimCq {
    fn drop(&mut self) {
        self.domain.fabric.state.lock().cqs.remove(&self.number);
    }
}

pub(super) struct SimSrq {
    domain: Arc<DomainInner>,
    pub number: u32,
}

fn full(posted: usize) -> PostError {
    PostError {
        posted,
        source: Errno::NOMEM.into(),
    }
}

impl SharedReceiveQueue for SimSrq {
    unsafe fn post_recv(&self, requests: &[RecvWr], sges: &[Sge]) -> Result<(), PostError> {
        let mut state = self.domain.fabric.state.lock();
        let Some(srq) = state.srqs.get_mut(&self.number) else {
            return Err(full(0));
        };
        for (at, wr) in requests.iter().enumerate() {
            if srq.posted.len() >= srq.capacity as usize {
                return Err(full(at));
            }
            srq.posted.push_back(posted_recv(at, wr, sges)?);
        }
        state.progress_all();
        Ok(())
    }

    fn capacity(&self) -> u32 {
        let state = self.domain.fabric.state.lock();
        state.srqs.get(&self.number).map_or(0, |srq| srq.capacity)
    }

    fn number(&self) -> u32 {
        self.number
    }

    fn set_limit(&self, limit: u32) -> Result<(), VerbsError> {
        if let Some(srq) = self.domain.fabric.state.lock().srqs.get_mut(&self.number) {
            srq.limit = limit;
        }
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for SimSrq {
    fn drop(&mut self) {
        self.domain.fabric.state.lock().srqs.remove(&self.number);
    }
}

/// The scatter/gather entries of a request. Refuses more than 32 with EINVAL, as drivers do above
/// their limit.
fn range(first: u32, count: u32, sges: &[Sge]) -> Result<Sges, Errno> {
    let wanted = &sges[first as usize..(first + count) as usize];
    Sges::try_from(wanted).map_err(|_| Errno::INVAL)
}

fn posted_recv(at: usize, wr: &RecvWr, sges: &[Sge]) -> Result<PostedRecv, PostError> {
    let sges = range(wr.first_sge, wr.sges, sges).map_err(|errno| PostError {
        posted: at,
        source: errno.into(),
    })?;
    Ok(PostedRecv {
        wr_id: wr.wr_id,
        sges,
    })
}

pub(super) struct SimQp {
    pub domain: Arc<DomainInner>,
    /// `own`: its index in the fabric. `number`: the queue pair number that its device assigned.
    pub own: u32,
    pub number: u32,
    /// References that keep its completion queues and shared receive queue alive.
    pub _parents: Parents,
}

pub(super) struct Parents {
    pub _cqs: [Arc<dyn CompletionQueue>; 2],
    pub _srq: Option<Arc<dyn SharedReceiveQueue>>,
}

impl QueuePair for SimQp {
    fn number(&self) -> u32 {
        self.number
    }

    fn caps(&self) -> QpCaps {
        let state = self.domain.fabric.state.lock();
        state
            .qps
            .get(&self.own)
            .map(|qp| qp.caps)
            .unwrap_or_default()
    }

    unsafe fn post_send(&self, requests: &[SendWr], sges: &[Sge]) -> Result<(), PostError> {
        let mut state = self.domain.fabric.state.lock();
        for (at, wr) in requests.iter().enumerate() {
            let Some(qp) = state.qps.get_mut(&self.own) else {
                return Err(full(at));
            };
            let invalid = PostError {
                posted: at,
                source: Errno::INVAL.into(),
            };
            let Ok(sges) = range(wr.first_sge, wr.sges, sges) else {
                return Err(invalid);
            };
            if qp.outstanding >= qp.caps.max_send_wr {
                return Err(full(at));
            }
            if qp.state == QpState::Init || wr.sges > qp.caps.max_send_sge {
                return Err(invalid);
            }
            let mut inline = ArrayVec::new();
            if wr.inline {
                let bytes: u32 = sges.iter().map(|sge| sge.length).sum();
                if bytes > qp.caps.max_inline || matches!(wr.op, SendOp::Read { .. }) {
                    return Err(invalid);
                }
                for sge in &sges {
                    let from = std::ptr::with_exposed_provenance::<u8>(sge.address as usize);
                    // SAFETY: the posting code guarantees valid memory while the request is posted.
                    let bytes = unsafe { std::slice::from_raw_parts(from, sge.length as usize) };
                    inline.extend(bytes.iter().copied());
                }
            }
            let is_read = |wr: &SendWr| matches!(wr.op, SendOp::Read { .. });
            let reads = qp.sq.iter().filter(|posted| is_read(&posted.wr)).count();
            let refused = (is_read(wr) && reads >= usize::from(qp.read_depth))
                .then_some(WcStatus::RemoteInvalidRequest);
            qp.outstanding += 1;
            qp.sq.push_back(PostedSend {
                wr: *wr,
                sges,
                inline,
                refused,
            });
            state.inline_sends += u64::from(wr.inline);
        }
        state.progress_all();
        Ok(())
    }

    unsafe fn post_recv(&self, requests: &[RecvWr], sges: &[Sge]) -> Result<(), PostError> {
        let mut state = self.domain.fabric.state.lock();
        for (at, wr) in requests.iter().enumerate() {
            let Some(qp) = state.qps.get_mut(&self.own) else {
                return Err(full(at));
            };
            if qp.rq.len() >= qp.caps.max_recv_wr as usize {
                return Err(full(at));
            }
            qp.rq.push_back(posted_recv(at, wr, sges)?);
        }
        if state
            .qps
            .get(&self.own)
            .is_some_and(|qp| qp.state == QpState::Error)
        {
            state.flush(self.own);
        }
        state.progress_all();
        Ok(())
    }

    fn set_error(&self) -> Result<(), VerbsError> {
        self.domain.fabric.state.lock().flush(self.own);
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for SimQp {
    fn drop(&mut self) {
        let mut state = self.domain.fabric.state.lock();
        if let Some(qp) = state.qps.remove(&self.own) {
            for cq in [qp.send_cq, qp.recv_cq] {
                if let Some(cq) = state.cqs.get_mut(&cq) {
                    cq.entries.retain(|entry| entry.qp != self.number);
                }
            }
        }
        for id in state.ids.values_mut().filter(|id| id.qp == Some(self.own)) {
            id.qp = None;
        }
        state.progress_all();
    }
}
