//! The structs and constants of libibverbs, as rdma-core 44 lays them out (`infiniband/verbs.h`,
//! `IBVERBS_1.1`), under their C names.
//!
//! The ABI is stable since 2006: fields are only appended to structs that the library allocates.
//! Enums are plain integers here, because a device or a newer library may return values that this
//! file does not know.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// A function of `ibv_context_ops` that is kept only for old binaries.
type Unused = Option<unsafe extern "C" fn()>;

#[repr(C, align(8))]
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ibv_gid {
    pub raw: [u8; 16],
}

pub(crate) const IBV_GID_TYPE_ROCE_V1: u32 = 1;
pub(crate) const IBV_GID_TYPE_ROCE_V2: u32 = 2;

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_gid_entry {
    pub gid: ibv_gid,
    pub gid_index: u32,
    pub port_num: u32,
    pub gid_type: u32,
    pub ndev_ifindex: u32,
}

pub(crate) const IBV_TRANSPORT_IWARP: c_int = 1;

pub(crate) const IBV_DEVICE_MEM_MGT_EXTENSIONS: c_uint = 1 << 21;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_device_attr {
    pub fw_ver: [c_char; 64],
    /// Big-endian, as is `sys_image_guid`.
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: c_int,
    pub max_ee: c_int,
    pub max_rdd: c_int,
    pub max_mw: c_int,
    pub max_raw_ipv6_qp: c_int,
    pub max_raw_ethy_qp: c_int,
    pub max_mcast_grp: c_int,
    pub max_mcast_qp_attach: c_int,
    pub max_total_mcast_qp_attach: c_int,
    pub max_ah: c_int,
    pub max_fmr: c_int,
    pub max_map_per_fmr: c_int,
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

pub(crate) const IBV_ODP_SUPPORT: u64 = 1 << 0;
pub(crate) const IBV_ODP_SUPPORT_IMPLICIT: u64 = 1 << 1;

pub(crate) const IBV_ODP_SUPPORT_SEND: u32 = 1 << 0;
pub(crate) const IBV_ODP_SUPPORT_RECV: u32 = 1 << 1;
pub(crate) const IBV_ODP_SUPPORT_WRITE: u32 = 1 << 2;
pub(crate) const IBV_ODP_SUPPORT_READ: u32 = 1 << 3;
pub(crate) const IBV_ODP_SUPPORT_ATOMIC: u32 = 1 << 4;
pub(crate) const IBV_ODP_SUPPORT_SRQ_RECV: u32 = 1 << 5;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_odp_caps {
    pub general_caps: u64,
    /// Reliable connected, unreliable connected, unreliable datagram.
    pub per_transport_caps: [u32; 3],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_device_attr_ex {
    pub orig_attr: ibv_device_attr,
    pub comp_mask: u32,
    pub odp_caps: ibv_odp_caps,
    pub completion_timestamp_mask: u64,
    /// Further capabilities, which are not used here.
    pub further: [u64; ATTR_EX_REST],
}

/// Words of [`ibv_device_attr_ex`] after these.
const ATTR_EX_REST: usize = 16;

pub(crate) const IBV_LINK_LAYER_ETHERNET: u8 = 2;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_port_attr {
    pub state: c_int,
    pub max_mtu: c_int,
    pub active_mtu: c_int,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
}

pub(crate) const IBV_EVENT_CQ_ERR: c_int = 0;
pub(crate) const IBV_EVENT_QP_FATAL: c_int = 1;
pub(crate) const IBV_EVENT_QP_REQ_ERR: c_int = 2;
pub(crate) const IBV_EVENT_QP_ACCESS_ERR: c_int = 3;
pub(crate) const IBV_EVENT_COMM_EST: c_int = 4;
pub(crate) const IBV_EVENT_SQ_DRAINED: c_int = 5;
pub(crate) const IBV_EVENT_DEVICE_FATAL: c_int = 8;
pub(crate) const IBV_EVENT_PORT_ACTIVE: c_int = 9;
pub(crate) const IBV_EVENT_PORT_ERR: c_int = 10;
pub(crate) const IBV_EVENT_LID_CHANGE: c_int = 11;
pub(crate) const IBV_EVENT_PKEY_CHANGE: c_int = 12;
pub(crate) const IBV_EVENT_SM_CHANGE: c_int = 13;
pub(crate) const IBV_EVENT_SRQ_ERR: c_int = 14;
pub(crate) const IBV_EVENT_SRQ_LIMIT_REACHED: c_int = 15;
pub(crate) const IBV_EVENT_QP_LAST_WQE_REACHED: c_int = 16;
pub(crate) const IBV_EVENT_CLIENT_REREGISTER: c_int = 17;
pub(crate) const IBV_EVENT_GID_CHANGE: c_int = 18;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union ibv_async_element {
    pub cq: *mut ibv_cq,
    pub qp: *mut ibv_qp,
    pub srq: *mut ibv_srq,
    pub port_num: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_async_event {
    pub element: ibv_async_element,
    pub event_type: c_int,
}

pub(crate) const IBV_WC_SEND: c_int = 0;
pub(crate) const IBV_WC_RDMA_WRITE: c_int = 1;
pub(crate) const IBV_WC_RDMA_READ: c_int = 2;
pub(crate) const IBV_WC_RECV: c_int = 1 << 7;

pub(crate) const IBV_WC_WITH_INV: c_uint = 1 << 3;

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_wc {
    pub wr_id: u64,
    pub status: c_int,
    pub opcode: c_int,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// `imm_data` or `invalidated_rkey`, as `wc_flags` says.
    pub ex: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

pub(crate) const IBV_ACCESS_LOCAL_WRITE: c_int = 1;
pub(crate) const IBV_ACCESS_REMOTE_WRITE: c_int = 1 << 1;
pub(crate) const IBV_ACCESS_REMOTE_READ: c_int = 1 << 2;

#[repr(C)]
pub(crate) struct ibv_pd {
    pub context: *mut ibv_context,
    pub handle: u32,
}

#[repr(C)]
pub(crate) struct ibv_mr {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_global_route {
    pub dgid: ibv_gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_ah_attr {
    pub grh: ibv_global_route,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_srq_attr {
    pub max_wr: u32,
    pub max_sge: u32,
    pub srq_limit: u32,
}

#[repr(C)]
pub(crate) struct ibv_srq_init_attr {
    pub srq_context: *mut c_void,
    pub attr: ibv_srq_attr,
}

pub(crate) const IBV_SRQ_LIMIT: c_int = 1 << 1;

pub(crate) const IBV_QPT_RC: c_int = 2;

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_qp_cap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

#[repr(C)]
pub(crate) struct ibv_qp_init_attr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub cap: ibv_qp_cap,
    pub qp_type: c_int,
    pub sq_sig_all: c_int,
}

pub(crate) const IBV_QP_STATE: c_int = 1;
pub(crate) const IBV_QP_AV: c_int = 1 << 7;
pub(crate) const IBV_QP_MIN_RNR_TIMER: c_int = 1 << 15;
pub(crate) const IBV_QPS_INIT: c_int = 1;
pub(crate) const IBV_QPS_RTR: c_int = 2;
pub(crate) const IBV_QPS_RTS: c_int = 3;
pub(crate) const IBV_QPS_ERR: c_int = 6;

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_qp_attr {
    pub qp_state: c_int,
    pub cur_qp_state: c_int,
    pub path_mtu: c_int,
    pub path_mig_state: c_int,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub cap: ibv_qp_cap,
    pub ah_attr: ibv_ah_attr,
    pub alt_ah_attr: ibv_ah_attr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

pub(crate) const IBV_WR_RDMA_WRITE: c_int = 0;
pub(crate) const IBV_WR_SEND: c_int = 2;
pub(crate) const IBV_WR_RDMA_READ: c_int = 4;
pub(crate) const IBV_WR_SEND_WITH_INV: c_int = 9;

pub(crate) const IBV_SEND_FENCE: c_uint = 1;
pub(crate) const IBV_SEND_SIGNALED: c_uint = 1 << 1;
pub(crate) const IBV_SEND_INLINE: c_uint = 1 << 3;

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_wr_rdma {
    pub remote_addr: u64,
    pub rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_wr_atomic {
    pub remote_addr: u64,
    pub compare_add: u64,
    pub swap: u64,
    pub rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union ibv_wr_union {
    pub rdma: ibv_wr_rdma,
    pub atomic: ibv_wr_atomic,
}

/// The last union of `ibv_send_wr`, for memory windows and segmentation: unused, and part of the
/// size.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_wr_tail {
    pub words: std::mem::MaybeUninit<[u64; 6]>,
}

impl ibv_wr_tail {
    pub(crate) const UNUSED: Self = Self {
        words: std::mem::MaybeUninit::uninit(),
    };
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_send_wr {
    pub wr_id: u64,
    pub next: *mut Self,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
    pub opcode: c_int,
    pub send_flags: c_uint,
    /// `imm_data` or `invalidate_rkey`, as `opcode` says.
    pub ex: u32,
    pub wr: ibv_wr_union,
    pub remote_srqn: u32,
    pub tail: ibv_wr_tail,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_recv_wr {
    pub wr_id: u64,
    pub next: *mut Self,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
}

#[repr(C)]
pub(crate) struct ibv_srq {
    pub context: *mut ibv_context,
    pub srq_context: *mut c_void,
    pub pd: *mut ibv_pd,
    pub handle: u32,
    pub mutex: libc::pthread_mutex_t,
    pub cond: libc::pthread_cond_t,
    pub events_completed: u32,
}

#[repr(C)]
pub(crate) struct ibv_qp {
    pub context: *mut ibv_context,
    pub qp_context: *mut c_void,
    pub pd: *mut ibv_pd,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub handle: u32,
    pub qp_num: u32,
    pub state: c_int,
    pub qp_type: c_int,
    pub mutex: libc::pthread_mutex_t,
    pub cond: libc::pthread_cond_t,
    pub events_completed: u32,
}

#[repr(C)]
pub(crate) struct ibv_comp_channel {
    pub context: *mut ibv_context,
    pub fd: c_int,
    pub refcnt: c_int,
}

#[repr(C)]
pub(crate) struct ibv_cq {
    pub context: *mut ibv_context,
    pub channel: *mut ibv_comp_channel,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
    pub mutex: libc::pthread_mutex_t,
    pub cond: libc::pthread_cond_t,
    pub comp_events_completed: u32,
    pub async_events_completed: u32,
}

#[repr(C)]
pub(crate) struct ibv_device {
    pub ops: [Unused; 2],
    pub node_type: c_int,
    pub transport_type: c_int,
    pub name: [c_char; 64],
    pub dev_name: [c_char; 64],
    pub dev_path: [c_char; 256],
    pub ibdev_path: [c_char; 256],
}

pub(crate) type PollCq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
pub(crate) type ReqNotifyCq = unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;
pub(crate) type PostSend =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
pub(crate) type PostRecv =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
pub(crate) type PostSrqRecv =
    unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;

/// The entry points of the device's own library, as the inline functions of `verbs.h` call them.
#[repr(C)]
pub(crate) struct ibv_context_ops {
    pub compat_query_to_dereg_mr: [Unused; 7],
    pub alloc_bind_dealloc_mw: [Unused; 3],
    pub compat_create_cq: Unused,
    pub poll_cq: Option<PollCq>,
    pub req_notify_cq: Option<ReqNotifyCq>,
    pub compat_cq_event_to_destroy_srq: [Unused; 7],
    pub post_srq_recv: Option<PostSrqRecv>,
    pub compat_create_to_destroy_qp: [Unused; 4],
    pub post_send: Option<PostSend>,
    pub post_recv: Option<PostRecv>,
    pub compat_create_ah_to_async_event: [Unused; 5],
}

#[repr(C)]
pub(crate) struct ibv_context {
    pub device: *mut ibv_device,
    pub ops: ibv_context_ops,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    pub mutex: libc::pthread_mutex_t,
    pub abi_compat: *mut c_void,
}

pub(crate) type QueryDeviceEx =
    unsafe extern "C" fn(*mut ibv_context, *const c_void, *mut ibv_device_attr_ex, usize) -> c_int;

/// The struct around an [`ibv_context`] whose `abi_compat` is [`VERBS_ABI_IS_EXTENDED`]. It grows
/// at its beginning: offsets count from `context`, and `sz` is the size of what there is.
#[repr(C)]
pub(crate) struct verbs_context {
    pub newer: [Unused; 26],
    pub private: *mut c_void,
    pub query_device_ex: Option<QueryDeviceEx>,
    pub older: [Unused; 10],
    pub placeholder3: u64,
    pub sz: usize,
    pub context: ibv_context,
}

pub(crate) const VERBS_ABI_IS_EXTENDED: usize = usize::MAX;
