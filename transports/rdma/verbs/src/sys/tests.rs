//! Tests that the structs and constants of this folder agree with rdma-core's headers.
//!
//! `layout.txt` is the output of a C program compiled with the headers of rdma-core 44 on x86-64.
//! One test compares every size, offset and constant with it. A second test generates, compiles and
//! runs the C program again, on machines that have the headers and a compiler.

use std::fmt::Write;
use std::io::Write as _;
use std::mem::offset_of;
use std::process::Command;

use super::cm::*;
use super::verbs::*;

/// One comparison: the name and value in Rust, and the C expression for it.
struct Fact {
    name: String,
    value: i64,
    c: String,
}

macro_rules! c_name {
    ($field:ident) => {
        stringify!($field)
    };
    ($field:ident $c:ident) => {
        stringify!($c)
    };
}

macro_rules! facts {
    ($($kind:ident $name:ident { $($field:ident $(: $c:ident)?),* })*; $($constant:ident),* $(,)?) => {
        fn facts() -> Vec<Fact> {
            let mut facts = Vec::new();
            $(
                facts.push(Fact {
                    name: format!("{} *", stringify!($name)),
                    value: size_of::<$name>() as i64,
                    c: concat!("sizeof(", stringify!($kind), " ", stringify!($name), ")").to_owned(),
                });
                $(facts.push(Fact {
                    name: format!("{} {}", stringify!($name), stringify!($field)),
                    value: offset_of!($name, $field) as i64,
                    c: format!(
                        "offsetof({} {}, {})",
                        stringify!($kind),
                        stringify!($name),
                        c_name!($field $($c)?)
                    ),
                });)*
            )*
            $(facts.push(Fact {
                name: format!("{} =", stringify!($constant)),
                value: $constant as i64,
                c: stringify!($constant).to_owned(),
            });)*
            facts
        }
    };
}

#[rustfmt::skip]
facts! {
    union ibv_gid { raw }
    struct ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex }
    struct ibv_device_attr { fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id,
        vendor_part_id, hw_ver, max_qp, max_qp_wr, device_cap_flags, max_sge, max_sge_rd, max_cq, max_cqe,
        max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom,
        max_ee_init_rd_atom, atomic_cap, max_ee, max_rdd, max_mw, max_raw_ipv6_qp, max_raw_ethy_qp,
        max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach, max_ah, max_fmr, max_map_per_fmr,
        max_srq, max_srq_wr, max_srq_sge, max_pkeys, local_ca_ack_delay, phys_port_cnt }
    struct ibv_odp_caps { general_caps, per_transport_caps }
    struct ibv_device_attr_ex { orig_attr, comp_mask, odp_caps, completion_timestamp_mask,
        further: hca_core_clock }
    struct ibv_port_attr { state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, bad_pkey_cntr,
        qkey_viol_cntr, pkey_tbl_len, lid, sm_lid, lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply,
        active_width, active_speed, phys_state, link_layer, flags, port_cap_flags2 }
    struct ibv_async_event { element, event_type }
    struct ibv_wc { wr_id, status, opcode, vendor_err, byte_len, ex: imm_data, qp_num, src_qp, wc_flags,
        pkey_index, slid, sl, dlid_path_bits }
    struct ibv_pd { context, handle }
    struct ibv_mr { context, pd, addr, length, handle, lkey, rkey }
    struct ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
    struct ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
    struct ibv_srq_attr { max_wr, max_sge, srq_limit }
    struct ibv_srq_init_attr { srq_context, attr }
    struct ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
    struct ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
    struct ibv_qp_attr { qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num,
        qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index, alt_pkey_index, en_sqd_async_notify,
        sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt,
        rnr_retry, alt_port_num, alt_timeout, rate_limit }
    struct ibv_sge { addr, length, lkey }
    struct ibv_send_wr { wr_id, next, sg_list, num_sge, opcode, send_flags, ex: imm_data, wr, remote_srqn:
        qp_type, tail: bind_mw }
    struct ibv_recv_wr { wr_id, next, sg_list, num_sge }
    struct ibv_srq { context, srq_context, pd, handle, mutex, cond, events_completed }
    struct ibv_qp { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type, mutex,
        cond, events_completed }
    struct ibv_comp_channel { context, fd, refcnt }
    struct ibv_cq { context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed,
        async_events_completed }
    struct ibv_device { ops: _ops, node_type, transport_type, name, dev_name, dev_path, ibdev_path }
    struct ibv_context_ops { compat_query_to_dereg_mr: _compat_query_device, alloc_bind_dealloc_mw: alloc_mw,
        compat_create_cq: _compat_create_cq, poll_cq, req_notify_cq, compat_cq_event_to_destroy_srq:
        _compat_cq_event, post_srq_recv, compat_create_to_destroy_qp: _compat_create_qp, post_send, post_recv,
        compat_create_ah_to_async_event: _compat_create_ah }
    struct ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat }
    struct verbs_context { newer: query_port, private: priv, query_device_ex, older: ibv_destroy_flow,
        placeholder3: _ABI_placeholder3, sz, context }
    struct rdma_event_channel { fd }
    struct rdma_ib_addr { sgid, dgid, pkey }
    struct rdma_addr { src_storage, dst_storage, ibaddr: addr }
    struct rdma_route { addr, path_rec, num_paths }
    struct rdma_cm_id { verbs, channel, context, qp, route, ps, port_num, event, send_cq_channel, send_cq,
        recv_cq_channel, recv_cq, srq, pd, qp_type }
    struct rdma_conn_param { private_data, private_data_len, responder_resources, initiator_depth,
        flow_control, retry_count, rnr_retry_count, srq, qp_num }
    struct rdma_ud_param { private_data, private_data_len, ah_attr, qp_num, qkey }
    struct rdma_cm_event { id, listen_id, event, status, param }
    ;
    IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2, IBV_TRANSPORT_IWARP,
    IBV_DEVICE_MEM_MGT_EXTENSIONS, IBV_ODP_SUPPORT, IBV_ODP_SUPPORT_IMPLICIT, IBV_ODP_SUPPORT_SEND,
    IBV_ODP_SUPPORT_RECV, IBV_ODP_SUPPORT_WRITE, IBV_ODP_SUPPORT_READ, IBV_ODP_SUPPORT_ATOMIC,
    IBV_ODP_SUPPORT_SRQ_RECV,
    IBV_LINK_LAYER_ETHERNET, IBV_EVENT_CQ_ERR, IBV_EVENT_QP_FATAL,
    IBV_EVENT_QP_REQ_ERR, IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_COMM_EST, IBV_EVENT_SQ_DRAINED,
    IBV_EVENT_DEVICE_FATAL, IBV_EVENT_PORT_ACTIVE,
    IBV_EVENT_PORT_ERR, IBV_EVENT_LID_CHANGE, IBV_EVENT_PKEY_CHANGE, IBV_EVENT_SM_CHANGE, IBV_EVENT_SRQ_ERR,
    IBV_EVENT_SRQ_LIMIT_REACHED, IBV_EVENT_QP_LAST_WQE_REACHED, IBV_EVENT_CLIENT_REREGISTER,
    IBV_EVENT_GID_CHANGE, IBV_WC_SEND, IBV_WC_RDMA_WRITE, IBV_WC_RDMA_READ, 
    IBV_WC_RECV, IBV_WC_WITH_INV, IBV_ACCESS_LOCAL_WRITE,
    IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ, IBV_SRQ_LIMIT, IBV_QPT_RC, IBV_QP_STATE, IBV_QP_AV,
    IBV_QP_MIN_RNR_TIMER, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_ERR, IBV_WR_RDMA_WRITE, IBV_WR_SEND, IBV_WR_RDMA_READ, IBV_WR_SEND_WITH_INV,
    IBV_SEND_FENCE, IBV_SEND_SIGNALED, IBV_SEND_INLINE, RDMA_PS_TCP,
    RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_ADDR_ERROR, RDMA_CM_EVENT_ROUTE_RESOLVED,
    RDMA_CM_EVENT_ROUTE_ERROR, RDMA_CM_EVENT_CONNECT_REQUEST, 
    RDMA_CM_EVENT_CONNECT_ERROR, RDMA_CM_EVENT_UNREACHABLE, RDMA_CM_EVENT_REJECTED, RDMA_CM_EVENT_ESTABLISHED,
    RDMA_CM_EVENT_DISCONNECTED, RDMA_CM_EVENT_DEVICE_REMOVAL, 
    RDMA_CM_EVENT_ADDR_CHANGE, RDMA_CM_EVENT_TIMEWAIT_EXIT, RDMA_OPTION_ID,
    RDMA_OPTION_ID_TOS, RDMA_OPTION_ID_AFONLY, RDMA_OPTION_ID_ACK_TIMEOUT
}

