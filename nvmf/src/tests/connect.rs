//! Tests of Connect and disconnection: which hosts are admitted, the status of each refusal, and
//! that all resources are released.

use std::time::Duration;

use nacre_nvmf_wire::fabrics::{self, ConnectData, InvalidParameter};
use nacre_nvmf_wire::opcode::{admin, io as opcode};
use nacre_nvmf_wire::{Cqe, Nqn, Sgl, Sqe, StatusCode};
use zerocopy::IntoBytes;

use super::rig::*;
use crate::subsystems::{Refusal, TargetConfig};
use crate::transport::{Address, CloseWhy, ListenerId, TransportType};

pub(super) fn refused_for(cqe: &Cqe, parameter: InvalidParameter) {
    assert_eq!(cqe.status().code(), StatusCode::CONNECT_INVALID_PARAMETERS);
    assert!(cqe.status().dnr());
    assert_eq!(cqe.dword0(), parameter.dword0(), "{parameter}");
}

/// Goal: a host that connects, enables, connects I/O queues and leaves, leaves nothing behind.
#[test]
fn comes_and_goes() {
    let mut rig = Rig::with_malloc();
    let (admin, cntlid) = rig.admin();
    let io = rig.io_queue(cntlid, 1);
    let other = rig.io_queue(cntlid, 2);
    assert_eq!(rig.group.queue_pairs(), 3);
    rig.hang_up(io);
    assert_eq!(rig.group.queue_pairs(), 2);
    assert_eq!(
        rig.target.controller_count(),
        1,
        "an I/O queue is not the controller"
    );
    rig.hang_up(admin);
    rig.turn();
    rig.turn();
    assert!(rig.wire.borrow().closes.contains(&(other, CloseWhy::Now)));
    rig.assert_clean();
}

/// Goal: a command before the response to Connect costs that connection, and nothing else. Method:
/// a second Connect, with its data, while the first one's is on its way, which then arrives.
#[test]
fn nothing_comes_before_the_answer_to_connect() {
    let mut rig = Rig::with_malloc();
    let data = ConnectData::new(rig.hostid, 0xffff, &nqn(SUBNQN), &nqn(HOSTNQN));
    let connect = |cid, sgl| {
        let connect = fabrics::Connect {
            qid: 0,
            sqsize: 31,
            attributes: fabrics::ConnectAttributes::empty(),
            priority_class: 0,
            kato_ms: 15_000,
        };
        connect.to_sqe(cid, sgl)
    };
    let conn = rig.open();
    rig.send(conn, connect(1, Sgl::Transport { length: 1024 }), None);
    rig.turn();
    let mut buf = rig.pools.admin.acquire(1024).unwrap();
    buf.bytes_mut().unwrap().copy_from_slice(data.as_bytes());
    let (offset, length) = (0, 1024);
    let in_capsule = connect(2, Sgl::InCapsule { offset, length });
    rig.send(conn, in_capsule, Some(buf));
    let (_, tag, mut buf) = rig.wire.borrow_mut().fetches.pop_front().unwrap();
    buf.bytes_mut().unwrap().copy_from_slice(data.as_bytes());
    rig.fetched(conn, tag, buf);
    rig.turn();
    let refused = StatusCode::COMMAND_SEQUENCE_ERROR.with_dnr();
    assert_eq!(rig.statuses(), [(2, refused)]);
    rig.turn();
    assert!(rig.wire.borrow().closes.iter().any(|(c, _)| *c == conn));
    rig.assert_clean();
    rig.admin();
}

#[test]
fn unknown_subsystem() {
    let mut rig = Rig::with_malloc();
    let (_, cqe) = rig.connect_as(HOSTNQN, "nqn.2025-01.io.nacre:other", 0, 0xffff, 32);
    refused_for(&cqe, InvalidParameter::SUBNQN);
    // Without DNR while subsystems are coming: Linux does not reconnect after a refusal with it.
    let expected = [(); 2].map(|()| rig.target.expect_subsystems());
    let [first, second] = expected;
    drop(first);
    let (_, cqe) = rig.connect_as(HOSTNQN, "nqn.2025-01.io.nacre:other", 0, 0xffff, 32);
    assert_eq!(cqe.status(), StatusCode::CONNECT_INVALID_PARAMETERS);
    assert_eq!(cqe.dword0(), InvalidParameter::SUBNQN.dword0());
    drop(second);
    let (_, cqe) = rig.connect_as(HOSTNQN, "nqn.2025-01.io.nacre:other", 0, 0xffff, 32);
    refused_for(&cqe, InvalidParameter::SUBNQN);
    rig.assert_clean();
}

