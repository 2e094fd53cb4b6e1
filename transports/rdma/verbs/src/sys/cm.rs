//! The structs and constants of librdmacm, as rdma-core 44 lays them out (`rdma/rdma_cma.h`,
//! `RDMACM_1.0`), under their C names.

use std::ffi::{c_int, c_void};

use super::verbs::{
    ibv_ah_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_gid, ibv_pd, ibv_qp, ibv_srq,
};

pub(crate) const RDMA_PS_TCP: c_int = 0x0106;

pub(crate) const RDMA_CM_EVENT_ADDR_RESOLVED: c_int = 0;
pub(crate) const RDMA_CM_EVENT_ADDR_ERROR: c_int = 1;
pub(crate) const RDMA_CM_EVENT_ROUTE_RESOLVED: c_int = 2;
pub(crate) const RDMA_CM_EVENT_ROUTE_ERROR: c_int = 3;
pub(crate) const RDMA_CM_EVENT_CONNECT_REQUEST: c_int = 4;
pub(crate) const RDMA_CM_EVENT_CONNECT_ERROR: c_int = 6;
pub(crate) const RDMA_CM_EVENT_UNREACHABLE: c_int = 7;
pub(crate) const RDMA_CM_EVENT_REJECTED: c_int = 8;
pub(crate) const RDMA_CM_EVENT_ESTABLISHED: c_int = 9;
pub(crate) const RDMA_CM_EVENT_DISCONNECTED: c_int = 10;
pub(crate) const RDMA_CM_EVENT_DEVICE_REMOVAL: c_int = 11;
pub(crate) const RDMA_CM_EVENT_ADDR_CHANGE: c_int = 14;
pub(crate) const RDMA_CM_EVENT_TIMEWAIT_EXIT: c_int = 15;

pub(crate) const RDMA_OPTION_ID: c_int = 0;
pub(crate) const RDMA_OPTION_ID_TOS: c_int = 0;
pub(crate) const RDMA_OPTION_ID_AFONLY: c_int = 2;
pub(crate) const RDMA_OPTION_ID_ACK_TIMEOUT: c_int = 3;

#[repr(C)]
pub(crate) struct rdma_event_channel {
    pub fd: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct rdma_ib_addr {
    pub sgid: ibv_gid,
    pub dgid: ibv_gid,
    pub pkey: u16,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct rdma_addr {
    /// A union of socket addresses; this is its largest.
    pub src_storage: libc::sockaddr_storage,
    pub dst_storage: libc::sockaddr_storage,
    pub ibaddr: rdma_ib_addr,
}

#[repr(C)]
pub(crate) struct rdma_route {
    pub addr: rdma_addr,
    pub path_rec: *mut c_void,
    pub num_paths: c_int,
}

#[repr(C)]
pub(crate) struct rdma_cm_id {
    pub verbs: *mut ibv_context,
    pub channel: *mut rdma_event_channel,
    pub context: *mut c_void,
    pub qp: *mut ibv_qp,
    pub route: rdma_route,
    pub ps: c_int,
    pub port_num: u8,
    pub event: *mut rdma_cm_event,
    pub send_cq_channel: *mut ibv_comp_channel,
    pub send_cq: *mut ibv_cq,
    pub recv_cq_channel: *mut ibv_comp_channel,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub pd: *mut ibv_pd,
    pub qp_type: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct rdma_conn_param {
    pub private_data: *const c_void,
    pub private_data_len: u8,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    pub qp_num: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct rdma_ud_param {
    pub private_data: *const c_void,
    pub private_data_len: u8,
    pub ah_attr: ibv_ah_attr,
    pub qp_num: u32,
    pub qkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union rdma_event_param {
    pub conn: rdma_conn_param,
    pub ud: rdma_ud_param,
}

#[repr(C)]
pub(crate) struct rdma_cm_event {
    pub id: *mut rdma_cm_id,
    pub listen_id: *mut rdma_cm_id,
    pub event: c_int,
    pub status: c_int,
    pub param: rdma_event_param,
}
