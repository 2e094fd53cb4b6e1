//! Completion queues, shared receive queues and queue pairs: the verbs calls of the data path.
//!
//! Post and poll use the function pointers in `ibv_context`, like the inline functions of
//! `verbs.h`: they call the device's driver library directly.

use std::any::Any;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::cm_id::RdmaCmId;
use super::context::OpenDevice;
use super::pd::Pd;
use super::{check, non_null, set_nonblocking, work};
use crate::provider::{CompletionQueue, QueuePair, SharedReceiveQueue};
use crate::sys::verbs::*;
use crate::types::{PostError, QpCaps, RecvWr, SendWr, Sge, VerbsError, WorkCompletion};

/// A completion queue (`ibv_cq`) with its own completion channel.
pub(super) struct IbvCq {
    device: Arc<OpenDevice>,
    pub(super) raw: *mut ibv_cq,
    channel: *mut ibv_comp_channel,
    poll: PollCq,
    notify: ReqNotifyCq,
    capacity: AtomicU32,
}

// SAFETY: completion queues and channels may be used by any thread: verbs are thread-safe.
unsafe impl Send for IbvCq {}
// SAFETY: as above.
unsafe impl Sync for IbvCq {}

impl IbvCq {
    pub(super) fn new(device: Arc<OpenDevice>, entries: u32) -> Result<Self, VerbsError> {
        let attributes = &device.attributes;
        within(
            "completion queue entries",
            entries,
            attributes.max_cqe,
            &device,
        )?;
        let (api, context) = (device.api, device.context.raw);
        // SAFETY: the context is open, and its function table never changes.
        let ops = unsafe { &(*context).ops };
        let (poll, notify) = (
            supported(ops.poll_cq, "ibv_poll_cq")?,
            supported(ops.req_notify_cq, "ibv_req_notify_cq")?,
        );
        // SAFETY: as above.
        let channel = non_null("ibv_create_comp_channel", unsafe {
            (api.ibv_create_comp_channel)(context)
        })?;
        let destroy_channel = |error| {
            // SAFETY: created above, and no completion queue uses it.
            unsafe { (api.ibv_destroy_comp_channel)(channel) };
            error
        };
        // SAFETY: the channel is alive.
        set_nonblocking(unsafe { (*channel).fd }).map_err(destroy_channel)?;
        let vector = device.completion_vector();
        // SAFETY: context and channel are alive; the vector is below the context's number of them.
        let raw = unsafe {
            (api.ibv_create_cq)(context, entries.max(1) as i32, null_mut(), channel, vector)
        };
        let raw = non_null("ibv_create_cq", raw).map_err(destroy_channel)?;
        // SAFETY: created above, and no other thread has it yet.
        let capacity = AtomicU32::new(unsafe { (*raw).cqe } as u32);
        Ok(Self {
            device,
            raw,
            channel,
            poll,
            notify,
            capacity,
        })
    }
}

impl CompletionQueue for IbvCq {
    #[inline]
    fn poll(&self, into: &mut [WorkCompletion]) -> Result<usize, VerbsError> {
        let mut raw = [const { MaybeUninit::<ibv_wc>::uninit() }; work::POLL];
        let mut taken = 0;
        while taken < into.len() {
            let want = (into.len() - taken).min(work::POLL);
            // SAFETY: the queue is alive, and the array has at least `want` entries.
            let got = unsafe { (self.poll)(self.raw, want as i32, raw.as_mut_ptr().cast()) };
            if got < 0 {
                check("ibv_poll_cq", got)?;
            }
            let got = got as usize;
            for (into, raw) in into[taken..].iter_mut().zip(&raw[..got]) {
                // SAFETY: the driver initialised `got` entries.
                *into = work::completion(unsafe { raw.assume_init_ref() });
            }
            taken += got;
            if got < want {
                break;
            }
        }
        Ok(taken)
    }

    fn arm(&self) -> Result<(), VerbsError> {
        // SAFETY: the queue is alive.
        check("ibv_req_notify_cq", unsafe { (self.notify)(self.raw, 0) })
    }