#[test]
fn host_not_allowed_then_allowed_then_removed() {
    let mut rig = Rig::with_malloc();
    let (subsystem, host) = (nqn(SUBNQN), nqn(HOSTNQN));
    rig.target.set_allow_any_host(&subsystem, false).unwrap();
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 0, 0xffff, 32);
    assert_eq!(cqe.status(), StatusCode::CONNECT_INVALID_HOST.with_dnr());
    rig.target.add_host(&subsystem, &host).unwrap();
    rig.admin();
    rig.target.remove_host(&subsystem, &host).unwrap();
    rig.turn();
    rig.assert_clean();
}

/// Goal: a host is served under its name, well formed or not: where any host is allowed, and where
/// that name is allowed. Method: names seen with older nvme-cli and a CSI driver, and the longest
/// one.
#[test]
fn hosts_with_names_that_are_no_nqns() {
    let mut rig = Rig::with_malloc();
    let subsystem = nqn(SUBNQN);
    let longest = "x".repeat(Nqn::MAX_BYTES);
    let connect = |rig: &mut Rig, host: &Nqn| {
        let data = ConnectData::new(rig.hostid, 0xffff, &nqn(SUBNQN), host);
        let (conn, cqe) = rig.connect_with(0, 32, &data);
        rig.hang_up(conn);
        rig.turn();
        cqe.status()
    };
    for name in [
        "nqn.2014-08.org.nvmexpress:uuid:07e4a0a641d54bff96b28a173dcfb6b5",
        "hostnqn",
        "/var/lib/kubelet/plugins/csi/pv",
        &longest,
    ] {
        let host = Nqn::foreign(name).unwrap();
        assert_eq!(connect(&mut rig, &host), StatusCode::SUCCESS, "{name}");
        rig.target.set_allow_any_host(&subsystem, false).unwrap();
        assert_eq!(
            connect(&mut rig, &host),
            StatusCode::CONNECT_INVALID_HOST.with_dnr(),
            "{name}"
        );
        rig.target.add_host(&subsystem, &host).unwrap();
        assert_eq!(connect(&mut rig, &host), StatusCode::SUCCESS, "{name}");
        rig.target.set_allow_any_host(&subsystem, true).unwrap();
    }
    rig.assert_clean();
    // Without an end, it is no name.
    let mut data = ConnectData::new(rig.hostid, 0xffff, &subsystem, &nqn(HOSTNQN));
    data.hostnqn = [b'x'; 256];
    let (_, cqe) = rig.connect_with(0, 32, &data);
    refused_for(&cqe, InvalidParameter::HOSTNQN);
}

/// Goal: a host without a name is known by its identifier, on its I/O queues too, and admitted by
/// the name derived from it. A host without either is refused.
#[test]
fn a_host_without_a_name() {
    let mut rig = Rig::with_malloc();
    let subsystem = nqn(SUBNQN);
    rig.target.set_allow_any_host(&subsystem, false).unwrap();
    let (_, cqe) = rig.connect_nameless([7; 16], 0, 0xffff);
    assert_eq!(cqe.status(), StatusCode::CONNECT_INVALID_HOST.with_dnr());
    let named = Nqn::from_uuid(uuid::Uuid::from_bytes([7; 16]));
    rig.target.add_host(&subsystem, &named).unwrap();
    let (admin, cqe) = rig.connect_nameless([7; 16], 0, 0xffff);
    assert!(cqe.status().is_success(), "{}", cqe.status());
    let cntlid = cqe.dword0() as u16;
    rig.enable(admin);
    let (_, cqe) = rig.connect_nameless([7; 16], 1, cntlid);
    assert!(cqe.status().is_success(), "{}", cqe.status());
    let (_, cqe) = rig.connect_nameless([8; 16], 2, cntlid);
    refused_for(&cqe, InvalidParameter::HOSTNQN);
    let controller = rig.target.subsystem(&subsystem).unwrap().controller(cntlid);
    assert_eq!(controller.unwrap().hostnqn, named);
    let (_, cqe) = rig.connect_nameless([0; 16], 0, 0xffff);
    refused_for(&cqe, InvalidParameter::HOSTNQN);
}

