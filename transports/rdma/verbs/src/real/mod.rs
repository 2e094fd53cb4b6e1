//! The provider of the machine: libibverbs and librdmacm, and the devices that they have drivers
//! for.
//!
//! ```text
//!   VerbsProvider   the devices that are open, each once            mod.rs, absence.rs
//!     ├ VerbsDevice     attributes, asynchronous events              device.rs
//!     │   └ Domain          registrations                            domain.rs
//!     │       ├ Cq, Srq         and Qp: post and poll                queue.rs, work.rs
//!     └ Cm              ids, events                                  cm.rs, address.rs
//! ```
//!
//! Several threads may use verbs objects at once, according to `ibv_*(3)`. The `Send` and `Sync` of
//! the types here rest on that. Each object holds its parents, so that nothing is destroyed while
//! in use.

mod absence;
mod address;
mod cm;
mod device;
mod domain;
mod queue;
mod work;

use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;

use nacre_transport_rdma_link::Roots;
use parking_lot::{Mutex, MutexGuard};

use crate::provider::{ConnectionManager, Device, Provider};
use crate::sys::Api;
use crate::sys::verbs::ibv_context;
use crate::types::{DeviceId, VerbsError};

pub use absence::Absence;
pub use device::{Gid, GidType, VerbsDevice};
pub use domain::RegisterMemoryError;

/// RDMA of this machine.
pub struct VerbsProvider {
    inner: Arc<Inner>,
}

/// The provider as connection managers share it.
struct Inner {
    api: &'static Api,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    /// Open devices by context address. The address is unique as long as this map holds the
    /// device.
    devices: HashMap<usize, Arc<VerbsDevice>>,
    made: u32,
}

impl VerbsProvider {
    /// Loads the libraries, or names the missing one and its package. Succeeds without a device:
    /// one may appear.
    pub fn open() -> Result<VerbsProvider, VerbsError> {
        VerbsProvider::find().map_err(Absence::into_error)
    }

    /// As [`VerbsProvider::open`], with the missing part as a value.
    pub fn find() -> Result<VerbsProvider, Absence> {
        let api = Api::open()?;
        Ok(VerbsProvider {
            inner: Arc::new(Inner {
                api,
                open: Mutex::default(),
            }),
        })
    }

    /// The devices of [`Provider::devices`], with what only real ones have.
    pub fn verbs_devices(&self) -> Result<Vec<Arc<VerbsDevice>>, VerbsError> {
        self.inner.scan()
    }

    /// Why [`Provider::devices`] is empty: the text starts with `No RDMA devices found`.
    pub fn absence(&self) -> Absence {
        Absence::of(&Roots::real())
    }
}

impl Provider for VerbsProvider {
    fn name(&self) -> &'static str {
        "verbs"
    }

    fn devices(&self) -> Result<Vec<Arc<dyn Device>>, VerbsError> {
        let found = self.inner.scan()?;
        Ok(found.into_iter().map(|d| d as Arc<dyn Device>).collect())
    }

    fn device(&self, id: DeviceId) -> Result<Arc<dyn Device>, VerbsError> {
        let open = self.inner.lock();
        let found = open.devices.values().find(|d| d.id() == id);
        found
            .map(|d| Arc::clone(d) as Arc<dyn Device>)
            .ok_or(VerbsError::NoSuchDevice(id))
    }

    fn connection_manager(&self) -> Result<Box<dyn ConnectionManager>, VerbsError> {
        Ok(Box::new(cm::Cm::new(Arc::clone(&self.inner))?))
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Open> {
        // A thread that panicked with the lock left a map of whole entries.
        self.open.lock()
    }

    /// The devices that are there now; those that are gone are let go of.
    fn scan(&self) -> Result<Vec<Arc<VerbsDevice>>, VerbsError> {
        let contexts = device::Contexts::list(self.api)?;
        let mut gone = Vec::new();
        let mut open = self.lock();
        open.devices.retain(|at, device| {
            let stays = contexts.iter().any(|context| context.addr() == *at);
            if !stays {
                gone.push(Arc::clone(device));
            }
            stays
        });
        let mut found = Vec::new();
        for context in contexts.iter() {
            if let Some(known) = open.devices.get(&context.addr()) {
                found.push(Arc::clone(known));
                continue;
            }
            let id = DeviceId(open.made);
            // One that cannot be opened (it may be going away) does not hide the others.
            if let Ok(device) = VerbsDevice::open(self.api, &contexts, context, id) {
                open.made += 1;
                open.devices.insert(context.addr(), Arc::clone(&device));
                found.push(device);
            }
        }
        drop(open);
        found.sort_by_key(|device| device.id());
        Ok(found)
    }

    /// The device of an id of the connection manager.
    fn device_of(&self, context: *mut ibv_context) -> Option<DeviceId> {
        if context.is_null() {
            return None;
        }
        let known = |inner: &Inner| {
            let open = inner.lock();
            open.devices.get(&context.addr()).map(|d| d.id())
        };
        known(self).or_else(|| {
            self.scan().ok()?;
            known(self)
        })
    }

    /// Lets go of a device that goes away, so that its last user closes it.
    fn forget(&self, context: *mut ibv_context) {
        let gone = self.lock().devices.remove(&context.addr());
        drop(gone);
    }
}

/// A call of the kernel or a library that left its reason in `errno`.
fn failed(call: &'static str) -> VerbsError {
    VerbsError::Call {
        call,
        source: io::Error::last_os_error(),
    }
}

/// A call that returns its reason, positive by the manuals and negative by some drivers.
fn check(call: &'static str, result: i32) -> Result<(), VerbsError> {
    if result == 0 {
        return Ok(());
    }
    Err(VerbsError::Call {
        call,
        source: io::Error::from_raw_os_error(result.saturating_abs()),
    })
}

/// A call of librdmacm: -1 and `errno`, by its manuals.
fn check_errno(call: &'static str, result: i32) -> Result<(), VerbsError> {
    if result == 0 {
        Ok(())
    } else {
        Err(failed(call))
    }
}

fn would_block(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

fn set_nonblocking(fd: RawFd) -> Result<(), VerbsError> {
    // SAFETY: the descriptor belongs to a channel or context that the caller holds open.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let set = || {
        let flags = rustix::fs::fcntl_getfl(fd)?;
        rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)
    };
    set().map_err(|errno| VerbsError::Call {
        call: "fcntl",
        source: errno.into(),
    })
}
