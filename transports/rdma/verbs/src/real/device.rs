//! One opened RDMA device (`ibv_context`): its attributes, port states, GIDs and asynchronous
//! events. [`super::VerbsProvider`] creates it.

use std::any::Any;
use std::ffi::{CStr, c_char};
use std::io;
use std::mem::{MaybeUninit, offset_of, size_of};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::domain::Domain;
use super::{check, failed, set_nonblocking, would_block};
use crate::provider::{Device, ProtectionDomain};
use crate::sys::Api;
use crate::sys::verbs::*;
use crate::types::{
    Access, AsyncEvent, DeviceAttributes, DeviceId, OnDemandPaging, PortState, VerbsError, Wire,
};

/// The device contexts of librdmacm (`rdma_get_devices`). The library opens each device once, and a
/// queue pair must use the context of its id. So this module never calls `ibv_open_device`.
pub(super) struct Contexts {
    api: &'static Api,
    list: *mut *mut ibv_context,
    count: usize,
}

impl Contexts {
    /// Lists the contexts of the present devices; empty if the kernel has no RDMA support.
    pub(super) fn list(api: &'static Api) -> Result<Self, VerbsError> {
        let mut count = 0;
        // SAFETY: the call writes to a local variable.
        let list = unsafe { (api.rdma_get_devices)(&mut count) };
        if list.is_null() {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                // No device, or no verbs support in the kernel: the list is empty.
                Some(libc::ENODEV | libc::ENOSYS | libc::ENOENT) => Ok(Self {
                    api,
                    list,
                    count: 0,
                }),
                _ => Err(VerbsError::Call {
                    call: "rdma_get_devices",
                    source: error,
                }),
            };
        }
        let count = usize::try_from(count).unwrap_or(0);
        Ok(Self { api, list, count })
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = *mut ibv_context> {
        // SAFETY: the list has `count` entries.
        (0..self.count).map(|index| unsafe { *self.list.add(index) })
    }
}

impl Drop for Contexts {
    fn drop(&mut self) {
        if !self.list.is_null() {
            // SAFETY: the list came from `rdma_get_devices` and is freed once.
            unsafe { (self.api.rdma_free_devices)(self.list) }
        }
    }
}

/// A counted reference to one device context.
pub(super) struct Context {
    api: &'static Api,
    pub raw: *mut ibv_context,
}

// SAFETY: contexts may be used by any thread (`ibv_open_device(3)`: libibverbs is thread-safe).
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Takes a reference to one context of `contexts`. librdmacm counts references per list. A list
    /// with every device would keep all of them open while one is in use, and then a software
    /// device could not be deleted. So this takes a list and returns all references but one.
    fn hold(
        api: &'static Api,
        contexts: &Contexts,
        raw: *mut ibv_context,
    ) -> Result<Self, VerbsError> {
        let others = Contexts::list(api)?;
        let Some(at) = others.iter().position(|context| context == raw) else {
            return Err(VerbsError::Call {
                call: "rdma_get_devices",
                source: io::Error::from_raw_os_error(libc::ENODEV),
            });
        };
        debug_assert!(contexts.iter().any(|context| context == raw));
        // SAFETY: the list has `count` entries and ends with a null pointer. Moving the last one
        // here and shortening the list by one leaves exactly the reference on `raw`, which `drop`
        // gives back.
        unsafe {
            let last = others.count - 1;
            *others.list.add(at) = *others.list.add(last);
            *others.list.add(last) = std::ptr::null_mut();
        }
        Ok(Self { api, raw })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Listing the devices makes the library detect a removed device. Only then does dropping
        // the last reference close it.
        let now = Contexts::list(self.api);
        // SAFETY: the context is open.
        let files = unsafe { [(*self.raw).cmd_fd, (*self.raw).async_fd] };
        // SAFETY: `rdma_free_devices` drops a reference of each context up to a null pointer, and
        // frees the list with the `free` of this process's C library, whose `malloc` made it.
        unsafe {
            let list = libc::malloc(2 * size_of::<*mut ibv_context>()).cast::<*mut ibv_context>();
            // Out of memory: the device stays open, which is harmless.
            if !list.is_null() {
                list.write(self.raw);
                list.add(1).write(std::ptr::null_mut());
                (self.api.rdma_free_devices)(list);
            }
        }
        // If this was the last device, the library does not notice its removal and leaves it open.
        // The kernel waits for open files before it deletes a device, so without this call the
        // deletion would hang until this process ends.
        if now.is_ok_and(|now| now.count == 0) {
            release(files);
        }
    }
}