#[test]
fn queue_sizes_have_limits() {
    let mut rig = Rig::with_malloc();
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 0, 0xffff, 1);
    refused_for(&cqe, InvalidParameter::SQSIZE);
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 0, 0xffff, 129);
    refused_for(&cqe, InvalidParameter::SQSIZE);
    let (_, cntlid) = rig.admin();
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 1, cntlid, 129);
    refused_for(&cqe, InvalidParameter::SQSIZE);
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 128, cntlid, 16);
    refused_for(&cqe, InvalidParameter::QID);
}

#[test]
fn io_queues_belong_to_their_host_and_controller() {
    let mut rig = Rig::with_malloc();
    let (_, cntlid) = rig.admin();
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 1, cntlid + 1, 16);
    refused_for(&cqe, InvalidParameter::CNTLID);
    let (_, cqe) = rig.connect_as("nqn.2025-01.io.nacre:else", SUBNQN, 1, cntlid, 16);
    refused_for(&cqe, InvalidParameter::HOSTNQN);
    rig.hostid = [2; 16];
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 1, cntlid, 16);
    refused_for(&cqe, InvalidParameter::HOSTID);
    // What says nothing contradicts nothing, but it is no name either.
    rig.hostid = [0; 16];
    rig.io_queue(cntlid, 2);
    let (_, cqe) = rig.connect_as("nqn.2025-01.io.nacre:else", SUBNQN, 3, cntlid, 16);
    refused_for(&cqe, InvalidParameter::HOSTNQN);
    rig.hostid = [1; 16];
    rig.io_queue(cntlid, 1);
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 1, cntlid, 16);
    assert_eq!(
        cqe.status(),
        StatusCode::COMMAND_SEQUENCE_ERROR.with_dnr(),
        "a taken queue id"
    );
}

/// Goal: an I/O queue comes through the listener of its admin queue, whose limits the controller
/// announced. Another listener refuses it permanently, without effect on the controller.
#[test]
fn io_queues_come_through_the_listener_of_their_controller() {
    let mut rig = Rig::with_malloc();
    let second = Address::Loopback("second".into());
    rig.target
        .add_listener(&nqn(SUBNQN), TransportType::Loopback, &second)
        .unwrap();
    let (_, cntlid) = rig.admin();
    rig.listener = ListenerId(2);
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 1, cntlid, 16);
    refused_for(&cqe, InvalidParameter::CNTLID);
    // That listener accepts it for a controller of its own.
    let (_, there) = rig.admin();
    rig.io_queue(there, 1);
    rig.listener = ListenerId(1);
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 2, there, 16);
    refused_for(&cqe, InvalidParameter::CNTLID);
    rig.io_queue(cntlid, 1);
}

#[test]
fn io_queue_of_a_controller_that_is_not_enabled() {
    let mut rig = Rig::with_malloc();
    let (conn, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 0, 0xffff, 32);
    let cntlid = cqe.dword0() as u16;
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 1, cntlid, 16);
    assert_eq!(cqe.status().code(), StatusCode::COMMAND_SEQUENCE_ERROR);
    // Neither does an admin command work yet.
    let cid = rig.cid();
    let status = rig.status(conn, Sqe::new(admin::IDENTIFY, cid), &[]);
    assert_eq!(status.code(), StatusCode::COMMAND_SEQUENCE_ERROR);
}

/// Goal: anything but a Connect as the first command costs the connection, after an answer.
#[test]
fn first_command_is_not_a_connect() {
    let mut rig = Rig::with_malloc();
    let conn = rig.open();
    let status = rig.status(conn, Sqe::for_namespace(opcode::FLUSH, 9, 1), &[]);
    assert_eq!(status.code(), StatusCode::COMMAND_SEQUENCE_ERROR);
    assert!(
        rig.wire
            .borrow()
            .closes
            .contains(&(conn, CloseWhy::Drained))
    );
    rig.assert_clean();
}

#[test]
fn silent_connections_are_closed() {
    let mut rig = Rig::with_malloc();
    rig.open();
    rig.turn();
    rig.pass(Duration::from_secs(11));
    rig.assert_clean();
}

