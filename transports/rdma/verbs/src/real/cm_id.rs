//! [`RdmaCmId`]: an `rdma_cm_id`, and the [`EventChannel`] of its events.

use std::mem::size_of;
use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::{address, check_errno};
use crate::sys::Api;
use crate::sys::cm::*;
use crate::sys::verbs::*;
use crate::types::VerbsError;

/// The event channel. Every id has a reference to it, so it is destroyed last.
pub(super) struct EventChannel {
    pub api: &'static Api,
    pub raw: *mut rdma_event_channel,
    /// Locked while an event is received, because the library then modifies the id's queue pair.
    /// Locked also while an id or its queue pair is destroyed, which may happen on other threads.
    turn: Mutex<()>,
}

// SAFETY: any thread may use a channel; `turn` serialises taking events and destroying ids.
unsafe impl Send for EventChannel {}
// SAFETY: as above.
unsafe impl Sync for EventChannel {}

impl EventChannel {
    /// Takes ownership of `raw`.
    pub(super) fn new(api: &'static Api, raw: *mut rdma_event_channel) -> Self {
        Self {
            api,
            raw,
            turn: Mutex::new(()),
        }
    }

    pub(super) fn take_turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock()
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: every id has a reference to this channel, so no id exists any more.
        unsafe { (self.api.rdma_destroy_event_channel)(self.raw) }
    }
}

/// An `rdma_cm_id`: a connection or a listener. Destroyed when the manager has forgotten it and its
/// queue pair is gone.
pub(super) struct RdmaCmId {
    channel: Arc<EventChannel>,
    pub raw: *mut rdma_cm_id,
}

// SAFETY: only the manager's thread calls functions on an id. Other threads only destroy it, with
// `EventChannel::turn` locked.
unsafe impl Send for RdmaCmId {}
// SAFETY: as above.
unsafe impl Sync for RdmaCmId {}

impl RdmaCmId {
    /// Takes ownership of `raw`, which `channel` reports events of.
    pub(super) fn new(channel: Arc<EventChannel>, raw: *mut rdma_cm_id) -> Self {
        Self { channel, raw }
    }

    /// Destroys the queue pair. Must be called once.
    pub(super) fn destroy_qp(&self) {
        let _turn = self.channel.take_turn();
        // SAFETY: the id is alive, and its queue pair is destroyed once, by the caller's promise.
        unsafe { (self.channel.api.rdma_destroy_qp)(self.raw) }
    }

    pub(super) fn verbs(&self) -> *mut ibv_context {
        // SAFETY: the id is alive.
        unsafe { (*self.raw).verbs }
    }

    pub(super) fn port(&self) -> u8 {
        // SAFETY: as above.
        unsafe { (*self.raw).port_num }
    }

    pub(super) fn local(&self) -> Option<SocketAddr> {
        // SAFETY: as above.
        address::from_storage(unsafe { &(*self.raw).route.addr.src_storage })
    }

    pub(super) fn peer(&self) -> Option<SocketAddr> {
        // SAFETY: as above.
        address::from_storage(unsafe { &(*self.raw).route.addr.dst_storage })
    }

    pub(super) fn set<T>(&self, option: i32, mut value: T) -> Result<(), VerbsError> {
        // SAFETY: the id is alive; the value is read during the call, with its size.
        check_errno("rdma_set_option", unsafe {
            (self.channel.api.rdma_set_option)(
                self.raw,
                RDMA_OPTION_ID,
                option,
                (&raw mut value).cast(),
                size_of::<T>(),
            )
        })
    }
}

impl Drop for RdmaCmId {
    fn drop(&mut self) {
        let _turn = self.channel.take_turn();
        // SAFETY: this is its last owner. The call waits until events of the id are acknowledged,
        // which happens in the turn that takes them.
        unsafe { (self.channel.api.rdma_destroy_id)(self.raw) };
    }
}
