//! Tests of commands whose data pointer is longer or shorter than the command's data.
//!
//! Hosts round up: Linux sends 4096 bytes with each Dataset Management and 16 with a Reservation
//! Release. The length of block data must match exactly. A data structure or list may have a longer
//! pointer, whose rest is ignored. A shorter pointer is refused.

use nacre_nvmf_wire::commands::admin::{GetFeatures, GetLogPage, Identify, SetFeatures};
use nacre_nvmf_wire::commands::io::{CopyRange0, DatasetManagement, DsmRange, ReadWrite};
use nacre_nvmf_wire::commands::reservation::{
    Acquire, AcquireAction, PersistChange, Register, RegisterAction, Release, ReleaseAction,
    Report, ReservationType,
};
use nacre_nvmf_wire::fabrics::{Connect, ConnectAttributes, ConnectData};
use nacre_nvmf_wire::features::fid;
use nacre_nvmf_wire::identify::cns;
use nacre_nvmf_wire::log::lid;
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Sgl, Sqe, StatusCode};
use zerocopy::IntoBytes;

use super::rig::*;
use crate::transport::ConnId;

const TOO_SHORT_OR_LONG: StatusCode = StatusCode::DATA_SGL_LENGTH_INVALID.with_dnr();

/// How a host sends a payload.
#[derive(Debug, Clone, Copy, PartialEq)]
enum SendMethod {
    Fetched,
    InCapsule,
}

impl Rig {
    /// Sends a command with a payload of `length` bytes that starts with `data`; the rest is 0xff,
    /// which as an LBA range is far outside.
    fn send_payload(
        &mut self,
        conn: ConnId,
        sqe: Sqe,
        data: &[u8],
        length: u32,
        sent: SendMethod,
    ) -> StatusCode {
        let mut payload = data.to_vec();
        payload.resize(length as usize, 0xff);
        if sent == SendMethod::Fetched {
            return self.status(conn, sqe.with_sgl(Sgl::Transport { length }), &payload);
        }
        let mut buf = self.pools.io.acquire(payload.len()).unwrap();
        buf.bytes_mut().unwrap().copy_from_slice(&payload);
        let sqe = sqe.with_sgl(Sgl::InCapsule { offset: 0, length });
        self.send(conn, sqe, Some(buf));
        for _ in 0..8 {
            self.turn();
        }
        self.answer().cqe.status()
    }

    /// Offers a command room for `length` bytes: returns the number of filled bytes, or its status.
    fn offer(&mut self, conn: ConnId, sqe: Sqe, length: u32) -> Result<u32, StatusCode> {
        let response = self.call(conn, sqe.with_sgl(Sgl::Transport { length }), &[]);
        let status = response.cqe.status();
        let bytes: usize = response.data.iter().map(|part| part.len()).sum();
        if status.is_success() {
            Ok(bytes as u32)
        } else {
            Err(status)
        }
    }
}

/// Each I/O command with a list or a structure from the host, in an order in which all succeed.
fn lists() -> Vec<(&'static str, Sqe, Vec<u8>)> {
    let dsm = |deallocate| DatasetManagement {
        ranges: 2,
        deallocate,
        ..DatasetManagement::default()
    };
    let ranges = [DsmRange::new(8, 8), DsmRange::new(32, 1)];
    let sources = [CopyRange0::new(100, 4), CopyRange0::new(200, 4)];
    let (register, acquire, release) = (
        Register {
            action: RegisterAction::Register,
            ignore_existing_key: true,
            persist: PersistChange::Keep,
        },
        Acquire {
            action: AcquireAction::Acquire,
            ignore_existing_key: false,
            kind: ReservationType::WriteExclusive,
        },
        Release {
            action: ReleaseAction::Release,
            ignore_existing_key: false,
            kind: Some(ReservationType::WriteExclusive),
        },
    );
    let keys = |current: u64, other: u64| [current.to_le_bytes(), other.to_le_bytes()].concat();
    vec![
        (
            "Deallocate",
            dsm(true).to_sqe(0, 1),
            ranges.as_bytes().to_vec(),
        ),
        ("Hints", dsm(false).to_sqe(0, 1), ranges.as_bytes().to_vec()),
        (
            "Copy",
            copy_of(1000, 2).to_sqe(0, 1),
            sources.as_bytes().to_vec(),
        ),
        ("Register", register.to_sqe(0, 1), keys(0, 7)),
        ("Acquire", acquire.to_sqe(0, 1), keys(7, 0)),
        ("Release", release.to_sqe(0, 1), 7u64.to_le_bytes().to_vec()),
    ]
}

