//! Sets the Type of Service byte (DSCP) of accepted RoCE connections.
//!
//! On the accepting side librdmacm ignores `RDMA_OPTION_ID_TOS` and uses the byte of the host's
//! request. So this module moves the queue pair to RTS itself, and the library only sends the
//! reply.

use std::mem::MaybeUninit;
use std::ptr::null_mut;

use super::super::{check, check_errno};
use super::{Cm, RdmaCmId};
use crate::sys::cm::rdma_conn_param;
use crate::sys::verbs::*;
use crate::types::VerbsError;

impl Cm {
    /// Accepts a request and sets `tos` in the packets that this side sends. `qp` is the id's queue
    /// pair, which the caller keeps alive.
    pub(super) fn accept_marked(
        &self,
        id: &RdmaCmId,
        qp: *mut ibv_qp,
        tos: u8,
        params: &mut rdma_conn_param,
    ) -> Result<(), VerbsError> {
        let accept = |params: &mut rdma_conn_param| {
            // SAFETY: the id is alive; the parameters and the data they point to are read during
            // the call.
            check_errno("rdma_accept", unsafe {
                (self.api().rdma_accept)(id.raw, params)
            })
        };
        if !self.connect_marked(id, qp, tos, params)? {
            return accept(params);
        }
        // SAFETY: the caller keeps the queue pair alive, and these fields never change.
        unsafe {
            params.qp_num = (*qp).qp_num;
            params.srq = u8::from(!(*qp).srq.is_null());
        }
        // Without a queue pair in the id, the library modifies none.
        // SAFETY: the id is alive. Only this thread uses the field: the queue pair is not destroyed
        // meanwhile, because the caller has a reference to it.
        unsafe { (*id.raw).qp = null_mut() };
        let result = accept(params);
        // SAFETY: as above.
        unsafe { (*id.raw).qp = qp };
        result
    }

    /// Moves the queue pair of a request to RTS, with `tos` as its traffic class.
    ///
    /// Returns false without a change if the request has this byte already, and on InfiniBand and
    /// iWARP, where the address vector of a queue pair does not set it.
    fn connect_marked(
        &self,
        id: &RdmaCmId,
        qp: *mut ibv_qp,
        tos: u8,
        params: &rdma_conn_param,
    ) -> Result<bool, VerbsError> {
        let attributes = |state| {
            let mut attr = ibv_qp_attr {
                qp_state: state,
                ..Default::default()
            };
            let mut mask = 0;
            // SAFETY: the id is alive; the call writes to local variables.
            check_errno("rdma_init_qp_attr", unsafe {
                (self.api().rdma_init_qp_attr)(id.raw, &mut attr, &mut mask)
            })?;
            Ok::<_, VerbsError>((attr, mask))
        };
        let modify = |(mut attr, mask): (ibv_qp_attr, i32)| {
            // SAFETY: the caller keeps the queue pair alive.
            check("ibv_modify_qp", unsafe {
                (self.api().ibv_modify_qp)(qp, &mut attr, mask)
            })
        };
        let (mut receive, receive_mask) = attributes(IBV_QPS_RTR)?;
        let has_address = receive_mask & IBV_QP_AV != 0;
        if !has_address || !self.is_ethernet(id) || receive.ah_attr.grh.traffic_class == tos {
            return Ok(false);
        }
        modify(attributes(IBV_QPS_INIT)?)?;
        receive.ah_attr.grh.traffic_class = tos;
        receive.max_dest_rd_atomic = params.responder_resources;
        modify((receive, receive_mask))?;
        let (mut send, send_mask) = attributes(IBV_QPS_RTS)?;
        send.max_rd_atomic = params.initiator_depth;
        modify((send, send_mask))?;
        Ok(true)
    }

    fn is_ethernet(&self, id: &RdmaCmId) -> bool {
        let mut port = MaybeUninit::<ibv_port_attr>::zeroed();
        // SAFETY: the id is alive and bound to a device; the call writes to a local struct.
        let result =
            unsafe { (self.api().ibv_query_port)(id.verbs(), id.port(), port.as_mut_ptr()) };
        // SAFETY: all zeros are a valid `ibv_port_attr`.
        let port = unsafe { port.assume_init() };
        result == 0 && port.link_layer == IBV_LINK_LAYER_ETHERNET
    }
}
