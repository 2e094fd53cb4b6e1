//! [`VerbsDevice`]: an opened RDMA device with its attributes, port states, GIDs and asynchronous
//! events. [`super::VerbsProvider`] creates it.

use std::any::Any;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::context::OpenDevice;
use super::domain::Domain;
use super::{check, would_block};
use crate::provider::{Device, ProtectionDomain};
use crate::sys::verbs::*;
use crate::types::{Access, AsyncEvent, DeviceAttributes, DeviceId, PortState, VerbsError};

/// A GID of a port (`ibv_gid_entry`). `raw` is in network byte order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gid {
    pub index: u32,
    pub raw: [u8; 16],
    pub kind: GidType,
    /// Interface index of its network device; 0: none.
    pub netdev: u32,
}

/// The protocol of a GID (`ibv_gid_type`). iWARP devices report `Infiniband`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GidType {
    Infiniband,
    RoceV1,
    RoceV2,
}

/// An opened RDMA device of this machine.
pub struct VerbsDevice {
    open: Arc<OpenDevice>,
}

impl VerbsDevice {
    pub(super) fn new(open: OpenDevice) -> Self {
        Self {
            open: Arc::new(open),
        }
    }

    /// The used entries of a port's GID table.
    pub fn gids(&self, port: u8) -> Result<Vec<Gid>, VerbsError> {
        let count = self.open.query_port(port)?.gid_tbl_len.max(0) as u32;
        let mut gids = Vec::new();
        for index in 0..count {
            let mut entry = ibv_gid_entry::default();
            // SAFETY: the entry is ours to write to, and has the given size.
            let result = unsafe {
                (self.open.api._ibv_query_gid_ex)(
                    self.open.context.raw,
                    u32::from(port),
                    index,
                    &mut entry,
                    0,
                    size_of::<ibv_gid_entry>(),
                )
            };
            match result {
                0 => {}
                // An unused entry.
                libc::ENODATA => continue,
                _ => check("ibv_query_gid_ex", result)?,
            }
            if entry.gid.raw == [0; 16] {
                continue;
            }
            gids.push(Gid {
                index,
                raw: entry.gid.raw,
                kind: match entry.gid_type {
                    IBV_GID_TYPE_ROCE_V1 => GidType::RoceV1,
                    IBV_GID_TYPE_ROCE_V2 => GidType::RoceV2,
                    _ => GidType::Infiniband,
                },
                netdev: entry.ndev_ifindex,
            });
        }
        Ok(gids)
    }
}

impl Device for VerbsDevice {
    fn id(&self) -> DeviceId {
        self.open.id
    }

    fn attributes(&self) -> &DeviceAttributes {
        &self.open.attributes
    }

    fn port_state(&self, port: u8) -> Result<PortState, VerbsError> {
        let attr = self.open.query_port(port)?;
        Ok(match attr.state {
            2 => PortState::Init,
            3 => PortState::Armed,
            4 => PortState::Active,
            5 => PortState::ActiveDefer,
            _ => PortState::Down,
        })
    }

    fn protection_domain(&self, access: Access) -> Result<Arc<dyn ProtectionDomain>, VerbsError> {
        Ok(Arc::new(Domain::new(Arc::clone(&self.open), access)?))
    }

    fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is open as long as `self`, and so is its descriptor. Only
        // `ibv_open_device` writes the field.
        unsafe { BorrowedFd::borrow_raw((*self.open.context.raw).async_fd) }
    }

    fn next_async_event(&self) -> Result<Option<AsyncEvent>, VerbsError> {
        let mut event = MaybeUninit::<ibv_async_event>::uninit();
        // SAFETY: the context is open; the call writes to a local struct.
        let result = unsafe {
            (self.open.api.ibv_get_async_event)(self.open.context.raw, event.as_mut_ptr())
        };
        if result != 0 {
            let error = io::Error::last_os_error();
            return if would_block(&error) {
                Ok(None)
            } else {
                Err(VerbsError::Call {
                    call: "ibv_get_async_event",
                    source: error,
                })
            };
        }
        // SAFETY: the call succeeded and wrote it.
        let mut event = unsafe { event.assume_init() };
        let copy = describe(&event);
        // SAFETY: the event was received and is acknowledged once. Destroying its objects waits for
        // the acknowledgement.
        unsafe { (self.open.api.ibv_ack_async_event)(&mut event) };
        Ok(Some(copy))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Converts an event to a value without pointers.
fn describe(event: &ibv_async_event) -> AsyncEvent {
    // SAFETY: the type of the event says which member is set (`ibv_get_async_event(3)`). The object
    // is not destroyed before the event is acknowledged.
    let of = unsafe {
        match event.event_type {
            IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_COMM_EST
            | IBV_EVENT_SQ_DRAINED
            | IBV_EVENT_QP_LAST_WQE_REACHED => (*event.element.qp).qp_num,
            IBV_EVENT_CQ_ERR => (*event.element.cq).handle,
            IBV_EVENT_SRQ_ERR => (*event.element.srq).handle,
            IBV_EVENT_PORT_ACTIVE
            | IBV_EVENT_PORT_ERR
            | IBV_EVENT_LID_CHANGE
            | IBV_EVENT_PKEY_CHANGE
            | IBV_EVENT_SM_CHANGE
            | IBV_EVENT_CLIENT_REREGISTER
            | IBV_EVENT_GID_CHANGE => event.element.port_num as u32,
            _ => 0,
        }
    };
    let (qp, port) = (of, of as u8);
    match event.event_type {
        IBV_EVENT_CQ_ERR => AsyncEvent::CqError { cq: of },
        IBV_EVENT_QP_FATAL => AsyncEvent::QpFatal { qp },
        IBV_EVENT_QP_REQ_ERR => AsyncEvent::QpRequestError { qp },
        IBV_EVENT_QP_ACCESS_ERR => AsyncEvent::QpAccessError { qp },
        IBV_EVENT_COMM_EST => AsyncEvent::CommunicationEstablished { qp },
        IBV_EVENT_SQ_DRAINED => AsyncEvent::SendQueueDrained { qp },
        IBV_EVENT_QP_LAST_WQE_REACHED => AsyncEvent::LastWqeReached { qp },
        IBV_EVENT_DEVICE_FATAL => AsyncEvent::DeviceFatal,
        IBV_EVENT_PORT_ACTIVE => AsyncEvent::PortActive { port },
        IBV_EVENT_PORT_ERR => AsyncEvent::PortError { port },
        IBV_EVENT_LID_CHANGE => AsyncEvent::LidChange { port },
        IBV_EVENT_PKEY_CHANGE => AsyncEvent::PkeyChange { port },
        IBV_EVENT_SM_CHANGE => AsyncEvent::SubnetManagerChange { port },
        IBV_EVENT_CLIENT_REREGISTER => AsyncEvent::ClientReregister { port },
        IBV_EVENT_GID_CHANGE => AsyncEvent::GidChange { port },
        IBV_EVENT_SRQ_ERR => AsyncEvent::SrqError { srq: of },
        IBV_EVENT_SRQ_LIMIT_REACHED => AsyncEvent::SrqLimitReached,
        event => AsyncEvent::Other { event },
    }
}