/// Goal: a list or a structure that is longer than the command needs is taken, and its rest
/// ignored; a shorter one is refused, and so is one above the largest transfer.
#[test]
fn lists_may_be_longer() {
    for (name, command, data) in lists() {
        let need = data.len() as u32;
        let cases = [
            (need - 1, TOO_SHORT_OR_LONG),
            (need, StatusCode::SUCCESS),
            (need + 1, StatusCode::SUCCESS),
            (4096, StatusCode::SUCCESS),
            (MAX_TRANSFER, StatusCode::SUCCESS),
            (MAX_TRANSFER + 1, TOO_SHORT_OR_LONG),
        ];
        for sent in [SendMethod::Fetched, SendMethod::InCapsule] {
            for (length, expected) in cases {
                if sent == SendMethod::InCapsule && length > MAX_TRANSFER {
                    continue;
                }
                let mut rig = Rig::with_malloc();
                let io = rig.io();
                // The commands that a reservation needs first.
                for (before, command, data) in lists() {
                    if before == name {
                        break;
                    }
                    if command.opcode >= opcode::RESERVATION_REGISTER {
                        let status = rig.send_payload(
                            io,
                            command,
                            &data,
                            data.len() as u32,
                            SendMethod::Fetched,
                        );
                        assert!(status.is_success(), "{before}: {status}");
                    }
                }
                let mut sqe = command;
                sqe.cid = rig.cid().into();
                let status = rig.send_payload(io, sqe, &data, length, sent);
                assert_eq!(status, expected, "{name} with {length} bytes, {sent:?}");
            }
        }
    }
}

/// Goal: ranges behind the counted ones are not carried out. Method: the next ones in the list are
/// good, and name blocks that must stay.
#[test]
fn ranges_beyond_the_count_are_ignored() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    let ones = vec![1; 64 * BLOCK as usize];
    let write = ReadWrite::new(0, 64).to_sqe(opcode::WRITE, 900, 1);
    let status = rig.send_payload(io, write, &ones, 64 * BLOCK, SendMethod::Fetched);
    assert!(status.is_success(), "{status}");
    let ranges: Vec<DsmRange> = (0..256).map(|at| DsmRange::new(at % 64, 1)).collect();
    let dsm = DatasetManagement {
        ranges: 3,
        deallocate: true,
        ..DatasetManagement::default()
    };
    let status = rig.send_payload(
        io,
        dsm.to_sqe(901, 1),
        ranges.as_bytes(),
        4096,
        SendMethod::Fetched,
    );
    assert!(status.is_success(), "{status}");
    let sources: Vec<CopyRange0> = (0..128).map(|_| CopyRange0::new(0, 4)).collect();
    let copy = copy_of(63, 1).to_sqe(902, 1);
    let status = rig.send_payload(io, copy, sources.as_bytes(), 4096, SendMethod::Fetched);
    assert!(status.is_success(), "{status}");
    let read = ReadWrite::new(0, 72).to_sqe(opcode::READ, 903, 1);
    let length = 72 * BLOCK;
    let response = rig.call(io, read.with_sgl(Sgl::Transport { length }), &[]);
    let data: Vec<u8> = response
        .data
        .iter()
        .flat_map(|part| part.to_vec())
        .collect();
    let set: Vec<bool> = data
        .chunks(BLOCK as usize)
        .map(|block| block[0] != 0)
        .collect();
    let expected = |at: usize| match at {
        0..3 => false,
        // The source starts with three blocks of zeroes.
        63..66 => false,
        66 => true,
        at => at < 64,
    };
    let expected: Vec<bool> = (0..72).map(expected).collect();
    assert_eq!(set, expected);
}

