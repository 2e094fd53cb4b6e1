//! Get LBA Status: the list of allocated blocks, whose device answers when it likes.

use nacre_bdev::Status;
use nacre_bdev::listing::{AllocatedRanges, ListQuery};
use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::commands::lba_status::{
    GetLbaStatus, LbaStatusDescriptor, LbaStatusHeader, action,
};
use nacre_nvmf_wire::identify::cns;
use nacre_nvmf_wire::identify::controller::{Aocs, NvmController};
use nacre_nvmf_wire::{Sgl, Sqe};
use zerocopy::FromBytes;

use super::host::INVALID;
use super::rig::*;
use super::scripted::rig_scripted;
use crate::transport::{ConnId, Response};

/// Asks for all blocks from block 8 on, with room for two descriptors.
const ALL: GetLbaStatus = GetLbaStatus {
    slba: 8,
    dwords: 10,
    action: action::ALLOCATED,
    range_length: 0,
};

impl Rig {
    fn lba_status(&mut self, command: GetLbaStatus, nsid: u32) -> Sqe {
        let length = command.bytes() as u32;
        let sqe = command.to_sqe(self.cid(), nsid);
        sqe.with_sgl(Sgl::Transport { length })
    }

    fn begin(&mut self, conn: ConnId, command: GetLbaStatus) {
        let sqe = self.lba_status(command, 1);
        self.send(conn, sqe, None);
        (0..3).for_each(|_| self.turn());
        assert!(self.answers().is_empty(), "the device has not answered");
    }
}

/// The completion condition, and first and number of blocks of each descriptor.
fn list(response: &Response) -> (u8, Vec<(u64, u64)>) {
    assert!(response.cqe.status().is_success());
    let data: Vec<u8> = response.data.iter().flat_map(|p| p.to_vec()).collect();
    let (header, rest) = LbaStatusHeader::read_from_prefix(&data).unwrap();
    let count = header.count.get() as usize;
    let (used, unused) = rest.split_at(count * LbaStatusDescriptor::SIZE);
    assert!(unused.iter().all(|byte| *byte == 0));
    let descriptors = used.chunks_exact(LbaStatusDescriptor::SIZE).map(|bytes| {
        let descriptor = LbaStatusDescriptor::read_from_bytes(bytes).unwrap();
        assert_eq!(descriptor.status, 2);
        let blocks = u64::from(descriptor.blocks.get()) + 1;
        (descriptor.dslba.get(), blocks)
    });
    (header.condition, descriptors.collect())
}

/// Goal: the command completes when the device has answered, on whichever thread, with its ranges;
/// a failure of the device is one that another path may not have.
#[test]
fn the_device_answers_later() {
    let (mut rig, scripted) = rig_scripted();
    let (conn, _) = rig.admin();
    rig.begin(conn, ALL);
    let (query, answer) = scripted.lists.lock().pop().unwrap();
    assert_eq!(
        query,
        ListQuery {
            range: 8..BLOCKS,
            most: 2
        }
    );
    let found = AllocatedRanges {
        ranges: vec![16..32, 100..101],
        is_complete: false,
    };
    let answers = std::thread::spawn(move || answer.give(Ok(found)));
    answers.join().unwrap();
    rig.turn();
    assert_eq!(list(&rig.answer()), (1, vec![(16, 16), (100, 1)]));

    let part = GetLbaStatus {
        slba: 100,
        range_length: 5,
        ..ALL
    };
    rig.begin(conn, part);
    let (query, answer) = scripted.lists.lock().pop().unwrap();
    assert_eq!(query.range, 100..105);
    let nothing = AllocatedRanges {
        ranges: vec![],
        is_complete: true,
    };
    answer.give(Ok(nothing));
    rig.turn();
    assert_eq!(list(&rig.answer()), (2, vec![]));

    rig.begin(conn, ALL);
    let (_, answer) = scripted.lists.lock().pop().unwrap();
    answer.give(Err(Status::Retry));
    rig.turn();
    let busy = StatusCode::NAMESPACE_NOT_READY;
    assert_eq!(rig.answer().cqe.status(), busy);
    rig.begin(conn, ALL);
    // Lost.
    scripted.lists.lock().clear();
    rig.turn();
    let gone = StatusCode::INTERNAL_PATH_ERROR;
    assert_eq!(rig.answer().cqe.status(), gone);
}

/// Goal: an answer for a host that is gone is dropped, and its buffer is free before.
#[test]
fn the_host_goes_first() {
    let (mut rig, scripted) = rig_scripted();
    let (conn, _) = rig.admin();
    rig.begin(conn, ALL);
    rig.hang_up(conn);
    rig.assert_clean();
    let (_, answer) = scripted.lists.lock().pop().unwrap();
    answer.give(Ok(AllocatedRanges::default()));
    rig.turn();
    assert!(rig.answers().is_empty());
    rig.assert_clean();
}

/// Goal: a device that knows of no free block has one range; other questions are refused.
#[test]
fn all_blocks_and_refusals() {
    let mut rig = Rig::with_malloc();
    let (conn, _) = rig.admin();
    let id: NvmController = rig.identify(conn, cns::IO_CONTROLLER, 0).unwrap();
    assert_eq!(id.aocs.get(), Aocs::ALLOCATED_BLOCKS.bits());
    let sqe = rig.lba_status(ALL, 1);
    assert_eq!(list(&rig.call(conn, sqe, &[])), (2, vec![(8, BLOCKS - 8)]));

    let out_of_range = StatusCode::LBA_OUT_OF_RANGE.with_dnr();
    let last = BLOCKS - 1;
    for (slba, range_length, action, expected) in [
        (last, 1, action::ALLOCATED, StatusCode::SUCCESS),
        (last, 2, action::ALLOCATED, out_of_range),
        (BLOCKS, 0, action::ALLOCATED, out_of_range),
        (u64::MAX, 2, action::ALLOCATED, out_of_range),
        (0, 0, action::SCAN, INVALID),
        (0, 0, action::TRACKED, INVALID),
        (0, 0, 0, INVALID),
    ] {
        let command = GetLbaStatus {
            slba,
            action,
            range_length,
            ..ALL
        };
        let sqe = rig.lba_status(command, 1);
        assert_eq!(rig.status(conn, sqe, &[]), expected, "{command:?}");
    }
    for nsid in [0, 2, u32::MAX] {
        let sqe = rig.lba_status(ALL, nsid);
        let invalid = StatusCode::INVALID_NAMESPACE_OR_FORMAT.with_dnr();
        assert_eq!(rig.status(conn, sqe, &[]), invalid, "{nsid}");
    }
    let large = GetLbaStatus {
        dwords: 1 << 32,
        ..ALL
    };
    let sqe = large.to_sqe(rig.cid(), 1);
    assert_eq!(rig.status(conn, sqe, &[]), INVALID);
}
