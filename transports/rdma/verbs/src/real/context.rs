//! [`OpenDevice`]: one opened device (`ibv_context`) with its attributes. Every object of the
//! device has a reference to it.

use std::ffi::{CStr, c_char};
use std::io;
use std::mem::{MaybeUninit, offset_of, size_of};
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{check, set_nonblocking};
use crate::sys::Api;
use crate::sys::verbs::*;
use crate::types::{DeviceAttributes, DeviceId, OnDemandPaging, VerbsError, Wire};

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
        // SAFETY: `rdma_free_devices` drops a reference of each context up to a null pointer. It
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

/// An opened device of this machine.
pub(super) struct OpenDevice {
    pub api: &'static Api,
    pub context: Context,
    pub id: DeviceId,
    pub attributes: DeviceAttributes,
    /// The next completion vector. Completion queues use the vectors in turn, which spreads their
    /// interrupts.
    next_vector: AtomicU32,
}

impl OpenDevice {
    pub(super) fn open(
        api: &'static Api,
        contexts: &Contexts,
        raw: *mut ibv_context,
        id: DeviceId,
    ) -> Result<Self, VerbsError> {
        let context = Context::hold(api, contexts, raw)?;
        // SAFETY: the context is open, and its device lives as long as it does.
        let async_fd = unsafe { (*raw).async_fd };
        set_nonblocking(async_fd)?;
        let attributes = attributes(api, raw)?;
        Ok(Self {
            api,
            context,
            id,
            attributes,
            next_vector: AtomicU32::new(0),
        })
    }

    pub(super) fn completion_vector(&self) -> i32 {
        // SAFETY: the context is open. Only `ibv_open_device` writes the field.
        let vectors = unsafe { (*self.context.raw).num_comp_vectors }.max(1);
        let next = self.next_vector.fetch_add(1, Ordering::Relaxed);
        (next % vectors as u32) as i32
    }

    pub(super) fn query_port(&self, port: u8) -> Result<ibv_port_attr, VerbsError> {
        query_port(self.api, self.context.raw, port)
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
/// `IBV_WC_LOC_QP_OP_ERR`. No Linux host could connect to them; hosts work without it. Broadcom's
/// are such: a BCM57508 with firmware 237.1.148.0 (<https://github.com/spdk/spdk/issues/3926>).
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