/// Asserts that the lines of the C program's output and the facts are the same.
fn compare(output: &str) {
    let mut ours = String::new();
    for fact in facts() {
        writeln!(ours, "{} {}", fact.name, fact.value).expect("a string takes everything");
    }
    let differing: Vec<_> = ours
        .lines()
        .zip(output.lines())
        .filter(|(ours, theirs)| ours != theirs)
        .collect();
    assert!(differing.is_empty(), "(ours, rdma-core's): {differing:#?}");
    assert_eq!(ours.lines().count(), output.lines().count());
}

/// Goal: no struct differs from the library's. Method: the table of rdma-core 44.
#[test]
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn structs_are_those_of_rdma_core_44() {
    compare(include_str!("layout.txt"));
}

/// Goal: no struct differs from the installed headers. Method: a C program that prints them.
#[test]
fn structs_are_those_of_the_installed_headers() {
    let mut source = String::from(
        "#include <stdio.h>\n#include <stddef.h>\n#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n\
         int main(void) {\n",
    );
    for Fact { name, c, .. } in facts() {
        writeln!(source, "  printf(\"{name} %lld\\n\", (long long)({c}));")
            .expect("a string takes everything");
    }
    source.push_str("  return 0;\n}\n");
    let dir = tempfile::tempdir().expect("a folder for a program");
    let (program, file) = (dir.path().join("probe"), dir.path().join("probe.c"));
    std::fs::write(&file, source).expect("writing the program");
    let compiled = Command::new("cc")
        .arg("-o")
        .arg(&program)
        .arg(&file)
        .output();
    let reason = match compiled {
        Err(error) => format!("no C compiler: {error}"),
        Ok(out) if !out.status.success() => {
            let text = String::from_utf8_lossy(&out.stderr).into_owned();
            assert!(
                text.contains("No such file or directory"),
                "the headers are there, and the program does not compile:\n{text}"
            );
            "no headers (libibverbs-dev, librdmacm-dev)".to_owned()
        }
        Ok(_) => {
            let out = Command::new(&program)
                .output()
                .expect("running the program");
            compare(&String::from_utf8_lossy(&out.stdout));
            return;
        }
    };
    // Write around the test's captured output, so that a skip is visible.
    let _ = writeln!(
        std::io::stderr().lock(),
        "SKIPPED: structs_are_those_of_the_installed_headers: {reason}"
    );
}