/// Releases the files of a removed device whose context the library leaves open: replaces them with
/// `/dev/null`, which the library closes eventually.
fn release(files: [RawFd; 2]) {
    let Ok(null) = std::fs::File::open("/dev/null") else {
        return;
    };
    for file in files {
        // SAFETY: both descriptors belong to the context, which the library still has open. No code
        // uses the context: every object on it had a reference, and the last one is dropped.
        unsafe { libc::dup3(null.as_raw_fd(), file, libc::O_CLOEXEC) };
    }
}

/// A GID of a port (`ibv_gid_entry`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gid {
    pub index: u32,
    pub raw: [u8; 16],
    pub kind: GidType,
    /// Interface index of its network device; 0: none.
    pub netdev: u32,
}

/// The protocol of a GID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GidType {
    Infiniband,
    RoceV1,
    RoceV2,
}

/// An opened RDMA device of this machine.
pub struct VerbsDevice {
    pub(super) api: &'static Api,
    pub(super) context: Context,
    id: DeviceId,
    attributes: DeviceAttributes,
    /// The next completion vector. Completion queues use the vectors in turn, which spreads their
    /// interrupts.
    next_vector: AtomicU32,
    /// The device itself, for the references of its protection domains.
    this: std::sync::Weak<Self>,
}

impl VerbsDevice {
    pub(super) fn open(
        api: &'static Api,
        contexts: &Contexts,
        raw: *mut ibv_context,
        id: DeviceId,
    ) -> Result<Arc<Self>, VerbsError> {
        let context = Context::hold(api, contexts, raw)?;
        // SAFETY: the context is open, and its device lives as long as it does.
        let async_fd = unsafe { (*raw).async_fd };
        set_nonblocking(async_fd)?;
        let attributes = attributes(api, raw)?;
        Ok(Arc::new_cyclic(|this| Self {
            api,
            context,
            id,
            attributes,
            next_vector: AtomicU32::new(0),
            this: this.clone(),
        }))
    }

    pub(super) fn completion_vector(&self) -> i32 {
        // SAFETY: the context is open. Only `ibv_open_device` writes the field.
        let vectors = unsafe { (*self.context.raw).num_comp_vectors }.max(1);
        let next = self.next_vector.fetch_add(1, Ordering::Relaxed);
        (next % vectors as u32) as i32
    }