/// Goal: names that break the grammar are refused by field, whatever bytes they are.
#[test]
fn bad_names() {
    let mut rig = Rig::with_malloc();
    let conn = rig.open();
    let mut data = ConnectData::new([1; 16], 0xffff, &nqn(SUBNQN), &nqn(HOSTNQN));
    data.hostnqn = [0xff; 256];
    let connect = fabrics::Connect {
        qid: 0,
        sqsize: 31,
        attributes: fabrics::ConnectAttributes::empty(),
        priority_class: 0,
        kato_ms: 0,
    };
    let sqe = connect.to_sqe(1, Sgl::Transport { length: 1024 });
    let cqe = rig.call(conn, sqe, data.as_bytes()).cqe;
    refused_for(&cqe, InvalidParameter::HOSTNQN);
}

#[test]
fn keep_alive_expires_and_traffic_holds_it_off() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    for _ in 0..3 {
        rig.pass(Duration::from_secs(10));
        let cid = rig.cid();
        let status = rig.status(io, Sqe::for_namespace(opcode::FLUSH, cid, 1), &[]);
        assert!(
            status.is_success(),
            "traffic on an I/O queue counts: {status}"
        );
    }
    // The upkeep that sees the last command, then silence.
    rig.pass(Duration::from_millis(200));
    rig.pass(Duration::from_secs(16));
    rig.assert_clean();
}

#[test]
fn disconnect_deletes_the_queue_and_it_can_come_back() {
    let mut rig = Rig::with_malloc();
    let (_, cntlid) = rig.admin();
    let io = rig.io_queue(cntlid, 1);
    let cid = rig.cid();
    let status = rig.status(io, fabrics::disconnect(cid), &[]);
    assert!(status.is_success());
    rig.turn();
    rig.io_queue(cntlid, 1);
}

/// Goal: a reset by the host (CC.EN to 0) ends its I/O queues, not the association.
#[test]
fn controller_reset_ends_io_queues() {
    let mut rig = Rig::with_malloc();
    let (conn, cntlid) = rig.admin();
    rig.io_queue(cntlid, 1);
    let set = fabrics::PropertySet {
        size: fabrics::PropertySize::Four,
        offset: nacre_nvmf_wire::registers::offset::CC,
        value: 0,
    };
    let cid = rig.cid();
    assert!(rig.status(conn, set.to_sqe(cid), &[]).is_success());
    rig.turn();
    rig.turn();
    assert_eq!(rig.group.queue_pairs(), 1);
    rig.enable(conn);
    rig.io_queue(cntlid, 1);
}

/// Goal: the limit holds for queues of every kind and transport, a host beyond it learns so from
/// the status of its Connect, and each queue that goes makes room.
#[test]
fn connected_queues_are_bounded() {
    let mut rig = Rig::new(TargetConfig {
        max_connections: 3,
        ..TargetConfig::default()
    });
    let (_, cntlid) = rig.admin();
    let first = rig.io_queue(cntlid, 1);
    rig.io_queue(cntlid, 2);
    let busy = StatusCode::CONNECT_CONTROLLER_BUSY;
    for (qid, cntlid) in [(0, 0xffff), (3, cntlid)] {
        let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, qid, cntlid, 32);
        assert_eq!(cqe.status(), busy, "no DNR: it may work later");
    }
    // A Connect that is refused for another reason takes no place.
    rig.hang_up(first);
    rig.turn();
    for _ in 0..5 {
        let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 2, cntlid, 32);
        assert_ne!(cqe.status(), busy);
    }
    rig.io_queue(cntlid, 3);
    assert_eq!(rig.target.connections(), 3);
}

/// Goal: ids are unique, and a freed one is used again last.
#[test]
fn controller_ids_rotate() {
    let mut rig = Rig::with_malloc();
    let (a, first) = rig.admin();
    let (_, second) = rig.admin();
    assert_ne!(first, second);
    rig.hang_up(a);
    rig.turn();
    let (_, third) = rig.admin();
    assert!(third != first && third != second);
}

#[test]
fn deleting_a_subsystem_disconnects_its_hosts() {
    let mut rig = Rig::with_malloc();
    let (_, cntlid) = rig.admin();
    rig.io_queue(cntlid, 1);
    let gone = rig.target.delete_subsystem(&nqn(SUBNQN)).unwrap();
    rig.turn();
    rig.turn();
    assert!(gone.controllers().is_empty());
    let late = gone.admit(
        0xffff,
        &nqn(HOSTNQN),
        [1; 16],
        ListenerId(1),
        TransportType::Loopback,
    );
    assert_eq!(late.err(), Some(Refusal::Busy));
    rig.assert_clean();
}
