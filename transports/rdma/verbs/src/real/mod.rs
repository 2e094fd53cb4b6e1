//! The [`Provider`] for real hardware and for the kernel's software devices (rxe, siw): safe owners
//! of the objects of libibverbs and librdmacm. The RDMA transport and `nacre doctor` use it.
//!
//! ```text
//!   VerbsProvider   opens each device once                             mod.rs, absence.rs
//!     ├ VerbsDevice     attributes, asynchronous events                device.rs, context.rs
//!     │   └ Domain          protection domain and memory regions       domain.rs, pd.rs
//!     │       └ IbvCq, IbvSrq, IbvQp     post work requests, poll completions   queue.rs, work.rs
//!     └ Cm              connections, listeners and their events        cm, cm_id.rs, address.rs
//! ```
//!
//! According to `ibv_*(3)` several threads may use verbs objects at once. The `Send` and `Sync`
//! implementations of this module rely on that. Each object has references to its parents, so no
//! parent is destroyed before its children.

mod absence;
mod address;
mod cm;
mod cm_id;
mod context;
mod device;
mod domain;
mod pd;
mod queue;
mod work;

use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;

use nacre_transport_rdma_link::Roots;
use parking_lot::Mutex;

use self::context::OpenDevice;
use crate::provider::{ConnectionManager, Device, Provider};
use crate::sys::Api;
use crate::sys::verbs::ibv_context;
use crate::types::{DeviceId, VerbsError};

pub use absence::Absence;
pub use device::{Gid, GidType, VerbsDevice};
pub use pd::RegisterMemoryError;

/// The RDMA devices of this machine, through libibverbs and librdmacm.
pub struct VerbsProvider {
    inner: Arc<ProviderState>,
}

/// The part of the provider that connection managers share.
struct ProviderState {
    api: &'static Api,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    /// Open devices by context address. The address is unique as long as this map holds the
    /// device.
    devices: HashMap<usize, Arc<VerbsDevice>>,
    /// Number of devices opened since the start: the [`DeviceId`] of the next one.
    opened: u32,
}

impl VerbsProvider {
    /// Loads the libraries. The error names a missing library and its package. Succeeds on a
    /// machine without RDMA devices, because devices may be added later.
    pub fn open() -> Result<Self, VerbsError> {
        Self::find().map_err(Absence::into_error)
    }

    /// Like [`VerbsProvider::open`], but the error is the missing part as an [`Absence`].
    pub fn find() -> Result<Self, Absence> {
        let api = Api::open()?;
        Ok(Self {
            inner: Arc::new(ProviderState {
                api,
                open: Mutex::default(),
            }),
        })
    }

    /// The devices of [`Provider::devices`] by their concrete type, which also gives their GIDs.
    pub fn verbs_devices(&self) -> Result<Vec<Arc<VerbsDevice>>, VerbsError> {
        self.inner.scan()
    }

    /// The reason for an empty [`Provider::devices`]. Its text starts with `No RDMA devices found`.
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
        let open = self.inner.open.lock();
        let found = open.devices.values().find(|d| d.id() == id);
        found
            .map(|d| Arc::clone(d) as Arc<dyn Device>)
            .ok_or(VerbsError::NoSuchDevice(id))
    }

    fn connection_manager(&self) -> Result<Box<dyn ConnectionManager>, VerbsError> {
        Ok(Box::new(cm::Cm::new(Arc::clone(&self.inner))?))
    }
}

impl ProviderState {
    /// Opens new devices, releases removed ones, and returns the present ones in the order of their
    /// ids.
    fn scan(&self) -> Result<Vec<Arc<VerbsDevice>>, VerbsError> {
        let contexts = context::Contexts::list(self.api)?;
        let mut gone = Vec::new();
        let mut open = self.open.lock();
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
            let id = DeviceId(open.opened);
            // Skip a device that cannot be opened: it may be under removal.
            if let Ok(device) = OpenDevice::open(self.api, &contexts, context, id) {
                let device = Arc::new(VerbsDevice::new(device));
                open.opened += 1;
                open.devices.insert(context.addr(), Arc::clone(&device));
                found.push(device);
            }
        }
        drop(open);
        found.sort_by_key(|device| device.id());
        Ok(found)
    }

    /// The device of an `rdma_cm_id`'s context. `None` if the id is not bound to a device, or to
    /// one that cannot be opened.
    fn device_of(&self, context: *mut ibv_context) -> Option<DeviceId> {
        if context.is_null() {
            return None;
        }
        let known = |inner: &Self| {
            let open = inner.open.lock();
            open.devices.get(&context.addr()).map(|d| d.id())
        };
        known(self).or_else(|| {
            self.scan().ok()?;
            known(self)
        })
    }

    /// Releases this module's reference to a device under removal. The last user closes the device.
    fn forget(&self, context: *mut ibv_context) {
        let gone = self.open.lock().devices.remove(&context.addr());
        drop(gone);
    }
}

/// The error of a failed call that set `errno`.
fn failed(call: &'static str) -> VerbsError {
    VerbsError::Call {
        call,
        source: io::Error::last_os_error(),
    }
}

/// Checks the pointer that a library call returned: null is the error in `errno`.
fn non_null<T>(call: &'static str, raw: *mut T) -> Result<*mut T, VerbsError> {
    if raw.is_null() {
        Err(failed(call))
    } else {
        Ok(raw)
    }
}

/// The result of a call that returns 0 or an error number. The number is positive according to the
/// manuals; some drivers return it negated.
fn check(call: &'static str, result: i32) -> Result<(), VerbsError> {
    if result == 0 {
        return Ok(());
    }
    Err(VerbsError::Call {
        call,
        source: io::Error::from_raw_os_error(result.saturating_abs()),
    })
}

/// The result of a librdmacm call, which returns -1 and sets `errno` on failure.
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