    /// The used entries of a port's GID table.
    pub fn gids(&self, port: u8) -> Result<Vec<Gid>, VerbsError> {
        let count = query_port(self.api, self.context.raw, port)?
            .gid_tbl_len
            .max(0) as u32;
        let mut gids = Vec::new();
        for index in 0..count {
            let mut entry = ibv_gid_entry::default();
            // SAFETY: the entry is ours to write to, and has the given size.
            let result = unsafe {
                (self.api._ibv_query_gid_ex)(
                    self.context.raw,
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
        self.id
    }

    fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    fn port_state(&self, port: u8) -> Result<PortState, VerbsError> {
        let attr = query_port(self.api, self.context.raw, port)?;
        Ok(match attr.state {
            2 => PortState::Init,
            3 => PortState::Armed,
            4 => PortState::Active,
            5 => PortState::ActiveDefer,
            _ => PortState::Down,
        })
    }

    fn protection_domain(&self, access: Access) -> Result<Arc<dyn ProtectionDomain>, VerbsError> {
        let device = self
            .this
            .upgrade()
            .ok_or(VerbsError::NoSuchDevice(self.id))?;
        Ok(Arc::new(Domain::new(device, access)?))
    }

    fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is open as long as `self`, and so is its descriptor. Only
        // `ibv_open_device` writes the field.
        unsafe { BorrowedFd::borrow_raw((*self.context.raw).async_fd) }
    }

    fn next_async_event(&self) -> Result<Option<AsyncEvent>, VerbsError> {
        let mut event = MaybeUninit::<ibv_async_event>::uninit();
        // SAFETY: the context is open; the call writes to a local struct.
        let result =
            unsafe { (self.api.ibv_get_async_event)(self.context.raw, event.as_mut_ptr()) };
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
        unsafe { (self.api.ibv_ack_async_event)(&mut event) };
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

fn attributes(api: &Api, context: *mut ibv_context) -> Result<DeviceAttributes, VerbsError> {
    let mut attr = MaybeUninit::<ibv_device_attr>::zeroed();
    // SAFETY: the context is open; the call writes to a local struct.
    check("ibv_query_device", unsafe {
        (api.ibv_query_device)(context, attr.as_mut_ptr())
    })?;
    // SAFETY: written by the call; zeros are valid as well.
    let attr = unsafe { attr.assume_init() };
    // SAFETY: the device lives as long as its context, and does not change after its discovery.
    let device = unsafe { &*(*context).device };
    let name = text(&device.name);
    let first_port = query_port(api, context, 1)?;
    let wire = match (device.transport_type, first_port.link_layer) {
        (IBV_TRANSPORT_IWARP, _) => Wire::Iwarp,
        (_, IBV_LINK_LAYER_ETHERNET) => Wire::Roce,
        _ => Wire::Infiniband,
    };
    let sys = Path::new("/sys/class/infiniband").join(&name);
    let read = |file: &str| std::fs::read_to_string(sys.join(file)).unwrap_or_default();
    let count = |value: i32| u32::try_from(value).unwrap_or(0);
    let depth = |value: i32| u8::try_from(value.max(0)).unwrap_or(u8::MAX);
    let software = is_software(&read("node_desc"));
    let is_siw = software && wire == Wire::Iwarp;
    Ok(DeviceAttributes {
        wire,
        node_guid: u64::from_be(attr.node_guid),
        sys_image_guid: u64::from_be(attr.sys_image_guid),
        firmware: text(&attr.fw_ver),
        vendor: (attr.vendor_id, attr.vendor_part_id),
        ports: attr.phys_port_cnt,
        numa_node: read("device/numa_node").trim().parse().ok(),
        max_qp: count(attr.max_qp),
        max_qp_wr: count(attr.max_qp_wr),
        max_sge: count(attr.max_sge),
        max_sge_rd: count(attr.max_sge_rd),
        max_cq: count(attr.max_cq),
        max_cqe: count(attr.max_cqe),
        max_mr: count(attr.max_mr),
        max_mr_size: attr.max_mr_size,
        max_pd: count(attr.max_pd),
        max_responder_resources: depth(attr.max_qp_rd_atom),
        max_initiator_depth: depth(attr.max_qp_init_rd_atom),
        max_srq: count(attr.max_srq),
        max_srq_wr: count(attr.max_srq_wr),
        max_srq_sge: count(attr.max_srq_sge),
        send_with_invalidate: attr.device_cap_flags & IBV_DEVICE_MEM_MGT_EXTENSIONS != 0
            && !claims_to_invalidate(&sys)
            // siw refuses it with inline data, and its library passes another field as the key.
            && !is_siw,
        on_demand_paging: on_demand_paging(context),
        software,
        name,
    })
}

/// Asks as the inline function `ibv_query_device_ex` of `verbs.h` does.
fn on_demand_paging(context: *mut ibv_context) -> Option<OnDemandPaging> {
    // SAFETY: the context is open.
    if unsafe { (*context).abi_compat } as usize != VERBS_ABI_IS_EXTENDED {
        return None;
    }
    let around = context
        .cast::<u8>()
        .wrapping_sub(offset_of!(verbs_context, context))
        .cast::<verbs_context>();
    // SAFETY: an extended context is the last field of a `verbs_context`, whose field `sz` comes
    // directly before it. No reference to the whole struct is made: its beginning may be missing.
    let there = unsafe { (&raw const (*around).sz).read() };
    if there < size_of::<verbs_context>() - offset_of!(verbs_context, query_device_ex) {
        return None;
    }
    // SAFETY: `sz` covers the field.
    let query = unsafe { (&raw const (*around).query_device_ex).read() }?;
    let mut attr = MaybeUninit::<ibv_device_attr_ex>::zeroed();
    let size = size_of::<ibv_device_attr_ex>();
    // SAFETY: the context is open, the struct ours to be written to, and its size is given.
    let failed = unsafe { query(context, std::ptr::null(), attr.as_mut_ptr(), size) };
    if failed != 0 {
        return None;
    }
    // SAFETY: written by the call; zeros are valid as well.
    let odp = unsafe { attr.assume_init() }.odp_caps;
    let operations = [
        ("SUPPORT_SEND", IBV_ODP_SUPPORT_SEND),
        ("SUPPORT_RECV", IBV_ODP_SUPPORT_RECV),
        ("SUPPORT_WRITE", IBV_ODP_SUPPORT_WRITE),
        ("SUPPORT_READ", IBV_ODP_SUPPORT_READ),
        ("SUPPORT_ATOMIC", IBV_ODP_SUPPORT_ATOMIC),
        ("SUPPORT_SRQ", IBV_ODP_SUPPORT_SRQ_RECV),
    ];
    let operations = operations.into_iter();
    let has = |bit: u32| odp.per_transport_caps[0] & bit != 0;
    Some(OnDemandPaging {
        explicit: odp.general_caps & IBV_ODP_SUPPORT != 0,
        implicit: odp.general_caps & IBV_ODP_SUPPORT_IMPLICIT != 0,
        operations: operations
            .filter(|(_, bit)| has(*bit))
            .map(|(name, _)| name)
            .collect(),
    })
}

/// True for devices that claim SEND_WITH_INVALIDATE but fail the first one with
/// `IBV_WC_LOC_QP_OP_ERR`, so that no Linux host could connect: Broadcom's, seen on a BCM57508 with
/// firmware 237.1.148.0 (<https://github.com/spdk/spdk/issues/3926>). Hosts work without it.
fn claims_to_invalidate(sys: &Path) -> bool {
    let driver = std::fs::read_link(sys.join("device/driver"));
    driver.is_ok_and(|driver| driver.ends_with("bnxt_en") || driver.ends_with("bnxt_re"))
}

/// True for the node descriptions of the kernel's software drivers, rxe and siw.
fn is_software(node_desc: &str) -> bool {
    matches!(node_desc.trim(), "rxe" | "Software iWARP stack")
}

fn query_port(api: &Api, context: *mut ibv_context, port: u8) -> Result<ibv_port_attr, VerbsError> {
    let mut attr = MaybeUninit::<ibv_port_attr>::zeroed();
    // SAFETY: the context is open; the function writes at most this struct. The exported function
    // writes a shorter form of it, so the struct starts as zeros.
    check("ibv_query_port", unsafe {
        (api.ibv_query_port)(context, port, attr.as_mut_ptr())
    })?;
    // SAFETY: written by the call; zeros are valid as well.
    Ok(unsafe { attr.assume_init() })
}

/// The text of a fixed-size C string, up to its end or the first NUL.
fn text(field: &[c_char]) -> String {
    let bytes: Vec<u8> = field.iter().map(|&c| c as u8).chain([0]).collect();
    let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
    text.to_string_lossy().trim().to_owned()
}

/// Checks the pointer that a library call returned: null is the error in `errno`.
pub(super) fn non_null<T>(call: &'static str, raw: *mut T) -> Result<*mut T, VerbsError> {
    if raw.is_null() {
        Err(failed(call))
    } else {
        Ok(raw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the check uses the driver, not the device's name, and accepts a device without a bus
    /// driver (a software device).
    #[test]
    fn send_with_invalidate_depends_on_the_driver() {
        let dir = tempfile::tempdir().unwrap();
        let sys = dir.path().join("infiniband/rocep1s0");
        assert!(!claims_to_invalidate(&sys));
        std::fs::create_dir_all(sys.join("device")).unwrap();
        assert!(!claims_to_invalidate(&sys));
        for (driver, is_broken) in [("mlx5_core", false), ("bnxt_en", true)] {
            let link = sys.join("device/driver");
            std::os::unix::fs::symlink(Path::new("../../bus/pci/drivers").join(driver), &link)
                .unwrap();
            assert_eq!(claims_to_invalidate(&sys), is_broken, "{driver}");
            std::fs::remove_file(&link).unwrap();
        }
    }
}