    fn disarm(&self) {
        let mut events = 0;
        let (mut cq, mut context) = (null_mut(), null_mut());
        // SAFETY: the channel is alive and does not block; the call writes to local variables.
        while unsafe {
            (self.device.api.ibv_get_cq_event)(self.channel, &mut cq, &mut context) == 0
        } {
            events += 1;
        }
        if events > 0 {
            // SAFETY: the loop received `events` events, all of this queue: the channel serves no
            // other.
            unsafe { (self.device.api.ibv_ack_cq_events)(self.raw, events) };
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is open as long as `self`, and so is its descriptor. Only the call
        // that created the channel writes the field.
        unsafe { BorrowedFd::borrow_raw((*self.channel).fd) }
    }

    fn capacity(&self) -> u32 {
        self.capacity.load(Ordering::Relaxed)
    }

    fn number(&self) -> u32 {
        // SAFETY: the queue is alive; the field is written by its making only.
        unsafe { (*self.raw).handle }
    }

    fn resize(&self, entries: u32) -> Result<(), VerbsError> {
        let limit = self.device.attributes.max_cqe;
        within("completion queue entries", entries, limit, &self.device)?;
        // SAFETY: the queue is alive.
        check("ibv_resize_cq", unsafe {
            (self.device.api.ibv_resize_cq)(self.raw, entries as i32)
        })?;
        // The device may have granted more. The library's field is not read, because another thread
        // may write it in a resize.
        self.capacity.store(entries, Ordering::Relaxed);
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for IbvCq {
    fn drop(&mut self) {
        // Destroying waits for unacknowledged events; `disarm` leaves none.
        // SAFETY: every queue pair has a reference to its queue, so none exists any more. The
        // channel serves no other queue.
        unsafe {
            (self.device.api.ibv_destroy_cq)(self.raw);
            (self.device.api.ibv_destroy_comp_channel)(self.channel);
        }
    }
}

/// A shared receive queue (`ibv_srq`).
pub(super) struct IbvSrq {
    pd: Arc<Pd>,
    pub(super) raw: *mut ibv_srq,
    post: PostSrqRecv,
    capacity: u32,
}

// SAFETY: shared receive queues may be used by any thread: verbs are thread-safe.
unsafe impl Send for IbvSrq {}
// SAFETY: as above.
unsafe impl Sync for IbvSrq {}

impl IbvSrq {
    pub(super) fn new(
        pd: Arc<Pd>,
        entries: u32,
        max_sge: u32,
        limit: u32,
    ) -> Result<Self, VerbsError> {
        let device = &pd.device;
        let attributes = &device.attributes;
        within("shared receive queues", 1, attributes.max_srq, device)?;
        within(
            "shared receive queue entries",
            entries,
            attributes.max_srq_wr,
            device,
        )?;
        within(
            "entries of a shared receive request",
            max_sge,
            attributes.max_srq_sge,
            device,
        )?;
        // SAFETY: the context is open, and its function table never changes.
        let ops = unsafe { &(*device.context.raw).ops };
        let post = supported(ops.post_srq_recv, "ibv_post_srq_recv")?;
        let mut init = ibv_srq_init_attr {
            srq_context: null_mut(),
            attr: ibv_srq_attr {
                max_wr: entries.max(1),
                max_sge: max_sge.max(1),
                srq_limit: 0,
            },
        };
        // SAFETY: the domain is alive; the struct is read and written during the call.
        let raw = non_null("ibv_create_srq", unsafe {
            (device.api.ibv_create_srq)(pd.raw, &mut init)
        })?;
        let srq = Self {
            raw,
            post,
            capacity: init.attr.max_wr,
            pd,
        };
        if limit > 0 {
            srq.set_limit(limit)?;
        }
        Ok(srq)
    }
}

impl SharedReceiveQueue for IbvSrq {
    #[inline]
    unsafe fn post_recv(&self, requests: &[RecvWr], sges: &[Sge]) -> Result<(), PostError> {
        // SAFETY: the verb copies chain and entries and sets `bad` as documented; the queue is
        // alive; the caller keeps the memory.
        unsafe {
            work::post_recv(requests, sges, |first, bad| {
                (self.post)(self.raw, first, bad)
            })
        }
    }

    fn capacity(&self) -> u32 {
        self.capacity
    }

    fn number(&self) -> u32 {
        // SAFETY: the queue is alive; the field is written by its making only.
        unsafe { (*self.raw).handle }
    }

    fn set_limit(&self, limit: u32) -> Result<(), VerbsError> {
        let mut attr = ibv_srq_attr {
            srq_limit: limit,
            ..Default::default()
        };
        // SAFETY: the queue is alive; the struct is read during the call.
        check("ibv_modify_srq", unsafe {
            (self.pd.device.api.ibv_modify_srq)(self.raw, &mut attr, IBV_SRQ_LIMIT)
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for IbvSrq {
    fn drop(&mut self) {
        // SAFETY: every queue pair has a reference to its queue, so none exists any more.
        unsafe { (self.pd.device.api.ibv_destroy_srq)(self.raw) };
    }
}

/// A reliable-connected queue pair (`ibv_qp`), with references to its id and to the objects it was
/// created from. They are dropped in the order of the fields.
pub(super) struct IbvQp {
    pub(super) raw: *mut ibv_qp,
    number: u32,
    caps: QpCaps,
    post_send: PostSend,
    post_recv: PostRecv,
    id: Arc<RdmaCmId>,
    parts: Parts,
}

/// The objects that a queue pair was created from. They must outlive it.
pub(super) struct Parts {
    pub pd: Arc<Pd>,
    /// The completion queues and the shared receive queue.
    pub _others: Vec<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: queue pairs may be used by any thread: verbs are thread-safe.
unsafe impl Send for IbvQp {}
// SAFETY: as above.
unsafe impl Sync for IbvQp {}

impl IbvQp {
    /// Takes ownership of the queue pair that `rdma_create_qp` created on `id`.
    pub(super) fn new(id: Arc<RdmaCmId>, caps: QpCaps, parts: Parts) -> Result<Self, VerbsError> {
        // SAFETY: the id and its queue pair are alive; number and context never change.
        let (raw, number, ops) = unsafe {
            let raw = (*id.raw).qp;
            (raw, (*raw).qp_num, &(*(*raw).context).ops)
        };
        Ok(Self {
            raw,
            number,
            caps,
            post_send: supported(ops.post_send, "ibv_post_send")?,
            post_recv: supported(ops.post_recv, "ibv_post_recv")?,
            id,
            parts,
        })
    }
}

impl QueuePair for IbvQp {
    fn number(&self) -> u32 {
        self.number
    }

    fn caps(&self) -> QpCaps {
        self.caps
    }

    #[inline]
    unsafe fn post_send(&self, requests: &[SendWr], sges: &[Sge]) -> Result<(), PostError> {
        // SAFETY: the verb copies chain and entries and sets `bad` as documented; the queue pair is
        // alive; the caller keeps the memory.
        unsafe {
            work::post_send(requests, sges, |first, bad| {
                (self.post_send)(self.raw, first, bad)
            })
        }
    }

    #[inline]
    unsafe fn post_recv(&self, requests: &[RecvWr], sges: &[Sge]) -> Result<(), PostError> {
        // SAFETY: as above.
        unsafe {
            work::post_recv(requests, sges, |first, bad| {
                (self.post_recv)(self.raw, first, bad)
            })
        }
    }

    fn set_error(&self) -> Result<(), VerbsError> {
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_ERR,
            ..Default::default()
        };
        // SAFETY: the queue pair is alive; the struct is read during the call.
        check("ibv_modify_qp", unsafe {
            (self.parts.pd.device.api.ibv_modify_qp)(self.raw, &mut attr, IBV_QP_STATE)
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for IbvQp {
    fn drop(&mut self) {
        self.id.destroy_qp();
    }
}

/// Checks a requested size against the device's limit before the call, so that the error gives both
/// numbers.
pub(super) fn within(
    what: &'static str,
    asked: u32,
    limit: u32,
    device: &OpenDevice,
) -> Result<(), VerbsError> {
    if asked <= limit {
        return Ok(());
    }
    Err(VerbsError::Limit {
        what,
        asked: u64::from(asked),
        limit: u64::from(limit),
        device: device.attributes.name.clone(),
    })
}

/// Returns the driver's function, or EOPNOTSUPP if the driver lacks it.
fn supported<F>(function: Option<F>, call: &'static str) -> Result<F, VerbsError> {
    function.ok_or_else(|| VerbsError::Call {
        call,
        source: io::Error::from_raw_os_error(libc::EOPNOTSUPP),
    })
}