/// Goal: data of blocks has the length that the command says, not one byte more or less.
#[test]
fn blocks_are_exact() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    for op in [opcode::READ, opcode::WRITE, opcode::COMPARE] {
        for (length, expected) in [
            (2 * BLOCK - 1, TOO_SHORT_OR_LONG),
            (2 * BLOCK, StatusCode::SUCCESS),
            (2 * BLOCK + 1, TOO_SHORT_OR_LONG),
            (3 * BLOCK, TOO_SHORT_OR_LONG),
        ] {
            let sqe = ReadWrite::new(0, 2).to_sqe(op, rig.cid(), 1);
            let zeroes = vec![0; length as usize];
            let status = rig.status(io, sqe.with_sgl(Sgl::Transport { length }), &zeroes);
            assert_eq!(status, expected, "{op:#x} with {length} bytes");
        }
    }
}

/// Goal: a host that offers more room than a command fills gets the bytes that it asked for; one
/// that offers less is refused.
#[test]
fn room_may_be_larger() {
    let mut rig = Rig::with_malloc();
    let (admin, cntlid) = rig.admin();
    let io = rig.io_queue(cntlid, 1);
    let page = |lid, bytes| GetLogPage::new(lid, bytes, 0).to_sqe(0, u32::MAX);
    let report = Report {
        bytes: 64,
        extended: true,
    };
    let host_id = GetFeatures {
        cdw11: 1,
        ..GetFeatures::new(fid::HOST_IDENTIFIER)
    };
    let cases = [
        (
            "Identify",
            admin,
            Identify::new(cns::CONTROLLER).to_sqe(0, 0),
            4096,
        ),
        ("Health", admin, page(lid::SMART_HEALTH, 512), 512),
        ("Errors", admin, page(lid::ERROR_INFORMATION, 64), 64),
        // nvme-cli rounds 511 bytes down to 127 dwords, and offers 511.
        ("Health in part", admin, page(lid::SMART_HEALTH, 508), 508),
        ("Host Identifier", admin, host_id.to_sqe(0, 0), 16),
        ("Reservation Report", io, report.to_sqe(0, 1), 64),
    ];
    for (name, conn, command, need) in cases {
        for (length, expected) in [
            (need - 1, Err(TOO_SHORT_OR_LONG)),
            (need, Ok(need)),
            (need + 3, Ok(need)),
            (2 * MAX_TRANSFER, Ok(need)),
        ] {
            let mut sqe = command;
            sqe.cid = rig.cid().into();
            let outcome = rig.offer(conn, sqe, length);
            assert_eq!(outcome, expected, "{name} with room for {length} bytes");
        }
    }
}

/// Goal: structures of admin commands and of Connect may come in a longer payload, within a buffer
/// of admin commands.
#[test]
fn structures_may_be_longer() {
    const MOST: u32 = 8192;
    let mut rig = Rig::with_malloc();
    let (admin, _) = rig.admin();
    let behavior = SetFeatures::new(fid::HOST_BEHAVIOR_SUPPORT, 0);
    for (length, expected) in [
        (511, TOO_SHORT_OR_LONG),
        (512, StatusCode::SUCCESS),
        (4096, StatusCode::SUCCESS),
        (MOST, StatusCode::SUCCESS),
        (MOST + 1, TOO_SHORT_OR_LONG),
    ] {
        for sent in [SendMethod::Fetched, SendMethod::InCapsule] {
            if sent == SendMethod::InCapsule && length > MOST {
                continue;
            }
            let sqe = behavior.to_sqe(rig.cid(), 0);
            let status = rig.send_payload(admin, sqe, &[0; 512], length, sent);
            assert_eq!(
                status, expected,
                "Set Features with {length} bytes, {sent:?}"
            );
        }
    }
    for (length, expected) in [
        (1023, TOO_SHORT_OR_LONG),
        (1024, StatusCode::SUCCESS),
        (4096, StatusCode::SUCCESS),
        (MOST, StatusCode::SUCCESS),
        (MOST + 1, TOO_SHORT_OR_LONG),
    ] {
        let data = ConnectData::new([1; 16], 0xffff, &nqn(SUBNQN), &nqn(HOSTNQN));
        let connect = Connect {
            qid: 0,
            sqsize: 31,
            attributes: ConnectAttributes::empty(),
            priority_class: 0,
            kato_ms: 15_000,
        };
        let conn = rig.open();
        let sqe = connect.to_sqe(rig.cid(), Sgl::Transport { length });
        let status = rig.send_payload(conn, sqe, data.as_bytes(), length, SendMethod::Fetched);
        assert_eq!(status, expected, "Connect with {length} bytes");
    }
}
